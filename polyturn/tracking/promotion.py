"""Who is champion: the promotion rule, the alias moves, and the history of both."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from mlflow.exceptions import MlflowException
from pydantic import TypeAdapter, ValidationError

from polyturn.evaluation import compare
from polyturn.evaluation.compare import Comparison, OtherSetError, Scored
from polyturn.login import user
from polyturn.tracking import comparisons, versions
from polyturn.tracking.store import Store, TrackingError, first_line
from polyturn.tracking.versions import Entry, VersionError

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion

logger = logging.getLogger(__name__)

CHAMPION = "champion"
CHALLENGER = "challenger"

_REASON, _AT, _BY = (
    "{}.reason",
    "{}.at",
    "{}.by",
)  # tags of a version: why, when and by whom it has an alias
_HISTORY = "history."  # tags of the registered model: history.TIME.RANDOM -> a Move as JSON


@dataclass(frozen=True)
class Rule:
    """The champion moves when the lower bound of the paired difference exceeds `min_gain`."""

    min_gain: float
    bootstrap_samples: int


@dataclass(frozen=True)
class Verdict:
    """What the rule says of a candidate; `comparison` is None where there was nothing to compare with."""

    alias: str
    reason: str
    comparison: Comparison | None = None


@dataclass(frozen=True)
class Move:
    """One entry of the history: `alias` went to `version`; `before` is the version that had it."""

    at: str
    by: str
    alias: str
    version: int
    before: int | None
    reason: str


_MOVE = TypeAdapter(Move)


def champion(store: Store, name: str) -> ModelVersion | None:
    """The version that is champion; None where there is none."""
    return _holder(store, name, CHAMPION)


Load = Callable[[Entry], Scored]


def judge(store: Store, candidate: Entry, rule: Rule, load: Load) -> Verdict:
    """Compare a registered version with the champion of its model; `load` gives the results of each.

    Raises:
        TrackingError: the candidate's results cannot be had.
    """
    assert candidate.model is not None
    assert candidate.version is not None
    current = champion(store, candidate.model)
    if current is None:
        return Verdict(CHAMPION, "there was no champion")
    if int(current.version) == candidate.version:
        reason = current.tags.get(_REASON.format(CHAMPION), "it is the champion already")
        return Verdict(CHAMPION, reason)
    try:
        against = versions.of_version(current)
        first, second = load(against), load(candidate)
        compare.pair(first, second)
    except (OtherSetError, VersionError) as error:
        return Verdict(CHALLENGER, f"not compared with the champion: {error}")
    made = comparisons.count(store, first.evaluation, also=(first, second))
    found = compare.compare(
        first, second, num_comparisons=made.pairs, bootstrap_samples=rule.bootstrap_samples
    )
    return decide(found, rule)


def decide(found: Comparison, rule: Rule) -> Verdict:
    """What the rule says of a comparison, the champion being its first side."""
    gain = found.gain
    alias = CHAMPION if gain.low > rule.min_gain else CHALLENGER
    verb = "exceeds" if alias == CHAMPION else "does not exceed"
    reason = (
        f"gain {gain.mean:+.4f} [{gain.low:+.4f}, {gain.high:+.4f}] over {found.first.label} on "
        f"{found.rows[0].num_problems} problems: the lower bound {verb} registry.min_gain {rule.min_gain:g} "
        f"(comparison {found.num_comparisons} on this set)"
    )
    return Verdict(alias, reason, found)


def move(store: Store, name: str, version: int, alias: str, reason: str) -> Move | None:
    """Give the alias to a version, with reason, time and user as its tags and in the model's history.

    Nothing happens, and None comes back, where it has the alias for that reason already, or is champion already. A
    champion is no challenger any more.
    """
    holder = _holder(store, name, alias)
    before = int(holder.version) if holder else None
    if holder is not None and before == version:
        is_known = holder.tags.get(_REASON.format(alias)) == reason
        if is_known or alias == CHAMPION:
            return None
    entry = Move(_now(), promoter(), alias, version, before, reason)
    client = store.client
    key = f"{_HISTORY}{entry.at.partition('+')[0]}.{uuid.uuid4().hex[:6]}"
    client.set_registered_model_tag(name, key, json.dumps(asdict(entry)))
    client.set_registered_model_alias(name, alias, str(version))
    for tag, value in ((_REASON, reason), (_AT, entry.at), (_BY, entry.by)):
        client.set_model_version_tag(name, str(version), tag.format(alias), value)
    challenger = _holder(store, name, CHALLENGER)
    if alias == CHAMPION and challenger is not None and int(challenger.version) == version:
        client.delete_registered_model_alias(name, CHALLENGER)
    return entry


def history(store: Store, name: str) -> list[Move]:
    """Every move of an alias of the model, oldest first."""
    tags = store.client.get_registered_model(name).tags
    moves: list[Move] = []
    for key, value in sorted(tags.items()):
        if not key.startswith(_HISTORY):
            continue
        try:
            moves.append(_MOVE.validate_json(value))
        except ValidationError as error:
            first = error.errors()[0]
            logger.warning("%s: tag %s is no move of an alias: %s", name, key, first["msg"])
    return moves


def promoter() -> str:
    """Who moves an alias: the user that the server knows, else the one of this machine."""
    return os.environ.get("MLFLOW_TRACKING_USERNAME") or user()


@contextlib.contextmanager
def speaking(store: Store, name: str) -> Iterator[None]:
    """What the registry refuses becomes one line.

    Raises:
        TrackingError: it refused or did not answer.
    """
    try:
        yield
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            known = ", ".join(versions.registered_models(store)) or "none"
            raise TrackingError(
                f"registry.name {name!r} is not in the registry at {store.addresses.uri!r}, or a version that was asked "
                f"for is not ({first_line(error)}); models there: {known}"
            ) from None
        raise TrackingError(
            f"registry.name {name!r}: {promoter()} at {store.addresses.uri!r} was refused or got no answer "
            f"({first_line(error)})"
        ) from None


def _holder(store: Store, name: str, alias: str) -> ModelVersion | None:
    aliases = store.client.get_registered_model(name).aliases
    if alias not in aliases:
        return None
    return store.client.get_model_version(name, str(aliases[alias]))


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
