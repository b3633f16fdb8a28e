"""Fixtures that several rooms share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.server.running import Running


@pytest.fixture(scope="session")
def served() -> Iterator[Running]:
    """One real server on loopback with the embedded data, for all tests that leave it as it is."""
    from tests.server.running import running

    with running() as server:
        yield server
