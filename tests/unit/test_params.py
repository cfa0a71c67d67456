"""params.yaml: every mistake is one line with key, value and what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ruamel.yaml import YAML

from polyturn import params, params_tree
from polyturn.params import Params, ParamsError

leaves = st.none() | st.booleans() | st.integers() | st.text(max_size=3)
trees = st.recursive(
    leaves, lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3), max_leaves=8
)
mappings = st.dictionaries(st.sampled_from("abc"), trees, max_size=3)


def test_params_yaml_of_the_checkout_is_valid(root: Path) -> None:
    assert params.load(root / "params.yaml").seed >= 0


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"train": {"stepz": 3}}, "train.stepz is not a key of polyturn; known here: async_steps, checkpoint_every"),
        ({"trian": {}}, "trian is not a key of polyturn; known here: data, doctor"),
        ({"rollout": {"group_size": 1}}, "rollout.group_size: Input should be greater than or equal to 2, got 1"),
        ({"learner": {"lr": "fast"}}, 'learner.lr: Input should be a valid number, unable to parse string as a number, got "fast"'),
        ({"learner": {"lr": float("inf")}}, "learner.lr: "),
        ({"model": {"revision": 12}}, "model.revision: Input should be a valid string (put it in quotes), got 12"),
        ({"model": {"path": ""}}, 'model.path: must not be blank; null is for none, got ""'),
        ({"storage": {"endpoint_url": " "}}, "storage.endpoint_url: must not be blank"),  # Netflix/metaflow#1991
        ({"env": {"build": "zoom"}}, 'env.build: String should match pattern'),
        ({"sampler": {"backend": "vllm"}}, "sampler.backend: Input should be 'hf' or 'sglang', got \"vllm\""),
        ({"loss": {"aggregation": "constant"}}, "constant_divisor is needed with aggregation: constant"),
        ({"learner": {"betas": [0.9, 1.0]}}, "learner.betas.1: Input should be less than 1, got 1.0"),
        ({"warmstart": {"betas": [1, 0.9]}}, "warmstart.betas.0: Input should be less than 1, got 1"),
        ({"train": {"steps": 5, "debug": {"dump_step": 5}}}, "debug.dump_step 5 is no step of a run of 5"),
        ({"data": {"synthetic": {"min_value": 7}}}, "max_value 6 is below min_value 7"),
        ({"learner": {"warmup_steps": 50}}, "warmup_steps must be below decay_steps, which is 40"),
        ({"learner": {"min_lr_fraction": 0}, "train": {"steps": 41}}, "the learning rate is 0 from step 40 on"),
        ({"reward": {"terms": []}}, "reward.terms: Tuple should have at least 1 item"),
        ({"reward": {"terms": [{"term": "a:b", "weight": 0}]}}, "terms all have weight 0"),
        ({"train": {"stop": {"max_logprob_gap": 0.5}}}, "stop.max_logprob_gap 0.5 never ends a run"),
        ({"model": {"revision": "main"}}, "revision 'main' pins a commit of a hub id, and path is None"),
        ({"model": {"path": "s3://b/m", "revision": "main"}}, "and path is s3://b/m; set it to null"),
        ({"model": {"small": {"num_heads": 3}}}, "num_heads must be a multiple of num_kv_heads, which is 2"),
        ({"model": {"small": {"head_dim": 31}}}, "head_dim must be even"),
        ({"model": {"small": {"vision_num_heads": 5}}}, "vision_hidden_size must be a multiple of 20"),
        ({"model": {"small": {"deepstack_layers": [2]}}}, "different layers of the tower, 0 to 1, got [2]"),
        ({"model": {"small": {"deepstack_layers": [1, 1]}}}, "different layers of the tower, 0 to 1, got [1, 1]"),
        ({"model": {"small": {"deepstack_layers": [0, 1], "num_layers": 1}}}, "the decoder, which has 1, got [0, 1]"),
    ],
)  # fmt: skip
def test_a_mistake_is_named(tree: dict[str, object], message: str) -> None:
    with pytest.raises(ParamsError) as caught:
        params.parse(tree, origin="params.yaml")
    (line,) = str(caught.value).splitlines()
    assert line.startswith("params.yaml: ")
    assert message in line


@pytest.mark.parametrize(
    "text",
    [
        "seed: true",
        "train: {keep_checkpoints: yes}",
        "train: {async_steps: on}",
        "train: {stop: {plateau_evals: true}}",
        "learner: {lr: true}",
        "learner: {betas: [false, 0.9]}",
        "learner: {lora: {alpha: yes}}",
        "loss: {kl_coef: no}",
        "reward: {terms: [{term: 'a:b', weight: true}]}",
        "warmstart: {phases: [{name: a, mix: {b: yes}, lr: 1.0e-3, max_steps: 1}]}",
        "warmstart: {example_params: {zoom: on}}",
    ],
)
def test_a_truth_value_is_no_number(text: str) -> None:
    """omnigent #1069: true was taken for 1, and false for 0."""
    with pytest.raises(ParamsError, match="must be a number, not a truth value"):
        params.parse(cast("params_tree.Tree", params_tree.parse_yaml(text)))


def test_truth_values_stay_where_they_belong() -> None:
    """In keys that are on or off, and in what is handed to somebody's own code."""
    tree = {"env": {"params": {"a": True}}, "learner": {"offload": True, "lora": None}}
    parsed = params.parse(tree)
    assert parsed.learner.offload
    assert parsed.env.params == {"a": True}


