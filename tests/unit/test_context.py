"""The frame of a stage: exit codes, leases, parents, inputs that change, and how the MLflow run ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from polyturn import processes
from polyturn.params_tree import merge
from tests.toy_project import ToyProject, wait_until

Toy = Callable[..., ToyProject]
SLOW = 'Path("started").write_text(str(os.getpid())); time.sleep(60)'


def started_pid(project: ToyProject) -> int:
    """Wait for a SLOW body and return its process id."""
    path = project.path / "started"
    wait_until(lambda: path.exists() and bool(path.read_text()))
    pid = int(path.read_text())
    path.unlink()
    return pid


def test_a_stage_that_ends_well_records_status_time_and_run(toy: Toy) -> None:
    """Its body collects garbage, but not among what was imported, during which nothing was collected."""
    body = """
    assert ctx.params.seed == 0 and ctx.work_dir.is_dir() and ctx.name == "good"
    import gc
    assert gc.isenabled()
    assert gc.get_freeze_count() > 100_000
    assert gc.get_stats()[2]["collections"] == 0
    """
    project = toy(good=body)
    result = project.stage("good")
    assert result.returncode == 0, result.stdout
    assert project.status("good") == {"exit_code": 0, "message": ""}
    timing = json.loads((project.path / ".polyturn/timings.jsonl").read_text())
    assert timing["stage"] == "good"
    assert project.runs() == {"good": ["FINISHED"]}


@pytest.mark.parametrize("argument", ["--help", "train.steps=3"])
def test_a_stage_that_is_given_arguments_does_not_run(toy: Toy, argument: str) -> None:
    """It would ignore them, and write over what an earlier run has made."""
    project = toy(good="pass")
    result = project.run(sys.executable, "-m", "tasks.good", argument)
    assert result.returncode == 2
    line = f"error: stage good: takes no arguments, got {argument}; its values are those of params"
    assert line in result.stdout
    assert not (project.path / ".polyturn").exists()


@pytest.mark.parametrize(
    ("body", "exit_code", "line"),
    [
        ('raise ValueError("data.path: no such directory")', 2, "data.path: no such directory"),
        ("raise RuntimeError('boom\\nat depth')", 1, "RuntimeError: boom at depth"),
        ("raise OSError(28, 'No space left on device', 'x.bin')", 2, "the disk is full (x.bin)"),
        ("raise OSError(98, 'Address already in use')", 2, "a port is in use"),
    ],
)
def test_an_error_becomes_one_line_and_an_exit_code(
    toy: Toy, body: str, exit_code: int, line: str
) -> None:
    project = toy(bad=body)
    result = project.stage("bad")
    assert result.returncode == exit_code
    errors = [text for text in result.stdout.splitlines() if text.startswith("error:")]
    assert len(errors) == 1
    assert line in errors[0]
    assert "Traceback" not in result.stdout
    assert "Traceback" in (project.path / ".polyturn/logs/bad.log").read_text()
    assert project.status("bad")["exit_code"] == exit_code
    assert project.runs() == {"bad": ["FAILED"]}


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"seed": "x"}, "seed"),
        ({"rollout": {"group_size": 1}}, "rollout.group_size"),
        ({"rollout": {"grup_size": 8}}, "rollout.grup_size"),
    ],
)
def test_wrong_params_stop_a_stage_with_the_key_named(
    toy: Toy, changes: dict[str, object], key: str
) -> None:
    project = toy(good="pass")
    path = project.path / "params.yaml"
    path.write_text(yaml.safe_dump(merge(yaml.safe_load(path.read_text()), changes)))
    result = project.stage("good")
    assert result.returncode == 2
    assert f"error: stage good: params.yaml: {key}" in result.stdout
    assert not (project.path / "artifacts").exists()


def test_a_stage_that_may_not_write_is_one_line(toy: Toy) -> None:
    project = toy(good="pass")
    state = project.path / ".polyturn"
    shutil.rmtree(state, ignore_errors=True)
    state.write_text("a file where stages want a directory")
    result = project.stage("good")
    assert result.returncode == 2
    (line,) = result.stdout.splitlines()
    assert line.startswith("error: stage good: ")
    assert line.endswith("run them as its owner")


def test_too_little_free_disk_stops_a_stage_before_it_starts(toy: Toy) -> None:
    project = toy(good="pass")
    path = project.path / "params.yaml"
    path.write_text(path.read_text().replace("min_free_gb: 1.0", "min_free_gb: 1.0e+9"))
    result = project.stage("good")
    assert result.returncode == 2
    assert "doctor.min_free_gb: 1e+09 GB must be free" in result.stdout
    assert not (project.path / "artifacts").exists()


def test_an_unreachable_mlflow_is_named_within_the_time_limit(toy: Toy) -> None:
    project = toy(good="pass")
    path = project.path / "params.yaml"
    text = path.read_text().replace(
        "uri: sqlite:///mlflow.db",
        "uri: http://127.0.0.1:9\n  timeout_s: 2\n  outage_s: 1",
    )
    path.write_text(text)
    result = project.stage("good")
    assert result.returncode == 2
    assert "tracking.uri 'http://127.0.0.1:9'" in result.stdout


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ('p = Path("params.yaml"); p.write_text(p.read_text().replace("seed: 0", "seed: 1", 1))',
         "params.yaml: seed (was 0, is 1)"),
        ('Path("data.txt").write_text("other")', "data.txt changed"),
        ('Path("data.txt").unlink()', "data.txt"),
        ('with Path("tasks/good.py").open("a") as f: f.write("# new")', "tasks/good.py changed"),
    ],
)  # fmt: skip
def test_inputs_that_change_while_a_stage_runs_fail_it(toy: Toy, change: str, named: str) -> None:
    """PIPE-19: nothing is recorded, and the next repro runs the stage again."""
    project = toy(good=change)
    result = project.run("dvc", "repro")
    assert result.returncode != 0
    assert named in result.stdout
    assert project.status("good")["exit_code"] == 2
    assert not (project.path / "dvc.lock").exists()
    # the next run starts from what stands there now
    (project.path / "tasks/good.py").write_text(
        (project.path / "tasks/good.py").read_text().replace(change, "pass")
    )
    (project.path / "data.txt").touch()
    again = project.run("dvc", "repro")
    assert again.returncode == 0
    assert "Running stage 'good'" in again.stdout


def test_params_of_other_stages_may_change_while_a_stage_runs(toy: Toy) -> None:
    edit = 'p = Path("params.yaml"); p.write_text(p.read_text().replace("min_gain", "min_gain"))\n'
    edit += 'p.write_text(p.read_text().replace("registry:", "registry:\\n  min_gain: 0.5"))'
    assert toy(good=edit).run("dvc", "repro").returncode == 0


def test_sigterm_ends_the_stage_with_143_and_its_run_as_killed(toy: Toy) -> None:
    project = toy(slow=SLOW)
    process = project.start(sys.executable, "-m", "tasks.slow")
    os.kill(started_pid(project), signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 143
    assert project.status("slow")["exit_code"] == 143
    assert project.runs() == {"slow": ["KILLED"]}


def test_a_signal_in_the_middle_of_a_log_line_blocks_no_other_thread(toy: Toy) -> None:
    body = """
    import logging, threading
    logger = logging.getLogger("tasks.cut")
    handler = logging.getLogger().handlers[0]
    take = handler.acquire
    def take_and_cut():
        handler.acquire = take
        take()
        signal.raise_signal(signal.SIGTERM)
    handler.acquire = take_and_cut
    try:
        logger.warning("cut")
    finally:
        other = threading.Thread(target=logger.warning, args=["free"], daemon=True)
        other.start()
        other.join(10)
    """
    project = toy(cut=body)
    result = project.stage("cut")
    assert result.returncode == 143, result.stdout
    assert result.stdout.splitlines()[:2] == ["cut", "free"]


def test_a_second_start_beside_a_living_one_names_it(toy: Toy) -> None:
    project = toy(slow=SLOW)
    first = project.start(sys.executable, "-m", "tasks.slow")
    pid = started_pid(project)
    second = project.stage("slow")
    assert second.returncode == 2
    assert f"stage slow is already running as pid {pid}" in second.stdout
    assert f"kill {pid}" in second.stdout
    os.kill(pid, signal.SIGTERM)
    first.communicate(timeout=30)


def test_a_stage_dies_with_its_dvc_and_the_next_start_goes_on(toy: Toy) -> None:
    project = toy(slow=SLOW)
    dvc = project.start(sys.executable, "-m", "dvc", "repro")
    stage = processes.find(started_pid(project))
    assert stage is not None
    dvc.kill()
    wait_until(lambda: not stage.is_alive, seconds=20)
    dvc.communicate()
    assert project.status("slow")["exit_code"] == 143
    assert project.runs() == {"slow": ["KILLED"]}
    (project.path / "tasks/slow.py").write_text(
        (project.path / "tasks/slow.py").read_text().replace("sleep(60)", "sleep(0)")
    )
    assert project.run("dvc", "repro").returncode == 0


def test_an_orphan_that_does_not_die_is_ended_by_the_next_start(toy: Toy) -> None:
    # the body stops the watcher's first signal, as a stage deep in C code would
    project = toy(slow="signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SLOW)
    dvc = project.start(sys.executable, "-m", "dvc", "repro")
    orphan = processes.find(started_pid(project))
    assert orphan is not None
    dvc.kill()
    dvc.wait()  # not communicate(): the orphan still holds the pipe
    path = Path(project.path / "tasks/slow.py")
    path.write_text(path.read_text().replace("sleep(60)", "sleep(0)"))
    result = project.run("dvc", "repro")
    assert result.returncode == 0, result.stdout
    dvc.communicate()
    assert f"pid {orphan.pid} is an orphan" in result.stdout
    assert not orphan.is_alive
