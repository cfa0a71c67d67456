"""Rewrite the code deps of dvc.yaml from the import closure of each stage's task (`make deps`)."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ruamel.yaml import YAML

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("polyturn", "tasks")
NOT_DEPS = "polyturn/params/"  # its values are tracked as params
# Modules that a stage loads by name from a params section, so that no import statement shows them.
LOADED_BY_NAME = {
    "data": "polyturn/envs/sokoban.py",  # the one source of polyturn's own that data.source names
    "env": "polyturn/envs/*.py",
    "warmstart": "polyturn/envs/*.py",
    "reward": "polyturn/reward.py",
}


def module_file(root: Path, name: str) -> str | None:
    """The file of a module of this project, relative to `root`; None for anything else."""
    if name.partition(".")[0] not in PACKAGES:
        return None
    stem = name.replace(".", "/")
    for candidate in (f"{stem}.py", f"{stem}/__init__.py"):
        if (root / candidate).is_file():
            return candidate
    return None


def imported_modules(source: str) -> Iterator[str]:
    """Dotted names that a module may import at run time, with those inside functions."""
    for node in _runtime_nodes(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _runtime_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        yield from _runtime_nodes(node)


def closure(root: Path, files: Sequence[str]) -> set[str]:
    """All project files that importing `files` may load, themselves and their packages' __init__ included."""
    seen: set[str] = set()
    waiting = list(files)
    while waiting:
        file = waiting.pop()
        if file in seen:
            continue
        seen.add(file)
        package = Path(file).parent
        while str(package) != ".":
            waiting.append(str(package / "__init__.py"))
            package = package.parent
        names = imported_modules((root / file).read_text())
        waiting.extend(found for name in names if (found := module_file(root, name)))
    return seen


def code_deps(root: Path, stage: str, sections: Sequence[str]) -> list[str]:
    """The code deps of a stage that reads these params sections, sorted."""
    by_name = {LOADED_BY_NAME[section] for section in sections if section in LOADED_BY_NAME}
    loaded = [str(path.relative_to(root)) for pattern in by_name for path in root.glob(pattern)]
    files = closure(root, [f"tasks/{stage}.py", *loaded])
    return sorted(file for file in files if not file.startswith(NOT_DEPS))


def is_code(dep: str) -> bool:
    """Whether a dep of dvc.yaml is a project module rather than data or a plug-in."""
    return dep.endswith(".py")


def main(root: Path = ROOT) -> int:
    """Rewrite dvc.yaml and say which stages changed."""
    yaml = YAML()
    yaml.indent(mapping=2, sequence=4, offset=2)
    yaml.width = 110
    path = root / "dvc.yaml"
    document = yaml.load(path.read_text())
    stages: Mapping[str, dict[str, list[str]]] = document["stages"]
    changed: list[str] = []
    for name, stage in stages.items():
        data = [dep for dep in stage["deps"] if not is_code(dep)]
        wanted = data + code_deps(root, name, stage["params"])
        if list(stage["deps"]) != wanted:
            stage["deps"][:] = wanted
            changed.append(name)
    if changed:
        temporary = path.with_suffix(".tmp")
        with temporary.open("w") as file:
            yaml.dump(document, file)
        temporary.replace(path)
    print(f"dvc.yaml: {'changed ' + ', '.join(changed) if changed else 'deps are in step'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
