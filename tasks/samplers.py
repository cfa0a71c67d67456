"""Which sampler a stage gets: embedded modules or SGLang servers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from polyturn.params import Params
from polyturn.policy import model
from polyturn.policy.model import Policy
from polyturn.render import Renderer
from polyturn.sampler.base import Sampler
from polyturn.sampler.hf import HfSampler
from polyturn.world import ONE, World

if TYPE_CHECKING:
    from polyturn.sampler.sglang.weights import Named


@dataclass(frozen=True)
class SamplerPlace:
    """What a sampler needs to know of its stage.

    Attributes:
        model: directory that the policy was loaded from; servers start from it.
        scratch: directory for servers' logs and, with weight_update: disk, weights.
        is_vision_frozen: the vision tower's weights stay as they are.
    """

    model: Path
    scratch: Path
    is_vision_frozen: bool


def open_sampler(
    policy: Policy, params: Params, place: SamplerPlace, world: World = ONE
) -> Sampler:
    """The sampler that params ask for; the caller closes it.

    Raises:
        ServerError: an SGLang server does not come up.
    """
    if params.sampler.backend == "hf":
        return HfSampler(
            policy,
            Renderer(policy),
            is_vision_frozen=place.is_vision_frozen,
            vision_cache_mb=params.learner.vision_cache_mb,
        )

    # Its client takes a while to load, and the hf sampler none of it.
    from polyturn.sampler.sglang.build import Site, sglang_sampler  # noqa: PLC0415

    def write(directory: Path, tensors: Named) -> None:
        model.save(policy, directory, weights=tensors)

    return sglang_sampler(policy, params, Site(place.model, place.scratch, write), world)
