"""Loading and saving policies: equal tensors, family facts, and directories that are no policies."""

from __future__ import annotations

import errno
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from polyturn.params import ModelParams
from polyturn.policy import hf_weights, model
from polyturn.policy.model import ModelError, Policy
from polyturn.policy.processor import ImageOnlyQwen3VLProcessor, load_processor
from polyturn.policy.vision import PatchReader
from polyturn.render import Renderer
from tests.unit import tiny


def edit_config(directory: Path, change: Callable[[dict[str, object]], None]) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


@pytest.mark.parametrize("name", ["policy", "policy_2_5"])
def test_a_saved_policy_loads_to_equal_tensors_and_facts(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    policy: Policy = request.getfixturevalue(name)
    model.save(policy, tmp_path / "saved")
    loaded = model.load(ModelParams(), tmp_path / "saved")
    assert model.weights_digest(loaded.model) == model.weights_digest(policy.model)
    assert loaded.family == policy.family
    assert not loaded.model.training
    messages = tiny.problems()[0].messages
    assert Renderer(loaded).prompt(messages) == Renderer(policy).prompt(messages)
    image = tiny.picture(100, 37, 1)
    for one, other in zip(
        PatchReader(loaded).read(image), PatchReader(policy).read(image), strict=True
    ):
        assert torch.equal(one, other)
    assert loaded.model.lm_head.weight is loaded.model.model.language_model.embed_tokens.weight


@pytest.mark.parametrize("name", ["policy", "policy_2_5"])
def test_rotary_frequencies_are_exact_in_bfloat16(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Engines keep them in float32: rounded ones turn late tokens elsewhere, and sampler and learner come apart."""
    policy: Policy = request.getfixturevalue(name)
    model.save(policy, tmp_path / "saved")
    loaded = model.load(ModelParams(dtype="bfloat16"), tmp_path / "saved")
    assert {p.dtype for p in loaded.model.parameters()} == {torch.bfloat16}
    exact = dict(policy.model.named_buffers())
    found = {n: b for n, b in loaded.model.named_buffers() if "inv_freq" in n}
    assert found
    for buffer, values in found.items():
        torch.testing.assert_close(values, exact[buffer], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["tied", "untied", "2.5"])
def test_the_digest_of_what_was_saved_is_that_of_what_is_loaded(
    policy: Policy,
    policy_2_5: Policy,
    tmp_path: Path,
    kind: str,
    dtype: Literal["float32", "bfloat16"],
) -> None:
    """In one file or in shards; a tensor that has changed since is an error."""
    chosen, target = ModelParams(dtype=dtype), tmp_path
    saved = {"tied": policy, "2.5": policy_2_5}.get(kind) or tiny.qwen3(
        tiny.SMALL.model_copy(update={"tie_embeddings": False})
    )
    for limit in (10**9, 100_000):
        target = tmp_path / str(limit)
        model.save(saved, target, max_shard_bytes=limit)
        loaded = model.load(chosen, target)
        assert model.saved_digest(chosen, target) == model.weights_digest(loaded.model)
    manifest = target / hf_weights.MANIFEST
    manifest.write_text(manifest.read_text().replace('"sha256": "', '"sha256": "0', 1))
    with pytest.raises(ModelError, match=r"not those that were saved: 1 not as weights_manifest"):
        model.saved_digest(chosen, target)


def test_saving_replaces_what_was_there(policy: Policy, tmp_path: Path) -> None:
    target = tmp_path / "saved"
    target.mkdir()
    (target / "old").write_text("old")
    model.save(policy, target)
    assert not (target / "old").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_a_full_disk_keeps_what_was_there(policy: Policy, tmp_path: Path) -> None:
    model.save(policy, tmp_path / "saved")
    with tiny.full_disk(100_000), pytest.raises(OSError, match="File too large") as raised:
        model.save(policy, tmp_path / "saved")
    assert raised.value.errno == errno.EFBIG
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    model.load(ModelParams(), tmp_path / "saved")


def test_an_untied_head_survives_saving(tmp_path: Path) -> None:
    """CKPT-03: it is neither tied on the way nor copied over (sglang #18024)."""
    untied = tiny.qwen3(tiny.SMALL.model_copy(update={"tie_embeddings": False}))
    model.save(untied, tmp_path / "saved")
    loaded = model.load(ModelParams(), tmp_path / "saved").model
    head, embedding = loaded.lm_head.weight, loaded.model.language_model.embed_tokens.weight
    assert not torch.equal(head, embedding)
    assert torch.equal(head, untied.model.lm_head.weight)


def test_a_missing_head_is_named_and_never_made_up(tmp_path: Path) -> None:
    """CKPT-05: a directory that says untied and has no head (Qwen3-VL-Embedding #89)."""
    untied = tiny.qwen3(tiny.SMALL.model_copy(update={"tie_embeddings": False}))
    model.save(untied, tmp_path / "saved")
    path = tmp_path / "saved" / "model.safetensors"
    tensors = load_file(path)
    del tensors["lm_head.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    (tmp_path / "saved" / hf_weights.MANIFEST).unlink()
    with pytest.raises(ModelError, match=r"do not fit its config: 1 missing: lm_head.weight"):
        model.load(ModelParams(), tmp_path / "saved")


def test_an_unknown_tensor_is_named(policy: Policy, tmp_path: Path) -> None:
    model.save(policy, tmp_path / "saved")
    path = tmp_path / "saved" / "model.safetensors"
    save_file({**load_file(path), "model.extra": torch.zeros(2)}, path, metadata={"format": "pt"})
    (tmp_path / "saved" / hf_weights.MANIFEST).unlink()
    with pytest.raises(ModelError, match=r"1 unknown: model.language_model.extra"):
        model.load(ModelParams(), tmp_path / "saved")


OLD = {"model.visual.": "visual.", "model.language_model.": "model."}
NEW = {new: old for old, new in OLD.items()}


def rename_tensors(directory: Path, prefixes: Mapping[str, str]) -> None:
    """Give the tensors of a saved policy the names of another library version."""
    path = directory / "model.safetensors"
    tensors = {hf_weights.module_name(name): tensor for name, tensor in load_file(path).items()}
    for old, new in prefixes.items():
        tensors = {
            new + name.removeprefix(old) if name.startswith(old) else name: tensor
            for name, tensor in tensors.items()
        }
    save_file(tensors, path, metadata={"format": "pt"})
    (directory / hf_weights.MANIFEST).unlink()


@pytest.mark.parametrize("prefixes", [OLD, {}], ids=["before 4.52", "since 4.52"])
@pytest.mark.parametrize("name", ["policy", "policy_2_5"])
def test_names_of_both_library_versions_load_to_equal_tensors(
    name: str, prefixes: dict[str, str], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """CKPT-06: visual.* and model.layers.*, or model.visual.* and model.language_model.* (vllm #19054)."""
    policy: Policy = request.getfixturevalue(name)
    model.save(policy, tmp_path / "saved")
    rename_tensors(tmp_path / "saved", prefixes)
    loaded = model.load(ModelParams(), tmp_path / "saved")
    assert model.weights_digest(loaded.model) == model.weights_digest(policy.model)


@pytest.mark.parametrize("name", ["policy", "policy_2_5"])
def test_files_have_the_names_that_the_hub_and_older_engines_know(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """CKPT-06: the Hub's Qwen2.5-VL has visual.*, its Qwen3-VL model.visual.* (vllm #19054)."""
    policy: Policy = request.getfixturevalue(name)
    model.save(policy, tmp_path / "saved")
    prefixes = {key.split(".")[0] for key in load_file(tmp_path / "saved" / "model.safetensors")}
    assert prefixes == ({"model"} if name == "policy" else {"model", "visual"})


def test_unknown_names_are_an_error_with_a_diff(policy: Policy, tmp_path: Path) -> None:
    """CKPT-06: a third naming is no naming: both sides are named, shortened."""
    model.save(policy, tmp_path / "saved")
    rename_tensors(tmp_path / "saved", {"model.visual.": "model.vision_tower."})
    with pytest.raises(ModelError) as raised:
        model.load(ModelParams(), tmp_path / "saved")
    assert "missing: model.visual.blocks.0." in str(raised.value)
    assert "unknown: model.language_model.vision_tower.blocks.0." in str(raised.value)
    assert str(raised.value).count(" and 31 more") == 2  # of 39 tensors on either side


def test_one_tensor_under_both_names_is_refused(policy: Policy, tmp_path: Path) -> None:
    model.save(policy, tmp_path / "saved")
    rename_tensors(tmp_path / "saved", {})
    path = tmp_path / "saved" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] = tensors["model.language_model.norm.weight"].clone()
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"model.language_model.norm.weight is there twice"):
        model.load(ModelParams(), tmp_path / "saved")


@pytest.mark.parametrize("tie", [True, False])
def test_weights_given_from_outside_are_written_instead_of_the_own(
    tie: bool, tmp_path: Path
) -> None:
    """CKPT-01, CKPT-03: what a sharded learner exports, with the head as config.json says (sglang #18024)."""
    own = tiny.qwen3(tiny.SMALL.model_copy(update={"tie_embeddings": tie}))
    trained = [(n, p + 1) for n, p in own.model.named_parameters(remove_duplicate=False)]
    model.save(own, tmp_path / "saved", weights=iter(trained))
    loaded = model.load(ModelParams(), tmp_path / "saved").model.state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in trained)
    assert (hf_weights.HEAD in load_file(tmp_path / "saved" / "model.safetensors")) != tie


@pytest.mark.parametrize("fault", ["missing", "unknown", "shape"])
def test_weights_that_do_not_fit_are_not_written(
    policy: Policy, tmp_path: Path, fault: str
) -> None:
    weights = dict(policy.model.state_dict())
    norm = "model.language_model.norm.weight"
    {
        "missing": lambda: weights.pop(norm),
        "unknown": lambda: weights.update({"model.language_model.lora_A": torch.zeros(2)}),
        "shape": lambda: weights.update({norm: torch.zeros(3)}),
    }[fault]()
    with pytest.raises(
        ModelError, match=r"do not fit its config: 1 (missing|unknown|of another shape)"
    ):
        model.save(policy, tmp_path / "saved", weights=weights.items())
    assert list(tmp_path.iterdir()) == []


def test_a_tied_head_that_has_moved_away_is_neither_written_nor_read(
    policy: Policy, tmp_path: Path
) -> None:
    """CKPT-01: the embedding was updated, the head is stale (prime-rl #2823)."""
    weights = dict(policy.model.state_dict())
    weights[hf_weights.EMBEDDING] = weights[hf_weights.EMBEDDING] + 1
    with pytest.raises(ModelError, match=r"have come to differ"):
        model.save(policy, tmp_path / "saved", weights=weights.items())
    model.save(policy, tmp_path / "saved")
    path = tmp_path / "saved" / "model.safetensors"
    (tmp_path / "saved" / hf_weights.MANIFEST).unlink()
    head = load_file(path)[hf_weights.EMBEDDING]
    save_file({**load_file(path), hf_weights.HEAD: head}, path, metadata={"format": "pt"})
    model.load(ModelParams(), tmp_path / "saved")  # a second copy of the same is harmless
    save_file({**load_file(path), hf_weights.HEAD: head + 1}, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"config.json ties lm_head.weight to the embedding"):
        model.load(ModelParams(), tmp_path / "saved")


def test_files_have_the_dtype_that_is_asked_for(policy: Policy, tmp_path: Path) -> None:
    model.save(policy, tmp_path / "saved", dtype=torch.bfloat16)
    tensors = load_file(tmp_path / "saved" / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["dtype"] == "bfloat16"
    loaded = model.load(ModelParams(dtype="bfloat16"), tmp_path / "saved").model.state_dict()
    for name, tensor in policy.model.state_dict().items():
        assert torch.equal(loaded[name], tensor.to(torch.bfloat16))


def test_the_config_says_the_dtype_of_the_files_in_every_part(
    policy: Policy, tmp_path: Path
) -> None:
    """LlamaFactory #7401: bfloat16 files, whose vision_config said float32, could not be served."""
    model.save(policy, tmp_path / "base")
    loaded = model.load(ModelParams(), tmp_path / "base")
    for dtype, name in ((torch.bfloat16, "bfloat16"), (None, "float32")):
        model.save(loaded, tmp_path / "saved", dtype=dtype)
        config = json.loads((tmp_path / "saved" / "config.json").read_text())
        parts = (config, config["text_config"], config["vision_config"])
        assert [part["dtype"] for part in parts] == [name] * 3


def test_a_generation_config_that_the_library_calls_invalid_is_kept_as_it_came(
    policy: Policy, tmp_path: Path
) -> None:
    """Qwen3-ASR #210, transformers #29988: a temperature without sampling could be loaded, and not saved again."""
    model.save(policy, tmp_path / "saved")
    path = tmp_path / "saved" / "generation_config.json"
    published = json.loads(path.read_text()) | {"do_sample": False, "temperature": 1e-6, "top_k": 1}
    path.write_text(json.dumps(published))
    loaded = model.load(ModelParams(), tmp_path / "saved")
    assert loaded.model.generation_config is not None
    loaded.model.generation_config._original_object_hash = (
        None  # 5.12 has none, and refuses all of them
    )
    model.save(loaded, tmp_path / "again")
    assert json.loads((tmp_path / "again" / path.name).read_text()) == published


def test_any_program_can_load_what_was_saved(policy: Policy, tmp_path: Path) -> None:
    """from_pretrained alone, in one file or in shards with an index."""
    for limit in (10**9, 100_000):
        target = tmp_path / str(limit)
        model.save(policy, target, max_shard_bytes=limit)
        loaded = AutoModelForImageTextToText.from_pretrained(target)
        assert model.weights_digest(loaded) == model.weights_digest(policy.model)
    shards = sorted(path.name for path in target.glob("*.safetensors"))
    assert len(shards) > 3
    assert shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    sizes = [sum(t.nbytes for t in load_file(target / shard).values()) for shard in shards]
    assert all(size <= 100_000 or len(load_file(target / shard)) == 1
               for size, shard in zip(sizes, shards, strict=True))  # fmt: skip
    ours = model.load(ModelParams(), target)
    assert model.weights_digest(ours.model) == model.weights_digest(policy.model)


@pytest.mark.parametrize("limit", [10**9, 100_000], ids=["one file", "shards"])
def test_a_changed_tensor_is_found_by_its_digest(
    policy: Policy, tmp_path: Path, limit: int
) -> None:
    model.save(policy, tmp_path / "saved", max_shard_bytes=limit)
    manifest = json.loads((tmp_path / "saved" / hf_weights.MANIFEST).read_text())["tensors"]
    name = "model.language_model.norm.weight"
    wanted = policy.model.state_dict()[name]
    data = wanted.numpy().tobytes()
    assert manifest[name]["sha256"] == hashlib.sha256(data).hexdigest()
    assert (manifest[name]["dtype"], manifest[name]["shape"]) == ("float32", list(wanted.shape))
    (path,) = [p for p in (tmp_path / "saved").glob("*.safetensors") if name in load_file(p)]
    tensors = load_file(path)
    tensors[name][3] += 1e-6
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=rf"1 not as weights_manifest.json says: {name}"):
        model.load(ModelParams(), tmp_path / "saved")
    del tensors[name]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=rf"1 missing: {name}"):
        model.load(ModelParams(), tmp_path / "saved")


def test_a_shard_that_is_gone_is_named(policy: Policy, tmp_path: Path) -> None:
    model.save(policy, tmp_path / "saved", max_shard_bytes=100_000)
    gone = sorted((tmp_path / "saved").glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(ModelError, match=rf"cannot be loaded: .*{gone.name}"):
        model.load(ModelParams(), tmp_path / "saved")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda d: (d / "config.json").unlink(), "has no config.json"),
        (lambda d: edit_config(d, lambda c: c.update(model_type="llama")), "is a 'llama'"),
        (lambda d: (d / "model.safetensors").unlink(), "cannot be loaded"),
        (lambda d: (d / "tokenizer.json").unlink(), "the tokenizer lacks"),
        (lambda d: (d / "config.json").write_text("{"), "config.json is no JSON"),
        (lambda d: (d / "config.json").write_bytes(b"\xff\xfe"), "config.json is no JSON"),
        (
            lambda d: (d / "config.json").write_text("[]"),
            "config.json must hold an object, got list",
        ),
        (lambda d: (d / "tokenizer.json").write_text("{"), "cannot be loaded"),
        (lambda d: (d / "tokenizer_config.json").write_text("{"), "cannot be loaded"),
        (lambda d: (d / hf_weights.INDEX).write_text("{"), f"{hf_weights.INDEX} cannot be read"),
        (lambda d: (d / hf_weights.INDEX).write_text("{}"), f"{hf_weights.INDEX} cannot be read"),
        (lambda d: (d / hf_weights.INDEX).write_text("[]"), f"{hf_weights.INDEX} cannot be read"),
    ],
    ids=[
        "no config",
        "another family",
        "no weights",
        "no tokenizer",
        "half a config",
        "binary config",
        "list as config",
        "half a tokenizer",
        "half a tokenizer config",
        "half an index",
        "empty index",
        "list as index",
    ],
)
def test_what_is_no_policy_is_refused_with_its_key(
    policy: Policy, tmp_path: Path, spoil: Callable[[Path], None], message: str
) -> None:
    model.save(policy, tmp_path / "saved")
    spoil(tmp_path / "saved")
    with pytest.raises(ModelError, match=message) as raised:
        model.load(ModelParams(), tmp_path / "saved")
    assert str(raised.value).startswith("model.path: ")


_LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 4\n"


def _text(**changes: object) -> Callable[[Path], None]:
    return lambda d: edit_config(d, lambda c: c["text_config"].update(changes))


def _top(**changes: object) -> Callable[[Path], None]:
    return lambda d: edit_config(d, lambda c: c.update(changes))


def _images(**changes: object) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        path = directory / "processor_config.json"
        config = json.loads(path.read_text())
        config["image_processor"] |= changes
        path.write_text(json.dumps(config))

    return change


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_top(quantization_config={"quant_method": "fp8"}), 'is quantized .*"fp8"'),  # huggingface/trl#3399
        (_top(quantization_config={"quant_method": "gptq", "bits": 4}), "plain weights"),
        (_top(image_token_id=5), "image_token_id 5, there"),
        (_images(patch_size=14), "patch_size 8, there 14"),  # THUDM/slime#1227
        (_images(merge_size=4), "merge_size 2, there 4"),
        (_images(temporal_patch_size=1), "temporal_patch_size 2, there 1"),
        (lambda d: (d / "model.safetensors").write_text(_LFS), "model.safetensors are pointers of Git LFS"),  # OmniParser#34
        (lambda d: (d / "tokenizer.json").write_text(_LFS), "tokenizer.json are pointers of Git LFS"),
        (_text(hidden_size="64"), "cannot be loaded .*hidden_size"),
        (_text(hidden_size=-1), "cannot be loaded"),
        (_text(num_attention_heads=0), "cannot be loaded .*ZeroDivisionError"),
        (_text(hidden_act="nope"), "cannot be loaded .*KeyError: 'nope'"),
        (_text(rope_parameters={"rope_type": "nope"}), "cannot be loaded .*KeyError: 'nope'"),
        (_text(pad_token_id=10**9), "cannot be loaded .*AssertionError"),
        (_top(text_config="x"), "cannot be loaded .*text_config"),
        (_top(dtype="float7"), "cannot be loaded|loaded"),
        (lambda d: (d / "tokenizer.json").write_text("{}"), "cannot be loaded"),
        (lambda d: (d / "tokenizer.json").write_text("[]"), "cannot be loaded"),
        (lambda d: (d / "tokenizer_config.json").write_text("[]"), "cannot be loaded"),
        (lambda d: (d / "processor_config.json").write_text("[]"), "cannot be loaded"),
        (lambda d: (d / "generation_config.json").write_text("[]"), "cannot be loaded"),
        (lambda d: (d / hf_weights.INDEX).write_text('{"weight_map": {"a": 5}}'), f"{hf_weights.INDEX} cannot be read"),
        (lambda d: [(d / f"tokenizer{n}.json").unlink() for n in ("", "_config")], "the tokenizer lacks"),
    ],
)  # fmt: skip
def test_a_directory_whose_files_do_not_belong_together_is_one_line(
    policy: Policy, tmp_path: Path, spoil: Callable[[Path], object], message: str
) -> None:
    model.save(policy, tmp_path / "saved")
    (tmp_path / "saved" / hf_weights.MANIFEST).unlink()
    spoil(tmp_path / "saved")
    with pytest.raises(ModelError, match=message) as raised:
        model.load(ModelParams(), tmp_path / "saved")
    assert str(raised.value).startswith("model.path: ")
    assert "\n" not in str(raised.value)


