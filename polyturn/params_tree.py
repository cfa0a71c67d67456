"""Params as plain trees: reading YAML, laying overlays over it, dotted overrides; imports without torch."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import yaml

Tree = dict[str, object]

_MERGE = "tag:yaml.org,2002:merge"  # what << is read as
_INT, _FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"
if TYPE_CHECKING:
    from yaml import SafeLoader as _Loader
else:
    # Of libyaml, where PyYAML was built with it: the same values ten times as fast, and stages read long files.
    _Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _AsDvc(_Loader):
    """Reads as DVC does (YAML 1.2), whose view of a file decides what is out of date.

    A mapping that has a key twice is refused. 1e-5 and 1.0e5 are numbers, 010 is ten and 1:30 is text, where PyYAML
    (YAML 1.1) would say: text, text, eight, ninety.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Called for every mapping of a document."""
        known: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == _MERGE:
                continue
            if (key.tag, key.value) in known:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key.value!r} is there twice", key.start_mark
                )
            known.add((key.tag, key.value))
        return super().construct_mapping(node, deep)

    def whole(self, node: yaml.ScalarNode) -> int | str:
        """Called for what looks like a whole number."""
        if ":" in node.value:
            return node.value
        digits = node.value.replace("_", "")
        return int(digits) if digits.lstrip("+-").isdecimal() else self.construct_yaml_int(node)

    def fraction(self, node: yaml.ScalarNode) -> float | str:
        """Called for what looks like another number."""
        return node.value if ":" in node.value else self.construct_yaml_float(node)


_AsDvc.add_constructor(_INT, _AsDvc.whole)
_AsDvc.add_constructor(_FLOAT, _AsDvc.fraction)
_AsDvc.add_implicit_resolver(_INT, re.compile(r"[-+]?[0-9]+$"), list("-+0123456789"))
_AsDvc.add_implicit_resolver(
    _FLOAT, re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$"), list("-+.0123456789")
)


class ParamsError(ValueError):
    """params.yaml (or an overlay or override) is wrong; the message names key, value and fix, a line each."""


def parse_value(text: str) -> object:
    """The value that a YAML document holds, as `read_tree` reads one.

    Raises:
        yaml.YAMLError: it is none.
    """
    return yaml.load(text, _AsDvc)


def parse_yaml(text: str) -> object:
    """The value that a YAML document holds; the fast one, for what programs wrote.

    Raises:
        yaml.YAMLError: it is none.
    """
    return yaml.load(text, _Loader)


def read_tree(path: Path) -> Tree:
    """Read one YAML mapping.

    Raises:
        ParamsError: the file is missing, is no YAML, or holds no mapping.
    """
    try:
        tree = yaml.load(path.read_text(), _AsDvc)
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
