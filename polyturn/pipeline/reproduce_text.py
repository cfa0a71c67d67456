"""A reproduction as Markdown: what ran, what is the same, what is not."""

from __future__ import annotations

from collections.abc import Sequence

from polyturn.pipeline.reproduce import Reproduction
from polyturn.pipeline.reproduction import Row

_DIGEST = 12  # characters shown of a digest
_MAX_CHANGES = 20


def verdict(found: Reproduction) -> str:
    """The outcome in one sentence."""
    digests, numbers = (sum(row.is_same for row in rows) for rows in (found.rows, found.numbers))
    if found.is_same:
        return (
            f"Reproduced: all {digests} digests, all {numbers} numbers of metrics.json and every step of "
            f"{found.num_curves} curves are the same."
        )
    at = found.curve
    where = (
        f"the curves part at step {at.step} ({at.metric}: {at.was} -> {at.now})"
        if at
        else "the curves are the same"
    )
    return (
        f"Not reproduced: {digests} of {len(found.rows)} digests and {numbers} of {len(found.numbers)} numbers are the "
        f"same; {where}."
    )


def markdown(found: Reproduction) -> str:
    """The whole outcome."""
    record = found.recorded
    parts = [
        f"## Reproduction of {record.name} ({record.run_id})",
        verdict(found),
        f"Commit `{record.commit[:12]}`{' with uncommitted edits' if record.diff else ''}. "
        + _environment(found),
        "### Stages run again",
        _table(
            ["stage", "command ran", "seconds"],
            [
                [s.stage, "restored by digest" if s.is_restored else "yes", f"{s.seconds:.1f}"]
                for s in found.stages
            ],
        ),
        "### Digests and numbers",
        _table(["stage", "what", "recorded", "now", ""], [_row(row) for row in _shown(found)]),
    ]
    if record.tags.get("replayable") == "False":
        parts.append(
            "The run was labelled not replayable (its sampler or kernels are not deterministic): other bytes are expected."
        )
    if found.changes:
        shown = [[c.what, c.was, c.now] for c in found.changes[:_MAX_CHANGES]]
        parts += ["### Environment", _table(["", "recorded", "now"], shown)]
        if len(found.changes) > _MAX_CHANGES:
            parts.append(f"and {len(found.changes) - _MAX_CHANGES} more.")
    if found.worktree:
        parts.append(f"The worktree is left at {found.worktree}.")
    return "\n\n".join(parts) + "\n"


def _shown(found: Reproduction) -> list[Row]:
    """Digests, accuracies, and every other number that differs."""
    numbers = [r for r in found.numbers if not r.is_same or r.what.endswith(".accuracy")]
    return [*found.rows, *numbers]


def _environment(found: Reproduction) -> str:
    if not found.changes:
        return "Python, machine and all packages are those that were recorded."
    return f"The environment differs in {len(found.changes)} points (below), so bytes may differ."


def _row(row: Row) -> list[str]:
    said = "same" if row.is_same else "not recorded" if not row.was else "DIFFERS"
    return [row.stage, row.what, _short(row.was), _short(row.now), said]


def _short(value: str) -> str:
    if len(value) <= 24:
        return value
    return value[:_DIGEST] + (".dir" if value.endswith(".dir") else "")


def _table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
