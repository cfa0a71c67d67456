"""Packed attention is attention inside each sample: against a block mask, and one sample at a time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from polyturn.policy import attention, model
from polyturn.policy.attention import FULLNESS, Packing, _Lay, _PickUp, packed_attention
from polyturn.policy.model import Policy
from polyturn.types import Span
from tests.unit import tiny

CPU = torch.device("cpu")
SCALE = 8**-0.5


def spans_of(groups: list[tuple[int, list[int]]]) -> tuple[Span, ...]:
    """Groups of a prompt and replies, laid as collate lays them."""
    spans: list[Span] = []
    end = 0
    for prompt, replies in groups:
        start, end = end, end + prompt
        for reply in replies:
            spans.append(Span(start, start + prompt, end, end + reply))
            end += reply
    return tuple(spans)


def block_mask(spans: tuple[Span, ...]) -> Tensor:
    """[T, T]: what each token may attend to: what stands before it in its sample, and itself."""
    size = max(span.stop for span in spans)
    mask = torch.zeros(size, size, dtype=torch.bool)
    for span in spans:
        places = torch.from_numpy(span.indices())
        mask[places[:, None], places] |= torch.ones(len(places), len(places)).tril().bool()
    return mask


def inputs(size: int, kv_heads: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(size)
    shapes = [(1, 4, size, 8), (1, kv_heads, size, 8), (1, kv_heads, size, 8)]
    return [torch.randn(shape, generator=generator).requires_grad_(True) for shape in shapes]


def gradients(output: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad((output * output.detach().cos()).sum(), tensors))


groups = st.lists(
    st.tuples(st.integers(0, 12), st.lists(st.integers(1, 20), min_size=1, max_size=4)),
    min_size=1,
    max_size=4,
)


@settings(max_examples=40, deadline=None)
@given(groups, st.sampled_from([1, 2, 4]))
def test_packed_attention_equals_a_block_mask(
    shape: list[tuple[int, list[int]]], kv_heads: int
) -> None:
    spans = spans_of(shape)
    tensors = inputs(spans[-1].stop, kv_heads)
    query, key, value = tensors
    found = packed_attention(query, key, value, Packing(spans, CPU), SCALE)
    repeated = (tensor.repeat_interleave(4 // kv_heads, dim=1) for tensor in (key, value))
    wanted = scaled_dot_product_attention(
        query, *repeated, attn_mask=block_mask(spans), scale=SCALE
    ).transpose(1, 2)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    for one, other in zip(gradients(found, tensors), gradients(wanted, tensors), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@given(groups)
def test_samples_end_to_end_are_what_the_varlen_kernel_gets(
    shape: list[tuple[int, list[int]]],
) -> None:
    spans = spans_of(shape)
    packing = Packing(spans, CPU)
    bounds = packing.bounds.tolist()
    assert packing.bounds.dtype == torch.int32
    assert packing.longest == max(span.length for span in spans)
    for span, start, stop in zip(spans, bounds, bounds[1:], strict=False):
        assert packing.gather[start:stop].tolist() == span.indices().tolist()
    assert packing.gather[packing.scatter].tolist() == list(range(spans[-1].stop))


@given(groups)
def test_batches_are_full(shape: list[tuple[int, list[int]]]) -> None:
    packing = Packing(spans_of(shape), CPU)
    assert sum(number for number, _ in packing.shapes) == len(packing.spans)
    lengths = sorted((span.length for span in packing.spans), reverse=True)
    for number, longest in packing.shapes:
        rows, lengths = lengths[:number], lengths[number:]
        assert rows[0] == longest
        assert rows[-1] >= FULLNESS * longest
    assert packing.padded_gather[packing.padded_scatter].tolist() == list(
        range(packing.spans[-1].stop)
    )


@torch.no_grad()
@pytest.mark.parametrize("base", ["sdpa", "eager"])
@pytest.mark.parametrize("make", [tiny.qwen3, tiny.qwen2_5])
def test_without_packing_a_decoder_attends_as_it_did(make: object, base: str) -> None:
    """The sampler's path: to the bit."""
    policy: Policy = make()  # type: ignore[operator]
    decoder = policy.model.model.language_model
    ids = torch.arange(24).view(2, 12) % 50
    mask = torch.ones(12, 12).tril().bool().expand(2, 1, 12, 12)
    if base == "eager":
        mask = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    found: list[Tensor] = []
    decoder.set_attn_implementation(base)
    for _ in range(2):
        found += [decoder(input_ids=ids).last_hidden_state]
        found += [decoder(input_ids=ids, attention_mask=mask).last_hidden_state]
        attention.install(policy.model)
    assert decoder.config._attn_implementation == f"polyturn_{base}"
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])


def test_a_saved_policy_does_not_name_the_attention(tmp_path: Path, policy: Policy) -> None:
    """Other programs could not load it."""
    model.save(policy, tmp_path / "saved")
    assert "polyturn" not in json.dumps(json.loads((tmp_path / "saved/config.json").read_text()))


def test_rows_laid_out_and_picked_up_have_the_gradients_of_plain_gathers() -> None:
    """Three siblings share a prompt of three tokens, a fourth sample stands alone."""
    packing = Packing(
        (Span(0, 3, 3, 5), Span(0, 3, 5, 6), Span(0, 3, 6, 9), Span(9, 9, 9, 11)),
        torch.device("cpu"),
    )
    assert packing.copies.tolist() == [0, 1, 2, 5, 6, 7]
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(11, 4, dtype=torch.float64, generator=generator, requires_grad=True)
    factor = torch.randn(len(packing.gather), 4, dtype=torch.float64, generator=generator)

    def own() -> torch.Tensor:
        return _PickUp.apply(_Lay.apply(rows, packing) * factor, packing)

    plain = (rows[packing.gather] * factor)[packing.scatter]
    torch.testing.assert_close(own(), plain)
    (wanted,) = torch.autograd.grad(plain.square().sum(), rows)
    (found,) = torch.autograd.grad(own().square().sum(), rows)
    torch.testing.assert_close(found, wanted)
    (wanted,) = torch.autograd.grad((rows[packing.gather] * factor).sum(), rows)
    (found,) = torch.autograd.grad((_Lay.apply(rows, packing) * factor).sum(), rows)
    torch.testing.assert_close(found, wanted)
