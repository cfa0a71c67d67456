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
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from polyturn import model, small_model
from polyturn.envs.base import Observation, image_record
from polyturn.model import Policy
from polyturn.params import RewardParams, SmallModelParams
from polyturn.processor import (
    END_OF_TURN,
    IMAGE_PAD,
    PADDING,
    VIDEO_PAD,
    VISION_END,
    VISION_START,
    save_processor,
)
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


@dataclass(frozen=True)
class Shape:
    """Sizes of a Qwen3-VL, and the tokens of a question."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocabulary: int
    vision_hidden: int
    vision_layers: int
    vision_ffn: int
    deepstack: tuple[int, ...]
    question_tokens: tuple[int, int]


B2 = Shape(
    hidden=2048,
    layers=28,
    heads=16,
    kv_heads=8,
    head_dim=128,
    ffn=6144,
    vocabulary=151_936,
    vision_hidden=1024,
    vision_layers=24,
    vision_ffn=4096,
    deepstack=(5, 11, 17),
    question_tokens=(92, 108),
)
TINY = replace(
    B2,
    hidden=64,
    layers=2,
    heads=2,
    kv_heads=1,
    head_dim=32,
    ffn=128,
    vocabulary=2048,
    vision_hidden=48,
    vision_layers=3,
    vision_ffn=96,
    deepstack=(0,),
    question_tokens=(20, 30),
)


def build_policy(shape: Shape, device: torch.device) -> Policy:
    """Random bfloat16 weights (float32 on a CPU) under a tokenizer of its own; the end token is banned too."""
    texts = [question(random.Random(number)) for number in range(200)]
    tokenizer = small_model.train_tokenizer([*texts, SHOWN], 1024)
    token_id = tokenizer.convert_tokens_to_ids
    half = shape.head_dim // 2
    section = half * 5 // 16
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": shape.vocabulary,
            "hidden_size": shape.hidden,
            "intermediate_size": shape.ffn,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
            "max_position_embeddings": 262_144,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": token_id(END_OF_TURN),
            "pad_token_id": token_id(PADDING),
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5e6,
                "mrope_section": [half - 2 * section, section, section],
                "mrope_interleaved": True,
            },
        },
        vision_config={
            "depth": shape.vision_layers,
            "hidden_size": shape.vision_hidden,
            "intermediate_size": shape.vision_ffn,
            "num_heads": shape.heads,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "out_hidden_size": shape.hidden,
            "num_position_embeddings": 2304,
            "deepstack_visual_indexes": list(shape.deepstack),
        },
        tie_word_embeddings=True,
        image_token_id=token_id(IMAGE_PAD),
        video_token_id=token_id(VIDEO_PAD),
        vision_start_token_id=token_id(VISION_START),
        vision_end_token_id=token_id(VISION_END),
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16 if device.type == "cuda" else torch.float32)
    try:
        with device:
            network = Qwen3VLForConditionalGeneration(config)
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        network.model.visual.pos_embed.weight.normal_(0, 0.1)
    network.generation_config.eos_token_id = token_id(END_OF_TURN)
    network.generation_config.pad_token_id = token_id(PADDING)
    sizes = SmallModelParams(
        patch_size=16, image_pixels=448 * 448, image_mean=0.5, image_std=0.5, vocab_size=1024
    )
    policy = model.wrap(network, small_model.build_processor(sizes, tokenizer))
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
    policy: Policy, shape: Shape, count: int, sizes: tuple[tuple[int, int], ...], seed: int
) -> list[Problem]:
    """Problems with a picture each, no two the same."""
    rng = random.Random(seed)
    tokenizer = policy.processor.tokenizer
    made: list[Problem] = []
    for number in range(count):
        wanted = rng.randint(*shape.question_tokens)
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


def share_of_odd_ids(trajectory: Trajectory, problem: Problem, *, params: RewardParams) -> float:
    """A reward that differs between siblings; polyturn's own grading runs beside it."""
    started = time.perf_counter()
    graded = correctness(trajectory, problem, params=params)
    odd = float((trajectory.token_ids[trajectory.loss_mask == 1] % 2).mean())
    METER.reward_s += time.perf_counter() - started
    return graded + odd
