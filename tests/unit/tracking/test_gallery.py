"""Trajectories of a training run in MLflow: traces of each step, step files as artifacts, and the way back to them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from polyturn import layout, trajectories
from polyturn.cli import view
from polyturn.evaluation.statistics import Interval
from polyturn.params import Params, TrackingParams, parse
from polyturn.pictures import Pictures
from polyturn.tracking import open_run
from polyturn.tracking.gallery import ARTIFACTS, Gallery, choose, log_step_files
from polyturn.tracking.locate import LocateError, locate
from polyturn.tracking.promotion import Rule
from polyturn.tracking.registry import Candidate, register
from polyturn.trajectories import TrajectoryEntry
from tests.unit.fake_run import STEPS, make_run

PARAMS: Params = parse({})


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("trained"))


def pictures_of(root: Path) -> Pictures:
    return Pictures([root / layout.TRAJECTORIES / "png", root / layout.IMAGES / "png"])


def entry(group: int, sibling: int, reward: float | None) -> TrajectoryEntry:
    return {"group": group, "sibling": sibling, "reward": reward}  # type: ignore[typeddict-item]


def test_the_chosen_are_best_and_worst_of_the_groups_that_differ_most() -> None:
    rewards = {0: (1.0, 1.0), 1: (0.0, 0.2, 0.1), 2: (0.0, 1.0, None), 3: (None, None)}
    entries = [entry(g, s, r) for g, row in rewards.items() for s, r in enumerate(row)]
    chosen = [(e["group"], e["sibling"]) for e in choose(entries[::-1], 6)]
    assert chosen == [(2, 1), (2, 2), (1, 1), (1, 0), (0, 0), (0, 1)]
    assert [(e["group"], e["sibling"]) for e in choose(entries, 1)] == [(2, 1)]
    assert choose(entries, 0) == []


def test_each_step_has_traces_with_pictures_that_are_linked_to_the_run(
    project: Path, trained: Path
) -> None:
    with open_run(TrackingParams(), root=project, name="train", stage="train") as run:
        gallery = Gallery(run, 2, pictures_of(trained))
        for step in (0, STEPS - 1):
            gallery.show(trajectories.read_step(trained / layout.TRAJECTORIES, step))
    found = run.store.client.search_traces(locations=[run.store.experiment_id], run_id=run.run_id)
    assert sorted(trace.info.tags["step"] for trace in found) == ["0", "0", "39", "39"]
    for trace in found:
        assert trace.info.trace_metadata["mlflow.sourceRun"] == run.run_id
        shown = json.dumps([span.inputs for span in trace.data.spans])
        # MLflow keeps pictures of messages as files of the trace.
        name = re.search(r"mlflow-attachment://([\w-]+)\?content_type=image%2Fpng", shown)
        assert name
        assert list(project.rglob(f"{name[1]}*"))
        (feedback,) = trace.info.assessments
        assert feedback.name == "reward"
    rewards = sorted(trace.info.assessments[0].value for trace in found)
    assert rewards[0] < rewards[-1]


def test_a_store_that_refuses_costs_a_warning(
    project: Path, trained: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open_run(TrackingParams(), root=project, name="train") as run:
        pass
    (project / "mlflow.db").write_bytes(b"no database any more")
    entries = trajectories.read_step(trained / layout.TRAJECTORIES, 0)
    Gallery(run, 1, pictures_of(trained)).show(entries)
    assert "step 0 has no traces" in caplog.text


def kept_run(project: Path, trained: Path, parent: str | None = None) -> str:
    with open_run(
        TrackingParams(), root=project, name="train", stage="train", parent_run_id=parent
    ) as run:
        log_step_files(
            run,
            trained / layout.TRAJECTORIES,
            1,
            pictures=pictures_of(trained),
            tokenizer=trained / layout.POLICY / "tokenizer.json",
        )
    return run.run_id


def test_a_run_id_leads_to_step_files_whose_page_has_all_pictures(
    project: Path, trained: Path, tmp_path: Path
) -> None:
    run_id = kept_run(project, trained)
    found = locate(run_id, PARAMS, project)
    assert found == project / ".polyturn/cache/runs" / run_id / ARTIFACTS
    assert trajectories.list_steps(found) == [0]
    page = view.view(found, tmp_path / "view.html").read_text()
    assert page.count("<article") == 16
    assert "northwest" in page
    assert "is not in this directory" not in page
    assert len(set(re.findall(r'data-sha="(\w+)"', page))) > 4


def test_a_pipeline_run_and_a_sibling_stage_lead_to_the_training_run(
    project: Path, trained: Path
) -> None:
    with open_run(TrackingParams(), root=project, name="pipeline") as parent:
        train_id = kept_run(project, trained, parent.run_id)
        with open_run(
            TrackingParams(), root=project, name="evaluate", parent_run_id=parent.run_id
        ) as sibling:
            pass
    for run_id in (parent.run_id, sibling.run_id):
        assert locate(run_id, PARAMS, project).parent.name == train_id


def test_an_alias_leads_to_the_run_that_trained_the_version(project: Path, trained: Path) -> None:
    run_id = kept_run(project, trained)
    with open_run(TrackingParams(), root=project, name="register") as run:
        accuracy = Interval(0.5, 0.4, 0.6)
        candidate = Candidate(trained / layout.POLICY, "digest", accuracy, source_run_id=run_id)
        register(run, candidate, PARAMS.registry, rule=Rule(0.0, 2000), root=project)
    name = PARAMS.registry.name
    for alias in ("champion", f"{name}@champion", f"models:/{name}@champion", f"models:/{name}/1"):
        assert locate(alias, PARAMS, project).parent.name == run_id
    with pytest.raises(LocateError, match=f"no such version of {name}"):
        locate("challenger", PARAMS, project)


def test_the_checkouts_own_run_is_read_in_place(project: Path, trained: Path) -> None:
    run_id = kept_run(project, trained)
    (project / "artifacts").mkdir()
    (project / layout.TRAIN_RUN).write_text(json.dumps({"run_id": run_id}))
    assert locate(run_id, PARAMS, project) == project


def test_what_leads_nowhere_says_so(project: Path, tmp_path: Path) -> None:
    with pytest.raises(LocateError, match="has no run 0000"):
        locate("0" * 32, PARAMS, project)
    with open_run(TrackingParams(), root=project, name="fetch") as run:
        pass
    with pytest.raises(LocateError, match=r"keeps no trajectories.*tracking\.trajectory_files"):
        locate(run.run_id, PARAMS, project)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    with pytest.raises(LocateError, match="absent is no path, and there are no runs yet"):
        locate("absent", PARAMS, elsewhere)
    assert list(elsewhere.iterdir()) == []


def test_a_path_is_a_path(project: Path) -> None:
    assert locate(str(project), PARAMS, project) == project
