"""Weights of a Hugging Face directory: names in files and in modules, safetensors shards, digests of every tensor.

Files hold the names that the Hub's checkpoints of a family have, which every engine reads. transformers 4.52 put both
halves of a Qwen-VL under `model.`; directories with either kind of names are read.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

if TYPE_CHECKING:
    from typing_extensions import Buffer

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MANIFEST = "weights_manifest.json"  # {"tensors": {name: {"dtype", "shape", "sha256"}}}
HEAD = "lm_head.weight"
EMBEDDING = "model.language_model.embed_tokens.weight"
MAX_SHARD_BYTES = 5_000_000_000

# Patterns of names in files -> names in modules, as transformers takes them.
KEY_MAPPING = {r"^visual\.": "model.visual.", r"^model\.(?!language_model\.|visual\.)": "model.language_model."}  # fmt: skip
_FILE_NAMES = {"qwen2_5_vl": {"model.visual.": "visual.", "model.language_model.": "model."}}
_PLAIN = {"F64", "F32", "F16", "BF16"}
_SHOWN = 8  # names in a message


class WeightsError(ValueError):
    """Weights are missing, unknown, of another shape, or not what their manifest says; the message names them."""


def module_name(name: str) -> str:
    """The name that a tensor of a file has in the module.

    >>> module_name("visual.patch_embed.proj.weight"), module_name("model.norm.weight")
    ('model.visual.patch_embed.proj.weight', 'model.language_model.norm.weight')
    """
    for pattern, target in KEY_MAPPING.items():
        name = re.sub(pattern, target, name)
    return name


def file_name(name: str, model_type: str) -> str:
    """The name that a module's tensor gets in a file of this family; undone by `module_name`."""
    for prefix, target in _FILE_NAMES.get(model_type, {}).items():
        if name.startswith(prefix):
            return target + name.removeprefix(prefix)
    return name


def compare(found: Mapping[str, object], wanted: Mapping[str, object], *, is_tied: bool) -> None:
    """Check names (of modules) and, where both sides know them, shapes; a tied head need not be there.

    Raises:
        WeightsError: it names what is missing, unknown and of another shape.
    """
    optional = {HEAD} if is_tied else set[str]()
    problems = {
        "missing": sorted(wanted.keys() - found.keys() - optional),
        "unknown": sorted(found.keys() - wanted.keys()),
        "of another shape": [
            f"{name} {found[name]} instead of {wanted[name]}"
            for name in sorted(found.keys() & wanted.keys())
            if found[name] != wanted[name]
        ],
    }
    if told := [_listed(kind, names) for kind, names in problems.items() if names]:
        raise WeightsError("; ".join(told))


