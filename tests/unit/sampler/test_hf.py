"""The embedded sampler: exact logprobs, independence of the batch, and nothing computed twice."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from polyturn.batching import collate
from polyturn.learner.scoring import score_batch
from polyturn.policy import hf_weights, vision
from polyturn.policy.forward import hidden_states, token_distribution
from polyturn.policy.model import Policy, family_of
from polyturn.render import Renderer
from polyturn.sampler.base import Reply, SampleRequest
from polyturn.sampler.hf import HfSampler, SamplerCounts
from polyturn.types import ImageRecord, Message, TrainingSample
from tests.unit import tiny

CROPS = (tiny.picture(32, 32, 9), tiny.picture(32, 16, 90))
OBSERVATIONS = tuple(Message("tool", (crop, "Not seen: none")) for crop in CROPS)


def make(policy: Policy, *, is_vision_frozen: bool = False) -> HfSampler:
    return HfSampler(policy, Renderer(policy), is_vision_frozen=is_vision_frozen)


def ask(sampler: HfSampler, requests: Sequence[SampleRequest]) -> list[Reply]:
    return asyncio.run(sampler.generate(requests))


def first_request(
    renderer: Renderer,
    session: str,
    *,
    picture: ImageRecord | None = None,
    question: str = "Find x.",
    seed: int = 0,
    tokens: int = 6,
    temperature: float = 1.0,
) -> SampleRequest:
    shown = (picture, question) if picture else (question,)
    prompt = renderer.prompt([Message("user", shown)])
    return SampleRequest(session, prompt.engine_ids, prompt.images, seed, tokens, temperature)


def next_request(
    renderer: Renderer, request: SampleRequest, reply: Reply, observation: Message
) -> SampleRequest:
    """The request of the turn after `reply`, whether it ended its turn or was cut."""
    shown = renderer.observation(observation)
    return replace(
        request,
        engine_ids=request.engine_ids + reply.token_ids + shown.engine_ids,
        images=request.images + shown.images,
        seed=request.seed + 1000,
    )


def converse(
    sampler: HfSampler,
    renderer: Renderer,
    requests: Sequence[SampleRequest],
    *,
    forget: bool = False,
) -> list[list[Reply]]:
    """Three turns with a new picture after each of the first two; replies by turn."""
    live, turns = list(requests), []
    for turn in range(3):
        if forget:
            sampler.close()
        replies = ask(sampler, live)
        turns.append(replies)
        if turn < 2:
            live = [
                next_request(renderer, request, reply, OBSERVATIONS[turn])
                for request, reply in zip(live, replies, strict=True)
            ]
    return turns


def group(renderer: Renderer, temperature: float = 1.0) -> list[SampleRequest]:
    """Two problems, two tries each, and one without a picture; replies of different length."""
    first, second = tiny.picture(), tiny.picture(64, 48, 120)
    return [
        first_request(renderer, "0/0", picture=first, seed=1, temperature=temperature),
        first_request(renderer, "0/1", picture=first, seed=2, tokens=3, temperature=temperature),
        first_request(renderer, "1/0", picture=second, seed=3, tokens=9, temperature=temperature),
        first_request(renderer, "1/1", picture=second, seed=4, temperature=temperature),
        first_request(renderer, "2/0", question="Find y, please.", seed=5, temperature=temperature),
    ]


def trained_sample(
    renderer: Renderer, request: SampleRequest, turns: Sequence[Reply]
) -> TrainingSample:
    """The stream that three turns make, as an episode builds it."""
    pad = renderer.family.image_token_id
    ids: list[int] = []
    cells = iter([r * c for r, c in map(renderer.grid, request.images)])
    for token in request.engine_ids:
        ids += [pad] * next(cells) if token == pad else [token]
    mask, logprobs, images = [0] * len(ids), [0.0] * len(ids), list(request.images)
    for turn, reply in enumerate(turns):
        ids += reply.token_ids
        mask += [1] * len(reply.token_ids)
        logprobs += reply.logprobs
        if turn < len(turns) - 1:
            shown = renderer.observation(OBSERVATIONS[turn])
            ids += shown.token_ids
            mask += [0] * len(shown.token_ids)
            logprobs += [0.0] * len(shown.token_ids)
            images += shown.images
    return TrainingSample(
        np.array(ids), np.array(mask, np.int8), np.array(logprobs, np.float32), tuple(images)
    )


@pytest.mark.parametrize("name", ["policy", "policy_2_5"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_equal_the_learners_over_three_turns_with_new_pictures(
    name: str, temperature: float, request: pytest.FixtureRequest
) -> None:
    policy: Policy = request.getfixturevalue(name)
    renderer = Renderer(policy)
    requests = group(renderer, temperature)
    turns = converse(make(policy), renderer, requests)
    samples = [
        trained_sample(renderer, first, [replies[row] for replies in turns])
        for row, first in enumerate(requests)
    ]
    batch = collate(samples, [1.0] * len(samples), renderer)
    encoded = vision.encode(policy, vision.PatchReader(policy), batch.images)
    features = {image.sha256: f for image, f in zip(batch.images, encoded, strict=True)}
    with torch.no_grad():
        scored = score_batch(policy, batch, features, temperature).logprobs
    sampled = np.concatenate([sample.logprobs[sample.loss_mask == 1] for sample in samples])
    assert len(sampled) > 60
    assert np.abs(scored.numpy() - sampled).max() < 1e-5


@pytest.mark.parametrize("name", ["policy", "policy_2_5"])
def test_company_and_order_change_neither_tokens_nor_logprobs(
    name: str, request: pytest.FixtureRequest
) -> None:
    policy: Policy = request.getfixturevalue(name)
    renderer = Renderer(policy)
    requests = group(renderer)
    together = converse(make(policy), renderer, requests)
    backwards = converse(make(policy), renderer, requests[::-1])
    for row, first in enumerate(requests):
        alone = converse(make(policy), renderer, [first])
        for turn in range(3):
            reply = together[turn][row]
            for other in (alone[turn][0], backwards[turn][len(requests) - 1 - row]):
                assert other.token_ids == reply.token_ids
                assert np.abs(np.subtract(other.logprobs, reply.logprobs)).max() < 1e-5


def test_continuing_from_the_cache_equals_starting_anew(policy: Policy, renderer: Renderer) -> None:
    kept = converse(make(policy), renderer, group(renderer))
    dropped = converse(make(policy), renderer, group(renderer), forget=True)
    for one, other in zip(kept, dropped, strict=True):
        for a, b in zip(one, other, strict=True):
            assert (a.token_ids, a.finish_reason, a.prompt_length) == (
                b.token_ids,
                b.finish_reason,
                b.prompt_length,
            )
            assert np.abs(np.subtract(a.logprobs, b.logprobs)).max() < 1e-5


def test_rows_that_have_ended_are_left_out_of_later_turns(
    policy: Policy, renderer: Renderer
) -> None:
    requests = group(renderer)
    sampler = make(policy)
    replies = ask(sampler, requests)
    rows = [3, 0]
    later = [next_request(renderer, requests[i], replies[i], OBSERVATIONS[0]) for i in rows]
    prefilled = sampler.counts.prefill_tokens
    continued = ask(sampler, later)
    shown = len(renderer.observation(OBSERVATIONS[0]).token_ids)
    assert sampler.counts.prefill_tokens - prefilled == 2 * shown
    for one, other in zip(continued, ask(make(policy), later), strict=True):
        assert one.token_ids == other.token_ids


def test_shared_prompts_pictures_and_cached_tokens_are_computed_once(
    policy: Policy, renderer: Renderer
) -> None:
    requests = group(renderer)
    sampler = make(policy)
    replies = ask(sampler, requests)
    lengths = [reply.prompt_length for reply in replies]
    decoded = sum(len(reply.token_ids) - 1 for reply in replies)
    assert sampler.counts == SamplerCounts(lengths[0] + lengths[2] + lengths[4], decoded, 2)
    later = [
        next_request(renderer, request, reply, OBSERVATIONS[0])
        for request, reply in zip(requests, replies, strict=True)
    ]
    sampler.counts = SamplerCounts()
    replies = ask(sampler, later)
    shown = len(renderer.observation(OBSERVATIONS[0]).token_ids)
    assert sampler.counts.prefill_tokens == 5 * shown
    assert sampler.counts.pictures == 1
    # The last token of a reply goes along with the next observation: of the first turn's here, not yet of this one's.
    assert sampler.counts.decode_tokens == 5 + sum(len(reply.token_ids) - 1 for reply in replies)


def test_forward_passes_see_no_more_than_the_counts_say(policy: Policy, renderer: Renderer) -> None:
    """Real tokens at the decoder's door and calls of the vision tower, over three turns of five rows."""
    own = tiny.copy_of(policy)
    fed: list[int] = []
    seen: list[int] = []
    own.model.model.language_model.register_forward_pre_hook(
        lambda _, __, kwargs: fed.append(int(np.prod(kwargs["inputs_embeds"].shape[:2]))),
        with_kwargs=True,
    )
    own.model.model.visual.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(len(kwargs.get("grid_thw", args[-1]))), with_kwargs=True
    )
    sampler = make(own)
    turns = converse(sampler, renderer, group(renderer))
    assert (
        sum(seen) == sampler.counts.pictures == 4
    )  # two of prompts, one crop after each of two turns
    fillers = sum(fed) - sampler.counts.prefill_tokens - sampler.counts.decode_tokens
    lengths = [turns[0][row].prompt_length for row in (0, 2, 4)]
    assert fillers == 3 * max(lengths) - sum(
        lengths
    )  # prompts of different length; rows that ended cost nothing


