"""`polyturn accept`: keep a stage's outputs after an edit of code that does not change them, and record that."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

from polyturn.login import user
from polyturn.pipeline import accepted, plan
from polyturn.pipeline.accepted import Acceptance
from polyturn.pipeline.plan import StagePlan


class AcceptError(ValueError):
    """The outputs cannot be accepted; the message says what to do instead."""


def accept(root: Path, stage: str, *, reason: str, with_params: bool = False) -> Acceptance:
    """Tell DVC that the outputs of `stage` belong to the code as it is now (`dvc commit`), and record who said why.

    `with_params`: also to the params as they are now.

    Raises:
        AcceptError: the stage is unknown or up to date, its data or outputs have changed (then it has to run), or DVC fails.
    """
    if not reason.strip():
        raise AcceptError("--reason must say why the edit does not change the outputs")
    _check(_planned(root, stage), with_params=with_params)
    before = accepted.digests(accepted.locked(root)[stage], "deps")
    done = subprocess.run(
        [sys.executable, "-m", "dvc", "commit", "--force", stage],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise AcceptError(f"dvc commit {stage}: {' '.join(done.stderr.split())}")
    now = accepted.locked(root)[stage]
    after = accepted.digests(now, "deps")
    acceptance = Acceptance(
        stage=stage,
        reason=reason.strip(),
        by=user(),
        at=datetime.now(UTC).isoformat(timespec="seconds"),
        commit=_commit(root),
        files={p: (before.get(p, ""), md5) for p, md5 in after.items() if before.get(p) != md5},
        outs=accepted.digests(now, "outs"),
    )
    accepted.append(root, acceptance)
    return acceptance


def _planned(root: Path, stage: str) -> StagePlan:
    stages = {planned.name: planned for planned in plan.read(root).stages}
    if stage not in stages:
        raise AcceptError(f"dvc.yaml has no stage {stage!r}, only {', '.join(stages)}")
    return stages[stage]


def _check(planned: StagePlan, *, with_params: bool) -> None:
    if not planned.reasons:
        raise AcceptError(f"{planned.name} is up to date: there is nothing to accept")
    kinds = {"code", "param"} if with_params else {"code"}
    others = [str(reason) for reason in planned.reasons if reason.kind not in kinds]
    if not others:
        return
    hint = (
        "; --with-params accepts values of params too"
        if "param" in {r.kind for r in planned.reasons}
        else ""
    )
    raise AcceptError(
        f"{planned.name} is stale for more than its code, so that it has to run: "
        f"{', '.join(' '.join(other.split()) for other in others[:5])}{hint}"
    )


def _commit(root: Path) -> str:
    done = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "no commit"
