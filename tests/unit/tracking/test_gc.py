"""`polyturn gc`: what somebody needs stays, whoever says so; the rest goes, and is listed before."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import yaml

from polyturn import layout
from polyturn.cli.commands import main
from polyturn.params import Params, RegistryParams, TrackingParams
from polyturn.pipeline import gc, lease
from polyturn.pipeline.dvc_objects import ObjectCache
from polyturn.tracking import open_run
from polyturn.tracking.needs import find
from polyturn.tracking.store import connect
from polyturn.tracking.stored import check_champion
from tests.unit.tracking.scored import candidate, submit, write_params
from tests.unit.tracking.stored import stored_runs

full = pytest.mark.full  # every dvc command takes a second or more

PARAMS = Params(registry=RegistryParams(name="tiny policy"))
QUIET = TrackingParams(system_metrics_s=0)
WORK = layout.STATE / "work" / "train"
STAGE = {"copy": {"cmd": "mkdir -p out && cp data.txt out/", "deps": ["data.txt"], "outs": ["out"]}}


@dataclass(frozen=True)
class Project:
    """A git repository with DVC, a remote of each, and an MLflow store."""

    root: Path

    def run(self, *command: str) -> None:
        subprocess.run(command, cwd=self.root, check=True, capture_output=True)

    def dvc(self, *arguments: str) -> None:
        self.run(sys.executable, "-m", "dvc", "-q", *arguments)

    def commit(self) -> None:
        self.run("git", "add", ".")
        self.run("git", "commit", "-q", "-m", "x")

    def produce(self, text: str) -> str:
        """Run the stage on other data; the digest of its out."""
        (self.root / "data.txt").write_text(text)
        self.dvc("repro")
        self.dvc("push")
        return str(
            yaml.safe_load((self.root / "dvc.lock").read_text())["stages"]["copy"]["outs"][0]["md5"]
        )

    def holds(self, md5: str) -> tuple[bool, bool]:
        """Whether cache and remote hold all of an object."""
        remote = ObjectCache(self.root.parent / "dvc-remote")
        return tuple(c.missing(md5) == [] for c in (ObjectCache.of(self.root), remote))  # type: ignore[return-value]


@pytest.fixture
def made(tmp_path: Path, template_store: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    root = tmp_path / "project"
    root.mkdir()
    for number, (key, value) in enumerate([("user.name", "n"), ("user.email", "e@example.org")]):
        monkeypatch.setenv(f"GIT_CONFIG_KEY_{number}", key)
        monkeypatch.setenv(f"GIT_CONFIG_VALUE_{number}", value)
    monkeypatch.setenv("GIT_CONFIG_COUNT", "2")
    monkeypatch.chdir(root)
    found = Project(root)
    found.run("git", "init", "-q", "-b", "main")
    found.run("git", "init", "-q", "--bare", "../origin")
    found.run("git", "remote", "add", "origin", "../origin")
    found.dvc("init")
    found.dvc("remote", "add", "-d", "shared", "../dvc-remote")
    (root / "dvc.yaml").write_text(yaml.safe_dump({"stages": STAGE}))
    (root / ".gitignore").write_text("/.polyturn/\n/mlflow.db*\n/mlartifacts/\n/out\n")
    write_params(root)
    (root / "mlflow.db").write_bytes(template_store.read_bytes())
    return found


def pipeline(root: Path, name: str, *, work: Path | None = None, lock: Path | None = None) -> str:
    """A pipeline run with a training stage; the id of the latter."""
    with open_run(QUIET, root=root, name=name) as parent:
        if lock:
            parent.log_artifact(lock)
        with open_run(
            QUIET, root=root, name="train", stage="train", parent_run_id=parent.run_id
        ) as run:
            run.set_tags({"train.work": work} if work else {})
    return run.run_id


def produce_for_everybody(made: Project) -> dict[str, str]:
    """Objects that a commit, an experiment, a pinned run, the champion, the workspace and nobody need."""
    digests = {"commit": made.produce("committed")}
    made.commit()
    digests["experiment"] = made.produce("an experiment's")
    made.dvc("exp", "save", "--name", "e1")
    digests["pinned"] = made.produce("a pinned run's")
    shutil.copy("dvc.lock", made.root.parent / "dvc.lock")
    for name in ("champion", "nobody", "workspace"):
        digests[name] = made.produce(f"the {name}'s")
    assert all(made.holds(md5) == (True, True) for md5 in digests.values())
    return digests


def run_and_register(made: Project, of_champion: str) -> dict[str, str]:
    """Pipelines: a pinned one, an old one, the champion's, the last one; with work directories and worktrees."""
    root = made.root
    work = root / WORK
    for name in ("pinned", "old", "held", "unknown"):
        (work / name).mkdir(parents=True)
        (work / name / "checkpoint").write_text("c" * 100)
    pinned = pipeline(root, "keep-me", work=work / "pinned", lock=root.parent / "dvc.lock")
    old = pipeline(root, "old", work=work / "old")
    for name in ("keep-me", "old", "last"):
        made.run("git", "worktree", "add", "-q", "--detach", f".polyturn/worktrees/{name}")
    external = RegistryParams(name="tiny policy", external_model_size=0)
    (root / "policy").mkdir()
    (root / "policy" / "data.txt").write_text("the champion's")
    entry = replace(candidate(root, "a", 0.5), directory=root / "policy", dvc_md5=of_champion)
    submit(root, replace(entry, source_run_id=pipeline(root, "champions")), external)
    last = pipeline(root, "last")
    assert main(["pin", pinned]) == 0
    return {"pinned": pinned, "old": old, "last": last}