def test_a_tokenizer_without_a_padding_token_pads_with_the_end_token(
    policy: Policy, tmp_path: Path
) -> None:
    model.save(policy, tmp_path / "saved")
    path = tmp_path / "saved" / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["pad_token"] = None
    path.write_text(json.dumps(config))
    family = model.load(ModelParams(), tmp_path / "saved").family
    assert family.padding_id == family.end_of_turn_id


def test_a_token_that_the_embedding_has_no_row_for_is_named(policy: Policy, tmp_path: Path) -> None:
    """transformers #12763: "index out of range in self", once a text has it; llama-cookbook #189: on a GPU, anything."""
    model.save(policy, tmp_path / "saved")
    path = tmp_path / "saved" / "tokenizer.json"
    content = json.loads(path.read_text())
    added = content["added_tokens"]
    number = 1 + max(token["id"] for token in added)
    for index in range(number, policy.model.config.text_config.vocab_size + 1):
        added.append({**added[-1], "id": index, "content": f"<|new_{index}|>"})
    path.write_text(json.dumps(content))
    said = r"model.path: the tokenizer has token '<\|new_448\|>' with id 448, but the embedding 448 rows"
    with pytest.raises(ModelError, match=said):
        model.load(ModelParams(), tmp_path / "saved")


@pytest.mark.parametrize("limit", [10**9, 100_000])
def test_weights_of_an_earlier_save_are_not_read_beside_the_models_own(
    policy: Policy, tmp_path: Path, limit: int
) -> None:
    """mlx-vlm #1464: the library reads model.safetensors, an engine the shards of the index, and they differ."""
    saved = tmp_path / "saved"
    model.save(policy, tmp_path / "other", max_shard_bytes=10**9 + 100_000 - limit)
    model.save(policy, saved, max_shard_bytes=limit)
    strays = sorted((tmp_path / "other").glob("model*.safetensors"))
    for path in strays:
        path.rename(saved / path.name)
    with pytest.raises(ModelError, match=rf"{strays[0].name}.* of an earlier save"):
        model.load(ModelParams(), saved)
    with pytest.raises(ModelError, match="of an earlier save"):
        model.saved_digest(ModelParams(), saved)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_quantized_weights_are_refused_though_the_config_does_not_say_so(
    policy: Policy, tmp_path: Path, dtype: torch.dtype
) -> None:
    """transformers #47145: their shapes are right, so that they load, without the scales that make them weights."""
    model.save(policy, tmp_path / "saved")
    path = tmp_path / "saved" / "model.safetensors"
    tensors = load_file(path)
    name = "model.language_model.layers.0.self_attn.q_proj.weight"
    save_file({**tensors, name: tensors[name].to(dtype)}, path, metadata={"format": "pt"})
    (tmp_path / "saved" / hf_weights.MANIFEST).unlink()
    with pytest.raises(
        ModelError, match=rf"model.path: .*1 of a type that is of quantized.*{name}"
    ):
        model.load(ModelParams(), tmp_path / "saved")


