"""Policies that all unit tests share; they are built once, so a test that changes weights copies them first."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from polyturn.policy.model import Policy
    from polyturn.render import Renderer

# torch and transformers take seconds to import: only tests that use a policy pay for them.


@pytest.fixture(scope="session")
def policy() -> Policy:
    """A Qwen3-VL with random weights."""
    from tests.unit import tiny  # noqa: PLC0415

    return tiny.qwen3()


@pytest.fixture(scope="session")
def policy_2_5() -> Policy:
    """A Qwen2.5-VL with random weights."""
    from tests.unit import tiny  # noqa: PLC0415

    return tiny.qwen2_5()


@pytest.fixture(scope="session")
def renderer(policy: Policy) -> Renderer:
    """The renderer of `policy`."""
    from polyturn.render import Renderer  # noqa: PLC0415

    return Renderer(policy)
