"""The SGLang sampler against a server that speaks its protocol and can be told to misbehave."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import httpx
import pytest
import torch

from polyturn.params import SglangParams
from polyturn.policy import model
from polyturn.processes import find
from polyturn.render import Renderer
from polyturn.rollout import Draw, RolloutSettings, rollout
from polyturn.sampler.base import Reply, Sampler, SampleRequest
from polyturn.sampler.hf import HfSampler
from polyturn.sampler.sglang import build, control, process, wire, wires
from polyturn.sampler.sglang.broadcast import DistributedTransfer
from polyturn.sampler.sglang.build import Site, sglang_sampler
from polyturn.sampler.sglang.checksums import Checksums, is_compared
from polyturn.sampler.sglang.control import Control, ServerError, check_version
from polyturn.sampler.sglang.counts import SglangCounts, added
from polyturn.sampler.sglang.fleet import Fleet, Server
from polyturn.sampler.sglang.sampler import IdenticalSiblingsError, SglangSampler
from polyturn.sampler.sglang.weights import DiskTransfer, Named, buckets
from polyturn.types import Message, StopReason, Trajectory
from tests.unit import tiny
from tests.unit.sampler.sglang_server import FakeServer, hash_tensor, serving

POLICY = tiny.qwen3()
RENDERER = Renderer(POLICY)


MADE: list[SglangSampler] = []
NOBODY = Control("http://127.0.0.1:9")  # listens there


@pytest.fixture(autouse=True)
def closing() -> Iterator[None]:
    yield
    while MADE:
        MADE.pop().close()


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with serving(FakeServer(tiny.copy_of(POLICY))) as running:
        yield running


def sampler(
    *servers: FakeServer, directory: Path, policy: model.Policy = POLICY, **params: object
) -> SglangSampler:
    def write(target: Path, tensors: Named) -> None:
        changed = tiny.copy_of(policy)
        changed.model.load_state_dict(dict(tensors), strict=False)
        model.save(changed, target)

    urls = tuple(each.url for each in servers)
    chosen = SglangParams.model_validate({"urls": urls, "weight_update": "disk", **params})
    fleet = Fleet(
        servers=[Server(Control(url)) for url in urls],
        transfer=DiskTransfer(directory, write),
        dtype=torch.float32,
        is_tied=True,
        hash_tensor=hash_tensor,
    )
    family = policy.family
    settings = wire.WireSettings(family.end_ids, family.banned_ids, is_seeded=True)
    made = SglangSampler(fleet, settings, chosen, is_vision_frozen=True)
    MADE.append(made)
    made.update_weights(policy.model.named_parameters(remove_duplicate=False), 0)
    for each in servers:
        each.probes, each.bodies = each.bodies, []  # which ask whether seeds are honoured
    return made


def request(number: int = 0, *, turns: int = 1, limit: int = 8) -> SampleRequest:
    images = [tiny.picture(shade=40 * index) for index in range(turns)]
    ids: list[int] = []
    for image in images:
        ids += RENDERER.prompt([Message("user", (image, "Find the area."))]).engine_ids
    return SampleRequest(f"0/{number}", tuple(ids), tuple(images), 100 + number, limit)


def ask(sampler: SglangSampler, *requests: SampleRequest) -> list[Reply]:
    return asyncio.run(sampler.generate(requests))


def test_replies_are_those_of_the_engine_behind_the_wire(server: FakeServer, tmp_path: Path):
    asked = [request(number) for number in range(3)]
    replies = ask(sampler(server, directory=tmp_path), *asked)
    direct = asyncio.run(HfSampler(tiny.copy_of(POLICY), RENDERER).generate(asked))
    assert [reply.token_ids for reply in replies] == [reply.token_ids for reply in direct]
    assert [r.prompt_length for r in replies] == [r.prompt_length for r in direct]
    for ours, theirs in zip(replies, direct, strict=True):
        torch.testing.assert_close(
            torch.tensor(ours.logprobs), torch.tensor(theirs.logprobs), atol=1e-5, rtol=0
        )


def test_every_request_carries_all_pictures_and_one_pad_each(server: FakeServer, tmp_path: Path):
    """TOK-03, TOK-04: a picture that is not sent is a blind model."""
    ask(sampler(server, directory=tmp_path), request(turns=1), request(1, turns=3))
    pad = POLICY.family.image_token_id
    for body in server.bodies:
        num_images = len(body["image_data"])
        assert body["input_ids"].count(pad) == num_images == len(body["mm_hashes"])
        assert all(uri.startswith("data:image/png;base64,") for uri in body["image_data"])
    assert sorted(len(body["image_data"]) for body in server.bodies) == [1, 3]


def test_a_reply_ends_at_any_of_the_models_end_tokens():
    """A server that was given by URL may start from a directory whose generation_config.json names fewer."""
    settings = wire.WireSettings((5, 9), POLICY.family.banned_ids, is_seeded=True)
    body = wire.body(request(), settings, wire.PictureUris(), rid="0", tower="")
    assert cast("dict[str, object]", body["sampling_params"])["stop_token_ids"] == [5, 9]


def test_image_tokens_are_banned_and_siblings_have_seeds_of_their_own(
    server: FakeServer, tmp_path: Path
):
    ask(sampler(server, directory=tmp_path), *(request(number) for number in range(4)))
    for body in server.bodies:
        banned = {int(token) for token in body["sampling_params"]["logit_bias"]}
        assert banned == set(POLICY.family.banned_ids)
    assert len({body["sampling_params"]["sampling_seed"] for body in server.bodies}) == 4
    lengths = {len(body["rid"]) for body in server.bodies}
    assert lengths == {32}, "/abort_request takes prefixes: rids must have one length"


def test_nothing_is_left_to_a_servers_preferred_sampling(server: FakeServer, tmp_path: Path):
    """Defaults of a server or of generation_config.json bend the distribution that is trained (NVIDIA-NeMo/RL#3497)."""
    ask(sampler(server, directory=tmp_path), request())
    sampling = server.bodies[0]["sampling_params"]
    neutral = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "min_new_tokens": 0}
    penalties = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    assert sampling.items() >= (neutral | penalties).items()


