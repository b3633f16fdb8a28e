"""Steps evaluated in this process, from a surface that is fetched once and kept fresh."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from abc import ABC, abstractmethod
from functools import partial
from math import nan
from operator import call
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import ArrayLike
from perfcast_surface.surface import Domain

from perfcast_client import errors
from perfcast_client.config import EngineConfig
from perfcast_client.record import EngineLike
from perfcast_client.results import F64, Engine, EngineStamp
from perfcast_client.snapshot import Received, Snapshot, out_of_surface, some
from perfcast_client.steps import DecodeStep, DecodeTrajectory, Mixed, Prefill, Step
from perfcast_client.turns import Steps, now

if TYPE_CHECKING:
    from perfcast_client.client import Client

REFRESH_S = 300.0
ASKED_TOGETHER = 10_000  # points
NO_ANSWER = (errors.Unavailable, errors.DeadlineExceeded, errors.LimitExceeded, errors.ServerFault)


class Surfaced(ABC):
    """The surface in force. It is replaced as a whole, so every answer comes from one surface."""

    def __init__(
        self, client: Any, snapshot: Snapshot, *, max_pass_tokens: int, ask: bool, file: str | Path | None
    ) -> None:
        self._client = client
        self._now = snapshot
        self._max_pass_tokens = max_pass_tokens
        self._ask = ask
        self._file = file
        self.last_error: Exception | None = None
        """Why the last refresh failed; None where it did not."""

    @property
    def stamp(self) -> EngineStamp:
        """Engine and data version of the answers."""
        return self._now.stamp

    @property
    def surface_hash(self) -> str:
        return self._now.surface_hash

    @property
    def domain(self) -> Domain:
        """The largest counts that the surface reaches, each by itself."""
        return self._now.domain

    @property
    def age_s(self) -> float:
        """Seconds since a server said that the surface holds."""
        return max(time.time() - self._now.fetched_s, 0.0)

    @classmethod
    def load(cls, path: str | Path, client: Any = None, **options: Any) -> Self:
        """From a file that ``save`` wrote; with a ``client`` it is kept fresh. Raises DamagedSurface, OSError."""
        return cls(client, Snapshot.load(path), **options)

    def save(self, path: str | Path) -> None:
        """Write the surface in force to one file."""
        self._now.save(path)

    @abstractmethod
    def refresh(self) -> Any:
        """Ask the server whether the surface still holds, and take the new one where it does not. Whether anything
        changed; where there is no answer, raises and keeps the surface."""

    def _prefill(self, batch: Any, isl: Any, prefix: Any) -> float:
        """The answer to ints; NaN where it takes more than that."""
        if type(batch) is type(isl) is type(prefix) is int:
            return self._now.steps.prefill_one(batch, isl, prefix)
        return nan

    def _decode_step(self, batch: Any, isl: Any, osl: Any) -> float:
        if type(batch) is type(isl) is type(osl) is int:
            return self._now.steps.decode_step_one(batch, isl, osl)
        return nan

    def _mixed(self, ctx_tokens: Any, gen_requests: Any, isl: Any, osl: Any, prefix: Any) -> float:
        if type(ctx_tokens) is type(gen_requests) is type(isl) is type(osl) is type(prefix) is int:
            return self._now.steps.mixed_one(ctx_tokens, gen_requests, isl, osl, prefix)
        return nan

    @classmethod
    def _opened(
        cls, client: Any, engine: EngineLike, max_pass_tokens: int = 0, file: str | Path | None = None, **options: Any
    ) -> Steps[Self]:
        """From a server; while none answers, from the file."""
        failed: Exception | None = None
        try:
            received = yield partial(client.get_surface, engine, max_pass_tokens)
            snapshot = Snapshot.of(received, _named(engine))
        except NO_ANSWER as error:
            kept, failed = _fallback(file, engine), error
            if kept is None:
                raise
            snapshot = kept
        surface = cls(client, snapshot, max_pass_tokens=max_pass_tokens, file=file, **options)
        surface.last_error = failed
        if failed is None and file is not None:
            snapshot.save(file)
        return surface

    def _predicted(self, step: Step) -> Steps[Any]:
        """The latency of ``step``; a float for numbers, (N,) for arrays."""
        for final in (False, True):  # other data than those of the surface are asked about once more
            held = self._now
            found, which = _pending(held.ms(step))
            if not len(which) or (yield from self._complete(held, step, found, which, final)):
                break
        return found if found.ndim else found.item()

    def _complete(self, held: Snapshot, step: Step, found: F64, which: np.ndarray, final: bool) -> Steps[bool]:
        """Fill in the points ``which`` from the server. False where the surface turned out to be of older data than the
        server's and was replaced."""
        if self._client is None or not self._ask:
            raise out_of_surface(step, which, held.domain)
        for part in (which[i : i + ASKED_TOGETHER] for i in range(0, len(which), ASKED_TOGETHER)):
            told = yield partial(self._client.predict_many, held.engine, some(step, part))
            if told.engine.data_version != held.stamp.data_version and not final:
                with contextlib.suppress(errors.PerfcastError):
                    if (yield self.refresh):
                        return False
            found.reshape(-1)[part] = told.latency_ms
        return True

    def _renewed(self) -> Steps[bool]:
        if self._client is None:
            raise errors.ClientMisuse("this surface came from a file and has no client")
        try:
            engine, known = self._now.engine, self._now.surface_hash
            return self._adopt((yield partial(self._client.get_surface, engine, self._max_pass_tokens, known)))
        except Exception as error:
            self.last_error = error
            raise

    def _adopt(self, received: Received) -> bool:
        """Whether anything changed."""
        old, self._now = self._now, Snapshot.of(received, self._now.engine, self._now)
        self.last_error = None
        if self._file is not None:
            try:
                self._now.save(self._file)
            except OSError as error:
                self.last_error = error
        return old.stamp.data_version != self._now.stamp.data_version or old.surface_hash != self._now.surface_hash


