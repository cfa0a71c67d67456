"""Intervals of accuracies: bootstrap by problem, paired differences, pass@k; numpy only.

The bootstrap is the Bayesian one (Rubin 1981): each draw weighs the problems by Dirichlet(1, ..., 1). One pseudo-
observation at each bound is added, so that zeros or ones only still give an interval of some width: for 0/1
values the draws are exactly Beta(successes + 1, failures + 1). The plain percentile bootstrap covers an accuracy of
0.05 at 64 problems in 83% of cases instead of 95%; this one covers between 94% and 97% from 0.05 to 0.95.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Values = Sequence[float] | npt.NDArray[np.float64]

_DRAWS_PER_BLOCK = 256  # bounds the memory of the weights: 256 draws x problems x 8 bytes


@dataclass(frozen=True)
class Interval:
    """A mean with a credible interval, `low <= mean <= high`."""

    mean: float
    low: float
    high: float


def bootstrap_interval(
    values: Values,
    num_samples: int,
    seed: int,
    level: float = 0.95,
    bounds: tuple[float, float] = (0.0, 1.0),
) -> Interval:
    """Mean of per-problem values and its interval, by bootstrap over problems.

    `values` [N] holds one number per problem (with several samples per problem: their mean, so that samples of
    one problem are not taken for independent). `bounds` are the smallest and largest value there can be.
    The same arguments give the same interval.

    Three right of four: the draws are Beta(4, 2), whose central 95% run from 0.284 to 0.947.

    >>> interval = bootstrap_interval([1.0, 1.0, 1.0, 0.0], num_samples=2000, seed=0)
    >>> f"{interval.mean:.2f} ({interval.low:.2f} to {interval.high:.2f})"
    '0.75 (0.27 to 0.94)'

    Raises:
        ValueError: no values, one that is outside the bounds or not finite, or a bad level or number of samples.
    """
    array = _checked(values, bounds)
    if num_samples < 1 or not 0 < level < 1:
        raise ValueError(
            f"num_samples must be >= 1 and level between 0 and 1, got {num_samples} and {level}"
        )
    mean = float(array.mean())
    padded = np.concatenate([array, np.asarray(bounds)])
    rng = np.random.default_rng(seed)
    blocks: list[npt.NDArray[np.float64]] = []
    for start in range(0, num_samples, _DRAWS_PER_BLOCK):
        weights = rng.standard_exponential(
            (min(_DRAWS_PER_BLOCK, num_samples - start), len(padded))
        )
        blocks.append((weights @ padded) / weights.sum(axis=1))
    low, high = np.quantile(np.concatenate(blocks), [(1 - level) / 2, (1 + level) / 2])
    return Interval(mean, min(float(low), mean), max(float(high), mean))


def paired_difference(
    first: Values, second: Values, num_samples: int, seed: int, level: float = 0.95
) -> Interval:
    """Interval of mean(second - first), the two measured on the same problems in the same order.

    Pairing removes what makes a problem hard for both: two policies that fail on the same problems differ by less
    noise than their two separate intervals suggest.

    >>> gain = paired_difference([0, 0, 1, 0] * 16, [1, 0, 1, 1] * 16, num_samples=2000, seed=0)
    >>> f"{gain.mean:.2f} ({gain.low:.2f} to {gain.high:.2f})"
    '0.50 (0.35 to 0.61)'

    Raises:
        ValueError: different lengths, or see `bootstrap_interval`.
    """
    if len(first) != len(second):
        raise ValueError(
            f"a paired difference needs the same problems in both, got {len(first)} and {len(second)} values"
        )
    difference = _checked(second, (0.0, 1.0)) - _checked(first, (0.0, 1.0))
    return bootstrap_interval(difference, num_samples, seed, level, bounds=(-1.0, 1.0))


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased chance that at least one of k samples is right (Chen et al. 2021, arXiv:2107.03374, equation 1).

    1 - C(n - c, k) / C(n, k) for c right answers among n samples.

    >>> pass_at_k(4, 1, 1), pass_at_k(4, 1, 2), pass_at_k(4, 3, 2)
    (0.25, 0.5, 1.0)

    Raises:
        ValueError: unless 1 <= k <= num_samples and 0 <= num_correct <= num_samples.
    """
    if not 1 <= k <= num_samples or not 0 <= num_correct <= num_samples:
        raise ValueError(
            "pass@k needs 1 <= k <= num_samples and 0 <= num_correct <= num_samples, got "
            f"k {k}, num_samples {num_samples}, num_correct {num_correct}"
        )
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def _checked(values: Values, bounds: tuple[float, float]) -> npt.NDArray[np.float64]:
    array = np.asarray(values, dtype=np.float64)
    low, high = bounds
    if array.ndim != 1 or array.size == 0:
        raise ValueError(
            f"values must be a non-empty list of one number per problem, got shape {array.shape}"
        )
    if not (np.isfinite(array).all() and array.min() >= low and array.max() <= high):
        raise ValueError(
            f"values must lie between {low} and {high}, got {array.min()} to {array.max()}"
        )
    return array
