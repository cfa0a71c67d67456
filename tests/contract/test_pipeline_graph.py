"""dvc.yaml against code, params and layout: the one graph says what the stages really read and write."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import yaml

from flows import graph
from polyturn import layout
from polyturn.params import Params
from polyturn.training.metrics import curve_csv
from scripts import sync_dvc_deps

STAGES = ("fetch", "images", "model", "warmstart", "train", "evaluate", "register")
Stage = Mapping[str, list[object]]


@pytest.fixture(scope="module")
def stages() -> dict[str, Stage]:
    root = Path(__file__).resolve().parents[2]
    return yaml.safe_load((root / "dvc.yaml").read_text())["stages"]


def paths(stage: Stage, *kinds: str) -> set[str]:
    """The paths of a stage's outs, metrics and plots."""
    found: set[str] = set()
    for kind in kinds:
        for entry in stage.get(kind, []):
            found.update(entry if isinstance(entry, dict) else [str(entry)])
    return found


def test_the_flow_runs_the_stages_in_the_order_of_dvc_yaml(
    root: Path, stages: dict[str, Stage]
) -> None:
    assert tuple(stages) == STAGES
    assert graph.order(root) == STAGES


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_runs_its_module(stages: dict[str, Stage], name: str) -> None:
    assert stages[name]["cmd"] == f"python -m tasks.{name}"


@pytest.mark.parametrize("name", STAGES)
def test_code_deps_are_the_import_closure(root: Path, stages: dict[str, Stage], name: str) -> None:
    deps = [str(dep) for dep in stages[name]["deps"]]
    sections = [str(section) for section in stages[name]["params"]]
    declared = [dep for dep in deps if sync_dvc_deps.is_code(dep)]
    assert declared == sync_dvc_deps.code_deps(root, name, sections), "run `make deps`"


def test_the_closure_follows_imports_in_functions_but_not_those_for_types(tmp_path: Path) -> None:
    package = tmp_path / "polyturn"
    (package / "sub").mkdir(parents=True)
    (tmp_path / "tasks").mkdir()
    for name in (
        "polyturn/__init__",
        "polyturn/sub/__init__",
        "polyturn/types_only",
        "tasks/__init__",
    ):
        (tmp_path / f"{name}.py").write_text("")
    (package / "a.py").write_text("def f():\n    from polyturn.sub import b\n")
    (package / "sub" / "b.py").write_text("import json\n")
    (tmp_path / "tasks/x.py").write_text(
        "from typing import TYPE_CHECKING\nimport polyturn.a\n"
        "if TYPE_CHECKING:\n    from polyturn import types_only\n"
    )
    found = sync_dvc_deps.closure(tmp_path, ["tasks/x.py"])
    assert found == {
        "tasks/__init__.py", "tasks/x.py", "polyturn/__init__.py", "polyturn/a.py",
        "polyturn/sub/__init__.py", "polyturn/sub/b.py",
    }  # fmt: skip


def sections_of(stage: Stage) -> set[str]:
    """The params sections of a stage; a single key counts as its section."""
    return {str(name).partition(".")[0] for name in stage["params"]}


def test_every_params_key_is_in_some_stage(stages: dict[str, Stage]) -> None:
    """Each section whole: a key that only a part of a section names would leave the others out."""
    whole = {
        str(name) for stage in stages.values() for name in stage["params"] if "." not in str(name)
    }
    assert whole == set(Params.model_fields)


def named_objects(value: object) -> Iterator[str]:
    """The `polyturn.module:attr` in a params tree."""
    if isinstance(value, dict):
        for item in value.values():
            yield from named_objects(item)
    elif isinstance(value, list):
        for item in value:
            yield from named_objects(item)
    elif isinstance(value, str) and re.fullmatch(r"polyturn\.[\w.]+:\w+", value):
        yield value


