"""What a DVC user expects: experiments in all forms, tables, plots, a remote, and no stage that runs without a cause."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from polyturn import layout
from polyturn.pipeline import workspace
from polyturn.pipeline.bootstrap import bootstrap
from tests import s3
from tests.toy_project import ToyProject, wait_until

pytestmark = pytest.mark.slow(minutes=1)

# As the real stages leave them: metrics without a path or time, a curve with intervals; both follow from the params.
TRAIN = """
score = ctx.params.seed / 10
rows = [f"{i},{score},{score - 0.1},{score + 0.1},{score},{score - 0.2},{score + 0.2}" for i in range(3)]
columns = "step,reward_mean,reward_low,reward_high,eval_accuracy,eval_accuracy_low,eval_accuracy_high"
Path("artifacts").mkdir(exist_ok=True)
Path("artifacts/train_curve.csv").write_text("\\n".join([columns, *rows]))
Path("metrics.json").write_text('{"accuracy": %s}' % score)
"""


@pytest.fixture(scope="module")
def first(root: Path, tmp_path_factory: pytest.TempPathFactory) -> ToyProject:
    """Two stages with the metrics and plots of the real pipeline, run and committed."""
    path = tmp_path_factory.mktemp("dvc") / "toy"
    project = ToyProject.create(path, source=root, bodies={"train": TRAIN, "score": "pass"})
    shutil.copytree(root / ".dvc/plots", path / ".dvc/plots")
    graph = yaml.safe_load((path / "dvc.yaml").read_text())
    graph["stages"]["train"]["outs"].append("artifacts/train_curve.csv")
    graph["stages"]["train"]["metrics"] = [{"metrics.json": {"cache": False}}]
    graph["plots"] = yaml.safe_load((root / "dvc.yaml").read_text())["plots"]
    (path / "dvc.yaml").write_text(yaml.safe_dump(graph, sort_keys=False))
    with (path / ".gitignore").open("a") as file:
        file.write("/dvc_plots/\n")
    project.commit()
    result = project.run("dvc", "repro")
    assert result.returncode == 0, result.stdout
    project.commit()
    return project


@pytest.fixture
def project(first: ToyProject, tmp_path: Path) -> ToyProject:
    """A copy of it."""
    shutil.copytree(first.path, tmp_path / "toy", symlinks=True)
    return ToyProject(tmp_path / "toy")


def run(project: ToyProject, *command: str, **env: str) -> str:
    result = project.run(*command, **env)
    assert result.returncode == 0, result.stdout
    return result.stdout


def experiments(project: ToyProject) -> dict[str, dict[str, float]]:
    """Seed and accuracy of each experiment, as `dvc exp show` has them."""
    table = run(project, "dvc", "exp", "show", "--json")
    found: dict[str, dict[str, float]] = {}
    for baseline in json.loads(table[table.index("[") :]):
        for experiment in baseline["experiments"] or []:
            (revision,) = experiment["revs"]
            data = revision["data"]
            found[revision["name"]] = {
                "seed": data["params"]["params.yaml"]["data"]["seed"],
                "accuracy": data["metrics"]["metrics.json"]["data"]["accuracy"],
            }
    return found


def test_experiments_run_here_aside_and_in_a_queue(project: ToyProject) -> None:
    """All three share the cache, MLflow's database and the times; those aside leave the checkout alone."""
    run(project, "dvc", "exp", "run", "-S", "seed=3", "-n", "here")
    assert json.loads((project.path / "metrics.json").read_text()) == {"accuracy": 0.3}
    diff = json.loads(run(project, "dvc", "metrics", "diff", "--json"))
    assert diff["metrics.json"]["accuracy"] == {"old": 0.0, "new": 0.3, "diff": 0.3}
    run(project, "git", "checkout", "--quiet", ".")
    run(project, "dvc", "checkout")
    run(project, "dvc", "exp", "run", "--temp", "-S", "seed=4", "-n", "aside")
    for seed in (5, 6):
        run(project, "dvc", "exp", "run", "--queue", "-S", f"seed={seed}", "-n", f"queued{seed}")
    assert project.git("status", "--porcelain") == ""
    run(project, "dvc", "queue", "start")
    try:
        wait_until(lambda: {"queued5", "queued6"} <= experiments(project).keys(), seconds=240)
    finally:
        project.run("dvc", "queue", "stop")
    seeds = {"here": 3, "aside": 4, "queued5": 5, "queued6": 6}
    wanted = {name: {"seed": seed, "accuracy": seed / 10} for name, seed in seeds.items()}
    assert experiments(project) == wanted
    assert project.git("status", "--porcelain") == ""
    assert project.runs()["train"] == ["FINISHED"] * 5, "one database, in the checkout"
    timings = (project.path / ".polyturn/timings.jsonl").read_text().splitlines()
    assert len(timings) == 10
    run(project, "dvc", "exp", "apply", "aside")
    assert json.loads((project.path / "metrics.json").read_text()) == {"accuracy": 0.4}
    assert "Running stage" not in run(project, "dvc", "repro"), "its outputs are in the cache"


