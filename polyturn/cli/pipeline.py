"""Commands of `polyturn` about runs of the pipeline: plan, accept, storage, launch, doctor."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

Command = Callable[[str, str], argparse.ArgumentParser]


def add(command: Command) -> None:
    """Add these subcommands; `command(name, about)` makes the parser of one."""
    plan = command(
        "plan", "say which stages would run again, why, and what time and cost to expect"
    )
    plan.add_argument("--diff", action="store_true", help="also show the changed lines of code")
    plan.set_defaults(run=_plan)
    accept = command(
        "accept", "keep a stage's outputs after an edit of code that does not change them"
    )
    accept.add_argument("stage", metavar="STAGE")
    accept.add_argument(
        "--reason", required=True, help="why; recorded in accepted.jsonl and MLflow"
    )
    accept.add_argument(
        "--with-params", action="store_true", help="also after changes of the stage's params"
    )
    accept.set_defaults(run=_accept)
    storage = command("storage", "make storage.url DVC's remote in this checkout or clone")
    storage.set_defaults(run=_storage)
    launch = command("launch", "show the training job that train.launcher renders")
    launch.add_argument(
        "--dry-run", action="store_true", required=True, help="print it; submitting it is yours"
    )
    launch.set_defaults(run=_launch)
    doctor = command(
        "doctor", "check versions, GPU, disk, stores, servers, data and the newest model"
    )
    doctor.set_defaults(run=_doctor)


def _plan(chosen: argparse.Namespace) -> int:
    from polyturn.pipeline import plan

    print("\n".join(plan.lines(plan.read(Path.cwd()), with_diffs=chosen.diff)))
    return 0


def _accept(chosen: argparse.Namespace) -> int:
    from polyturn import layout
    from polyturn.pipeline.accept import accept

    done = accept(Path.cwd(), chosen.stage, reason=chosen.reason, with_params=chosen.with_params)
    print(f"{done.stage}: outputs kept after edits of {', '.join(done.files) or 'params'}")
    print(f"commit {layout.DVC_LOCK} and {layout.ACCEPTED} with the edit")
    return 0


def _storage(chosen: argparse.Namespace) -> int:
    from polyturn import layout, params
    from polyturn.pipeline.bootstrap import bootstrap

    del chosen
    url = params.load(layout.PARAMS).storage.url
    if url is None:
        raise ValueError(
            "storage.url is null; `polyturn use --set storage.url=s3://BUCKET/PREFIX` (and storage.endpoint_url for a "
            "server other than AWS) names the bucket"
        )
    bootstrap(Path.cwd())
    print(f"dvc push and pull use {url} (.dvc/config.local)")
    return 0


def _launch(chosen: argparse.Namespace) -> int:
    from polyturn import layout, params
    from polyturn.pipeline import launch

    del chosen
    print(launch.render(params.load(layout.PARAMS), Path.cwd()), end="")
    return 0


def _doctor(_: argparse.Namespace) -> int:
    from polyturn.pipeline import doctor

    site = doctor.site_of(Path.cwd())
    findings, allowed = doctor.examine(site), site.params.doctor.allow
    print(doctor.told(findings, allowed, with_colour=sys.stdout.isatty()))
    return 0 if doctor.is_healthy(findings, allowed) else 1
