"""Workspaces: params from recipe and overrides, and worktrees that share the cache but no edits."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from polyturn import params
from polyturn.params import ParamsError
from polyturn.params_tree import merge
from polyturn.pipeline import workspace
from polyturn.pipeline.bootstrap import BootstrapError, default_remote
from polyturn.pipeline.checkout import from_checkout, main_checkout
from polyturn.pipeline.workspace import WorkspaceError
from tests.toy_project import ToyProject

Toy = Callable[..., ToyProject]


@pytest.fixture
def checkout(tmp_path: Path, root: Path) -> Path:
    """A directory with params.yaml and one recipe."""
    (tmp_path / "params.yaml").write_text((root / "params.yaml").read_text())
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "short.yaml").write_text("train: {steps: 3}\nseed: 5\n")
    return tmp_path


def test_overrides_go_over_the_recipe_and_the_recipe_over_params_yaml(checkout: Path) -> None:
    plan = workspace.compose(checkout, recipe="short", overrides={"train.steps": 4})
    assert (plan.params.train.steps, plan.params.seed) == (4, 5)
    assert plan.changes == {"train": {"steps": 4}, "seed": 5}
    assert plan.params.loss == params.load(checkout / "params.yaml").loss


def test_an_unknown_recipe_is_named_with_those_that_there_are(checkout: Path) -> None:
    with pytest.raises(ParamsError, match=r"recipe 'shrot' is not in recipes/; known: short"):
        workspace.compose(checkout, recipe="shrot", overrides={})


def test_a_wrong_override_is_named_and_nothing_is_written(checkout: Path) -> None:
    before = (checkout / "params.yaml").read_text()
    with pytest.raises(
        ParamsError, match=r"params.yaml \+ short \+ overrides: train.lr is not a key"
    ):
        workspace.compose(checkout, recipe="short", overrides={"train.lr": 1e-5})
    assert (checkout / "params.yaml").read_text() == before


@pytest.mark.parametrize(
    ("text", "value"),
    [("3", 3), ("1e-5", 1e-5), ("1.5e-3", 1.5e-3), ("true", True), ("null", None),
     ("'1234e5'", "1234e5"), ('"7"', "7"), ("inf", "inf"), ("nan", "nan"),
     ("[1, 2]", [1, 2]), ("word", "word"), ("{a: 1}", {"a": 1}), ("", None)],
)  # fmt: skip
def test_override_values_are_what_they_look_like(text: str, value: object) -> None:
    assert workspace.parse_pairs([f"a.b={text}"]) == {"a.b": value}


@pytest.mark.parametrize("pair", ["train.steps", "=3", "train.steps=[1"])
def test_an_override_that_cannot_be_read_is_named(pair: str) -> None:
    with pytest.raises(ParamsError, match="override"):
        workspace.parse_pairs([pair])


def test_writing_params_keeps_comments_and_other_keys(checkout: Path) -> None:
    before = (checkout / "params.yaml").read_text()
    changes = {"train": {"steps": 3}, "learner": {"lr": 1e-6}, "model": {"path": None}}
    workspace.write_params(checkout, changes)
    after = (checkout / "params.yaml").read_text()
    comments = [line.partition("#")[2] for line in before.splitlines() if "#" in line]
    assert all(comment in after for comment in comments)
    assert params.load(checkout / "params.yaml") == params.parse(
        merge(yaml.safe_load(before), changes)
    )


@pytest.mark.parametrize("value", [1e-6, 1e-5, 0.1, 1.0, 2.5e-10, 1e22, 3e-4])
def test_floats_are_written_so_that_every_yaml_reader_sees_a_number(
    checkout: Path, value: float
) -> None:
    workspace.write_params(checkout, {"learner": {"lr": value}})
    read = yaml.safe_load((checkout / "params.yaml").read_text())["learner"]["lr"]
    assert isinstance(read, float)
    assert read == value


def test_writing_the_same_again_changes_no_byte(checkout: Path) -> None:
    workspace.write_params(checkout, {"train": {"steps": 3}})
    first = (checkout / "params.yaml").read_bytes()
    workspace.write_params(checkout, {"train": {"steps": 3}})
    assert (checkout / "params.yaml").read_bytes() == first


def test_a_worktree_has_its_own_params_and_the_shared_cache(toy: Toy) -> None:
    project = toy(one="pass")
    assert project.run("dvc", "repro").returncode == 0
    path = workspace.create(project.path, "mine", {"seed": 3})
    assert params.load(path / "params.yaml").seed == 3
    assert params.load(project.path / "params.yaml").seed == 0
    config = subprocess.check_output(["dvc", "cache", "dir"], cwd=path, text=True)
    assert Path(config.strip()).resolve() == (project.path / ".dvc/cache").resolve()
    workspace.remove(project.path, path)
    assert not path.exists()


def _killed(root: Path, path: Path) -> Path:
    subprocess.run(
        ["git", "worktree", "lock", "--reason", "initializing", path], cwd=root, check=True
    )
    return root


def _half_made(root: Path, path: Path) -> Path:
    (path / ".git").unlink()
    return root


def _gone(root: Path, path: Path) -> Path:
    _killed(root, path)
    shutil.rmtree(path)
    return root


def _moved(root: Path, path: Path) -> Path:
    del path
    return root.rename(root.with_name("moved"))


def _hooked(root: Path, path: Path) -> Path:
    del path
    hook = root / ".git/hooks/post-checkout"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text("#!/bin/sh\nexit 1\n")
    hook.chmod(0o755)
    return root


@pytest.mark.parametrize("happens", [_killed, _half_made, _gone, _moved, _hooked])
def test_a_worktree_is_made_anew_whatever_became_of_the_last_one(
    tmp_path: Path, happens: Callable[[Path, Path], Path]
) -> None:
    """superset-sh/superset#1384 (hooks); a killed `git worktree add` leaves a lock; PIPE-07 (a moved project)."""
    root = tmp_path / "project"
    root.mkdir()
    (root / ".gitignore").write_text(".polyturn/\n")
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    subprocess.run(["git", "add", "."], cwd=root, check=True)
    names = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", *names, "commit", "-q", "-m", "test"], cwd=root, check=True)
    root = happens(root, workspace.add_worktree(root, "run", "HEAD"))
    path = workspace.add_worktree(root, "run", "HEAD")
    assert sorted(entry.name for entry in path.iterdir()) == [".git", ".gitignore"]
    workspace.remove(root, path)
    assert not path.exists()


