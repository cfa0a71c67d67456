"""What lies around a run: registry, tracking, preflight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from polyturn.params.fields import NonNegativeFloat, NonNegativeInt, PositiveFloat, Section


class RegistryParams(Section):
    """The MLflow model registry."""

    name: Annotated[str, Field(pattern=r"^\w[\w. -]*$")] = "polyturn-geo3k"
    # The champion moves when the lower bound of the paired difference in accuracy exceeds it (docs/registry.md).
    min_gain: NonNegativeFloat = 0.0
    # Bytes of a policy above which MLflow holds a pointer to DVC's object instead of the weights a second time;
    # `polyturn fetch-model` brings them.
    external_model_size: NonNegativeInt = 2_000_000_000
    promote_on_register: bool = True  # false: only `polyturn promote` moves a champion
    evaluation_pictures: NonNegativeInt = 1000  # pictures of test problems kept for comparisons


class TrackingParams(Section):
    """Where metrics go; addresses only, never part of a result."""

    uri: str = "sqlite:///mlflow.db"  # relative SQLite paths are resolved at the main checkout
    experiment: str = "polyturn"
    artifact_location: str | None = None  # None: mlartifacts beside the SQLite file
    timeout_s: PositiveFloat = 10.0  # how long an answer of the server is waited for
    # How long a server that is away is waited for where nothing goes on without it: at the start of a stage, to
    # register, and at the end (what is not delivered by then is by the next start). Steps of training do not wait.
    outage_s: NonNegativeFloat = 150.0
    # Of every stage, and of pipeline runs, as many of the last are kept by `polyturn gc`.
    keep_runs: NonNegativeInt = 10
    system_metrics_s: NonNegativeFloat = 10.0  # between samples of CPU, memory, GPUs; 0: none
    traces_per_step: NonNegativeInt = (
        2  # trajectories of a training step logged as traces, 0.06 s each
    )
    # Step files of a training run kept as its artifacts, evenly spaced, for `polyturn view RUN_ID`.
    trajectory_files: NonNegativeInt = 8


class StorageParams(Section):
    """The bucket that machines share; addresses only, never part of a result. Credentials come from the environment."""

    # s3://BUCKET/PREFIX: DVC's default remote (`polyturn storage`, and any run in a worktree, write it to .dvc/config.local).
    url: Annotated[str, Field(pattern=r"^s3://[^/]+")] | None = None
    # Of a server other than AWS; also of train.work_uri and model.path.
    endpoint_url: str | None = None


class DoctorParams(Section):
    """What is looked at before a run: preflight and plan."""

    min_free_gb: NonNegativeFloat = 1.0
    allow: tuple[str, ...] = ()  # red checks of `polyturn doctor` that do not stop a run, by name
    # Of the machine on which a stage runs, by stage or "default"; `polyturn plan` shows costs where there is one.
    prices_per_hour: Mapping[str, NonNegativeFloat] = {}
    # Dense bfloat16 TFLOP/s of one GPU, for the utilisation on the run card; None: by the GPU's name.
    peak_tflops: PositiveFloat | None = None
