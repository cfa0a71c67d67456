"""The tables of the report page: scores, times, links, versions, command lines."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from polyturn.report.data import RunData, Scores

NAMES: Mapping[str, str] = {"warmstart": "warm start", "policy": "after training"}
MODE_NAMES: Mapping[str, str] = {  # of how replies are drawn, and in which environment
    "sampled": "sampled",
    "greedy": "greedy",
    "training_env": "training's environment",
}

_COLUMNS: Mapping[str, str] = {  # of the score table: key of metrics.json -> heading
    "accuracy": "accuracy",
    "turns_mean": "turns",
    "tokens_mean": "tokens",
    "images_mean": "pictures",
    "truncated_fraction": "truncated",
    "failed_fraction": "failed",
}
_SHARES = ("accuracy", "truncated_fraction", "failed_fraction")


@dataclass(frozen=True)
class Fact:
    """A name and a value, perhaps with a note or a link."""

    name: str
    value: str
    note: str = ""
    url: str = ""


@dataclass(frozen=True)
class ScoreTable:
    """metrics.json as a table; a row is its name and the formatted values."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class TimeBar:
    """A stage's time; `width` in percent of the longest."""

    name: str
    width: float
    text: str


@dataclass(frozen=True)
class Command:
    """A command line to go on with."""

    note: str
    line: str


def duration(seconds: float) -> str:
    """Seconds as a person says them.

    >>> [duration(s) for s in (0.42, 42.4, 371, 7325)]
    ['0.4 s', '42 s', '6 min 11 s', '2 h 02 min']
    """
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def percent(value: float) -> str:
    """A share in percent."""
    return f"{100 * value:.1f}%"


def score_table(run: RunData) -> ScoreTable:
    """The blocks of metrics.json side by side."""
    found = [key for scores in run.scores.values() for key in scores]
    passes = sorted({key for key in found if key.startswith("pass@")}, key=lambda k: int(k[5:]))
    columns = [key for key in _COLUMNS if key in found]
    columns[1:1] = [key for key in passes if key != "pass@1"]
    rows = [
        [f"{NAMES[policy]}, {MODE_NAMES[mode]}", *(_score(scores, key) for key in columns)]
        for (policy, mode), scores in run.scores.items()
    ]
    return ScoreTable([_COLUMNS.get(key, key) for key in columns], rows)


def _score(scores: Scores, key: str) -> str:
    if key not in scores:
        return "–"
    is_share = key in _SHARES or key.startswith("pass@")
    return percent(scores[key]) if is_share else f"{scores[key]:.2f}"


def time_bars(run: RunData) -> list[TimeBar]:
    """Time by stage."""
    longest = max((time.seconds for time in run.times), default=0.0) or 1.0
    return [
        TimeBar(time.stage, round(100 * time.seconds / longest, 2), duration(time.seconds))
        for time in run.times
    ]


def tracking_uri(run: RunData) -> str:
    """The address that runs went to, as configured."""
    configured = run.params.tracking.uri if run.params else "sqlite:///mlflow.db"
    return os.environ.get("POLYTURN_TRACKING_URI") or configured


def links_of(run: RunData) -> list[Fact]:
    """Where the run is recorded."""
    uri = tracking_uri(run)
    base = f"{uri.rstrip('/')}/#" if uri.startswith("http") else ""
    links = [Fact("MLflow", uri, url=base.removesuffix("/#"))]
    if run.registered:
        name, version = run.registered["name"], run.registered["version"]
        links.append(
            Fact(
                str(run.registered.get("alias", "registered")),
                f"models:/{name}/{version}",
                str(run.registered.get("reason", "")),
                f"{base}/models/{name}/versions/{version}" if base else "",
            )
        )
    else:
        links.append(Fact("registry", "not registered yet", "dvc repro register"))
    for time in run.times:
        if time.stage in ("train", "evaluate", "register") and time.run_id:
            url = f"{base}/runs/{time.run_id}" if base else ""
            links.append(Fact(f"{time.stage} run", time.run_id, url=url))
    return links


def versions_of(run: RunData) -> list[Fact]:
    """What the run was made with."""
    found = run.environment
    rows: list[Fact] = []
    if found.commit:
        edits = ", with uncommitted edits" if found.diff else ""
        rows.append(Fact("git commit", f"{found.commit[:12]}{edits}"))
    rows.append(Fact("python", found.python))
    rows += [Fact(name, version) for name, version in found.named_versions().items()]
    rows.append(Fact("machine", f"{found.cpu_model}, {found.num_cpus} CPUs"))
    if run.params:
        model = run.params.model
        rows.append(
            Fact("model", model.path or f"small Qwen3-VL, hidden size {model.small.hidden_size}")
        )
        rows.append(Fact("data", run.params.data.source))
        rows.append(Fact("environment", run.params.env.build))
    if run.train_run.keys() >= {"stopped_at", "stop_reason"}:
        steps, reason = run.train_run["stopped_at"], run.train_run["stop_reason"]
        rows.append(Fact("training ended early", f"after {steps} steps, {reason}"))
    return rows


def commands_of(run: RunData) -> list[Command]:
    """Command lines to go on with."""
    uri = tracking_uri(run)
    commands = [
        Command(
            "read trajectories: tokens, masks, pictures", "polyturn view artifacts/trajectories"
        ),
        Command(
            "change a value; only what depends on it runs again", "dvc exp run -S learner.lr=1e-4"
        ),
        Command("compare with the last commit", "dvc metrics diff"),
    ]
    if not uri.startswith("http"):
        commands.append(
            Command("runs, curves and the registry", f"mlflow ui --backend-store-uri {uri}")
        )
    if run.registered:
        name = run.registered["name"]
        line = (
            f'mlflow artifacts download -u "models:/{name}/{run.registered["version"]}" -d policy'
        )
        export = "" if uri.startswith("http") else f"MLFLOW_TRACKING_URI={uri} "
        commands.append(Command("the policy as a Hugging Face directory", f"{export}{line}"))
    return commands