def test_nothing_is_recorded_for_a_backward_pass(policy: Policy, renderer: Renderer) -> None:
    own = tiny.copy_of(policy)
    recorded: list[bool] = []
    for part in (own.model.model.visual, own.model.model.language_model, own.model.lm_head):
        part.register_forward_hook(lambda *_: recorded.append(torch.is_grad_enabled()))
    ask(make(own), [first_request(renderer, "0/0", picture=tiny.picture())])
    assert len(recorded) > 3
    assert not any(recorded)


def test_replies_say_what_they_are(policy: Policy, renderer: Renderer) -> None:
    requests = group(renderer)
    end = renderer.family.end_of_turn_id
    for request, reply in zip(requests, ask(make(policy), requests), strict=True):
        sample = trained_sample(renderer, request, [])
        assert reply.prompt_length == len(sample.token_ids)
        assert 1 <= len(reply.token_ids) <= request.max_new_tokens
        assert len(reply.logprobs) == len(reply.token_ids)
        assert end not in reply.token_ids[:-1]
        assert (reply.finish_reason == "stop") == (reply.token_ids[-1] == end)
        if reply.finish_reason == "length":
            assert len(reply.token_ids) == request.max_new_tokens
    assert ask(make(policy), []) == []


def steered(policy: Policy, token: int, weight: float = 50.0) -> Policy:
    """A copy whose untied head prefers one token."""
    own = tiny.copy_of(policy)
    head = own.model.lm_head
    biased = torch.nn.Linear(head.in_features, head.out_features)
    with torch.no_grad():
        biased.weight.copy_(head.weight)
        biased.bias.zero_()
        biased.bias[token] = weight
    own.model.lm_head = biased
    return own


