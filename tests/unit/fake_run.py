"""A run directory as the pipeline leaves it, made from real figures, crops and tokens without any model."""

import csv
import json
import math
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import yaml
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from polyturn import layout, trajectories
from polyturn.data.files import write_jsonl
from polyturn.data.synthetic import draw_figure, figure_rng
from polyturn.envs.base import image_record
from polyturn.envs.zoom import REGIONS, build_env, tool_call
from polyturn.evaluation.results import RESULTS, ProblemResult, to_row
from polyturn.evaluation.statistics import bootstrap_interval
from polyturn.params import SyntheticParams
from polyturn.training.recorder import records
from polyturn.types import Group, Message, Problem, StopReason, Trajectory, Turn

SPECIAL = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
NUM_TEST = 48
STEPS = 40


def make_run(root: Path) -> Path:
    """Write everything that the report reads; returns `root`."""
    tokenizer = _tokenizer(root / layout.POLICY)
    problems = [_problem(index) for index in range(NUM_TEST)]
    trajectories.save_pictures(
        root / layout.IMAGES / "png", [image for problem in problems for image in problem.images]
    )
    _write_problems(root, problems)
    right = _write_evaluation(root, problems, tokenizer)
    _write_training(root, problems, tokenizer)
    _write_metrics(root, right)
    _write_surroundings(root)
    return root


def _tokenizer(directory: Path) -> Tokenizer:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    texts = [tool_call(region) for region in REGIONS] + [
        "Answer: \\boxed{12}",
        "Not seen: none",
    ] * 4
    texts += ["Find the perimeter.", "user\n", "assistant\n", "tool\n"]
    tokenizer.train_from_iterator(
        texts,
        BpeTrainer(
            vocab_size=400, special_tokens=list(SPECIAL), initial_alphabet=ByteLevel.alphabet()
        ),
    )
    directory.mkdir(parents=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    return tokenizer


def _problem(index: int) -> Problem:
    figure, picture = draw_figure(figure_rng(0, "test", index), SyntheticParams())
    metadata = {"label": figure.label, "region": figure.region}
    message = Message("user", (image_record(picture), f"Find the {figure.quantity}."))
    return Problem(f"test/{index:06d}", "test", (message,), str(figure.answer), metadata)


def _trajectory(
    problem: Problem, tokenizer: Tokenizer, *, skill: float, sibling: int, group: int
) -> Trajectory:
    rng = random.Random(f"{problem.id}/{sibling}/{skill}")
    env = build_env(problem, {})
    ids, mask, logprobs = _said(
        tokenizer, "<|im_start|>user\n<|vision_start|>" + "<|image_pad|>" * 9
    )
    _extend(
        (ids, mask, logprobs),
        tokenizer,
        "<|vision_end|>Find it.<|im_end|>\n<|im_start|>assistant\n",
    )
    turns: list[Turn] = []
    images = list(problem.images)
    found = False
    while not found and len(turns) < 6 and rng.random() < 0.35 + 0.65 * skill:
        region = rng.choice(list(REGIONS))
        found = region == problem.metadata["region"]
        reply = tool_call(region)
        observation, _, info = env.step(reply)
        sampled = _sample(tokenizer, reply + "<|im_end|>", rng)
        _append((ids, mask, logprobs), sampled)
        message = Message("tool", (*observation.images, observation.text))
        turns.append(Turn(tuple(sampled[0]), tuple(sampled[1]), reply, message, info))
        images += observation.images
        _extend(
            (ids, mask, logprobs),
            tokenizer,
            f"\n<|im_start|>tool\n<|image_pad|>{observation.text}<|im_end|>\n<|im_start|>assistant\n",
        )
    answer = (
        problem.answer if found and rng.random() < 0.6 + 0.35 * skill else str(rng.randint(4, 36))
    )
    reply = f"Answer: \\boxed{{{answer}}}"
    sampled = _sample(tokenizer, reply + "<|im_end|>", rng)
    _append((ids, mask, logprobs), sampled)
    turns.append(Turn(tuple(sampled[0]), tuple(sampled[1]), reply, None))
    reward = float(answer == problem.answer)
    return Trajectory(
        problem, group, sibling, tuple(turns), np.array(ids), np.array(mask, dtype=np.int8),
        np.array(logprobs, dtype=np.float32), tuple(images), StopReason.ENV_DONE, int(skill * 10),
        reward=reward, reward_terms={"correctness": reward},
    )  # fmt: skip


Stream = tuple[list[int], list[int], list[float]]


def _said(tokenizer: Tokenizer, text: str) -> Stream:
    ids = tokenizer.encode(text).ids
    return ids, [0] * len(ids), [0.0] * len(ids)


def _extend(stream: Stream, tokenizer: Tokenizer, text: str) -> None:
    for part, more in zip(stream, _said(tokenizer, text), strict=True):
        part.extend(more)  # type: ignore[arg-type]


def _sample(tokenizer: Tokenizer, text: str, rng: random.Random) -> tuple[list[int], list[float]]:
    ids = tokenizer.encode(text).ids
    return ids, [-rng.expovariate(1.2) if rng.random() < 0.3 else -0.004 for _ in ids]


def _append(stream: Stream, sampled: tuple[list[int], list[float]]) -> None:
    stream[0].extend(sampled[0])
    stream[1].extend([1] * len(sampled[0]))
    stream[2].extend(sampled[1])


def _write_problems(root: Path, problems: Sequence[Problem]) -> None:
    rows = [{"id": problem.id, "split": "test"} for problem in problems]
    rows += [{"id": f"train/{index}", "split": "train"} for index in range(100)]
    path = root / layout.PROBLEMS / "problems.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    kept = [
        {
            "id": problem.id,
            "answer": problem.answer,
            "problem": f"<image>{problem.messages[0].text}",
            "images": [{"sha256": problem.images[0].sha256}],
        }
        for problem in problems
    ]
    (root / layout.IMAGES / "problems.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in kept)
    )
    reasons = [("train", "http_404")] * 3 + [("train", "too_small"), ("test", "shared_with_train")]
    quarantine = [
        {"id": str(i), "split": split, "stage": "images", "reason": reason, "detail": ""}
        for i, (split, reason) in enumerate(reasons)
    ]
    (root / layout.IMAGES / "quarantine.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in quarantine)
    )


