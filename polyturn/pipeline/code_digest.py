"""Digest of what modules do: of their syntax trees, so that comments, docstrings and formatting do not count."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import cast


def code_digest(modules: Iterable[str]) -> str:
    """Digest of modules and packages (with everything below them) by import name; none is run, but their parents.

    A module that is not there, or has no source, counts by its name alone.
    """
    total = hashlib.sha256()
    for name in sorted(set(modules)):
        for path, shown in _sources(name):
            total.update(f"{shown}\0{_tree(path)}\n".encode())
    return total.hexdigest()


def _sources(name: str) -> list[tuple[Path | None, str]]:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        return [(None, name)]
    origin = Path(spec.origin)
    if spec.submodule_search_locations is None:
        return [(origin, name)]
    root = origin.parent
    files = sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix())
    return [(path, f"{name}/{path.relative_to(root).as_posix()}") for path in files]


def _tree(path: Path | None) -> str:
    if path is None:
        return ""
    tree = ast.parse(path.read_bytes())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body
            if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
                del body[0]
    return _shape(tree)


def _shape(node: object) -> str:
    """As `ast.dump`, without what is empty: fields that another Python has added do not count either."""
    if isinstance(node, list):
        items = cast("list[object]", node)
        return f"[{','.join(map(_shape, items))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = [
        f"{name}={_shape(value)}"
        for name, value in ast.iter_fields(node)
        if value not in (None, [])
    ]
    return f"{type(node).__name__}({','.join(fields)})"
