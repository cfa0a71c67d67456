"""Sampled tokens per CPU second: the embedded `hf` sampler against the generation of TRL's GRPOTrainer.

Both hold the same small Qwen3-VL, prompts, tools and chat template, in groups of 8. Both run their own multi-turn loop
with their own environment: a zoom that answers with a picture, a score that answers with text, an answer. What is
sampled is put in place of what was drawn, token by token, after the model has run as ever, so that both compute
the same 3 turns. Each program runs in processes of its own, interleaved; the medians are reported, with the peak
memory of the process. Not counted: start-up, a first rollout to warm up, rewards and training.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

GROUP_SIZE = 8
SAID = (
    '<tool_call>\n{"name": "zoom", "arguments": {"factor": 2}}\n</tool_call>',
    '<tool_call>\n{"name": "calc_score", "arguments": {"answer": "12"}}\n</tool_call>',
    "Answer: \\boxed{12}",
)
SCORE = "score 0.0"


def calc_score(answer: str) -> str:
    """Check a candidate answer.

    Args:
        answer: The candidate answer.

    Returns:
        Feedback on the candidate answer.
    """
    return f"{SCORE} for {answer}"


def zoom(factor: int) -> str:
    """Zoom into the figure.

    Args:
        factor: Zoom factor.

    Returns:
        The zoomed image.
    """
    return str(factor)


def figures(count: int):
    """The problems: synthetic figures of 256 x 256 pixels with their questions."""
    from polyturn.data.synthetic import draw_figure, figure_rng  # noqa: PLC0415
    from polyturn.params import SyntheticParams  # noqa: PLC0415

    for index in range(count):
        figure, image = draw_figure(figure_rng(0, "train", index), SyntheticParams())
        yield f"Find the {figure.quantity} of figure {index}.", image


def build_policy():
    """The demo's small Qwen3-VL with random weights, under Qwen3-VL's chat template as TRL ships it."""
    from trl.chat_template_utils import qwen3_vl_chat_template  # noqa: PLC0415

    from polyturn.params import SmallModelParams  # noqa: PLC0415
    from polyturn.policy import model, small_model  # noqa: PLC0415

    small = SmallModelParams()
    texts = [*SAID, SCORE, *(text for text, _ in figures(16))]
    tokenizer = small_model.train_tokenizer(texts, small.vocab_size)
    network = small_model.build_model(small, tokenizer, seed=0, max_positions=4096)
    processor = small_model.build_processor(small, tokenizer)
    processor.chat_template = qwen3_vl_chat_template  # type: ignore[attr-defined]
    return model.wrap(network, processor)


# ---- polyturn ----------------------------------------------------------------------------------------------------


class ZoomEnv:
    """A crop, a score, the end."""

    def __init__(self, picture: object, tools: Sequence[object]) -> None:
        self._picture = picture
        self._turn = 0
        self.tools = tools

    def step(self, response_text: str) -> tuple[object, bool, dict[str, object]]:
        """Answer a reply by its number."""
        from polyturn.envs.base import Observation  # noqa: PLC0415

        self._turn += 1
        if self._turn == 1:
            return Observation("zoomed", (self._picture,)), False, {}  # type: ignore[arg-type]
        return Observation(SCORE), self._turn == 3, {}


def build_env(problem: object) -> ZoomEnv:
    """For env.build."""
    from transformers.utils import get_json_schema  # noqa: PLC0415

    tools = [get_json_schema(calc_score), get_json_schema(zoom)]
    return ZoomEnv(problem.images[0], tools)  # type: ignore[attr-defined]


def measure_polyturn(prompts: int, rollouts: int) -> dict[str, float]:
    """Rollouts through polyturn.rollout with the hf sampler."""
    import torch  # noqa: PLC0415

    from polyturn.envs.base import image_record  # noqa: PLC0415
    from polyturn.params import EnvParams, RewardParams, RolloutParams  # noqa: PLC0415
    from polyturn.render import Renderer  # noqa: PLC0415
    from polyturn.rollout import Draw, RolloutSettings, rollout  # noqa: PLC0415
    from polyturn.sampler.hf import HfSampler  # noqa: PLC0415
    from polyturn.types import Message, Problem  # noqa: PLC0415

    torch.set_num_threads(1)
    policy = build_policy()
    renderer = Renderer(policy)
    script = [torch.tensor(renderer.encode_reply(text)[0]) for text in SAID]

    class Forced(HfSampler):
        turn = -1

        async def generate(self, requests):
            self.turn = (self.turn + 1) % len(script)
            return await super().generate(requests)

        def _sample(self, hidden, drafts):
            tokens, logprobs = super()._sample(hidden, drafts)
            return torch.full_like(tokens, int(script[self.turn][drafts.num_steps])), logprobs

    problems = [
        Problem(str(index), "train", (Message("user", (image_record(image), text)),), "12")
        for index, (text, image) in enumerate(figures(prompts))
    ]
    settings = RolloutSettings(
        EnvParams(build="benchmarks.rollout:build_env"),
        RolloutParams(
            max_turns=4, max_new_tokens=256, max_turn_tokens=None, max_context_tokens=4096
        ),
        RewardParams(terms=()),
    )
    sampler = Forced(policy, renderer)
    found: list[float] = []
    for number in range(rollouts + 1):
        started = time.process_time()
        groups = asyncio.run(
            rollout(problems, sampler, renderer, settings, Draw(number, GROUP_SIZE, 1.0))
        )
        cpu_s = time.process_time() - started
        tries = [trajectory for group in groups for trajectory in group.trajectories]
        assert {len(t.turns) for t in tries} == {len(SAID)}
        found.append(sum(t.num_sampled for t in tries) / cpu_s)
    sampler.close()
    return _measured(found, sum(len(ids) for ids in script), len(tries[0].token_ids))


# ---- TRL ---------------------------------------------------------------------------------------------------------


def trl_processor(policy):
    """The policy's processor as TRL wants it: with a video part, padding on the left."""
    from transformers import Qwen3VLProcessor  # noqa: PLC0415
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import (  # noqa: PLC0415
        Qwen3VLVideoProcessor,
    )
    from transformers.processing_utils import ProcessorMixin  # noqa: PLC0415

    tokenizer = policy.processor.tokenizer
    tokenizer.padding_side = "left"
    # The video processor needs torchvision, which the CPU environment has not; no video is ever processed.
    ProcessorMixin.check_argument_for_proper_class = lambda self, name, value: type(value)
    for name in ("image", "video", "vision_start", "vision_end"):
        token = f"<|{name}{'_pad' if name in ('image', 'video') else ''}|>"
        setattr(tokenizer, f"{name}_token", token)
        setattr(tokenizer, f"{name}_token_id", tokenizer.convert_tokens_to_ids(token))
    video = Qwen3VLVideoProcessor(patch_size=policy.family.patch_size, merge_size=2)
    template = policy.processor.chat_template  # type: ignore[attr-defined]
    tokenizer.chat_template = template
    return Qwen3VLProcessor(
        image_processor=policy.processor.image_processor,
        tokenizer=tokenizer,
        video_processor=video,
        chat_template=template,
    )


