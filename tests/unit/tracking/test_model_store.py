"""The champion's weights: downloaded from MLflow or fetched from DVC, loaded by transformers, asked through pyfunc."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import mlflow
import pytest
import yaml
from mlflow.artifacts import download_artifacts
from transformers import AutoTokenizer, Qwen3VLForConditionalGeneration

from polyturn import layout, params
from polyturn.cli.commands import main
from polyturn.params import Params, RegistryParams, TrackingParams
from polyturn.policy import model
from polyturn.tracking import open_run
from polyturn.tracking.fetch_model import FetchError, fetch_model
from polyturn.tracking.lineage import directory_digest
from polyturn.tracking.registry import Candidate, RegistryError
from tests.unit import tiny
from tests.unit.tracking.scored import candidate, submit, write_params

ANSWERING = Params().model_dump(mode="json", include={"images", "env", "rollout"})
ASK = """
import io, json, sys
import mlflow, pandas as pd
from PIL import Image
loaded = mlflow.pyfunc.load_model(sys.argv[1])
picture = io.BytesIO()
Image.new("RGB", (256, 256), "white").save(picture, "JPEG")
rows = pd.DataFrame({"image": [picture.getvalue()] * 2, "question": ["Find the area.", "Find x."]})
answers = loaded.predict(rows)
import polyturn
drawn = [loaded.predict(rows, params={"temperature": 1.0, "seed": seed})["text"].tolist() for seed in (1, 1, 2)]
print(json.dumps({"code": polyturn.__file__, "answers": answers.to_dict("list"), "drawn": drawn}))
"""


def answering(project: Path, directory: Path) -> Candidate:
    return replace(candidate(project, "a", 0.5), directory=directory, params=ANSWERING)


def dvc(root: Path, *arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "dvc", "-q", *arguments], cwd=root, check=True)


def ask(directory: Path, elsewhere: Path) -> dict[str, object]:
    """What the model says in a process that knows of polyturn through the model's own code alone."""
    output = subprocess.check_output(
        [sys.executable, "-c", ASK, str(directory)], cwd=elsewhere, text=True
    )
    return json.loads(output.splitlines()[-1])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("saved") / "policy"
    model.save(tiny.qwen3(), directory)
    return directory


def test_the_champion_downloads_loads_and_answers(
    project: Path, saved: Path, tmp_path: Path
) -> None:
    submit(project, answering(project, saved))
    mlflow.set_tracking_uri(f"sqlite:///{project}/mlflow.db")
    got = Path(download_artifacts("models:/tiny policy@champion", dst_path=str(tmp_path / "got")))
    loaded = Qwen3VLForConditionalGeneration.from_pretrained(got)
    assert model.weights_digest(loaded) == model.weights_digest(
        model.load(Params().model, saved).model
    )
    assert AutoTokenizer.from_pretrained(got).convert_tokens_to_ids("<|im_end|>") is not None
    said = ask(got, tmp_path)
    assert str(said["code"]).startswith(str(got / "polyturn.zip"))
    answers = said["answers"]
    assert isinstance(answers, dict)
    assert list(answers) == ["answer", "text", "num_turns", "stop_reason"]
    assert len(answers["text"]) == 2
    assert all(1 <= turns <= Params().rollout.max_turns for turns in answers["num_turns"])
    drawn = said["drawn"]
    assert isinstance(drawn, Sequence)
    assert drawn[0] == drawn[1] != drawn[2]
    info = mlflow.models.get_model_info(str(got))
    assert info.signature is not None
    assert [c.name for c in info.signature.inputs] == ["image", "question"]
    assert (got / "input_example.json").is_file()
    pins = (got / "requirements.txt").read_text().splitlines()
    assert all("==" in pin and "+" not in pin for pin in pins)
    assert {"torch", "transformers", "pillow"} <= {pin.partition("==")[0] for pin in pins}


