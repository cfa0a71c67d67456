"""Every shim is needed by the installed megatron-core, and none is applied where there is CUDA."""

from __future__ import annotations

import pytest

from polyturn.learner.megatron import shims
from tests.unit import ranks
from tests.unit.learner.megatron.shimless import Found

PLACES = [(shim.owner, shim.attribute) for shim in shims.needed()]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """In a process of its own, for shims change modules for good."""
    (rank,) = ranks.run(
        "tests.unit.learner.megatron.shimless:without_each",
        tmp_path_factory.mktemp("one"),
        size=1,
    )
    assert isinstance(rank.outcome, Found), f"{rank.outcome!r}\n{rank.output}"
    return rank.outcome


def test_an_update_goes_well_with_all_shims(found: Found) -> None:
    assert found.with_all is None


@pytest.mark.parametrize("place", PLACES, ids=[f"{owner}.{name}" for owner, name in PLACES])
def test_megatron_core_still_needs_the_shim(found: Found, place: tuple[str, str]) -> None:
    """Delete the shim (or bound the versions it is for) when this fails."""
    assert found.failures[place] is not None


def test_nothing_is_applied_where_there_is_cuda(found: Found) -> None:
    assert found.is_left_alone_with_cuda


def test_tensors_are_named_otherwise_to_megatron_cores_optimizer_alone(found: Found) -> None:
    assert found.type_for_others == "torch.FloatTensor"


def test_shims_that_an_older_megatron_core_does_without_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def places(version: str) -> set[str]:
        monkeypatch.setattr("importlib.metadata.version", lambda _: version)
        return {shim.attribute for shim in shims.needed()}

    assert "current_stream" not in places("0.16.1")
    assert "current_stream" in places("0.19.2")


def test_each_shim_says_why() -> None:
    assert all(len(shim.reason) > 20 for shim in shims.SHIMS)
