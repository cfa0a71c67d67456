"""Loading and saving policies: equal tensors, family facts, and directories that are no policies."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from polyturn import model
from polyturn.model import ModelError, Policy
from polyturn.params import ModelParams
from polyturn.processor import ImageOnlyQwen3VLProcessor, load_processor
from polyturn.render import Renderer
from polyturn.vision import PatchReader
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
    """It is neither tied on the way nor copied over (sglang #18024)."""
    untied = tiny.qwen3(tiny.SMALL.model_copy(update={"tie_embeddings": False}))
    model.save(untied, tmp_path / "saved")
    loaded = model.load(ModelParams(), tmp_path / "saved").model
    head, embedding = loaded.lm_head.weight, loaded.model.language_model.embed_tokens.weight
    assert not torch.equal(head, embedding)
    assert torch.equal(head, untied.model.lm_head.weight)


def test_a_missing_head_is_named_and_never_made_up(tmp_path: Path) -> None:
    """A directory that says untied and has no head (Qwen3-VL-Embedding #89)."""
    untied = tiny.qwen3(tiny.SMALL.model_copy(update={"tie_embeddings": False}))
    model.save(untied, tmp_path / "saved")
    path = tmp_path / "saved" / "model.safetensors"
    tensors = load_file(path)
    del tensors["lm_head.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"do not fit its config: .*lm_head.weight"):
        model.load(ModelParams(), tmp_path / "saved")


def test_an_unknown_tensor_is_named(policy: Policy, tmp_path: Path) -> None:
    model.save(policy, tmp_path / "saved")
    path = tmp_path / "saved" / "model.safetensors"
    save_file({**load_file(path), "model.extra": torch.zeros(2)}, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"unexpected_keys.*model.extra"):
        model.load(ModelParams(), tmp_path / "saved")


def test_names_from_before_the_library_renamed_them_load_to_the_same(
    policy_2_5: Policy, tmp_path: Path
) -> None:
    """visual.* and model.layers.* instead of model.visual.* and model.language_model.* (vllm #19054)."""
    model.save(policy_2_5, tmp_path / "saved")
    path = tmp_path / "saved" / "model.safetensors"
    renamed = {
        name.replace("model.visual.", "visual.").replace("model.language_model.", "model."): tensor
        for name, tensor in load_file(path).items()
    }
    save_file(renamed, path, metadata={"format": "pt"})
    loaded = model.load(ModelParams(), tmp_path / "saved")
    assert model.weights_digest(loaded.model) == model.weights_digest(policy_2_5.model)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda d: (d / "config.json").unlink(), "has no config.json"),
        (lambda d: edit_config(d, lambda c: c.update(model_type="llama")), "is a 'llama'"),
        (lambda d: (d / "model.safetensors").unlink(), "cannot be loaded"),
        (lambda d: (d / "tokenizer.json").unlink(), "the tokenizer lacks"),
    ],
    ids=["no config", "another family", "no weights", "no tokenizer"],
)
def test_what_is_no_policy_is_refused_with_its_key(
    policy: Policy, tmp_path: Path, spoil: Callable[[Path], None], message: str
) -> None:
    model.save(policy, tmp_path / "saved")
    spoil(tmp_path / "saved")
    with pytest.raises(ModelError, match=message) as raised:
        model.load(ModelParams(), tmp_path / "saved")
    assert str(raised.value).startswith("model.path: ")


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
    with pytest.raises(ModelError, match=r"model.path: .*norm.weight"):
        model.load(ModelParams(), tmp_path / "saved")


def test_a_path_that_is_nothing_is_refused(tmp_path: Path) -> None:
    for path in (str(tmp_path / "nothing"), "./nothing", "a/b/c"):
        with pytest.raises(ModelError, match=r"model.path: directory .* does not exist"):
            model.resolve(ModelParams(path=path), tmp_path)
    assert model.resolve(ModelParams(path=str(tmp_path)), tmp_path) == (tmp_path, None)


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