def run_ids(root: Path) -> set[str]:
    return {str(run.info.run_id) for run in stored_runs(root)}


@full
def test_only_what_nobody_needs_goes(made: Project) -> None:
    root = made.root
    digests = produce_for_everybody(made)
    runs = run_and_register(made, digests["champion"])
    before = run_ids(root)
    with lease.hold(root / WORK / "held.lock", what="test", parent=None):
        dry = gc.plan(root, PARAMS, keep_last=1, with_remote=True)
        assert run_ids(root) == before
        assert made.holds(digests["nobody"]) == (True, True), "nothing is removed to list it"
        names = {(item.kind, Path(item.name).name) for item in dry.items if item.size}
        assert {name for name in names if name[0] != "objects"} == {
            ("worktree", "old"), ("work directory", "old"), ("work directory", "unknown"),
        }  # fmt: skip
        assert "would remove worktree: old" in "\n".join(gc.told(dry, is_dry=True))
        assert main(["gc", "--keep", "1"]) == 0

    left = {str(run.info.run_name) for run in stored_runs(root)}
    assert left == {"keep-me", "champions", "last", "train", "register"}
    assert {name for name, run_id in runs.items() if run_id in run_ids(root)} == {"pinned", "last"}
    assert not list((root / "mlartifacts").glob(f"{runs['old']}/artifacts/*"))
    assert {p.name for p in (root / WORK).iterdir() if p.is_dir()} == {"pinned", "held"}
    worktrees = root / layout.STATE / "worktrees"
    assert {path.name for path in worktrees.iterdir()} == {"keep-me", "last"}
    held = {name: made.holds(md5) for name, md5 in digests.items()}
    assert held == {name: (name != "nobody",) * 2 for name in digests}
    (freed,) = gc.plan(root, PARAMS, keep_last=1, with_remote=True).items
    assert freed.name.endswith("train/held"), "nobody holds it now"


@full
def test_dvc_stays_alone_while_something_runs_and_local_means_local(made: Project) -> None:
    root = made.root
    of_nobody = made.produce("nobody's")
    made.produce("the workspace's")
    made.commit()
    with open_run(QUIET, root=root, name="train", stage="train"):
        found = gc.plan(root, PARAMS, keep_last=1, with_remote=True)
    assert found.items == []
    assert "in progress" in found.notes[0]
    made.run("git", "remote", "set-url", "origin", "../absent")
    unreachable = gc.plan(root, PARAMS, keep_last=1, with_remote=True)
    assert "others' commits cannot be fetched" in unreachable.notes[0]
    for item in gc.plan(root, PARAMS, keep_last=1, with_remote=False).items:
        item.remove()
    assert made.holds(of_nobody) == (False, True)


@full
def test_a_champion_that_was_collected_by_somebody_elses_dvc_gc_is_noticed(made: Project) -> None:
    root = made.root
    of_champion = made.produce("the champion's")
    (root / "policy").mkdir()
    (root / "policy" / "data.txt").write_text("the champion's")
    external = RegistryParams(name="tiny policy", external_model_size=0)
    entry = replace(candidate(root, "a", 0.5), directory=root / "policy", dvc_md5=of_champion)
    assert check_champion(root, PARAMS) is None
    submit(root, entry, external)
    assert check_champion(root, PARAMS) == []
    made.produce("other")
    made.commit()
    made.dvc("gc", "--workspace", "--force")  # a teammate's
    assert made.holds(of_champion) == (False, True)
    assert check_champion(root, PARAMS) == [], "the remote has it"
    made.dvc("gc", "--workspace", "--force", "--cloud")
    (line,) = check_champion(root, PARAMS)
    assert "tiny policy@champion (version 1)" in line
    assert "of its weights" in line


@full
def test_the_weights_and_the_data_of_a_stored_champion_are_looked_for(
    made: Project,
) -> None:
    root = made.root
    made.produce("data of the champion")
    entry = candidate(root, "a", 0.5)
    registration = submit(root, entry)
    store = connect(QUIET, root)
    version = store.client.get_model_version("tiny policy", str(registration.version))
    store.client.log_artifact(version.tags["evaluation.run_id"], "dvc.lock")
    assert check_champion(root, PARAMS) == []
    made.produce("other")
    made.dvc("gc", "--workspace", "--force", "--cloud")
    (line,) = check_champion(root, PARAMS)
    assert "out of its run are neither in DVC's cache nor in its remote" in line
    for path in (root / "mlartifacts").rglob("model.safetensors"):
        path.unlink()
    assert "its weights are not in MLflow's artifact store" in check_champion(root, PARAMS)[0]


def test_what_is_kept_is_told_with_its_reason(made: Project) -> None:
    root = made.root
    made.commit()
    for _ in range(3):
        pipeline(root, "p")
        with open_run(QUIET, root=root, name="alone", stage="train"):
            pass
    needs = find(connect(QUIET, root), 2)
    assert len(needs.kept) == 2 * 2 + 2, "two pipelines with their stages, two stages of their own"
    assert set(needs.kept.values()) == {"one of the last of pipeline", "one of the last of train"}
    assert len(needs.spare) == 3
    assert find(connect(QUIET, root), 0).kept == {}
