"""Token ids, positions and visual features -> hidden states -> distribution; shared by sampler and learner.

Shapes: B rows, T tokens, H hidden size, V vocabulary, N selected tokens.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from polyturn.policy.attention import Packing
from polyturn.policy.model import Policy
from polyturn.policy.vision import Features
from polyturn.types import Batch


def hidden_states(
    policy: Policy,
    token_ids: Tensor,
    position_ids: Tensor,
    features: Sequence[Features],
    *,
    mask: Tensor | None = None,
    cache: object | None = None,
) -> Tensor:
    """Run the decoder; returns [B, T, H].

    token_ids [B, T]; position_ids [3, B, T]; features: of every picture in reading order over rows;
    mask [B, 1, T, K] bool (True: may attend) or None for causal; cache: keys and values of earlier calls.

    Raises:
        ValueError: the number of image pads is not the number of visual tokens.
    """
    pads = (token_ids == policy.family.image_token_id).view(-1).nonzero()[:, 0]
    embeddings, extra = _embed(policy, token_ids, pads, features)
    if cache is not None:
        extra[_cache_argument(type(policy.model.model.language_model))] = cache
    return _decode(policy, embeddings, position_ids, mask, extra)


def packed_states(
    policy: Policy,
    batch: Batch,
    features: Sequence[Features],
    *,
    spare: Sequence[Features] = (),
) -> Tensor:
    """Run the decoder over a packed batch, each of whose samples attends to itself alone; returns [T, H].

    features: of every picture in reading order; spare: features that count with weight 0, so that the vision tower
    is in the graph of a rank that has no picture.

    Raises:
        ValueError: the number of image pads is not the number of visual tokens.
    """
    embeddings, extra = _embed(policy, batch.token_ids[None], batch.pads, features)
    for feature in spare:
        for level in feature.levels:
            embeddings = embeddings + 0.0 * level.sum()
    extra["packing"] = Packing(batch.spans, batch.token_ids.device)
    return _decode(policy, embeddings, batch.position_ids[:, None], None, extra)[0]


def _embed(
    policy: Policy, token_ids: Tensor, rows: Tensor, features: Sequence[Features]
) -> tuple[Tensor, dict[str, object]]:
    """Embeddings [B, T, H] with visual features at `rows` [P] of B T, and what the decoder wants to know of them."""
    embeddings = cast("Tensor", policy.model.model.language_model.embed_tokens(token_ids))
    num_pads = len(rows)
    num_visual = sum(len(feature.levels[0]) for feature in features)
    if num_pads != num_visual:
        raise ValueError(f"{num_pads} image pads in the batch, but {num_visual} visual tokens")
    if not features:
        return embeddings, {}
    levels = [
        torch.cat(level).to(embeddings.dtype)
        for level in zip(*(f.levels for f in features), strict=True)
    ]
    flat = embeddings.reshape(-1, embeddings.shape[-1])
    embeddings = flat.index_copy(0, rows, levels[0]).view_as(embeddings)
    if len(levels) == 1:
        return embeddings, {}
    return embeddings, {"visual_pos_masks": rows, "deepstack_visual_embeds": levels[1:]}


def _decode(
    policy: Policy,
    embeddings: Tensor,
    position_ids: Tensor,
    mask: Tensor | None,
    extra: dict[str, object],
) -> Tensor:
    output = policy.model.model.language_model(
        inputs_embeds=embeddings,
        position_ids=position_ids,
        attention_mask=mask,
        use_cache=False,
        **extra,
    )
    return cast("Tensor", output.last_hidden_state)


@functools.cache
def _cache_argument(decoder: type[torch.nn.Module]) -> str:
    """transformers 5.24 calls it `cache`, 5.12 (SGLang's pin) `past_key_values`."""
    names = inspect.signature(inspect.unwrap(decoder.forward)).parameters
    return "cache" if "cache" in names else "past_key_values"


def token_distribution(policy: Policy, hidden: Tensor, temperature: float | Tensor) -> Tensor:
    """Log-probabilities [N, V] under the sampler's distribution: temperature applied, image tokens banned."""
    logits = policy.model.lm_head(hidden).float() / temperature
    logits[:, list(policy.family.banned_ids)] = -torch.inf
    return logits.log_softmax(-1)
