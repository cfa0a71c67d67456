"""Runs: what is logged, and the status they end with on every way out (PIPE-01, PIPE-02)."""

import asyncio
import json
import math
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from polyturn.params import Params, TrackingParams
from polyturn.tracking import TrackingError, open_run
from polyturn.tracking.orphans import close_orphans
from polyturn.tracking.run import attach_run, flatten
from polyturn.tracking.series import gathered
from tests.unit.tracking.stored import stored_runs

TRACKING = TrackingParams()


def test_params_metrics_tags_datasets_and_artifacts_are_stored(project: Path):
    with open_run(TRACKING, root=project, name="train", stage="train", tags={"x": "y"}) as run:
        run.log_params(Params())
        for step in (1, 2):
            run.log_metrics({"rollout/reward": 0.25 * step, "eval/pass@4": 0.5, "none": None}, step)
        run.log_dataset("problems", "artifacts/problems", "0" * 32 + ".dir")
        (project / "curve.csv").write_text("step\n1\n")
        run.log_artifact(project / "curve.csv")
        run.log_text("hello", "notes/note.txt")
    client = run.store.client
    stored = client.get_run(run.run_id)
    assert stored.info.status == "FINISHED"
    assert stored.data.params["loss.clip_high"] == "0.28"
    assert stored.data.params["loss.normalize_std"] == "true"
    assert stored.data.params["learner.betas"] == "[0.9, 0.98]"
    history = client.get_metric_history(run.run_id, "rollout/reward")
    assert [(m.step, m.value) for m in history] == [(1, 0.25), (2, 0.5)]
    shown = {name for name in stored.data.metrics if not name.startswith("system/")}
    assert shown == {"rollout/reward", "eval/pass_at_4"}
    assert "system/system_memory_usage_megabytes" in stored.data.metrics, "one sample at least"
    assert stored.data.tags["x"] == "y"
    assert stored.inputs.dataset_inputs[0].dataset.digest == "0" * 32 + ".dir"
    names = {file.path for file in client.list_artifacts(run.run_id)}
    assert names == {"curve.csv", "notes", "environment"}
    assert Path(run.artifact_uri.removeprefix("file://"), "curve.csv").read_text() == "step\n1\n"


def test_steps_that_are_sent_together_stand_in_the_history_with_their_own_times(project: Path):
    """Also those before an error, and NaN is no point."""
    with open_run(TRACKING, root=project, name="warmstart") as run:
        history = partial(run.store.client.get_metric_history, run.run_id, "loss")
        with suppress(KeyError), gathered(run) as log:
            for step in range(23):
                log({"loss": 1 / (step + 1), "gate": math.nan}, step)
                assert len(history()) == (20 if step >= 19 else 0)
            raise KeyError
    points = history()
    assert [(m.step, m.value) for m in points] == [(n, 1 / (n + 1)) for n in range(23)]
    assert points[0].timestamp <= points[19].timestamp <= points[22].timestamp
    latest = run.store.client.get_run(run.run_id).data.metrics
    assert latest["loss"] == 1 / 23
    assert "gate" not in latest


def test_a_step_sent_again_with_its_first_time_is_one_point(project: Path):
    with open_run(TRACKING, root=project, name="train") as run:
        for _ in range(2):
            run.log_metrics({"rollout/reward": 0.25}, 1, at_ms=1_700_000_000_000)
        run.log_metrics({"rollout/reward": 0.5}, 2, at_ms=1_700_000_000_500)
        other = attach_run(TRACKING, root=project, run_id=run.run_id)
        other.log_metrics({"rollout/reward": 0.5}, 2, at_ms=1_700_000_000_500)
    history = run.store.client.get_metric_history(run.run_id, "rollout/reward")
    assert [(m.step, m.value, m.timestamp - 1_700_000_000_000) for m in history] == [
        (1, 0.25, 0),
        (2, 0.5, 500),
    ]
    assert other.artifact_uri == run.artifact_uri
    with pytest.raises(TrackingError, match="run 0000 is not in"):
        attach_run(TRACKING, root=project, run_id="0000")


def test_stage_runs_are_nested_below_their_parent(project: Path):
    with (
        open_run(TRACKING, root=project, name="pipeline") as parent,
        open_run(
            TRACKING, root=project, name="train", stage="train", parent_run_id=parent.run_id
        ) as child,
    ):
        pass
    tags = child.store.client.get_run(child.run_id).data.tags
    assert tags["mlflow.parentRunId"] == parent.run_id
    assert tags["stage"] == "train"