def test_embedding_keys_change_with_a_trained_tower_only(server: FakeServer, tmp_path: Path):
    """The server's cache of picture embeddings survives weight updates."""
    trained = sampler(server, directory=tmp_path)
    seen: list[str] = []
    for is_frozen, num_keys in ((False, 2), (True, 1)):
        trained.is_vision_frozen = is_frozen
        server.bodies.clear()
        for version in (1, 2):
            trained.update_weights(POLICY.model.named_parameters(remove_duplicate=False), version)
            ask(trained, request())
        keys = {body["mm_hashes"][0] for body in server.bodies}
        assert len(keys) == num_keys
        seen += keys
    server.bodies.clear()
    ask(sampler(server, directory=tmp_path), request())
    assert server.bodies[0]["mm_hashes"][0] not in seen, "of another run's tower"


def test_counts_of_all_ranks_become_metrics_once(server: FakeServer, tmp_path: Path):
    made = sampler(server, directory=tmp_path)
    server.faults = ["500"]
    ask(made, request())
    metrics = made.take_metrics()
    assert metrics["perf/sampler_retries"] == 1
    assert metrics["perf/weights_compared"] > 0
    assert not any(made.take_metrics().values())
    one = SglangCounts(Counter({1: 8}), Counter({1: 6}), 1, 0.5, 0.5, 0, 1, 0, 2.0, 5)
    other = SglangCounts(Counter({1: 4, 2: 4}), Counter({2: 2}), 2, 2.5, 2.0, 1, 2, 1, 3.0, 0)
    whole = added([one, other])
    assert whole == SglangCounts(
        Counter({1: 12, 2: 4}), Counter({1: 6, 2: 2}), 3, 3.0, 2.0, 1, 3, 1, 3.0, 5
    )
    told = whole.metrics()
    rates = [told[f"perf/prefix_cache_hit_rate{turn}"] for turn in ("", "/turn_1", "/turn_2")]
    assert rates == [0.5, 0.5, 0.5]
    assert (told["perf/sampler_latency/mean"], told["perf/sampler_latency/max"]) == (1.0, 2.0)


@pytest.mark.parametrize("fault", ["500", "500 in plain text", "null", "disconnect"])
def test_a_failed_request_is_tried_again(fault: str, server: FakeServer, tmp_path: Path):
    made = sampler(server, directory=tmp_path)
    server.faults = [fault]
    (reply,) = ask(made, request())
    assert reply.finish_reason in ("stop", "length")
    assert made.counts.retries == 1


