"""A sampler over SGLang servers from params: start them (or take the given ones), choose how weights travel."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from polyturn.params import Params, SglangParams
from polyturn.policy.model import DTYPES, Policy
from polyturn.sampler.sglang.broadcast import DistributedTransfer
from polyturn.sampler.sglang.checksums import engine_hash
from polyturn.sampler.sglang.control import Control
from polyturn.sampler.sglang.fleet import Fleet, Server
from polyturn.sampler.sglang.process import (
    Launch,
    ServerProcess,
    command,
    environment,
    free_port,
    start,
)
from polyturn.sampler.sglang.sampler import SglangSampler
from polyturn.sampler.sglang.weights import (
    DiskTransfer,
    Named,
    TensorTransfer,
    Transfer,
)
from polyturn.sampler.sglang.wire import WireSettings
from polyturn.world import ONE, World

logger = logging.getLogger(__name__)

_NUM_SEEDS = 2**32  # of the servers, whose NumPy takes no larger one


@dataclass(frozen=True)
class Site:
    """Where a run's servers find and leave things.

    Attributes:
        model: Hugging Face directory that servers start from.
        directory: for logs and, with weight_update: disk, weights.
        write_weights: puts tensors into a loadable directory (for weight_update: disk).
    """

    model: Path
    directory: Path
    write_weights: Callable[[Path, Named], None]


def sglang_sampler(policy: Policy, params: Params, site: Site, world: World = ONE) -> SglangSampler:
    """Servers up and healthy, versions looked at; weights are still those of `site.model` (collective).

    Raises:
        ServerError: a server does not come up.
    """
    chosen = params.sampler.sglang
    family = policy.family
    servers = _servers(params, site, world)
    can_compare = chosen.tensor_parallel == 1
    if chosen.check_weights and not can_compare:
        logger.warning(
            "sampler.sglang.check_weights: weights are not compared with tensor_parallel %d, only with 1",
            chosen.tensor_parallel,
        )
    dtype = DTYPES[chosen.dtype]
    fleet = Fleet(
        servers=servers,
        transfer=_transfer(chosen, dtype, site),
        dtype=dtype,
        is_tied=policy.model.config.tie_word_embeddings,
        hash_tensor=engine_hash if chosen.check_weights and can_compare else None,
        check_tensors=chosen.check_tensors,
        restart=None if chosen.urls else _Restart(params, site),
        world=world,
    )
    try:
        fleet.check_versions()
    except BaseException:
        fleet.close()
        raise
    return SglangSampler(
        fleet=fleet,
        settings=WireSettings(family.end_ids, family.banned_ids, chosen.deterministic),
        params=chosen,
        is_vision_frozen=params.learner.freeze_vision,
    )


@dataclass(frozen=True)
class _Restart:
    """Starts a server anew in the place of a dead one."""

    params: Params
    site: Site

    def __call__(self, server: Server) -> None:
        assert server.process is not None
        server.process.close()
        number = int(server.process.log.stem.rpartition("_")[2])
        port = int(server.control.url.rpartition(":")[2])
        server.process = _start(self.params, self.site, number, port)
        server.process.wait_until_ready(self.params.sampler.sglang.start_timeout_s)


def _servers(params: Params, site: Site, world: World) -> list[Server]:
    """The given servers, or those that rank 0 starts and tells the others of."""
    urls = [url.rstrip("/") for url in params.sampler.sglang.urls]
    timeout_s = params.sampler.sglang.control_timeout_s
    if urls:
        return [Server(Control(url, timeout_s)) for url in urls]
    started: list[Server] = []
    with world.together():
        if world.is_main:
            started = _start_all(params, site)
    told = world.broadcast([server.control.url for server in started])
    return started or [Server(Control(url, timeout_s)) for url in told]


def _start_all(params: Params, site: Site) -> list[Server]:
    processes: list[ServerProcess] = []
    try:
        processes += [
            _start(params, site, number, free_port())
            for number in range(params.sampler.sglang.num_servers)
        ]
        for process in processes:
            process.wait_until_ready(params.sampler.sglang.start_timeout_s)
    except BaseException:
        for process in processes:
            process.close()
        raise
    return [Server(process.control, process) for process in processes]


def _start(params: Params, site: Site, number: int, port: int) -> ServerProcess:
    chosen = params.sampler.sglang
    first = chosen.gpu_offset + number * chosen.tensor_parallel
    log = site.directory / "logs" / f"sglang_{number}.log"
    launch = Launch(
        model=site.model,
        dtype=chosen.dtype,
        context_length=params.rollout.max_context_tokens + 1,
        gpus=range(first, first + chosen.tensor_parallel),
        log=log,
    )
    # Servers that do not take requests' seeds would give siblings on two of them equal replies.
    seed = (params.seed + number) % _NUM_SEEDS
    argv = command(launch, chosen, seed=seed, port=port)
    control = Control(f"http://127.0.0.1:{port}", chosen.control_timeout_s)
    return start(argv, control, log, environment(chosen))


def _transfer(chosen: SglangParams, dtype: torch.dtype, site: Site) -> Transfer:
    max_bytes = chosen.bucket_mb * 1_000_000
    if chosen.weight_update == "tensor":
        return TensorTransfer(dtype, max_bytes, chosen.tensor_parallel)
    if chosen.weight_update == "distributed":
        return DistributedTransfer(dtype, max_bytes, chosen.tensor_parallel)
    return DiskTransfer(site.directory / "weights", site.write_weights)
