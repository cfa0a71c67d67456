"""What may import what."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest


def test_layers_hold(root: Path) -> None:
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"]
    result = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("polyturn.params", ("torch", "PIL", "mlflow", "transformers")),
        ("polyturn.types", ("torch", "PIL", "mlflow", "transformers")),
        ("polyturn.cli.commands", ("torch", "mlflow", "numpy", "pydantic")),
        ("tasks.context", ("torch", "prefect", "dvc", "mlflow")),
        ("flows.pipeline", ("torch",)),
    ],
)
def test_importing_a_module_loads_nothing_heavy(
    root: Path, module: str, forbidden: tuple[str, ...]
) -> None:
    code = f"import sys, {module}; print([n for n in {forbidden!r} if n in sys.modules])"
    output = subprocess.check_output([sys.executable, "-c", code], cwd=root, text=True)
    assert output.strip().splitlines()[-1] == "[]"


def test_the_installed_package_is_polyturn_alone(root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["packages"]["find"] == {"include": ["polyturn*"]}


def test_the_constraints_pin_every_direct_dependency(root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    lines = (root / "docker/constraints-cpu.txt").read_text().splitlines()
    pinned = {line.partition("==")[0].lower().replace("_", "-") for line in lines if "==" in line}
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    names = {text.partition(">=")[0].partition("[")[0].lower() for text in wanted}
    assert names <= pinned
