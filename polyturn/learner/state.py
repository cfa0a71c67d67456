"""Weights and optimizer state of a learner, in and out of torch.distributed.checkpoint directories.

Names are flat: `model/NAME` (Hugging Face's, or peft's for adapters), `optimizer/NAME/exp_avg` and so on. A directory
that some ranks wrote can be read by any number of ranks.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import STORAGE_TYPES, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.futures import Future

from polyturn.learner.offload import local

logger = logging.getLogger(__name__)

_MOMENTS = ("exp_avg", "exp_avg_sq")
_RANKS = "num_ranks"


class StateError(ValueError):
    """A directory does not hold the state of this learner; the message names the tensors."""


class DiskWriter(FileSystemWriter):
    """Tells of a full disk by the OSError that it is: errors reach other ranks without their causes."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            raise _os_error(error) or error from None


@dataclass(frozen=True)
class LearnerState:
    """The tensors that training changes; `parameters` by name, all that the optimizer has among them.

    `group` is of gloo and used by nothing else, so that states can be written in the background; None: the
    weights are not sharded.
    """

    parameters: Mapping[str, nn.Parameter]
    optimizer: torch.optim.Optimizer
    group: dist.ProcessGroup | None

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name; moments that do not exist yet are made, as the first step would."""
        found: dict[str, Tensor] = {_RANKS: torch.tensor(self._num_ranks)}
        for name, parameter in self.parameters.items():
            found[f"model/{name}"] = parameter.detach()
            if parameter.requires_grad:
                moments = self._moments(parameter)
                found |= {f"optimizer/{name}/{key}": value for key, value in moments.items()}
        return found

    def on_host(self) -> dict[str, Tensor]:
        """Copies of all tensors in host memory, as they are now; sharded ones stay sharded."""
        mesh = None
        if self.group is not None:
            mesh = DeviceMesh.from_group(self.group, "cpu")
        return {name: _copied(tensor, mesh) for name, tensor in self.tensors().items()}

    def write(self, tensors: Mapping[str, Tensor], directory: Path) -> None:
        """Write tensors that `tensors` or `on_host` gave (collective).

        Raises:
            OSError: a file cannot be written.
        """
        with told_plainly():
            save(
                dict(tensors),
                storage_writer=DiskWriter(directory),
                process_group=self.group,
                no_dist=self.group is None,
            )

    def read(self, directory: Path) -> None:
        """Take over what another learner wrote, with any number of ranks (collective).

        Raises:
            StateError: tensors are missing or unknown, or their shapes differ.
        """
        own = self.tensors()
        saved = FileSystemReader(directory).read_metadata().state_dict_metadata
        wrong = {
            "missing": sorted(own.keys() - saved.keys()),
            "unknown": sorted(saved.keys() - own.keys()),
            "of another shape": sorted(
                name for name in own.keys() & saved.keys() if not _fits(own[name], saved[name])
            ),
        }
        if any(wrong.values()):
            told = "; ".join(
                f"{len(names)} {kind}: {', '.join(names[:10])}"
                for kind, names in wrong.items()
                if names
            )
            raise StateError(
                f"the learner state in {directory} is not of this model and these learner params: {told}"
            )
        with told_plainly():
            load(
                own,
                storage_reader=FileSystemReader(directory),
                process_group=self.group,
                no_dist=self.group is None,
            )
        ranks = int(own[_RANKS])
        if ranks != self._num_ranks:
            logger.warning(
                "the state in %s was written by %d ranks and is continued by %d: numbers agree up to rounding only",
                *(directory, ranks, self._num_ranks),
            )

    @property
    def _num_ranks(self) -> int:
        return 1 if self.group is None else dist.get_world_size(self.group)

    def _moments(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        state = self.optimizer.state[parameter]
        if not state:
            is_fused = bool(self.optimizer.defaults["fused"])
            device = parameter.device if is_fused else torch.device("cpu")
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
            for key in _MOMENTS:
                state[key] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return {key: state[key] for key in ("step", *_MOMENTS)}


def _fits(tensor: Tensor, saved: STORAGE_TYPES) -> bool:
    return isinstance(saved, TensorStorageMetadata) and saved.size == tensor.size()


def _copied(tensor: Tensor, mesh: DeviceMesh | None) -> Tensor:
    own = local(tensor)
    copy = torch.empty(own.shape, dtype=own.dtype).copy_(own)
    if mesh is None or not isinstance(tensor, DTensor):
        return copy
    return DTensor.from_local(
        copy,
        mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


@contextmanager
def told_plainly() -> Iterator[None]:
    """Errors as what they were on the rank that failed, and no warning about a run of one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        try:
            yield
        except CheckpointException as error:
            raise _cause(error) from None


def _cause(error: CheckpointException) -> Exception:
    """What went wrong on a rank; a full disk comes out as the OSError that it is."""
    causes = [cause for cause, _ in error.failures.values()]
    for cause in causes:
        if (found := _os_error(cause)) is not None:
            return found
    return RuntimeError(f"learner state: {causes[0]}")


def _os_error(error: BaseException) -> OSError | None:
    """The error of the disk that another one comes from."""
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, OSError):
        seen = seen.__cause__ or seen.__context__
    return seen
