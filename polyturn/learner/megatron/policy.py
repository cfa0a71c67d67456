"""A policy whose decoder is Megatron's and whose vision tower is transformers'; it scores packed batches."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from polyturn.learner import sharding
from polyturn.learner.megatron import config, weights
from polyturn.learner.megatron.config import DecoderFacts
from polyturn.learner.megatron.decoder import Decoder, build_gpt, compile_layers, head_weight
from polyturn.learner.megatron.scores import VocabHead
from polyturn.learner.megatron.tower import SplitTower
from polyturn.learner.scoring import trained
from polyturn.params import LearnerParams
from polyturn.policy import fused
from polyturn.policy.logprobs import HowToScore, Scores
from polyturn.policy.model import DTYPES, Policy
from polyturn.render import Renderer
from polyturn.types import Batch


@dataclass(frozen=True)
class MegatronPolicy:
    """What `learner.scorer.Scorer` is, on Megatron's modules; all ranks of `group` score the same batches at the same time.

    `policy.model.model.visual` is the tower that is used; its language model is not. Logprobs and entropies are the same
    on every rank of the group, and so must be the loss that is made of them. After the backward pass the tower's
    gradients are those of the rank's own pictures, to be summed over the group; megatron-core's
    `finalize_model_grads` does that for weights of the decoder that are whole on every rank.
    """

    policy: Policy
    facts: DecoderFacts
    language: GPTModel
    tower: SplitTower
    group: dist.ProcessGroup
    is_recomputing: bool
    temperature: float
    how: HowToScore

    @property
    def config(self) -> TransformerConfig:
        """megatron-core's."""
        return cast("TransformerConfig", self.language.config)

    @property
    def visual(self) -> nn.Module:
        """The vision tower."""
        return cast("nn.Module", self.policy.model.model.visual)

    def score(
        self, batch: Batch, *, with_tower: bool, with_entropy_gradient: bool = False
    ) -> Scores:
        """Logprobs and entropies of the trained tokens, [N] (collective over the group).

        `with_tower`: some rank's batch has pictures. Ranks of other groups are not waited for, so that only this
        group's pictures matter. A batch that trains nothing gives empty scores whose gradient is zero.
        """
        batch = batch.to(next(self.language.parameters()).device)
        features = self.tower.features(batch.images) if with_tower else {}
        shown = [features[batch.images[index].sha256].levels for index in batch.image_rows]
        hidden = self._decoder.states(
            batch, [torch.cat(level) for level in zip(*shown, strict=True)]
        )
        number = len(batch.before)
        scores = self._head.score(
            hidden.index_select(0, batch.before) if number else hidden[:1],
            trained(batch, batch.token_ids) if number else batch.token_ids[:1],
            with_entropy_gradient=with_entropy_gradient,
        )
        return Scores(scores.logprobs[:number], scores.entropy[:number])

    @torch.no_grad()
    def logprobs(self, batch: Batch, *, with_tower: bool) -> Tensor:
        """Logprobs of the trained tokens without gradient, [N] (collective over the group)."""
        return self.score(batch, with_tower=with_tower).logprobs

    @functools.cached_property
    def _decoder(self) -> Decoder:
        return Decoder(self.language, self.facts, self.is_recomputing)

    @functools.cached_property
    def _head(self) -> VocabHead:
        weight = head_weight(self.language)
        return VocabHead(
            weight=weight,
            first=self.group.rank() * len(weight),
            vocab_size=self.facts.vocab_size,
            banned_ids=self.policy.family.banned_ids,
            temperature=self.temperature,
            group=self.group,
            how=self.how,
        )


def build(
    policy: Policy,
    params: LearnerParams,
    temperature: float,
    *,
    device: torch.device,
    is_trained: bool = True,
    tower: SplitTower | None = None,
) -> MegatronPolicy:
    """A policy with Megatron's decoder and the weights of `policy`; megatron-core's groups are there already.

    The tower of `policy` moves to `device` and is used as it is; its language model is given up once its weights are
    copied. Without `is_trained` nothing has a gradient; `tower` then gives the features (None: its own does).

    Raises:
        MegatronError: model and layout of ranks do not fit, or are not built.
    """
    facts = config.facts_of(policy.model.config)
    config.check_layout(facts, params)
    group = cast("dist.ProcessGroup", parallel_state.get_tensor_model_parallel_group())
    is_frozen = params.freeze_vision or not is_trained
    if tower is None:
        _prepare_tower(policy, params, device, is_frozen=is_frozen)
    gpt = build_gpt(facts, config.transformer_config(facts, params))
    for parameter in gpt.parameters():
        parameter.data = parameter.data.to(DTYPES[params.precision])
        parameter.requires_grad_(is_trained)
    grid = Renderer(policy).grid
    built = MegatronPolicy(
        policy=policy,
        facts=facts,
        language=gpt,
        tower=tower
        or SplitTower(
            policy,
            lambda image: math.prod(grid(image)),
            group,
            cache_mb=params.vision_cache_mb,
            is_frozen=is_frozen,
        ),
        group=group,
        is_recomputing=params.activation_checkpointing,
        temperature=temperature,
        how=HowToScore(params.logit_chunk_tokens, params.compile),
    )
    weights.load_hf(built, policy.model.state_dict())
    _give_up_language_model(policy)
    gpt.to(device)
    if params.compile:
        compile_layers(gpt)
    return built


def _give_up_language_model(policy: Policy) -> None:
    """Keep its shapes alone: every rank of a host would hold all of it for nothing."""
    nn.Module.to(policy.model.model.language_model, "meta")
    nn.Module.to(policy.model.lm_head, "meta")


def _prepare_tower(
    policy: Policy, params: LearnerParams, device: torch.device, *, is_frozen: bool
) -> None:
    """Device, precision and recomputation; a frozen tower computes in model.dtype unless all is float32."""
    visual = cast("nn.Module", policy.model.model.visual).to(device)
    for parameter in visual.parameters():
        parameter.requires_grad_(not is_frozen)
        # Parameters alone: rotary angles stay float32.
        if not is_frozen or params.precision == "float32":
            parameter.data = parameter.data.to(DTYPES[params.precision])
    if params.compile:  # inside of what is checkpointed
        fused.compile_vision_blocks(sharding.vision_blocks(policy.model))
    if params.activation_checkpointing and not is_frozen:
        for block in sharding.vision_blocks(policy.model):
            block.forward = functools.partial(
                checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False
            )
