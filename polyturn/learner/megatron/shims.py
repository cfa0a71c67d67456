"""What megatron-core needs in order to train without CUDA; with CUDA none of this is applied.

Its code asks for the GPU by name in a few places on the way of a CPU run. Each shim changes one of them, and a test per
shim shows that the installed megatron-core still fails without it.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from packaging.version import Version

_FACTORIES = ("tensor", "zeros", "empty")


@dataclass(frozen=True)
class Shim:
    """Replaces `attribute` of the module or class `owner` by `make(what it was)`, from megatron-core `since` on."""

    owner: str
    attribute: str
    reason: str
    make: Callable[[object], object]
    since: str = "0.16.1"

    def put(self) -> Callable[[], None]:
        """Replace it; what is returned puts back what was there."""
        module, _, name = self.owner.partition(":")
        owner = importlib.import_module(module)
        owner = getattr(owner, name) if name else owner
        original = getattr(owner, self.attribute)
        setattr(owner, self.attribute, self.make(original))
        return lambda: setattr(owner, self.attribute, original)


class _HostTorch:
    """The name `torch` in a module that makes tensors on "cuda": they are made in host memory."""

    def __getattr__(self, name: str) -> object:
        found = getattr(torch, name)
        return _on_host(found) if name in _FACTORIES else found


def _on_host(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def made(*args: object, **kwargs: object) -> torch.Tensor:
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return made


def _host_device(_: object) -> Callable[[], torch.device]:
    return lambda: torch.device("cpu")


def _no_stream(_: object) -> Callable[[], None]:
    return lambda: None


def _host_torch(_: object) -> _HostTorch:
    return _HostTorch()


def _named_as_cuda(original: object) -> Callable[..., object]:
    """Tensor.type() tells megatron.core.optimizer, and nobody else, the name that the tensor would have on a GPU."""
    assert callable(original)

    def named(self: torch.Tensor, *args: object, **kwargs: object) -> object:
        found = original(self, *args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if isinstance(found, str) and caller.startswith("megatron.core.optimizer."):
            return found.replace("torch.", "torch.cuda.")
        return found

    return named


SHIMS = (
    Shim(
        "torch.cuda",
        "current_device",
        "buffers of gradients and of collectives are made on this device",
        _host_device,
    ),
    Shim(
        "torch.cuda",
        "current_stream",
        "gradients wait on it for replays of CUDA graphs, of which there are none",
        _no_stream,
        since="0.19",
    ),
    Shim(
        "torch:Tensor",
        "type",
        "the distributed optimizer and clipping look for names such as torch.cuda.FloatTensor",
        _named_as_cuda,
    ),
    Shim(
        "megatron.core.optimizer.clip_grads",
        "torch",
        "norms of gradients are added up on 'cuda'",
        _host_torch,
    ),
    Shim(
        "megatron.core.utils",
        "torch",
        "so is the norm that stands in for Apex's kernel",
        _host_torch,
    ),
    Shim(
        "megatron.core.optimizer.optimizer",
        "torch",
        "the flag of overflowing gradients and the loss scale lie on 'cuda'",
        _host_torch,
    ),
)
_is_applied = False


def apply() -> None:
    """Apply all shims where there is no CUDA; once in a process."""
    global _is_applied  # noqa: PLW0603
    if torch.cuda.is_available() or _is_applied:
        return
    _is_applied = True
    for shim in needed():
        shim.put()


def needed() -> list[Shim]:
    """The shims of the installed megatron-core."""
    installed = Version(importlib.metadata.version("megatron-core"))
    return [shim for shim in SHIMS if Version(shim.since) <= installed]
