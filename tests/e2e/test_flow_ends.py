"""How a flow ends: cancelled, killed or done, none of its processes outlives it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import httpx
import pytest

from polyturn import processes
from tests.toy_project import FLOW, Toy, ToyProject, wait_until

pytestmark = pytest.mark.slow(minutes=1)


_FAMILY = """
deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(300)"
heard = subprocess.PIPE
child = subprocess.Popen([sys.executable, "-c", deaf], stdout=heard)
# a child of a child, whose parent is gone, in a session of its own, which does not listen to SIGTERM
middle = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {deaf!r}], start_new_session=True, stdout=sys.stderr); print(p.pid)"
grandchild = int(subprocess.check_output([sys.executable, "-c", middle + "; import time; time.sleep(1)"]).split()[0])
child.stdout.readline()
Path("started").write_text(f"{os.getpid()} {child.pid} {grandchild}")
"""


def family_of(project: ToyProject) -> list[processes.Process]:
    """Wait for the processes that _FAMILY names."""
    started = project.path / "started"
    wait_until(lambda: started.exists() and len(started.read_text().split()) == 3, seconds=60)
    found = [processes.find(int(pid)) for pid in started.read_text().split()]
    assert all(found)
    return [process for process in found if process]


def leftovers(project: ToyProject) -> list[processes.Process]:
    """Those of the family's ids that are processes now."""
    pids = (project.path / "started").read_text().split()
    return [process for pid in pids if (process := processes.find(int(pid)))]


def test_cancelling_ends_the_stage_its_children_and_theirs(
    toy: Toy, server: dict[str, str]
) -> None:
    """PIPE-24."""
    project = toy(one=_FAMILY + "time.sleep(300)")
    flow = project.start(*FLOW, **server)
    family = family_of(project)
    os.kill(flow.pid, signal.SIGTERM)
    wait_until(lambda: not any(p.is_alive for p in family), seconds=10)
    flow.communicate(timeout=60)
    assert flow.returncode != 0
    runs = project.runs()
    assert set(map(tuple, runs.values())) == {("KILLED",)}, "the stage's run and the one around it"


def test_a_run_that_was_started_by_hand_is_cancelled_as_well(
    toy: Toy, server: dict[str, str]
) -> None:
    """PrefectHQ/prefect#17482, #9801: it is Cancelled for the server, and goes on."""
    project = toy(one='Path("started").write_text(str(os.getpid())); time.sleep(300)')
    process = project.start(*FLOW, **server)
    wait_until((project.path / "started").exists, seconds=60)
    stage = processes.find(int((project.path / "started").read_text()))
    assert stage is not None
    query = {"limit": 1, "sort": "START_TIME_DESC"}
    (found,) = httpx.post(f"{server['PREFECT_API_URL']}/flow_runs/filter", json=query).json()
    project.run("prefect", "flow-run", "cancel", found["id"], **server)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 143
    assert output.splitlines()[-1] == "cancelled"
    assert not stage.is_alive
    ended = httpx.get(f"{server['PREFECT_API_URL']}/flow_runs/{found['id']}").json()
    assert ended["state_type"] == "CANCELLED"
    assert {state for states in project.runs().values() for state in states} == {"KILLED"}


def test_what_a_stage_leaves_behind_is_ended(toy: Toy, server: dict[str, str]) -> None:
    project = toy(one=_FAMILY)
    result = project.run(*FLOW, **server)  # ends, though a child still holds the output
    assert result.returncode == 0, result.stdout
    assert "stage one left processes behind" in result.stdout
    assert not any(process.is_alive for process in leftovers(project))


@pytest.mark.parametrize("victim", ["flow", "dvc"])
def test_children_of_children_do_not_outlive_a_flow_or_dvc_that_was_killed(
    toy: Toy, server: dict[str, str], victim: str
) -> None:
    project = toy(one=_FAMILY + "time.sleep(300)")
    flow = project.start(*FLOW, **server)
    family = family_of(project)
    if victim == "flow":
        flow.kill()
    else:
        stage_parent = int(Path(f"/proc/{family[0].pid}/stat").read_text().rpartition(")")[2].split()[1])  # fmt: skip
        os.kill(stage_parent, signal.SIGKILL)
        os.kill(flow.pid, signal.SIGTERM)
    wait_until(lambda: not any(p.is_alive for p in family), seconds=15)
    flow.communicate(timeout=60)


def test_a_stage_does_not_outlive_a_flow_that_was_killed(toy: Toy, server: dict[str, str]) -> None:
    project = toy(one='Path("started").write_text(str(os.getpid())); time.sleep(300)')
    flow = project.start(*FLOW, **server)
    started = project.path / "started"
    wait_until(lambda: started.exists() and bool(started.read_text()), seconds=90)
    stage = processes.find(int(started.read_text()))
    assert stage is not None
    flow.kill()
    wait_until(lambda: not stage.is_alive, seconds=15)
    flow.communicate(timeout=30)
    assert project.runs()["one"] == ["KILLED"]
