"""The policy before any training."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from polyturn.params.fields import (
    NonNegativeInt,
    ObjectPath,
    PositiveFloat,
    PositiveInt,
    Section,
)


class SmallModelParams(Section):
    """The small Qwen3-VL that is built where no checkpoint is named (about 1 M parameters)."""

    hidden_size: PositiveInt = 128
    num_layers: PositiveInt = 2
    num_heads: PositiveInt = 4
    num_kv_heads: PositiveInt = 2
    head_dim: PositiveInt = 32
    intermediate_size: PositiveInt = 384
    vision_hidden_size: PositiveInt = 96
    vision_num_layers: PositiveInt = 2
    vision_num_heads: PositiveInt = 4
    vision_intermediate_size: PositiveInt = 192
    patch_size: PositiveInt = 8
    deepstack_layers: tuple[NonNegativeInt, ...] = (0,)
    tie_embeddings: bool = True
    init_std: PositiveFloat = 0.05
    vocab_size: Annotated[int, Field(ge=300, le=150_000)] = 512  # of the trained byte-level BPE
    # callable that gives further texts to train the tokenizer on, e.g. polyturn.envs.geo3k:texts
    texts: ObjectPath | None = None
    image_pixels: PositiveInt = 48 * 48  # the processor shrinks what the model sees to it
    image_mean: float = 1.0  # white becomes 0: a reader of black glyphs learns sooner
    image_std: PositiveFloat = 0.25

    @model_validator(mode="after")
    def _heads(self) -> SmallModelParams:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads, which is {self.num_kv_heads}, got {self.num_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even, for rotary positions, got {self.head_dim}")
        if self.vision_hidden_size % (4 * self.vision_num_heads):
            raise ValueError(
                f"vision_hidden_size must be a multiple of {4 * self.vision_num_heads}, 4 x vision_num_heads, for rotary "
                f"positions of rows and columns, got {self.vision_hidden_size}"
            )
        return self

    @model_validator(mode="after")
    def _deepstack(self) -> SmallModelParams:
        layers = self.deepstack_layers
        if len(set(layers)) < len(layers) or max(layers, default=0) >= self.vision_num_layers:
            raise ValueError(
                f"deepstack_layers are different layers of the tower, 0 to {self.vision_num_layers - 1}, got {list(layers)}"
            )
        if len(layers) > self.num_layers:
            raise ValueError(
                f"deepstack_layers go to as many layers of the decoder, which has {self.num_layers}, got {list(layers)}"
            )
        return self


class ModelParams(Section):
    """The policy before any training."""

    path: str | None = None  # None: build the small one; else directory, s3:// URI or hub id
    revision: str | None = None  # pinned revision of a hub id; the resolved hash is recorded
    dtype: Literal["float32", "bfloat16"] = "float32"
    attention: Literal["sdpa", "eager"] = "sdpa"
    max_positions: PositiveInt = 4096  # of the small model's rotary embedding
    max_prompt_tokens: PositiveInt = 2048  # longer prompts are set aside by data.fit()
    small: SmallModelParams = SmallModelParams()

    @model_validator(mode="after")
    def _revision(self) -> ModelParams:
        if self.revision is not None and (self.path is None or "://" in self.path):
            raise ValueError(
                f"revision {self.revision!r} pins a commit of a hub id, and path is {self.path}; set it to null, or path to "
                "the hub id"
            )
        return self
