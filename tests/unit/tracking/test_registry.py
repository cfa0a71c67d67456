"""Registration: verified before it counts, idempotent, and the champion moves only on improvement (PIPE-13)."""

from collections.abc import Iterator
from pathlib import Path

import mlflow
import pytest
from mlflow.artifacts import download_artifacts

from polyturn.params import RegistryParams, TrackingParams
from polyturn.statistics import Interval
from polyturn.tracking import Run, TrackingError, open_run
from polyturn.tracking.lineage import directory_digest
from polyturn.tracking.registry import (
    Candidate,
    Registration,
    RegistryError,
    evaluation_digest,
    register,
)

PARAMS = RegistryParams(name="tiny policy")


@pytest.fixture
def run(project: Path) -> Iterator[Run]:
    with open_run(TrackingParams(), root=project, name="register", stage="register") as opened:
        yield opened


def policy(project: Path, weights: str) -> Path:
    directory = project / f"policy-{weights}"
    (directory / "nested").mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text("{}")
    (directory / "nested/model.safetensors").write_text(weights)
    return directory


def candidate(project: Path, weights: str, accuracy: float, evaluation: str = "set 1") -> Candidate:
    interval = Interval(accuracy, accuracy - 0.1, accuracy + 0.1)
    return Candidate(
        policy(project, weights),
        evaluation,
        interval,
        {1: accuracy, 4: 0.9},
        {"git.commit": "c0ffee"},
    )


def aliases(run: Run) -> dict[str, int]:
    found = run.store.client.get_registered_model(PARAMS.name).aliases
    return {alias: int(version) for alias, version in found.items()}


def test_the_first_policy_becomes_champion_with_its_evaluation_as_tags(project: Path, run: Run):
    entry = candidate(project, "a", 0.5)
    assert register(run, entry, PARAMS) == Registration(
        "tiny policy", 1, "champion", "there was no champion"
    )
    version = run.store.client.get_model_version_by_alias(PARAMS.name, "champion")
    assert version.tags["accuracy"] == "0.5"
    assert version.tags["accuracy_low"] == "0.4"
    assert version.tags["pass_at_4"] == "0.9"
    assert version.tags["evaluation.digest"] == "set 1"
    assert version.tags["git.commit"] == "c0ffee"
    assert version.tags["policy.digest"] == directory_digest(entry.directory)
    assert version.source.startswith("models:/m-")
    model = run.store.client.get_logged_model(version.source.removeprefix("models:/"))
    assert str(model.status) == "READY"
    assert {m.key: m.value for m in model.metrics or []}["accuracy"] == 0.5


def test_the_champion_downloads_as_the_policy_directory(project: Path, run: Run, tmp_path: Path):
    entry = candidate(project, "a", 0.5)
    register(run, entry, PARAMS)
    mlflow.set_tracking_uri(run.store.addresses.uri)
    path = download_artifacts(f"models:/{PARAMS.name}@champion", dst_path=str(tmp_path / "got"))
    assert directory_digest(Path(path)) == directory_digest(entry.directory)


def test_registering_again_gives_the_same_version_and_words(project: Path, run: Run):
    first = register(run, candidate(project, "a", 0.5), PARAMS)
    assert register(run, candidate(project, "a", 0.5), PARAMS) == first
    assert len(run.store.client.search_model_versions(f"name = '{PARAMS.name}'")) == 1
    assert len(run.store.client.search_logged_models([run.store.experiment_id])) == 1


def test_the_champion_moves_on_improvement_only(project: Path, run: Run):
    register(run, candidate(project, "a", 0.5), PARAMS)
    for weights, accuracy in (("b", 0.5), ("c", 0.4)):
        entry = register(run, candidate(project, weights, accuracy), PARAMS)
        assert entry.alias == "challenger"
        assert f"accuracy {accuracy:.4f} against 0.5000 of version 1" in entry.reason
    assert aliases(run) == {"champion": 1, "challenger": 3}
    assert register(run, candidate(project, "d", 0.51), PARAMS).alias == "champion"
    assert aliases(run) == {"champion": 4, "challenger": 3}


