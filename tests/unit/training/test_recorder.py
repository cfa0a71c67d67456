"""What a run writes: trajectories of every step, a history that a resumed run takes over, dumps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from polyturn import trajectories
from polyturn.progress import Progress
from polyturn.training.journal import Journal
from polyturn.training.recorder import Recorder, records, tool_calls
from polyturn.trajectory_times import read_times, times_path
from polyturn.types import Group, Trajectory
from tests.unit import tiny
from tests.unit.evaluation.test_evaluate import trajectory
from tests.unit.training.test_metrics import CALL, saying

STEP = {
    "rollout/raw_reward": 0.5,
    "multi_turn/turns/mean": 1.0,
    "train/train_rollout_logprob_abs_diff": 0.0,
}
TIMES = {"perf/rollout_time": 1.0, "perf/train_time": 2.0}


def recorder(directory: Path) -> tuple[Recorder, tiny.Metrics]:
    sink = tiny.Metrics()
    return Recorder(directory, sink, Progress(10, "train")), sink


def group(made: int = 0) -> list[Group]:
    base = saying(trajectory(1.0), CALL, "Answer: \\boxed{12}")
    problem = tiny.problems()[0]
    images = (*problem.images, *(tiny.picture(16, 16, shade) for shade in range(made)))
    return [Group(0, tuple(_with(base, sibling, images, problem) for sibling in range(2)))]


def _with(
    base: Trajectory, sibling: int, images: tuple[object, ...], problem: object
) -> Trajectory:
    return replace(base, sibling=sibling, images=images, problem=problem)  # type: ignore[arg-type]


def test_trajectories_hold_calls_answers_and_advantages() -> None:
    (first, second) = records(group(), [[0.5, None]], step=3)
    assert (first["step"], first["sibling"], first["advantage"]) == (3, 0, 0.5)
    assert (second["sibling"], second["advantage"]) == (1, None)
    assert first["turns"][0]["tool_calls"] == [
        {"name": "zoom", "arguments": {"region": "northwest"}}
    ]
    assert first["final_answer"] == "12"


def test_tool_calls_that_are_none_say_why() -> None:
    ((call),) = tool_calls("<tool_call>{broken</tool_call>")
    assert isinstance(call, dict)
    assert list(call) == ["error"]


def test_only_pictures_that_environments_made_are_written(tmp_path: Path) -> None:
    kept, _ = recorder(tmp_path)
    kept.begin([])
    kept.rollout(0, group(made=2), [[0.5, -0.5]])
    names = {path.stem for path in (tmp_path / "trajectories" / "png").iterdir()}
    assert names == {tiny.picture(16, 16, shade).sha256 for shade in range(2)}
    assert len(trajectories.read_step(tmp_path / "trajectories", 0)) == 2


def test_history_goes_to_the_sink_once_a_step_and_times_do_not_stay(tmp_path: Path) -> None:
    kept, sink = recorder(tmp_path)
    kept.begin([])
    kept.step(0, dict(STEP), TIMES)
    assert kept.history == [STEP]
    assert sink.steps == [(0, {**STEP, **TIMES})]


def test_a_resumed_run_takes_the_history_over_and_drops_later_files(tmp_path: Path) -> None:
    first, _ = recorder(tmp_path)
    first.begin([])
    for step in range(3):
        first.rollout(step, group(), [[0.5, -0.5]])
        first.step(step, {**STEP, "step": float(step)}, TIMES)
    second, sink = recorder(tmp_path)
    second.begin(first.history[:2])
    assert trajectories.list_steps(tmp_path / "trajectories") == [0, 1]
    assert [(step, metrics["step"]) for step, metrics in sink.steps] == [(0, 0.0), (1, 1.0)]
    assert second.history == first.history[:2]
    second.history.append({})
    assert len(first.history) == 3


def test_a_resumed_run_sends_each_step_with_its_first_time_and_durations(tmp_path: Path) -> None:
    """Killed after three steps, resumed from the checkpoint of two, the third is sampled again."""
    path = tmp_path / "journal.jsonl"
    first, sink = recorder(tmp_path)
    first.journal = Journal(path, iter(range(100, 200)).__next__)
    first.begin([])
    for step in range(3):
        first.step(step, {**STEP, "step": float(step)}, TIMES)
    second, again = recorder(tmp_path)
    second.journal = Journal(path, iter(range(900, 990)).__next__)
    second.begin(first.history[:2])
    for step in (2, 3):
        second.step(step, {**STEP, "step": float(step)}, {"perf/rollout_time": 9.0})
    second.end(4, {"eval/accuracy": 0.5})
    assert again.steps[:3] == sink.steps
    assert again.times_ms == [100, 101, 102, 900, 901]
    assert again.steps[3][1]["perf/rollout_time"] == 9.0
    assert len(second.history) == 5


def test_other_ranks_keep_the_history_and_write_nothing(tmp_path: Path) -> None:
    sink = tiny.Metrics()
    other = Recorder(tmp_path, sink, Progress(10, "train"), is_main=False)
    other.begin([{"a": 1.0}])
    other.rollout(1, group(made=1), [[0.5, -0.5]])
    other.step(1, dict(STEP), TIMES)
    other.end(2, {"eval/accuracy": 0.5})
    assert other.history == [{"a": 1.0}, STEP, {"eval/accuracy": 0.5}]
    assert (list(tmp_path.iterdir()), sink.steps) == ([], [])


def test_a_fresh_start_removes_what_an_earlier_one_left(tmp_path: Path) -> None:
    first, _ = recorder(tmp_path)
    first.begin([])
    first.rollout(0, group(made=1), [[0.5, -0.5]])
    second, sink = recorder(tmp_path)
    second.begin([])
    assert [p for p in (tmp_path / "trajectories").rglob("*") if p.is_file()] == []
    assert sink.steps == []


def test_times_stand_beside_the_trajectories_and_leave_with_them(tmp_path: Path) -> None:
    first, _ = recorder(tmp_path)
    first.begin([])
    for step in range(2):
        first.rollout(step, [_timed(group()[0])], [[0.5, -0.5]])
        first.step(step, dict(STEP), TIMES)
    directory = first.trajectory_dir
    assert read_times(directory, 1) == {(0, 0): 0.25, (0, 1): 1.25}
    assert times_path(directory, 1).parent == tmp_path / "trajectory_times"
    assert not any("time" in key for key in trajectories.read_step(directory, 1)[0])
    second, _ = recorder(tmp_path)
    second.begin(first.history[:1])
    assert read_times(directory, 0)
    assert read_times(directory, 1) == {}


def _timed(group: Group) -> Group:
    timed = (replace(t, env_time_s=t.sibling + 0.25) for t in group.trajectories)
    return Group(group.index, tuple(timed))


def test_what_is_written_is_shown_once_a_step(tmp_path: Path) -> None:
    seen: list[list[int]] = []
    kept = Recorder(
        tmp_path,
        tiny.Metrics(),
        Progress(10, "train"),
        on_rollout=lambda entries: seen.append([entry["sibling"] for entry in entries]),
    )
    kept.begin([])
    kept.rollout(0, group(), [[0.5, -0.5]])
    assert seen == [[0, 1]]