def test_banned_image_tokens_are_never_sampled(policy: Policy, renderer: Renderer) -> None:
    """Even where the policy wants nothing else; their probability is spread over the others."""
    for token in policy.family.banned_ids:
        for temperature in (1.0, 0.0):
            request = first_request(renderer, "0/0", tokens=20, temperature=temperature)
            (reply,) = ask(make(steered(policy, token, 1000.0)), [request])
            assert not set(reply.token_ids) & set(policy.family.banned_ids)
            assert np.isfinite(reply.logprobs).all()
            assert min(reply.logprobs) > -30


def test_end_of_turn_stops_and_is_part_of_the_reply(policy: Policy, renderer: Renderer) -> None:
    end = policy.family.end_of_turn_id
    (reply,) = ask(make(steered(policy, end)), [first_request(renderer, "0/0")])
    assert (reply.token_ids, reply.finish_reason) == ((end,), "stop")


def test_a_reply_ends_with_every_token_that_the_model_ends_with(policy: Policy) -> None:
    """huggingface/trl#7039, NVIDIA-NeMo/Megatron-Bridge#5246: Qwen's generation_config names <|endoftext|> too."""
    padding, end = policy.family.padding_id, policy.family.end_of_turn_id
    assert policy.family.end_ids == (end,)
    both = steered(policy, padding)
    for declared in ([end, padding], padding):
        assert both.model.generation_config is not None
        both.model.generation_config.eos_token_id = declared
        family = family_of(both.model, both.processor)
        assert family.end_ids == (end, padding)
        ending = replace(both, family=family)
        renderer = Renderer(ending)
        (reply,) = ask(make(ending), [first_request(renderer, "0/0")])
        assert (reply.token_ids, reply.finish_reason) == ((padding,), "stop")
        assert renderer.decode((*renderer.encode("x = 5"), padding)) == "x = 5"


