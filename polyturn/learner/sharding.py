"""Sharding of a policy over ranks with FSDP2 (torch.distributed.fsdp.fully_shard).

Vision blocks and decoder layers are units of their own. Everything else (embedding and tied head, norms, the tower's
patch embedding and mergers) belongs to the root, whose forward is the whole computation of a batch: its hooks gather
these weights before anything runs.

A tower that is not trained stays whole on every rank: each may then encode the pictures that it needs, at any time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from polyturn.params import LearnerParams


class Root(nn.Module):
    """A policy's weights under one module, whose forward is any computation on the policy's modules.

    It returns a tuple of tensors, in which FSDP finds what the backward pass starts from.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Run `compute`."""
        return compute()


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder's layers, first to last."""
    return list(cast("nn.ModuleList", model.model.language_model.layers))


def vision_blocks(model: PreTrainedModel) -> list[nn.Module]:
    """The vision tower's blocks, first to last."""
    return list(cast("nn.ModuleList", model.model.visual.blocks))


def checkpoint_activations(model: PreTrainedModel, *, with_vision: bool) -> None:
    """Let each layer keep only its input and compute the rest again in the backward pass.

    transformers' own switch works in training mode only, which would also switch dropout on.
    """
    for layer in decoder_layers(model) + (vision_blocks(model) if with_vision else []):
        layer.forward = functools.partial(
            checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False
        )


def use_precision(model: PreTrainedModel, params: LearnerParams) -> None:
    """Make trained weights float32; with float32 computation all others too. Nothing is rounded."""
    for parameter in model.parameters():
        if parameter.requires_grad or params.precision == "float32":
            parameter.data = parameter.data.float()


def apply(root: Root, mesh: DeviceMesh, params: LearnerParams) -> None:
    """Shard a policy over the ranks of `mesh`, in place; gradients are sums over ranks, in float32."""
    model = root.model
    visual = cast("nn.Module", model.model.visual)
    shard = functools.partial(
        fully_shard,
        mesh=mesh,
        mp_policy=MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if params.precision == "bfloat16" else None,
            reduce_dtype=torch.float32,
            # The modules' inputs have the right type by themselves; rotary angles must stay float32.
            cast_forward_inputs=False,
        ),
    )
    layers, whole_ones = decoder_layers(model), set[nn.Parameter]()
    if any(parameter.requires_grad for parameter in visual.parameters()):
        layers += vision_blocks(model)
    else:
        visual.to(mesh.device_type)
        whole_ones = set(visual.parameters())
    for layer in layers:
        shard(layer, reshard_after_forward=params.reshard_after_forward and mesh.size() > 1)
    shard(root, ignored_params=whole_ones)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            # FSDP's default is a mean over ranks, but the loss is divided by the whole update's denominator already.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def expect_more(root: Root, has_more: bool) -> None:
    """Say whether further micro-batches of the same update follow the next backward pass.

    With a single rank nothing is gained by giving weights back and summing gradients after each of them: both then
    stay as they are until the last one.
    """
    if dist.get_world_size() > 1:
        return
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(not has_more, recurse=False)
            module.set_reshard_after_backward(not has_more, recurse=False)
            module.set_is_last_backward(not has_more)


def reshard(root: Root) -> None:
    """Drop gathered weights after a pass without backward; they would miss the next update."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def is_needed(num_ranks: int, params: LearnerParams) -> bool:
    """Whether weights are sharded: over several ranks, or over one to keep float32 weights of a bfloat16 computation."""
    return num_ranks > 1 or params.precision == "bfloat16"


def mesh_of(device: torch.device) -> DeviceMesh:
    """All ranks in one dimension; a run of one process without a process group gets one of its own."""
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    return init_device_mesh(device.type, (dist.get_world_size(),))


def whole(tensor: Tensor) -> Tensor:
    """All of a sharded tensor on every rank (collective); a tensor that is not sharded is itself."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