def test_a_gain_must_exceed_the_configured_one(project: Path, run: Run):
    strict = RegistryParams(name=PARAMS.name, min_gain=0.05)
    register(run, candidate(project, "a", 0.5), strict)
    assert register(run, candidate(project, "b", 0.54), strict).alias == "challenger"
    assert register(run, candidate(project, "c", 0.56), strict).alias == "champion"


def test_a_challenger_that_is_promoted_is_no_challenger_any_more(project: Path, run: Run):
    register(run, candidate(project, "a", 0.5), PARAMS)
    strict = RegistryParams(name=PARAMS.name, min_gain=0.2)
    assert register(run, candidate(project, "b", 0.6), strict).alias == "challenger"
    assert register(run, candidate(project, "b", 0.6), PARAMS).alias == "champion"
    assert aliases(run) == {"champion": 2}


def test_another_evaluation_set_is_not_compared(project: Path, run: Run):
    register(run, candidate(project, "a", 0.5), PARAMS)
    entry = register(run, candidate(project, "b", 0.99, "set 2"), PARAMS)
    assert entry.alias == "challenger"
    assert "champion version 1 was scored on another evaluation set" in entry.reason
    assert aliases(run) == {"champion": 1, "challenger": 2}


def test_equal_weights_on_another_evaluation_set_are_a_version_of_their_own(
    project: Path, run: Run
):
    register(run, candidate(project, "a", 0.5), PARAMS)
    assert register(run, candidate(project, "a", 0.6, "set 2"), PARAMS).version == 2


def test_nothing_is_registered_that_does_not_download_as_it_was(
    project: Path, run: Run, monkeypatch: pytest.MonkeyPatch
):
    upload = type(run.store.client).log_model_artifacts

    def lossy(client: object, model_id: str, local_dir: str) -> None:
        (Path(local_dir) / "config.json").rename(project / "lost.json")
        upload(client, model_id, local_dir)
        (project / "lost.json").rename(Path(local_dir) / "config.json")

    monkeypatch.setattr(type(run.store.client), "log_model_artifacts", lossy)
    with pytest.raises(RegistryError, match="no version was made"):
        register(run, candidate(project, "a", 0.5), PARAMS)
    assert run.store.client.search_registered_models() == []
    (model,) = run.store.client.search_logged_models([run.store.experiment_id])
    assert str(model.status) == "FAILED"


@pytest.mark.parametrize("harm", ["deleted", "changed"])
def test_no_alias_moves_to_a_version_whose_files_were_harmed(project: Path, run: Run, harm: str):
    register(run, candidate(project, "a", 0.5), PARAMS)
    register(run, candidate(project, "b", 0.4), PARAMS)
    paths = [
        p for p in (project / "mlartifacts").rglob("model.safetensors") if p.read_text() == "b"
    ]
    for path in paths:
        path.write_text("x") if harm == "changed" else path.unlink()
    with pytest.raises(RegistryError, match="aliases were not moved"):
        register(run, candidate(project, "b", 0.4), RegistryParams(name=PARAMS.name))
    assert aliases(run) == {"champion": 1, "challenger": 2}


def test_the_training_run_is_the_source_where_it_is_known(project: Path, run: Run):
    with open_run(TrackingParams(), root=project, name="train") as train:
        pass
    known = candidate(project, "a", 0.5)
    for source, expected in ((train.run_id, train.run_id), ("0" * 32, run.run_id)):
        entry = Candidate(policy(project, source), "set 1", known.accuracy, source_run_id=source)
        version = register(run, entry, PARAMS).version
        assert run.store.client.get_model_version(PARAMS.name, str(version)).run_id == expected


def test_evaluation_digest_depends_on_problems_order_and_settings():
    lines = ['{"id": 1}\n', '{"id": 2}']
    digest = evaluation_digest(lines, {"temperature": 1.0, "k": 1})
    assert digest == evaluation_digest(
        [line.strip() for line in lines], {"k": 1, "temperature": 1.0}
    )
    assert digest != evaluation_digest(reversed(lines), {"temperature": 1.0, "k": 1})
    assert digest != evaluation_digest(lines, {"temperature": 0.5, "k": 1})


def test_a_name_that_mlflow_cannot_address_is_refused():
    with pytest.raises(ValueError, match="name"):
        RegistryParams(name="a/b")
    assert TrackingError.__mro__[1] is ValueError