def test_every_request_has_its_own_token_limit(policy: Policy, renderer: Renderer) -> None:
    talkative = steered(policy, 7)
    requests = [first_request(renderer, f"0/{n}", tokens=n) for n in (1, 5, 3)]
    replies = ask(make(talkative), requests)
    assert [reply.token_ids for reply in replies] == [(7,), (7,) * 5, (7,) * 3]
    assert {reply.finish_reason for reply in replies} == {"length"}


def test_temperature_zero_is_greedy_with_logprobs_at_one(
    policy: Policy, renderer: Renderer
) -> None:
    requests = [
        first_request(renderer, f"0/{seed}", seed=seed, temperature=0.0, picture=tiny.picture())
        for seed in range(3)
    ]
    replies = ask(make(policy), requests)
    assert len({reply.token_ids for reply in replies}) == 1
    sample = trained_sample(renderer, requests[0], [replies[0]])
    batch = collate([sample], [1.0], renderer)
    (features,) = vision.encode(policy, vision.PatchReader(policy), batch.images)
    scored = score_batch(policy, batch, {batch.images[0].sha256: features}, 1.0).logprobs
    assert np.abs(scored.detach().numpy() - replies[0].logprobs).max() < 1e-5


def test_greedy_and_sampled_requests_may_share_a_batch(policy: Policy, renderer: Renderer) -> None:
    greedy = first_request(renderer, "0/0", temperature=0.0)
    warm = first_request(renderer, "0/1", temperature=1.0, seed=9)
    both = ask(make(policy), [greedy, warm])
    assert both[0].token_ids == ask(make(policy), [greedy])[0].token_ids
    assert both[1].token_ids == ask(make(policy), [warm])[0].token_ids


def test_tokens_follow_the_distribution(policy: Policy, renderer: Renderer) -> None:
    """2000 first tokens against the exact probabilities (total variation within sampling noise)."""
    sampler = make(policy)
    prompt = first_request(renderer, "s", tokens=1, picture=tiny.picture(), temperature=0.7)
    requests = [replace(prompt, session=f"0/{seed}", seed=seed) for seed in range(2000)]
    counts = np.bincount([reply.token_ids[0] for reply in ask(sampler, requests)], minlength=448)
    sample = trained_sample(renderer, prompt, [])
    batch = collate([sample], [1.0], renderer)
    (features,) = vision.encode(policy, vision.PatchReader(policy), batch.images)
    with torch.no_grad():
        hidden = hidden_states(
            policy, batch.token_ids[None], batch.position_ids[:, None], [features]
        )
        exact = token_distribution(policy, hidden[0, -1:], 0.7)[0].exp().numpy()
    rng = np.random.default_rng(0)
    noise = [
        np.abs(rng.multinomial(2000, exact / exact.sum()) / 2000 - exact).sum() for _ in range(50)
    ]
    assert np.abs(counts / 2000 - exact).sum() < 1.2 * max(noise)


def test_same_text_with_another_picture_is_another_prompt(
    policy: Policy, renderer: Renderer
) -> None:
    """Sessions are named alike in every rollout; a one-token reply leaves a cache as long as the prompt."""
    sampler = make(policy)
    first = first_request(renderer, "0/0", picture=tiny.picture(shade=0), tokens=1)
    second = replace(first, images=(tiny.picture(shade=200),), max_new_tokens=4)
    ask(sampler, [first])
    (reply,) = ask(sampler, [second])
    (fresh,) = ask(make(policy), [second])
    assert reply.token_ids == fresh.token_ids
    assert np.abs(np.subtract(reply.logprobs, fresh.logprobs)).max() < 1e-5


def test_continued_text_with_another_picture_is_another_prompt(
    policy: Policy, renderer: Renderer
) -> None:
    sampler = make(policy)
    first = first_request(renderer, "0/0", picture=tiny.picture(shade=0))
    (said,) = ask(sampler, [first])
    later = next_request(renderer, first, said, OBSERVATIONS[0])
    later = replace(later, images=(tiny.picture(shade=200), *later.images[1:]))
    (reply,) = ask(sampler, [later])
    (fresh,) = ask(make(policy), [later])
    assert reply.token_ids == fresh.token_ids
    assert np.abs(np.subtract(reply.logprobs, fresh.logprobs)).max() < 1e-5


