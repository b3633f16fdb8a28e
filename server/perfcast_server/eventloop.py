"""The event loop of server processes: uvloop where there is a build of it, which takes less CPU a call."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

try:
    from uvloop import new_event_loop as new
except ImportError:
    new = None  # type: ignore[assignment]  # asyncio's own

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """As ``asyncio.run``."""
    with asyncio.Runner(loop_factory=new) as runner:
        return runner.run(main)
