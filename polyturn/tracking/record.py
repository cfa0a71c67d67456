"""What every run is opened with: tags that say who, where and which code, and files to build it again from."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from polyturn import layout
from polyturn.login import user
from polyturn.tracking.environment import Environment
from polyturn.tracking.orphans import owner_tags
from polyturn.tracking.redact import redact

if TYPE_CHECKING:
    from polyturn.tracking.run import Run

ENVIRONMENT = "environment"  # folder of the run's artifacts
RECORD = "environment.json"
REQUIREMENTS = "requirements.txt"
DIFF = "uncommitted.diff"
_MAX_TAG = 5000


def start_tags(
    environment: Environment, stage: str | None, parent_run_id: str | None
) -> dict[str, str]:
    """Tags of a run at its start."""
    tags = {
        **owner_tags(),
        "mlflow.user": user(),
        "mlflow.source.name": redact(" ".join(sys.argv)).text[:_MAX_TAG],
        "mlflow.source.type": "LOCAL",
        "git.dirty": str(bool(environment.diff)).lower(),
        "cpu.model": environment.cpu_model,
        "python": environment.python,
        **{f"version.{name}": version for name, version in environment.named_versions().items()},
    }
    if environment.gpus:
        tags["gpu.model"] = ", ".join(gpu.name for gpu in environment.gpus)[:_MAX_TAG]
    if environment.commit:
        tags["mlflow.source.git.commit"] = environment.commit
    if environment.branch:
        tags["mlflow.source.git.branch"] = environment.branch
    if stage:
        tags["stage"] = stage
    if parent_run_id:
        tags["mlflow.parentRunId"] = parent_run_id
    return tags


def log_environment(run: Run, environment: Environment, root: Path) -> None:
    """Files below `environment/`: the record, pinned requirements, the diff (applies to the commit with `git apply`
    unless the tag `diff.redacted` says that secrets were taken out of it), params.yaml, and dvc.lock at the start.
    """
    record = asdict(environment)
    texts = {DIFF: str(record.pop("diff")), REQUIREMENTS: environment.requirements()}
    for path in (layout.PARAMS, layout.DVC_LOCK):
        if (root / path).is_file():
            texts[path.name] = (root / path).read_text()
    clean = {name: redact(text) for name, text in texts.items()}
    clean[RECORD] = redact(json.dumps(record, indent=1))
    with TemporaryDirectory() as directory:
        for name, found in clean.items():
            if found.text:
                (Path(directory) / name).write_bytes(found.text.encode(errors="surrogateescape"))
        run.log_artifact(Path(directory), ENVIRONMENT)
    if clean[DIFF].count:
        run.set_tags({"diff.redacted": clean[DIFF].count})