def _write_evaluation(
    root: Path, problems: Sequence[Problem], tokenizer: Tokenizer
) -> dict[str, list[bool]]:
    kept, right = [], {}
    for step, (policy, skill) in enumerate((("warmstart", 0.0), ("policy", 0.95))):
        groups = [
            Group(i, (_trajectory(p, tokenizer, skill=skill, sibling=0, group=i),))
            for i, p in enumerate(problems)
        ]
        right[policy] = [group.trajectories[0].reward == 1 for group in groups]
        kept += records(groups[:24], [[None]] * 24, step)
        for group in groups[:24]:
            trajectories.save_pictures(
                root / layout.EVALUATION / "png", group.trajectories[0].images[1:]
            )
    trajectories.write_records(root / layout.EVALUATION / "trajectories.jsonl.gz", kept)
    found = [
        ProblemResult(
            id=p.id,
            answer=p.answer,
            correct={f"{policy}/sampled": [tries[i]] for policy, tries in right.items()},
            kind=" ".join(p.messages[0].text.split()[2:]).rstrip("."),
            question=p.messages[0].text,
            pictures=[image.sha256 for image in p.images],
            replies={"policy/sampled": f"Answer: \\boxed{{{p.answer}}}"},
        )
        for i, p in enumerate(problems)
    ]
    write_jsonl(root / layout.EVALUATION / RESULTS, map(to_row, found))
    return right


def _write_training(root: Path, problems: Sequence[Problem], tokenizer: Tokenizer) -> None:
    directory = root / layout.TRAJECTORIES
    for step, skill in ((0, 0.1), (STEPS - 1, 0.9)):
        groups = []
        for index in range(4):
            siblings = tuple(
                _trajectory(problems[index], tokenizer, skill=skill, sibling=s, group=index)
                for s in range(4)
            )
            groups.append(Group(index, siblings))
            for trajectory in siblings:
                trajectories.save_pictures(directory / "png", trajectory.images[1:])
        advantages = [[(t.reward or 0.0) - 0.5 for t in group.trajectories] for group in groups]
        trajectories.write_step(directory, step, records(groups, advantages, step))
    rng = random.Random(0)
    with (root / layout.CURVE).open("w", newline="") as file:
        writer = csv.DictWriter(file, list(_curve_row(0, rng)))
        writer.writeheader()
        writer.writerows(_curve_row(step, rng) for step in range(STEPS))