def measure_trl(prompts: int, rollouts: int) -> dict[str, float]:
    """GRPOTrainer._generate, which runs the tool loop, inside of real training steps."""
    import torch  # noqa: PLC0415
    from datasets import Dataset  # noqa: PLC0415
    from datasets import Image as HfImage  # noqa: PLC0415
    from transformers import LogitsProcessor  # noqa: PLC0415
    from trl import GRPOConfig, GRPOTrainer  # noqa: PLC0415

    torch.set_num_threads(1)
    policy = build_policy()
    processor = trl_processor(policy)
    tokenizer = policy.processor.tokenizer
    script = [
        [*tokenizer(text, add_special_tokens=False)["input_ids"], policy.family.end_of_turn_id]
        for text in SAID
    ]

    class Environment:
        """TRL's form of the same environment: tools are methods."""

        def reset(self, image: object = None, **_: object) -> None:
            self._image = image

        def calc_score(self, answer: str) -> str:
            del answer
            return SCORE

        def zoom(self, factor: int) -> list:
            del factor
            return [{"type": "image", "image": self._image}, {"type": "text", "text": "zoomed"}]

    Environment.calc_score.__doc__ = calc_score.__doc__
    Environment.zoom.__doc__ = zoom.__doc__
    rows = [
        {"prompt": [{"role": "user", "content": text}], "image": image}
        for text, image in figures(prompts)
    ]
    with tempfile.TemporaryDirectory() as out:
        config = GRPOConfig(
            output_dir=out,
            max_steps=rollouts + 1,
            per_device_train_batch_size=prompts * GROUP_SIZE,
            num_generations=GROUP_SIZE,
            max_completion_length=512,
            max_tool_calling_iterations=len(SAID),
            use_cpu=True,
            bf16=False,
            report_to="none",
            save_strategy="no",
            dataloader_pin_memory=False,
            temperature=1.0,
            beta=0.0,
            gradient_checkpointing=False,
        )
        trainer = GRPOTrainer(
            model=policy.model,
            processing_class=processor,
            args=config,
            reward_funcs=lambda completions, **_: [float(i % 2) for i in range(len(completions))],
            train_dataset=Dataset.from_list(rows).cast_column("image", HfImage()),
            environment_factory=Environment,
        )
        generate, generate_all = trainer.model.generate, trainer._generate
        found: list[float] = []
        lengths: list[int] = []

        class Forced(LogitsProcessor):
            """One token has all the probability: that of the script at this place."""

            def __init__(self, turn: int, prompt: int) -> None:
                self._script, self._prompt = script[turn], prompt

            def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
                forced = torch.full_like(scores, -torch.inf)
                forced[:, self._script[input_ids.shape[1] - self._prompt]] = 0.0
                return forced

        def one_turn(input_ids: torch.Tensor, **kwargs: object) -> torch.Tensor:
            lengths.append(input_ids.shape[1])
            forced = Forced((len(lengths) - 1) % len(script), input_ids.shape[1])
            return generate(input_ids=input_ids, logits_processor=[forced], **kwargs)

        def all_turns(asked: list) -> object:
            started = time.process_time()
            made = generate_all(asked)
            cpu_s = time.process_time() - started
            found.append(len(asked) * sum(len(ids) for ids in script) / cpu_s)
            return made

        trainer.model.generate, trainer._generate = one_turn, all_turns
        trainer.train()
    assert len(lengths) == len(script) * (rollouts + 1), lengths
    return _measured(found, sum(len(ids) for ids in script), lengths[2] + len(script[2]))