def test_a_wrong_key_of_an_experiment_runs_nothing(project: ToyProject) -> None:
    """DVC itself knows the keys of params.yaml; one that is added there is polyturn's to refuse."""
    for override, said in (
        ("train.stepz=3", "Key 'stepz' is not in struct"),
        ("+train.stepz=3", "train.stepz is not a key of polyturn"),
        ("train.steps=0", "train.steps: Input should be greater than or equal to 1, got 0"),
    ):
        result = project.run("dvc", "exp", "run", "--temp", "-S", override)
        assert result.returncode != 0
        assert said in result.stdout
    assert project.git("status", "--porcelain") == ""


def test_plots_show_means_with_their_intervals(project: ToyProject) -> None:
    run(project, "dvc", "exp", "run", "-S", "seed=3", "-n", "here")
    run(project, "dvc", "plots", "diff", "HEAD", "here")
    page = (project.path / "dvc_plots/index.html").read_text()
    for title in ("Reward of a rollout batch", "Accuracy on the validation split"):
        assert title in page
    for column in ("reward_low", "reward_high", "eval_accuracy_low", "eval_accuracy_high"):
        assert f'"field": "{column}"' in page
        assert f'"{column}": "' in page, "the data has it"
    assert '"rev": "here"' in page
    run(project, "dvc", "plots", "show")
    assert (project.path / "dvc_plots/index.html").is_file()


def test_a_second_run_executes_nothing_and_changes_no_file(project: ToyProject) -> None:
    """PIPE-20."""
    for command in (("repro",), ("exp", "run"), ("repro", "--pull")):
        assert "Running stage" not in project.run("dvc", *command).stdout
        assert project.git("status", "--porcelain") == ""


@pytest.fixture
def storage() -> Iterator[dict[str, str]]:
    """Section `storage` for a bucket of a server on loopback."""
    with s3.serving("team") as url:
        yield {"url": "s3://team/dvc", "endpoint_url": url}


def test_two_params_give_a_remote_that_a_fresh_clone_pulls_from(
    project: ToyProject, storage: dict[str, str], tmp_path: Path
) -> None:
    """With the committed dvc.lock the clone's `dvc repro` does nothing."""
    workspace.write_params(project.path, {"storage": storage})
    run(project, "python", "-m", "polyturn.cli", "storage")
    project.commit()
    run(project, "dvc", "push", "--run-cache", **s3.CREDENTIALS)
    subprocess.run(["git", "clone", "-q", project.path, tmp_path / "clone"], check=True)
    clone = ToyProject(tmp_path / "clone")
    said = run(clone, "python", "-m", "polyturn.cli", "storage")
    assert "dvc push and pull use s3://team/dvc" in said
    run(clone, "dvc", "pull", **s3.CREDENTIALS)
    assert (clone.path / layout.CURVE).is_file()
    assert "Running stage" not in run(clone, "dvc", "repro")
    assert clone.git("status", "--porcelain") == ""
    worktree = workspace.create(clone.path, "run", {"seed": 0})
    assert "team" in (worktree / ".dvc/config.local").read_text()
    workspace.remove(clone.path, worktree)
    bootstrap(clone.path)  # again is the same
    run(clone, "dvc", "status", "--cloud", **s3.CREDENTIALS)


def test_storage_without_an_address_is_told(project: ToyProject) -> None:
    result = project.run("python", "-m", "polyturn.cli", "storage")
    assert result.returncode == 2
    assert "storage.url is null" in result.stdout