def _curve_row(step: int, rng: random.Random) -> dict[str, float | int | str]:
    mean = 0.3 + 0.5 * (1 - math.exp(-step / 9)) + rng.gauss(0, 0.025)
    has_eval = step % 10 == 0 or step == STEPS - 1
    accuracy = mean - 0.03
    return {
        "step": step,
        "reward_mean": mean,
        "reward_low": mean - 0.09,
        "reward_high": min(1.0, mean + 0.09),
        "turns_mean": 1.6 + 2.7 * (1 - math.exp(-step / 5)) + rng.gauss(0, 0.08),
        "tool_calls_mean": 0.6 + 2.7 * (1 - math.exp(-step / 5)) + rng.gauss(0, 0.08),
        "response_len_mean": 30 + 40 * (1 - math.exp(-step / 5)),
        "truncated_fraction": abs(rng.gauss(0, 0.006)),
        "zero_variance_groups": rng.randint(0, 6),
        "entropy": 0.5 * math.exp(-step / 20) + 0.1,
        "logprob_gap_mean": 3e-6 + abs(rng.gauss(0, 1e-6)),
        "logprob_gap_max": 1.4e-5 + abs(rng.gauss(0, 3e-6)),
        "eval_accuracy": accuracy if has_eval else "",
        "eval_accuracy_low": accuracy - 0.055 if has_eval else "",
        "eval_accuracy_high": accuracy + 0.05 if has_eval else "",
    }


def _write_metrics(root: Path, right: dict[str, list[bool]]) -> None:
    blocks: dict[str, object] = {"num_problems": NUM_TEST}
    for policy, tries in right.items():
        block: dict[str, dict[str, float]] = {}
        for mode, share in (("sampled", 1.0), ("greedy", 0.9)):
            values = [float(t) * share for t in tries]
            interval = bootstrap_interval(values, 500, 0)
            block[mode] = {
                "accuracy": interval.mean,
                "accuracy_low": interval.low,
                "accuracy_high": interval.high,
                "pass@1": interval.mean,
                "pass@2": min(1.0, interval.mean + 0.1),
                "turns_mean": 1.6 if policy == "warmstart" else 4.2,
                "tokens_mean": 40.0,
                "truncated_fraction": 0.01,
                "failed_fraction": 0.0,
            }
        blocks[policy] = block
    (root / layout.METRICS).write_text(json.dumps({"test": blocks}))


def _write_surroundings(root: Path) -> None:
    registered = {
        "name": "polyturn-geo3k",
        "version": 3,
        "alias": "champion",
        "reason": "accuracy 0.8125 against 0.7734 of version 2, a gain above registry.min_gain 0",
    }
    (root / layout.REGISTERED).write_text(json.dumps(registered))
    (root / layout.TRAIN_RUN).write_text(json.dumps({"run_id": "a" * 32}))
    (root / layout.PARAMS).write_text(yaml.safe_dump({"seed": 7, "data": {"source": "synthetic"}}))
    seconds = {"fetch": 3.2, "images": 9.1, "model": 4.4, "warmstart": 152.0, "train": 181.4}
    seconds |= {"evaluate": 21.0, "register": 1.9}
    (root / layout.STATE).mkdir()
    (root / layout.STATE / "timings.jsonl").write_text(
        "".join(
            json.dumps({"stage": stage, "seconds": s, "run_id": f"{index:032x}"}) + "\n"
            for index, (stage, s) in enumerate(seconds.items())
        )
    )
    outs = [
        {"path": str(path), "hash": "md5", "md5": f"{index:032x}.dir"}
        for index, path in enumerate((layout.RAW, layout.IMAGES, layout.POLICY))
    ]
    (root / layout.DVC_LOCK).write_text(yaml.safe_dump({"stages": {"all": {"outs": outs}}}))
