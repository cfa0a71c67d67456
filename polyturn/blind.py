"""Does the policy look? What it says must change with the picture, and every picture must have its features.

A prompt with a literal <image>, pictures that an engine drops, or a tower that was not loaded leave a model that
trains without ever seeing anything (THUDM/slime #1803: accuracy 7% instead of 30%).
"""

from __future__ import annotations

import asyncio
import io
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from PIL import Image

from polyturn.envs.base import image_record, load_object, prompt_tools
from polyturn.params import RolloutParams
from polyturn.render import Renderer
from polyturn.rollout import Draw, RolloutSettings, rollout
from polyturn.sampler.base import Reply, Sampler, SampleRequest
from polyturn.training.metrics import trajectories_of
from polyturn.types import ImageRecord, Problem, Trajectory

logger = logging.getLogger(__name__)

PROBE_TOKENS = 8  # greedy tokens whose logprobs are compared


class BlindModelError(ValueError):
    """Pictures do not reach the policy; the message has the numbers."""


@dataclass(frozen=True)
class BlindReport:
    """What the probe found: logprob changes per problem, in nats, and image pads and features at every turn."""

    problems: tuple[str, ...]
    changes: tuple[float, ...]
    pads: tuple[int, ...] = ()
    features: tuple[int, ...] = ()

    @property
    def mean_change(self) -> float:
        """Mean over problems."""
        return float(np.mean(self.changes))


async def check(
    problems: Sequence[Problem],
    sampler: Sampler,
    renderer: Renderer,
    settings: RolloutSettings,
    *,
    seed: int,
) -> BlindReport | None:
    """Probe the first rollout.blind_problems problems that have a picture; None if there are none to probe.

    The sampler is asked greedily for a few tokens, once with each problem's pictures and once with white ones of
    the same size; then each problem is played once, and pads are counted against features at every turn.

    Raises:
        BlindModelError: the change is below rollout.blind_min_change, a reply failed, or pads and features differ.
    """
    limits = settings.rollout
    chosen = [problem for problem in problems if problem.images][: limits.blind_problems]
    if not chosen:
        return None
    changes = await _changes(chosen, sampler, renderer, settings)
    report = BlindReport(tuple(problem.id for problem in chosen), tuple(changes))
    _check_changes(report, limits)
    draw = Draw(seed, 1, limits.temperature)
    lenient = replace(settings, env=settings.env.model_copy(update={"max_failure_fraction": 1.0}))
    groups = await rollout(chosen, sampler, renderer, lenient, draw)
    counted = [_counts(trajectory, renderer) for trajectory in trajectories_of(groups)]
    pads, features = ([n for c in counted for n in c[side]] for side in (0, 1))
    report = replace(report, pads=tuple(pads), features=tuple(features))
    if pads != features:
        raise BlindModelError(
            f"image pads and features differ: {pads} pads, {features} features at the turns of problems "
            f"{', '.join(report.problems)}; do processor and model.path belong together?"
        )
    logger.info(
        "the policy looks: logprobs move by %.3g nats when pictures are blank; %d turns with all their features",
        *(report.mean_change, len(pads)),
    )
    return report


def blank(image: ImageRecord) -> ImageRecord:
    """A white picture of the same size."""
    return image_record(Image.new("RGB", (image.width, image.height), "white"))


async def _changes(
    problems: Sequence[Problem], sampler: Sampler, renderer: Renderer, settings: RolloutSettings
) -> list[float]:
    builder = load_object(settings.env.build, "env.build")
    requests: list[SampleRequest] = []
    for index, problem in enumerate(problems):
        tools = await asyncio.to_thread(prompt_tools, builder, settings.env, problem)
        prompt = renderer.prompt(problem.messages, tools)
        seen = SampleRequest(
            f"blind/{index}/seen", prompt.engine_ids, prompt.images, 0, PROBE_TOKENS, 0.0
        )
        whites = tuple(blank(image) for image in prompt.images)
        requests += [seen, replace(seen, session=f"blind/{index}/blank", images=whites)]
    replies = await sampler.generate(requests)
    for reply in replies:
        if reply.finish_reason in ("error", "abort"):
            raise BlindModelError(f"the probe of the policy's sight has no reply: {reply.error}")
    return [change(*pair) for pair in zip(replies[::2], replies[1::2], strict=True)]


def change(seen: Reply, blanked: Reply) -> float:
    """Largest difference of logprobs, up to and including the first token that differs."""
    same = 0
    for one, other in zip(seen.token_ids, blanked.token_ids, strict=False):
        if one != other:
            break
        same += 1
    pairs = zip(seen.logprobs[: same + 1], blanked.logprobs[: same + 1], strict=False)
    return max((abs(one - other) for one, other in pairs), default=0.0)


def _check_changes(report: BlindReport, limits: RolloutParams) -> None:
    if report.mean_change >= limits.blind_min_change:
        return
    told = ", ".join(
        f"{name} {value:.2g}" for name, value in zip(report.problems, report.changes, strict=True)
    )
    raise BlindModelError(
        f"the policy does not look: its logprobs move by {report.mean_change:.2g} nats on average when the picture "
        f"is replaced by a blank one, rollout.blind_min_change is {limits.blind_min_change:g} ({told}); are the "
        "vision weights loaded, and do pictures reach the sampler? (rollout.blind_problems: 0 leaves this probe out, for "
        "a policy that has not learnt to look yet)"
    )


def _counts(trajectory: Trajectory, renderer: Renderer) -> tuple[list[int], list[int]]:
    """Image pads in the stream and features of the pictures so far, at the end of every turn's prompt."""
    is_pad = trajectory.token_ids == renderer.family.image_token_id
    edges = np.flatnonzero(np.diff(trajectory.loss_mask, prepend=0, append=0) == 1)
    pads: list[int] = []
    features: list[int] = []
    shown = [len(turn.observation.images) if turn.observation else 0 for turn in trajectory.turns]
    num_images = len(trajectory.images) - sum(shown)
    for edge, more in zip(edges, shown, strict=False):
        pads.append(int(is_pad[:edge].sum()))
        features.append(sum(_num_features(i, renderer) for i in trajectory.images[:num_images]))
        num_images += more
    return pads, features


def _num_features(image: ImageRecord, renderer: Renderer) -> int:
    """Features that the image processor's patches of a picture become."""
    with Image.open(io.BytesIO(image.read())) as picture:
        processed = renderer.image_processor(images=[picture.convert("RGB")], return_tensors="np")
    return int(np.prod(processed["image_grid_thw"][0])) // renderer.family.merge_size**2