def test_half_a_weights_file_is_refused(policy: Policy, tmp_path: Path) -> None:
    model.save(policy, tmp_path / "saved")
    path = tmp_path / "saved" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(ModelError, match=r"model.path: .* cannot be loaded"):
        model.load(ModelParams(), tmp_path / "saved")


def test_tensors_of_another_size_are_refused(policy: Policy, tmp_path: Path) -> None:
    model.save(policy, tmp_path / "saved")
    path = tmp_path / "saved" / "model.safetensors"
    tensors = load_file(path)
    name = "model.language_model.norm.weight"
    save_file({**tensors, name: torch.zeros(3)}, path, metadata={"format": "pt"})
    (tmp_path / "saved" / hf_weights.MANIFEST).unlink()
    with pytest.raises(ModelError, match=r"model.path: .*norm.weight"):
        model.load(ModelParams(), tmp_path / "saved")


def test_digest_is_over_names_shapes_types_and_bytes() -> None:
    def of(**tensors: torch.Tensor) -> str:
        module = torch.nn.Module()
        for name, tensor in tensors.items():
            module.register_buffer(name, tensor)
        return model.weights_digest(module)

    one = torch.arange(6.0)
    assert of(a=one) == of(a=one.clone())
    others = [of(b=one), of(a=one.view(2, 3)), of(a=one.double()), of(a=one + 1)]
    assert len({of(a=one), *others}) == 5


