"""How pictures are split over ranks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from polyturn.learner.megatron.tower import split


@given(st.lists(st.integers(1, 50), max_size=12), st.integers(1, 8))
def test_every_picture_has_one_rank_and_none_has_much_more_than_its_part(
    sizes: list[int], num_ranks: int
) -> None:
    """Largest first is within 4/3 of the best split, which is at least the mean and the largest picture."""
    shares = split(sizes, num_ranks)
    assert len(shares) == num_ranks
    assert sorted(index for share in shares for index in share) == list(range(len(sizes)))
    best = max(sum(sizes) / num_ranks, max(sizes, default=0))
    assert max(sum(sizes[index] for index in share) for share in shares) <= 4 / 3 * best + max(
        sizes, default=0
    )


def test_the_split_of_the_docstring() -> None:
    assert split([4, 9, 4, 2], 2) == [[1], [0, 2, 3]]
    assert split([], 2) == [[], []]
    assert split([5], 3) == [[0], [], []]
