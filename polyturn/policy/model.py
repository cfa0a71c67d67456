"""Loads and saves policies as Hugging Face directories, with the facts of each model family."""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

import torch
from safetensors import SafetensorError
from transformers import (
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.processing_utils import ProcessorMixin
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from polyturn import directories
from polyturn.params import ModelParams
from polyturn.policy import attention, deepstack, hf_weights
from polyturn.policy.hf_weights import WeightsError
from polyturn.policy.processor import (
    END_OF_TURN,
    IMAGE_PAD,
    VIDEO_PAD,
    VISION_END,
    VISION_START,
    load_processor,
    save_processor,
)

logger = logging.getLogger(__name__)

MODEL_CLASSES: dict[str, type[PreTrainedModel]] = {
    "qwen3_vl": Qwen3VLForConditionalGeneration,
    "qwen2_5_vl": Qwen2_5_VLForConditionalGeneration,
}
IMAGE_TOKENS = (IMAGE_PAD, VIDEO_PAD, VISION_START, VISION_END)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class ModelError(ValueError):
    """A model cannot be loaded; the message names the params key, the value and the fix."""


@dataclass(frozen=True)
class Family:
    """What polyturn must know of a model beyond the transformers API; ids are of its tokenizer."""

    model_type: str
    image_token_id: int
    end_of_turn_id: int
    end_ids: tuple[
        int, ...
    ]  # tokens after which no engine goes on: that one, and what generation_config.json names
    padding_id: int
    banned_ids: tuple[int, ...]  # image special tokens: never sampled, never scored
    patch_size: int
    merge_size: int

    @property
    def size_multiple(self) -> int:
        """Picture sides that are a multiple of it need no resizing by the processor, pixels."""
        return self.patch_size * self.merge_size


class Processor(Protocol):
    """The parts of a Qwen-VL processor that are used."""

    tokenizer: PreTrainedTokenizerBase
    image_processor: Qwen2VLImageProcessorPil


@dataclass(frozen=True)
class Policy:
    """A model with its processor and family facts."""

    model: PreTrainedModel
    processor: Processor
    family: Family


def family_of(model: PreTrainedModel, processor: Processor) -> Family:
    """Read the family facts off a loaded model and its processor.

    Raises:
        ModelError: the tokenizer lacks one of the special tokens, or config.json, tokenizer and image processor do not
            belong together.
    """
    tokenizer = processor.tokenizer
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in (*IMAGE_TOKENS, END_OF_TURN)}
    # A token that is not known may have the id of one that stands for all of those.
    missing = [t for t, i in ids.items() if i is None or tokenizer.convert_ids_to_tokens(i) != t]
    if missing:
        raise ModelError(
            f"model.path: the tokenizer lacks {' '.join(missing)}; is tokenizer.json that of a Qwen-VL?"
        )
    vision = model.config.vision_config
    _check_agreement(model, processor, cast("int", ids[IMAGE_PAD]))
    _check_rows(model, tokenizer)
    end_of_turn = cast("int", ids[END_OF_TURN])
    padding = tokenizer.pad_token_id
    return Family(
        model_type=model.config.model_type,
        image_token_id=cast("int", ids[IMAGE_PAD]),
        end_of_turn_id=end_of_turn,
        end_ids=_end_ids(model, end_of_turn),
        padding_id=end_of_turn if padding is None else cast("int", padding),
        banned_ids=tuple(sorted(cast("int", ids[token]) for token in IMAGE_TOKENS)),
        patch_size=vision.patch_size,
        merge_size=vision.spatial_merge_size,
    )


def _end_ids(model: PreTrainedModel, end_of_turn: int) -> tuple[int, ...]:
    """Qwen's models end with <|endoftext|> too, now and then; inference servers stop at all ids that are named."""
    config = model.generation_config
    declared = None if config is None else cast("int | list[int] | None", config.eos_token_id)
    others = [declared] if isinstance(declared, int) else declared or []
    return (end_of_turn, *sorted(set(others) - {end_of_turn}))


