"""Attention of packed rows: each sample attends to itself alone, and only the attention itself sees any padding.

Linear layers run over the T packed tokens. Attention needs each sample's tokens together, so keys, values and
queries are gathered to sample order (a prompt that siblings share is gathered once for each of them) and the
outputs are gathered back. Shapes: T packed tokens, S samples, L longest sample, E tokens over all samples,
H heads, K key and value heads, D head dimension.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Protocol, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3_vl.modeling_qwen3_vl import eager_attention_forward

from polyturn.policy.fused import opaque
from polyturn.policy.transfer import to_device
from polyturn.types import Span

PREFIX = "polyturn_"
FULLNESS = (
    0.8  # of a padded batch's rows at least: more batches cost calls, fuller ones less arithmetic
)
VARLEN_DTYPES = (torch.bfloat16, torch.float16)
_Attend = Callable[..., tuple[Tensor, Tensor | None]]


@dataclass(frozen=True)
class Packing:
    """Where the samples of a packed row lie, with the gather indices that attention needs, made once per device.

    Tokens 0..4 hold a prompt of two tokens and a reply of one, then a sibling's reply of two:

        >>> packing = Packing((Span(0, 2, 2, 3), Span(0, 2, 3, 5)), torch.device("cpu"))
        >>> packing.gather.tolist(), packing.scatter.tolist()
        ([0, 1, 2, 0, 1, 3, 4], [3, 4, 2, 5, 6])

    Padded, longest first, in batches of similar length:

        >>> packing.shapes, packing.padded_gather.tolist(), packing.padded_scatter.tolist()
        ([(1, 4), (1, 3)], [0, 1, 3, 4, 0, 1, 2], [4, 5, 6, 2, 3])
    """

    spans: tuple[Span, ...]
    device: torch.device

    @cached_property
    def longest(self) -> int:
        """L."""
        return max(span.length for span in self.spans)

    @cached_property
    def gather(self) -> Tensor:
        """The packed token at each place of the samples laid end to end, [E]."""
        return self._tensor(np.concatenate([span.indices() for span in self.spans]))

    @cached_property
    def scatter(self) -> Tensor:
        """The place of each packed token in `gather`, [T]; a shared prompt's is in one of its samples."""
        return self._tensor(self._own_places)

    @cached_property
    def copies(self) -> Tensor:
        """The places in `gather` that `scatter` leaves out: a shared prompt's in all of its samples but one."""
        is_copy = np.ones(self._bounds[-1], dtype=bool)
        is_copy[self._own_places] = False
        return self._tensor(np.flatnonzero(is_copy))

    @cached_property
    def bounds(self) -> Tensor:
        """Where the samples begin in `gather` and where the last one ends, [S + 1] int32."""
        return self._tensor(np.array(self._bounds, dtype=np.int32))

    @cached_property
    def shapes(self) -> list[tuple[int, int]]:
        """Samples and padded length of each batch; a sample is at least FULLNESS times as long as its batch."""
        shapes: list[tuple[int, int]] = []
        for span in self._sorted:
            if shapes and span.length >= FULLNESS * shapes[-1][1]:
                shapes[-1] = (shapes[-1][0] + 1, shapes[-1][1])
            else:
                shapes.append((1, span.length))
        return shapes

    @cached_property
    def padded_gather(self) -> Tensor:
        """The packed token at each place of the right padded batches end to end; nothing attends to a padding."""
        rows = iter(self._sorted)
        tables: list[np.ndarray] = []
        for number, length in self.shapes:
            table = np.zeros((number, length), dtype=np.int64)
            for line in table:
                indices = next(rows).indices()
                line[: len(indices)] = indices
            tables.append(table.reshape(-1))
        return self._tensor(np.concatenate(tables))

    @cached_property
    def padded_scatter(self) -> Tensor:
        """The place of each packed token in `padded_gather`, [T]."""
        lengths = [length for number, length in self.shapes for _ in range(number)]
        return self._tensor(_places(self._sorted, np.cumsum([0, *lengths]).tolist()[:-1]))

    @cached_property
    def _sorted(self) -> list[Span]:
        return sorted(self.spans, key=lambda span: -span.length)

    @cached_property
    def _bounds(self) -> list[int]:
        return np.cumsum([0, *(span.length for span in self.spans)]).tolist()

    @cached_property
    def _own_places(self) -> np.ndarray:
        return _places(self.spans, self._bounds[:-1])

    def _tensor(self, values: np.ndarray) -> Tensor:
        return to_device(torch.from_numpy(values), self.device)


def _places(spans: Sequence[Span], starts: Sequence[int]) -> np.ndarray:
    """Where each packed token is, [T], with spans laid out from `starts` on."""
    places = np.zeros(max(span.stop for span in spans), dtype=np.int64)
    for start, span in zip(starts, spans, strict=True):
        places[span.indices()] = start + np.arange(span.length)
    return places


