"""A small receiver: when MLflow tells that an alias moved, the deployment that scores the champion is started."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from prefect.deployments import run_deployment

from flows import events
from polyturn import layout, params
from polyturn.tracking import webhooks
from polyturn.tracking.store import connect
from polyturn.tracking.webhooks import AliasMove, WebhookError
from tasks.context import imports_are_done

SECRET_VARIABLE = "POLYTURN_WEBHOOK_SECRET"
DEPLOYMENT = "evaluate/champion"

_MAX_BODY = 100_000
_log = logging.getLogger(__name__)


def start_evaluation(move: AliasMove) -> None:
    """Start the deployment for the version that is champion now; a message that comes twice starts one run."""
    run_deployment(
        DEPLOYMENT,
        parameters={"policy": f"{move.model}/{move.version}"},
        timeout=0,
        idempotency_key=f"alias-{move.delivery}",
        tags=[f"{move.alias}:v{move.version}"],
    )
    events.promoted(name=move.model, version=move.version, alias=move.alias)


def serve(
    address: tuple[str, int], secret: str, *, alias: str, react: Callable[[AliasMove], None]
) -> ThreadingHTTPServer:
    """A server that calls `react` for moves of `alias`; 403 for what is not MLflow's, 500 where `react` fails, so that
    MLflow sends the message again."""

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:  # the name that http.server looks for
            length = min(int(self.headers.get("Content-Length", 0)), _MAX_BODY)
            body = self.rfile.read(length)
            self.send_response(_answer(dict(self.headers), body, secret, alias, react))
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name there
            _log.debug(format, *args)

    return ThreadingHTTPServer(address, Receiver)


def _answer(
    headers: dict[str, str],
    body: bytes,
    secret: str,
    alias: str,
    react: Callable[[AliasMove], None],
) -> int:
    known = {name.lower(): value for name, value in headers.items()}
    names = (webhooks.DELIVERY_HEADER, webhooks.TIME_HEADER, webhooks.SIGNATURE_HEADER)
    signed = {name: known.get(name.lower(), "") for name in names}
    try:
        move = webhooks.read_message(signed, body, secret, now_s=time.time())
    except WebhookError as error:
        _log.warning("refused: %s", error)
        return 403
    if move.alias != alias:
        return 204
    try:
        react(move)
    except Exception:  # the boundary: a message must not end the receiver
        _log.exception("%s of %s v%d started nothing", move.alias, move.model, move.version)
        return 500
    _log.info("%s is %s v%d: started %s", move.alias, move.model, move.version, DEPLOYMENT)
    return 202


def main(arguments: list[str] | None = None) -> int:
    """Subscribe at the MLflow server of params.yaml, then receive; exit 2 for what the user has to mend."""
    imports_are_done()
    parser = argparse.ArgumentParser(prog="python -m flows.alias_webhook", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1", help="where to listen (%(default)s)")
    parser.add_argument("--port", type=int, default=8770, help="(%(default)s)")
    parser.add_argument("--alias", default="champion", help="(%(default)s)")
    parser.add_argument(
        "--url", help="how MLflow reaches this; given: the webhook is registered there first"
    )
    chosen = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    secret = os.environ.get(SECRET_VARIABLE, "")
    try:
        if not secret:
            raise ValueError(
                f"{SECRET_VARIABLE} must hold the secret that messages are signed with"
            )
        if chosen.url:
            loaded = params.load(layout.PARAMS)
            store = connect(loaded.tracking, Path.cwd())
            webhooks.subscribe(store, f"polyturn-{chosen.alias}", chosen.url, secret)
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    server = serve((chosen.host, chosen.port), secret, alias=chosen.alias, react=start_evaluation)
    with server:
        _log.info("listening on %s:%d", *server.server_address[:2])
        server.serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main())
