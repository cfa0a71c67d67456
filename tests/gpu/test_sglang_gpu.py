"""The SGLang sampler against a real engine: `python -m pytest -m gpu tests/gpu/test_sglang_gpu.py` on a GPU host."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from polyturn.corpus import corpus
from polyturn.learner.fsdp import FsdpLearner
from polyturn.params import Params, parse
from polyturn.policy import model, small_model
from polyturn.render import Renderer
from polyturn.sampler.base import Reply, SampleRequest
from polyturn.sampler.sglang.build import Site, sglang_sampler
from polyturn.sampler.sglang.sampler import SglangSampler
from polyturn.types import Message, TrainingSample
from tests.gpu.medium_model import MEDIUM
from tests.unit import tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

SMALL = MEDIUM.model_copy(
    update={"num_layers": 8, "patch_size": 16, "vocab_size": 1024, "image_pixels": 256 * 256}
)
NUM, LENGTH = 32, 48  # trajectories, and tokens of a turn


@dataclass
class Host:
    """A policy on the GPU, its learner, and a sampler over one server that started from it."""

    params: Params
    policy: model.Policy
    renderer: Renderer
    learner: FsdpLearner
    sampler: SglangSampler


def the_params(**sglang: object) -> Params:
    return parse(
        {
            "model": {"dtype": "bfloat16"},
            "learner": {"freeze_vision": False, "lr": 1e-3},
            "rollout": {"max_context_tokens": 2048},
            "sampler": {
                "backend": "sglang",
                "sglang": {
                    "memory_fraction": 0.3,
                    "release_memory": True,
                    "bucket_mb": 16,
                    "extra_flags": ["--cuda-graph-max-bs-decode", "64"],
                    **sglang,
                },
            },
        }
    )


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    with opened(tmp_path_factory.mktemp("sglang"), the_params()) as made:
        yield made


@contextmanager
def opened(directory: Path, params: Params) -> Iterator[Host]:
    """Policy, learner and server of these params; the server ends with the context."""
    tokenizer = small_model.train_tokenizer(corpus(tiny.problems()), SMALL.vocab_size)
    network = small_model.build_model(SMALL, tokenizer, seed=0, max_positions=4096)
    built = model.wrap(network, small_model.build_processor(SMALL, tokenizer))
    built.model.to(torch.bfloat16)
    model.save(built, directory / "model")
    policy = model.load(params.model, directory / "model")
    policy.model.to("cuda")
    renderer = Renderer(policy)
    learner = FsdpLearner(policy, renderer, params.learner, params.loss, 1.0)
    started = time.monotonic()
    sampler = sglang_sampler(
        policy,
        params,
        Site(
            directory / "model",
            directory,
            lambda path, named: model.save(policy, path, weights=named),
        ),
    )
    print(f"\nserver up after {time.monotonic() - started:.1f} s")
    try:
        yield Host(params, policy, renderer, learner, sampler)
    finally:
        sampler.close()


def generate(sampler: SglangSampler, requests: Sequence[SampleRequest]) -> list[Reply]:
    return asyncio.run(sampler.generate(requests))


def first_requests(host: Host) -> list[SampleRequest]:
    problems = tiny.problems(8)
    requests = []
    for number in range(NUM):
        prompt = host.renderer.prompt(problems[number % 8].messages)
        requests.append(
            SampleRequest(
                f"{number % 8}/{number // 8}",
                prompt.engine_ids,
                prompt.images,
                1000 + number,
                LENGTH,
            )
        )
    return requests


def two_turns(host: Host) -> tuple[list[TrainingSample], list[TrainingSample]]:
    """Samples of the first turn alone, and of the second turn alone (after an observation with a new picture)."""
    requests = first_requests(host)
    replies = generate(host.sampler, requests)
    again, samples = [], []
    for number, (request, reply) in enumerate(zip(requests, replies, strict=True)):
        assert reply.error is None, reply.error
        shown = host.renderer.observation(
            Message("tool", ("Look: ", tiny.picture(96, 64, shade=7 * number)))
        )
        prompt = host.renderer.prompt(tiny.problems(8)[number % 8].messages)
        assert reply.prompt_length == len(prompt.token_ids)
        end = (
            ()
            if reply.token_ids[-1] == host.policy.family.end_of_turn_id
            else (host.policy.family.end_of_turn_id,)
        )
        again.append(
            replace(
                request,
                engine_ids=(*request.engine_ids, *reply.token_ids, *end, *shown.engine_ids),
                images=(*request.images, *shown.images),
                seed=request.seed + 5000,
            )
        )
        samples.append((prompt.token_ids, reply, (*end, *shown.token_ids), again[-1].images))
    seconds = generate(host.sampler, again)
    turns: tuple[list[TrainingSample], list[TrainingSample]] = ([], [])
    for (prompt, reply, shown, images), second in zip(samples, seconds, strict=True):
        assert second.error is None, second.error
        before = [*prompt, *reply.token_ids, *shown]
        assert second.prompt_length == len(before)
        turns[0].append(sample(list(prompt), reply, images[:1]))
        turns[1].append(sample(before, second, images))
    return turns


def sample(before: list[int], reply: Reply, images: Sequence) -> TrainingSample:
    zeros = [0] * len(before)
    return TrainingSample(
        token_ids=np.array([*before, *reply.token_ids], dtype=np.int64),
        loss_mask=np.array([*zeros, *[1] * len(reply.token_ids)], dtype=np.int8),
        logprobs=np.array([*zeros, *reply.logprobs], dtype=np.float32),
        images=tuple(images),
        advantage=1.0,
    )


def push(host: Host, version: int) -> None:
    host.sampler.update_weights(host.learner.export_weights(), version)


def test_engine_and_learner_agree_on_both_turns_and_a_wrong_picture_shows(host: Host):
    push(host, 0)
    first, second = two_turns(host)
    gaps = [host.learner.logprob_gap(samples) for samples in (first, second)]
    others = (tiny.picture(96, 64, shade=9), *tiny.problems(9)[8].images)
    wrong = [
        replace(each, images=tuple(others[1] if i.width == 256 else others[0] for i in each.images))
        for each in second
    ]
    wrong_gap = host.learner.logprob_gap(wrong)
    print(f"\ngap turn 1 {gaps[0]:.4f}, turn 2 {gaps[1]:.4f}, wrong pictures {wrong_gap:.4f}")
    assert max(gaps) <= 0.03
    assert wrong_gap > 2 * max(gaps)
    banned = set(host.policy.family.banned_ids)
    assert not any(banned & set(each.token_ids[each.loss_mask == 1].tolist()) for each in second)


def test_new_weights_arrive_over_cuda_ipc_and_are_compared(host: Host):
    assert_new_weights_arrive(host)


def assert_new_weights_arrive(host: Host) -> None:
    """Replies under changed weights fit the learner's, those under the old ones do not, and digests were compared."""
    push(host, 1)
    old_first, _ = two_turns(host)
    with torch.no_grad():
        generator = torch.Generator("cuda").manual_seed(0)
        for parameter in host.policy.model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, device="cuda")
            parameter.add_((0.3 * parameter.float().std() * noise).to(parameter.dtype))
    stale = host.learner.logprob_gap(old_first)
    host.sampler.take_counts()
    push(host, 2)
    counts = host.sampler.take_counts()
    fresh = max(host.learner.logprob_gap(turn) for turn in two_turns(host))
    print(
        f"\nstale {stale:.3f}, fresh {fresh:.4f}, {counts.tensors_compared} tensors compared, "
        f"sync {counts.weight_sync_s:.3f} s"
    )
    assert stale > 0.2
    assert fresh <= 0.03
    assert counts.tensors_compared > 100