def _listed(kind: str, names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{len(names)} {kind}: {', '.join(names[:_SHOWN])}{more}"


# -- reading --------------------------------------------------------------------------------------------------


def shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor in the directory's files, by name in the module.

    Raises:
        OSError, SafetensorError: a file is missing or damaged.
        WeightsError: two names in files are one in the module, or weights are quantized.
    """
    found: dict[str, tuple[int, ...]] = {}
    quantized: list[str] = []
    for path in _files(directory):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - no mapping
                inside = module_name(name)
                if inside in found:
                    raise WeightsError(f"{inside} is there twice, the second time as {name}")
                tensor = file.get_slice(name)
                found[inside] = tuple(tensor.get_shape())
                if (dtype := tensor.get_dtype()) not in _PLAIN:
                    quantized.append(f"{name} {dtype}")
    if quantized:
        raise WeightsError(
            f"{_listed('of a type that is of quantized weights', quantized)}; name the model that they were made of"
        )
    return found


def lfs_pointers(directory: Path) -> str:
    """What to do about files of Git LFS that were not fetched; "" if all were."""
    start = b"version https://git-lfs"
    found = [
        path.name
        for path in sorted(directory.iterdir())
        if path.is_file() and path.stat().st_size < 1024 and path.read_bytes().startswith(start)
    ]
    return (
        f"; {', '.join(found)} are pointers of Git LFS: run `git lfs pull` there" if found else ""
    )


def in_order(directory: Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the directory's files, by name in the module, one in memory at a time; a tied head too.

    Raises:
        OSError, SafetensorError: a file is missing or damaged.
    """
    places: dict[str, tuple[Path, str]] = {}
    for path in _files(directory):
        with safe_open(path, "pt") as file:
            places |= {module_name(name): (path, name) for name in file.keys()}  # noqa: SIM118
    places.setdefault(HEAD, places[EMBEDDING])  # left out where it is the embedding
    for name in sorted(places):
        path, stored = places[name]
        with safe_open(path, "pt") as file:
            yield name, file.get_tensor(stored)


def check_manifest(directory: Path) -> None:
    """Compare every tensor with the directory's manifest, if it has one.

    Raises:
        WeightsError: it names the tensors that differ, are missing or unknown.
    """
    path = directory / MANIFEST
    if not path.is_file():
        return
    try:
        wanted = {name: str(entry["sha256"]) for name, entry in json.loads(path.read_text())["tensors"].items()}  # fmt: skip
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{MANIFEST} cannot be read: {error}") from None
    found: dict[str, str] = {}
    for file_path in _files(directory):
        with safe_open(file_path, "pt") as file:
            found |= {name: digest(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118
    compare(dict.fromkeys(found), dict.fromkeys(wanted), is_tied=False)
    if changed := sorted(name for name in wanted if found[name] != wanted[name]):
        raise WeightsError(_listed(f"not as {MANIFEST} says", changed))


def head_differs(directory: Path) -> bool:
    """Whether the files hold a head that is not the embedding."""
    tensors: dict[str, Tensor] = {}
    for path in _files(directory):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                if module_name(name) in (HEAD, EMBEDDING):
                    tensors[module_name(name)] = file.get_tensor(name)
    return HEAD in tensors and not torch.equal(tensors[HEAD], tensors[EMBEDDING])


def _files(directory: Path) -> list[Path]:
    """The files that hold the tensors; with others beside them, libraries and engines read different ones."""
    names = _named(directory) or [SINGLE]
    stray = {path.name for path in directory.glob("model*.safetensors")} - set(names)
    if stray:
        told = f"not named by {INDEX}" if (directory / INDEX).is_file() else f"beside {SINGLE}"
        raise WeightsError(
            f"{', '.join(sorted(stray)[:_SHOWN])} lie there {told}: of an earlier save? Some programs would read them "
            "instead; remove what is not the model's"
        )
    return [directory / name for name in names]


def _named(directory: Path) -> list[str]:
    """The files that the index names, if there is one."""
    if not (index := directory / INDEX).is_file():
        return []
    try:
        names = {str(Path(name)) for name in json.loads(index.read_text())["weight_map"].values()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{INDEX} cannot be read: {type(error).__name__}: {error}") from None
    return sorted(names)


# -- writing --------------------------------------------------------------------------------------------------


def write(
    directory: Path,
    weights: Iterable[tuple[str, Tensor]],
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write tensors under the names given, in order, as one file or as shards with an index, and the manifest.

    At most one shard is held in memory.

    Raises:
        OSError: a file cannot be written.
    """
    entries: dict[str, dict[str, object]] = {}
    shard_of: dict[str, int] = {}
    size = 0
    for number, shard in enumerate(_shards(weights, max_shard_bytes)):
        _save(shard, directory / _part(number))
        for name, tensor in shard.items():
            dtype = str(tensor.dtype).removeprefix("torch.")
            entries[name] = {"dtype": dtype, "shape": list(tensor.shape), "sha256": digest(tensor)}
            shard_of[name] = number
            size += tensor.nbytes
    total = max(shard_of.values()) + 1
    if total == 1:
        (directory / _part(0)).rename(directory / SINGLE)
    else:
        files = [f"model-{number + 1:05d}-of-{total:05d}.safetensors" for number in range(total)]
        for number, file in enumerate(files):
            (directory / _part(number)).rename(directory / file)
        weight_map = {name: files[number] for name, number in shard_of.items()}
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        (directory / INDEX).write_text(json.dumps(index, indent=1, sort_keys=True) + "\n")
    manifest = {"tensors": entries}
    (directory / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n")


def digest(tensor: Tensor) -> str:
    """SHA-256 of a tensor's bytes."""
    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return hashlib.sha256(cast("Buffer", data)).hexdigest()


def _shards(weights: Iterable[tuple[str, Tensor]], max_bytes: int) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in weights:
        if shard and size + tensor.nbytes > max_bytes:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor.detach().cpu().contiguous()
        size += tensor.nbytes
    yield shard


def _part(number: int) -> str:
    return f".part-{number}.safetensors"


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        code = int(number[1])  # a full disk, told in words only
        raise OSError(code, os.strerror(code), str(path.parent)) from None
