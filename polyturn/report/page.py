"""The contents of the report page, from what a run directory holds: words, numbers and charts, no markup but SVG."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from polyturn.evaluation.statistics import paired_difference
from polyturn.report.charts import Bar, Line, Numbers, bar_chart, line_chart, short
from polyturn.report.data import MODES, POLICIES, DataCounts, RunData, Scores
from polyturn.report.details import (
    MODE_NAMES,
    NAMES,
    Command,
    Fact,
    ScoreTable,
    TimeBar,
    commands_of,
    duration,
    links_of,
    percent,
    score_table,
    time_bars,
    versions_of,
)
from polyturn.report.sheets import Sheets, read_sheets
from polyturn.report.trajectories import Shown, TokenReader, show, verdict
from polyturn.trajectories import TrajectoryEntry

_SMALL: Sequence[tuple[str, Mapping[str, str]]] = (  # title, column of train_curve.csv -> label
    ("Turns and tool calls", {"turns_mean": "turns", "tool_calls_mean": "tool calls"}),
    ("Sampled tokens per trajectory", {"response_len_mean": "tokens"}),
    ("Truncated trajectories", {"truncated_fraction": "share"}),
    ("Groups without variance", {"zero_variance_groups": "groups"}),
    ("Entropy, nats per token", {"entropy": "entropy"}),
    (
        "Logprob gap",
        {"logprob_gap_mean": "mean", "logprob_gap_max": "max"},
    ),
)
_TURNS_TO_SHOW = 4
_PAIRED_SAMPLES = 2000
_SEED = 0  # of the paired bootstrap shown here


@dataclass(frozen=True)
class Headline:
    """Accuracy before and after, and the sentence that explains it; `before` is None without a warm-start score."""

    before: str | None
    after: str
    sentence: Markup


@dataclass(frozen=True)
class SmallChart:
    """One of the small charts."""

    name: str
    last: Sequence[tuple[str, str]]  # colour class and text of each line's last value
    svg: Markup


@dataclass(frozen=True)
class Exhibit:
    """One trajectory to show and whose it is."""

    shown: Shown
    label: str


@dataclass(frozen=True)
class Page:
    """What report.html.jinja shows, in its order."""

    title: str
    subtitle: str
    headline: Headline | None
    tiles: Sequence[Fact]
    reward_chart: Markup | None
    reward_note: str
    has_band: bool
    has_validation: bool
    small_charts: Sequence[SmallChart]
    bars: Markup | None
    score_table: ScoreTable
    exhibits: Sequence[Exhibit]
    exhibit_source: str
    times: Sequence[TimeBar]
    total_time: str
    counts: Sequence[DataCounts]
    sheets: Sheets
    links: Sequence[Fact]
    versions: Sequence[Fact]
    digests: Sequence[tuple[str, str]]
    commands: Sequence[Command]


def build_page(run: RunData, reader: TokenReader) -> Page:
    """Put the page together."""
    reward = run.curve.get("reward_mean", ())
    return Page(
        title=_registered_name(run) or "training report",
        subtitle=_subtitle(run),
        headline=_headline(run),
        tiles=_tiles(run),
        reward_chart=reward_chart(run) if reward else None,
        reward_note=_reward_note(reward) + _environments_note(run),
        has_band=bool(run.curve.get("reward_low")),
        has_validation=any(v is not None for v in run.curve.get("eval_accuracy", ())),
        small_charts=_small_charts(run),
        bars=accuracy_bars(run),
        score_table=score_table(run),
        exhibits=[Exhibit(show(entry, reader), label) for entry, label in choose(run)],
        exhibit_source=run.exhibits.source,
        times=time_bars(run),
        total_time=duration(sum(time.seconds for time in run.times)),
        counts=run.counts,
        sheets=read_sheets(run.root),
        links=links_of(run),
        versions=versions_of(run),
        digests=sorted(run.digests.items()),
        commands=commands_of(run),
    )


def choose(run: RunData) -> list[tuple[TrajectoryEntry, str]]:
    """A handful to show: one problem before and after, a success, a failure, a success before training."""
    before, after = run.exhibits.before, run.exhibits.after
    first = {entry["problem_id"]: entry for entry in reversed(before)}
    chosen: list[tuple[TrajectoryEntry, str]] = []

    def take(entries: Sequence[TrajectoryEntry], wanted: str, label: str) -> None:
        taken = {id(entry) for entry, _ in chosen}
        fitting = [e for e in entries if (verdict(e) == "correct") == (wanted == "correct")]
        fitting = [e for e in fitting if id(e) not in taken]
        if fitting:
            chosen.append((min(fitting, key=_distance), label))

    turned = [
        entry
        for entry in after
        if verdict(entry) == "correct"
        and entry["problem_id"] in first
        and verdict(first[entry["problem_id"]]) != "correct"
    ]
    if turned:
        best = min(turned, key=_distance)
        chosen += [(first[best["problem_id"]], NAMES["warmstart"]), (best, NAMES["policy"])]
    else:
        take(before, "wrong", NAMES["warmstart"])
    take(after, "correct", NAMES["policy"])
    take(after, "wrong", NAMES["policy"])
    take(before, "correct", NAMES["warmstart"])
    return chosen


def _distance(entry: TrajectoryEntry) -> int:
    """From the number of turns that fits on a page."""
    return abs(len(entry["turns"]) - _TURNS_TO_SHOW)


def _registered_name(run: RunData) -> str | None:
    registered = run.registered
    return f"{registered['name']} version {registered['version']}" if registered else None


def _subtitle(run: RunData) -> str:
    commit = run.environment.commit
    parts = [_registered_name(run) or "not registered"]
    if commit:
        parts.append(f"commit {commit[:10]}{' with edits' if run.environment.diff else ''}")
    if run.params:
        parts.append(f"seed {run.params.seed}")
    return " · ".join(parts)


def _headline(run: RunData) -> Headline | None:
    after = run.scores.get(("policy", "sampled"))
    if after is None:
        return None
    before = run.scores.get(("warmstart", "sampled"))
    problems = f"{run.num_problems} held-out problems" if run.num_problems else "held-out problems"
    if before is None:
        said = Markup("Accuracy on {}: <b>{}</b>.").format(problems, _with_interval(after))
        return Headline(None, percent(after["accuracy"]), said)
    said = Markup(
        "Accuracy on {}: <b>{}</b> after the warm start, <b>{}</b> after reinforcement learning."
    )
    sentence = said.format(problems, _with_interval(before), _with_interval(after))
    if gain := _paired_gain(run):
        sentence += Markup(" On the same problems that is <b>{}</b>.").format(gain)
    return Headline(percent(before["accuracy"]), percent(after["accuracy"]), sentence)


def _paired_gain(run: RunData) -> str | None:
    tries = run.tries
    first, second = ([row.get(f"{p}/sampled") for row in tries] for p in POLICIES)
    if not tries or any(not row for row in (*first, *second)):
        return None
    means = [[sum(row) / len(row) for row in side if row] for side in (first, second)]
    gain = paired_difference(means[0], means[1], _PAIRED_SAMPLES, _SEED)
    return f"{100 * gain.mean:+.1f} points ({100 * gain.low:.1f} to {100 * gain.high:.1f})"


def _with_interval(scores: Scores) -> str:
    text = percent(scores["accuracy"])
    if "accuracy_low" in scores and "accuracy_high" in scores:
        text += f" ({percent(scores['accuracy_low'])} to {percent(scores['accuracy_high'])})"
    return text


def _tiles(run: RunData) -> list[Fact]:
    tiles: list[Fact] = []
    reward = [value for value in run.curve.get("reward_mean", ()) if value is not None]
    if reward:
        tail = max(1, len(reward) // 10)
        ends = [sum(part) / tail for part in (reward[:tail], reward[-tail:])]
        tiles.append(
            Fact(
                "Training reward",
                f"{ends[0]:.2f} → {ends[1]:.2f}",
                f"first and last {tail} steps" if tail > 1 else "first and last step",
            )
        )
        shape = run.params.rollout if run.params else None
        note = f"{shape.prompts_per_step} problems × {shape.group_size} tries" if shape else ""
        tiles.append(Fact("Rollout batches", str(len(reward)), note))
    turns = run.scores.get(("policy", "sampled"), {}).get("turns_mean")
    if turns is not None:
        warm = run.scores.get(("warmstart", "sampled"), {}).get("turns_mean")
        tiles.append(
            Fact(
                "Turns per problem",
                f"{turns:.1f}",
                f"{warm:.1f} after the warm start" if warm else "",
            )
        )
    if run.times:
        total = sum(time.seconds for time in run.times)
        tiles.append(Fact("Time, all stages", duration(total), run.environment.cpu_model))
    if run.registered:
        tiles.append(
            Fact(
                "Registry", str(run.registered.get("alias", "version")), _registered_name(run) or ""
            )
        )
    return tiles


def reward_chart(run: RunData, size: tuple[int, int] = (1024, 380)) -> Markup:
    """Reward by step with its band, and the validation accuracies."""
    curve = run.curve
    lines = [
        Line(
            "reward",
            curve["reward_mean"],
            "a",
            curve.get("reward_low", ()),
            curve.get("reward_high", ()),
        )
    ]
    if any(value is not None for value in curve.get("eval_accuracy", ())):
        low, high = curve.get("eval_accuracy_low", ()), curve.get("eval_accuracy_high", ())
        lines.append(Line("validation accuracy", curve["eval_accuracy"], "b", low, high))
    values = [v for line in lines for row in (line.values, line.low, line.high) for v in row if v]
    unit = (0.0, 1.0) if all(0 <= value <= 1 for value in values) else None
    return line_chart(lines, size=size, unit=unit, title="Reward by training step")


def _reward_note(reward: Numbers) -> str:
    values = [value for value in reward if value is not None]
    if len(values) < 3:
        return f"{len(values)} rollout batches."
    third = len(values) // 3
    parts = [
        sum(part) / len(part) for part in (values[:third], values[third:-third], values[-third:])
    ]
    return (
        f"Mean over the thirds of training: {parts[0]:.2f}, {parts[1]:.2f}, {parts[2]:.2f}. "
        "Hold the pointer over a step for its numbers."
    )


def _environments_note(run: RunData) -> str:
    """That rewards and validation are under different environments, if they are."""
    changed = run.params.env.eval_params if run.params else {}
    if not changed:
        return ""
    shown = ", ".join(f"{key}: {json.dumps(value)}" for key, value in sorted(changed.items()))
    return f" Validation changes the environment of the rewards: {shown}."


def _small_charts(run: RunData) -> list[SmallChart]:
    charts: list[SmallChart] = []
    for title, columns in _SMALL:
        known = {
            c: n for c, n in columns.items() if any(v is not None for v in run.curve.get(c, ()))
        }
        if not known:
            continue
        lines = [
            Line(name, run.curve[column], tone)
            for (column, name), tone in zip(known.items(), ("a", "c"), strict=False)
        ]
        last = [(line.tone, _last_value(line, alone=len(lines) == 1)) for line in lines]
        svg = line_chart(lines, size=(330, 150), unit=None, title=title)
        charts.append(SmallChart(title, last, svg))
    return charts


def _last_value(line: Line, *, alone: bool) -> str:
    value = [value for value in line.values if value is not None][-1]
    return short(value) if alone else f"{line.label} {short(value)}"


def accuracy_bars(run: RunData, width: int = 1024) -> Markup | None:
    """Accuracies with intervals; None without an evaluation."""
    bars = [
        Bar(
            f"{NAMES[policy]}, {MODE_NAMES[mode]}",
            scores["accuracy"],
            scores.get("accuracy_low", scores["accuracy"]),
            scores.get("accuracy_high", scores["accuracy"]),
            "a" if policy == "policy" else "c",
        )
        for mode in MODES
        for policy in POLICIES
        if (scores := run.scores.get((policy, mode)))
    ]
    return bar_chart(bars, width=width, title="Accuracy with intervals") if bars else None
