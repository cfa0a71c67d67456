"""What the tests of both learners on a GPU share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from polyturn.policy.model import Policy
from tests.gpu import medium_model


@pytest.fixture
def exact_convolutions() -> Iterator[None]:
    """cuDNN rounds the patch embedding to TF32 by default."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


@pytest.fixture(scope="module")
def medium() -> Policy:
    """About 20 M parameters."""
    return medium_model.build()
