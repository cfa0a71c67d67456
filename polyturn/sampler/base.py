"""The sampler protocol: what the rollout loop asks for and what it gets back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from polyturn.types import ImageRecord

if TYPE_CHECKING:
    import torch

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True)
class SampleRequest:
    """One reply to be sampled.

    `session` names the trajectory: its later requests extend the earlier ones, so that a sampler may keep its
    keys and values and a router may keep it on one server. `engine_ids` holds one image pad per picture, and
    `images` all pictures so far, in order. `temperature` 0 means greedy; logprobs are then those at 1.
    """

    session: str
    engine_ids: tuple[int, ...]
    images: tuple[ImageRecord, ...]
    seed: int
    max_new_tokens: int
    temperature: float = 1.0


@dataclass(frozen=True)
class Reply:
    """One sampled reply, verbatim.

    `token_ids` end with one of the family's end_ids when finish_reason is "stop", and may when it is "length" (SGLang
    before pull request 33758 looks at the length first: a reply that ends with its last token is whole); `logprobs` are those of the sampled
    distribution (temperature and bans applied), one per token. `prompt_length` counts the engine's prompt with
    image pads expanded. `error` says why when finish_reason is "error".
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    prompt_length: int
    weight_version: int
    error: str | None = None


class Sampler(Protocol):
    """What samples: the embedded Hugging Face sampler or SGLang."""

    @property
    def is_lockstep(self) -> bool:
        """Whether all live trajectories must come in one call a turn; else each may ask when it is ready."""
        ...

    async def generate(self, requests: Sequence[SampleRequest]) -> list[Reply]:
        """Sample one reply per request, in the order of the requests."""
        ...

    def update_weights(self, tensors: Iterator[tuple[str, torch.Tensor]], version: int) -> None:
        """Take over new weights under their Hugging Face names; nothing computed from old ones survives."""
        ...

    def rest(self) -> None:
        """Nothing is sampled until the next `update_weights`: memory may be given back."""
        ...

    def take_metrics(self) -> Mapping[str, float]:
        """What sampling took since the last call (perf/..., since it depends on timing; collective)."""
        ...

    def close(self) -> None:
        """Free what the sampler holds."""
        ...
