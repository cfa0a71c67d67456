"""Why DVC calls a stage stale, in words: values of params old and new, code against the version that ran."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from polyturn.params_tree import read_tree
from polyturn.pipeline.code_history import CodeChange, code_change

# As DVC's status says it: a text ("changed command"), or what changed -> path -> how.
Change = str | Mapping[str, object]
Kind = Literal["param", "code", "dep", "out", "command"]
Lock = Mapping[str, object]  # a stage's entry in dvc.lock
_PLUGINS = "plugins"  # the user's own code: a dep as a whole of each stage that may load some of it


@dataclass(frozen=True)
class Reason:
    """Why a stage would run: a key of params.yaml, code, other input, output or the command, and what is new about it.

    `diff` is the unified diff of code against the version that ran; "" where that is in no commit.
    """

    kind: Kind
    what: str
    detail: str
    diff: str = ""

    def __str__(self) -> str:
        return f"{self.kind:<7} {self.what}{': ' if self.detail else ''}{self.detail}"


def reasons_of(
    root: Path, stage: str, changes: Sequence[Change], lock: Lock | None
) -> Iterator[Reason]:
    """The reasons in DVC's words for `stage`; one without a record in dvc.lock differs in every file, which says nothing."""
    if changes and lock is None:
        yield Reason("command", stage, "never ran in this checkout")
        return
    for change in changes:
        if isinstance(change, str):
            yield Reason("command", stage, change)
            continue
        for kind, paths in change.items():
            for path, how in cast("Mapping[str, object]", paths).items():
                yield from _of_path(root, kind, path, how, lock or {})


def _of_path(root: Path, kind: str, path: str, how: object, lock: Lock) -> Iterator[Reason]:
    if isinstance(how, Mapping):  # keys of params.yaml
        yield from _param_reasons(root, path, cast("Mapping[str, object]", how), lock)
    elif kind == "changed outs":
        yield Reason("out", path, str(how))
    elif path == _PLUGINS:  # DVC has one digest for all of it, so no commit can be named
        yield Reason("code", path, f"{how} (a file in it is new, changed or gone)")
    elif path.endswith(".py"):
        yield _code_reason(code_change(root, path, _digest(lock, path)), str(how))
    else:
        yield Reason("dep", path, str(how))


def _code_reason(change: CodeChange, how: str) -> Reason:
    if change.since is None:
        return Reason("code", change.path, f"{how}; the version that ran is in no commit")
    detail = f"+{change.num_added} -{change.num_removed} since {change.since[:10]}"
    return Reason("code", change.path, detail, change.diff)


def _param_reasons(
    root: Path, path: str, keys: Mapping[str, object], lock: Lock
) -> Iterator[Reason]:
    """Old and new value of each key below the tracked ones that DVC calls changed."""
    recorded = cast("Mapping[str, Mapping[str, object]]", lock.get("params", {})).get(path, {})
    tree = read_tree(root / path)
    for key, how in keys.items():
        old = _value(recorded, key)
        changed = list(_leaves(old, _value(tree, key), key))
        yield from changed or [Reason("param", key, str(how))]


def _leaves(old: object, new: object, key: str) -> Iterator[Reason]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        before, after = cast("Mapping[str, object]", old), cast("Mapping[str, object]", new)
        for name in sorted({*before, *after}):
            yield from _leaves(before.get(name), after.get(name), f"{key}.{name}")
    elif old != new:
        yield Reason("param", key, f"{_shown(old)} -> {_shown(new)}")


def _shown(value: object) -> str:
    text = "default" if value is None else json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _value(tree: Mapping[str, object], dotted: str) -> object:
    """The value at a dotted name; dvc.lock holds such names as keys of their own."""
    if dotted in tree:
        return tree[dotted]
    value: object = tree
    for part in dotted.split("."):
        value = (
            cast("Mapping[str, object]", value).get(part) if isinstance(value, Mapping) else None
        )
    return value


def _digest(lock: Lock, path: str) -> str | None:
    for entry in cast("Sequence[Mapping[str, str]]", lock.get("deps", ())):
        if entry["path"] == path:
            return entry.get("md5")
    return None