def test_a_worktree_has_the_submodules_of_its_commit(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pingdotgg/t3code#7672: a new worktree has their directories, empty."""
    for number, (key, value) in enumerate(
        {"protocol.file.allow": "always", "user.name": "t", "user.email": "t@example.org"}.items()
    ):  # git's own guard against submodules of this machine
        monkeypatch.setenv(f"GIT_CONFIG_KEY_{number}", key)
        monkeypatch.setenv(f"GIT_CONFIG_VALUE_{number}", value)
    monkeypatch.setenv("GIT_CONFIG_COUNT", "3")
    vendor = tmp_path / "vendor"
    vendor.mkdir()
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "x"]):
        subprocess.run(["git", *command], cwd=vendor, check=True)
    (vendor / "grader.py").write_text("SCORE = 1\n")
    for command in (["add", "."], ["commit", "-q", "-m", "y"]):
        subprocess.run(["git", *command], cwd=vendor, check=True)
    project = toy(one="pass")
    project.git("submodule", "--quiet", "add", str(vendor), "plugins/vendor")
    project.commit()
    for _ in range(2):  # also in place of one that has them
        path = workspace.create(project.path, "run", {})
        assert (path / "plugins/vendor/grader.py").read_text() == "SCORE = 1\n"
    workspace.remove(project.path, path)
    assert not path.exists()
    (project.path / "plugins/vendor/grader.py").write_text("SCORE = 2\n")
    with pytest.raises(WorkspaceError, match="plugins/vendor is not committed"):
        workspace.create(project.path, "run", {})


def test_worktrees_of_a_checkout_that_is_a_submodule_belong_to_it(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """anthropics/claude-code#95820: its repository lies in that of the project around it."""
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", "protocol.file.allow")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", "always")
    around = tmp_path / "around"
    around.mkdir()
    origin = toy(one="pass").path
    for command in (["init", "-q"], ["submodule", "--quiet", "add", str(origin), "polyturn"]):
        subprocess.run(["git", *command], cwd=around, check=True)
    checkout = around / "polyturn"
    assert main_checkout(checkout) == checkout
    path = workspace.create(checkout, "run", {})
    assert path.parent.parent.parent == checkout
    assert main_checkout(path) == checkout


def test_the_pipelines_own_outputs_are_no_uncommitted_edits(toy: Toy) -> None:
    project = toy(one="pass")
    for name in ("dvc.lock", "metrics.json", "registered.json"):
        (project.path / name).write_text("{}")
    assert workspace.uncommitted(project.path) == []


@pytest.mark.parametrize("name", ["params.yaml", "plugins.py", "tasks/one.py"])
def test_a_worktree_beside_uncommitted_edits_is_refused(toy: Toy, name: str) -> None:
    project = toy(one="pass")
    with (project.path / name).open("a") as file:
        file.write("\n")
    with pytest.raises(WorkspaceError, match=f"{name} is not committed"):
        workspace.create(project.path, "mine", {})
    assert not (project.path / ".polyturn/worktrees").exists()