def test_same_request_twice_gives_the_same_reply(policy: Policy, renderer: Renderer) -> None:
    sampler = make(policy)
    for tokens in (1, 4):
        request = first_request(renderer, "0/0", picture=tiny.picture(), tokens=tokens)
        assert ask(sampler, [request]) == ask(sampler, [request])


@pytest.mark.parametrize("is_vision_frozen", [False, True])
def test_new_weights_leave_nothing_of_the_old_ones(
    policy: Policy, renderer: Renderer, is_vision_frozen: bool
) -> None:
    """CKPT-09: the old version's cache is dropped, features too unless their tower is frozen (lmdeploy #4917)."""
    sampler = make(tiny.copy_of(policy), is_vision_frozen=is_vision_frozen)
    request = first_request(renderer, "0/0", picture=tiny.picture())
    (before,) = ask(sampler, [request])
    later = next_request(renderer, request, before, OBSERVATIONS[0])
    other = tiny.qwen3(seed=1)
    tensors = {
        name: tensor
        for name, tensor in other.model.state_dict().items()
        if not (is_vision_frozen and name.startswith("model.visual"))
    }
    sampler.update_weights(iter(tensors.items()), 7)
    sampler.counts = SamplerCounts()
    (after,) = ask(sampler, [later])
    updated = tiny.copy_of(policy)
    updated.model.load_state_dict({**policy.model.state_dict(), **tensors})
    (fresh,) = ask(make(updated), [later])
    assert before.weight_version == 0
    assert after.weight_version == 7
    assert after.token_ids == fresh.token_ids
    assert np.abs(np.subtract(after.logprobs, fresh.logprobs)).max() < 1e-5
    assert sampler.counts.prefill_tokens == after.prompt_length
    assert sampler.counts.pictures == (1 if is_vision_frozen else 2)


def test_tied_head_follows_its_embedding(policy: Policy, renderer: Renderer) -> None:
    """CKPT-01: weights arrive under both names or one of them; every tensor is the one sent (prime-rl #2823)."""
    state = {name: tensor.clone() * 1.5 for name, tensor in policy.model.state_dict().items()}
    embedding = "model.language_model.embed_tokens.weight"
    for left_out in ((), ("lm_head.weight",), (embedding,)):
        sampler = make(tiny.copy_of(policy))
        sampler.update_weights(iter([(n, t) for n, t in state.items() if n not in left_out]), 1)
        assert sampler._policy.model.lm_head.weight is (
            sampler._policy.model.model.language_model.embed_tokens.weight
        )
        for name, tensor in sampler._policy.model.state_dict().items():
            assert hf_weights.digest(tensor) == hf_weights.digest(state[name]), name


def test_an_untied_head_is_neither_overwritten_nor_forgotten() -> None:
    """CKPT-01, CKPT-03: with tie_word_embeddings: false both tensors are their own (sglang #18024)."""
    untied = tiny.qwen3(tiny.SMALL.model_copy(update={"tie_embeddings": False}))
    state = {name: tensor.clone() * 1.5 for name, tensor in untied.model.state_dict().items()}
    sampler = make(tiny.copy_of(untied))
    sampler.update_weights(iter(state.items()), 1)
    for name, tensor in sampler._policy.model.state_dict().items():
        assert torch.equal(tensor, state[name]), name
    del state["lm_head.weight"]
    with pytest.raises(ValueError, match=r"1 weights of the sampler were not updated: lm_head"):
        sampler.update_weights(iter(state.items()), 2)


def test_weights_of_another_shape_are_refused(policy: Policy) -> None:
    """Even one that could be broadcast."""
    norm = ("model.language_model.norm.weight", torch.ones(1))
    with pytest.raises(ValueError, match=r"norm.weight has shape \(64,\), the new one \(1,\)"):
        make(tiny.copy_of(policy)).update_weights(iter([norm]), 1)


def test_unknown_weights_are_refused(policy: Policy) -> None:
    with pytest.raises(ValueError, match=r"no parameter 'lm_tail.weight'"):
        make(tiny.copy_of(policy)).update_weights(iter([("lm_tail.weight", torch.zeros(1))]), 1)
