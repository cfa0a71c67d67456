"""The environment of single-turn recipes: the first reply is the answer."""

from __future__ import annotations

from polyturn.types import Json


class SingleTurnEnv:
    """Ends with the first reply."""

    def step(self, response_text: str) -> tuple[str, bool, dict[str, Json]]:
        """End the trajectory; the reward terms read the reply."""
        del response_text
        return "", True, {}


def build_env() -> SingleTurnEnv:
    """Make the environment; it needs nothing of the problem."""
    return SingleTurnEnv()