@opaque  # its gathers depend on the samples; what stands around it compiles well
def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, scaling: float
) -> Tensor:
    """Causal attention inside each sample; query [1, H, T, D], key and value [1, K, T, D] -> [1, T, H, D].

    bfloat16 and float16 on CUDA take torch's varlen kernel (there is none for CPU or float32); everything else
    takes SDPA over right padded batches of samples of similar length: causal, so that no token sees padding.
    """
    tokens = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]  # [T, H or K, D]
    if query.is_cuda and query.dtype in VARLEN_DTYPES:
        return _varlen(tokens, packing, scaling)[None]
    return _padded(tokens, packing, scaling)[None]


def _padded(tokens: Sequence[Tensor], packing: Packing, scaling: float) -> Tensor:
    sizes = [number * length for number, length in packing.shapes]
    batches = zip(
        *(_gather(tensor, packing.padded_gather).split(sizes) for tensor in tokens), strict=True
    )
    is_grouped = tokens[0].shape[1] != tokens[1].shape[1]
    outputs: list[Tensor] = []
    for shape, batch in zip(packing.shapes, batches, strict=True):
        query, key, value = (tensor.unflatten(0, shape).transpose(1, 2) for tensor in batch)
        output = scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=is_grouped
        )
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    return _gather(torch.cat(outputs), packing.padded_scatter)


def _varlen(tokens: Sequence[Tensor], packing: Packing, scaling: float) -> Tensor:
    query, key, value = (
        _Lay.apply(tensor.flatten(1), packing).unflatten(1, tensor.shape[1:]) for tensor in tokens
    )
    output = _varlen_kernel()(
        query,
        key,
        value,
        packing.bounds,
        packing.bounds,
        packing.longest,
        packing.longest,
        scale=scaling,
        window_size=(-1, 0),
    )
    rows = cast("Tensor", output)
    return cast("Tensor", _PickUp.apply(rows.flatten(1), packing)).unflatten(1, rows.shape[1:])


class _Context(Protocol):
    packing: Packing
    num_rows: int


class _Lay(torch.autograd.Function):
    """Packed rows [T, C] -> samples end to end [E, C]. Only the copies of a shared prompt have to be summed back."""

    @staticmethod
    def forward(ctx: _Context, rows: Tensor, packing: Packing) -> Tensor:
        ctx.packing = packing
        return rows.index_select(0, packing.gather)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: _Context, gradient: Tensor
    ) -> tuple[Tensor, None]:
        packing = ctx.packing
        own = gradient.index_select(0, packing.scatter)
        copies = gradient.index_select(0, packing.copies)
        return own.index_add_(0, packing.gather.index_select(0, packing.copies), copies), None


class _PickUp(torch.autograd.Function):
    """Samples end to end [E, C] -> packed rows [T, C], each from one place."""

    @staticmethod
    def forward(ctx: _Context, rows: Tensor, packing: Packing) -> Tensor:
        ctx.packing, ctx.num_rows = packing, len(rows)
        return rows.index_select(0, packing.scatter)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: _Context, gradient: Tensor
    ) -> tuple[Tensor, None]:
        whole = gradient.new_zeros(ctx.num_rows, gradient.shape[1])
        return whole.index_copy_(0, ctx.packing.scatter, gradient), None


@functools.cache
def _varlen_kernel() -> Callable[..., object]:
    """Takes fewer key heads than query heads: torch 2.11 as they come, later versions want to be told."""
    from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415  (CUDA builds only)

    has_flag = "enable_gqa" in inspect.signature(varlen_attn).parameters
    return partial(varlen_attn, enable_gqa=True) if has_flag else varlen_attn


def _gather(tensor: Tensor, index: Tensor) -> Tensor:
    """Rows of [N, H, D]; flat, because the backward pass of a 2-dimensional gather is the fast one."""
    rows = tensor.flatten(1).index_select(0, index)
    return rows.unflatten(1, tensor.shape[1:])


def _attention(
    base: _Attend,
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: object,
) -> tuple[Tensor, Tensor | None]:
    """What decoder layers call: packed rows if `packing` was given to the decoder, else transformers' own."""
    packing = kwargs.pop("packing", None)
    if not isinstance(packing, Packing):
        return base(module, query, key, value, attention_mask, **kwargs)
    scaling = cast("float", kwargs["scaling"])
    return packed_attention(query, key, value, packing, scaling), None


def install(model: PreTrainedModel) -> None:
    """Let the decoder of a Qwen-VL take packed rows; without `packing` it attends exactly as it did before."""
    decoder = cast("PreTrainedModel", model.model.language_model)
    base = cast("str", decoder.config._attn_implementation)
    if base.startswith(PREFIX):
        return
    name = PREFIX + base
    if name not in ALL_ATTENTION_FUNCTIONS:
        own = cast("_Attend", ALL_ATTENTION_FUNCTIONS.get_interface(base, eager_attention_forward))
        AttentionInterface.register(name, partial(_attention, own))
        AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[base])
    decoder.set_attn_implementation(name)