def test_modules_that_params_name_are_deps_of_every_stage_that_reads_the_key(
    root: Path, stages: dict[str, Stage]
) -> None:
    """No import statement shows them; all that params.yaml, recipes and defaults name is looked at."""
    trees = [yaml.safe_load(path.read_text()) for path in root.glob("recipes/*.yaml")]
    trees += [yaml.safe_load((root / "params.yaml").read_text()), Params().model_dump(mode="json")]
    found = {
        (section, name)
        for tree in trees
        for section, part in tree.items()
        for name in named_objects(part)
    }
    assert len(found) > 8
    for section, name in found:
        file = name.partition(":")[0].replace(".", "/") + ".py"
        for stage, declared in stages.items():
            if section in sections_of(declared):
                assert file in declared["deps"], f"{stage} reads {section}, which names {name}"


def test_declared_params_are_written_in_params_yaml(root: Path, stages: dict[str, Stage]) -> None:
    written = yaml.safe_load((root / "params.yaml").read_text())
    for name in {str(name) for stage in stages.values() for name in stage["params"]}:
        section, _, key = name.partition(".")
        assert section in written, "DVC fails on a param that is not there"
        assert not key or key in written[section]


def read_sections(source: str) -> set[str]:
    """Sections that a module reads, from `params.SECTION` or `….params.SECTION`."""
    return {
        node.attr
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute)
        and node.attr in Params.model_fields
        and ast.unparse(node.value).rpartition(".")[2] == "params"
    }


@pytest.mark.parametrize("name", STAGES)
def test_declared_params_are_those_that_the_code_of_a_stage_reads(
    root: Path, stages: dict[str, Stage], name: str
) -> None:
    frame = {
        "doctor",
        "storage",
        "tracking",
    }  # read by every stage's frame: addresses, never part of a result
    files = sync_dvc_deps.closure(root, [f"tasks/{name}.py"])
    code = [file for file in files if "report" not in Path(file).parts]  # shows, decides nothing
    read = set[str]().union(*(read_sections((root / file).read_text()) for file in code))
    assert read - frame == sections_of(stages[name]) - frame


def test_outs_are_the_paths_of_layout(stages: dict[str, Stage]) -> None:
    outs = {path for stage in stages.values() for path in paths(stage, "outs", "metrics", "plots")}
    inputs = {"PARAMS", "DVC_YAML", "DVC_LOCK", "STATE", "REPORT", "ACCEPTED"}
    known = {
        str(value)
        for name, value in inspect.getmembers(layout)
        if isinstance(value, Path) and name not in inputs
    }
    assert outs == known


def test_every_data_dep_is_an_out_of_an_earlier_stage(stages: dict[str, Stage]) -> None:
    written: set[str] = set()
    for stage in stages.values():
        deps = {str(dep) for dep in stage["deps"] if not sync_dvc_deps.is_code(str(dep))}
        assert deps - {"plugins"} <= written
        written |= paths(stage, "outs", "metrics", "plots")


@pytest.mark.parametrize("name", ["fetch", "model", "warmstart", "train", "evaluate"])
def test_plugins_are_a_dep_of_the_stages_that_load_user_code(
    stages: dict[str, Stage], name: str
) -> None:
    assert "plugins" in stages[name]["deps"]


def test_files_for_git_are_not_cached(stages: dict[str, Stage]) -> None:
    assert stages["evaluate"]["metrics"] == [{"metrics.json": {"cache": False}}]
    assert stages["register"]["outs"] == [{"registered.json": {"cache": False}}]


def test_the_plotted_columns_are_in_the_curve(root: Path) -> None:
    columns = curve_csv([{"rollout/raw_reward": 0.5}]).splitlines()[0].split(",")
    plots = yaml.safe_load((root / "dvc.yaml").read_text())["plots"]
    assert len(plots) == 2
    for entry in plots:
        ((_, plot),) = entry.items()
        assert plot["x"] == {"artifacts/train_curve.csv": "step"}
        ((path, column),) = plot["y"].items()
        assert path == "artifacts/train_curve.csv"
        drawn = (root / ".dvc/plots" / f"{plot['template']}.json").read_text()
        stem = column.removesuffix("_mean")
        for name in (column, f"{stem}_low", f"{stem}_high"):
            assert name in columns
            assert f'"field": "{name}"' in drawn
