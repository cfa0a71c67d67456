"""A model on a real S3 server, which `storage.endpoint_url` alone names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from polyturn.params import Params
from polyturn.policy import model
from tasks.model import starting_policy
from tests.e2e_team import services
from tests.e2e_team.services import BUCKET, S3
from tests.unit import tiny


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    """SeaweedFS; the environment has the keys to it, and another server's address for S3 (as where MLflow keeps files)."""
    try:
        made = services.s3(tmp_path / "s3")
    except services.MissingServiceError as missing:
        pytest.skip(f"NOT TESTED: a model on S3 needs {missing}")
    for name, value in made.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    yield made
    made.service.stop()


def test_model_path_is_read_from_the_server_of_storage_endpoint_url(
    server: S3, tmp_path: Path
) -> None:
    """Tokenizer, processor and weights come back as they were saved."""
    saved = tiny.qwen3()
    model.save(saved, tmp_path / "saved")
    for path in sorted((tmp_path / "saved").iterdir()):
        server.client().upload_file(str(path), BUCKET, f"models/tiny/{path.name}")
    path = f"s3://{BUCKET}/models/tiny"
    params = Params.model_validate(
        {"model": {"path": path}, "storage": {"endpoint_url": server.endpoint}}
    )
    loaded, source = starting_policy(params, [], tmp_path / "work")
    assert source == {"path": path, "revision": None}
    assert loaded.processor.tokenizer.get_vocab() == saved.processor.tokenizer.get_vocab()
    wanted = saved.model.state_dict()
    for name, tensor in loaded.model.state_dict().items():
        assert torch.equal(tensor, wanted[name]), name
