"""Megatron-Core's gradient buffers and distributed optimizer over the parts of a model that are trained.

Each part (language model, vision tower) has an optimizer of its own, since an update without pictures leaves the
tower as it is, its moments and its count of steps included. Gradients are summed over data-parallel ranks, each of
which then steps its slice of every weight: `Slice` says which. Shapes: W elements of this rank's part of a weight,
S those of its slice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import ChainedOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from polyturn.learner.megatron.parallel import Layout
from polyturn.params import LearnerParams

MOMENTS = ("exp_avg", "exp_avg_sq")
LANGUAGE = "language_model"  # the part whose modules know how their weights are shared
TOWER = "visual"


@dataclass(frozen=True)
class Slice:
    """What this data-parallel rank steps of one weight: elements start to stop of it, flat; maybe none.

    `main` [S] is the float32 weight that is stepped, None where there is no element.
    """

    start: int
    stop: int
    main: nn.Parameter | None


class Part:
    """A module that is stepped as a whole."""

    def __init__(
        self, module: nn.Module, config: TransformerConfig, params: LearnerParams, layout: Layout
    ) -> None:
        self.module = module
        self._layout = layout
        self.buffered = DistributedDataParallel(
            config,
            DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True),
            module,
        )
        chained = get_megatron_optimizer(
            _config(params),
            [self.buffered],
            config_overrides={},  # weight decay on every weight, norms too, as the FSDP learner has it
            use_gloo_process_groups=False,
        )
        assert isinstance(chained, ChainedOptimizer)
        (optimizer,) = chained.chained_optimizers
        assert isinstance(optimizer, DistributedOptimizer)
        self.optimizer = optimizer
        for group in self.optimizer.optimizer.param_groups:
            if isinstance(optimizer.optimizer, torch.optim.AdamW):
                group["fused"] = all(main.is_cuda for main in group["params"])

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """What is trained, by its name in the module."""
        return {name: p for name, p in self.module.named_parameters() if p.requires_grad}

    def slice_of(self, parameter: nn.Parameter) -> Slice:
        """What this rank steps of a parameter."""
        if parameter not in self.optimizer.model_param_group_index_map:
            return Slice(0, 0, None)
        group, order = self.optimizer.model_param_group_index_map[parameter]
        found = self.optimizer._get_model_param_range_map(parameter)["param"]
        main = self.optimizer.optimizer.param_groups[group]["params"][order]
        return Slice(found.start, found.end, main)

    def state_of(self, main: nn.Parameter) -> dict[str, Tensor]:
        """AdamW's state of a slice; what does not exist yet is made, as the first step would."""
        inner = self.optimizer.optimizer
        state = inner.state[main]
        if not state:
            if isinstance(inner, torch.optim.AdamW):  # fused ones of others count steps by group
                state["step"] = torch.zeros((), dtype=torch.float32, device=main.device)
            for key in MOMENTS:
                state[key] = torch.zeros_like(main, memory_format=torch.preserve_format)
        return state

    @property
    def num_steps(self) -> int:
        """How many steps were taken; the same on all ranks."""
        for main in self._mains():
            return int(self._steps_of(main)["step"])
        return 0

    def set_num_steps(self, number: int) -> None:
        """Go on as if after so many steps."""
        for main in self._mains():
            holder = self._steps_of(main)
            step = holder["step"]
            holder["step"] = torch.full_like(step, number) if isinstance(step, Tensor) else number

    def gathered(self, parameter: nn.Parameter, values: Tensor | None) -> Tensor:
        """All slices of a weight together, of values like its main weight [S]: [W], whole on every rank (collective).

        A rank without a slice gives None.
        """
        own = self.slice_of(parameter)
        whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
        if values is not None:
            whole[own.start : own.stop] = values.detach().view(-1)
        if self._layout.data.size > 1:
            dist.all_reduce(whole, group=self._layout.data_group)  # the others have zeros there
        return whole.view(parameter.shape)

    def tensors(self) -> Iterator[Tensor]:
        """What lives on the device beside gradients: weights, main weights, moments."""
        yield from self.module.parameters()
        for main in self._mains():
            yield main
            yield from (value for value in self.state_of(main).values() if value.dim())

    def gradient_buffers(self) -> list[Tensor]:
        """The memory of all gradients."""
        buffers = cast("Sequence[Any]", self.buffered.buffers)
        return [buffer.grad_data for buffer in buffers]

    def _mains(self) -> Iterator[nn.Parameter]:
        for group in self.optimizer.optimizer.param_groups:
            yield from group["params"]

    def _steps_of(self, main: nn.Parameter) -> dict[str, Any]:
        """Where the count of steps is kept: with the slice, or by fused optimizers with its group."""
        state = self.state_of(main)
        if "step" in state:
            return state
        groups = self.optimizer.optimizer.param_groups
        (group,) = (g for g in groups if any(one is main for one in g["params"]))
        group.setdefault("step", 0)
        return group


