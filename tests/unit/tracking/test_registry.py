"""Registration: verified before it counts, idempotent, and the champion moves only on improvement (PIPE-13)."""

from collections.abc import Iterator
from pathlib import Path

import mlflow
import pytest
from mlflow.artifacts import download_artifacts
from mlflow.exceptions import MlflowException

from polyturn.params import RegistryParams, TrackingParams
from polyturn.tracking import Run, TrackingError, comparisons, open_run, promotion
from polyturn.tracking.lineage import directory_digest, listed_digest
from polyturn.tracking.registry import Candidate, Registration, RegistryError
from tests.unit.tracking.scored import PARAMS, candidate, policy, submit


@pytest.fixture
def run(project: Path) -> Iterator[Run]:
    with open_run(TrackingParams(), root=project, name="register", stage="register") as opened:
        yield opened


def aliases(run: Run) -> dict[str, int]:
    found = run.store.client.get_registered_model(PARAMS.name).aliases
    return {alias: int(version) for alias, version in found.items()}


def test_the_first_policy_becomes_champion_with_its_evaluation_as_tags(project: Path, run: Run):
    entry = candidate(project, "a", 0.5)
    assert submit(project, entry) == Registration(
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
    submit(project, entry)
    mlflow.set_tracking_uri(run.store.addresses.uri)
    path = download_artifacts(f"models:/{PARAMS.name}@champion", dst_path=str(tmp_path / "got"))
    names = [Path("config.json"), Path("nested/model.safetensors")]
    assert listed_digest(Path(path), names) == directory_digest(entry.directory)


def test_registering_again_gives_the_same_version_and_words(project: Path, run: Run):
    first = submit(project, candidate(project, "a", 0.5))
    assert submit(project, candidate(project, "a", 0.5)) == first
    assert len(run.store.client.search_model_versions(f"name = '{PARAMS.name}'")) == 1
    assert len(run.store.client.search_logged_models([run.store.experiment_id])) == 1


def test_the_champion_moves_only_where_the_interval_of_the_paired_gain_is_above_zero(
    project: Path, run: Run
):
    submit(project, candidate(project, "a", 0.5))
    # One problem more of 64: the interval of the gain holds 0. Ten more: it does not.
    for weights, accuracy in (("b", 0.5), ("c", 0.4), ("d", 33 / 64)):
        entry = submit(project, candidate(project, weights, accuracy))
        assert entry.alias == "challenger"
        assert "over tiny policy v1 on 64 problems: the lower bound does not exceed" in entry.reason
    assert aliases(run) == {"champion": 1, "challenger": 4}
    promoted = submit(project, candidate(project, "e", 42 / 64))
    assert promoted.alias == "champion"
    assert promoted.reason.startswith("gain +0.1562 [+0.0")
    assert "(comparison 4 on this set)" in promoted.reason
    assert aliases(run) == {"champion": 5, "challenger": 4}


def test_the_lower_bound_must_exceed_the_configured_gain(project: Path):
    submit(project, candidate(project, "a", 0.5))
    strict = RegistryParams(name=PARAMS.name, min_gain=0.2)
    better = candidate(project, "b", 42 / 64)
    assert submit(project, better, strict).alias == "challenger"
    assert submit(project, better, PARAMS).alias == "champion"


def test_a_challenger_that_is_promoted_is_no_challenger_any_more(project: Path, run: Run):
    submit(project, candidate(project, "a", 0.5))
    strict = RegistryParams(name=PARAMS.name, min_gain=0.5)
    assert submit(project, candidate(project, "b", 0.8), strict).alias == "challenger"
    assert submit(project, candidate(project, "b", 0.8), PARAMS).alias == "champion"
    assert aliases(run) == {"champion": 2}


def test_registering_promotes_nothing_where_it_is_told_not_to(project: Path, run: Run):
    submit(project, candidate(project, "a", 0.5))
    by_hand = RegistryParams(name=PARAMS.name, promote_on_register=False)
    entry = submit(project, candidate(project, "b", 0.9), by_hand)
    assert entry.alias == "challenger"
    assert entry.reason.endswith("promote_on_register is false: `polyturn promote` moves it")
    assert aliases(run) == {"champion": 1, "challenger": 2}
    again = submit(project, candidate(project, "a", 0.5), by_hand)
    assert (again.version, again.alias) == (1, "champion")


@pytest.mark.parametrize(
    "conflict",
    [
        "BAD_REQUEST: (psycopg2.errors.UniqueViolation) duplicate key value violates unique constraint",
        "BAD_REQUEST: (sqlite3.IntegrityError) UNIQUE constraint failed: registered_model_aliases.name",
        None,  # the other one is a moment earlier
    ],
)
def test_of_two_registrations_at_once_the_second_is_judged_against_the_first(
    project: Path, run: Run, monkeypatch: pytest.MonkeyPatch, conflict: str | None
):
    """Both saw no champion; the database refuses the second alias, or the second champion would never be compared."""
    submit(project, candidate(project, "a", 0.5))
    run.store.client.delete_registered_model_alias(PARAMS.name, "champion")
    real = {"move": promotion.move, "judge": promotion.judge}
    others = iter([None])

    def other_comes_first(*arguments: object) -> None:
        for _ in others:
            real["move"](run.store, PARAMS.name, 1, "champion", "the other one")
            if conflict:
                raise MlflowException(conflict)

    def move(*arguments: object) -> object:
        other_comes_first()
        return real["move"](*arguments)

    def judge(*arguments: object) -> object:
        verdict = real["judge"](*arguments)
        if conflict is None:
            other_comes_first()
        return verdict

    monkeypatch.setattr(promotion, "move", move)
    monkeypatch.setattr(promotion, "judge", judge)
    entry = submit(project, candidate(project, "b", 33 / 64))
    assert entry.alias == "challenger"
    assert "over tiny policy v1 on 64 problems: the lower bound does not exceed" in entry.reason
    assert aliases(run) == {"champion": 1, "challenger": 2}


def test_an_alias_that_is_refused_for_another_reason_ends_the_registration(
    project: Path, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*arguments: object) -> None:
        raise MlflowException("PERMISSION_DENIED: no")

    monkeypatch.setattr(promotion, "move", refuse)
    with pytest.raises(TrackingError, match="PERMISSION_DENIED"):
        submit(project, candidate(project, "a", 0.5))


def test_every_comparison_on_a_set_is_counted_and_pairs_once(project: Path, run: Run):
    for weights, accuracy in (("a", 0.5), ("b", 0.5), ("c", 0.5), ("c", 0.5)):
        submit(project, candidate(project, weights, accuracy))
    assert comparisons.count(run.store, "set 1") == comparisons.Count(total=3, pairs=2)
    assert comparisons.count(run.store, "set 2") == comparisons.Count(total=0, pairs=0)


def test_another_evaluation_set_is_not_compared(project: Path, run: Run):
    submit(project, candidate(project, "a", 0.5))
    entry = submit(project, candidate(project, "b", 0.99, "set 2"))
    assert entry.alias == "challenger"
    assert (
        "tiny policy v1 was scored on evaluation set set 1, tiny policy v2 on set 2" in entry.reason
    )
    assert aliases(run) == {"champion": 1, "challenger": 2}


def test_equal_weights_on_another_evaluation_set_are_a_version_of_their_own(
    project: Path, run: Run
):
    submit(project, candidate(project, "a", 0.5))
    assert submit(project, candidate(project, "a", 0.6, "set 2")).version == 2


def test_nothing_is_registered_that_does_not_download_as_it_was(
    project: Path, run: Run, monkeypatch: pytest.MonkeyPatch
):
    upload = type(run.store.client).log_model_artifacts

    def lossy(client: object, model_id: str, local_dir: str) -> None:
        if not (Path(local_dir) / "config.json").is_file():  # the flavour's files
            return upload(client, model_id, local_dir)
        (Path(local_dir) / "config.json").rename(project / "lost.json")
        upload(client, model_id, local_dir)
        (project / "lost.json").rename(Path(local_dir) / "config.json")
        return None

    monkeypatch.setattr(type(run.store.client), "log_model_artifacts", lossy)
    with pytest.raises(RegistryError, match="no version was made"):
        submit(project, candidate(project, "a", 0.5))
    assert run.store.client.search_registered_models() == []
    (model,) = run.store.client.search_logged_models([run.store.experiment_id])
    assert str(model.status) == "FAILED"


@pytest.mark.parametrize("harm", ["deleted", "changed"])
def test_no_alias_moves_to_a_version_whose_files_were_harmed(project: Path, run: Run, harm: str):
    submit(project, candidate(project, "a", 0.5))
    submit(project, candidate(project, "b", 0.4))
    paths = [
        p for p in (project / "mlartifacts").rglob("model.safetensors") if p.read_text() == "b"
    ]
    for path in paths:
        path.write_text("x") if harm == "changed" else path.unlink()
    with pytest.raises(RegistryError, match="aliases were not moved"):
        submit(project, candidate(project, "b", 0.4))
    assert aliases(run) == {"champion": 1, "challenger": 2}


def test_the_training_run_is_the_source_where_it_is_known(project: Path, run: Run):
    with open_run(TrackingParams(), root=project, name="train") as train:
        pass
    known = candidate(project, "a", 0.5)
    for source, name in ((train.run_id, "train"), ("0" * 32, "register")):
        entry = Candidate(policy(project, source), "set 1", known.accuracy, source_run_id=source)
        version = submit(project, entry).version
        stored = run.store.client.get_model_version(PARAMS.name, str(version))
        assert run.store.client.get_run(str(stored.run_id)).info.run_name == name


def test_a_name_that_mlflow_cannot_address_is_refused():
    with pytest.raises(ValueError, match="name"):
        RegistryParams(name="a/b")
    assert TrackingError.__mro__[1] is ValueError
