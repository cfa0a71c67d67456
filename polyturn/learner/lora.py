"""Low-rank adapters (LoRA, arXiv:2106.09685) through peft, injected into a policy's own modules."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from polyturn.params import LoraParams

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer

ADAPTER = "default"  # peft's name for the only adapter
_BASE = ".base_layer."
_A, _B = f"lora_A.{ADAPTER}.weight", f"lora_B.{ADAPTER}.weight"


class LoraError(ValueError):
    """The adapters do not fit the model; the message names the params key."""


def add_adapters(model: nn.Module, params: LoraParams, *, seed: int) -> None:
    """Put adapters into the named linear layers and freeze all other weights; the policy's outputs stay as they are.

    Raises:
        LoraError: a named layer does not exist.
    """
    towers = (
        ("language_model", "target_modules", params.target_modules),
        ("visual", "vision_modules", params.vision_modules),
    )
    from peft import LoraConfig, inject_adapter_in_model  # noqa: PLC0415  (seconds; only LoRA needs it)

    chosen: set[str] = set()
    for tower, key, names in towers:
        for name in names:
            layers = _linear_layers(model, tower, name)
            if not layers:
                raise LoraError(
                    f"learner.lora.{key}: no linear layer of {tower} is called {name!r}; there are "
                    f"{', '.join(_linear_names(model, tower))}"
                )
            chosen.update(layers)
    config = LoraConfig(
        r=params.rank,
        lora_alpha=cast("int", params.alpha),  # peft only divides it by the rank
        lora_dropout=0.0,  # dropout would move the ratio away from 1
        # Whole names: the tower's convolution of patches is called proj as well, and merges otherwise.
        target_modules="|".join(map(re.escape, sorted(chosen))),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, model, ADAPTER)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)


def _linear_layers(model: nn.Module, tower: str, name: str) -> list[str]:
    pattern = rf"model\.{tower}\.(.+\.)?{re.escape(name)}"
    return [
        at
        for at, module in model.named_modules()
        if isinstance(module, nn.Linear) and re.fullmatch(pattern, at)
    ]


def _linear_names(model: nn.Module, tower: str) -> list[str]:
    inside = f"model.{tower}."
    return sorted(
        {
            name.rpartition(".")[2]
            for name, module in model.named_modules()
            if name.startswith(inside) and isinstance(module, nn.Linear)
        }
    )


@contextmanager
def switched_off(model: nn.Module) -> Iterator[None]:
    """The policy without its adapters, which is the reference policy.

    peft's own switch also changes what is trainable, which sharded parameters do not take.
    """
    layers = list(_adapted(model).values())
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def merge_factors(model: nn.Module) -> dict[str, float]:
    """The scale of the adapters' product for each layer that has adapters, by the layer's name."""
    return {name: float(layer.scaling[ADAPTER]) for name, layer in _adapted(model).items()}


def _adapted(model: nn.Module) -> dict[str, LoraLayer]:
    from peft.tuners.lora import LoraLayer  # noqa: PLC0415

    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


def is_adapter(name: str) -> bool:
    """Whether a parameter belongs to an adapter."""
    return name.endswith((f".{_A}", f".{_B}"))


def hf_name(name: str) -> str:
    """The name that a parameter has without adapters.

    >>> hf_name("model.layers.0.q_proj.base_layer.weight")
    'model.layers.0.q_proj.weight'
    """
    return name.replace(_BASE, ".")


def layer_of(name: str) -> str | None:
    """The layer whose adapters change this weight, if any can."""
    return name.partition(_BASE)[0] if name.endswith(f"{_BASE}weight") else None


def merged(base: Tensor, layer: str, whole: Mapping[str, Tensor], factor: float) -> Tensor:
    """base [out, in] + factor x B A, in the precision of the adapters, as a tensor of its own.

    `whole` holds the adapters' full tensors by name: A [rank, in] and B [out, rank].
    """
    delta = (whole[f"{layer}.{_B}"] @ whole[f"{layer}.{_A}"]) * factor
    return (base + delta).to(base.dtype)


def adapter_names(layer: str) -> tuple[str, str]:
    """Names of a layer's two adapter weights."""
    return f"{layer}.{_A}", f"{layer}.{_B}"
