"""Local surfaces for one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import ArrayLike

from perfcast_client import errors
from perfcast_client.local import NO_ANSWER, REFRESH_S, Surfaced, fallback, first, parts, pending
from perfcast_client.record import EngineLike
from perfcast_client.results import F64
from perfcast_client.snapshot import Snapshot, out_of_surface, some
from perfcast_client.steps import DecodeStep, DecodeTrajectory, Mixed, Prefill, Step

if TYPE_CHECKING:
    from perfcast_client.aio import AsyncClient


class AsyncLocalSurface(Surfaced):
    """As ``LocalSurface``, for one event loop. Made by ``AsyncClient.surface``."""

    def __init__(
        self,
        client: AsyncClient | None,
        snapshot: Snapshot,
        *,
        max_pass_tokens: int = 0,
        ask: bool = True,
        refresh_s: float = REFRESH_S,
        file: str | Path | None = None,
    ) -> None:
        super().__init__(snapshot, max_pass_tokens, ask, file)
        self._client = client
        self._lock = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        if client is not None and refresh_s > 0:
            self._task = asyncio.create_task(_keep_fresh_async(weakref.ref(self), refresh_s))

    @classmethod
    async def fetch(
        cls,
        client: AsyncClient,
        engine: EngineLike,
        *,
        max_pass_tokens: int = 0,
        file: str | Path | None = None,
        **options: Any,
    ) -> Self:
        """See ``AsyncClient.surface``."""
        failed: Exception | None = None
        try:
            snapshot = first(await client.get_surface(engine, max_pass_tokens), engine)
        except NO_ANSWER as error:
            kept, failed = fallback(file, engine), error
            if kept is None:
                raise
            snapshot = kept
        surface = cls(client, snapshot, max_pass_tokens=max_pass_tokens, file=file, **options)
        surface.last_error = failed
        if failed is None and file is not None:
            snapshot.save(file)
        return surface

    @classmethod
    def load(cls, path: str | Path, client: AsyncClient | None = None, **options: Any) -> Self:
        """From a file that ``save`` wrote; with a ``client`` it is kept fresh. Raises DamagedSurface, OSError."""
        return cls(client, Snapshot.load(path), **options)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """No more refreshes; the surface still answers."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def prefill(self, batch: ArrayLike, isl: ArrayLike, prefix: ArrayLike = 0) -> Any:
        ms = self._prefill(batch, isl, prefix)
        return ms if ms == ms else await self.predict_ms(Prefill(batch, isl, prefix))

    async def decode_step(self, batch: ArrayLike, isl: ArrayLike, osl: ArrayLike) -> Any:
        ms = self._decode_step(batch, isl, osl)
        return ms if ms == ms else await self.predict_ms(DecodeStep(batch, isl, osl))

    async def decode(
        self, batch: ArrayLike, isl: ArrayLike, osl: ArrayLike, *, beam_width: int = 1, stride: int = 32
    ) -> Any:
        return await self.predict_ms(DecodeTrajectory(batch, isl, osl, beam_width, stride))

    async def mixed(
        self, ctx_tokens: ArrayLike, gen_requests: ArrayLike, isl: ArrayLike, osl: ArrayLike, prefix: ArrayLike = 0
    ) -> Any:
        ms = self._mixed(ctx_tokens, gen_requests, isl, osl, prefix)
        return ms if ms == ms else await self.predict_ms(Mixed(ctx_tokens, gen_requests, isl, osl, prefix))

    async def predict_ms(self, step: Step) -> Any:
        """The latency of ``step``; a float for numbers, (N,) for arrays."""
        for final in (False, True):  # other data than those of the surface are asked about once more
            now = self._now
            found, which = pending(now.ms(step))
            if not len(which) or await self._complete(now, step, found, which, final):
                break
        return found if found.ndim else found.item()

    async def _complete(self, now: Snapshot, step: Step, found: F64, which: np.ndarray, final: bool) -> bool:
        if self._client is None or not self._ask:
            raise out_of_surface(step, int(which[0]), now.domain)
        for part in parts(which):
            told = await self._client.predict_many(now.engine, some(step, part))
            if told.engine.data_version != now.stamp.data_version and not final:
                with contextlib.suppress(errors.PerfcastError):
                    if await self.refresh():
                        return False
            found.reshape(-1)[part] = told.latency_ms
        return True

    async def refresh(self) -> bool:
        """As ``LocalSurface.refresh``."""
        if self._client is None:
            raise errors.ClientMisuse("this surface came from a file and has no client")
        async with self._lock:
            try:
                engine, known = self._now.engine, self._now.surface_hash
                return self._adopt(await self._client.get_surface(engine, self._max_pass_tokens, known))
            except Exception as error:
                self.last_error = error
                raise


async def _keep_fresh_async(ref: weakref.ref[AsyncLocalSurface], every_s: float) -> None:
    while True:
        await asyncio.sleep(every_s)
        surface = ref()
        if surface is None:
            return
        with contextlib.suppress(Exception):
            await surface.refresh()
        del surface
