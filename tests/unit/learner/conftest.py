"""What all tests of learners share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture(scope="module", autouse=True)
def no_group_is_left() -> Iterator[None]:
    """The process group that a learner made for itself ends with the module."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
