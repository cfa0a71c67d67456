"""Symbolic work ends in time, from every kind of thread, and leaves the pool healthy."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from polyturn.grading import symbolic
from polyturn.reward import answers_match, grade

EQUAL = ("\\frac{x}{7}+\\frac{2}{7}", "\\frac{x+2}{7}")
TOWER = "x^{7^{7^{7^{7^{7}}}}} + \\frac{7^{7^{7^{7^{7}}}}-7}{4}"


@pytest.fixture(scope="module", autouse=True)
def warm_pool() -> None:
    """Start a child once; that is no part of any limit."""
    assert answers_match(*EQUAL)


@pytest.mark.parametrize("reference", ["3", "x+1"])
@pytest.mark.parametrize(
    "hard",
    [
        "\\frac{7^{7^{7^{7^{7}}}}-7}{4}",
        "10.0^{10.0^{10.0}}",
        "1e1000",
        "10^{400}",
        "100000!",
        "9" * 5000,
        "(" * 300 + "5" + ")" * 300,
        "{" * 100_000 + "5" + "}" * 100_000,
        "\\frac{" * 5000,
        "\\sqrt" * 400 + "5",
        "5 " * 500_000,
        "a" * 1_000_000,
        TOWER,
        "\\prod_{k=1}^{100000} k^{k}",
        "\\int_0^1 x^{x^{x}} dx",
    ],
)
def test_hard_answers_are_no_match_within_the_limit(hard: str, reference: str) -> None:
    for text in (hard, f"\\boxed{{{hard}}}"):
        start = time.monotonic()
        verdict = grade(text, reference, timeout_s=2.0)
        assert not verdict.match
        assert time.monotonic() - start < 10, (
            "the limit, and the start of a new child on a busy machine"
        )
    assert answers_match(*EQUAL), "the pool is healthy"


def test_a_comparison_over_the_limit_is_a_counted_failure_and_the_child_is_replaced() -> None:
    start = time.monotonic()
    verdict = grade(f"\\boxed{{{TOWER}}}", "x+1", timeout_s=0.02)
    assert (verdict.match, verdict.failure) == (False, "symbolic comparison took more than 0.02 s")
    assert time.monotonic() - start < 5
    assert answers_match(*EQUAL)


def test_a_killed_child_is_a_counted_failure_and_is_replaced() -> None:
    pool = symbolic.Pool(num_workers=1)
    try:
        assert pool.compare("$x+1$", "$1+x$", 30).match
        pool._idle[0]._process.kill()
        pool._idle[0]._process.wait()
        result = pool.compare("$x+1$", "$1+x$", 30)
        assert not result.match
        assert "failed" in str(result.failure)
        assert pool.compare("$x+1$", "$1+x$", 30).match
    finally:
        pool.close()


CASES = [
    ("\\boxed{30°}", "30", True),
    ("\\boxed{12√2}", "12\\sqrt{2}", True),
    ("\\boxed{7\\sqrt(5)}", "7", False),
    (f"\\boxed{{{EQUAL[0]}}}", EQUAL[1], True),
    ("\\boxed{x+2}", EQUAL[1], False),
    ("\\boxed{\\sin(29\\pi/180)}", "\\cos(61\\pi/180)", True),
]


def grade_all() -> list[bool]:
    return [answers_match(prediction, reference) for prediction, reference, _ in CASES]


def test_main_thread_worker_threads_and_asyncio_agree() -> None:  # MATH-05
    expected = [match for _, _, match in CASES]
    assert grade_all() == expected
    assert threading.current_thread() is threading.main_thread()
    with ThreadPoolExecutor(8) as threads:
        assert [future.result() for future in [threads.submit(grade_all) for _ in range(16)]] == [
            expected
        ] * 16

    async def in_executor() -> list[list[bool]]:
        loop = asyncio.get_running_loop()
        return await asyncio.gather(*(loop.run_in_executor(None, grade_all) for _ in range(4)))

    assert asyncio.run(in_executor()) == [expected] * 4


def test_a_forked_process_has_its_own_children() -> None:
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:  # nothing of pytest may run in the child
        os.write(write_end, b"yes" if answers_match(*EQUAL) else b"no")
        for pool in symbolic._POOLS:
            pool.close()
        os._exit(0)
    os.close(write_end)
    assert os.read(read_end, 10) == b"yes"
    os.close(read_end)
    assert os.waitpid(pid, 0)[1] == 0
    assert answers_match(*EQUAL)
