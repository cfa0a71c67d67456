"""Whole weights under their Hugging Face names, one after the other, from sharded ones and adapters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from polyturn.learner import lora
from polyturn.learner.sharding import whole


@torch.no_grad()
def exported(
    parameters: Mapping[str, nn.Parameter], factors: Mapping[str, float]
) -> Iterator[tuple[str, Tensor]]:
    """Name and whole tensor of each weight, adapters merged in; tied weights come one after the other (collective).

    `factors` are those of `lora.merge_factors`. Weights that are neither sharded over ranks nor adapted are the live ones;
    there is never more than one whole copy of another.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in parameters.items():
        if not lora.is_adapter(name):
            names.setdefault(id(parameter), []).append(name)
    for tied in names.values():
        tensor = _whole(parameters[tied[0]].detach())
        layer = lora.layer_of(tied[0])
        if layer is not None and layer in factors:
            adapters = {
                name: _whole(parameters[name].detach()) for name in lora.adapter_names(layer)
            }
            tensor = lora.merged(tensor, layer, adapters, factors[layer])
        for name in tied:
            yield lora.hf_name(name), tensor


def _whole(tensor: Tensor) -> Tensor:
    """All of a weight; with one rank its shard is all of it, and gathering hundreds of them one by one takes long."""
    if isinstance(tensor, DTensor) and tensor.device_mesh.size() == 1:
        return tensor.to_local()
    return whole(tensor)
