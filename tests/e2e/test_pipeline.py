"""The real stages on the tiny recipe, by `dvc repro` in a git repository of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from mlflow import MlflowClient

from polyturn import layout
from polyturn.params_tree import merge
from polyturn.pipeline import workspace
from tests.toy_project import ToyProject, wait_until

pytestmark = pytest.mark.slow(minutes=3)
TRAIN_AGAIN = (
    sys.executable, "-m", "dvc", "repro", "--force", "--no-run-cache", "--single-item", "train",
)  # fmt: skip
STAGES = ("fetch", "images", "model", "warmstart", "train", "evaluate", "register")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> ToyProject:
    """A copy of the checkout's files with the tiny recipe, in which the pipeline has run once."""
    root = Path(__file__).resolve().parents[2]
    path = tmp_path_factory.mktemp("tiny") / "checkout"
    path.mkdir()
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.check_output(listed, cwd=root, text=True).splitlines():
        if (root / name).is_file():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / name, path / name)
    for name in ("dvc.lock", "metrics.json", "registered.json"):
        (path / name).unlink(missing_ok=True)
    plan = workspace.compose(path, recipe="tiny", overrides={})
    workspace.write_params(path, plan.changes)
    subprocess.run(["git", "init", "-q", "-b", "main"], cwd=path, check=True)
    project = ToyProject(path)
    project.commit()
    result = project.run("dvc", "repro")
    assert result.returncode == 0, result.stdout
    for name in STAGES:
        assert f"Running stage '{name}'" in result.stdout
    return project


@pytest.fixture
def edited(tiny: ToyProject) -> ToyProject:
    """The same project; params.yaml is put back after the test."""
    path = tiny.path / layout.PARAMS
    text = path.read_text()
    yield tiny
    path.write_text(text)


def change(project: ToyProject, **changes: dict[str, object]) -> None:
    """Lay changes over params.yaml without validating them, as an editor would."""
    path = project.path / layout.PARAMS
    path.write_text(yaml.safe_dump(merge(yaml.safe_load(path.read_text()), changes)))


def test_every_stage_wrote_what_layout_names(tiny: ToyProject) -> None:
    for path in (
        layout.RAW, layout.IMAGES, layout.BASE_MODEL, layout.PROBLEMS, layout.WARMSTART, layout.POLICY,
        layout.TRAJECTORIES, layout.CURVE, layout.TRAIN_RUN, layout.EVALUATION, layout.METRICS,
        layout.REGISTERED, layout.REPORT,
    ):  # fmt: skip
        assert (tiny.path / path).exists(), path
    metrics = json.loads((tiny.path / layout.METRICS).read_text())
    assert metrics["test"]["num_problems"] == 16
    assert set(metrics["test"]["policy"]) == {"sampled", "greedy"}


def test_nothing_runs_when_nothing_changed(tiny: ToyProject) -> None:
    lock = (tiny.path / layout.DVC_LOCK).read_bytes()
    result = tiny.run("dvc", "repro")
    assert result.returncode == 0
    assert "Running stage" not in result.stdout
    assert (tiny.path / layout.DVC_LOCK).read_bytes() == lock
    status = subprocess.check_output(["git", "status", "--porcelain"], cwd=tiny.path, text=True)
    assert {line[3:] for line in status.splitlines()} == {
        "dvc.lock",
        "metrics.json",
        "registered.json",
    }


def test_importing_plugins_leaves_nothing_stale(tiny: ToyProject) -> None:
    assert tiny.run(sys.executable, "-c", "import plugins").returncode == 0
    assert "Running stage" not in tiny.run("dvc", "repro").stdout


def test_every_run_in_mlflow_is_finished(tiny: ToyProject) -> None:
    assert tiny.runs() == {name: ["FINISHED"] for name in STAGES}


def test_a_training_run_keeps_traces_step_files_and_times(tiny: ToyProject) -> None:
    run_id = json.loads((tiny.path / layout.TRAIN_RUN).read_text())["run_id"]
    steps = sorted(path.stem for path in (tiny.path / layout.TRAJECTORIES).glob("step_*"))
    times = tiny.path / layout.TRAJECTORIES.with_name("trajectory_times")
    assert [path.stem for path in sorted(times.iterdir())] == [name.split(".")[0] for name in steps]
    for name in ("champion", run_id):
        shown = tiny.run("polyturn", "view", name, "--out", "runs/view.html")
        assert shown.returncode == 0, shown.stdout
        assert "<article" in (tiny.path / "runs/view.html").read_text()
    client = MlflowClient(tracking_uri=f"sqlite:///{tiny.path / 'mlflow.db'}")
    experiment = client.get_run(run_id).info.experiment_id
    traces = client.search_traces(locations=[experiment], run_id=run_id)
    assert len(traces) == 2 * len(steps)


