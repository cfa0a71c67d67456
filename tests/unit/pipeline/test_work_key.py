"""The key of work in progress: what changes it and what does not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from polyturn.params import Params, parse
from polyturn.params_tree import merge
from polyturn.pipeline import work_key as module
from polyturn.pipeline.work_key import work_key

DVC = """
stages:
  train:
    cmd: python -m tasks.train
    deps: [data, code.py]
    params: [seed, env, reward, rollout, sampler, learner, loss, train]
    outs: [out]
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with one stage and its deps."""
    (tmp_path / "dvc.yaml").write_text(DVC)
    (tmp_path / "code.py").write_text("a = 1\n")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "rows").write_text("1\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def params(**changes: object) -> Params:
    return parse(merge({}, changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"train": {"steps": 7}},
        {"train": {"checkpoint_every": 7}},
        {"train": {"resume": "never"}},
        {"train": {"work_uri": "/tmp/elsewhere"}},
        {"train": {"keep_checkpoints": 7}},
        {"train": {"launcher": "slurm", "launch": {"hours": 2}, "lease_s": 5.0}},
        {"learner": {"num_processes": 2}},
        {"learner": {"num_processes": 4, "tensor_parallel": 2, "sequence_parallel": True}},
        {"learner": {"offload": True, "reshard_after_forward": False}},
        {"train": {"stop": {"max_gpu_hours": 1.0}}},
        {"sampler": {"sglang": {"urls": ["http://other:30000"], "start_timeout_s": 9.0}}},
        {"env": {"max_failure_fraction": 0.5}, "reward": {"max_failure_fraction": 0.5}},
        {"rollout": {"blind_problems": 0}, "loss": {"start_tolerance": 0.5}},
        {"evaluate": {"greedy": False}},
        {"tracking": {"experiment": "other"}},
    ],
)
def test_how_far_and_where_a_run_goes_does_not_change_its_key(
    project: Path, changes: dict[str, object]
) -> None:
    assert work_key("train", params(**changes)) == work_key("train", params())


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 1},
        {"rollout": {"temperature": 0.9}},
        {"learner": {"decay_steps": 7}},
        {"train": {"updates_per_rollout": 1}},
        {"train": {"eval_every": 7}},
        {"sampler": {"backend": "sglang"}},
        {"sampler": {"sglang": {"dtype": "float32"}}},
        {"sampler": {"sglang": {"tensor_parallel": 2}}},
    ],
)
def test_params_that_change_the_numbers_change_the_key(
    project: Path, changes: dict[str, object]
) -> None:
    assert work_key("train", params(**changes)) != work_key("train", params())


def test_code_and_data_change_the_key_and_caches_do_not(project: Path) -> None:
    keys = [work_key("train", params())]
    (project / "code.py").write_text("a = 2\n")
    keys.append(work_key("train", params()))
    (project / "data" / "rows").write_text("2\n")
    keys.append(work_key("train", params()))
    (project / "data" / "more").write_text("")
    keys.append(work_key("train", params()))
    assert len(set(keys)) == 4
    (project / "data" / "__pycache__").mkdir()
    (project / "data" / "__pycache__" / "x.pyc").write_text("x")
    assert work_key("train", params()) == keys[-1]


def test_another_checkout_of_the_same_files_has_the_same_key(
    project: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil  # noqa: PLC0415

    key = work_key("train", params())
    other = tmp_path_factory.mktemp("elsewhere") / "copy"
    shutil.copytree(project, other)
    monkeypatch.chdir(other)
    assert work_key("train", params()) == key


def test_the_engine_s_version_counts_where_it_samples(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = [params(), params(sampler={"backend": "sglang"})]
    before = [work_key("train", each) for each in chosen]
    known = module._version
    monkeypatch.setattr(
        module, "_version", lambda name: "0.5.15" if name == "sglang" else known(name)
    )
    assert [work_key("train", each) == key for each, key in zip(chosen, before, strict=True)] == [
        *(True, False)
    ]


def test_another_kind_of_gpu_is_another_key_but_not_for_a_learner_on_the_cpu(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    keys: dict[str, list[str]] = {"auto": [], "cpu": []}
    for name in ("NVIDIA H200", "NVIDIA H100"):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda name=name: name)
        for device, found in keys.items():
            found.append(work_key("train", params(learner={"device": device})))
    assert len(set(keys["auto"])) == 2
    assert len(set(keys["cpu"])) == 1


def test_the_step_files_that_are_trained_on_count(project: Path) -> None:
    (project / "saved").mkdir()
    debug = {"mode": "train_only", "rollouts": "saved"}
    keys: list[str] = []
    for content in ("one", "two"):
        (project / "saved" / "step_000000.jsonl.gz").write_text(content)
        keys.append(work_key("train", params(train={"debug": debug})))
    assert len(set(keys)) == 2
