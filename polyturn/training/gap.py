"""How far sampler and learner are apart on sampled tokens: mean, tail, divergence, by turn and by what a turn answers.

Both score the same ids under the same weights, so that only numerics differ: 1e-6 nats in float32, hundredths in
bfloat16. Other positions, pictures or weights show in the mean, a few broken tokens in the tail. Differences are
d = learner - sampler, in nats.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from polyturn.learner.base import Logprobs
from polyturn.training.metrics import Metrics
from polyturn.types import TrainingSample

_PREFIX = "train/logprob_gap"


def mean_gap(metrics: Metrics) -> float:
    """The mean |d| of all tokens among the metrics of `gap_metrics`; 0 if there were none."""
    return metrics.get(f"{_PREFIX}/mean", 0.0)


def gap_metrics(
    samples: Sequence[TrainingSample], own: Sequence[Logprobs], image_token_id: int
) -> Metrics:
    """Mean |d|, its 99th percentile, the share above ln 2 (a factor of two in probability) and k3 = E[exp d - 1 - d].

    Beside them the mean of each turn (from 1), and of the turns whose prompt or observation shows a new picture and
    those whose does not. `own` are the learner's logprobs of each sample, [T]. Without trained tokens: nothing.

        prompt with a picture | A A | text | A        d = .1 .3 | .2: turn_1 .2, turn_2 .2, image_turns .2, text_turns .2
    """
    found: dict[str, list[npt.NDArray[np.float64]]] = {}
    for sample, learner in zip(samples, own, strict=True):
        difference = learner.astype(np.float64) - sample.logprobs
        end = 0
        for turn, (start, stop) in enumerate(turns_of(sample), start=1):
            shows = bool((sample.token_ids[end:start] == image_token_id).any())
            for name in ("", f"/turn_{turn}", "/image_turns" if shows else "/text_turns"):
                found.setdefault(name, []).append(difference[start:stop])
            end = stop
    if not found:
        return {}
    joined = {name: np.concatenate(parts) for name, parts in found.items()}
    whole = joined.pop("")
    return {
        f"{_PREFIX}/mean": float(np.abs(whole).mean()),
        f"{_PREFIX}/p99": float(np.quantile(np.abs(whole), 0.99)),
        f"{_PREFIX}/share_above_ln2": float((np.abs(whole) > math.log(2)).mean()),
        f"{_PREFIX}/k3": float((np.expm1(np.minimum(whole, 50.0)) - whole).mean()),
        **{f"{_PREFIX}{name}": float(np.abs(part).mean()) for name, part in sorted(joined.items())},
    }


def turns_of(sample: TrainingSample) -> list[tuple[int, int]]:
    """Where each of a sample's replies begins and ends; a sample's first token is never scored.

    A mask of 0 1 1 0 1 has the replies (1, 3) and (4, 5).
    """
    scored = np.concatenate([[0], (sample.loss_mask == 1)[1:].astype(np.int8), [0]])
    edges = np.flatnonzero(np.diff(scored))
    shifted = [int(edge) + 1 for edge in edges]
    return list(zip(shifted[::2], shifted[1::2], strict=True))