def test_a_number_may_be_written_as_yaml_1_1_reads_it() -> None:
    """h2o-llmstudio #699: YAML 1.1 takes 1e-5, without a point, for a text."""
    tree = cast("params_tree.Tree", params_tree.parse_yaml("learner: {lr: 1e-5}"))
    assert tree == {"learner": {"lr": "1e-5"}}
    assert params.parse(tree).learner.lr == 1e-5


@pytest.mark.parametrize(
    ("learner", "steps"),
    [
        ({}, 400),
        ({"min_lr_fraction": 0}, 40),
        ({"min_lr_fraction": 0, "schedule": "constant"}, 400),
    ],
)
def test_a_rate_may_fall_to_zero_where_the_run_ends(learner: dict[str, object], steps: int) -> None:
    """ROLL #407: it was 0 from step 123 of 200 on, and no step after that learned anything."""
    params.parse({"learner": learner, "train": {"steps": steps}})


def test_a_constant_rate_may_rise_for_as_long_as_it_likes() -> None:
    parsed = params.parse({"learner": {"schedule": "constant", "warmup_steps": 50}})
    assert parsed.learner.warmup_steps == 50


def test_several_mistakes_are_told_at_once_a_line_each() -> None:
    with pytest.raises(ParamsError) as caught:
        params.parse({"seed": -1, "train": {"steps": 0}, "x": 1})
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [("seed: [", "is not valid YAML"), ("- 1", "must hold a mapping of sections, got list")],
)
def test_a_file_that_holds_no_params_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "params.yaml"
    path.write_text(text)
    with pytest.raises(ParamsError, match=message):
        params.load(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed: 1\nseed: 2\n", "key 'seed' is there twice .*line 2"),
        ("learner: {lr: 1.0e-5}\nseed: 1\nlearner: {schedule: linear}\n", "key 'learner' is there twice .*line 3"),
        ("learner:\n  lr: 1.0e-5\n  lr: 1.0e-6\n", "key 'lr' is there twice .*line 3"),
    ],
)  # fmt: skip
def test_a_key_that_is_there_twice_is_named(tmp_path: Path, text: str, message: str) -> None:
    """snowflakedb/ArcticTraining#85, kedro-org/kedro#825: the first section was dropped without a word."""
    path = tmp_path / "params.yaml"
    path.write_text(text)
    with pytest.raises(ParamsError, match=message):
        params.load(path)


@pytest.mark.parametrize(
    "text",
    ["010", "-010", "08", "00", "1:30", "1:30.5", "1e-5", "+1e3", "1.0e5", "1E5", ".5", "5.", "1_000", "0x1F", "1e5x", "e5"],
)  # fmt: skip
def test_numbers_are_read_as_dvc_reads_them(tmp_path: Path, text: str) -> None:
    """wireviz/WireViz#213, yaml/pyyaml#173: 010 was eight here and ten for DVC, and 1e-5 in env.params was text."""
    path = tmp_path / "params.yaml"
    path.write_text(f"env: {{params: {{value: {text}}}}}\n")
    ours, dvc = params.load(path).env.params["value"], YAML(typ="safe").load(text)
    assert (type(ours), ours) == (type(dvc), dvc)


def test_yaml_anchors_and_merge_keys_are_no_duplicates(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    path.write_text(
        "learner: &one {lr: 1.0e-5}\ntrain: {<<: {steps: 3}, <<: {eval_every: 2}, steps: 4}\n"
    )
    loaded = params.load(path)
    assert (loaded.train.steps, loaded.train.eval_every, loaded.learner.lr) == (4, 2, 1e-5)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ParamsError, match="does not exist"):
        params.load(tmp_path / "params.yaml")


def test_params_do_not_change() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Params().seed = 1  # type: ignore[misc]


@given(mappings, mappings)
def test_merging_keeps_every_value_of_the_overlay(
    base: params_tree.Tree, overlay: params_tree.Tree
) -> None:
    merged = params_tree.merge(base, overlay)
    assert params_tree.merge(merged, overlay) == merged
    assert set(merged) == set(base) | set(overlay)


@given(mappings)
def test_merging_with_nothing_changes_nothing(tree: params_tree.Tree) -> None:
    assert params_tree.merge(tree, {}) == tree
    assert params_tree.merge({}, tree) == tree


def test_a_dotted_override_reaches_its_key_alone() -> None:
    tree = {"train": {"steps": 5, "eval_every": 2}, "seed": 0}
    assert params_tree.override(tree, {"train.steps": 7, "seed": 1}) == {
        "train": {"steps": 7, "eval_every": 2},
        "seed": 1,
    }
    assert tree["train"] == {"steps": 5, "eval_every": 2}


@pytest.mark.parametrize(
    ("key", "meant"),
    [("train.lr", "learner.lr"), ("model.steps", "train.steps"), ("data.nope", "")],
)
def test_a_key_of_another_section_is_pointed_out(key: str, meant: str) -> None:
    section, _, name = key.partition(".")
    with pytest.raises(ParamsError) as caught:
        params.parse({section: {name: 1}})
    assert str(caught.value).endswith(f"; did you mean {meant}?") == bool(meant)
    assert "\n" not in str(caught.value)
