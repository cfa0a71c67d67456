"""Kill training with SIGKILL at seeded random moments, go on each time, and compare with a run that nobody disturbed.

Ten kills by default, with at least one inside a rollout, an update, an evaluation and a checkpoint write, as the
stage's log proves. Weights, curve and trajectories have to be the same bytes, and the metric history in MLflow the same
values (perf/ and system/ aside), each step once. Prints one line per kill; exit code 1 if anything differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import tasks.train  # noqa: E402, F401 - imported once here; every start is a fork
from polyturn import environment, layout, params  # noqa: E402
from polyturn.pipeline import workspace  # noqa: E402
from polyturn.tracking import store  # noqa: E402

PHASES = ("rollout", "update", "evaluation", "checkpoint")
INPUTS = ("fetch", "images", "model", "warmstart")
LOGS = (
    layout.STATE / "logs" / "train.log",
    layout.STATE / "logs" / "train_rank0.log",
)  # the latter of several ranks
_POLL_S = 0.002
_LINE = re.compile(r"(\S+ \S+) DEBUG \S+ (.*)")
_BEGINS = re.compile(r"step (\d+): (\w+) begins")
_STEP_ENDS = re.compile(r"step \d+ ")
_WRITING = re.compile(r"checkpoint of step (\d+): (writing|written)")


@dataclass(frozen=True)
class Span:
    """A phase of a run in its log; `seconds` is None while it lasts."""

    phase: str
    step: int
    seconds: float | None


def spans(log: str) -> list[Span]:
    """The phases that a log tells of, in order of their begin; checkpoints overlap with the others."""
    found: list[tuple[str, int, datetime]] = []
    ends: dict[int, datetime] = {}
    for line in log.splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        at, text = datetime.strptime(match[1], "%Y-%m-%d %H:%M:%S,%f"), match[2]
        opened = [i for i, span in enumerate(found) if i not in ends and span[0] != "checkpoint"]
        if begins := _BEGINS.match(text):
            ends |= dict.fromkeys(opened, at)
            found.append((begins[2], int(begins[1]), at))
        elif writing := _WRITING.match(text):
            if writing[2] == "writing":
                found.append(("checkpoint", int(writing[1]), at))
            else:
                ends |= {
                    i: at for i, s in enumerate(found) if s[0] == "checkpoint" and i not in ends
                }
        elif _STEP_ENDS.match(text):
            ends |= dict.fromkeys(opened, at)
    return [
        Span(phase, step, (ends[i] - at).total_seconds() if i in ends else None)
        for i, (phase, step, at) in enumerate(found)
    ]


@dataclass(frozen=True)
class Result:
    """What a finished run left: digest of all output files, and its MLflow run."""

    files: str
    run_id: str


@dataclass
class Checkout:
    """A checkout in which the inputs of `train` are in place; every start of the stage is a process group."""

    path: Path
    output: Path = field(init=False)

    def __post_init__(self) -> None:
        self.output = self.path / layout.STATE / "resume_check.log"
        self.output.parent.mkdir(parents=True, exist_ok=True)

    def start(self) -> int:
        """Fork a process that runs `python -m tasks.train`; returns its id, which is its group's too."""
        for log in LOGS:
            (self.path / log).unlink(missing_ok=True)
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            os.setsid()
            os.chdir(self.path)
            sys.path.insert(0, str(self.path))
            sys.argv = ["tasks/train.py"]
            with self.output.open("a") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            runpy.run_module("tasks.train", run_name="__main__", alter_sys=True)
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        finally:
            os._exit(code)

    def finish(self, pid: int) -> Result:
        """Wait for the end of a start and read what it left.

        Raises:
            ValueError: it failed.
        """
        _, status = os.waitpid(pid, 0)
        if status:
            raise ValueError(f"tasks.train ended with status {status}; see {self.output}")
        digest = hashlib.sha256()
        outs = [self.path / layout.CURVE]
        for directory in (layout.POLICY, layout.TRAJECTORIES):
            outs += sorted(p for p in (self.path / directory).rglob("*") if p.is_file())
        for path in outs:
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            digest.update(f"{path.relative_to(self.path)} {content}\n".encode())
        return Result(
            digest.hexdigest(), json.loads((self.path / layout.TRAIN_RUN).read_text())["run_id"]
        )

    def log(self) -> list[Span]:
        """The phases of the last start."""
        paths = [self.path / log for log in LOGS]
        return [span for path in paths if path.exists() for span in spans(path.read_text())]

    def kill(self, pid: int, phase: str, *, number: int, delay_s: float) -> list[Span] | None:
        """SIGKILL the group `delay_s` after `phase` has begun for the `number`th time; the phases it was inside.

        None: the run ended before that.
        """
        while sum(span.phase == phase for span in self.log()) < number:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                raise ValueError(f"tasks.train ended with status {status} before {phase} {number}")
            time.sleep(_POLL_S)
        time.sleep(delay_s)
        os.killpg(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        return [span for span in self.log() if span.seconds is None] if status else None

    def histories(self, run_ids: Sequence[str]) -> list[dict[str, list[tuple[int, float]]]]:
        """Metric histories of runs, perf/ and system/ aside: (step, value) in order of step."""
        os.chdir(self.path)
        tracking = params.load(layout.PARAMS).tracking
        client = store.connect(tracking, self.path).client
        return [
            {
                key: sorted((m.step, m.value) for m in client.get_metric_history(run_id, key))
                for key in sorted(client.get_run(run_id).data.metrics)
                if not key.startswith(("perf/", "system/"))
            }
            for run_id in run_ids
        ]


@dataclass
class Check:
    """One comparison: kills so far by the phases that they hit, and what differed."""

    checkout: Checkout
    rng: random.Random
    typical_s: dict[str, float]
    num_begins: dict[str, int]
    per_run: int
    hits: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PHASES, 0))
    num_kills: int = 0

    def kill_once(self) -> None:
        """Start, and kill in the phase that was hit least."""
        phase = min(PHASES, key=lambda name: (self.hits[name], self.rng.random()))
        number = self.rng.randint(1, max(1, self.num_begins[phase] // self.per_run))
        delay_s = self.rng.uniform(0, self.typical_s[phase])
        pid = self.checkout.start()
        inside = self.checkout.kill(pid, phase, number=number, delay_s=delay_s)
        if inside is None:
            return
        self.num_kills += 1
        for span in inside:
            self.hits[span.phase] += 1
        told = ", ".join(f"{span.phase} of step {span.step}" for span in inside) or "between phases"
        print(f"kill {self.num_kills}: {delay_s:.3f} s into {phase} {number}: {told}", flush=True)


def check(checkout: Checkout, *, num_kills: int, per_run: int, seed: int) -> list[str]:
    """Kill and compare until there were enough kills and every phase was hit; returns what is wrong."""
    whole = checkout.finish(checkout.start())
    log = checkout.log()
    seconds = {
        p: [s.seconds for s in log if s.phase == p and s.seconds is not None] for p in PHASES
    }
    typical_s = {phase: sorted(values)[len(values) // 2] for phase, values in seconds.items()}
    told = ", ".join(f"{phase} {value:.3f} s" for phase, value in typical_s.items())
    print(f"undisturbed: {whole.files[:12]}; {told}", flush=True)
    begins = {phase: sum(span.phase == phase for span in log) for phase in PHASES}
    state = Check(checkout, random.Random(seed), typical_s, begins, per_run)
    runs = [whole]
    problems: list[str] = []
    while state.num_kills < num_kills or not all(state.hits.values()):
        if state.num_kills >= 3 * num_kills:
            problems.append(
                f"phases never hit: {[p for p, hits in state.hits.items() if not hits]}"
            )
            break
        for _ in range(per_run):
            state.kill_once()
        runs.append(checkout.finish(checkout.start()))
        is_same = runs[-1].files == whole.files
        print(
            f"after kill {state.num_kills}: {'same bytes' if is_same else 'DIFFERENT'}", flush=True
        )
        if not is_same:
            problems.append(f"outputs differ after kill {state.num_kills}")
    expected, *others = checkout.histories([run.run_id for run in runs])
    for number, history in enumerate(others, start=1):
        names = sorted(n for n in expected | history if expected.get(n) != history.get(n))
        if names:
            problems.append(f"run {number}: the history differs in {', '.join(names[:5])}")
    for name, points in expected.items():
        if len({step for step, _ in points}) != len(points):
            problems.append(f"{name} has a step twice")
    print(f"{state.num_kills} kills, inside: {state.hits}; {len(others)} runs compared", flush=True)
    return problems


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check in a worktree of this commit, or in a checkout that is ready; 1 if something differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--per-run", type=int, default=1, help="kills before a run may end")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--recipe", help="an overlay of recipes/ (default: the demo's size)")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--checkout", type=Path, help="one whose inputs of train are in place")
    chosen = parser.parse_args(arguments)
    environment.apply(ROOT)
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    path = chosen.checkout
    if path is None:
        overrides = {"train.checkpoint_every": 1, **workspace.parse_pairs(chosen.set)}
        plan = workspace.compose(ROOT, recipe=chosen.recipe, overrides=overrides)
        path = workspace.create(ROOT, "resume", plan.changes)
        command = [sys.executable, "-m", "dvc", "repro", *INPUTS]
        subprocess.run(command, cwd=path, check=True)
    checkout = Checkout(path.resolve())
    problems = check(checkout, num_kills=chosen.kills, per_run=chosen.per_run, seed=chosen.seed)
    for problem in problems:
        print(f"FAILED {problem}")
    if chosen.checkout is None and not problems:
        workspace.remove(ROOT, path)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