def _named(engine: EngineLike) -> EngineConfig | str:
    return engine.config if isinstance(engine, Engine) else engine


def _fallback(file: str | Path | None, engine: EngineLike) -> Snapshot | None:
    """The last good surface of ``engine``, None where there is none."""
    if file is not None:
        with contextlib.suppress(OSError, errors.DamagedSurface):
            snapshot = Snapshot.load(file)
            return snapshot if snapshot.engine == _named(engine) else None
    return None


def _pending(ms: float | F64) -> tuple[F64, np.ndarray]:
    """Latencies, and the indices of those that are still to be found."""
    found = np.asarray(ms)
    return found, np.flatnonzero(np.isnan(found))


class LocalSurface(Surfaced):
    """Steps of one engine in this process, with the server's numbers; safe to share between threads.

    Numbers give a float, arrays (N,) an array (N,) of ms, also of no points at all. What lies outside of the surface is
    asked of the server, or raises OutOfSurface where there is none or ``ask`` is False; what is no step at all, be it
    for one of its points, raises InvalidRequest either way. ``refresh_s``: seconds between questions whether the
    surface still holds, asked by a thread of its own; 0 is never. ``file`` keeps the last good surface, which stands in
    while no server answers. Made by ``Client.surface``.
    """

    def __init__(
        self,
        client: Client | None,
        snapshot: Snapshot,
        *,
        max_pass_tokens: int = 0,
        ask: bool = True,
        refresh_s: float = REFRESH_S,
        file: str | Path | None = None,
    ) -> None:
        super().__init__(client, snapshot, max_pass_tokens=max_pass_tokens, ask=ask, file=file)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        if client is not None and refresh_s > 0:
            weakref.finalize(self, self._stop.set)
            arguments = (weakref.ref(self), self._stop, refresh_s)
            threading.Thread(target=_keep_fresh, args=arguments, name="perfcast-surface", daemon=True).start()

    @classmethod
    def fetch(cls, client: Client, engine: EngineLike, **options: Any) -> Self:
        """See ``Client.surface``."""
        return now(cls._opened(client, engine, **options), call)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """No more refreshes; the surface still answers."""
        self._stop.set()

    def prefill(self, batch: ArrayLike, isl: ArrayLike, prefix: ArrayLike = 0) -> Any:
        """One prefill pass of ``batch`` prompts of ``isl`` tokens each, of which ``prefix`` are cached."""
        ms = self._prefill(batch, isl, prefix)
        return ms if ms == ms else self.predict_ms(Prefill(batch, isl, prefix))

    def decode_step(self, batch: ArrayLike, isl: ArrayLike, osl: ArrayLike) -> Any:
        """One decode iteration of ``batch`` requests in the middle of their ``osl`` output tokens."""
        ms = self._decode_step(batch, isl, osl)
        return ms if ms == ms else self.predict_ms(DecodeStep(batch, isl, osl))

    def decode(self, batch: ArrayLike, isl: ArrayLike, osl: ArrayLike, *, beam_width: int = 1, stride: int = 32) -> Any:
        """The whole generation of ``osl`` tokens, the sum over its iterations."""
        return self.predict_ms(DecodeTrajectory(batch, isl, osl, beam_width, stride))

    def mixed(
        self, ctx_tokens: ArrayLike, gen_requests: ArrayLike, isl: ArrayLike, osl: ArrayLike, prefix: ArrayLike = 0
    ) -> Any:
        """One iteration with ``ctx_tokens`` prefill tokens and ``gen_requests`` decoding requests."""
        ms = self._mixed(ctx_tokens, gen_requests, isl, osl, prefix)
        return ms if ms == ms else self.predict_ms(Mixed(ctx_tokens, gen_requests, isl, osl, prefix))

    def predict_ms(self, step: Step) -> Any:
        """The latency of ``step``; a float for numbers, (N,) for arrays."""
        return now(self._predicted(step), call)

    def refresh(self) -> bool:
        with self._lock:
            return now(self._renewed(), call)


def _keep_fresh(ref: weakref.ref[LocalSurface], stop: threading.Event, every_s: float) -> None:
    while not stop.wait(every_s):
        surface = ref()
        if surface is None:
            return
        with contextlib.suppress(Exception):  # which ``last_error`` tells
            surface.refresh()
        del surface
