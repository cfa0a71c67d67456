"""A store in a temporary directory."""

from pathlib import Path

import pytest

from polyturn.params import TrackingParams
from polyturn.tracking.store import connect


@pytest.fixture(autouse=True)
def no_addresses_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("POLYTURN_TRACKING_URI", "POLYTURN_ARTIFACT_LOCATION", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def template_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated, empty database: making one takes a second."""
    root = tmp_path_factory.mktemp("template")
    connect(TrackingParams(experiment="template"), root)
    return root / "mlflow.db"


@pytest.fixture
def project(tmp_path: Path, template_store: Path) -> Path:
    """A project directory with a ready database."""
    root = tmp_path / "project"
    root.mkdir()
    (root / "mlflow.db").write_bytes(template_store.read_bytes())
    return root