def test_a_connection_that_a_server_may_be_closing_is_not_used_again(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """sgl-project/sglang#20851: connections that were idle for 5 s were reset under the next request."""
    assert wires.KEEP_ALIVE_S < 5
    monkeypatch.setattr(wires, "KEEP_ALIVE_S", 0.5)
    made = sampler(server, directory=tmp_path, deterministic=False)  # nothing was asked yet
    for pause_s in (0.0, 0.0, 0.8):
        time.sleep(pause_s)
        ask(made, request())
    first, soon, late = server.peers
    assert first == soon != late


def test_retries_have_an_end_and_the_reply_says_why(server: FakeServer, tmp_path: Path):
    made = sampler(server, directory=tmp_path, retries=1)
    server.faults = ["500", "500", "500"]
    (reply,) = ask(made, request())
    assert reply.finish_reason == "error"
    assert "HTTP 500" in (reply.error or "")
    assert "sampler.sglang.retries 1" in (reply.error or "")
    assert len(server.bodies) == 2


@pytest.mark.parametrize("status", ["429", "503"])
def test_a_busy_server_is_asked_again_until_it_has_room(
    status: str, server: FakeServer, tmp_path: Path
):
    """THUDM/slime#1328: 503 while a queue is full or a router knows no worker; no attempt is used up by it."""
    made = sampler(server, directory=tmp_path, retries=0)
    server.faults = [status, status]
    (reply,) = ask(made, request())
    assert reply.finish_reason in ("stop", "length")
    assert (made.counts.waits, made.counts.retries, made.counts.failures) == (2, 0, 0)
    assert made.counts.metrics()["perf/sampler_waits"] == 2


def test_a_server_that_stays_busy_is_given_up_and_counts_as_living(
    server: FakeServer, tmp_path: Path
):
    made = sampler(server, directory=tmp_path, request_timeout_s=0.5)
    server.faults = ["503"] * 9
    (reply,) = ask(made, request())
    assert "the request queue is full" in (reply.error or "")
    assert "request_timeout_s" in (reply.error or "")
    assert len(server.bodies) == 2
    assert made.fleet.servers[0].is_alive


def test_a_hanging_request_is_given_up_and_aborted_by_its_id(server: FakeServer, tmp_path: Path):
    made = sampler(server, directory=tmp_path, request_timeout_s=1.0, retries=1)
    server.faults = ["hang"]
    (reply,) = ask(made, request())
    assert reply.finish_reason in ("stop", "length")
    assert server.aborted == [server.bodies[0]["rid"]]


@pytest.mark.parametrize(
    ("fault", "said"),
    [("wrong ids", "tokenized again"), ("old version", "version 0 answered, version 7")],
)
def test_an_answer_that_cannot_be_trained_on_is_refused(
    fault: str, said: str, server: FakeServer, tmp_path: Path
):
    made = sampler(server, directory=tmp_path)
    made.update_weights(POLICY.model.named_parameters(remove_duplicate=False), 7)
    server.faults = [fault]
    (reply,) = ask(made, request())
    assert reply.finish_reason == "error"
    assert said in (reply.error or "")


ANSWER = {
    "output_ids": [7, 8],
    "meta_info": {
        "prompt_tokens": 5,
        "weight_version": "0",
        "output_token_logprobs": [[-0.5, 7, None], [-0.25, 8, None]],
        "finish_reason": {"type": "stop", "matched": 8},
    },
}


def answer(**changes: object) -> dict[str, object]:
    top = {key: changes.pop(key) for key in ("output_ids", "meta_info") if key in changes}
    return {**ANSWER, "meta_info": {**ANSWER["meta_info"], **changes}, **top}


def test_an_answer_is_read():
    read = wire.reply(answer(cached_tokens=None), version=0)
    assert (read.token_ids, read.logprobs) == ((7, 8), (-0.5, -0.25))
    assert (read.prompt_length, read.finish_reason, read.error) == (5, "stop", None)


@pytest.mark.parametrize(
    "changes",
    [
        {"finish_reason": None},  # a request that is still running
        {"finish_reason": "stop"},  # as the OpenAI endpoints say it
        {"finish_reason": {}},
        {"finish_reason": {"type": "tool_calls"}},
        {"prompt_tokens": None},
        {"prompt_tokens": "many"},
        {"prompt_tokens": float("inf")},
        {"output_token_logprobs": None},  # return_logprob is ignored
        {"output_token_logprobs": [[-0.5], [-0.25]]},
        {"output_token_logprobs": [[None, 7, None], [-0.25, 8, None]]},
        {"output_token_logprobs": [["nan?", 7, None], [-0.25, 8, None]]},
        {"output_token_logprobs": [[-0.5, None, "a"], [-0.25, 8, "b"]]},
        {"output_ids": None},
        {"output_ids": ["a", "b"]},
        {"meta_info": None},
        {"meta_info": []},
    ],
)
def test_an_answer_without_its_parts_fails_its_trajectory_alone(changes: dict[str, object]):
    """NVIDIA-NeMo/Gym#1787 and its kind: other versions and gateways of the engine leave parts out, or say them otherwise."""
    with pytest.raises(wire.WireError):
        wire.reply(answer(**changes), version=0)


def test_an_abort_needs_no_message_and_counts_need_no_numbers():
    aborted = wire.reply(answer(finish_reason={"type": "abort"}), version=0)
    assert (aborted.finish_reason, aborted.error) == ("abort", "aborted by the server")
    for odd in (None, "12", [], float("nan")):
        assert wire.num_cached(answer(cached_tokens=odd)) == 0
        assert wire.latency_s(answer(e2e_latency=odd)) == 0.0
    assert (wire.num_cached(answer(cached_tokens=3)), wire.latency_s(answer(e2e_latency=2))) == (
        3,
        2.0,
    )


def test_an_aborted_reply_is_aborted(server: FakeServer, tmp_path: Path):
    made = sampler(server, directory=tmp_path)
    server.faults = ["abort"]
    (reply,) = ask(made, request())
    assert (reply.finish_reason, reply.error) == ("abort", "Aborted")


def test_a_dropped_picture_shows_in_the_logprobs(server: FakeServer, tmp_path: Path):
    """TOK-03: what a teacher-forced check compares differs when the server saw another picture."""
    made = sampler(server, directory=tmp_path)
    seen = ask(made, request())[0]
    server.faults = ["drop image"]
    blind = ask(made, request())[0]
    assert seen.logprobs[0] != pytest.approx(blind.logprobs[0], abs=1e-3)


def test_trajectories_stay_on_their_server_and_move_when_it_is_gone(tmp_path: Path):
    with (
        serving(FakeServer(tiny.copy_of(POLICY))) as first,
        serving(FakeServer(tiny.copy_of(POLICY))) as second,
    ):
        made = sampler(first, second, directory=tmp_path)
        asked = [request(number) for number in range(6)]
        ask(made, *asked)
        on_first = len(first.bodies)
        assert 0 < on_first < 6
        ask(made, *asked)
        assert len(first.bodies) == 2 * on_first
        made.fleet.servers[0].control = Control("http://127.0.0.1:9")  # nobody listens there
        replies = ask(made, *asked)
        assert all(reply.finish_reason in ("stop", "length") for reply in replies)
        assert [server.is_alive for server in made.fleet.servers] == [False, True]
        assert len(first.bodies) == 2 * on_first


def test_a_server_that_was_away_samples_again_once_it_has_the_new_weights(tmp_path: Path):
    with (
        serving(FakeServer(tiny.copy_of(POLICY))) as first,
        serving(FakeServer(tiny.copy_of(POLICY))) as second,
    ):
        made = sampler(first, second, directory=tmp_path)
        away, here = made.fleet.servers
        away.is_alive, away.control = False, Control("http://127.0.0.1:9")
        for version, control, is_alive in ((1, away.control, False), (2, Control(first.url), True)):
            away.control = control
            made.update_weights(POLICY.model.named_parameters(remove_duplicate=False), version)
            assert (away.is_alive, here.is_alive) == (is_alive, True)
        assert (first.version, second.version) == ("2", "2")


def test_a_server_that_has_ended_is_not_asked_for_its_memory_but_started_anew(
    server: FakeServer, tmp_path: Path
):
    made = sampler(server, directory=tmp_path)
    ended = process.start([sys.executable, "-c", ""], NOBODY, tmp_path / "log")
    ended.popen.wait()
    dead = Server(Control("http://127.0.0.1:9"), ended)
    made.fleet.servers = [*made.fleet.servers, dead]

    def restart(gone: Server) -> None:
        gone.process, gone.control = None, Control(server.url)

    made.fleet.restart = restart
    made.params = made.params.model_copy(update={"release_memory": True})
    made.rest()
    assert not dead.is_alive
    made.update_weights(POLICY.model.named_parameters(remove_duplicate=False), 1)
    assert dead.is_alive


def test_new_weights_are_named_flushed_and_compared(server: FakeServer, tmp_path: Path):
    """CKPT-01, CKPT-09: nothing computed from old weights is left, and the tensors are the ones pushed."""
    made = sampler(server, directory=tmp_path)
    before = ask(made, request())[0]
    other = tiny.copy_of(POLICY)
    with torch.no_grad():
        for parameter in other.model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    server.calls.clear()
    made.take_counts()
    made.update_weights(other.model.named_parameters(remove_duplicate=False), 1)
    assert server.calls == ["/update_weights_from_disk", "/flush_cache"]
    assert server.version == "1"
    counts = made.take_counts()
    # every parameter once: 2 layers x (3 of q k v in one, 2 of gate up in one)
    num_parameters = len(list(other.model.parameters()))
    assert counts.tensors_compared == num_parameters - 2 * (2 + 1)
    after = ask(made, request())[0]
    fresh = asyncio.run(HfSampler(other, RENDERER).generate([request()]))[0]
    assert after.token_ids == fresh.token_ids
    assert after.logprobs != before.logprobs
    assert after.weight_version == 1


def test_a_server_that_keeps_its_old_weights_is_found_out(server: FakeServer, tmp_path: Path):
    made = sampler(server, directory=tmp_path)
    server.is_deaf = True
    other = tiny.copy_of(POLICY)
    with torch.no_grad():
        other.model.model.visual.patch_embed.proj.weight.add_(1.0)
    with pytest.raises(ServerError, match=r"1 of \d+ tensors differ .*visual.patch_embed"):
        made.update_weights(other.model.named_parameters(remove_duplicate=False), 1)


def test_a_tensor_that_the_server_does_not_know_is_named(server: FakeServer, tmp_path: Path):
    made = sampler(server, directory=tmp_path)
    named = [*POLICY.model.named_parameters(), ("model.visual.extra.weight", torch.ones(2))]
    with pytest.raises(ServerError, match=r"1 are unknown to the server .*visual.extra"):
        made.update_weights(iter(named), 1)


def test_a_server_that_ignores_seeds_is_found_out(server: FakeServer, tmp_path: Path):
    made = sampler(server, directory=tmp_path)

    assert made._are_seeds_checked, "with the first weights"
    asked = [body["sampling_params"] for body in server.probes]
    assert len({each["sampling_seed"] for each in asked}) == len(asked) == 8
    made.settings = replace(made.settings, is_seeded=False)  # the server then takes 42 for all
    made._are_seeds_checked = False
    with pytest.raises(IdenticalSiblingsError, match="--enable-deterministic-inference"):
        made.update_weights(POLICY.model.named_parameters(remove_duplicate=False), 1)


def test_memory_is_released_and_taken_again_once(server: FakeServer, tmp_path: Path):
    made = sampler(server, directory=tmp_path)
    made.params = made.params.model_copy(update={"release_memory": True})
    server.calls.clear()
    made.rest()
    for version in (1, 2):
        made.update_weights(POLICY.model.named_parameters(remove_duplicate=False), version)
    assert server.calls == [
        "/flush_cache",
        "/release_memory_occupation",
        "/resume_memory_occupation",
        *["/update_weights_from_disk", "/flush_cache"] * 2,
    ]


@pytest.mark.parametrize(("ranks", "is_compared"), [(1, True), (2, False)])
def test_weights_that_are_not_compared_are_told(
    server: FakeServer,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    ranks: int,
    is_compared: bool,
):
    sglang = {"urls": [server.url], "weight_update": "disk", "tensor_parallel": ranks}
    params = tiny.params(sampler={"backend": "sglang", "sglang": sglang})
    made = sglang_sampler(POLICY, params, Site(tmp_path, tmp_path, lambda *_: None))
    MADE.append(made)
    assert (made.fleet.hash_tensor is not None) == is_compared
    assert ("weights are not compared with tensor_parallel 2" in caplog.text) != is_compared


def test_replies_cannot_come_again_over_a_transport_that_waits_for_no_copy():
    """Seen on an H200: two runs with equal weights, one of which had other logprobs in one step of 24."""
    with pytest.raises(ValueError, match=r"picture_transport: cuda_ipc .*deterministic to false"):
        SglangParams(picture_transport="cuda_ipc")
    SglangParams(picture_transport="cuda_ipc", deterministic=False)


@pytest.mark.parametrize("url", ["http://10.0.0.7:30000", "http://server:30000"])
def test_weights_cannot_be_broadcast_to_a_server_that_does_not_meet_this_host_as_itself(url: str):
    with pytest.raises(ValueError, match=r"weight_update: distributed meets .*weight_update: disk"):
        SglangParams(urls=("http://127.0.0.1:30000", url), weight_update="distributed")
    SglangParams(urls=("http://127.0.0.1:30000",), weight_update="distributed")
    SglangParams(urls=(url,), weight_update="disk")


def test_servers_that_are_sent_weights_over_nccl_need_gpus_of_their_own():
    """NCCL refuses a group with two members on one GPU, and the trainer's is the first."""
    with pytest.raises(
        ValueError, match=r"distributed sends from GPU 0.* got gpu_offset 0; set it"
    ):
        SglangParams(weight_update="distributed")
    SglangParams(weight_update="distributed", gpu_offset=1)


def test_a_bucket_holds_whole_tensors_within_its_size():
    tensors = [(str(size), torch.zeros(size)) for size in (2, 3, 9, 1)]
    grouped = [[name for name, _ in bucket] for bucket in buckets(iter(tensors), 4 * 5)]
    assert grouped == [["2", "3"], ["9"], ["1"]]


def test_a_sample_of_tensors_is_compared_that_moves_on_and_always_has_tower_and_head(
    server: FakeServer, tmp_path: Path
):
    made = sampler(server, directory=tmp_path)
    made.fleet.check_tensors = 3
    named = list(POLICY.model.named_parameters(remove_duplicate=False))
    all_of_them = made.take_counts().tensors_compared
    compared = []
    for version in range(1, 5):
        made.update_weights(iter(named), version)
        compared.append(made.take_counts().tensors_compared)
    assert all(3 <= number < all_of_them // 2 for number in compared)
    layers = [f"model.layers.{number}.mlp.down_proj.weight" for number in range(40)]
    seen = [[is_compared(name, version, 5) for version in range(10)] for name in layers]
    assert all(sum(row[:5]) == 1 and row[5:] == row[:5] for row in seen)
    ends = ("visual.patch_embed.proj.weight", "visual.merger.norm.weight", "lm_head.weight")
    assert all(is_compared(name, version, 10**6) for name in ends for version in range(3))


def test_a_lost_tensor_is_found_within_a_period(server: FakeServer, tmp_path: Path):
    made = sampler(server, directory=tmp_path)
    made.fleet.check_tensors = 3
    server.is_deaf = True
    other = tiny.copy_of(POLICY)
    with torch.no_grad():
        other.model.model.language_model.layers[1].mlp.down_proj.weight.add_(1.0)
    named = list(other.model.named_parameters(remove_duplicate=False))
    with pytest.raises(ServerError, match=r"tensors differ .*down_proj"):  # noqa: PT012
        for version in range(1, 20):
            made.update_weights(iter(named), version)


def test_a_group_of_servers_is_made_anew_when_one_of_them_is_new(monkeypatch: pytest.MonkeyPatch):
    """A restarted server is not in the group that broadcasts weights; the others would wait for it for ever."""
    joined: list[tuple[str, tuple[str, ...]]] = []
    transfer = DistributedTransfer(torch.float32, 100, 1)

    def join(servers: Sequence[Control]) -> object:
        joined.append((transfer._name, tuple(server.url for server in servers)))
        return object()

    monkeypatch.setattr(transfer, "_join", join)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda _: None)
    first, second = Control("http://a:1"), Control("http://b:2")
    transfer.push([first, second], iter(()), 0)
    transfer.push([first, second], iter(()), 1)
    assert len(joined) == 1
    transfer.forget()
    transfer.push([first, second], iter(()), 2)
    transfer.push([first], iter(()), 3)
    assert [urls for _, urls in joined] == [("http://a:1", "http://b:2")] * 2 + [("http://a:1",)]
    assert len({name for name, _ in joined}) == 3


def test_stacked_checksums_do_not_depend_on_the_order_of_the_parts():
    q, k, v = (torch.full((2, 2), value) for value in (1.0, 2.0, 3.0))
    stem = "model.language_model.layers.0.self_attn"
    for order in ("qkv", "vqk"):
        sums = Checksums(torch.float32, hash_tensor)
        for part in order:
            sums.add(f"{stem}.{part}_proj.weight", {"q": q, "k": k, "v": v}[part])
        stacked = hash_tensor(torch.cat([q, k, v]))
        assert sums.sums == {"model.layers.0.self_attn.qkv_proj.weight": stacked}


@pytest.mark.parametrize("version", ["0.5.11", "0.6.0", "main", "0.5"])
def test_versions_outside_of_the_tested_range_are_told(version: str):
    assert "outside of the tested range 0.5.12 <= version < 0.5.18" in (
        check_version(version) or ""
    )


@pytest.mark.parametrize(
    "version", ["0.5.12", "0.5.15.post1", "0.5.15+cu130", "0.5.16rc1", "0.5.17.dev3+g0a1b2c3"]
)
def test_builds_of_a_tested_version_are_not_told(version: str):
    assert check_version(version) is None


@pytest.mark.parametrize(
    ("urls", "said"),
    [
        (["10.0.0.7:30000"], "such as http://HOST:30000, got '10.0.0.7:30000'"),
        (["localhost:30000"], "write its scheme and host"),
        (["http://"], "write its scheme and host"),
        (["http://a:1", "http://a:1/"], "each server once"),
    ],
)
def test_addresses_that_are_none_and_servers_named_twice_are_no_params(urls: list[str], said: str):
    with pytest.raises(ValueError, match=re.escape(said)):
        SglangParams(urls=tuple(urls))


def test_servers_are_reached_past_the_proxy_of_the_environment(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """THUDM/slime#1542: a proxy answers 403 for a server on this host."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    control._client.cache_clear()  # made before, it would not have seen them
    made = sampler(server, directory=tmp_path)
    assert made.fleet.servers[0].control.is_healthy()
    assert ask(made, request())[0].finish_reason in ("stop", "length")


ODD = {
    "empty": (b"", "application/json"),
    "a page": (b"<html>", "application/json"),
    "a list": (b"[]", "application/json"),
    "text": (b"ok", "text/plain"),
}


@pytest.mark.parametrize("kind", ODD)
def test_a_control_answer_that_is_no_object_is_an_error_of_the_server(
    kind: str, monkeypatch: pytest.MonkeyPatch
):
    body, content_type = ODD[kind]
    found = httpx.Response(200, content=body, headers={"content-type": content_type})
    monkeypatch.setattr(httpx.Client, "get", lambda *_, **__: found)
    monkeypatch.setattr(httpx.Client, "post", lambda *_, **__: found)
    with pytest.raises(ServerError, match="/server_info: HTTP 200"):
        NOBODY.version()
    if kind == "a page":
        with pytest.raises(ServerError, match="/pause: HTTP 200: <html>"):
            NOBODY.call("/pause", {})
    else:
        assert NOBODY.call("/pause", {}) == {}


def test_servers_get_seeds_that_they_take_and_a_position_more_than_a_trajectory_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A server leaves the last position empty, and refuses more than the model has unless its environment allows it."""
    started: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr(build, "start", lambda argv, control, log, env: started.append((argv, env)))
    made = tiny.params(sampler={"backend": "sglang"}, rollout={"max_context_tokens": 512})
    params = made.model_copy(update={"seed": 2**32 - 1})
    for number in range(2):
        build._start(params, Site(tmp_path, tmp_path, lambda *_: None), number, 40_000)
    assert [argv[argv.index("--random-seed") + 1] for argv, _ in started] == [str(2**32 - 1), "0"]
    for argv, env in started:
        assert argv[argv.index("--context-length") + 1] == "513"
        assert env["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] == "1"


def test_a_port_leaves_room_for_the_ports_that_the_server_derives_from_it():
    assert all(1024 < process.free_port() <= 55_535 for _ in range(40))


SERVER = """
import http.server, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_closing_a_server_ends_its_children_too(tmp_path: Path):
    port = process.free_port()
    running = process.start(
        [sys.executable, "-c", SERVER, str(port)],
        Control(f"http://127.0.0.1:{port}"),
        tmp_path / "logs" / "sglang_0.log",
    )
    running.wait_until_ready(30)
    child = int(running.log.read_text().split()[1])
    assert not _is_gone(child)
    running.close()
    assert not running.is_running
    assert _is_gone(child)


def test_a_server_does_not_take_itself_for_a_rank_of_the_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Under torchrun torch looks for a store at the agent, and the server's own ranks would never meet."""
    place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_PORT": "1"}
    for name, value in {**place, "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    told = "import json, os; print(json.dumps(dict(os.environ)))"
    running = process.start([sys.executable, "-c", told], NOBODY, tmp_path / "sglang_0.log")
    running.popen.wait(30)
    running.close()
    seen = json.loads(running.log.read_text())
    assert not {*place, "TORCHELASTIC_USE_AGENT_STORE"} & set(seen)
    assert seen["NCCL_NVLS_ENABLE"] == "0"
    assert seen["SGLANG_MM_AVOID_RETOKENIZE"] == "1"


def test_a_server_in_a_group_with_the_trainer_has_nccl_settings_like_it(
    monkeypatch: pytest.MonkeyPatch,
):
    """SGLang turns cuMem and NVLS off for itself where nothing is said; SkyRL pull request 143: the sync fails then."""
    monkeypatch.delenv("NCCL_CUMEM_ENABLE", raising=False)
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    apart = process.environment(SglangParams(weight_update="distributed", gpu_offset=1))
    assert (apart["NCCL_CUMEM_ENABLE"], apart["NCCL_NVLS_ENABLE"]) == ("-2", "0")
    assert "NCCL_CUMEM_ENABLE" not in process.environment(SglangParams())
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "1")
    apart = process.environment(SglangParams(weight_update="distributed", gpu_offset=1))
    assert apart["NCCL_CUMEM_ENABLE"] == "1"


def test_a_server_that_dies_at_its_start_shows_the_end_of_its_log(tmp_path: Path):
    argv = [sys.executable, "-c", "print('CUDA out of memory'); raise SystemExit(3)"]
    running = process.start(argv, NOBODY, tmp_path / "sglang_0.log")
    with pytest.raises(ServerError, match=r"status 3; the end of its log(.|\n)*CUDA out of memory"):
        running.wait_until_ready(30)
    running.close()


def test_servers_die_with_the_trainer_even_when_it_is_killed(tmp_path: Path):
    script = f"""
import sys, time
from pathlib import Path
from polyturn.sampler.sglang import process
from polyturn.sampler.sglang.control import Control
running = process.start([sys.executable, "-c", "import time; time.sleep(600)"], Control(""), Path({str(tmp_path / "log")!r}))
print(running.popen.pid, flush=True)
time.sleep(600)
"""
    trainer = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert trainer.stdout is not None
    pid = int(trainer.stdout.readline())
    time.sleep(0.5)  # until the mark is set
    os.kill(trainer.pid, signal.SIGKILL)
    trainer.wait()
    trainer.stdout.close()
    deadline = time.monotonic() + 10
    while not _is_gone(pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert _is_gone(pid)


def _is_gone(pid: int) -> bool:
    found = find(pid)
    return found is None or not found.is_alive


def test_a_rollout_over_the_wire_is_that_of_the_embedded_sampler(
    server: FakeServer, tmp_path: Path
):
    """Seeds decide replies, so that trajectories which go on by themselves equal those in lockstep."""
    settings = RolloutSettings.of(
        tiny.params(
            env={"build": "tests.unit.toy_envs:build_shower"},
            rollout={"max_turns": 3, "max_turn_tokens": 6, "max_new_tokens": 18},
        )
    )
    draw = Draw(seed=5, group_size=2, temperature=1.0)

    def run(sampler: Sampler) -> list[Trajectory]:
        groups = asyncio.run(rollout(tiny.problems(2), sampler, RENDERER, settings, draw))
        return [trajectory for group in groups for trajectory in group.trajectories]

    made = sampler(server, directory=tmp_path)
    alone = run(made)
    together = run(HfSampler(tiny.copy_of(POLICY), RENDERER))
    assert [t.token_ids.tolist() for t in alone] == [t.token_ids.tolist() for t in together]
    assert [t.stop_reason for t in alone] == [t.stop_reason for t in together]


@pytest.mark.parametrize("forgets", [False, True])
def test_turns_whose_keys_and_values_are_lost_are_counted_and_told(
    server: FakeServer, tmp_path: Path, caplog: pytest.LogCaptureFixture, forgets: bool
):
    """A second turn over recomputed ones has other logprobs than over those that were decoded."""
    made = sampler(server, directory=tmp_path)
    server.forgets = forgets
    first = request()
    (reply,) = ask(made, first)
    shown = RENDERER.observation(Message("tool", ("Look again.",))).engine_ids
    second = replace(first, engine_ids=(*first.engine_ids, *reply.token_ids, *shown))
    ask(made, second)
    counts = made.take_counts()
    assert counts.recomputed_turns == int(forgets)
    assert ("may not come out the same again" in caplog.text) == forgets
    computed = reply.prompt_length + len(reply.token_ids) - 1
    assert [counts.cached_tokens[turn] for turn in (1, 2)] == [0, 0 if forgets else computed]
    assert counts.prompt_tokens == {
        1: reply.prompt_length,
        2: reply.prompt_length + len(reply.token_ids) + len(shown),
    }


def test_a_prompt_of_another_length_fails_the_trajectory_alone(server: FakeServer, tmp_path: Path):
    settings = RolloutSettings.of(tiny.params(env={"max_failure_fraction": 0.5}))
    made = sampler(server, directory=tmp_path)
    server.faults = ["longer prompt"]
    draw = Draw(seed=5, group_size=2, temperature=1.0)
    (group,) = asyncio.run(rollout(tiny.problems(1), made, RENDERER, settings, draw))
    reasons = [trajectory.stop_reason for trajectory in group.trajectories]
    assert reasons.count(StopReason.TOKEN_MISMATCH) == 1