@pytest.mark.full
def test_large_weights_are_stored_once_and_fetched_by_digest(
    project: Path, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The champion is a pointer at DVC's object, which comes from the cache, and without it from the remote."""
    dvc(project, "init", "--no-scm")
    dvc(project, "remote", "add", "-d", "shared", "../remote")
    policy = project / layout.POLICY
    shutil.copytree(saved, policy)
    dvc(project, "add", str(layout.POLICY))
    dvc(project, "push")
    md5 = yaml.safe_load(policy.with_name("policy.dvc").read_text())["outs"][0]["md5"]
    size = sum(path.stat().st_size for path in saved.rglob("*"))
    limit = RegistryParams(name="tiny policy", external_model_size=size // 2)
    entry = replace(answering(project, policy), dvc_md5=md5)
    assert submit(project, entry, limit).version == 1
    assert submit(project, entry, limit).version == 1
    stored = sum(p.stat().st_size for p in (project / "mlartifacts").rglob("*.safetensors"))
    assert stored == 0
    write_params(project, model={"path": None})
    monkeypatch.chdir(project)
    for name in ("models:/tiny policy@champion", "champion"):
        assert main(["fetch-model", name, "--out", str(tmp_path / name.replace("/", "_"))]) == 0
    shutil.rmtree(project / ".dvc/cache")
    got = fetch_model("v1", tmp_path / "got", params.load(Path("params.yaml")), project)
    assert model.load(Params().model, got)
    assert (got / "MLmodel").is_file()
    assert ask(got, tmp_path)["code"]
    (path,) = got.glob("*.safetensors")
    with pytest.raises(FetchError, match="exists; name another directory"):
        fetch_model("v1", path.parent, params.load(Path("params.yaml")), project)
    # What was deleted from cache and remote is named.
    shutil.rmtree(project / ".dvc/cache")
    shutil.rmtree(project.parent / "remote")
    with pytest.raises(ValueError, match=f"DVC object {md5} is neither in the cache"):
        fetch_model("v1", tmp_path / "none", params.load(Path("params.yaml")), project)
    with pytest.raises(RegistryError, match="aliases were not moved"):
        submit(project, entry, limit)


def test_a_large_policy_that_dvc_does_not_know_is_stored(
    project: Path, caplog: pytest.LogCaptureFixture
) -> None:
    entry = candidate(project, "a", 0.5)
    submit(project, entry, RegistryParams(name="tiny policy", external_model_size=1))
    assert "registry.external_model_size" in caplog.text
    got = fetch_model(
        "champion", project / "got", Params(registry=RegistryParams(name="tiny policy")), project
    )
    assert (got / "nested/model.safetensors").read_text() == "a"


def test_files_that_were_changed_where_they_are_stored_are_not_handed_out(project: Path) -> None:
    submit(project, candidate(project, "a", 0.5))
    for path in (project / "mlartifacts").rglob("model.safetensors"):
        path.write_text("x")
    chosen = Params(registry=RegistryParams(name="tiny policy"))
    with pytest.raises(FetchError, match="its files were changed"):
        fetch_model("champion", project / "got", chosen, project)
    assert not (project / "got").exists()
    assert not list(project.glob(".got-*"))


def test_the_model_is_linked_to_its_metrics_data_and_runs(project: Path) -> None:
    entry = candidate(project, "a", 0.5)
    with open_run(TrackingParams(system_metrics_s=0), root=project, name="train") as train:
        pass
    submit(project, replace(entry, source_run_id=train.run_id))
    client = train.store.client
    version = client.get_model_version_by_alias("tiny policy", "champion")
    stored = client.get_logged_model(str(version.source).removeprefix("models:/"))
    assert stored.source_run_id == train.run_id
    (accuracy,) = [m for m in stored.metrics or [] if m.key == "accuracy"]
    assert (accuracy.value, accuracy.dataset_name, accuracy.dataset_digest) == (
        0.5, "test problems", "set 1",
    )  # fmt: skip
    assert stored.tags["policy.digest"] == directory_digest(entry.directory)
    found = client.search_logged_models(
        [train.store.experiment_id], filter_string="metrics.accuracy > 0.4"
    )
    assert [m.model_id for m in found] == [stored.model_id]
