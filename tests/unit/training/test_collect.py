"""Dynamic sampling: what is refilled, what is kept, and that neither timing nor length decides."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import cast

import pytest

from polyturn.advantage import advantages_of
from polyturn.learner.base import Learner
from polyturn.params import LossParams, Params, ParamsError
from polyturn.progress import Progress
from polyturn.render import Renderer
from polyturn.sampler.base import SampleRequest
from polyturn.training.candidates import Candidates
from polyturn.training.checkpoint_writer import CheckpointWriter
from polyturn.training.collect import Collected, collect
from polyturn.training.parts import Parts
from polyturn.training.recorder import Recorder
from polyturn.training.schedule import draw_problems
from polyturn.types import Group, Problem, Status, Trajectory
from polyturn.world import ONE, World
from tests.unit import ranks, tiny
from tests.unit.tiny import Scripted, ScriptedSampler

PROBLEMS = tiny.problems(12)
NONZERO_STD = "polyturn.group_filters:nonzero_std"
MIXED_CORRECTNESS = "polyturn.group_filters:mixed_correctness"
NO_ABORTED = "polyturn.group_filters:no_aborted"
Script = Callable[[SampleRequest, int], str | Scripted]


def params(**rules: object) -> Params:
    """Two prompts a step, two siblings, by default every third problem has siblings that differ."""
    return tiny.params(
        env={"build": "tests.unit.toy_envs:build_talker", "max_failure_fraction": 0.125},
        rollout={"group_size": 2, "max_turns": 4, "max_new_tokens": 64},
        reward={"terms": [{"term": "tests.unit.training.test_collect:differs_for_every_third"}]},
        train={"dynamic_sampling": rules},
    )


def differs_for_every_third(trajectory: Trajectory, problem: Problem) -> float:
    """1 for sibling 1 of problems 0, 3, 6, ...; else 0."""
    return float(number(problem) % 3 == 0 and trajectory.sibling == 1)


def correctness(trajectory: Trajectory, problem: Problem) -> float:
    """The same: sibling 1 of every third problem solves it."""
    return differs_for_every_third(trajectory, problem)


def too_long(trajectory: Trajectory, problem: Problem) -> float:
    """Sibling 0 is punished, whatever it answers."""
    return -float(trajectory.sibling == 0)


def number(problem: Problem) -> int:
    return int(problem.id.rpartition("-")[2])


def numbers(groups: Sequence[Group]) -> list[int]:
    return [number(group.trajectories[0].problem) for group in groups]


def refuse_all(group: Group) -> bool:
    """A filter that takes no group."""
    return False


def divide(group: Group) -> bool:
    """A filter that fails."""
    return bool(1 / 0)


def say_maybe(group: Group) -> str:
    """A filter that returns no bool."""
    return "maybe"


def run(
    renderer: Renderer,
    chosen: Params,
    *,
    step: int = 0,
    script: Script = lambda *_: "box",
    sampler: ScriptedSampler | None = None,
    world: World = ONE,
) -> Collected:
    """Collect a step's groups with a sampler that says "box", which ends an episode."""
    unused = Path("unused")
    sampler = sampler or ScriptedSampler(renderer, script)
    sampler.version = step
    parts = Parts(
        sampler=sampler,
        learner=cast("Learner", None),
        renderer=renderer,
        train=PROBLEMS,
        validation=(),
        recorder=Recorder(unused, tiny.Metrics(), Progress(1, "collect")),
        checkpoints=CheckpointWriter(unused, keep=1),
        candidates=Candidates(cast("object", None), unused),  # type: ignore[arg-type]
        world=world,
    )
    return asyncio.run(collect(parts, chosen, step))


def count(collected: Collected, name: str) -> float:
    return collected.metrics[f"rollout/dynamic_filter/{name}"]


def test_by_default_a_step_samples_what_it_trains_on(renderer: Renderer) -> None:
    collected = run(renderer, params(), step=2)
    assert collected.kept == collected.sampled
    assert numbers(collected.kept) == [
        number(p) for p in draw_problems(PROBLEMS, 2, seed=0, step=2)
    ]
    assert collected.metrics == {}


def test_groups_without_variance_are_replaced(renderer: Renderer) -> None:
    """Four of twelve problems have siblings that differ; two of them are wanted."""
    collected = run(renderer, params(filters=[NONZERO_STD], max_rounds=6))
    assert len(collected.kept) == 2
    assert all(n % 3 == 0 for n in numbers(collected.kept))
    acceptable = [group for group in collected.sampled if numbers([group])[0] % 3 == 0]
    assert collected.kept == acceptable[:2]
    tried = numbers(collected.sampled)
    assert len(tried) == len(set(tried))
    assert [group.index for group in collected.sampled] == list(range(len(tried)))
    assert [t.group_index for g in collected.kept for t in g.trajectories] == [
        group.index for group in collected.kept for _ in range(2)
    ]
    assert count(collected, "rounds") == len(tried) / 2
    assert count(collected, "groups_sampled") == len(tried)
    assert count(collected, "groups_kept") == 2
    assert count(collected, "drop_nonzero_std") == len(tried) - len(acceptable)
    assert count(collected, "drop_surplus") == len(acceptable) - 2
    assert count(collected, "is_exhausted") == 0
    assert len(tried) > 2, "nothing was refilled; choose another seed"


