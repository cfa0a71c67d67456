"""The small model: a tokenizer that loses nothing, a template with tools, and weights that follow their seed."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyturn.corpus import corpus
from polyturn.envs.zoom import TOOLS, not_seen, tool_call
from polyturn.policy import small_model
from polyturn.policy.model import Policy, weights_digest
from polyturn.render import Renderer
from polyturn.types import Message
from tests.unit import tiny


@settings(max_examples=80, deadline=None)
@given(text=st.text(max_size=40))
def test_any_text_round_trips_up_to_nfc(policy: Policy, text: str) -> None:
    import unicodedata  # noqa: PLC0415

    renderer = Renderer(policy)
    assert renderer.decode(renderer.encode(text)) == unicodedata.normalize("NFC", text)


def test_special_tokens_are_single_ids_in_qwens_order(policy: Policy) -> None:
    tokenizer = policy.processor.tokenizer
    ids = [tokenizer.convert_tokens_to_ids(token) for token, _ in small_model.ADDED_TOKENS]
    assert ids == list(range(ids[0], ids[0] + len(ids)))
    assert all(
        tokenizer(token)["input_ids"] == [i]
        for (token, _), i in zip(small_model.ADDED_TOKENS, ids, strict=True)
    )
    assert tokenizer.pad_token == "<|endoftext|>"
    assert tokenizer.eos_token == "<|im_end|>"


def test_equal_texts_give_equal_tokenizers_and_the_demo_speaks_in_few_tokens() -> None:
    one, other = (small_model.train_tokenizer(corpus(tiny.problems()), 512) for _ in range(2))
    assert one.get_vocab() == other.get_vocab()
    assert len(one) <= 512
    for region in ("northwest", "southeast"):
        assert len(one(tool_call(region))["input_ids"]) <= 20
    assert len(one(not_seen([]))["input_ids"]) <= 16


def test_corpus_is_the_same_for_the_same_problems() -> None:
    assert list(corpus(tiny.problems())) == list(corpus(tiny.problems()))


@pytest.mark.parametrize("seed", [0, 1])
def test_weights_follow_the_seed_alone(policy: Policy, seed: int) -> None:
    import torch  # noqa: PLC0415

    torch.manual_seed(99)
    state = torch.random.get_rng_state()
    built = weights_digest(tiny.qwen3(seed=seed).model)
    assert (built == weights_digest(policy.model)) is (seed == 0)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_tools_stand_in_the_one_system_message(renderer: Renderer) -> None:
    question = Message("user", ("Find x.",))
    both = renderer.decode(
        renderer.prompt([Message("system", ("Be brief.",)), question], TOOLS).token_ids
    )
    alone = renderer.decode(renderer.prompt([question], TOOLS).token_ids)
    none = renderer.decode(renderer.prompt([question]).token_ids)
    assert both.count("<|im_start|>system") == alone.count("<|im_start|>system") == 1
    assert "system" not in none
    assert both.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n")
    line = next(line for line in alone.splitlines() if line.startswith("{"))
    assert json.loads(line) == TOOLS[0]


def test_embedding_rows_are_a_multiple_of_64(policy: Policy) -> None:
    rows = policy.model.config.text_config.vocab_size
    assert rows % 64 == 0
    assert 0 <= rows - len(policy.processor.tokenizer) < 64
