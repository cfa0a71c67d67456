"""The run card: one page on one run - what was trained on what, how well, how fast, at what cost - as HTML and Markdown."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from markupsafe import Markup

from polyturn import layout
from polyturn.policy import flops
from polyturn.report.charts import short
from polyturn.report.data import RunData
from polyturn.report.details import Fact, duration, percent, score_table, versions_of
from polyturn.report.page import accuracy_bars, reward_chart
from polyturn.report.trajectories import TEMPLATES
from polyturn.report.work import History, Machine, Phase, phases
from polyturn.report.write import write_page

HTML, MARKDOWN = Path("runs/card.html"), Path("runs/card.md")

_CURVE, _BARS = (520, 250), 520  # sizes of the charts, which stand side by side
_GAP = "train/train_rollout_logprob_abs_diff"
_SECONDS_PER_HOUR = 3600


@dataclass(frozen=True)
class TrainingRun:
    """What MLflow knows of the training run: tags (machine, versions) and the histories of report.work.METRICS."""

    run_id: str
    tags: Mapping[str, str]
    history: History


@dataclass(frozen=True)
class Part:
    """A titled part of the card: facts, or a table whose first row is the heading; `note` stands below the title."""

    title: str
    facts: Sequence[Fact] = ()
    table: Sequence[Sequence[str]] = ()
    note: str = ""


@dataclass(frozen=True)
class Card:
    """What card.html.jinja shows."""

    title: str
    subtitle: str
    headline: str
    curve: Markup | None
    bars: Markup | None
    parts: Sequence[Part]


def write_card(root: Path, run: RunData, training: TrainingRun) -> tuple[Path, Path]:
    """Write the card of the run below `root`; returns the paths of HTML and Markdown."""
    card = build_card(run, training)
    html = TEMPLATES.get_template("card.html.jinja").render(card=card)
    return write_page(root / HTML, html), write_page(root / MARKDOWN, markdown(card))


def build_card(run: RunData, training: TrainingRun) -> Card:
    """Put the card together; what is not known is said to be so."""
    machine = _machine(run, training)
    work = _phases(run, training, machine)
    registered = run.registered
    title = f"{registered['name']} version {registered['version']}" if registered else "run card"
    return Card(
        title=title,
        subtitle=f"training run {training.run_id or 'unknown'}",
        headline=_headline(run),
        curve=reward_chart(run, _CURVE) if run.curve.get("reward_mean") else None,
        bars=accuracy_bars(run, _BARS),
        parts=[
            Part("Trained on", facts=_trained(run, training)),
            Part("Accuracy", table=_scores(run)),
            Part("Time and work by phase", table=_work_table(work), note=_work_note(work, machine)),
            Part("Time and cost", facts=_cost(run, machine)),
            Part("Sampler against learner", facts=_gap(training)),
            Part("Environment", facts=_environment(run, training, machine)),
        ],
    )


def markdown(card: Card) -> str:
    """The card without its charts."""
    lines = [f"# {card.title}", card.headline, card.subtitle]
    for part in card.parts:
        lines += [f"## {part.title}"] + ([part.note] if part.note else [])
        rows = part.table or [["", ""], *([fact.name, _said(fact)] for fact in part.facts)]
        marked = [f"| {' | '.join(cell.replace('|', '&#124;') for cell in row)} |" for row in rows]
        lines.append("\n".join([marked[0], "|" + "---|" * len(rows[0]), *marked[1:]]))
    return "\n\n".join(lines) + "\n"


def _said(fact: Fact) -> str:
    return f"{fact.value} ({fact.note})" if fact.note else fact.value


def _headline(run: RunData) -> str:
    scores = run.scores.get(("policy", "sampled"))
    if scores is None:
        return "Not evaluated yet."
    low, high = scores["accuracy_low"], scores["accuracy_high"]
    before = run.scores.get(("warmstart", "sampled"), {}).get("accuracy")
    came = f", after {percent(before)} before training" if before is not None else ""
    return (
        f"Accuracy {percent(scores['accuracy'])} (95% interval {percent(low)} to {percent(high)}) on "
        f"{run.num_problems} held-out problems{came}."
    )


def _trained(run: RunData, training: TrainingRun) -> list[Fact]:
    params = run.params
    if params is None:
        return [Fact("params", "not readable")]
    rewards = [v for v in run.curve.get("reward_mean", ()) if v is not None]
    train = next((count.kept for count in run.counts if count.split == "train"), None)
    model = params.model.path or f"small Qwen3-VL, hidden size {params.model.small.hidden_size}"
    rollout, learner = params.rollout, params.learner
    facts = [
        Fact("model", model),
        Fact("data", params.data.path or params.data.source, f"{train} training problems"),
        Fact("data digest", run.digests.get(str(layout.PROBLEMS), "unknown")),
        Fact("environment", params.env.build, f"at most {rollout.max_turns} turns"),
        Fact(
            "batches",
            f"{len(rewards)} of {rollout.prompts_per_step} problems x {rollout.group_size} tries",
        ),
        Fact("learner", f"{learner.backend}, learning rate {learner.lr:g}"),
        Fact("sampler", params.sampler.backend, f"temperature {rollout.temperature:g}"),
        Fact("seed", str(params.seed)),
        Fact("weights", training.tags.get("weights.sha256", "unknown")),
    ]
    if "stop_reason" in run.train_run:
        facts.append(Fact("ended early", str(run.train_run["stop_reason"])))
    return facts


def _scores(run: RunData) -> list[list[str]]:
    table = score_table(run)
    if not table.rows:
        return [["", "no evaluation"]]
    intervals = [
        f"{percent(s['accuracy_low'])} to {percent(s['accuracy_high'])}"
        for s in run.scores.values()
    ]
    heading = ["", table.columns[0], "95% interval", *table.columns[1:]]
    rows = [
        [row[0], row[1], interval, *row[2:]]
        for row, interval in zip(table.rows, intervals, strict=True)
    ]
    return [heading, *rows]


def _machine(run: RunData, training: TrainingRun) -> Machine:
    gpu = training.tags.get("gpu.model", "").partition(",")[0]
    given = run.params.doctor.peak_tflops if run.params else None
    count = training.tags.get("num_processes", "1")
    return Machine(gpu, int(count) if count.isdigit() else 1, given or flops.peak_tflops(gpu))


def _phases(run: RunData, training: TrainingRun, machine: Machine) -> list[Phase]:
    path = run.root / layout.POLICY / "config.json"
    try:
        config = cast("Mapping[str, object]", json.loads(path.read_text()))
    except (OSError, ValueError):
        config = {}
    if not isinstance(config, dict) or "vision_config" not in config:
        config = None
    return phases(training.history, run.params, config, machine) if run.params else []


def _work_table(work: Sequence[Phase]) -> list[list[str]]:
    if not work:
        return [["", "no times of this training run are known here"]]
    total = sum(phase.seconds for phase in work)
    heading = ["phase", "time", "share", "tokens", "tokens/s", "TFLOP", "TFLOP/s", "utilisation"]
    return [
        heading,
        *(
            [
                phase.name,
                duration(phase.seconds),
                percent(phase.seconds / total),
                _count(phase.tokens),
                _number(phase.tokens_per_second),
                _number(phase.tflop),
                _number(phase.tflops),
                "–" if phase.utilisation is None else percent(phase.utilisation),
            ]
            for phase in work
        ),
    ]


def _work_note(work: Sequence[Phase], machine: Machine) -> str:
    if not work:
        return ""
    counted = "Tokens of a rollout are sampled ones, of an update trained ones; operations are counted from the model's sizes."
    if not machine.gpu:
        return counted
    if machine.peak_tflops is None:
        return f"{counted} doctor.peak_tflops gives the peak of {machine.gpu}, from which utilisation follows."
    return f"{counted} Utilisation is of {machine.num_processes} x {machine.peak_tflops:g} TFLOP/s (dense bfloat16)."


def _cost(run: RunData, machine: Machine) -> list[Fact]:
    if not run.times:
        return [Fact("time", "unknown")]
    prices = run.params.doctor.prices_per_hour if run.params else {}
    facts: list[Fact] = []
    cost, unpriced = 0.0, []
    for time in run.times:
        price = prices.get(time.stage, prices.get("default"))
        hours = time.seconds / _SECONDS_PER_HOUR
        if price is None:
            unpriced.append(time.stage)
        else:
            cost += price * hours
        facts.append(Fact(time.stage, duration(time.seconds)))
    total = sum(time.seconds for time in run.times)
    facts.append(Fact("all stages", duration(total)))
    train = next((time.seconds for time in run.times if time.stage == "train"), 0.0)
    if machine.gpu:
        hours = train * machine.num_processes / _SECONDS_PER_HOUR
        facts.append(Fact("GPU-hours of training", f"{hours:.2f}", machine.gpu))
    if len(unpriced) == len(run.times):
        facts.append(Fact("cost", "unknown", "doctor.prices_per_hour names no price"))
    else:
        note = f"without {', '.join(unpriced)}" if unpriced else ""
        facts.append(Fact("cost", f"{cost:.2f}", note or "at doctor.prices_per_hour"))
    return facts


def _gap(training: TrainingRun) -> list[Fact]:
    means = list(training.history.get(_GAP, {}).values())
    largest = list(training.history.get(f"{_GAP}_max", {}).values())
    if not means:
        return [Fact("logprob gap", "unknown")]
    facts = [
        Fact(
            "mean over steps",
            f"{short(statistics.fmean(means))} nats",
            "|sampler - learner| per token",
        ),
        Fact("worst step", f"{short(max(means))} nats"),
    ]
    if largest:
        facts.append(Fact("worst token", f"{short(max(largest))} nats"))
    facts.append(Fact("replayable", training.tags.get("replayable", "unknown").lower()))
    return facts


def _environment(run: RunData, training: TrainingRun, machine: Machine) -> list[Fact]:
    tags = training.tags
    if not tags:
        return [fact for fact in versions_of(run) if fact.name not in ("model", "data")]
    dirty = ", with uncommitted edits" if tags.get("git.dirty") == "true" else ""
    versions = [
        Fact(name.removeprefix("version."), value)
        for name, value in sorted(tags.items())
        if name.startswith("version.")
    ]
    return [
        Fact("git commit", f"{tags.get('mlflow.source.git.commit', 'none')[:12]}{dirty}"),
        Fact(
            "machine",
            machine.gpu or tags.get("cpu.model", "unknown"),
            _processes(machine),
        ),
        Fact("python", tags.get("python", "unknown")),
        *versions,
    ]


def _processes(machine: Machine) -> str:
    return f"{machine.num_processes} processes" if machine.num_processes > 1 else ""


def _number(value: float | None) -> str:
    return "–" if value is None else short(value)


def _count(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"
