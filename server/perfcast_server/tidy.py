"""How a process that serves holds its memory and shares the interpreter among its threads.

Memory that nothing uses any more goes back to the operating system soon, not only when it is short.

Engines and the data behind them refer to each other in circles of few objects and large arrays: Python's collector,
which counts objects, finds them late. And what is freed in pieces by several threads the C library keeps for itself.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import sys
from typing import Any

EVERY_S = 15.0
SWITCH_S = 0.0005  # that a thread may keep the interpreter while the event loop waits for it; Python's 5 ms add up
TRIM_THRESHOLD, MMAP_THRESHOLD, ARENA_MAX = -1, -3, -8  # of mallopt
ARENAS = 2  # one interpreter works at a time: more would only keep what each of many threads once took
KEPT_BYTES = 64 << 20  # at the end of the heap, for temporary arrays
APART_BYTES = 4 << 20  # larger arrays lie apart: they take what is written to, and go back when they are let go of


def _library() -> Any:
    """The C library, where it is one that can be told how to allocate."""
    try:
        library = ctypes.CDLL(None)
        return library if hasattr(library, "malloc_trim") and hasattr(library, "mallopt") else None
    except (OSError, TypeError):
        return None


def settle() -> None:
    """For a process that only serves, before it loads anything."""
    sys.setswitchinterval(SWITCH_S)
    library = _library()
    if library is not None:
        library.mallopt(ARENA_MAX, ARENAS)
        library.mallopt(MMAP_THRESHOLD, APART_BYTES)
        library.mallopt(TRIM_THRESHOLD, KEPT_BYTES)


class Tidy:
    """``due`` is to be called when something large was let go of; ``renewed``: it is what was there from the start."""

    def __init__(self, every_s: float = EVERY_S) -> None:
        self._every_s = every_s
        self._due = asyncio.Event()
        self._renewed = False
        self._library = _library()
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
            if self._library is not None:
                await asyncio.to_thread(self._library.malloc_trim, 0)
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