def test_seeds_decide_replies_whatever_the_order(host: Host):
    push(host, 3)
    asked = first_requests(host)
    once = generate(host.sampler, asked)
    push(host, 3)  # flushes the prefix cache
    again = generate(host.sampler, asked[::-1])[::-1]
    assert [r.token_ids for r in once] == [r.token_ids for r in again]
    assert [r.logprobs for r in once] == [r.logprobs for r in again]
    siblings = generate(
        host.sampler, [replace(asked[0], seed=s, session=f"0/{s}") for s in range(8)]
    )
    assert len({reply.token_ids for reply in siblings}) == 8
    host.sampler.probe_seeds()


def test_memory_is_given_back_and_weights_return(host: Host):
    free = torch.cuda.mem_get_info()[0]
    host.sampler.rest()
    released = torch.cuda.mem_get_info()[0]
    push(host, 4)
    gap = max(host.learner.logprob_gap(turn) for turn in two_turns(host))
    print(f"\nfree GiB {free / 2**30:.1f}, released {released / 2**30:.1f}, gap after {gap:.4f}")
    assert released - free > 10 * 2**30
    assert gap <= 0.03


def test_a_killed_server_fails_its_replies_and_comes_back(host: Host):
    assert_a_killed_server_comes_back(host)


def assert_a_killed_server_comes_back(host: Host) -> None:
    """Replies in flight are marked within a minute, and the next push starts a server anew."""
    server = host.sampler.fleet.servers[0]
    assert server.process is not None

    async def body() -> list[Reply]:
        requests = [replace(r, max_new_tokens=1500) for r in first_requests(host)]
        task = asyncio.create_task(host.sampler.generate(requests))
        await asyncio.sleep(1.0)
        assert server.process is not None
        os.killpg(server.process.popen.pid, signal.SIGKILL)
        return await task

    started = time.monotonic()
    replies = asyncio.run(body())
    print(f"\nall replies back {time.monotonic() - started:.1f} s after the start")
    assert any(reply.finish_reason == "error" for reply in replies)
    assert time.monotonic() - started < 60
    started = time.monotonic()
    push(host, 5)
    print(f"server anew and weights pushed after {time.monotonic() - started:.1f} s")
    assert host.learner.logprob_gap(two_turns(host)[0]) <= 0.03


def test_closing_leaves_no_process(host: Host, tmp_path: Path):
    process = host.sampler.fleet.servers[0].process
    assert process is not None
    host.sampler.close()
    assert not process.is_running
