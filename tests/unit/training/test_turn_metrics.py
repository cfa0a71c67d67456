"""What happened inside trajectories, counted by hand."""

from __future__ import annotations

import random
import string
from dataclasses import replace

import numpy as np
import pytest

from polyturn.envs.base import Observation
from polyturn.params import RolloutParams
from polyturn.render import Renderer
from polyturn.training.metrics import rollout_metrics
from polyturn.training.turn_metrics import env_times, is_repetitive, turn_metrics
from polyturn.types import Group, StopReason, TokenCounts, Trajectory, Turn
from tests.unit import tiny
from tests.unit.test_episode import PROBLEM, Scenes, run
from tests.unit.tiny import Scripted

CALL = '<tool_call>{"name": "zoom", "arguments": {"region": "northwest"}}</tool_call>'
NOISE = "".join(random.Random(0).choices(string.ascii_letters, k=9900))


def trajectory(
    *texts: str, reward: float | None = 1.0, stop: StopReason = StopReason.ENV_DONE
) -> Trajectory:
    """Prompt of 3, then per reply 2 sampled tokens and an observation of 4 (none after the last)."""
    mask = [0] * 3
    for number in range(len(texts)):
        mask += [1, 1] + [0] * (4 if number + 1 < len(texts) else 0)
    return Trajectory(
        problem=PROBLEM,
        group_index=0,
        sibling=0,
        turns=tuple(Turn((1, 2), (-1.0, -1.0), text, None) for text in texts),
        token_ids=np.zeros(len(mask), np.int64),
        loss_mask=np.array(mask, np.int8),
        logprobs=np.zeros(len(mask), np.float32),
        images=(tiny.picture(),) * len(texts),
        stop_reason=stop,
        policy_version=0,
        reward=reward,
        tokens=TokenCounts(2, 2 * len(texts), 4 * max(0, len(texts) - 1), 1),
        env_time_s=0.5 * len(texts),
    )


def test_turn_metrics_by_hand() -> None:
    made = [
        trajectory("12"),
        trajectory(CALL, "12", reward=0.5),
        trajectory(CALL, "<tool_call>{", CALL, reward=0.0, stop=StopReason.MAX_TURNS),
        trajectory(CALL, reward=None, stop=StopReason.ENV_ERROR),
        trajectory(reward=0.0, stop=StopReason.MAX_CONTEXT),
    ]
    made[1] = replace(made[1], num_rewritten=2)
    made[2] = replace(made[2], num_rewritten=0)
    expected = {
        "multi_turn/turns/mean": 7 / 5,
        "multi_turn/turns/max": 3,
        "multi_turn/tool_calls/mean": 5 / 5,
        "multi_turn/parse_errors/mean": 1 / 5,
        "multi_turn/images/mean": 7 / 5,
        "multi_turn/images/max": 3,
        "multi_turn/raw_response_length/mean": (2 + 8 + 14 + 2 + 0) / 5,
        "multi_turn/raw_response_length/median": 2,
        "multi_turn/raw_response_length/max": 14,
        "multi_turn/raw_response_length/min": 0,
        "multi_turn/wo_obs_response_length/mean": (2 + 4 + 6 + 2 + 0) / 5,
        "multi_turn/wo_obs_response_length/median": 2,
        "multi_turn/wo_obs_response_length/max": 6,
        "multi_turn/wo_obs_response_length/min": 0,
        "rollout/tokens/prompt": 2,
        "rollout/tokens/assistant": 14 / 5,
        "rollout/tokens/observation": (4 + 8) / 5,
        "rollout/tokens/image_pads": 1,
        "rollout/repetition_frac": 0,
        "rollout/compared/count": 2,
        "rollout/compared/rewritten": 2,
        "multi_turn/reward_by_turns/0": 0.0,
        "multi_turn/reward_by_turns/1": 1.0,
        "multi_turn/reward_by_turns/2": 0.5,
        "multi_turn/reward_by_turns/3": 0.0,
    }
    found = turn_metrics(made)
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert expected.items() <= rollout_metrics([Group(0, tuple(made))], seed=0).items()
    assert env_times(made) == {
        "perf/env_time/mean": pytest.approx(0.7),
        "perf/env_time/max": 1.5,
        "perf/env_time/sum": 3.5,
    }


def test_a_call_that_a_limit_cut_is_no_parse_error(renderer: Renderer) -> None:
    """The reply ends inside a tool call: truncated, not stepped, and not the policy's bad writing."""
    cut = Scripted(renderer.encode(CALL[: len(CALL) // 2]), "length")
    env = Scenes("ok", "ok")
    made, _ = run(renderer, env, tiny.saying(CALL, cut))
    assert env.heard == [CALL]
    assert made.stop_reason is StopReason.MAX_NEW_TOKENS
    metrics = turn_metrics([made])
    assert metrics["multi_turn/tool_calls/mean"] == 1.0
    assert metrics["multi_turn/parse_errors/mean"] == 0.0


def test_tokens_by_role_of_a_played_trajectory(renderer: Renderer) -> None:
    """One picture of 3 pads in the prompt, one of 4 in the observation, an end token added by the loop."""
    env = Scenes(Observation("crop", (tiny.picture(32, 32, 9),)), None)
    first = Scripted(renderer.encode("stopped by a string"))
    made, _ = run(renderer, env, tiny.saying(first, "12"), limits=RolloutParams())
    shown = made.turns[0].observation
    assert shown is not None
    sampled = len(first.token_ids) + len(renderer.encode_reply("12")[0])
    assert made.tokens == TokenCounts(
        prompt=len(renderer.prompt(PROBLEM.messages).token_ids) - 3,
        assistant=sampled,
        observation=1 + len(renderer.observation(shown).token_ids) - 4,
        image_pads=7,
    )


@pytest.mark.parametrize(
    ("text", "repeats"),
    [
        ("", False),
        ("12", False),
        (CALL * 4, False),
        ("again and " * 200, True),
        (NOISE[:3000] + "no " * 4000, True),
        ("no " * 4000 + NOISE, False),
    ],
)
def test_repetition_is_a_tenfold_compression_of_the_end(text: str, repeats: bool) -> None:
    assert is_repetitive(trajectory(text[:5], text[5:])) is repeats


def test_nothing_sampled_has_metrics_too() -> None:
    assert turn_metrics([])["multi_turn/turns/mean"] == 0.0
    assert env_times([])["perf/env_time/max"] == 0.0
