"""Trajectories as traces: spans in order, pictures in chat form, reward as feedback."""

import threading
from pathlib import Path

from polyturn.params import TrackingParams
from polyturn.report.data import read_run
from polyturn.tracking import open_run
from polyturn.tracking.traces import log_trajectories
from tests.unit.fake_run import make_run


def test_a_trajectory_becomes_a_trace_of_its_run(project: Path, tmp_path: Path):
    root = make_run(tmp_path / "run")
    entry = next(e for e in read_run(root).exhibits.after if len(e["turns"]) == 3)
    with open_run(TrackingParams(), root=project, name="register") as run:
        log_trajectories(run, [(entry, "policy")], lambda sha: f"data:{sha}")
    (trace,) = run.store.client.search_traces(
        locations=[run.store.experiment_id], run_id=run.run_id
    )
    assert trace.info.trace_metadata["mlflow.sourceRun"] == run.run_id
    spans = trace.data.spans
    assert [span.name for span in spans[1:]] == ["reply", "env.step", "reply", "env.step", "reply"]
    prompt = spans[0].inputs["messages"][0]["content"]
    assert prompt[0] == {
        "type": "image_url",
        "image_url": {"url": f"data:{entry['images'][0]['sha256']}"},
    }
    assert prompt[1] == {"type": "text", "text": entry["problem"]}
    assert spans[1].outputs["content"] == entry["turns"][0]["text"]
    answer = spans[2].outputs["messages"][0]["content"]
    assert answer[0]["image_url"]["url"] == f"data:{entry['images'][1]['sha256']}"
    assert spans[0].outputs == {
        "final_answer": entry["final_answer"],
        "reference": entry["answer"],
    }
    (feedback,) = trace.info.assessments
    assert (feedback.name, feedback.value) == ("reward", entry["reward"])


def test_no_thread_of_mlflow_is_waited_for(project: Path, tmp_path: Path):
    """It would cost a second for each trace."""
    entry = read_run(make_run(tmp_path / "run")).exhibits.after[0]
    with open_run(TrackingParams(), root=project, name="train") as run:
        log_trajectories(run, [(entry, "policy")], lambda _: None)
        assert not [t.name for t in threading.enumerate() if "trace" in t.name.lower()]
