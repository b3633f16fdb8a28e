"""The running server: assembled, probed, announced, drained."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any

import grpc
from perfcast.v1 import common_pb2
from perfcast_engine.errors import EngineError
from perfcast_engine.predictor import Predictor

from perfcast_server import (
    admin,
    calibration,
    callers,
    catalog,
    deploy,
    logs,
    planner,
    prediction,
    reflection,
    search,
    serving,
    surfaces,
)
from perfcast_server.certificates import Certificates
from perfcast_server.data import Checker, Data, DataRefused, OnSignal, Reloaded
from perfcast_server.engines import PROBES, Engines, Ready
from perfcast_server.errors import ServiceError
from perfcast_server.lanes import Lanes
from perfcast_server.lifecycle import Health, Lifecycle, State
from perfcast_server.metrics import Metrics
from perfcast_server.rpc import Method, Rpc
from perfcast_server.searchers import Searchers
from perfcast_server.settings import NotReady, Settings, SettingsError, address, require_guarded
from perfcast_server.states import States
from perfcast_server.tidy import Tidy, settle

log = logging.getLogger("perfcast.server")

MAX_STREAMS_OF_A_CONNECTION = 1024  # more calls wait in their client
FILES_S = 1.0  # how often files that may change are looked at
ROOM_S = 1.0  # how often it is looked whether engines have grown too large
WEIGH_TIMES = 15  # of those between two times that what is behind engines is counted anew
PROBE_MODEL, PROBE_SYSTEM, PROBE_BACKENDS = "Qwen/Qwen3-32B-FP8", "h200_sxm", ("trtllm", "vllm")


def services(
    engines: Engines, searchers: Searchers, settings: Settings, metrics: Metrics, states: States
) -> dict[str, tuple[Method, ...]]:
    """Every service with its methods; gRPC finds those of the first soonest."""
    listing = catalog.Catalog(engines, settings)
    offered: dict[str, tuple[Method, ...]] = {
        prediction.SERVICE: (
            *prediction.Prediction(engines, settings, metrics).methods(),
            surfaces.Surfaces(engines, settings, metrics).method(),
        ),
        serving.SERVICE: serving.Serving(engines, settings).methods(),
        search.SERVICE: search.Search(searchers).methods(),
        planner.SERVICE: planner.Planner(engines, states, settings).methods(),
        calibration.SERVICE: calibration.Calibration(engines, states, metrics).methods(),
        deploy.SERVICE: deploy.Deploy(engines, settings).methods(),
        catalog.SERVICE: listing.methods(),
    }
    listing.methods_served = tuple(f"{name}/{method.name}" for name in offered for method in offered[name])
    return offered


class Server:
    """One server in the running event loop: ``await start()``, then ``await stop()``.

    shared_port: whether other processes listen on the same port; reload: reloads the data of all of them.
    """

    def __init__(
        self,
        settings: Settings,
        shared_port: bool = False,
        reload: Callable[[], Awaitable[Reloaded]] | None = None,
    ) -> None:
        self.settings = settings
        self.lifecycle = Lifecycle()
        self.metrics = Metrics()
        self.address = ""
        self.metrics_port: int | None = None
        self.lanes = Lanes(settings, self.metrics)
        self._tasks: set[asyncio.Task[None]] = set()
        self._tidy = Tidy()
        self._http: Any = None
        self.engines = Engines(settings, self.metrics, self.lanes, self._announce)
        self._gate = callers.gate(settings)
        self._certificates = Certificates(settings) if settings.tls_cert else None
        self._tracing = _tracing() if settings.tracing else None
        traced = self._tracing.around if self._tracing is not None else None
        self._rpc = Rpc(settings, self.lifecycle, self.metrics, self._gate, traced)
        self._grpc = grpc.aio.server(options=_options(settings, shared_port))
        self._searchers = Searchers(settings, self.metrics)
        self._reloading = asyncio.Lock()
        self._checked = Checker(settings.data)
        self._data: Data | None = None
        self._next: tuple[Predictor, list[Ready]] | None = None
        self._states = States(settings.state_dir, settings.max_states)
        offered = services(self.engines, self._searchers, settings, self.metrics, self._states)
        if settings.admin:
            offered[admin.SERVICE] = admin.Admin(reload or self.reload).methods()
        health = Health(self.lifecycle, offered, self.engines.__contains__, settings.max_streams)
        handlers = [self._rpc.handlers(name, methods) for name, methods in offered.items()]
        self._grpc.add_generic_rpc_handlers((*handlers, health.handlers()))
        if settings.reflection:
            reflection.add(self._grpc, (*offered, "grpc.health.v1.Health"), self._rpc.guarded)

    async def start(self) -> None:
        """Listen, open the tables, answer a probe of each phase; only then say SERVING.

        Raises SettingsError or NotReady.
        """
        began = time.perf_counter()
        require_guarded(self.settings)
        self._states.open()
        self._listen()
        await self._grpc.start()
        try:
            predictor, ready = await asyncio.to_thread(self._opened)
        except EngineError as error:
            raise SettingsError(error.message) from None
        self.engines.adopt(predictor, [ready])
        self._data = _data(predictor)
        self._searchers.renew(self._data.version)
        await self.lifecycle.become(State.SERVING)
        self._run(self._refresh())
        self._run(self._bound())
        self._run(self._tidy.keep())
        seconds = round(time.perf_counter() - began, 3)
        log.info("ready", extra={"address": self.address, "metrics_port": self.metrics_port, "seconds": seconds})

    async def reload(self) -> Reloaded:
        """Take up the data that are on disk now, in this process. Raises DataRefused."""
        async with self._reloading:
            data = await self._checked()
            await self.prepare(data.version)
            return Reloaded(data, await self.commit())

    async def prepare(self, version: str) -> None:
        """Open the data of that version beside those in use, with all engines in use. Raises DataRefused."""

        def opened() -> tuple[Predictor, list[Ready]]:
            predictor, ready = self._opened()
            return predictor, [ready, *self.engines.ready_in(predictor)]

        try:
            predictor, ready = await asyncio.to_thread(opened)
        except (EngineError, NotReady) as error:
            raise DataRefused(str(error)) from None
        if _data(predictor).version != version:
            raise DataRefused("they changed while they were read")
        self._next = predictor, ready
        log.info("data prepared", extra={"version": version})

    async def commit(self) -> bool:
        """Answer from what was prepared, between two calls; whether that is anything new."""
        if self._next is None:
            raise DataRefused("nothing was prepared")
        (predictor, ready), self._next, old = self._next, None, self._data
        self.engines.adopt(predictor, ready)
        self._rpc.forget()
        self._data = _data(predictor)
        self._searchers.renew(self._data.version)
        self.metrics.reloads.inc()
        self._tidy.due(renewed=True)
        log.info("data taken", extra={"version": self._data.version, "packs": self._data.packs})
        return self._data != old

    async def discard(self) -> None:
        """Forget what was prepared."""
        self._next = None

    async def stop(self) -> None:
        """Say NOT_SERVING, refuse new calls, finish the work in flight, let go of everything."""
        if self.lifecycle.state is State.DRAINING:
            return
        log.info("draining")
        for task in self._tasks:
            task.cancel()
        await self.lifecycle.become(State.DRAINING)
        await asyncio.sleep(self.settings.drain_delay_s)
        self._rpc.end_idle_streams()
        await self._grpc.stop(self.settings.drain_grace_s)
        await self._searchers.close()
        self.lanes.close()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)
        self._states.close()
        if self._http is not None:
            self._http.shutdown()
            self._http.server_close()
        log.info("stopped")

    def _listen(self) -> None:
        settings = self.settings
        try:
            if settings.host:
                place = address(settings.host, settings.port)
                if self._certificates is None:
                    port = self._grpc.add_insecure_port(place)
                else:
                    port = self._grpc.add_secure_port(place, self._certificates.credentials())
                self.address = address(settings.host, port)
        except RuntimeError:
            place = address(settings.host, settings.port)
            raise SettingsError(f"cannot listen on {place}: it is in use, or no address of this machine") from None
        try:
            if settings.unix_socket:
                self._grpc.add_insecure_port(f"unix:{settings.unix_socket}")
                self.address = self.address or f"unix:{settings.unix_socket}"
        except RuntimeError:
            raise SettingsError(
                f"cannot listen on unix:{settings.unix_socket}: it is in use, or its folder is missing or read-only"
            ) from None
        if settings.metrics_port >= 0:
            try:
                self._http = self.metrics.serve(settings.metrics_host, settings.metrics_port)
            except OSError as error:
                place = f"{settings.metrics_host}:{settings.metrics_port}"
                raise SettingsError(f"cannot serve metrics on {place}: {error.strerror}") from None
            self.metrics_port = self._http.server_port

    def _opened(self) -> tuple[Predictor, Ready]:
        """The data, and one engine that has answered each phase: the usual one, or the first that does."""
        predictor = Predictor(roots=self.settings.data)
        last: Exception | None = None
        for config in _probe_configs(predictor):
            try:
                ready = self.engines.made(predictor, config)
                for _, probe in PROBES:
                    probe(ready.engine).raise_first()
                return predictor, ready
            except (EngineError, ServiceError) as error:
                last = error
                log.warning("probe failed", extra={"engine": f"{config.system}/{config.backend}", "why": str(error)})
        raise NotReady(f"no engine answered a probe: {last or 'there are no systems'}")

    async def _refresh(self) -> None:
        """Take new tokens and certificates as their files change."""
        while True:
            await asyncio.sleep(FILES_S)
            if self._gate is not None and self._gate.tokens is not None:
                self._gate.tokens.refresh()
            if self._certificates is not None:
                self._certificates.refresh()

    async def _bound(self) -> None:
        """Keep engines, which grow as they are asked, within their bound."""
        while True:
            for _ in range(WEIGH_TIMES):
                await asyncio.sleep(ROOM_S)
                self.engines.make_room()
            await self.engines.weigh()
            await asyncio.to_thread(self._states.forget_models, self.engines.__contains__)

    def _announce(self) -> None:
        self._tidy.due()
        self._run(self.lifecycle.changed())

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _tracing() -> Any:
    try:
        from perfcast_server.tracing import Tracing
    except ModuleNotFoundError as error:
        raise SettingsError(f"tracing: {error.name} is missing; pip install 'perfcast[tracing]'") from None
    return Tracing()


def _data(predictor: Predictor) -> Data:
    return Data(predictor.catalog.digest(), len(predictor.catalog.ls()))


def _probe_configs(predictor: Predictor) -> Iterator[common_pb2.EngineConfig]:
    catalog = predictor.catalog
    systems = sorted(catalog.systems(), key=lambda name: name != PROBE_SYSTEM)
    for mode in (common_pb2.DATABASE_MODE_SILICON, common_pb2.DATABASE_MODE_SOL):
        for system in systems:
            with contextlib.suppress(EngineError):
                measured = catalog.backends(system)
                for backend in measured if mode == common_pb2.DATABASE_MODE_SILICON else PROBE_BACKENDS:
                    yield common_pb2.EngineConfig(
                        model_id=PROBE_MODEL,
                        system=system,
                        backend=backend,
                        parallel=common_pb2.ParallelConfig(tp=4),
                        database_mode=mode,
                    )


def _options(settings: Settings, shared_port: bool) -> list[tuple[str, int]]:
    age = int(settings.max_connection_age_s * 1000)
    return [
        ("grpc.max_receive_message_length", settings.max_message_bytes),
        ("grpc.max_send_message_length", settings.max_message_bytes),
        ("grpc.http2.min_ping_interval_without_data_ms", int(settings.min_ping_interval_s * 1000)),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", int(settings.min_ping_interval_s * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_ping_strikes", 3),
        ("grpc.max_connection_age_ms", age),
        ("grpc.max_allowed_incoming_connections", settings.max_connections),
        ("grpc.max_concurrent_streams", MAX_STREAMS_OF_A_CONNECTION),
        ("grpc.server_handshake_timeout_ms", 10_000),
        ("grpc.keepalive_time_ms", 60_000),  # finds peers that are gone without a word
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.so_reuseport", int(shared_port)),
    ]


def spare_collections() -> None:
    """What is loaded by now stays: later garbage collections need not look at it. For a process that only serves."""
    gc.collect()
    gc.freeze()


async def run(settings: Settings, on_ready: Callable[[Server], None] = lambda server: None) -> None:
    """Serve until SIGTERM or SIGINT, then drain."""
    logs.configure(settings.log_level, settings.log_format)
    settle()
    server = Server(settings)
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGHUP, OnSignal(server.reload))
    try:
        starting = asyncio.ensure_future(server.start())
        stopping = asyncio.ensure_future(stop.wait())
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            await starting
            spare_collections()
            on_ready(server)
            await stopping
        else:
            starting.cancel()
    finally:
        await server.stop()
