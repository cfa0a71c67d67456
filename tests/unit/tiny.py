"""Tiny real policies, pictures and problems, and a sampler that says what a test tells it to."""

from __future__ import annotations

import copy
import functools
import resource
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from PIL import Image
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from polyturn.corpus import corpus
from polyturn.data.synthetic import draw_figure, figure_rng
from polyturn.envs.base import image_record
from polyturn.params import Params, SmallModelParams, SyntheticParams, parse
from polyturn.policy import model, small_model
from polyturn.policy.processor import IMAGE_PAD, VIDEO_PAD, VISION_END, VISION_START
from polyturn.render import Renderer
from polyturn.sampler.base import FinishReason, Reply, SampleRequest
from polyturn.types import ImageRecord, Message, Problem, TrainingSample

torch.set_num_threads(1)

SMALL = SmallModelParams(
    hidden_size=64,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=32,
    intermediate_size=128,
    vision_hidden_size=48,
    vision_num_heads=2,
    vision_intermediate_size=96,
    vocab_size=512,
    init_std=0.2,  # random, but far from uniform: equal logits would hide mistakes
)


@functools.cache
def problems(count: int = 6, split: str = "train", seed: int = 0) -> tuple[Problem, ...]:
    """Synthetic figures as problems, with a picture of 256 x 256 (9 visual tokens)."""
    return tuple(_problem(index, split, seed) for index in range(count))


def _problem(index: int, split: str, seed: int) -> Problem:
    figure, image = draw_figure(figure_rng(seed, split, index), SyntheticParams())
    metadata = {"label": figure.label, "region": figure.region, "shape": figure.shape}
    return Problem(
        id=f"{split}-{index}",
        split=split,
        messages=(Message("user", (image_record(image), f"Find the {figure.quantity}.")),),
        answer=str(figure.answer),
        metadata={**metadata, "quantity": figure.quantity},
    )


@functools.cache
def picture(width: int = 48, height: int = 16, shade: int = 0) -> ImageRecord:
    """A picture of one gray with a dark corner; 48 x 16 pixels are 1 x 3 visual tokens."""
    image = Image.new("RGB", (width, height), (shade, 255 - shade, 128))
    image.paste((0, 0, shade), (0, 0, width // 2, height // 2))
    return image_record(image)


def qwen3(small: SmallModelParams = SMALL, seed: int = 0) -> model.Policy:
    """A Qwen3-VL with 2 layers and random weights."""
    tokenizer = small_model.train_tokenizer(corpus(problems()), small.vocab_size)
    network = small_model.build_model(small, tokenizer, seed=seed, max_positions=2048)
    return model.wrap(network, small_model.build_processor(small, tokenizer))


def qwen2_5() -> model.Policy:
    """A Qwen2.5-VL with 2 layers, windowed vision attention and the same tokenizer and processor."""
    tokenizer = small_model.train_tokenizer(corpus(problems()), SMALL.vocab_size)
    token_id = tokenizer.convert_tokens_to_ids
    text = {
        "vocab_size": 448,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 2048,
        "initializer_range": 0.2,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "mrope_section": [4, 6, 6],
        },
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": token_id("<|im_end|>"),
    }
    vision = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_heads": 2,
        "patch_size": 8,
        "spatial_patch_size": 8,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 64,
        "window_size": 32,
        "fullatt_block_indexes": [1],
        "initializer_range": 0.2,
    }
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=True,
        image_token_id=token_id(IMAGE_PAD),
        video_token_id=token_id(VIDEO_PAD),
        vision_start_token_id=token_id(VISION_START),
        vision_end_token_id=token_id(VISION_END),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = Qwen2_5_VLForConditionalGeneration(config)
    return model.wrap(network, small_model.build_processor(SMALL, tokenizer))


def copy_of(policy: model.Policy) -> model.Policy:
    """The same policy with weights of its own, so that a test may change them."""
    return replace(policy, model=copy.deepcopy(policy.model))


def params(**overrides: object) -> Params:
    """Params of a tiny run; `overrides` are whole sections' keys, e.g. train={"steps": 2}."""
    base: dict[str, dict[str, object]] = {
        "env": {"params": {}, "tools_in_prompt": False, "step_timeout_s": 30.0},
        "rollout": {
            "prompts_per_step": 2,
            "group_size": 3,
            "max_turns": 2,
            "max_new_tokens": 16,
            "max_turn_tokens": 8,
            "max_context_tokens": 256,
            "blind_problems": 0,  # scripted samplers look at nothing
        },
        "learner": {"lr": 1e-3, "warmup_steps": 2, "decay_steps": 4},
        "train": {"steps": 4, "eval_every": 2, "checkpoint_every": 2},
        "evaluate": {"bootstrap_samples": 50, "batch_size": 8},
    }
    for section, values in overrides.items():
        base[section] = {**base.get(section, {}), **values}  # type: ignore[dict-item]
    return parse(base)


