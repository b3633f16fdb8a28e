"""Local surfaces for one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from operator import call
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from numpy.typing import ArrayLike

from perfcast_client.local import REFRESH_S, Surfaced
from perfcast_client.record import EngineLike
from perfcast_client.snapshot import Snapshot
from perfcast_client.steps import DecodeStep, DecodeTrajectory, Mixed, Prefill, Step
from perfcast_client.turns import later

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
        super().__init__(client, snapshot, max_pass_tokens=max_pass_tokens, ask=ask, file=file)
        self._lock = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        if client is not None and refresh_s > 0:
            self._task = asyncio.create_task(_keep_fresh_async(weakref.ref(self), refresh_s))

    @classmethod
    async def fetch(cls, client: AsyncClient, engine: EngineLike, **options: Any) -> Self:
        """See ``AsyncClient.surface``."""
        return await later(cls._opened(client, engine, **options), call)

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
        return await later(self._predicted(step), call)

    async def refresh(self) -> bool:
        async with self._lock:
            return await later(self._renewed(), call)


async def _keep_fresh_async(ref: weakref.ref[AsyncLocalSurface], every_s: float) -> None:
    while True:
        await asyncio.sleep(every_s)
        surface = ref()
        if surface is None:
            return
        with contextlib.suppress(Exception):
            await surface.refresh()
        del surface
