"""One training step of polyturn's learner against TRL's on the same small Qwen3-VL and the same samples.

A step trains groups of eight siblings that share a prompt with a picture; replies differ in length. Each side runs
in a process of its own, on one thread, with its steps interleaved with the other's. Printed: trained tokens per
CPU second (median over steps) and how far the peak memory of the process lies above what it held before its first
step (optimizer state and gradients are in it). Both train all weights (vision tower included) in float32 with AdamW, clipped gradients and no gradient
checkpointing; TRL takes one group at a time, polyturn micro-batches of about a group's tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import cast

import numpy as np
import torch
from PIL import Image
from transformers import PreTrainedModel
from transformers.processing_utils import ProcessorMixin

from polyturn.envs.base import image_record
from polyturn.learner.fsdp import FsdpLearner
from polyturn.params import LearnerParams, LossParams, SmallModelParams
from polyturn.policy import model, small_model
from polyturn.policy.vision import PatchReader
from polyturn.render import Renderer
from polyturn.types import Message, TrainingSample

ROOT = Path(__file__).resolve().parent.parent
SIDES = ("polyturn", "trl")
GROUP = 8


@dataclass(frozen=True)
class Size:
    """How much work a step is."""

    num_groups: int
    longest_reply: int
    num_rounds: int
    side_px: int  # of the square pictures; 16 pixels are one visual token


FULL = Size(num_groups=4, longest_reply=256, num_rounds=7, side_px=160)
QUICK = Size(num_groups=2, longest_reply=96, num_rounds=3, side_px=96)


def main() -> None:
    """Run both sides and print the table, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="smaller samples and fewer rounds")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    size = QUICK if arguments.quick else FULL
    if arguments.side:
        serve(arguments.side, size)
    else:
        compare(size, quick=arguments.quick)


# -- the parent --------------------------------------------------------------------------------------------------


def compare(size: Size, *, quick: bool) -> None:
    """Interleave steps of both sides, then print what they took."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, __file__, *(["--quick"] if quick else []), "--side"]
    workers = {
        side: subprocess.Popen(
            [*command, side],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=ROOT,
        )
        for side in SIDES
    }
    steps: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for number in range(size.num_rounds + 1):
        for side in SIDES if number % 2 == 0 else reversed(SIDES):
            answer = ask(workers[side])
            if number:  # the first step warms up
                steps[side].append(answer)
    for worker in workers.values():
        assert worker.stdin
        worker.stdin.close()
        worker.wait()
    report(steps)


def ask(worker: subprocess.Popen[str]) -> dict[str, float]:
    """One step of one side."""
    assert worker.stdin
    assert worker.stdout
    worker.stdin.write("step\n")
    worker.stdin.flush()
    for line in worker.stdout:
        if line.startswith("STEP "):
            return json.loads(line.removeprefix("STEP "))
    raise SystemExit("a side of the benchmark stopped; its error is above")


def report(steps: dict[str, list[dict[str, float]]]) -> None:
    """The table and the RESULT line."""
    cpu = {side: median(step["cpu_s"] for step in steps[side]) for side in SIDES}
    memory = {side: steps[side][-1]["peak_mb"] for side in SIDES}
    tokens = steps["polyturn"][0]["tokens"]
    assert tokens == steps["trl"][0]["tokens"]
    print(f"{'':10} {'CPU s/step':>11} {'tokens/CPU s':>13} {'peak MB':>8} {'gradient norm':>14}")
    for side in SIDES:
        norm, rate = steps[side][0]["grad_norm"], tokens / cpu[side]
        print(f"{side:10} {cpu[side]:11.3f} {rate:13.0f} {memory[side]:8.0f} {norm:14.5f}")
    result = {
        "ratio_vs_trl": round(cpu["trl"] / cpu["polyturn"], 3),
        "memory_ratio_vs_trl": round(memory["polyturn"] / memory["trl"], 3),
        "tokens_per_cpu_s": round(tokens / cpu["polyturn"], 1),
    }
    print("RESULT", json.dumps(result))


# -- the sides ---------------------------------------------------------------------------------------------------


def serve(side: str, size: Size) -> None:
    """Train one step for each line on stdin."""

    torch.set_num_threads(1)
    step, tokens = (polyturn_side if side == "polyturn" else trl_side)(size)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = memory_mb("VmRSS")
    for _ in sys.stdin:
        started = time.process_time()
        norm = step()
        cpu_s = time.process_time() - started
        answer = {
            "cpu_s": cpu_s,
            "tokens": tokens,
            "peak_mb": memory_mb("VmHWM") - before,
            "grad_norm": norm,
        }
        print("STEP", json.dumps(answer), flush=True)


def memory_mb(key: str) -> float:
    """A line of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) / 1024
    raise ValueError(f"/proc/self/status has no {key}")


def build(size: Size) -> tuple[PreTrainedModel, ProcessorMixin]:
    """The small Qwen3-VL and its processor, the same on both sides."""

    params = SmallModelParams(
        hidden_size=256,
        num_layers=4,
        num_heads=8,
        num_kv_heads=4,
        intermediate_size=768,
        vision_hidden_size=128,
        vision_num_layers=3,
        vision_intermediate_size=384,
        vocab_size=4096,
        image_pixels=size.side_px**2,
    )
    text = [" ".join(f"{a}{b}" for a in range(64) for b in "abcdefgh")]
    tokenizer = small_model.train_tokenizer(text, 1024)
    network = small_model.build_model(params, tokenizer, seed=0, max_positions=4096)
    return network, small_model.build_processor(params, tokenizer)