@dataclass(frozen=True)
class Scripted:
    """What the scripted sampler answers instead of a text."""

    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason = "stop"
    logprobs: tuple[float, ...] | None = None
    prompt_length_error: int = 0
    error: str | None = None
    ignores_limit: bool = False


Script = Callable[[SampleRequest, int], str | Scripted]


@dataclass
class ScriptedSampler:
    """A Sampler that answers by `script(request, turn)`: a text (canonical ids and the end token) or `Scripted`.

    Its prompt length is counted from the engine ids and the pictures alone, as an engine does, and it cuts a
    reply at the tokens asked for unless the script says `ignores_limit`.
    """

    renderer: Renderer
    script: Script
    requests: list[list[SampleRequest]] = field(default_factory=list)
    replies: list[Reply] = field(default_factory=list)
    turns: dict[str, int] = field(default_factory=dict)
    version: int = 0
    is_lockstep: bool = True

    async def generate(self, requests: Sequence[SampleRequest]) -> list[Reply]:
        self.requests.append(list(requests))
        replies = [self._reply(request) for request in requests]
        self.replies += replies
        return replies

    def _reply(self, request: SampleRequest) -> Reply:
        turn = self.turns.get(request.session, 0)
        self.turns[request.session] = turn + 1
        said = self.script(request, turn)
        if isinstance(said, str):
            said = Scripted(self.renderer.encode_reply(said)[0])
        if len(said.token_ids) > request.max_new_tokens and not said.ignores_limit:
            said = replace(
                said, token_ids=said.token_ids[: request.max_new_tokens], finish_reason="length"
            )
        cells = sum(rows * columns for rows, columns in map(self.renderer.grid, request.images))
        length = len(request.engine_ids) - len(request.images) + cells
        default = tuple(-0.25 * (turn + 1) - 0.01 * i for i in range(len(said.token_ids)))
        return Reply(
            token_ids=said.token_ids,
            logprobs=default if said.logprobs is None else said.logprobs,
            finish_reason=said.finish_reason,
            prompt_length=length + said.prompt_length_error,
            weight_version=self.version,
            error=said.error,
        )

    def update_weights(self, tensors: Iterator[tuple[str, torch.Tensor]], version: int) -> None:
        self.version = version

    def rest(self) -> None:
        pass

    def take_metrics(self) -> Mapping[str, float]:
        return {}

    def close(self) -> None:
        pass


def saying(*texts: str | Scripted) -> Script:
    """The same replies for every trajectory, one per turn."""
    return lambda _, turn: texts[turn]


def training_sample(
    renderer: Renderer,
    length: int,
    *,
    images: Sequence[ImageRecord] = (),
    advantage: float = 1.0,
    seed: int = 0,
) -> TrainingSample:
    """A prompt with pictures followed by `length` trained tokens, with made-up logprobs of a sampler."""
    rng = np.random.default_rng(seed)
    prompt = renderer.prompt([Message("user", (*images, f"Find the area {seed}."))]).token_ids
    reply = rng.integers(0, 250, length)
    mask = [0] * len(prompt) + [1] * length
    logprobs = np.where(mask, rng.uniform(-7, -5, len(mask)), 0.0)
    return TrainingSample(
        token_ids=np.array([*prompt, *reply], dtype=np.int64),
        loss_mask=np.array(mask, dtype=np.int8),
        logprobs=logprobs.astype(np.float32),
        images=tuple(images),
        advantage=advantage,
    )


@contextmanager
def full_disk(at_bytes: int) -> Iterator[None]:
    """No file may grow beyond `at_bytes`, as if the disk were full there."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (at_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


class Metrics:
    """A metrics sink that keeps what it is given."""

    def __init__(self) -> None:
        self.steps: list[tuple[int | None, Mapping[str, float | None]]] = []
        self.times_ms: list[int | None] = []

    def log_metrics(
        self,
        metrics: Mapping[str, float | None],
        step: int | None = None,
        *,
        at_ms: int | None = None,
    ) -> None:
        self.steps.append((step, metrics))
        self.times_ms.append(at_ms)