def test_environment_and_uncommitted_diff_are_kept(project: Path):
    for command in (
        ["init", "-q"],
        ["add", "-A"],
        ["-c", "user.name=n", "-c", "user.email=e@example.org", "commit", "-q", "-m", "first"],
    ):
        (project / "code.py").write_text("a = 1\n")
        (project / ".gitignore").write_text("mlflow.db*\nmlartifacts\n")
        subprocess.run(["git", *command], cwd=project, check=True)
    (project / "code.py").write_text("a = 2\n")
    (project / "new.txt").write_text("")
    with open_run(TRACKING, root=project, name="train") as run:
        pass
    directory = Path(run.artifact_uri.removeprefix("file://")) / "environment"
    diff = (directory / "uncommitted.diff").read_text()
    assert "+a = 2" in diff
    assert "new.txt" in diff
    assert "password" not in (directory / "requirements.txt").read_text()
    record = json.loads((directory / "environment.json").read_text())
    assert record["untracked"] == ["new.txt"]
    assert record["packages"]["numpy"]
    assert record["cpu_model"]
    tags = run.store.client.get_run(run.run_id).data.tags
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=project, check=True, capture_output=True, text=True
    )
    assert tags["mlflow.source.git.commit"] == head.stdout.strip()
    assert tags["git.dirty"] == "true"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ValueError("reward term failed at step 2"), "FAILED"),
        (RuntimeError("out of memory"), "FAILED"),
        (asyncio.CancelledError("cancelled"), "FAILED"),
        (SystemExit(2), "FAILED"),
        (SystemExit("message"), "FAILED"),
        (SystemExit(143), "KILLED"),
        (SystemExit(130), "KILLED"),
        (KeyboardInterrupt(), "KILLED"),
        (SystemExit(0), "FINISHED"),
    ],
)
def test_the_run_ends_as_its_block_does(project: Path, error: BaseException, status: str):
    with pytest.raises(type(error)), open_run(TRACKING, root=project, name="train"):
        raise error
    (run,) = stored_runs(project)
    assert run.info.status == status
    assert run.info.end_time is not None
    if status == "FAILED":
        assert run.data.tags["error.class"] == type(error).__name__
        assert run.data.tags["error.message"] == str(error)
    else:
        assert "error.class" not in run.data.tags


def test_a_signal_waits_until_what_is_being_written_is_written(
    project: Path, monkeypatch: pytest.MonkeyPatch
):
    """Else SQLite stays locked, and the run open."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(143)

    before = signal.signal(signal.SIGTERM, end)
    written: list[str] = []
    try:
        with suppress(SystemExit), open_run(TRACKING, root=project, name="train") as run:
            log_batch = run.store.client.log_batch

            def cut(*arguments: object, **named: object) -> None:
                signal.raise_signal(signal.SIGTERM)
                log_batch(*arguments, **named)
                written.append("whole")

            with monkeypatch.context() as patched:
                patched.setattr(run.store.client, "log_batch", cut)
                run.log_metrics({"loss": 1.0}, 1)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert written == ["whole"]
    stored = run.store.client.get_run(run.run_id)
    assert (stored.info.status, stored.data.metrics["loss"]) == ("KILLED", 1.0)


SCRIPT = """
import signal, sys, time
from functools import partial
from pathlib import Path
from polyturn.params import TrackingParams
from polyturn.tracking import open_run
def end(number, frame):
    raise SystemExit(143)
