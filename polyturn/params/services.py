"""What lies around a run: registry, tracking, preflight."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from polyturn.params.fields import NonNegativeFloat, NonNegativeInt, PositiveFloat, Section


class RegistryParams(Section):
    """The MLflow model registry."""

    name: Annotated[str, Field(pattern=r"^\w[\w. -]*$")] = "polyturn-geo3k"
    min_gain: NonNegativeFloat = (
        0.0  # the champion moves when accuracy exceeds the old one's by more
    )


class TrackingParams(Section):
    """Where metrics go; addresses only, never part of a result."""

    uri: str = "sqlite:///mlflow.db"  # relative SQLite paths are resolved at the main checkout
    experiment: str = "polyturn"
    artifact_location: str | None = None  # None: mlartifacts beside the SQLite file
    timeout_s: PositiveFloat = 10.0  # how long an unreachable server is waited for
    traces_per_step: NonNegativeInt = (
        2  # trajectories of a training step logged as traces, 0.15 s each
    )
    # Step files of a training run kept as its artifacts, evenly spaced, for `polyturn view RUN_ID`.
    trajectory_files: NonNegativeInt = 8


class DoctorParams(Section):
    """Preflight."""

    min_free_gb: NonNegativeFloat = 1.0
