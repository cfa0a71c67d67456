"""Operations of a Qwen-VL's passes, counted from its config.json: two for each multiply-add of a matrix product.

Source of the count: PaLM (arXiv:2204.02311), appendix B, without its approximation by parameters. Norms, activations and
softmax are left out, as is customary.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

_BACKWARD = 2.0  # a backward pass costs two forward passes: gradients of inputs and of weights

# Dense bfloat16 TFLOP/s of one GPU, by words of its name (NVIDIA's data sheets, SXM where nothing else is said).
PEAK_TFLOPS: Mapping[str, float] = {
    "B200": 2250.0, "H200": 989.0, "H100 PCIe": 756.0, "H100 NVL": 835.0, "H100": 989.0, "H20": 148.0, "A100": 312.0,
    "L40S": 362.0, "L40": 181.0, "L4": 121.0, "A10G": 70.0,
}  # fmt: skip


@dataclass(frozen=True)
class Work:
    """What went through the model: `tokens` with their image pads, in sequences of `mean_length`; `scored` tokens whose
    logits were computed; `patches` of pictures, of `patches_per_picture` on average."""

    tokens: float
    mean_length: float
    scored: float
    patches: float
    patches_per_picture: float


@dataclass(frozen=True)
class Passes:
    """Operations of one forward pass over some work, the language model's and the vision tower's."""

    text: float
    vision: float

    @property
    def forward(self) -> float:
        """A forward pass."""
        return self.text + self.vision

    def update(self, *, is_vision_frozen: bool, recomputes: bool) -> float:
        """Forward and backward passes, as executed: recomputed activations count, a frozen tower has no backward."""
        text = self.text * (1 + _BACKWARD + recomputes)
        return text + self.vision * (1 if is_vision_frozen else 1 + _BACKWARD + recomputes)


def count(config: Mapping[str, object], work: Work) -> Passes:
    """Operations of one forward pass of a model with this config.json.

    A layer of width 2 with one head of 2, feed-forward 4 and a vocabulary of 10 takes 2 x (2 x 6 + 2 x 2 + 3 x 2 x 4) = 80
    operations per token, 2 x 2 x 2 x length / 2 for causal attention, and 2 x 2 x 10 per scored token.
    """
    text = cast("Mapping[str, int]", config["text_config"])
    vision = cast("Mapping[str, int]", config["vision_config"])
    width, heads = text["hidden_size"], text["num_attention_heads"]
    head = text.get("head_dim") or width // heads
    attention = width * head * (heads + 2 * text["num_key_value_heads"]) + head * heads * width
    layer = attention + 3 * width * text["intermediate_size"]
    attended = work.tokens * work.mean_length / 2  # causal: half of the square
    return Passes(
        text=2
        * (
            work.tokens * text["num_hidden_layers"] * layer
            + attended * 2 * heads * head * text["num_hidden_layers"]
            + work.scored * width * text["vocab_size"]
        ),
        vision=2 * work.patches * _per_patch(vision, width, work.patches_per_picture),
    )


def peak_tflops(gpu: str) -> float | None:
    """The peak of a GPU by its name; None where it is not known.

    >>> peak_tflops("NVIDIA H200"), peak_tflops("some GPU")
    (989.0, None)
    >>> peak_tflops("NVIDIA GH200 480GB"), peak_tflops("NVIDIA L40"), peak_tflops("NVIDIA RTX A1000")
    (989.0, 181.0, None)
    """
    # The G of GH200 and GB200 stands for the CPU beside the GPU.
    named = (peak for part, peak in PEAK_TFLOPS.items() if re.search(rf"\bG?{part}\b", gpu))
    return next(named, None)


def _per_patch(vision: Mapping[str, int], text_width: int, patches_per_picture: float) -> float:
    """Multiply-adds per patch: embedding, layers, attention over the picture, and the mergers."""
    width, merge = vision["hidden_size"], vision["spatial_merge_size"]
    embed = vision.get("in_channels", 3) * vision.get("temporal_patch_size", 2)
    embed *= vision["patch_size"] ** 2 * width
    layers = vision["depth"] * (4 * width**2 + 2 * width * vision["intermediate_size"])
    attended = vision["depth"] * 2 * width * patches_per_picture
    merged = width * merge**2
    deepstack = cast("object", vision.get("deepstack_visual_indexes", ()))
    num_mergers = 1 + (len(deepstack) if isinstance(deepstack, list | tuple) else 0)
    mergers = num_mergers * (merged * merged + merged * text_width) / merge**2
    return embed + layers + attended + mergers
