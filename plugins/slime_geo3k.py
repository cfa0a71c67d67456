"""An environment in the form of slime's and miles' multi-turn examples; it runs here as it would there.

    env: {build: "plugins.slime_geo3k:build_env", params: {feedback: true}}

slime's contract: `build_env(sample=, args=)`, then a synchronous `reset()`, `step(response_text) -> (observation,
done, info)`, `format_observation(observation) -> chat message` and `close()`. What `sample` and `args` hold here
stands in docs/environments.md.
"""

import json
import re

from polyturn.reward import answers_match

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


class InteractionEnv:
    """What slime's environments derive from: an observation is a dict of text and pictures."""

    def reset(self):
        raise NotImplementedError

    def step(self, response_text):
        raise NotImplementedError

    def close(self):
        pass

    def format_observation(self, observation):
        """One chat message: pictures first, then the text."""
        pictures = (observation.get("multi_modal_data") or {}).get("image") or []
        content = [{"type": "image", "image": picture} for picture in pictures]
        content.append({"type": "text", "text": observation.get("obs_str", "")})
        return {"role": observation.get("role", "user"), "content": content}


class CheckingEnv(InteractionEnv):
    """Checks the answer of a calc_score call; a reply without a call is final."""

    def __init__(self, ground_truth, max_turns, feedback):
        self.ground_truth = ground_truth
        self.max_turns = max_turns
        self.feedback = feedback
        self.turn = 0

    def reset(self):
        self.turn = 0
        return {}, {"has_ground_truth": self.ground_truth is not None}

    def step(self, response_text):
        self.turn += 1
        calls = _CALL.findall(response_text)
        if not calls:
            return {}, True, {"turn": self.turn}
        try:
            answer = str(json.loads(calls[-1])["arguments"]["answer"])
        except (ValueError, KeyError, TypeError):
            help_text = 'Call calc_score with {"arguments": {"answer": "..."}}.'
            return {"obs_str": help_text, "role": "tool"}, False, {"parse_error": True}
        is_right = answers_match(answer, self.ground_truth)
        told = ("right" if is_right else "wrong") if self.feedback else "noted"
        text = f"{answer} is {told}."
        if self.turn == self.max_turns - 1:
            text += " Now give your final answer as \\boxed{...}."
        done = self.turn >= self.max_turns
        return {"obs_str": text, "role": "tool"}, done, {"turn": self.turn, "score": is_right}


def build_env(sample=None, args=None, **_):
    if sample is None or args is None or args.max_turns is None:
        raise ValueError("sample, args and args.max_turns must be set")
    truth = sample.metadata.get("ground_truth") or sample.label
    return CheckingEnv(truth, args.max_turns, getattr(args, "feedback", True))
