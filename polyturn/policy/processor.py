"""The Qwen-VL processor (tokenizer, image processor, chat template) with or without torchvision."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import cast

from transformers import AutoProcessor, Qwen2_5_VLProcessor, Qwen3VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.processing_utils import ProcessorMixin
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

IMAGE_PAD = "<|image_pad|>"
VIDEO_PAD = "<|video_pad|>"
VISION_START = "<|vision_start|>"
VISION_END = "<|vision_end|>"
END_OF_TURN = "<|im_end|>"
PADDING = "<|endoftext|>"


def _wire(
    processor: ProcessorMixin,
    image_processor: Qwen2VLImageProcessorPil,
    tokenizer: PreTrainedTokenizerBase,
    chat_template: str | None,
) -> None:
    token_id = tokenizer.convert_tokens_to_ids
    for name, token in (
        ("image_token", IMAGE_PAD),
        ("video_token", VIDEO_PAD),
        ("vision_start_token", VISION_START),
        ("vision_end_token", VISION_END),
    ):
        setattr(processor, name, token)
        setattr(processor, f"{name}_id", token_id(token))
    ProcessorMixin.__init__(processor, image_processor, tokenizer, chat_template=chat_template)


class ImageOnlyQwen3VLProcessor(Qwen3VLProcessor):
    """Qwen3-VL without the video part: ProcessorMixin takes its attributes from this signature.

    The library's own class needs torchvision for videos even where none are used.
    """

    def __init__(
        self,
        image_processor: Qwen2VLImageProcessorPil,
        tokenizer: PreTrainedTokenizerBase,
        chat_template: str | None = None,
    ) -> None:
        _wire(self, image_processor, tokenizer, chat_template)


class ImageOnlyQwen25VLProcessor(Qwen2_5_VLProcessor):
    """Qwen2.5-VL without the video part; see `ImageOnlyQwen3VLProcessor`."""

    def __init__(
        self,
        image_processor: Qwen2VLImageProcessorPil,
        tokenizer: PreTrainedTokenizerBase,
        chat_template: str | None = None,
    ) -> None:
        _wire(self, image_processor, tokenizer, chat_template)


IMAGE_ONLY = {"qwen3_vl": ImageOnlyQwen3VLProcessor, "qwen2_5_vl": ImageOnlyQwen25VLProcessor}
# What a directory is said to be made of, so that AutoProcessor and inference servers load it: the library's class of
# the whole, and that of videos, which the library's class insists on.
LIBRARY_CLASSES = {
    ImageOnlyQwen3VLProcessor: ("Qwen3VLProcessor", "Qwen3VLVideoProcessor"),
    ImageOnlyQwen25VLProcessor: ("Qwen2_5_VLProcessor", "Qwen2VLVideoProcessor"),
}
_SHARED_WITH_VIDEO = ("patch_size", "temporal_patch_size", "merge_size", "image_mean", "image_std")


def save_processor(processor: ProcessorMixin, directory: Path) -> None:
    """Write the processor so that `load_processor`, AutoProcessor and inference servers can load it."""
    processor.save_pretrained(directory)
    names = LIBRARY_CLASSES.get(type(processor))
    if names is None:  # the library's own class has written all it needs
        return
    path = directory / "processor_config.json"
    config = json.loads(path.read_text())
    image = config["image_processor"]
    video = {"video_processor_type": names[1], **{key: image[key] for key in _SHARED_WITH_VIDEO}}
    config |= {"processor_class": names[0], "video_processor": video}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    legacy = {"processor_class": names[0]}  # file names that servers with an older library read
    for name, part in (("preprocessor_config", image), ("video_preprocessor_config", video)):
        text = json.dumps(part | legacy, indent=2, sort_keys=True)
        (directory / f"{name}.json").write_text(f"{text}\n")


def load_processor(directory: Path, model_type: str) -> ProcessorMixin:
    """Load the processor of a model directory: AutoProcessor where torchvision exists, else the image-only class."""
    if importlib.util.find_spec("torchvision") is not None:
        return cast(
            "ProcessorMixin", AutoProcessor.from_pretrained(directory, trust_remote_code=False)
        )
    return cast("ProcessorMixin", IMAGE_ONLY[model_type].from_pretrained(directory))
