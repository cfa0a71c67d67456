"""The work of benchmarks/gpu_loop.py: a Qwen3-VL with random weights, problems with pictures, environment and reward.

Random weights never end a reply and never answer, so that lengths are those asked for: the end token is banned, the
environment answers every reply, and the reward is the share of odd ids beside polyturn's own grading.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw

from benchmarks import shapes
from benchmarks.shapes import Shape
from polyturn.envs.base import Observation, image_record
from polyturn.envs.zoom import REGIONS, cut, region_box
from polyturn.params import RewardParams
from polyturn.policy.model import Policy
from polyturn.policy.processor import save_processor
from polyturn.reward import correctness
from polyturn.types import ImageRecord, Message, Problem, Trajectory

SQUARE = ((448, 448),)
# Every 41st picture of Geometry3K by area, of 1,959 in pixels (width, height)
GEO3K = (
    (472, 213), (472, 237), (472, 253), (472, 264), (472, 274), (472, 285), (472, 291), (342, 412),
    (472, 308), (472, 316), (373, 412), (472, 331), (472, 337), (472, 348), (472, 355), (472, 358),
    (412, 412), (412, 412), (412, 412), (415, 412), (472, 373), (441, 412), (454, 412), (472, 407),
)  # fmt: skip
SHOWN = "That is not the answer yet. Look at the figure again, check each step and give the answer in \\boxed{}."


QUESTION_TOKENS = (92, 108)


def build_policy(shape: Shape, device: torch.device) -> Policy:
    """Random weights in bfloat16 (float32 on a CPU); the end token is banned too."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    policy = shapes.policy(shape, device=device, dtype=dtype)
    with torch.no_grad():
        policy.model.model.visual.pos_embed.weight.normal_(0, 0.1)
    family = policy.family
    banned = tuple(sorted({*family.banned_ids, family.end_of_turn_id}))
    return replace(policy, family=replace(family, banned_ids=banned))


def write(policy: Policy, directory: Path) -> None:
    """Where servers start from."""
    policy.model.save_pretrained(directory)
    save_processor(policy.processor, directory)  # pyright: ignore[reportArgumentType]


def question(rng: random.Random) -> str:
    """A sentence about a triangle."""
    a, b, c = rng.sample("ABCDEFGHKMNP", 3)
    sides = f"{a}{b} = {rng.randint(2, 90)}, {b}{c} = {rng.randint(2, 90)}"
    return f"In triangle {a}{b}{c}, {sides} and angle {b} is {rng.randint(20, 150)} degrees. "


def problems(
    policy: Policy, count: int, sizes: tuple[tuple[int, int], ...], seed: int
) -> list[Problem]:
    """Problems with a picture each, no two the same."""
    rng = random.Random(seed)
    tokenizer = policy.processor.tokenizer
    made: list[Problem] = []
    for number in range(count):
        wanted = rng.randint(*QUESTION_TOKENS)
        text = ""
        while len(ids := tokenizer(text)["input_ids"]) < wanted:
            text += question(rng)
        shown = figure(seed * 100_000 + number, sizes[number % len(sizes)])
        message = Message("user", (shown, str(tokenizer.decode(ids[:wanted]))))
        name = f"{seed}-{number}"
        made.append(Problem(id=name, split="train", messages=(message,), answer="7"))
    return made


def figure(seed: int, size: tuple[int, int]) -> ImageRecord:
    """A triangle with letters at its corners, and a circle."""
    rng = np.random.default_rng(seed)
    picture = Image.new("RGB", size, "white")
    pen = ImageDraw.Draw(picture)
    low = min(size) // 10
    corners = [(int(rng.integers(low, size[0] - low)), int(rng.integers(low, size[1] - low)))]
    while len(corners) < 3:
        corners.append(
            (int(rng.integers(low, size[0] - low)), int(rng.integers(low, size[1] - low)))
        )
    pen.polygon(corners, outline="black", width=3)
    for letter, corner in zip("ABC", corners, strict=True):
        pen.text(corner, letter, fill=(200, 0, 0))
    x, y = (int(rng.integers(side // 4, 3 * side // 4)) for side in size)
    radius = min(size) // 8
    pen.ellipse([x - radius, y - radius, x + radius, y + radius], outline="blue", width=2)
    return image_record(picture)


@dataclass
class Meter:
    """What environment and reward saw of a step; the benchmark empties it between steps."""

    reward_s: float = 0.0
    ends: dict[tuple[str, int], float] = field(default_factory=dict)  # of trajectories, monotonic


METER = Meter()


class Asker:
    """Answers every reply and is never done; one step in a hundred may take `slow_s`."""

    def __init__(self, problem: Problem, slow_s: float) -> None:
        self._name = (problem.id, id(self))
        self._slow_s = slow_s

    def step(self, response_text: str) -> tuple[Observation, bool, dict[str, object]]:
        """The same observation each time."""
        if self._slow_s and random.Random(response_text).random() < 0.01:
            time.sleep(self._slow_s)
        METER.ends[self._name] = time.monotonic()
        return Observation(SHOWN), False, {}


def build_env(problem: Problem, params: Mapping[str, object]) -> Asker:
    """Make an Asker; params["slow_s"]: seconds of a slow step (0: none is slow)."""
    return Asker(problem, float(str(params.get("slow_s", 0.0))))


class Shower:
    """Shows a region of the picture after every reply, which one depends on the reply, and is never done."""

    def __init__(self, problem: Problem) -> None:
        self._picture = problem.images[0]

    def step(self, response_text: str) -> tuple[Observation, bool, dict[str, object]]:
        """A quarter of the picture."""
        region = list(REGIONS)[sum(response_text.encode()) % 4]
        return Observation(SHOWN, (cut(self._picture, region_box(region, 0.25)),)), False, {}


def build_shower(problem: Problem) -> Shower:
    """Make a Shower."""
    return Shower(problem)


def share_of_odd_ids(trajectory: Trajectory, problem: Problem, *, params: RewardParams) -> float:
    """A reward that differs between siblings; polyturn's own grading runs beside it."""
    started = time.perf_counter()
    graded = correctness(trajectory, problem, params=params)
    odd = float((trajectory.token_ids[trajectory.loss_mask == 1] % 2).mean())
    METER.reward_s += time.perf_counter() - started
    return graded + odd
