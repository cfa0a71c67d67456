"""Two policies on one set: numbers by hand, other sets are refused, what is said of them."""

from __future__ import annotations

import dataclasses

import pytest

from polyturn.evaluation import compare_text
from polyturn.evaluation.compare import OtherSetError, Scored, compare
from polyturn.evaluation.results import SCORE, ProblemResult


def scored(
    label: str, tries: list[list[bool]], *, kinds: str = "", evaluation: str = "a" * 64
) -> Scored:
    results = [
        ProblemResult(
            f"test/{i}", "1", {SCORE: tuple(right)}, kind=kinds[i : i + 1], question=f"Q{i}"
        )
        for i, right in enumerate(tries)
    ]
    return Scored(label, evaluation, results, params={"seed": label, "train.steps": "40"})


T, F = True, False
FIRST = scored("m v1", [[T], [T], [F], [F]] * 16, kinds="aabb" * 16)
SECOND = scored("m v2", [[T], [F], [T], [T]] * 16, kinds="aabb" * 16)


def test_the_gain_is_the_mean_of_the_paired_differences():
    found = compare(FIRST, SECOND, num_comparisons=1, bootstrap_samples=2000)
    # Per four problems: 0, -1, +1, +1.
    assert found.gain.mean == pytest.approx(0.25)
    assert found.rows[0].first.accuracy.mean == 0.5
    assert found.rows[0].second.accuracy.mean == 0.75
    assert found.gain.low < 0.25 < found.gain.high
    assert dataclasses.astuple(found.agreement) == (16, 16, 32, 0)
    assert len(found.differing) == 48


def test_the_same_comparison_has_the_same_numbers_and_the_other_way_round_their_negatives():
    once = compare(FIRST, SECOND, num_comparisons=1, bootstrap_samples=500)
    again = compare(FIRST, SECOND, num_comparisons=1, bootstrap_samples=500)
    assert once == again
    back = compare(SECOND, FIRST, num_comparisons=1, bootstrap_samples=5000)
    assert back.gain.mean == -once.gain.mean
    assert back.gain.low == pytest.approx(-once.gain.high, abs=0.02)


def test_problems_are_paired_by_id_and_not_by_place():
    shuffled = dataclasses.replace(SECOND, results=tuple(reversed(SECOND.results)))
    found = compare(FIRST, shuffled, num_comparisons=1, bootstrap_samples=500)
    assert found.gain == compare(FIRST, SECOND, num_comparisons=1, bootstrap_samples=500).gain


def test_kinds_are_compared_on_their_own_problems():
    found = compare(FIRST, SECOND, num_comparisons=1, bootstrap_samples=500)
    assert [(row.name, row.num_problems, row.difference.mean) for row in found.kinds] == [
        ("a", 32, -0.5),
        ("b", 32, 1.0),
    ]


def test_pass_at_k_and_the_share_of_several_tries():
    first = scored("m v1", [[T, F, F, F]] * 8)
    second = scored("m v2", [[T, T, F, F]] * 8)
    found = compare(first, second, num_comparisons=1, bootstrap_samples=500)
    assert found.rows[0].first.pass_at_k == {1: 0.25, 2: 0.5, 4: 1.0}
    assert found.rows[0].second.pass_at_k[2] == pytest.approx(5 / 6)
    assert found.gain.mean == 0.25
    assert dataclasses.astuple(found.agreement) == (0, 0, 8, 0)


def test_an_interval_for_many_comparisons_is_wider():
    one = compare(FIRST, SECOND, num_comparisons=1, bootstrap_samples=5000)
    many = compare(FIRST, SECOND, num_comparisons=10, bootstrap_samples=5000)
    assert one.adjusted == one.gain
    assert many.gain == one.gain
    assert many.adjusted.low < one.gain.low
    assert many.adjusted.high > one.gain.high
    assert "first comparison" in compare_text.caution(one)
    assert "10 pairs were compared" in compare_text.caution(many)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (dataclasses.replace(SECOND, evaluation="b" * 64), "set aaaaaaaaaaaa, m v2 on bbbbbbbbbbbb"),
        (dataclasses.replace(SECOND, results=SECOND.results[1:]), "64 and 63 problems"),
        (dataclasses.replace(SECOND, results=[*SECOND.results[1:], FIRST.results[1]]), "not the same"),
    ],
)  # fmt: skip
def test_other_sets_are_refused_with_their_digests(other: Scored, message: str):
    with pytest.raises(OtherSetError, match=message):
        compare(FIRST, other, num_comparisons=1, bootstrap_samples=100)


def test_a_score_that_only_one_has_is_left_out_and_a_missing_main_score_is_named():
    with_greedy = dataclasses.replace(
        SECOND,
        results=[
            dataclasses.replace(r, correct={**r.correct, "policy/greedy": (True,)})
            for r in SECOND.results
        ],
    )
    found = compare(FIRST, with_greedy, num_comparisons=1, bootstrap_samples=100)
    assert [row.name for row in found.rows] == ["sampled"]
    without = dataclasses.replace(
        FIRST, results=[dataclasses.replace(r, correct={"x": (True,)}) for r in FIRST.results]
    )
    with pytest.raises(ValueError, match="has no score 'policy/sampled', only x"):
        compare(without, SECOND, num_comparisons=1, bootstrap_samples=100)


@pytest.mark.parametrize(
    ("second", "said"),
    [(SECOND, "m v2 is better than m v1"), (FIRST, "No difference is shown")],
)
def test_what_is_said_follows_the_interval(second: Scored, said: str):
    found = compare(FIRST, second, num_comparisons=1, bootstrap_samples=2000)
    assert compare_text.verdict(found).startswith(said)
    turned = compare(SECOND, FIRST, num_comparisons=1, bootstrap_samples=2000)
    assert "m v1 is worse than m v2" in compare_text.verdict(turned)


def test_markdown_has_every_table_and_the_params_that_differ():
    text = compare_text.markdown(compare(FIRST, SECOND, num_comparisons=2, bootstrap_samples=500))
    assert text.startswith("## m v2 against m v1\n")
    assert "| sampled | 64 | 0.500 [" in text
    assert "| a | 32 |" in text
    assert "| seed | m v1 | m v2 |" in text
    assert "train.steps" not in text
    assert "| 16 | 16 | 32 | 0 |" in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert all(line.endswith("|") for line in rows)