def test_family_facts_are_read_off_the_tokenizer_and_the_tower(policy: Policy) -> None:
    tokenizer = policy.processor.tokenizer
    family = policy.family
    assert tokenizer.convert_ids_to_tokens(family.image_token_id) == "<|image_pad|>"
    assert tokenizer.convert_ids_to_tokens(family.end_of_turn_id) == "<|im_end|>"
    assert tokenizer.convert_ids_to_tokens(list(family.banned_ids)) == [
        "<|vision_start|>",
        "<|vision_end|>",
        "<|image_pad|>",
        "<|video_pad|>",
    ]
    assert (family.patch_size, family.merge_size, family.size_multiple) == (8, 2, 16)


def test_processor_without_torchvision_prepares_pictures_and_text(
    policy: Policy, tmp_path: Path
) -> None:
    model.save(policy, tmp_path / "saved")
    processor = load_processor(tmp_path / "saved", "qwen3_vl")
    assert isinstance(processor, ImageOnlyQwen3VLProcessor)
    from PIL import Image  # noqa: PLC0415

    made = processor(
        text=["a<|vision_start|><|image_pad|><|vision_end|>b"],
        images=[Image.new("RGB", (48, 16))],
        return_tensors="np",
    )
    pads = np.asarray(made["input_ids"])[0] == policy.family.image_token_id
    assert int(pads.sum()) == 3
    assert made["image_grid_thw"].tolist() == [[1, 2, 6]]
