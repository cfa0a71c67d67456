"""Params as plain trees: reading YAML, laying overlays over it, dotted overrides; imports without torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import cast

import yaml

Tree = dict[str, object]

# Of libyaml, where PyYAML was built with it: the same values ten times as fast, and stages read long files.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class ParamsError(ValueError):
    """params.yaml (or an overlay or override) is wrong; the message names key, value and fix, a line each."""


def parse_yaml(text: str) -> object:
    """The value that a YAML document holds.

    Raises:
        yaml.YAMLError: it is none.
    """
    return yaml.load(text, _LOADER)


def read_tree(path: Path) -> Tree:
    """Read one YAML mapping.

    Raises:
        ParamsError: the file is missing, is no YAML, or holds no mapping.
    """
    try:
        tree = parse_yaml(path.read_text())
    except FileNotFoundError:
        raise ParamsError(
            f"{path} does not exist; run from the checkout or name another file"
        ) from None
    except yaml.YAMLError as error:
        raise ParamsError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        raise ParamsError(f"{path} must hold a mapping of sections, got {type(tree).__name__}")
    return cast("Tree", tree)


def merge(base: Mapping[str, object], overlay: Mapping[str, object]) -> Tree:
    """Lay `overlay` over `base`: mappings merge key by key, anything else replaces."""
    merged: Tree = dict(base)
    for key, value in overlay.items():
        old = merged.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            merged[key] = merge(cast("Tree", old), cast("Tree", value))
        else:
            merged[key] = value
    return merged


def override(tree: Mapping[str, object], dotted: Mapping[str, object]) -> Tree:
    """Apply dotted overrides such as {"train.lr": 1e-5}.

    Raises:
        ParamsError: a dotted name runs through something that is no mapping.
    """
    merged: Tree = dict(tree)
    for name, value in dotted.items():
        nested: object = value
        for part in reversed(name.split(".")):
            nested = {part: nested}
        merged = merge(merged, cast("Tree", nested))
    return merged