def test_metrics_hold_no_time_run_id_or_path(tiny: ToyProject) -> None:
    text = (tiny.path / layout.METRICS).read_text()
    run_id = json.loads((tiny.path / layout.TRAIN_RUN).read_text())["run_id"]
    assert run_id not in text
    assert str(tiny.path) not in text


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"train": {"stepz": 3}}, "train.stepz is not a key of polyturn"),
        ({"learner": {"lr": "fast"}}, "learner.lr: Input should be a valid number"),
        ({"rollout": {"group_size": 1}}, "rollout.group_size: Input should be greater than or equal to 2"),
        ({"data": {"source": "geo3k", "path": "absent/geo3k"}}, "data.path"),
        ({"model": {"path": "recipes"}}, "model.path"),
        ({"env": {"build": "plugins.absent:build_env"}}, "env.build"),
        ({"train": {"steps": 3}, "tracking": {"uri": "http://127.0.0.1:9", "timeout_s": 2, "outage_s": 0}}, "tracking.uri 'http://127.0.0.1:9'"),
        ({"train": {"steps": 3}, "doctor": {"min_free_gb": 1e9}}, "doctor.min_free_gb"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_finished_stages_are_kept(
    edited: ToyProject, changes: dict[str, dict[str, object]], line: str
) -> None:
    kept = (edited.path / layout.RAW / "problems.jsonl").read_bytes()
    change(edited, **changes)
    result = edited.run("dvc", "repro")
    assert result.returncode != 0
    errors = [text for text in result.stdout.splitlines() if text.startswith("error: stage")]
    assert len(errors) == 1, result.stdout
    assert line in errors[0]
    assert "Traceback" not in result.stdout
    subprocess.run(["git", "checkout", "-q", "params.yaml"], cwd=edited.path, check=True)
    assert edited.run("dvc", "repro").returncode == 0
    assert (edited.path / layout.RAW / "problems.jsonl").read_bytes() == kept


def weights(project: ToyProject) -> bytes:
    """The published policy's weights."""
    return next((project.path / layout.POLICY).glob("*.safetensors")).read_bytes()


def test_training_killed_on_the_way_ends_at_the_same_bytes(edited: ToyProject) -> None:
    """PIPE-22."""
    change(edited, train={"steps": 15})  # some seconds, so that the kill comes in time
    assert edited.run(*TRAIN_AGAIN).returncode == 0
    expected = weights(edited), (edited.path / layout.CURVE).read_bytes()
    dvc = edited.start(*TRAIN_AGAIN)
    work = edited.path / ".polyturn" / "work" / "train"
    wait_until(lambda: any(work.glob("*/checkpoints/*")), seconds=120, process=dvc)
    dvc.kill()
    dvc.communicate(timeout=60)  # ends when the stage, which holds the pipe, has ended too
    assert edited.status("train")["exit_code"] == 143
    assert edited.runs()["train"][-1] == "KILLED"
    again = edited.run(*TRAIN_AGAIN)
    assert again.returncode == 0, again.stdout
    assert (weights(edited), (edited.path / layout.CURVE).read_bytes()) == expected


def test_a_change_of_a_late_param_runs_late_stages_alone(edited: ToyProject) -> None:
    change(edited, registry={"min_gain": 0.5})
    result = edited.run("dvc", "repro")
    ran = [name for name in STAGES if f"Running stage '{name}'" in result.stdout]
    assert ran == ["register"], result.stdout


def test_the_commands_of_a_dvc_user_work(tiny: ToyProject) -> None:
    shown = tiny.run("dvc", "metrics", "show")
    assert "metrics.json" in shown.stdout
    plots = tiny.run("dvc", "plots", "show", "--json")
    assert "Reward of a rollout batch" in plots.stdout
    assert "Accuracy on the validation split" in plots.stdout
    assert os.path.exists(tiny.path / layout.CURVE)
