"""A Qwen-VL's decoder from megatron-core's modules: token ids, positions and visual features -> hidden states.

Shapes: T packed tokens, N visual tokens, H hidden size. Megatron's own are [T, 1, H]; with sequence parallelism what lies
between weights is [T / ranks, 1, H].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from polyturn.learner.megatron.config import DecoderFacts, rotary_angles
from polyturn.learner.megatron.modules import block_spec
from polyturn.policy import fused
from polyturn.policy.attention import Packing
from polyturn.types import Batch, Span


def build_gpt(facts: DecoderFacts, config: TransformerConfig) -> GPTModel:
    """megatron-core's model with weights that are not set yet, in host memory; in eval mode for good (no dropout).

    Embedding and head have rows of zeros up to a multiple of the ranks that share them.
    """
    gpt = GPTModel(
        config,
        block_spec(config),
        vocab_size=facts.padded_vocab_size(config.tensor_model_parallel_size),
        max_sequence_length=facts.max_positions,
        share_embeddings_and_output_weights=facts.is_tied,
        position_embedding_type="none",  # angles are given to each layer
        # Pictures are put in place before the tokens are split over ranks.
        scatter_embedding_sequence_parallel=False,
    )
    for module in gpt.modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear | VocabParallelEmbedding):
            _mark_split(module)
        if isinstance(module, RowParallelLinear):
            _name_group(module)
    return gpt.eval()


def _mark_split(module: ColumnParallelLinear | RowParallelLinear | VocabParallelEmbedding) -> None:
    """Say that ranks hold a part of the weight each, which megatron-core 0.16 does only where it draws weights."""
    is_marked = hasattr(module.weight, "tensor_model_parallel")
    if module.weight is not None and not is_marked:  # a tied head has none
        dim = 1 if isinstance(module, RowParallelLinear) else 0
        set_tensor_model_parallel_attributes(module.weight, True, dim, 1)


def _name_group(layer: RowParallelLinear) -> None:
    """Fill in an argument that the layer leaves out and then warns of, which would cut a compiled graph there."""
    run = layer._forward_impl

    def with_group(*arguments: object, **named: object) -> Tensor:
        return run(*arguments, **{**named, "tp_group": layer.tp_group})

    layer._forward_impl = with_group


def compile_layers(gpt: GPTModel) -> None:
    """Fuse each layer's small kernels; attention, and collectives between ranks, stay as they are."""
    fused.compile_modules(cast("nn.ModuleList", gpt.decoder.layers))


def head_weight(gpt: GPTModel) -> Tensor:
    """This rank's rows of the head, [V / ranks, H]; the embedding's where they are tied."""
    if gpt.share_embeddings_and_output_weights:
        return gpt.shared_embedding_or_output_weight()
    return cast("nn.Parameter", gpt.output_layer.weight)


@dataclass(frozen=True)
class Decoder:
    """Runs a GPTModel over packed rows; every rank of a tensor-parallel group runs the same row at the same time."""

    gpt: GPTModel
    facts: DecoderFacts
    is_recomputing: bool

    def states(self, batch: Batch, levels: Sequence[Tensor]) -> Tensor:
        """Hidden states [T, H], whole on every rank; the backward pass sums their gradients over ranks.

        levels [N, H] each: visual features in reading order for the embedding and, in Qwen3-VL, to add after each of
        the first layers (DeepStack).

        Raises:
            ValueError: the number of image pads is not the number of visual tokens.
        """
        number, num_visual = len(batch.token_ids), len(levels[0]) if levels else 0
        if len(batch.pads) != num_visual:
            raise ValueError(
                f"{len(batch.pads)} image pads in the batch, but {num_visual} visual tokens"
            )
        if self._config.sequence_parallel:
            batch = padded(batch, self._config.tensor_model_parallel_size)
        embeddings = self.gpt.embedding.word_embeddings(batch.token_ids[None]).transpose(0, 1)
        if levels:
            features = levels[0][:, None].to(embeddings.dtype)
            embeddings = embeddings.index_copy(0, batch.pads, features)
        hidden = self._layers(
            self._scattered(embeddings),
            Packing(batch.spans, batch.token_ids.device),
            rotary_angles(self.facts, batch.position_ids),
            [self._placed(level, batch.pads, embeddings) for level in levels[1:]],
        )
        if self._config.sequence_parallel:
            whole = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=True, group=self._group
            )
        else:
            whole = copy_to_tensor_model_parallel_region(hidden, self._group)
        return cast("Tensor", whole)[:number, 0]

    @property
    def _config(self) -> TransformerConfig:
        return cast("TransformerConfig", self.gpt.config)

    @property
    def _group(self) -> dist.ProcessGroup:
        return self.gpt.pg_collection.tp

    def _layers(
        self, hidden: Tensor, packing: Packing, angles: Tensor, extra: Sequence[Tensor]
    ) -> Tensor:
        """Run the layers one by one; `extra` [T, 1, H] are added after the first ones."""
        for index, layer in enumerate(cast("nn.ModuleList", self.gpt.decoder.layers)):
            arguments = {"attention_mask": packing, "rotary_pos_emb": angles}
            if self.is_recomputing and torch.is_grad_enabled():
                # torch's: megatron-core's own saves the state of the GPU's random numbers, which nothing draws here.
                output = checkpoint(
                    layer, hidden, use_reentrant=False, preserve_rng_state=False, **arguments
                )
            else:
                output = layer(hidden, **arguments)
            hidden = cast("tuple[Tensor, object]", output)[0]
            if index < len(extra):
                hidden = hidden + extra[index]
        return cast("nn.Module", self.gpt.decoder.final_layernorm)(hidden)

    def _placed(self, level: Tensor, rows: Tensor, like: Tensor) -> Tensor:
        """Features [N, H] at their tokens among zeros: this rank's part of [T, 1, H]."""
        placed = torch.zeros_like(like).index_copy(0, rows, level[:, None].to(like.dtype))
        return self._scattered(placed)

    def _scattered(self, whole: Tensor) -> Tensor:
        if not self._config.sequence_parallel:
            return whole
        return cast("Tensor", scatter_to_sequence_parallel_region(whole, self._group))


def padded(batch: Batch, multiple: int) -> Batch:
    """Make T a multiple by a further sample of tokens 0, to which nothing else attends and of which nothing is scored."""
    number = len(batch.token_ids)
    missing = -number % multiple
    if not missing:
        return batch
    return replace(
        batch,
        token_ids=nn.functional.pad(batch.token_ids, (0, missing)),
        position_ids=nn.functional.pad(batch.position_ids, (0, missing)),
        spans=(*batch.spans, Span(number, number, number, number + missing)),
    )