def test_wrong_answers_of_different_lengths_are_no_mixed_group(renderer: Renderer) -> None:
    """NeMo-RL #2431: short wrong answers were taught, since the punishment of long ones made the rewards differ."""
    terms = [
        {"term": f"tests.unit.training.test_collect:{name}"} for name in ("correctness", "too_long")
    ]
    for name, is_mixed in ((NONZERO_STD, False), (MIXED_CORRECTNESS, True)):
        rules = params(filters=[name], max_rounds=6).model_dump()
        collected = run(renderer, Params.model_validate(rules | {"reward": {"terms": terms}}))
        assert all(n % 3 == 0 for n in numbers(collected.kept)) == is_mixed
        assert (count(collected, "rounds") > 1) == is_mixed


def test_a_step_is_collected_again_to_the_same_groups(renderer: Renderer) -> None:
    chosen = params(filters=[NONZERO_STD], max_rounds=6)
    first, again, other = (run(renderer, chosen, step=step) for step in (1, 1, 2))
    assert numbers(first.sampled) == numbers(again.sampled)
    assert first.metrics == again.metrics
    assert numbers(first.sampled) != numbers(other.sampled)
    epochs = [number(p) for p in draw_problems(PROBLEMS, 2, seed=0, step=2)]
    assert numbers(other.sampled)[:2] == epochs, "refills must not move the order of the epochs"


def test_the_first_acceptable_groups_by_index_are_kept_however_long_they_take(
    renderer: Renderer,
) -> None:
    """Six prompts at once, two kept: the same two whether early or late groups need more turns and tokens."""

    def slow(is_slow: Callable[[int], bool]) -> Script:
        def script(request: SampleRequest, turn: int) -> str:
            waits = is_slow(int(request.session.partition("/")[0])) and turn < 2
            return "please go on with this figure" if waits else "box"

        return script

    chosen = params(filters=[NONZERO_STD], prompts_per_round=6, max_rounds=2)
    early = run(renderer, chosen, script=slow(lambda index: index < 3))
    late = run(renderer, chosen, script=slow(lambda index: index >= 3))
    lengths = [[g.trajectories[0].num_sampled for g in c.sampled] for c in (early, late)]
    assert lengths[0] != lengths[1]
    assert numbers(early.kept) == numbers(late.kept)
    assert [group.index for group in early.kept] == [group.index for group in late.kept]


def test_the_budget_of_failures_is_of_the_step_and_not_of_its_last_refill(
    renderer: Renderer,
) -> None:
    """12 problems, 5 a round: the third round has two left, of which one trajectory fails."""
    chosen = params(filters=[NONZERO_STD], prompts_per_round=5, max_rounds=9)
    rules = {"prompts_per_step": 5, "group_size": 2, "max_turns": 4, "max_new_tokens": 64}
    chosen = Params.model_validate(chosen.model_dump() | {"rollout": rules})

    def script(request: SampleRequest, turn: int) -> str:
        return "bad" if request.session == "11/0" else "box"

    collected = run(renderer, chosen, script=script)
    assert count(collected, "rounds") == 3
    failed = [t for g in collected.sampled for t in g.trajectories if t.status is Status.FAILED]
    assert len(failed) == 1, "1 of 24 is in the budget, 1 of 4 would not be"


def test_oversampled_groups_beyond_those_wanted_are_counted(renderer: Renderer) -> None:
    collected = run(renderer, params(prompts_per_round=5))
    assert [group.index for group in collected.sampled] == [0, 1, 2, 3, 4]
    assert [group.index for group in collected.kept] == [0, 1]
    assert count(collected, "drop_surplus") == 3
    assert count(collected, "rounds") == 1


