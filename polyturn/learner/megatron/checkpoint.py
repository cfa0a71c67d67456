"""Float32 weights and optimizer state in and out of Megatron-Core's distributed checkpoints (torch_dist).

A directory that some layout of ranks wrote can be read by any other. Keys are Megatron's:
`optimizer.state.fp32_param.NAME`, `optimizer.state.exp_avg.NAME` and `optimizer.state.exp_avg_sq.NAME` for each
weight that is trained; a frozen tower is not in it. Steps by part and the layout lie beside them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict, cast

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_saver import save

from polyturn.learner.megatron.optimizer import LANGUAGE, MOMENTS, Part, Stepper
from polyturn.learner.megatron.parallel import Layout
from polyturn.learner.state import DiskWriter, StateError, told_plainly

logger = logging.getLogger(__name__)

_MAIN = "fp32_param"
_KINDS = (_MAIN, *MOMENTS)
_Sharded = ShardedTensor | ShardedTensorFactory
_State = dict[str, object]


class _Loaded(TypedDict):
    """What a directory holds."""

    tensors: dict[str, Tensor]
    steps: dict[str, int]
    layout: dict[str, int]


class _Writer(TorchDistSaveShardedStrategy):
    """Writes in this process and thread; Megatron's own would fork, which threads do not survive."""

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path | str) -> None:
        sharded, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
        with told_plainly():
            save(
                mcore_to_pyt_state_dict(sharded, False),
                storage_writer=DiskWriter(checkpoint_dir),
                planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
            )


@dataclass(frozen=True)
class MegatronState:
    """What training changes."""

    stepper: Stepper
    layout: Layout

    def on_host(self) -> _State:
        """Copies of everything in host memory, as it is now, on the ranks that write it (collective)."""
        tensors: dict[str, object] = {}
        for part_name, part in self.stepper.parts.items():
            for name, sharded in self._described(part_name, part):
                parameter = cast("nn.Parameter", sharded.data)
                for kind, value in self._values(part, parameter):
                    if self.layout.is_writer:
                        tensors[f"{part_name}.{name}.{kind}"] = _of_kind(sharded, kind, value)
        return {"tensors": tensors, **self._beside()}

    def write(self, state: _State, directory: Path) -> None:
        """Write what `on_host` gave (collective over the default group, which nothing else uses).

        Raises:
            OSError: a file cannot be written.
        """
        dist_checkpointing.save(state, str(directory), _Writer("torch_dist", 1))

    def read(self, directory: Path) -> None:
        """Take over what any layout of ranks wrote (collective).

        Raises:
            StateError: tensors are missing or unknown, or their shapes differ.
        """
        wanted = {
            f"{part_name}.{name}.{kind}": _of_kind(
                sharded, kind, torch.empty(cast("Tensor", sharded.data).shape)
            )
            for part_name, part in self.stepper.parts.items()
            for name, sharded in self._described(part_name, part)
            for kind in _KINDS
        }
        _check(directory, wanted)
        loaded = cast("_Loaded", dist_checkpointing.load({"tensors": wanted}, str(directory)))
        tensors = loaded["tensors"]
        for part_name, part in self.stepper.parts.items():
            part.set_num_steps(loaded["steps"][part_name])
            for name, parameter in part.parameters.items():
                _take(part, parameter, {k: tensors[f"{part_name}.{name}.{k}"] for k in _KINDS})
        if loaded["layout"] != self._sizes:
            logger.warning(
                "the state in %s was written by %s ranks and is continued by %s: numbers agree up to rounding only",
                *(directory, _told(loaded["layout"]), _told(self._sizes)),
            )

    def _beside(self) -> _State:
        """What is the same on all ranks."""
        return {
            "steps": {name: part.num_steps for name, part in self.stepper.parts.items()},
            "layout": self._sizes,
        }

    @property
    def _sizes(self) -> dict[str, int]:
        return {"tensor": self.layout.tensor.size, "data": self.layout.data.size}

    def _described(self, part_name: str, part: Part) -> Iterator[tuple[str, _Sharded]]:
        """Each trained weight with its place in the whole model."""
        known: dict[int, _Sharded] = {}
        if part_name == LANGUAGE:
            described = part.module.sharded_state_dict(prefix=f"{LANGUAGE}.")  # pyright: ignore[reportCallIssue]
            known = {
                id(found.data): found
                for found in nested_values(described)
                if isinstance(found, _Sharded)
            }
        for name, parameter in part.parameters.items():
            yield (
                name,
                known.get(id(parameter))
                or ShardedTensor.from_rank_offsets(
                    f"{part_name}.{name}",
                    parameter,
                    replica_id=(0, self.layout.tensor.rank, self.layout.data.rank),
                ),
            )

    def _values(self, part: Part, parameter: nn.Parameter) -> Iterator[tuple[str, Tensor]]:
        """This tensor rank's part of main weight and moments, whole, in host memory (collective)."""
        main = part.slice_of(parameter).main
        state: Mapping[str, Tensor] = {} if main is None else {_MAIN: main, **part.state_of(main)}
        for kind in _KINDS:
            yield kind, part.gathered(parameter, state.get(kind)).cpu()


def _of_kind(sharded: _Sharded, kind: str, value: Tensor) -> _Sharded:
    """The description of a weight, for another tensor of its shape."""
    key = f"optimizer.state.{kind}.{sharded.key}"
    if isinstance(sharded, ShardedTensorFactory):
        return replace(sharded, key=key, data=value)
    return replace(sharded, key=key, data=value, dtype=value.dtype)


def _take(part: Part, parameter: nn.Parameter, values: Mapping[str, Tensor]) -> None:
    """Set a weight, and of its main weight and moments what this rank steps."""
    parameter.data.copy_(values[_MAIN])
    own = part.slice_of(parameter)
    if own.main is None:
        return
    for kind, target in ((_MAIN, own.main.data), *part.state_of(own.main).items()):
        if kind in _KINDS:
            target.copy_(values[kind].view(-1)[own.start : own.stop])


def _check(directory: Path, wanted: Mapping[str, _Sharded]) -> None:
    """Compare names and shapes with what the directory holds.

    Raises:
        StateError: they differ.
    """
    own: dict[str, ShardedTensor] = {}
    for one in wanted.values():
        built = one.build() if isinstance(one, ShardedTensorFactory) else one
        shards = [built] if isinstance(built, ShardedTensor) else list(nested_values(built))
        own |= {shard.key: shard for shard in shards}
    metadata = FileSystemReader(directory).read_metadata().state_dict_metadata
    saved = {k: v.size for k, v in metadata.items() if isinstance(v, TensorStorageMetadata)}
    wrong = {
        "missing": sorted(own.keys() - saved.keys()),
        "unknown": sorted(saved.keys() - own.keys()),
        "of another shape": sorted(
            key for key in own.keys() & saved.keys() if not _fits(own[key], saved[key])
        ),
    }
    if told := [f"{len(n)} {kind}: {', '.join(n[:10])}" for kind, n in wrong.items() if n]:
        raise StateError(
            f"the learner state in {directory} is not of this model and these learner params: {'; '.join(told)}"
        )


def _fits(shard: ShardedTensor, saved: torch.Size) -> bool:
    """Whether the shapes are equal; a vocabulary may be padded for other ranks."""
    skipped = 1 if shard.allow_shape_mismatch else 0
    return tuple(saved)[skipped:] == tuple(shard.global_shape)[skipped:]


def _told(layout: Mapping[str, int]) -> str:
    return f"{layout['data']} x {layout['tensor']}"
