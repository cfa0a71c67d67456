"""Records of a run while the server is away: kept on disk, delivered in order, none lost, none passed by another."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from polyturn.tracking.outbox import AwayError, DeliveryError, Outbox, Record, leftovers


class Server:
    """Takes records, or is away, or refuses those that say so."""

    def __init__(self) -> None:
        self.taken: list[tuple[str, object]] = []
        self.is_away = False
        self.loses_answers = 0

    def deliver(self, run_id: str, record: Record) -> None:
        if self.is_away:
            raise AwayError("the server does not answer")
        if record.get("n") == "bad":
            raise DeliveryError("no such name")
        content = Path(str(record["path"])).read_text() if "path" in record else record["n"]
        self.taken.append((run_id, content))
        if self.loses_answers:
            self.loses_answers -= 1
            raise AwayError("timed out")

    @property
    def numbers(self) -> list[object]:
        return [content for _, content in self.taken]


def outbox(directory: Path, server: Server) -> Outbox:
    return Outbox(directory, "http://here", "r1", server.deliver, retry_s=0.02)


def test_nothing_is_written_while_the_server_answers(tmp_path: Path) -> None:
    server = Server()
    box = outbox(tmp_path / "outbox", server)
    box.post({"n": 1})
    box.post({"n": 2})
    assert server.taken == [("r1", 1), ("r1", 2)]
    assert not (tmp_path / "outbox").exists()


def test_what_is_posted_during_an_outage_arrives_in_order_and_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server()
    box = outbox(tmp_path, server)
    box.post({"n": 0})
    server.is_away = True
    for number in range(1, 50):
        box.post({"n": number})
    assert box.is_waiting
    assert not box.wait(0.1)
    server.is_away = False
    for number in range(50, 60):
        box.post({"n": number})
    assert box.wait(10)
    box.post({"n": 60})
    assert server.numbers == list(range(61))
    assert list(tmp_path.iterdir()) == []
    assert sum("does not answer" in line for line in caplog.messages) == 1, "told once"


def test_files_are_those_of_the_moment_they_were_posted(tmp_path: Path) -> None:
    server = Server()
    server.is_away = True
    box = outbox(tmp_path / "outbox", server)
    source = tmp_path / "note.txt"
    source.write_text("then")
    box.post({"kind": "artifact", "path": str(source)})
    source.unlink()
    server.is_away = False
    assert box.wait(10)
    assert server.numbers == ["then"]
    assert list((tmp_path / "outbox").iterdir()) == []


def test_a_refusal_is_told_at_once_and_later_costs_that_record_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server()
    box = outbox(tmp_path, server)
    with pytest.raises(DeliveryError, match="no such name"):
        box.post({"n": "bad"})
    server.is_away = True
    for number in (1, "bad", 2):
        box.post({"n": number, "kind": "metrics"})
    server.is_away = False
    assert box.wait(10)
    assert server.numbers == [1, 2]
    assert "run r1 lacks its metrics: no such name" in caplog.text


def test_an_answer_that_is_lost_sends_the_record_again(tmp_path: Path) -> None:
    server = Server()
    server.loses_answers = 1
    box = outbox(tmp_path, server)
    box.post({"n": 1})
    assert box.wait(10)
    assert server.numbers == [1, 1]


def test_a_server_that_takes_its_time_is_waited_for_as_long_as_it_takes_something(
    tmp_path: Path,
) -> None:
    server = Server()
    server.is_away = True
    box = Outbox(tmp_path, "http://here", "r1", server.deliver, retry_s=0.02)
    for number in range(6):
        box.post({"n": number})

    def slow(run_id: str, record: Record) -> None:
        time.sleep(0.15)
        server.deliver(run_id, record)

    box.deliver = slow
    server.is_away = False
    assert box.wait(0.5), "0.9 s in all, and never 0.5 s without a delivery"
    assert server.numbers == list(range(6))


def test_what_is_stopped_is_left_to_the_next_start(tmp_path: Path) -> None:
    server = Server()
    server.is_away = True
    box = outbox(tmp_path, server)
    box.post({"n": 0})
    box.stop()
    server.is_away = False
    box.post({"n": 1})
    assert not box.wait(0.2)
    assert server.taken == []
    (path,) = tmp_path.glob("*.jsonl")
    assert len(path.read_text().splitlines()) == 3


KILLED = """
import sys, time
from pathlib import Path
from polyturn.tracking.outbox import AwayError, Outbox
def deliver(run_id, record):
    raise AwayError("away")
box = Outbox(Path(sys.argv[1]), "http://here", "r1", deliver, retry_s=0.02)
note = Path(sys.argv[1]) / "note"
note.write_text("file")
for number in range(5):
    box.post({"n": number})
box.post({"path": str(note)})
note.unlink()
print("posted", flush=True)
time.sleep(60)
"""


def test_what_a_killed_process_left_is_delivered_by_the_next(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "posted\n"
    server = Server()
    assert leftovers(tmp_path, "http://here", server.deliver) == 0, "it lives"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    (path,) = tmp_path.glob("*.jsonl")
    with path.open("a") as file:
        file.write('{"n": 9')  # cut by the kill
    assert leftovers(tmp_path, "http://elsewhere", server.deliver) == 0, "of another server"
    server.is_away = True
    assert leftovers(tmp_path, "http://here", server.deliver) == 0
    server.is_away = False
    server.loses_answers = 1
    assert leftovers(tmp_path, "http://here", server.deliver) == 0
    assert leftovers(tmp_path, "http://here", server.deliver) == 6
    assert server.numbers == [0, 0, 1, 2, 3, 4, "file"]
    assert list(tmp_path.iterdir()) == []
    assert leftovers(tmp_path, "http://here", server.deliver) == 0


def test_a_delivery_that_was_cut_goes_on_where_it_was(tmp_path: Path) -> None:
    server = Server()
    server.is_away = True
    box = outbox(tmp_path, server)
    for number in range(4):
        box.post({"n": number})
    (path,) = tmp_path.glob("*.jsonl")
    copy = path.with_name("r1-1-2-3.jsonl")  # as of a process that is gone
    copy.write_text(path.read_text())
    copy.with_suffix(".delivered").write_text("..")
    other = Server()
    assert leftovers(tmp_path, "http://here", other.deliver) == 2
    assert other.numbers == [2, 3]


def test_posting_does_not_wait_for_a_server_that_hangs(tmp_path: Path) -> None:
    server = Server()

    def slow(run_id: str, record: Record) -> None:
        time.sleep(0.3)
        server.deliver(run_id, record)

    server.is_away = True
    box = Outbox(tmp_path, "http://here", "r1", slow, retry_s=0.02)
    box.post({"n": 0})
    started = time.monotonic()
    for number in range(1, 5):
        box.post({"n": number})
    assert time.monotonic() - started < 0.25
    server.is_away = False
    assert box.wait(10)
    assert server.numbers == [0, 1, 2, 3, 4]


def test_the_file_says_where_it_belongs(tmp_path: Path) -> None:
    server = Server()
    server.is_away = True
    outbox(tmp_path, server).post({"n": 1})
    (path,) = tmp_path.glob("r1-*.jsonl")
    head = json.loads(path.read_text().splitlines()[0])
    assert head == {"address": "http://here", "run_id": "r1"}