def _check_agreement(model: PreTrainedModel, processor: Processor, image_pad: int) -> None:
    """Pictures are cut, counted and placed as the model expects them; an engine goes by config.json."""
    vision, images = model.config.vision_config, processor.image_processor
    pairs = {
        "image_token_id": (model.config.image_token_id, image_pad),
        "vision_config.patch_size": (vision.patch_size, images.patch_size),
        "vision_config.spatial_merge_size": (vision.spatial_merge_size, images.merge_size),
        "vision_config.temporal_patch_size": (
            vision.temporal_patch_size,
            images.temporal_patch_size,
        ),
    }
    told = [f"{key} {own}, there {other}" for key, (own, other) in pairs.items() if own != other]
    if told:
        raise ModelError(
            f"model.path: config.json differs from tokenizer and image processor: {'; '.join(told)}; the files are of "
            "different models"
        )


def _check_rows(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Every token has a row of the embedding; there may be more rows."""
    num_rows = model.config.text_config.vocab_size
    token, last = max(tokenizer.get_vocab().items(), key=lambda item: item[1])
    if last >= num_rows:
        raise ModelError(
            f"model.path: the tokenizer has token {token!r} with id {last}, but the embedding {num_rows} rows; was it "
            "added without resizing the embedding?"
        )


def load(params: ModelParams, directory: Path) -> Policy:
    """Load a policy from a local Hugging Face directory (safetensors only, no remote code), in eval mode.

    Every tensor is there, known, of the right shape and, if the directory has a manifest of digests, as written.

    Raises:
        ModelError: the directory holds no Qwen3-VL or Qwen2.5-VL, or its tensors do not fit the config.
    """
    config_file = directory / "config.json"
    if not config_file.is_file():
        raise ModelError(
            f"model.path: {directory} has no config.json, so it is no Hugging Face model directory; "
            "name one, a hub id or an s3:// URI, or null to build the small model"
        )
    config = _read_config(config_file)
    model_type = str(config.get("model_type", ""))
    if model_type.endswith("_moe"):
        raise ModelError(
            f"model.path: {directory} is a {model_type!r}, a mixture of experts, which is not trained: where an engine and "
            "the learner choose other experts for a token, their logprobs drift apart and the policy collapses, and no "
            f"engine's choices are replayed here; polyturn trains the dense {sorted(MODEL_CLASSES)}"
        )
    if model_type not in MODEL_CLASSES:
        raise ModelError(
            f"model.path: {directory} is a {model_type!r}; polyturn trains {sorted(MODEL_CLASSES)}"
        )
    if quantized := config.get("quantization_config"):
        raise ModelError(
            f"model.path: {directory} is quantized ({json.dumps(quantized)[:100]}); what is trained, and what samplers are "
            "given, are plain weights: name the model that it was made of"
        )
    kind = MODEL_CLASSES[model_type]
    try:
        _check_tensors(kind, directory)
        from_pretrained = cast("Callable[..., PreTrainedModel]", kind.from_pretrained)
        model = from_pretrained(
            directory,
            dtype=DTYPES[params.dtype],
            attn_implementation=params.attention,
            use_safetensors=True,
            key_mapping=hf_weights.KEY_MAPPING,
        )
        processor = load_processor(directory, model_type)
    except (OSError, SafetensorError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelError(
            f"model.path: {directory} cannot be loaded: {' '.join(str(error).split())[:300]}{hf_weights.lfs_pointers(directory)}"
        ) from None
    except WeightsError as error:
        raise ModelError(
            f"model.path: tensors of {directory} do not fit its config: {error}"
        ) from None
    except Exception as error:  # values of config.json that the library takes for granted
        raise ModelError(
            f"model.path: {directory} cannot be loaded ({type(error).__name__}: {' '.join(str(error).split())[:300]}); are "
            "its config.json and tokenizer.json as they were published?"
        ) from error
    return wrap(model, processor)


def _read_config(config_file: Path) -> dict[str, object]:
    try:
        config = json.loads(config_file.read_text())
    except ValueError as error:
        raise ModelError(f"model.path: {config_file} is no JSON: {error}") from None
    if not isinstance(config, dict):
        raise ModelError(
            f"model.path: {config_file} must hold an object, got {type(config).__name__}"
        )
    return cast("dict[str, object]", config)


def _check_tensors(kind: type[PreTrainedModel], directory: Path) -> None:
    """Nothing would be made up, left out or, where head and embedding are one, overwritten.

    Raises:
        WeightsError: it names the tensors.
    """
    hf_weights.check_manifest(directory)
    config_class = cast("type[PreTrainedConfig]", kind.config_class)
    with torch.device("meta"):
        empty = cast("Callable[..., PreTrainedModel]", kind)(
            config_class.from_pretrained(directory)
        )
    is_tied = bool(empty.config.tie_word_embeddings)
    wanted = {name: tuple(tensor.shape) for name, tensor in empty.state_dict().items()}
    hf_weights.compare(hf_weights.shapes(directory), wanted, is_tied=is_tied)
    if is_tied and hf_weights.head_differs(directory):
        raise WeightsError(
            f"config.json ties {hf_weights.HEAD} to the embedding, but the files hold another one; set "
            "tie_word_embeddings to false there, or remove the head"
        )


def wrap(model: PreTrainedModel, processor: ProcessorMixin) -> Policy:
    """Put a model and its processor together; dropout stays off for good (eval mode)."""
    usable = cast("Processor", processor)
    attention.install(model)
    deepstack.install(model)
    return Policy(model.eval(), usable, family_of(model, usable))


def save(
    policy: Policy,
    directory: Path,
    *,
    weights: Iterable[tuple[str, torch.Tensor]] | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = hf_weights.MAX_SHARD_BYTES,
) -> None:
    """Write a policy as an ordinary Hugging Face directory, in place of what was there, with a manifest of digests.

    `weights`: whole tensors by name in the module (None: the policy's own); `dtype`: of the files (None: as they
    are). The directory appears whole or not at all: it is written beside its place and renamed.

    Raises:
        OSError: it cannot be written.
        ModelError: weights are missing, unknown or of another shape, or a tied head is not the embedding.
    """
    partial = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        own = policy.model.state_dict()
        hf_weights.write(
            partial,
            _for_files(policy, weights or own.items(), dtype),
            max_shard_bytes=max_shard_bytes,
        )
        _save_config(policy.model, partial, dtype)
        save_processor(cast("ProcessorMixin", policy.processor), partial)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    directories.replace(partial, directory)


def _for_files(
    policy: Policy, weights: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors under the names and in the dtype of files, a tied head left out; checked on the way."""
    is_tied = bool(policy.model.config.tie_word_embeddings)
    wanted = {name: tuple(tensor.shape) for name, tensor in policy.model.state_dict().items()}
    seen: dict[str, tuple[int, ...]] = {}
    tied: dict[str, str] = {}
    for name, tensor in weights:
        seen[name] = tuple(tensor.shape)
        if is_tied and name in (hf_weights.HEAD, hf_weights.EMBEDDING):
            tied[name] = hf_weights.digest(tensor)
        if not (is_tied and name == hf_weights.HEAD):
            yield (
                hf_weights.file_name(name, policy.family.model_type),
                tensor if dtype is None else tensor.to(dtype),
            )
    try:
        hf_weights.compare(seen, wanted, is_tied=is_tied)
    except WeightsError as error:
        raise ModelError(f"weights of the policy do not fit its config: {error}") from None
    if len(set(tied.values())) > 1:
        raise ModelError(
            f"{hf_weights.HEAD} and the embedding are one by config.json, but have come to differ in training"
        )


def _save_config(model: PreTrainedModel, directory: Path, dtype: torch.dtype | None) -> None:
    config = copy.deepcopy(model.config)
    config.architectures = [MODEL_CLASSES[config.model_type].__name__]
    for part in (config, config.text_config, config.vision_config):
        if part is config or part.dtype is not None:  # engines read the parts' own first
            part.dtype = str(dtype or model.dtype).removeprefix("torch.")
    config.save_pretrained(directory)
    if model.generation_config is not None:
        # As it came: `save_pretrained` refuses what some publishers ship, such as a temperature without sampling.
        model.generation_config.to_json_file(
            directory / "generation_config.json", keys_to_pop=["compile_config"]
        )


def weights_digest(model: torch.nn.Module) -> str:
    """SHA-256 over names, dtypes, shapes and bytes of all parameters in name order."""
    return _digest(sorted(model.state_dict().items()))


def saved_digest(params: ModelParams, directory: Path) -> str:
    """`weights_digest` of what `load` makes of a directory that `save` has written, without making it.

    Raises:
        ModelError: a tensor is not what the directory's manifest says.
    """
    try:
        hf_weights.check_manifest(directory)
    except WeightsError as error:
        raise ModelError(f"tensors of {directory} are not those that were saved: {error}") from None
    dtype = DTYPES[params.dtype]
    return _digest((name, tensor.to(dtype)) for name, tensor in hf_weights.in_order(directory))


def _digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    digest = hashlib.sha256()
    for name, tensor in tensors:
        data = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {data.dtype} {tuple(data.shape)}\n".encode())
        digest.update(data.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