signal.signal(signal.SIGTERM, end)
with open_run(TrackingParams(), root=Path(sys.argv[1]), name="train") as run:
    run.log_metrics({"rollout/reward": 0.5}, 1)
    print("logged", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize(
    ("number", "left_as", "code"),
    [(signal.SIGTERM, "KILLED", 143), (signal.SIGKILL, "RUNNING", -9)],
)
def test_signalled_runs_end_at_once_or_at_the_next_start(
    project: Path, number: int, left_as: str, code: int
):
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(project)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "logged\n"
    os.kill(process.pid, number)
    assert process.wait(30) == code
    process.stdout.close()
    (run,) = stored_runs(project)
    assert run.info.status == left_as
    assert run.data.metrics["rollout/reward"] == 0.5
    with open_run(TRACKING, root=project, name="next") as later:
        runs = {run.info.run_name: run.info.status for run in stored_runs(project)}
        assert runs == {"train": "KILLED", "next": "RUNNING"}
    assert later.run_id


def test_a_refused_call_names_the_address(project: Path):
    with open_run(TRACKING, root=project, name="train") as run:
        run.log_params({"a": 1})
        with pytest.raises(TrackingError, match=r"tracking\.uri 'sqlite:///.*refused"):
            run.log_params({"a": 2})


def test_names_are_flattened_with_dots():
    assert flatten({"a": {"b": {"c": 1.5}}, "d": [1, {"e": None}], "f": {}, "g": None}) == {
        "a.b.c": "1.5",
        "d": '[1, {"e": null}]',
        "f": "{}",
        "g": "null",
    }


def test_nothing_that_is_recorded_holds_a_secret(project: Path, tmp_path: Path):
    """Params, tags, text, error, diff, params.yaml and dvc.lock; what was taken out is counted."""
    secret = "Zx9aB3dE5fG7hJ9kL2mN4pQ6"
    signed = f"https://bucket.s3.amazonaws.com/a?X-Amz-Signature={secret}"
    git = ["git", "-c", "user.name=n", "-c", "user.email=e@example.org"]
    (project / ".gitignore").write_text("mlflow.db*\nmlartifacts\n.polyturn\n")
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *command], cwd=project, check=True)
    (project / "params.yaml").write_text(f"data:\n  path: {signed}\n")
    (project / "dvc.lock").write_text(f"stages: {{a: {{params: {{x: '{signed}'}}}}}}\n")
    (project / "new.py").write_text(f'client(api_key="{secret}")\n')
    failed = pytest.raises(ValueError, match="denied")
    with failed, open_run(TRACKING, root=project, name="train") as run:
        run.log_params({"data": {"path": signed}})
        run.set_tags({"source": signed})
        run.log_text(f"HF_TOKEN={secret}", "notes/note.txt")
        raise ValueError(f"denied: {signed}")
    stored = run.store.client.get_run(run.run_id)
    assert secret not in json.dumps([stored.data.params, stored.data.tags])
    assert stored.data.params["data.path"].endswith("X-Amz-Signature=[REDACTED]")
    assert (stored.data.tags["redacted"], stored.data.tags["diff.redacted"]) == ("4", "2")
    artifacts = Path(run.artifact_uri.removeprefix("file://"))
    files = [path for path in artifacts.rglob("*") if path.is_file()]
    assert {"params.yaml", "dvc.lock", "uncommitted.diff", "note.txt"} <= {p.name for p in files}
    assert [path for path in files if secret in path.read_text()] == []
    assert "new.py" in (artifacts / "environment/uncommitted.diff").read_text()


def test_the_diff_applies_to_the_commit_and_leaves_git_alone(project: Path, tmp_path: Path):
    git = ["git", "-c", "user.name=n", "-c", "user.email=e@example.org"]
    (project / ".gitignore").write_text("mlflow.db*\nmlartifacts\n.polyturn\n")
    (project / "code.py").write_text("a = 1\n")
    (project / "gone.py").write_text("b = 1\n")
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *command], cwd=project, check=True)
    (project / "code.py").write_text("a = 2\n")
    (project / "gone.py").unlink()
    (project / "sub").mkdir()
    (project / "sub" / "new file.py").write_text("c = 3\n")
    (project / "staged.py").write_text("d = 4\n")
    subprocess.run([*git, "add", "staged.py"], cwd=project, check=True)
    for name, content in (("huge.txt", "x" * 2_000_000), (".env", "KEY=x"), ("data.bin", "\0")):
        (project / name).write_text(content)
    (project / "metrics.json").write_text("{}")
    status = ["git", "status", "--porcelain"]
    before = subprocess.check_output(status, cwd=project)
    objects = sorted((project / ".git/objects").rglob("*"))
    with open_run(TRACKING, root=project, name="train") as run:
        pass
    assert subprocess.check_output(status, cwd=project) == before
    assert sorted((project / ".git/objects").rglob("*")) == objects
    kept = Path(run.artifact_uri.removeprefix("file://")) / "environment/uncommitted.diff"
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", str(project), str(clone)], check=True)
    subprocess.run(["git", "apply", str(kept)], cwd=clone, check=True)
    found = {
        str(p.relative_to(clone)) for p in clone.rglob("*") if p.is_file() and ".git/" not in str(p)
    }
    assert found == {".gitignore", "code.py", "sub/new file.py", "staged.py"}
    assert (clone / "code.py").read_text() == "a = 2\n"


def test_a_run_of_another_host_is_closed_when_it_has_been_silent(project: Path):
    with open_run(TRACKING, root=project, name="this") as run:
        client = run.store.client
        names = {}
        for name, age in (("silent", 1000), ("alive", 100), ("unknown", None)):
            tags = {"polyturn.host": "elsewhere/1", "polyturn.process": "1:1"}
            if age is not None:
                tags["polyturn.heartbeat"] = str(int(time.time() - age))
            made = client.create_run(run.store.experiment_id, run_name=name, tags=tags)
            names[name] = made.info.run_id
        close_orphans(run.store)
        found = {name: client.get_run(run_id).info.status for name, run_id in names.items()}
    assert found == {"silent": "KILLED", "alive": "RUNNING", "unknown": "RUNNING"}
    reason = client.get_run(names["silent"]).data.tags["ended_by"]
    assert reason == "no sign of life of its host for 15 minutes"
