"""Memory that nothing uses any more goes back to the operating system soon, not only when it is short.

Engines and the data behind them refer to each other in circles of few objects and large arrays: Python's collector,
which counts objects, finds them late. And what is freed in pieces by several threads the C library keeps for itself.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
from collections.abc import Callable

EVERY_S = 15.0


def _trim() -> Callable[[int], int] | None:
    """The C library's own, where it has one."""
    try:
        found: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None
    return found


class Tidy:
    """``due`` is to be called when something large was let go of; ``renewed``: it is what was there from the start."""

    def __init__(self, every_s: float = EVERY_S) -> None:
        self._every_s = every_s
        self._due = asyncio.Event()
        self._renewed = False
        self._trim = _trim()
        self.times = 0

    def due(self, renewed: bool = False) -> None:
        self._renewed = self._renewed or renewed
        self._due.set()

    async def keep(self) -> None:
        """Tidy up when it is due, at most so often."""
        while True:
            await self._due.wait()
            await asyncio.sleep(self._every_s)
            self._due.clear()
            self._collect()
            if self._trim is not None:
                await asyncio.to_thread(self._trim, 0)
            self.times += 1

    def _collect(self) -> None:
        """What collections pass over is looked at once more where that is what was let go of."""
        spared = self._renewed and gc.get_freeze_count() > 0
        self._renewed = False
        if spared:
            gc.unfreeze()
        gc.collect()
        if spared:
            gc.freeze()