class Stepper:
    """All parts that are trained, by name: gradients and their norm together, steps apart."""

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        config: TransformerConfig,
        params: LearnerParams,
        layout: Layout,
    ) -> None:
        self._max_norm = params.grad_clip
        self._layout = layout
        self.parts = {
            name: Part(module, config, params, layout)
            for name, module in modules.items()
            if any(parameter.requires_grad for parameter in module.parameters())
        }

    def set_main(self, parameter: nn.Parameter, exact: Tensor) -> None:
        """Start from this weight [W] instead of the rounded one that the module has; what is not trained stays."""
        for part in self.parts.values():
            own = part.slice_of(parameter)
            if own.main is not None:
                own.main.data.copy_(exact.reshape(-1)[own.start : own.stop])

    def zero_gradients(self) -> None:
        """Begin an update."""
        for part in self.parts.values():
            part.buffered.zero_grad_buffer()
            part.optimizer.zero_grad()

    def expect_more(self, has_more: bool) -> None:
        """Nothing: gradients stay this rank's own until `finish_gradients`."""

    def finish_gradients(self) -> float:
        """Sum over the ranks what each has of a gradient, and clip to learner.grad_clip (collective).

        Returns the norm before, over all weights of all ranks.
        """
        self._sum_gradients()
        norm = math.hypot(*(float(part.optimizer.get_grad_norm()) for part in self.parts.values()))
        if math.isfinite(norm):
            for part in self.parts.values():
                weights: list[Tensor] = [*part.optimizer.get_parameters()]
                clip_grad_by_total_norm_fp32(weights, self._max_norm, norm)
        return norm

    def step(self, learning_rate: float, *, with_tower: bool) -> None:
        """Step and give all data-parallel ranks the new weights (collective).

        Without `with_tower` the tower takes no step: the zeros in its buffers are no gradient.
        """
        for name, part in self.parts.items():
            if with_tower or name != TOWER:
                for group in part.optimizer.param_groups:
                    group["lr"] = learning_rate
                part.optimizer.step_with_ready_grads()

    def _sum_gradients(self) -> None:
        """Of the tower's each tensor rank has what its own pictures give."""
        if TOWER in self.parts and self._layout.tensor.size > 1:
            for buffer in self.parts[TOWER].gradient_buffers():
                dist.all_reduce(buffer, group=self._layout.tensor_group)
        finalize_model_grads([part.buffered for part in self.parts.values()])
        for part in self.parts.values():
            part.optimizer.prepare_grads()


def _config(params: LearnerParams) -> OptimizerConfig:
    is_half = params.precision == "bfloat16"
    return OptimizerConfig(
        optimizer="adam",
        lr=params.lr,
        weight_decay=params.weight_decay,
        adam_beta1=params.betas[0],
        adam_beta2=params.betas[1],
        adam_eps=params.eps,
        bf16=is_half,
        params_dtype=torch.bfloat16 if is_half else torch.float32,
        use_distributed_optimizer=True,
        clip_grad=params.grad_clip,
    )
