"""Trajectories of a run as one self-contained HTML page: siblings side by side, every token, pictures, filters."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from markupsafe import Markup

from polyturn import layout, trajectories
from polyturn.pictures import Pictures
from polyturn.report.data import picture_directories
from polyturn.report.trajectories import TEMPLATES, Shown, TokenReader, show
from polyturn.report.write import write_page
from polyturn.trajectories import TrajectoryEntry
from polyturn.trajectory_times import Times, read_times

MAX_TRAJECTORIES = 400  # of a page; more steps are thinned out evenly, and the page says so


class ViewError(ValueError):
    """There is nothing to view; the message names what was looked for."""


@dataclass(frozen=True)
class ShownGroup:
    """The sibling trajectories of one problem at one step."""

    title: str
    step: int
    siblings: Sequence[Shown]
    times: Times  # seconds in the environment, by (group, sibling); may be empty


@dataclass(frozen=True)
class Loaded:
    """Trajectories in (step, group, sibling) order, with the steps that exist and those that are shown."""

    entries: Sequence[TrajectoryEntry]
    all_steps: Sequence[int]
    shown_steps: Sequence[int]


def view(source: Path, out: Path, *, steps: Sequence[int] | None = None) -> Path:
    """Write the page `out` for a run directory, a directory of step files, or one trajectory file.

    `steps` names the steps to show; without it, as many evenly spaced ones as MAX_TRAJECTORIES allows.

    Raises:
        ViewError: there are no trajectories, or not at the steps asked for.
        TrajectoryFileError: a file cannot be read.
    """
    loaded = load(source, steps)
    directory, root = _directory_of(source), _root_of(source)
    reader = TokenReader(_tokenizer(directory, root))
    times = {step: read_times(directory, step) for step in loaded.shown_steps}
    groups = [
        _group(list(entries), reader, times.get(step, {}))
        for (step, _), entries in groupby(loaded.entries, key=_group_key)
    ]
    directories = [directory / "png", *(picture_directories(root) if root else [])]
    addresses = _addresses(loaded.entries, Pictures(directories))

    def source_of(sha256: str) -> Markup | None:
        return Markup('data-sha="{}"').format(sha256) if sha256 in addresses else None

    page = TEMPLATES.get_template("view.html.jinja").render(
        title=source.resolve().name,
        groups=groups,
        src=source_of,
        addresses=addresses,
        shown_steps=loaded.shown_steps,
        num_steps=len(loaded.all_steps),
        rewards=_reward_range(loaded.entries),
        verdicts=_present(shown.verdict for group in groups for shown in group.siblings),
        statuses=_present(entry["status"] for entry in loaded.entries),
        num_trajectories=len(loaded.entries),
    )
    return write_page(out, page)


def load(source: Path, steps: Sequence[int] | None = None) -> Loaded:
    """The trajectories to show.

    Raises:
        ViewError, TrajectoryFileError: see `view`.
    """
    if source.is_file():
        entries = trajectories.read_records(source)
        known = sorted({entry["step"] for entry in entries})
        return Loaded(sorted(entries, key=_order), known, known)
    directory = _directory_of(source)
    known = trajectories.list_steps(directory)
    if not known:
        raise ViewError(
            f"{source} holds no trajectories: neither step_*.jsonl.gz nor {layout.TRAJECTORIES}; name a run "
            "directory, a directory of step files, or one .jsonl.gz file"
        )
    missing = sorted(set(steps or ()) - set(known))
    if missing:
        raise ViewError(
            f"{directory} has no steps {missing}; it has {known[0]} to {known[-1]} ({len(known)} files)"
        )
    first = trajectories.read_step(directory, known[0])
    most = max(1, MAX_TRAJECTORIES // max(1, len(first)))
    shown = sorted(steps) if steps else trajectories.thin(known, most)
    entries = [entry for step in shown for entry in trajectories.read_step(directory, step)]
    return Loaded(sorted(entries, key=_order), known, shown)


def _order(entry: TrajectoryEntry) -> tuple[int, int, int]:
    return entry["step"], entry["group"], entry["sibling"]


def _group_key(entry: TrajectoryEntry) -> tuple[int, int]:
    return entry["step"], entry["group"]


def _group(entries: Sequence[TrajectoryEntry], reader: TokenReader, times: Times) -> ShownGroup:
    first = entries[0]
    rewards = [entry["reward"] for entry in entries]
    known = [reward for reward in rewards if reward is not None]
    mean = f", mean {sum(known) / len(known):.2f}" if len(known) > 1 else ""
    said = " ".join("none" if reward is None else f"{reward:g}" for reward in rewards)
    title = f"Step {first['step']}, {first['problem_id']}: reward {said}{mean}"
    return ShownGroup(title, first["step"], [show(entry, reader) for entry in entries], times)


def _reward_range(entries: Sequence[TrajectoryEntry]) -> tuple[float, float]:
    known = [entry["reward"] for entry in entries if entry["reward"] is not None]
    return (min(known), max(known)) if known else (0.0, 0.0)


def _present(values: Iterable[str]) -> list[str]:
    return sorted(set(values))


def _directory_of(source: Path) -> Path:
    """The directory whose step files (or whose file) are shown."""
    if source.is_file():
        return source.parent
    nested = source / layout.TRAJECTORIES
    return nested if nested.is_dir() else source


def _root_of(source: Path) -> Path | None:
    """The run directory that `source` is or lies in, if it has a policy's tokenizer."""
    absolute = source.resolve()
    for candidate in (absolute, *absolute.parents):
        if (candidate / layout.POLICY / "tokenizer.json").exists():
            return candidate
    return None


def _tokenizer(directory: Path, root: Path | None) -> Path | None:
    """The tokenizer that lies beside the files, else the one of the run directory's policy."""
    beside = directory / "tokenizer.json"
    if beside.exists():
        return beside
    return root / layout.POLICY / "tokenizer.json" if root else None


def _addresses(entries: Iterable[TrajectoryEntry], pictures: Pictures) -> dict[str, str]:
    """Data URIs of all pictures that are found, each once."""
    wanted = {image["sha256"] for entry in entries for image in entry["images"]}
    found = {sha256: pictures.data_uri(sha256) for sha256 in sorted(wanted)}
    return {html.escape(sha256): uri for sha256, uri in found.items() if uri}
