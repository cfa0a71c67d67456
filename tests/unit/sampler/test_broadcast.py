"""Weights that are broadcast to servers: a real group of processes' own kind (gloo), and members that fall out of it."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from polyturn.sampler.sglang.broadcast import DistributedTransfer
from polyturn.sampler.sglang.control import Control, ServerError
from tests.unit import tiny
from tests.unit.sampler.sglang_server import FakeServer, serving

POLICY = tiny.qwen3()


def custom_group(
    *, backend: str, store: dist.Store, world_size: int, rank: int, group_name: str
) -> dist.ProcessGroup:
    """SGLang's init_custom_process_group for a given store."""
    kind = c10d.Backend(backend)
    name = c10d.GroupName(group_name)
    made, _ = c10d._new_process_group_helper(
        world_size, rank, [], kind, store, group_name=name, timeout=c10d.default_pg_timeout
    )
    c10d._world.pg_group_ranks[made] = {each: each for each in range(world_size)}
    return made


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeServer]]:
    engine = ModuleType("sglang.srt.utils")
    engine.init_custom_process_group = custom_group  # type: ignore[attr-defined]
    for name in ("sglang", "sglang.srt"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "sglang.srt.utils", engine)
    with ExitStack() as stack:
        yield [stack.enter_context(serving(FakeServer(tiny.copy_of(POLICY)))) for _ in range(2)]


def controls(servers: list[FakeServer]) -> list[Control]:
    return [Control(server.url, 20.0) for server in servers]


def weights(shift: float) -> dict[str, torch.Tensor]:
    named = POLICY.model.named_parameters()
    return {name: parameter.detach() + shift for name, parameter in named}


def test_every_server_holds_what_was_broadcast_also_under_torchrun(
    servers: list[FakeServer], monkeypatch: pytest.MonkeyPatch
):
    """torchrun's agent store stands in the environment of each of its ranks; the group meets elsewhere."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    transfer = DistributedTransfer(torch.float32, 100_000, 1, backend="gloo")
    for version in (1, 2):
        sent = weights(0.5 * version)
        transfer.push(controls(servers), iter(sent.items()), version)
        for server in servers:
            held = dict(server.policy.model.named_parameters())
            assert all(torch.equal(held[name], tensor) for name, tensor in sent.items())
            assert server.version == str(version)
            assert list(server.groups) == ["polyturn_weights_1"]
    assert servers[0].calls.count("/update_weights_from_distributed") > 2  # several buckets
    transfer.close()
    wait_until_left(servers)


def test_a_member_that_refuses_ends_the_wait_for_all_and_the_next_group_is_new(
    servers: list[FakeServer],
):
    """The others hang in a broadcast that never comes; a bound of NCCL's own would be ten minutes."""
    transfer = DistributedTransfer(torch.float32, 10**9, 1, backend="gloo")
    servers[0].broadcasts, servers[1].broadcasts = "hang", "refuse"
    started = time.monotonic()
    with pytest.raises(ServerError, match="no such weight"):
        transfer.push(controls(servers), iter(weights(1.0).items()), 1)
    assert time.monotonic() - started < 4  # the other one answers after 5
    servers[1].broadcasts = "take"
    transfer.push(controls(servers[1:]), iter(weights(2.0).items()), 2)
    assert servers[1].version == "2"
    assert "polyturn_weights_2" in servers[1].groups
    transfer.close()


def test_a_group_of_which_a_server_has_gone_is_left_all_the_same(servers: list[FakeServer]):
    transfer = DistributedTransfer(torch.float32, 10**9, 1, backend="gloo")
    with serving(FakeServer(tiny.copy_of(POLICY))) as third:
        transfer.push(controls([servers[0], third]), iter(weights(1.0).items()), 1)
        third.groups.clear()
    transfer.forget()
    wait_until_left(servers)
    transfer.push(controls(servers[:1]), iter(weights(2.0).items()), 2)
    assert servers[0].version == "2"
    transfer.close()


def wait_until_left(servers: list[FakeServer]) -> None:
    end = time.monotonic() + 10
    while any(server.groups for server in servers):
        assert time.monotonic() < end, [list(server.groups) for server in servers]
        time.sleep(0.05)
