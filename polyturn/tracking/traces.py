"""A few trajectories as MLflow traces: one span per reply and per tool answer, with pictures, reward as feedback.

A trace costs about 0.15 s, so only a handful is logged; all trajectories are in files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlflow
from mlflow.entities import LiveSpan, SpanType
from mlflow.exceptions import MlflowException
from mlflow.tracing.constant import TraceMetadataKey

from polyturn.tracking.run import Run
from polyturn.tracking.store import TrackingError
from polyturn.trajectories import TrajectoryEntry, TurnEntry

PictureUri = Callable[[str], str | None]  # content hash -> data URI


def log_trajectories(
    run: Run, entries: Sequence[tuple[TrajectoryEntry, str]], picture: PictureUri
) -> list[str]:
    """Log (trajectory, label) pairs as traces of `run`; returns the trace ids.

    Raises:
        TrackingError: the store refuses or does not answer.
    """
    # Traces go to mlflow's process-wide store.
    mlflow.set_tracking_uri(run.store.addresses.uri)
    try:
        ids = [_log(run, entry, label, picture) for entry, label in entries]
        mlflow.flush_trace_async_logging()
        for (entry, _), trace_id in zip(entries, ids, strict=True):
            if entry["reward"] is not None:
                mlflow.log_feedback(trace_id=trace_id, name="reward", value=entry["reward"])
    except MlflowException as error:
        raise TrackingError(
            f"tracking.uri {run.store.addresses.uri!r} took no traces ({str(error).splitlines()[0]})"
        ) from None
    return ids


def _log(run: Run, entry: TrajectoryEntry, label: str, picture: PictureUri) -> str:
    observed = {sha256 for turn in entry["turns"] for sha256 in turn["observation_images"]}
    shown = [image["sha256"] for image in entry["images"] if image["sha256"] not in observed]
    root = mlflow.start_span_no_context(
        name=entry["problem_id"],
        span_type=SpanType.AGENT,
        inputs={"messages": [_message("user", entry["problem"], shown, picture)]},
        tags={
            "policy": label,
            "step": str(entry["step"]),
            "status": entry["status"],
            "stop_reason": entry["stop_reason"],
        },
        metadata={TraceMetadataKey.SOURCE_RUN: run.run_id},
        experiment_id=run.store.experiment_id,
    )
    for turn in entry["turns"]:
        _log_turn(root, turn, picture)
    root.end(outputs={"final_answer": entry["final_answer"], "reference": entry["answer"]})
    return str(root.trace_id)


def _log_turn(root: LiveSpan, turn: TurnEntry, picture: PictureUri) -> None:
    reply = mlflow.start_span_no_context(
        name="reply", span_type=SpanType.CHAT_MODEL, parent_span=root
    )
    reply.set_attribute("num_tokens", turn["num_tokens"])
    reply.end(outputs={"role": "assistant", "content": turn["text"]})
    if turn["observation"] is not None:
        step = mlflow.start_span_no_context(
            name="env.step",
            span_type=SpanType.TOOL,
            parent_span=root,
            inputs={"tool_calls": turn["tool_calls"]},
        )
        answer = _message("tool", turn["observation"], turn["observation_images"], picture)
        step.end(outputs={"messages": [answer]})


def _message(
    role: str, text: str, pictures: Sequence[str], picture: PictureUri
) -> dict[str, object]:
    """A chat message of OpenAI's form, which MLflow's page shows with its pictures."""
    found = [uri for sha256 in pictures if (uri := picture(sha256))]
    parts: list[dict[str, object]] = [
        {"type": "image_url", "image_url": {"url": uri}} for uri in found
    ]
    return {"role": role, "content": [*parts, {"type": "text", "text": text}]}
