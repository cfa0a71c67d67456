"""`polyturn promote`: the champion moves when the promotion rule says so, or by hand with a reason; its history."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from polyturn import layout, params
from polyturn.evaluation import compare_text
from polyturn.evaluation.compare import Comparison
from polyturn.params import Params
from polyturn.tracking import comparisons, credentials, promotion, versions
from polyturn.tracking.promotion import CHALLENGER, CHAMPION, Move, Rule
from polyturn.tracking.run import open_run
from polyturn.tracking.store import Store, TrackingError, connect, resolve, store_lock
from polyturn.tracking.versions import Entry

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """What was said, and whether the version asked for is champion now."""

    lines: Sequence[str]
    is_champion: bool


def by_rule(candidate: str | None, root: Path, *, is_sealed: bool = False) -> Outcome:
    """Make a version champion if the rule says so, else challenger; the challenger is the default candidate.

    `is_sealed`: judged by the sealed part of the test split, which is opened for both if it was not yet.

    Raises:
        TrackingError: there is no such version, the promoter's credential is missing or refused.
    """
    loaded, store = _open(root)
    name = loaded.registry.name
    with promotion.speaking(store, name):
        entry = versions.of_version(versions.find_version(store, candidate or CHALLENGER, name))
        rule = Rule(loaded.registry.min_gain, loaded.evaluate.bootstrap_samples)
        judged_against = _champion(store, _model(entry))
        load = (
            _sealed(loaded, store, root) if is_sealed else partial(versions.load, store, root=root)
        )
        verdict = promotion.judge(store, entry, rule, load)
        if verdict.comparison is not None:
            _count(loaded, root, verdict.comparison)
        with store_lock(store.addresses):
            _check_still(store, _model(entry), judged_against)
            moved = promotion.move(
                store, _model(entry), _number(entry), verdict.alias, verdict.reason
            )
    shown = compare_text.lines(verdict.comparison) if verdict.comparison else []
    return Outcome(
        [*shown, *([""] if shown else []), *_told(entry, verdict.alias, verdict.reason, moved)],
        verdict.alias == CHAMPION,
    )


def by_hand(version: str, reason: str, root: Path) -> Outcome:
    """Make a version champion whatever it scored (a rollback); the reason is recorded.

    Raises:
        ValueError: no reason is given.
        TrackingError: see `by_rule`.
    """
    if not reason.strip():
        raise ValueError("promote --to needs --reason TEXT: it is what the history keeps")
    loaded, store = _open(root)
    with promotion.speaking(store, loaded.registry.name), store_lock(store.addresses):
        found = versions.find_version(store, version, loaded.registry.name)
        model, number = str(found.name), int(found.version)
        said = f"by hand: {reason.strip()}"
        moved = promotion.move(store, model, number, CHAMPION, said)
    label = f"{model} v{number}"
    return Outcome([_line(label, CHAMPION, said, moved)], is_champion=True)


def history(root: Path) -> list[str]:
    """Every move of the model's aliases as lines, newest last, and who is what now.

    Raises:
        TrackingError: there is no such model, or the store does not answer.
    """
    loaded = params.load(root / layout.PARAMS)
    store = connect(loaded.tracking, root)
    name = loaded.registry.name
    with promotion.speaking(store, name):
        moves = promotion.history(store, name)
        holder = _champion(store, name)
    lines = [
        f"{move.at[:19].replace('T', ' ')}  {move.alias:<10} {_from(move):>4} -> v{move.version:<4} "
        f"{move.by}: {move.reason}"
        for move in moves
    ]
    last = next((m.version for m in reversed(moves) if m.alias == CHAMPION), None)
    lines.append(f"champion of {name} is {f'v{holder}' if holder else 'nobody'}")
    if holder != last:
        lines.append("it was moved last by other means than polyturn: the history does not say why")
    return lines


def _open(root: Path) -> tuple[Params, Store]:
    loaded = params.load(root / layout.PARAMS)
    credentials.become_promoter(resolve(loaded.tracking, root).uri)
    return loaded, connect(loaded.tracking, root)


def _count(loaded: Params, root: Path, found: Comparison) -> None:
    """Let a run stand for the comparison; a promoter who may open none is told that it does not count."""
    name = f"promote {found.second.label}"
    try:
        with open_run(loaded.tracking, root=root, name=name, stage="promote") as opened:
            comparisons.record(opened, found.first, found.second)
            opened.log_text(compare_text.markdown(found), "compare.md")
    except TrackingError as error:
        logger.warning("this comparison is not counted: %s", error)


def _sealed(loaded: Params, store: Store, root: Path) -> promotion.Load:
    # It loads torch, which judging by recorded results does not need.
    from polyturn.cli import sealed

    return lambda entry: sealed.score(entry, loaded, store, root)


def _champion(store: Store, name: str) -> int | None:
    found = promotion.champion(store, name)
    return int(found.version) if found else None


def _check_still(store: Store, name: str, judged_against: int | None) -> None:
    """Refuse to move the alias if somebody has moved it since the comparison was made."""
    if _champion(store, name) != judged_against:
        raise TrackingError(
            f"the champion of {name} became another one while this was compared; run it again"
        )


def _told(entry: Entry, alias: str, reason: str, moved: Move | None) -> list[str]:
    lines = [_line(entry.label, alias, reason, moved)]
    if alias == CHALLENGER:
        lines.append(
            f"`polyturn promote --to v{entry.version} --reason TEXT` moves it all the same"
        )
    return lines


def _line(label: str, alias: str, reason: str, moved: Move | None) -> str:
    if moved is None:
        return f"{label} is {alias} already: {reason}"
    if moved.before == moved.version:
        return f"{label} stays {alias}: {reason}"
    before = f" (before: v{moved.before})" if moved.before else ""
    return f"{label} is {alias} now{before}: {reason}"


def _from(move: Move) -> str:
    return f"v{move.before}" if move.before else "none"


def _model(entry: Entry) -> str:
    assert entry.model is not None
    return entry.model


def _number(entry: Entry) -> int:
    assert entry.version is not None
    return entry.version
