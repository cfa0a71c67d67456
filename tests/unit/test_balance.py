"""Micro-batches over ranks: every sample once, within the budget, balanced, siblings together."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from polyturn.balance import Load, Prompt, partition

NO_PROMPT = Prompt(b"", (), 0)


def text(*lengths: int) -> list[Load]:
    return [Load(length, NO_PROMPT, {}) for length in lengths]


def group(name: str, prompt: int, replies: Sequence[int], patches: int = 0) -> list[Load]:
    """Siblings on one prompt with a picture of `patches`."""
    images = (name,) if patches else ()
    shared = Prompt(name.encode(), images, prompt)
    return [Load(prompt + reply, shared, dict.fromkeys(images, patches)) for reply in replies]


def cost(indices: Sequence[int], loads: Sequence[Load], patch_cost: float) -> float:
    """By definition: replies, distinct prompts, distinct pictures."""
    chosen = [loads[index] for index in indices]
    prompts = {load.prompt for load in chosen}
    patches: dict[str, int] = {}
    for load in chosen:
        patches |= load.patches
    replies = sum(load.num_tokens - load.prompt.length for load in chosen)
    prompt_tokens = sum(prompt.length for prompt in prompts)
    return replies + prompt_tokens + patch_cost * sum(patches.values())


groups = st.lists(
    st.tuples(
        st.integers(0, 30), st.lists(st.integers(1, 60), min_size=1, max_size=8), st.integers(0, 40)
    ),
    max_size=6,
)


@given(groups, st.integers(1, 4), st.integers(20, 200), st.sampled_from([0.0, 0.5, 2.0]))
def test_every_sample_once_within_the_budget_and_ranks_in_step(
    shape: list[tuple[int, list[int], int]], num_ranks: int, budget: int, patch_cost: float
) -> None:
    loads = [
        load
        for number, (prompt, replies, patches) in enumerate(shape)
        for load in group(str(number), prompt, replies, patches)
    ]
    ranks = partition(loads, num_ranks=num_ranks, max_tokens=budget, patch_cost=patch_cost)
    assert len(ranks) == num_ranks
    assert len({len(batches) for batches in ranks}) == 1
    batches = [batch for rank in ranks for batch in rank]
    assert sorted(itertools.chain(*batches)) == list(range(len(loads)))
    assert not loads or all(any(together) for together in zip(*ranks, strict=True))
    for batch in batches:
        alone = max((cost([index], loads, patch_cost) for index in batch), default=0.0)
        assert cost(batch, loads, patch_cost) <= max(budget, alone) + 1e-9
    assert ranks == partition(loads, num_ranks=num_ranks, max_tokens=budget, patch_cost=patch_cost)


def test_no_samples_are_one_empty_micro_batch_on_every_rank() -> None:
    assert partition([], num_ranks=2, max_tokens=9, patch_cost=1.0) == [[[]], [[]]]


def test_fewer_samples_than_ranks_leave_ranks_with_nothing() -> None:
    assert partition(text(5), num_ranks=3, max_tokens=9, patch_cost=0.0) == [[[0]], [[]], [[]]]


def test_tokens_are_balanced_over_ranks() -> None:
    loads = text(*(10 + 7 * n % 90 for n in range(64)))
    ranks = partition(loads, num_ranks=4, max_tokens=400, patch_cost=0.0)
    sums = [sum(loads[i].num_tokens for batch in rank for i in batch) for rank in ranks]
    assert max(sums) <= 1.05 * min(sums)
    for together in zip(*ranks, strict=True):
        costs = [cost(batch, loads, 0.0) for batch in together]
        assert max(costs) <= 1.25 * min(costs)


def test_patches_are_balanced_too() -> None:
    """Two heavy pictures go to different ranks although the text would fit either way."""
    loads = [
        *group("a", 4, (6,), patches=100),
        *group("b", 4, (6,), patches=100),
        *text(10, 10),
    ]
    ranks = partition(loads, num_ranks=2, max_tokens=1000, patch_cost=1.0)
    assert sorted(sorted(batch) for rank in ranks for batch in rank) in ([[0, 2], [1, 3]], [[0, 3], [1, 2]])  # fmt: skip


def test_siblings_share_a_micro_batch_and_their_picture() -> None:
    """Two groups of eight on two ranks: one group each, so that each picture is encoded once."""
    loads = [*group("a", 50, range(1, 9), patches=64), *group("b", 50, range(1, 9), patches=64)]
    mixed = [loads[index] for index in (0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15)]
    ranks = partition(mixed, num_ranks=2, max_tokens=500, patch_cost=0.5)
    assert sorted(rank[0] for rank in ranks) == [list(range(0, 16, 2)), list(range(1, 16, 2))]


def test_a_single_group_is_split_rather_than_leaving_a_rank_idle() -> None:
    loads = group("a", 10, [40] * 8, patches=8)
    ranks = partition(loads, num_ranks=2, max_tokens=1000, patch_cost=0.5)
    assert sorted(len(rank[0]) for rank in ranks) == [4, 4]


def test_a_long_prompt_is_not_split_for_short_replies() -> None:
    """Split, both ranks would run the whole prompt and the slower one would gain nothing to speak of."""
    loads = group("a", 1000, [1, 1])
    ranks = partition(loads, num_ranks=1, max_tokens=1001, patch_cost=0.0)
    assert [len(batch) for batch in ranks[0]] == [1, 1]
    assert partition(loads, num_ranks=1, max_tokens=1002, patch_cost=0.0) == [[[0, 1]]]


def test_longest_micro_batches_come_first() -> None:
    """Memory that does not suffice is found out at once."""
    loads = text(3, 90, 5, 80, 60)
    (batches,) = partition(loads, num_ranks=1, max_tokens=100, patch_cost=0.0)
    costs = [cost(batch, loads, 0.0) for batch in batches]
    assert costs == sorted(costs, reverse=True)