def test_a_relative_dataset_is_found_from_the_worktree(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And stays relative in params.yaml, or the worktree would not share the checkout's run cache."""
    project = toy(one="pass")
    (project.path / "runs").mkdir()  # git does not carry it
    (project.path / "runs" / "rows.jsonl").write_text("")
    changes = {"data": {"path": "runs/rows.jsonl"}, "model": {"path": "Qwen/absent"}}
    path = workspace.create(project.path, "mine", changes)
    monkeypatch.chdir(path)
    written = params.load(path / "params.yaml")
    assert written.data.path == "runs/rows.jsonl"
    assert from_checkout(written.data.path) == project.path / "runs/rows.jsonl"
    assert from_checkout("data.txt") == Path("data.txt"), "tracked files are the worktree's own"
    assert from_checkout("Qwen/absent") == Path("Qwen/absent")
    assert from_checkout("/nowhere") == Path("/nowhere")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert from_checkout("~/rows.jsonl") == Path("/home/somebody/rows.jsonl")
    assert from_checkout("~nobody-of-this-name/rows.jsonl") == Path(
        "~nobody-of-this-name/rows.jsonl"
    )


@pytest.mark.parametrize("depth", [".dvc/tmp/exps/tmpabc", ".dvc/tmp/exps/tmpabc/sub"])
def test_dvcs_temporary_experiments_belong_to_their_checkout(toy: Toy, depth: str) -> None:
    project = toy(one="pass")
    path = project.path / depth
    path.mkdir(parents=True)
    assert main_checkout(path) == project.path
    subprocess.run(["git", "init", "-q"], cwd=path, check=True)
    assert main_checkout(path) == project.path
    worktree = workspace.create(project.path, "mine", {})
    (worktree / depth).mkdir(parents=True)
    assert main_checkout(worktree / depth) == project.path


def test_a_worktree_gets_the_local_settings_and_the_remote_of_params(toy: Toy) -> None:
    project = toy(one="pass")
    project.run("dvc", "config", "--local", "cache.type", "copy")
    storage = {"url": "s3://team/dvc", "endpoint_url": "http://127.0.0.1:9"}
    path = workspace.create(project.path, "mine", {"storage": storage})
    assert default_remote(path) == "s3://team/dvc"
    assert default_remote(project.path) is None
    text = (path / ".dvc/config.local").read_text()
    assert "type = copy" in text
    assert "endpointurl = http://127.0.0.1:9" in text


def test_what_dvc_refuses_is_told(toy: Toy) -> None:
    project = toy(one="pass")
    (project.path / ".dvc/config.local").write_text("[core")
    with pytest.raises(BootstrapError, match=r"`dvc cache dir.* failed"):
        workspace.create(project.path, "mine", {})


def test_a_revision_is_fetched_and_the_remotes_branch_goes_before_the_local_one(
    toy: Toy, tmp_path: Path
) -> None:
    """A branch that somebody has pushed meanwhile, a commit, a name that nobody knows; edits here do not matter."""
    project = toy(one="pass")
    host = tmp_path / "host"
    subprocess.run(["git", "clone", "-q", str(project.path), str(host)], check=True)
    first = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=host, text=True).strip()
    workspace.write_params(project.path, {"seed": 7})
    project.commit()
    (host / "data.txt").write_text("edited\n")
    newer = workspace.create(host, "newer", {}, revision="main")
    older = workspace.create(host, "older", {}, revision=first)
    assert [params.load(path / "params.yaml").seed for path in (newer, older)] == [7, 0]
    assert (newer / "data.txt").read_text() == "data\n"
    with pytest.raises(WorkspaceError, match=r"revision 'nowhere' .*push it first"):
        workspace.create(host, "none", {}, revision="nowhere")


def test_a_shallow_clone_fetches_what_a_run_is_of(toy: Toy, tmp_path: Path) -> None:
    """treeverse/dvc#6822: a clone of depth 1 knows one commit of one branch; `reproduce` and `revision` name others."""
    project = toy(one="pass")
    first = project.git("rev-parse", "HEAD")
    for seed, branch in ((1, "main"), (2, "theirs"), (3, "main")):
        project.git("checkout", "--quiet", "-B", branch)
        workspace.write_params(project.path, {"seed": seed})
        project.commit()
    host = tmp_path / "host"
    clone = ["git", "clone", "-q", "--depth", "1", "--branch", "main"]
    subprocess.run([*clone, project.path.as_uri(), str(host)], check=True)
    made = [workspace.create(host, name, {}, revision=name) for name in (first, "theirs", "main")]
    assert [params.load(path / "params.yaml").seed for path in made] == [0, 2, 3]
    with pytest.raises(WorkspaceError, match=r"revision '--upload-pack=.*push it first"):
        workspace.create(host, "none", {}, revision="--upload-pack=touch")
