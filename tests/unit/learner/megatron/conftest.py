"""Two ranks that share every weight: started once for all tests of the Megatron policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.unit import ranks

if TYPE_CHECKING:
    from tests.unit.learner.megatron.cases import OnRank


@pytest.fixture(scope="session")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[OnRank]:
    """What both brought back."""
    from tests.unit.learner.megatron.cases import OnRank  # noqa: PLC0415  (imports torch)

    found = ranks.run(
        "tests.unit.learner.megatron.cases:on_two", tmp_path_factory.mktemp("two"), timeout_s=300
    )
    for rank in found:
        assert isinstance(rank.outcome, OnRank), f"{rank.outcome!r}\n{rank.output}"
    return [rank.outcome for rank in found if isinstance(rank.outcome, OnRank)]
