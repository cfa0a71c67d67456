"""Out of memory, told with the keys to lower."""

from __future__ import annotations

import pytest
import torch

from polyturn.memory import OutOfMemoryError, lowered_by


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
    ],
)
def test_running_out_of_memory_names_the_keys_and_values(error: Exception) -> None:
    with pytest.raises(OutOfMemoryError, match=r"while training: lower a.b \(now 7\)"), lowered_by("training", {"a.b": 7}):  # fmt: skip
        raise error


def test_an_allocation_that_cannot_succeed_is_one() -> None:
    with pytest.raises(OutOfMemoryError), lowered_by("training", {"a.b": 7}):
        torch.empty(2**50, dtype=torch.uint8)


@pytest.mark.parametrize("error", [RuntimeError("something else"), ValueError("wrong")])
def test_other_errors_pass(error: Exception) -> None:
    with pytest.raises(type(error), match=str(error)), lowered_by("training", {"a.b": 7}):
        raise error
