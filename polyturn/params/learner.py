"""Who turns batches into new weights."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from polyturn.params.fields import (
    Beta,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
)


class LoraParams(Section):
    """Low-rank adapters (LoRA, arXiv:2106.09685) on frozen weights; what is published has them merged in."""

    rank: PositiveInt = 16
    alpha: PositiveFloat = 32.0  # the adapters' product is scaled by alpha / rank
    # Linear layers of the language model that get adapters.
    target_modules: Annotated[tuple[str, ...], Field(min_length=1)] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )
    # Linear layers of the vision tower, such as qkv or linear_fc1; needs freeze_vision: false.
    vision_modules: tuple[str, ...] = ()


class LearnerParams(Section):
    """Who turns batches into new weights."""

    backend: Literal["fsdp", "megatron"] = "fsdp"
    num_processes: PositiveInt = 1
    # Megatron only: so many processes share each weight; num_processes / tensor_parallel of them split the samples.
    tensor_parallel: PositiveInt = 1
    # Megatron only: what lies between the shared weights (norms, residuals) is split over these processes by tokens.
    sequence_parallel: bool = False
    # Refused above 1 (docs/learner.md says why).
    pipeline_parallel: PositiveInt = 1
    context_parallel: PositiveInt = 1
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: the GPU where there is one
    num_threads: PositiveInt = 1  # of torch on CPU; two are slower at the demo's size
    lr: PositiveFloat = 3e-4
    warmup_steps: NonNegativeInt = 5  # rollout batches
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    decay_steps: PositiveInt = 40  # horizon: rollout batches from step 0, the warm-up's among them
    min_lr_fraction: Fraction = 0.1
    betas: tuple[Beta, Beta] = (0.9, 0.98)
    eps: PositiveFloat = 1e-8  # AdamW's, added to the root of the second moment
    weight_decay: NonNegativeFloat = 0.0
    grad_clip: PositiveFloat = 1.0
    freeze_vision: bool = True
    micro_batch_tokens: PositiveInt = 4096  # packed tokens of one micro-batch
    # Decoded pictures that are kept in memory, and again the features of a frozen tower; learner and hf sampler each.
    vision_cache_mb: PositiveInt = 512
    # Logits exist for so many tokens at a time; with more than that, the backward pass computes them again.
    logit_chunk_tokens: PositiveInt = 4096
    # Of the computation; trained weights, moments and sums over ranks are float32 either way. A frozen tower
    # computes in model.dtype.
    precision: Literal["float32", "bfloat16"] = "float32"
    activation_checkpointing: bool = (
        False  # compute each layer twice instead of keeping its activations
    )
    # torch.compile layers and loss: on a GPU fewer, larger kernels; the first step takes a minute longer.
    compile: bool = False
    # Several processes: gather a layer's weights anew for the backward pass (false: keep them, more memory).
    reshard_after_forward: bool = True
    lora: LoraParams | None = None  # null: all weights are trained
    # Keep optimizer state, gradients and weights in host memory while sampling (one GPU for both).
    offload: bool = False
    # With several updates per rollout, whose logprobs are the old ones in the ratio: those that the sampler
    # reported, or those of the learner before the first update (one more forward pass).
    old_logprobs: Literal["sampler", "learner"] = "sampler"

    @property
    def is_tower_frozen(self) -> bool:
        """Whether nothing of the vision tower is trained."""
        return self.freeze_vision or (self.lora is not None and not self.lora.vision_modules)

    @model_validator(mode="after")
    def _schedule(self) -> LearnerParams:
        if self.schedule != "constant" and self.warmup_steps >= self.decay_steps:
            raise ValueError(
                f"warmup_steps must be below decay_steps, which is {self.decay_steps}, or the rate has fallen before it has "
                f"risen, got {self.warmup_steps}; raise decay_steps, lower warmup_steps, or set schedule to constant"
            )
        return self

    @model_validator(mode="after")
    def _vision_adapters(self) -> LearnerParams:
        if self.freeze_vision and self.lora is not None and self.lora.vision_modules:
            raise ValueError(
                f"lora.vision_modules trains the vision tower, which freeze_vision: true forbids, got "
                f"{list(self.lora.vision_modules)}; set freeze_vision to false"
            )
        return self

    @model_validator(mode="after")
    def _layout(self) -> LearnerParams:
        if self.num_processes % self.tensor_parallel:
            raise ValueError(
                f"num_processes must be a multiple of tensor_parallel, which is {self.tensor_parallel}, got "
                f"{self.num_processes}; set num_processes to {self.tensor_parallel} or a multiple"
            )
        if self.sequence_parallel and self.tensor_parallel == 1:
            raise ValueError(
                "sequence_parallel splits tokens over the processes of tensor_parallel, which is 1; raise that, or set "
                "sequence_parallel to false"
            )
        return self