# ---- both --------------------------------------------------------------------------------------------------------


def _measured(found: Sequence[float], sampled: int, total: int) -> dict[str, float]:
    peak_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "tokens_per_cpu_s": statistics.median(found[1:]),
        "peak_mb": peak_kb / 1024,
        "sampled": sampled,  # tokens of one trajectory
        "total": total,  # prompt, pads, replies and observations of one trajectory
    }


def run_process(program: str, prompts: int, rollouts: int) -> dict[str, float]:
    """One program in a process of its own.

    Raises:
        RuntimeError: it fails.
    """
    command = [sys.executable, "-m", "benchmarks.rollout", "--program", program]
    command += ["--prompts", str(prompts), "--rollouts", str(rollouts)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(f"{program} fails: {done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def compare(prompts: int, rollouts: int, rounds: int) -> dict[str, float]:
    """Interleaved runs and their medians, as a table."""
    programs = ("polyturn", "trl")
    found: dict[str, list[dict[str, float]]] = {program: [] for program in programs}
    for _ in range(rounds):
        for program in programs:
            found[program].append(run_process(program, prompts, rollouts))
    print(
        f"{prompts} prompts x {GROUP_SIZE}, {len(SAID)} turns; medians of {rounds} interleaved runs"
    )
    print(f"{'program':<10}{'tokens/CPU s':>14}{'peak MB':>10}{'sampled':>9}{'of tokens':>11}")
    medians: dict[str, dict[str, float]] = {}
    for program in programs:
        runs = found[program]
        medians[program] = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        row = medians[program]
        print(
            f"{program:<10}{row['tokens_per_cpu_s']:>14.0f}{row['peak_mb']:>10.0f}{row['sampled']:>9.0f}"
            f"{row['total']:>11.0f}"
        )
    ours, theirs = medians["polyturn"], medians["trl"]
    return {
        "ratio_vs_trl": round(ours["tokens_per_cpu_s"] / theirs["tokens_per_cpu_s"], 2),
        "tokens_per_cpu_s": round(ours["tokens_per_cpu_s"]),
        "trl_tokens_per_cpu_s": round(theirs["tokens_per_cpu_s"]),
        "peak_mb": round(ours["peak_mb"]),
        "trl_peak_mb": round(theirs["peak_mb"]),
    }


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one run of few prompts")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--rollouts", type=int, default=2, help="measured, after a first one")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--program", choices=("polyturn", "trl"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.program:
        measure = measure_polyturn if options.program == "polyturn" else measure_trl
        print(json.dumps(measure(options.prompts, options.rollouts)))
        return
    if options.quick:
        options.prompts, options.rollouts, options.rounds = 4, 1, 1
    print("RESULT " + json.dumps(compare(options.prompts, options.rollouts, options.rounds)))


if __name__ == "__main__":
    main()
