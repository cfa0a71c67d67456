"""A few trajectories as MLflow traces: one span per reply and per tool answer, with pictures, reward as feedback.

A trace costs about 0.06 s, so only a handful is logged; all trajectories are in files.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import mlflow
from mlflow.entities import LiveSpan, SpanType
from mlflow.tracing.constant import TraceMetadataKey

from polyturn.tracking.outbox import AwayError, Record
from polyturn.tracking.run import Run
from polyturn.tracking.store import SilentServerError, Store, check_server
from polyturn.trajectories import TrajectoryEntry, TurnEntry
from polyturn.types import Json

PictureUri = Callable[[str], str | None]  # content hash -> data URI


_PROBE_S = 5.0


def log_trajectories(
    run: Run, entries: Sequence[tuple[TrajectoryEntry, str]], picture: PictureUri
) -> None:
    """Log (trajectory, label) pairs as traces of `run`, one after the other.

    Raises:
        TrackingError: the store refuses.
    """
    for entry, label in entries:
        turns = [sha256 for turn in entry["turns"] for sha256 in turn["observation_images"]]
        names = {*turns, *(image["sha256"] for image in entry["images"])}
        pictures = {sha256: uri for sha256 in sorted(names) if (uri := picture(sha256))}
        run.post(
            {
                "kind": "trace",
                "entry": cast("Json", entry),
                "label": label,
                "pictures": pictures,
                "at_ns": time.time_ns(),
            }
        )


def deliver_trace(store: Store, run_id: str, record: Record) -> None:
    """Make the trace of a record.

    Raises:
        AwayError: the server does not answer.
        MlflowException: the store refuses.
    """
    # The exporter only tells its log of a server that is away, and the trace would be lost.
    if store.addresses.database is None:
        try:
            check_server(store.addresses.uri, _PROBE_S)
        except SilentServerError as error:
            raise AwayError(str(error)) from None
    # Traces go to mlflow's process-wide store.
    mlflow.set_tracking_uri(store.addresses.uri)
    entry = cast("TrajectoryEntry", record["entry"])
    pictures = cast("Mapping[str, str]", record["pictures"])
    trace_id = _log(store, run_id, record, pictures.get)
    mlflow.flush_trace_async_logging()
    if entry["reward"] is not None:
        mlflow.log_feedback(trace_id=trace_id, name="reward", value=entry["reward"])


def _log(store: Store, run_id: str, record: Record, picture: PictureUri) -> str:
    entry = cast("TrajectoryEntry", record["entry"])
    observed = {sha256 for turn in entry["turns"] for sha256 in turn["observation_images"]}
    shown = [image["sha256"] for image in entry["images"] if image["sha256"] not in observed]
    root = mlflow.start_span_no_context(
        name=entry["problem_id"],
        span_type=SpanType.AGENT,
        inputs={"messages": [_message("user", entry["problem"], shown, picture)]},
        tags={
            "policy": str(record["label"]),
            "step": str(entry["step"]),
            "status": entry["status"],
            "stop_reason": entry["stop_reason"],
        },
        metadata={TraceMetadataKey.SOURCE_RUN: run_id},
        experiment_id=store.experiment_id,
        start_time_ns=cast("int", record["at_ns"]),
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
