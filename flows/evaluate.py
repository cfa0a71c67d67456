"""The flow `evaluate`: score a policy (a registry's version, a directory) on held-out problems, in a worktree of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from prefect import flow, get_run_logger, task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from pydantic import BaseModel, ConfigDict, Field, JsonValue

from flows.cancelling import watched
from flows.place import ROOT, Place, identify, open_worktree
from polyturn.pipeline import workspace
from polyturn.policy import family
from polyturn.supported import check_supported
from tasks.failure import FAILURE, USER_ERROR, Outcome
from tasks.stage import StageFailedError, run_dvc_stage

_BEFORE = ("fetch", "images", "model")  # stages that problems come from
_GRACE_S = 5.0


class EvaluationRequest(BaseModel):
    """What is scored and on what, as `polyturn evaluate` takes it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    split: Literal["train", "validation", "test"] = "test"
    num: Annotated[int, Field(ge=1)] | None = None  # the first problems only
    greedy: bool = False
    ablate_images: bool = False

    def arguments(self, policy: str) -> list[str]:
        """The command line."""
        flags = {"--greedy": self.greedy, "--ablate-images": self.ablate_images}
        return [
            "--policy", policy, "--split", self.split, *(["--num", str(self.num)] if self.num else []),
            *(flag for flag, is_set in flags.items() if is_set),
        ]  # fmt: skip


@flow(name="evaluate", validate_parameters=True)
def evaluate(
    policy: str = "champion",
    request: EvaluationRequest | None = None,
    recipe: str | None = None,
    overrides: dict[str, JsonValue] | None = None,
    revision: str | None = None,
    owner: str | None = None,
) -> list[str] | State[list[str]]:
    """Score `policy` and return what was found, a line each.

    Args:
        policy: an alias of registry.name (champion), MODEL@ALIAS, MODEL/VERSION, or a directory.
        request: split, number of problems, greedy, with blank pictures for comparison.
        recipe, overrides, revision, owner: as of the flow `pipeline`; they say what the problems are.

    Raises:
        ParamsError: recipe or overrides are wrong; nothing has been touched.
        StageFailedError: the problems cannot be made, or scoring failed.
    """
    plan = workspace.compose(ROOT, recipe=recipe, overrides=overrides or {})
    check_supported(plan.params)
    identity = identify(revision, owner)
    opened = open_worktree(identity, plan.changes, is_head=revision is None)
    return watched(partial(_work, opened, policy, request or EvaluationRequest()))


def _work(
    opened: AbstractContextManager[Place], policy: str, request: EvaluationRequest
) -> list[str]:
    with opened as place:
        for stage in _BEFORE:
            run_dvc_stage(stage, place.root, {})
        lines = score(place.root, request.arguments(policy))
    workspace.remove(ROOT, place.root)
    table = "\n".join(f"    {line}" for line in lines)
    create_markdown_artifact(f"{policy}\n\n{table}", key="evaluation", description="Scores")
    return lines


@task(name="score", task_run_name="score", cache_policy=NO_CACHE)
def score(root: Path, arguments: Sequence[str]) -> list[str]:
    """Run `polyturn evaluate` in the checkout `root`; its lines."""
    mark = family.new_mark()
    command = [sys.executable, "-m", "polyturn.cli", "evaluate", *arguments]
    process = subprocess.Popen(
        command,
        cwd=root,
        env={**os.environ, family.MARK: mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        output, errors = process.communicate()
    except BaseException:
        family.end(mark, grace_s=_GRACE_S)
        raise
    if process.returncode:
        said = [
            line for line in errors.splitlines() if line.startswith("error:")
        ] or errors.splitlines()[-1:]
        code = USER_ERROR if process.returncode == USER_ERROR else FAILURE
        raise StageFailedError("evaluate", Outcome(code, " ".join(said)))
    for line in output.splitlines():
        get_run_logger().info(line)
    return output.splitlines()
