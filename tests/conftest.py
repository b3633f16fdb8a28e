"""Fixtures that several rooms share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from tests.server.running import Running

# A busy machine is slow, and a run fails for what was changed and not for the dice.
settings.register_profile("plain", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
settings.load_profile("plain")


@pytest.fixture(scope="session")
def served() -> Iterator[Running]:
    """One real server on loopback with the embedded data, for all tests that leave it as it is."""
    from tests.server.running import running

    with running() as server:
        yield server
