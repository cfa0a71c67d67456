"""The warm start: mixes, masks, gates and decay, and where gradients go."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polyturn import warmstart
from polyturn.envs.demonstration import Demonstration, Say
from polyturn.learner.base import NonFiniteError
from polyturn.params import PhaseParams, WarmstartParams
from polyturn.policy.model import Policy, weights_digest
from polyturn.render import Renderer
from polyturn.samples import from_demonstration
from polyturn.types import Message, Problem, TrainingSample
from polyturn.warmstart import (
    ExampleSource,
    PhaseReport,
    StepReport,
    draw_examples,
    kind_counts,
    warm_start,
)
from tests.unit import tiny

PROBLEMS = tiny.problems()
EXAMPLE_PARAMS = {"zoom": 0.5, "persist": 0.3, "guess_min": 2.0, "guess_max": 6.0}


def two_kinds(kind: str, problem: Problem, rng: random.Random) -> Demonstration:
    """`easy` always says the same; `later` shows a picture in its second turn only."""
    question = (Message("user", ("Find x.",)),)
    if kind == "easy":
        return Demonstration(question, (Say("12"),), kind)
    shown = Message("tool", (problem.images[0], "ok"))
    return Demonstration(question, (Say("look"), shown, Say(str(rng.randint(1, 9)))), kind)


def phase(**changes: object) -> PhaseParams:
    base: dict[str, object] = {
        "name": "one",
        "mix": {"easy": 1.0},
        "batch_size": 4,
        "lr": 3e-3,
        "max_steps": 6,
    }
    return PhaseParams.model_validate({**base, **changes})


def params_of(*phases: PhaseParams, **changes: object) -> WarmstartParams:
    base: dict[str, object] = {
        "examples": "tests.unit.test_warmstart:two_kinds",
        "phases": phases,
    }
    return WarmstartParams.model_validate({**base, **changes})


def run(
    policy: Policy, params: WarmstartParams, seed: int = 0
) -> tuple[Policy, list[PhaseReport], list[StepReport]]:
    own = tiny.copy_of(policy)
    steps: list[StepReport] = []
    reports = warm_start(
        own,
        Renderer(own),
        ExampleSource.load(params, PROBLEMS),
        params,
        seed=seed,
        on_step=steps.append,
    )
    return own, reports, steps


@pytest.mark.parametrize(
    ("mix", "size", "counts"),
    [
        ({"search": 0.4, "guess": 0.6}, 64, {"search": 26, "guess": 38}),
        ({"read": 1.0}, 7, {"read": 7}),
        ({"a": 2.0, "b": 2.0}, 10, {"a": 5, "b": 5}),
    ],
)
def test_shares_of_a_mix_become_numbers(
    mix: dict[str, float], size: int, counts: dict[str, int]
) -> None:
    assert kind_counts(mix, size) == counts


@given(
    st.dictionaries(st.sampled_from("abcde"), st.floats(1e-3, 10), min_size=1), st.integers(1, 70)
)
def test_a_batch_has_its_size_whatever_the_mix(mix: dict[str, float], size: int) -> None:
    counts = kind_counts(mix, size)
    assert sum(counts.values()) == size
    assert min(counts.values()) >= 0
    total = sum(mix.values())
    assert all(abs(counts[kind] - size * share / total) <= 1 for kind, share in mix.items())


@pytest.mark.parametrize(
    ("last", "count"),
    [(Say("ab"), 3), (Say("ab", ((0, 2),)), 2), (Say("ab", ()), 0)],
    ids=["whole, with its end token", "a span, without", "nothing"],
)
def test_the_answer_is_what_the_last_reply_trains(
    renderer: Renderer, last: Say, count: int
) -> None:
    prompt = (Message("user", ("q",)),)
    turns = (Say("abc"), Message("user", ("more",)), last)
    sample = from_demonstration(Demonstration(prompt, turns, "easy"), renderer)
    assert sample.num_answer_tokens == count
    assert int(sample.loss_mask.sum()) == 4 + count


def test_examples_follow_their_seed_alone(renderer: Renderer) -> None:
    params = WarmstartParams(example_params=EXAMPLE_PARAMS)
    source = ExampleSource.load(params, PROBLEMS)
    chosen = phase(mix={"search": 0.4, "guess": 0.6}, batch_size=10)

    def drawn(seed: int) -> list[tuple[str, list[int]]]:
        samples = draw_examples(chosen, source, renderer, seed)
        return [(sample.kind, sample.token_ids.tolist()) for sample in samples]

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)
    assert [kind for kind, _ in drawn(1)] == ["search"] * 4 + ["guess"] * 6


def test_loss_is_the_mean_over_trained_tokens_and_answers_the_last_reply(policy: Policy) -> None:
    chosen = phase(mix={"easy": 0.5, "later": 0.5}, batch_size=4, max_steps=1)
    _, _, (step,) = run(policy, params_of(chosen, micro_batch_tokens=1))
    _, _, (whole,) = run(policy, params_of(chosen))
    renderer = Renderer(policy)
    samples = draw_examples(
        chosen, ExampleSource(PROBLEMS, two_kinds), renderer, warmstart.derive(warmstart.derive(0, "warmstart", "one"), 0)
    )  # fmt: skip
    losses, answers = [], {"easy": [], "later": []}
    for sample in samples:
        scored = logprobs(policy, sample)
        losses += scored
        answers[sample.kind].append(-sum(scored[len(scored) - sample.num_answer_tokens :]))
    assert step.loss == pytest.approx(-np.mean(losses), rel=1e-4)
    assert whole.loss == pytest.approx(step.loss, rel=1e-5)
    assert step.grad_norm == pytest.approx(whole.grad_norm, rel=1e-4)
    for kind, nats in answers.items():
        assert step.answer_nats[kind] == pytest.approx(np.mean(nats), rel=1e-4)
        assert whole.answer_nats[kind] == pytest.approx(step.answer_nats[kind], rel=1e-4)


@torch.no_grad()
def logprobs(policy: Policy, sample: TrainingSample) -> list[float]:
    from polyturn.batching import collate  # noqa: PLC0415
    from polyturn.learner.scoring import score_batch  # noqa: PLC0415
    from polyturn.policy import vision  # noqa: PLC0415

    batch = collate([sample], [1.0], Renderer(policy))
    encoded = vision.encode(policy, vision.PatchReader(policy), batch.images)
    features = {image.sha256: f for image, f in zip(batch.images, encoded, strict=True)}
    return score_batch(policy, batch, features, 1.0).logprobs.tolist()


def test_a_picture_in_a_later_turn_trains_the_vision_tower(policy: Policy) -> None:
    before = policy.model.model.visual.state_dict()
    chosen = phase(mix={"later": 1.0}, max_steps=1)
    trained, _, _ = run(policy, params_of(chosen, weight_decay=0.0))
    after = trained.model.model.visual.state_dict()
    weights = [name for name in before if name.endswith("proj.weight")]
    assert weights
    assert all(not torch.equal(before[name], after[name]) for name in weights)


def test_a_phase_ends_when_its_gate_is_reached_and_then_decays(policy: Policy) -> None:
    chosen = phase(max_steps=100, gates={"easy": 0.5}, gate_window=3, decay_steps=4, lr=1e-2)
    _, (report,), steps = run(policy, params_of(chosen))
    nats = [step.answer_nats["easy"] for step in steps]
    means = [np.mean(nats[max(0, i - 2) : i + 1]) for i in range(len(nats))]
    gate = next(i for i in range(2, len(nats)) if means[i] < 0.5) + 1
    assert report.is_gate_reached is True
    assert report.num_steps == len(steps) == gate + 4
    rates = [step.lr for step in steps]
    assert rates[:gate] == [1e-2] * gate
    assert rates[gate:] == pytest.approx([1e-2 * (1 - 0.97 * i / 4) for i in range(4)])


@pytest.mark.parametrize("decay", [0, 2])
def test_a_gate_that_is_not_reached_is_a_warning(
    policy: Policy, decay: int, caplog: pytest.LogCaptureFixture
) -> None:
    chosen = phase(max_steps=3, gates={"easy": 1e-6}, gate_window=2, decay_steps=decay)
    with caplog.at_level(logging.WARNING):
        _, (report,), steps = run(policy, params_of(chosen))
    assert report.is_gate_reached is False
    assert len(steps) == 3 + decay
    assert "gates not reached in 3 steps" in caplog.text


def test_a_gate_reached_by_the_last_step_is_reached(
    policy: Policy, caplog: pytest.LogCaptureFixture
) -> None:
    chosen = phase(max_steps=3, gates={"easy": 1e6}, gate_window=3)
    with caplog.at_level(logging.WARNING):
        _, (report,), steps = run(policy, params_of(chosen))
    assert report.is_gate_reached is True
    assert len(steps) == 3
    assert "gates not reached" not in caplog.text


def test_a_phase_without_a_gate_takes_all_its_steps(policy: Policy) -> None:
    _, reports, steps = run(
        policy, params_of(phase(max_steps=2, decay_steps=2), phase(name="two", max_steps=1))
    )
    assert [(r.phase, r.num_steps, r.is_gate_reached) for r in reports] == [
        ("one", 4, None),
        ("two", 1, None),
    ]
    assert [(step.phase, step.step) for step in steps] == [
        ("one", 0),
        ("one", 1),
        ("one", 2),
        ("one", 3),
        ("two", 0),
    ]


def test_equal_seeds_give_equal_weights(policy: Policy) -> None:
    chosen = params_of(phase(mix={"later": 1.0}, max_steps=2))
    digests = [weights_digest(run(policy, chosen, seed)[0].model) for seed in (0, 0, 1)]
    assert digests[0] == digests[1] != digests[2]


def test_no_phases_leave_the_policy_as_it_was(policy: Policy) -> None:
    trained, reports, _ = run(policy, params_of())
    assert reports == []
    assert weights_digest(trained.model) == weights_digest(policy.model)


def test_non_finite_loss_stops_with_phase_and_step(policy: Policy) -> None:
    broken = tiny.copy_of(policy)
    with torch.no_grad():
        broken.model.lm_head.weight[0, 0] = float("nan")
    with pytest.raises(NonFiniteError, match="warm start phase one, step 0: loss nan"):
        run(broken, params_of(phase()))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gates": {"harder": 0.1}}, r"gates name \['harder'\], which mix"),
        ({"gates": {"easy": 0.0}}, "gates"),
        ({"mix": {}}, "mix"),
    ],
)
def test_a_gate_without_meaning_is_refused_by_params(
    changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        phase(**changes)


def test_examples_with_and_without_params_are_called_alike() -> None:
    with_params = WarmstartParams(example_params=EXAMPLE_PARAMS)
    without = params_of()
    for params, kind in ((with_params, "read"), (without, "easy")):
        made: Sequence[object] = [
            ExampleSource.load(params, PROBLEMS).demonstrate(kind, PROBLEMS[0], random.Random(0))
        ]
        assert isinstance(made[0], Demonstration)
