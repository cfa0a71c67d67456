"""The ranks of a run as Megatron-Core's groups: who shares weights with whom, and who has other samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from polyturn.learner.megatron import shims, versions
from polyturn.params import LearnerParams
from polyturn.world import World


@dataclass(frozen=True)
class Layout:
    """This rank's place: `data` are the ranks that split the samples, `tensor` those that share every weight.

    Rank r of a run has tensor rank r % tensor_parallel, so that ranks that share weights are neighbours. Training
    talks over these groups and never over the default one, which belongs to checkpoints: they are written in the
    background.
    """

    data: World  # without a group: sizes and ranks alone
    tensor: World
    data_group: dist.ProcessGroup
    tensor_group: dist.ProcessGroup

    @property
    def is_writer(self) -> bool:
        """Whether this rank is the one of its data group that writes what all of them have."""
        return self.data.is_main


def set_up(world: World, params: LearnerParams, device: torch.device) -> Layout:
    """Make Megatron-Core's groups for the ranks of `world`, or take those of an earlier learner (collective).

    Raises:
        MegatronError: megatron-core is too old.
    """
    versions.check()
    shims.apply()
    _join(device)
    tensor_size = params.tensor_parallel
    if (
        parallel_state.model_parallel_is_initialized()
        and parallel_state.get_tensor_model_parallel_world_size() != tensor_size
    ):
        parallel_state.destroy_model_parallel()
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tensor_size, create_gloo_process_groups=False
        )
    if device.type == "cuda":
        # Its attention forks this generator even though nothing is dropped.
        tensor_parallel.model_parallel_cuda_manual_seed(0)
    return Layout(
        data=World(
            parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
        ),
        tensor=World(world.rank % tensor_size, tensor_size),
        data_group=cast("dist.ProcessGroup", parallel_state.get_data_parallel_group()),
        tensor_group=cast("dist.ProcessGroup", parallel_state.get_tensor_model_parallel_group()),
    )


def _join(device: torch.device) -> None:
    """Megatron-Core needs a process group even for one process."""
    if dist.is_initialized():
        return
    parallel_state.destroy_model_parallel()  # groups of a process group that has gone
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
