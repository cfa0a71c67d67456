"""Where the stages of a flow run are worked on, and how often they are tried: flow parameters, validated before anything runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from polyturn.params import ParamsError

Pool = Annotated[str, Field(pattern=r"^[\w.-]+$")]


class StagesError(ParamsError):
    """The flow's parameter `stages` is wrong; nothing has been touched."""


class StageOptions(BaseModel):
    """One stage: None as the pool means where the flow itself runs.

    A stage of another pool is a flow run of the deployment `stage/POOL` (prefect.yaml), in its queue if one is named.
    `retries` do not apply to what the user has to mend.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    pool: Pool | None = None
    queue: Pool | None = None
    retries: Annotated[int, Field(ge=0, le=10)] = 1


DEFAULT = StageOptions()


def check(options: Mapping[str, StageOptions], order: Sequence[str]) -> None:
    """Compare with the stages that there are.

    Raises:
        StagesError: a stage is unknown, or a queue is named without its pool.
    """
    for name, chosen in options.items():
        if name not in order:
            raise StagesError(
                f"stages: {name!r} is no stage of dvc.yaml; known: {', '.join(order)}"
            )
        if chosen.queue and not chosen.pool:
            raise StagesError(f"stages.{name}: queue {chosen.queue!r} needs the pool that it is of")
