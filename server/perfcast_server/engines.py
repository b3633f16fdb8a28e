"""Engines kept ready, and the configurations that handles stand for."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from time import perf_counter
from typing import Any, TypeVar

from perfcast.v1 import common_pb2
from perfcast_engine.errors import EngineError, InvalidField
from perfcast_engine.predictor import Engine, Predictor
from perfcast_engine.step_result import StepResult
from perfcast_engine.tables.database import Derived, Mode
from perfcast_planning.planner.pass_model import PassModel

from perfcast_server import single, wire
from perfcast_server.cache import Lru, SingleFlight
from perfcast_server.errors import ServiceError, invalid
from perfcast_server.lanes import Lanes
from perfcast_server.metrics import Metrics
from perfcast_server.settings import Settings
from perfcast_server.steps import QuickAnswer, quick_answers

log = logging.getLogger("perfcast.engines")

T = TypeVar("T")
MAX_HANDLE = 128


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Ready:
    """An engine that has answered a probe of each phase, with what its answers say of it."""

    engine: Engine
    predictor: Predictor
    stamp: common_pb2.EngineStamp
    original: common_pb2.EngineConfig
    head: bytes  # of its answers, the stamp in them
    quick: Mapping[str, QuickAnswer]  # none where answers may be borrowed, so that their tier has to be asked for
    passes: PassModel  # which learns nothing


class Engines:
    """Finds the engine that a request names, loading it at most once at a time and off the event loop."""

    def __init__(
        self,
        settings: Settings,
        metrics: Metrics,
        lanes: Lanes,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self._predictor: Predictor | None = None
        self._settings = settings
        self._metrics = metrics
        self.lanes = lanes
        self._changed = changed
        self._ready: Lru[str, Ready] = Lru(settings.max_engines)
        self._configs: Lru[str, common_pb2.EngineConfig] = Lru(
            settings.max_handles << 12, size=lambda key, config: max(1 << 12, config.ByteSize())
        )
        self._handles: Lru[bytes, str] = Lru(settings.max_handles << 12, size=lambda key, _: max(1 << 12, len(key)))
        metrics.engines.set_function(lambda: len(self._ready))
        metrics.engine_bytes.set_function(self.held_bytes)
        self._loads: SingleFlight[bytes, Ready] = SingleFlight(finish=True)

    def __contains__(self, handle: str) -> bool:
        return handle in self._ready

    def held_bytes(self) -> int:
        """Bytes of all engines that are ready and of the data behind them, what they share once."""
        tables = self._predictor.catalog.nbytes if self._predictor is not None else 0
        derived = sum(each.nbytes for each in self._derived())
        return tables + derived + sum(ready.engine.steps.nbytes for ready in self._ready.values())

    async def weigh(self) -> None:
        """Count again what grows as it is asked; off the event loop, which alone knows the engines."""
        derived, seen = self._derived(), set[int]()

        def work() -> None:
            for each in derived:
                each.weigh(seen)

        await asyncio.to_thread(work)

    def _derived(self) -> list[Derived]:
        """Each once."""
        kept = self._predictor.catalog.derived() if self._predictor is not None else ()
        engines = (ready.engine.resolved.db.derived() for ready in self._ready.values())
        return list({id(each): each for each in chain(kept, *engines)}.values())

    def make_room(self) -> None:
        """Let go of data that no engine needs and of the engines that were used longest ago, down to the bound."""
        most = self._settings.max_engine_bytes
        if self.held_bytes() > most:
            self.predictor.catalog.let_go()
            while len(self._ready) > 1 and self.held_bytes() > most:
                self._ready.pop_oldest()

    @property
    def predictor(self) -> Predictor:
        if self._predictor is None:
            raise ServiceError("LOADING", "tables are still loading; try again shortly")
        return self._predictor

    def adopt(self, predictor: Predictor, ready: Iterable[Ready] = ()) -> None:
        """Answer from ``predictor`` from now on, with the engines that are ``ready`` there.

        Engines of an earlier one are forgotten. Their handles are not: they stand for the configuration still.
        """
        self._predictor = predictor
        self._loads = SingleFlight(finish=True)
        self._ready.clear()
        self._handles.clear()
        for each in ready:
            self._keep(each)

    def ready_in(self, predictor: Predictor) -> list[Ready]:
        """The engines that are ready now, of other data, as far as they can be had there; takes its time."""
        found = []
        for old in self._ready.values():
            with contextlib.suppress(EngineError, ServiceError):
                found.append(self.made(predictor, old.original))
        return found

    def get(self, handle: str) -> Ready | None:
        """The engine of that handle if it is ready now."""
        return self._ready.get(handle)

    def ready(self, request: Any) -> Ready | None:
        """The engine of a request's oneof ``engine`` if it is ready now."""
        found = self._ready.get(request.handle)
        if found is None and request.HasField("config"):
            handle = self._handles.get(request.config.SerializeToString(deterministic=True))
            found = self._ready.get(handle) if handle else None
        if found is not None:
            self._metrics.engine_hits.inc()
        return found

    async def of(self, request: Any) -> Ready:
        """The engine of a request's oneof ``engine``."""
        if (found := self.ready(request)) is not None:
            return found
        given = request.WhichOneof("engine")
        if given == "handle":
            return await self._by_handle(request.handle)
        if given == "config":
            return await self.by_config(request.config)
        raise invalid("engine", "is missing; give config or handle")

    async def off_loop(self, work: Callable[[], T]) -> T:
        """``work`` in a thread. Raises LIMIT where it would have to wait for too long."""
        return await self.lanes.work.run(work)

    async def _by_handle(self, handle: str) -> Ready:
        config = self._configs.get(handle)
        if config is None:
            raise ServiceError(
                "UNKNOWN_HANDLE",
                f"unknown handle {handle[:MAX_HANDLE]!r}: this replica has not seen its configuration; "
                "send the configuration inline once",
                kind="handle",
                name=handle[:MAX_HANDLE],
                field="handle",
            )
        known = self._handles.get(config.SerializeToString(deterministic=True))  # differs since the data changed
        return (self._ready.get(known) if known else None) or await self.by_config(config)

    async def by_config(self, config: common_pb2.EngineConfig) -> Ready:
        """The engine of a configuration, made ready if it is not."""
        key = config.SerializeToString(deterministic=True)
        self._metrics.engine_misses.inc()
        return await self._loads.do(key, lambda: self._load(key, config))

    async def _load(self, key: bytes, config: common_pb2.EngineConfig) -> Ready:
        kept = common_pb2.EngineConfig()
        kept.CopyFrom(config)
        began = perf_counter()
        predictor = self.predictor
        ready = await self.lanes.loads.run(lambda: self.made(predictor, kept))
        seconds = perf_counter() - began
        self._metrics.load_seconds.observe(seconds)
        if predictor is not self._predictor:
            return ready  # good for whoever asked; the next one gets it with the new data
        handle = ready.stamp.handle
        ready = self._ready.get(handle) or ready
        self._keep(ready)
        self._handles.put(key, handle)
        log.info("engine ready", extra={"handle": handle, "seconds": round(seconds, 4), "system": kept.system})
        self._changed()
        return ready

    def _keep(self, ready: Ready) -> None:
        handle = ready.stamp.handle
        self._ready.put(handle, ready)
        self._configs.put(handle, ready.original)
        self._handles.put(ready.original.SerializeToString(deterministic=True), handle)
        self.make_room()

    def made(self, predictor: Predictor, config: common_pb2.EngineConfig) -> Ready:
        """The engine of ``config`` with the data of ``predictor``; takes its time."""
        engine = self._build(predictor, config)
        stamp = wire.stamp(engine)
        engine.resolved.db.weigh()
        quick = quick_answers(engine.steps) if engine.config.database_mode is Mode.SILICON else {}
        return Ready(engine, predictor, stamp, config, single.stamped(stamp), quick, PassModel(steps=engine.steps))

    def _build(self, predictor: Predictor, config: common_pb2.EngineConfig) -> Engine:
        try:
            engine = predictor.engine(wire.engine_config(config, self._settings.max_config_json_bytes))
        except InvalidField as error:
            raise wire.in_request(error) from error
        for _, probe in PROBES:
            try:
                probe(engine)
            except EngineError:
                continue  # a phase that cannot be answered says so when it is asked for
        return engine


Probe = Callable[[Engine], StepResult]
PROBES: tuple[tuple[str, Probe], ...] = (
    ("prefill", lambda engine: engine.steps.prefill(1, 128)),
    ("decode", lambda engine: engine.steps.decode_step(1, 128, 2)),
    ("mixed", lambda engine: engine.steps.mixed(128, 1, 128, 2)),
)