@pytest.mark.parametrize(
    ("rounds", "tried"),
    [(2, 4), (9, 12)],
    ids=["rounds are spent", "every problem was tried"],
)
def test_a_spent_budget_trains_on_what_there_is(
    renderer: Renderer, caplog: pytest.LogCaptureFixture, rounds: int, tried: int
) -> None:
    rules = params(filters=["tests.unit.training.test_collect:refuse_all"], max_rounds=rounds)
    with caplog.at_level(logging.WARNING):
        collected = run(renderer, rules)
    assert collected.kept == []
    assert count(collected, "groups_sampled") == tried
    assert count(collected, "drop_refuse_all") == tried
    assert count(collected, "is_exhausted") == 1
    assert "step 0 trains on 0 groups instead of 2" in caplog.text
    assert "train.dynamic_sampling.max_rounds" in caplog.text
    one_short = run(renderer, params(filters=[NONZERO_STD], max_rounds=1), step=1)
    assert len(one_short.kept) < 2
    assert count(one_short, "is_exhausted") == 1


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("tests.unit.training.test_collect:absent", r"filters\[1\]: .* has no callable 'absent'"),
        ("no.such.module:x", r"filters\[1\]: module 'no' of 'no.such.module:x' cannot be imported"),
        (
            "tests.unit.training.test_collect:divide",
            r"filters\[1\]: filter divide failed .* ZeroDivision",
        ),
        (
            "tests.unit.training.test_collect:say_maybe",
            r"filters\[1\]: .* True or False, got 'maybe'",
        ),
    ],
)
def test_a_bad_filter_is_named_with_its_key(renderer: Renderer, path: str, message: str) -> None:
    with pytest.raises(ValueError, match=r"train\.dynamic_sampling\." + message):
        run(renderer, params(filters=[NO_ABORTED, path]))


@pytest.mark.parametrize("rules", [{"prompts_per_round": 1}, {"prompts_per_round": 3}])
def test_a_budget_that_cannot_give_a_step_is_refused(rules: Mapping[str, object]) -> None:
    wanted = {
        "rollout": {"prompts_per_step": 8},
        "train": {"dynamic_sampling": {**rules, "max_rounds": 2}},
    }
    with pytest.raises(
        ParamsError, match=r"max_rounds 2 of prompts_per_round \d cannot give the 8 groups"
    ):
        tiny.params(**wanted)


def on_rank(world: World) -> tuple[list[list[int]], list[float], int]:
    """What one rank of several collects, and how many requests its own sampler had.

    One of a rank's two trajectories fails, which is a quarter of the step's and within its budget.
    """
    env = params().env.model_copy(update={"max_failure_fraction": 0.25})
    run(
        Renderer(tiny.qwen3()),
        params().model_copy(update={"env": env}),
        script=lambda r, _: Scripted((1,), "error") if r.session == "0/0" else "box",
        world=world,
    )
    chosen = params(filters=[NONZERO_STD], max_rounds=6)
    renderer = Renderer(tiny.qwen3())
    sampler = ScriptedSampler(renderer, lambda *_: "box")
    collected = run(renderer, chosen, step=1, sampler=sampler, world=world)
    rewards = [t.reward or 0.0 for g in collected.sampled for t in g.trajectories]
    found = [numbers(collected.sampled), numbers(collected.kept)]
    return found, [*rewards, *collected.metrics.values()], sum(map(len, sampler.requests))


def test_two_ranks_sample_one_half_each_and_keep_the_groups_of_one(
    renderer: Renderer, tmp_path: Path
) -> None:
    alone = run(renderer, params(filters=[NONZERO_STD], max_rounds=6), step=1)
    found, values, _ = on_rank(ONE)
    assert found == [numbers(alone.sampled), numbers(alone.kept)]
    for rank in ranks.run("tests.unit.training.test_collect:on_rank", tmp_path):
        assert rank.outcome == (found, values, len(alone.sampled)), rank.output


def aborts(*sessions: str) -> Script:
    """These trajectories are aborted in their first reply."""
    return lambda request, _: Scripted((1, 2), "abort") if request.session in sessions else "box"


def test_an_aborted_sibling_leaves_the_baseline_by_default(renderer: Renderer) -> None:
    """TOK-16 (slime #70): a status, no reward, no assertion; its siblings are compared without it."""
    four = params().model_copy(
        update={"rollout": params().rollout.model_copy(update={"group_size": 4})}
    )
    collected = run(renderer, four, script=aborts("0/2"))
    trajectories = collected.kept[0].trajectories
    assert [t.status is Status.ABORTED for t in trajectories] == [False, False, True, False]
    assert trajectories[2].reward is None
    (row, _) = advantages_of(collected.kept, LossParams(normalize_std=False))
    assert row[2] is None
    assert sum(value for value in row if value is not None) == pytest.approx(0)


@pytest.mark.parametrize("sibling", [0, 1, 3])
def test_a_group_with_an_aborted_sibling_is_dropped_whole_and_replaced(
    renderer: Renderer, sibling: int
) -> None:
    """TOK-16 with the filter no_aborted: another group takes the place of the one with a hole."""
    chosen = params(filters=[NO_ABORTED], max_rounds=2)
    four = chosen.model_copy(
        update={"rollout": chosen.rollout.model_copy(update={"group_size": 4})}
    )
    collected = run(renderer, four, script=aborts(f"0/{sibling}"))
    assert [group.index for group in collected.kept] == [1, 2]
    assert count(collected, "drop_no_aborted") == 1
    assert count(collected, "drop_surplus") == 1
    assert all(t.reward is not None for group in collected.kept for t in group.trajectories)
