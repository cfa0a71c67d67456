"""Have the Prefect server tell an address of failed runs and new champions: scripts/notifications.py URL.

URL gets a POST with JSON {"subject", "body"}; for Slack, Teams, e-mail and others make one of Prefect's notification
blocks instead and name it: scripts/notifications.py --block slack-webhook/team.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from uuid import UUID

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from polyturn import environment  # noqa: E402 - before Prefect reads its settings

environment.apply(ROOT)

from prefect.blocks.core import Block  # noqa: E402
from prefect.blocks.notifications import CustomWebhookNotificationBlock  # noqa: E402
from prefect.client.orchestration import get_client  # noqa: E402

from flows import automations  # noqa: E402

_NAME = "polyturn"


def block_for(url: str) -> UUID:
    """A block that posts to `url`."""
    block = CustomWebhookNotificationBlock(
        name=_NAME, url=url, json_data={"subject": "{{subject}}", "body": "{{body}}"}
    )
    return _id(block.save(_NAME, overwrite=True))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url", nargs="?", help="where to POST")
    parser.add_argument("--block", metavar="TYPE/NAME", help="a notification block that there is")
    chosen = parser.parse_args(arguments)
    if bool(chosen.url) == bool(chosen.block):
        parser.error("name either a URL or a --block")
    block = (
        block_for(chosen.url) if chosen.url else _id(Block.load(chosen.block)._block_document_id)
    )
    with get_client(sync_client=True) as client:
        automations.put(
            client, [automations.tell_of_failures(block), automations.tell_of_promotions(block)]
        )
    print("failed runs and new champions are told; the automations are in Prefect's UI")
    return 0


def _id(found: object) -> UUID:
    if not isinstance(found, UUID):
        raise TypeError(f"Prefect gave no id of the block but {found!r}")
    return found


if __name__ == "__main__":
    sys.exit(main())