def make_samples(size: Size, renderer: Renderer) -> list[TrainingSample]:
    """Groups of siblings: one prompt with its picture, replies of mixed lengths with random tokens."""

    rng = np.random.default_rng(0)
    samples: list[TrainingSample] = []
    for group in range(size.num_groups):
        pixels = rng.integers(0, 256, (size.side_px, size.side_px, 3), dtype=np.uint8)
        image = image_record(Image.fromarray(pixels))
        question = f"Group {group}: find the area of the triangle in the figure. " * 2
        prompt = renderer.prompt([Message("user", (image, question))]).token_ids
        lengths = np.linspace(size.longest_reply // 8, size.longest_reply, GROUP).astype(int)
        for length, advantage in zip(rng.permutation(lengths), rng.normal(size=GROUP), strict=True):
            reply = rng.integers(0, 256, length)
            mask = np.array([0] * len(prompt) + [1] * length, dtype=np.int8)
            samples.append(
                TrainingSample(
                    token_ids=np.array([*prompt, *reply], dtype=np.int64),
                    loss_mask=mask,
                    logprobs=np.zeros(len(mask), dtype=np.float32),
                    images=(image,),
                    advantage=float(advantage),
                )
            )
    return samples


def polyturn_side(size: Size) -> tuple[Callable[[], float], int]:
    """A step of the learner."""

    policy = model.wrap(*build(size))
    renderer = Renderer(policy)
    samples = make_samples(size, renderer)
    group_tokens = sum(len(sample.token_ids) for sample in samples[:GROUP])
    params = LearnerParams(freeze_vision=False, micro_batch_tokens=group_tokens, lr=1e-5)
    learner = FsdpLearner(policy, renderer, params, LossParams(), 1.0)

    def step() -> float:
        return learner.update(samples, lr_scale=1.0, is_on_policy=True).grad_norm

    return step, sum(int(sample.loss_mask.sum()) for sample in samples)


def trl_side(size: Size) -> tuple[Callable[[], float], int]:
    """A step of GRPOTrainer: `training_step` of each group, then clipping and the optimizer, as `train` does."""

    from datasets import Dataset  # noqa: PLC0415  (the peer's: only its own process pays for them)
    from trl.trainer.grpo_config import GRPOConfig  # noqa: PLC0415
    from trl.trainer.grpo_trainer import GRPOTrainer  # noqa: PLC0415

    network, processor = build(size)
    arguments = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=GROUP,
        num_generations=GROUP,
        gradient_accumulation_steps=size.num_groups,
        gradient_checkpointing=False,
        learning_rate=1e-5,
        max_completion_length=size.longest_reply,
        loss_type="dapo",
        beta=0.0,
        temperature=1.0,
        max_grad_norm=1.0,
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
    )
    trainer = GRPOTrainer(
        model=network,
        processing_class=processor,
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": "x"}]),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
    )
    own, _ = build(size)
    policy = model.wrap(own, processor)
    samples = make_samples(size, Renderer(policy))
    reader = PatchReader(policy)
    tokens = sum(int(sample.loss_mask.sum()) for sample in samples)
    pad, image = policy.family.padding_id, policy.family.image_token_id
    batches = [
        trl_batch(samples[first : first + GROUP], reader, pad, image, tokens)
        for first in range(0, len(samples), GROUP)
    ]
    trainer._prepare_inputs = lambda batch: batch  # the samples are there already
    trainer.current_gradient_accumulation_steps = size.num_groups
    optimizer = cast("torch.optim.Optimizer", trainer.create_optimizer())
    network.train()

    def step() -> float:
        for batch in batches:
            trainer.training_step(network, batch, None)
        norm = torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        network.zero_grad()
        return float(norm)

    return step, tokens


def trl_batch(
    group: Sequence[TrainingSample], reader: PatchReader, pad: int, image: int, num_tokens: int
) -> dict[str, object]:
    """What GRPOTrainer's `_generate_and_score_completions` hands to its training step, for one group."""

    prompts, replies, read = [], [], []
    for sample in group:
        start = int(sample.loss_mask.argmax())
        ids = torch.from_numpy(sample.token_ids)
        prompts.append(ids[:start])
        replies.append(ids[start:])
        read += [reader.read(picture) for picture in sample.images]
    prompt_ids = torch.stack(prompts)
    completion_ids = torch.nn.utils.rnn.pad_sequence(replies, batch_first=True, padding_value=pad)
    lengths = torch.tensor([len(reply) for reply in replies])
    types = torch.cat([(prompt_ids == image).int(), torch.zeros_like(completion_ids).int()], dim=1)
    return {
        "prompt_ids": prompt_ids,
        "prompt_mask": torch.ones_like(prompt_ids),
        "completion_ids": completion_ids,
        "completion_mask": (torch.arange(completion_ids.shape[1]) < lengths[:, None]).long(),
        "advantages": torch.tensor([sample.advantage for sample in group]),
        "num_items_in_batch": torch.tensor(float(num_tokens)),
        "pixel_values": torch.cat([patches for patches, _ in read]),
        "image_grid_thw": torch.stack([grid for _, grid in read]),
        "num_images": [len(sample.images) for sample in group],
        "mm_token_type_ids": types,
    }


if __name__ == "__main__":
    main()
