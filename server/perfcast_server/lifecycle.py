"""Where the server stands, and the health service that says so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from perfcast_server.errors import ServiceError, decoded, refusal

Status = health_pb2.HealthCheckResponse.ServingStatus


class State(Enum):
    LOADING = 0
    SERVING = 1
    DRAINING = 2


def draining() -> ServiceError:
    return ServiceError("DRAINING", "the server is stopping; another replica or a later try will answer")


class Lifecycle:
    """The state of one server; whoever waits for a change hears of it."""

    def __init__(self) -> None:
        self.state = State.LOADING
        self.changes = 0
        self._changed = asyncio.Condition()

    async def become(self, state: State) -> None:
        self.state = state
        await self.changed()

    async def changed(self) -> None:
        self.changes += 1
        async with self._changed:
            self._changed.notify_all()

    async def wait(self, seen: int) -> None:
        """Until there were more than ``seen`` changes."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.changes > seen)

    def require_loaded(self) -> None:
        if self.state is State.LOADING:
            raise ServiceError("LOADING", "tables are still loading; try again shortly")

    def require_serving(self) -> None:
        self.require_loaded()
        if self.state is State.DRAINING:
            raise draining()


class Health:
    """grpc.health.v1: "" is the live process, each service by its name, "engine/<handle>" an engine kept ready."""

    def __init__(
        self, lifecycle: Lifecycle, services: Iterable[str], has_engine: Callable[[str], bool], max_watchers: int
    ) -> None:
        self._lifecycle = lifecycle
        self._max_watchers = max_watchers
        self._watchers = 0
        self._services = frozenset(services)
        self._has_engine = has_engine

    def status(self, name: str) -> int | None:
        """The serving status of ``name``, None where it is not known."""
        if name.startswith("engine/"):
            known = self._has_engine(name.removeprefix("engine/"))
        else:
            known = name == "" or name in self._services
        if not known:
            return None
        state = self._lifecycle.state
        up = state is State.SERVING or (name == "" and state is State.LOADING)
        return int(Status.Value("SERVING" if up else "NOT_SERVING"))

    async def check(self, data: bytes, context: Any) -> health_pb2.HealthCheckResponse:
        status = self.status(await _service(data, context))
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        return health_pb2.HealthCheckResponse(status=status)

    async def watch(self, data: bytes, context: Any) -> None:
        name = await _service(data, context)
        if self._watchers >= self._max_watchers:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many watch the health already")
        self._watchers += 1
        try:
            await self._tell(name, context)
        finally:
            self._watchers -= 1

    async def _tell(self, name: str, context: Any) -> None:
        told: int | None = None
        while True:
            seen, state = self._lifecycle.changes, self._lifecycle.state
            status = self.status(name)
            status = int(Status.Value("SERVICE_UNKNOWN")) if status is None else status
            if status != told:
                await context.write(health_pb2.HealthCheckResponse(status=status))
                told = status
            if state is State.DRAINING:
                return
            await self._lifecycle.wait(seen)

    def handlers(self) -> grpc.GenericRpcHandler:
        response = health_pb2.HealthCheckResponse.SerializeToString
        return grpc.method_handlers_generic_handler(
            "grpc.health.v1.Health",
            {
                "Check": grpc.unary_unary_rpc_method_handler(self.check, None, response),
                "Watch": grpc.unary_stream_rpc_method_handler(self.watch, None, response),
            },
        )


async def _service(data: bytes, context: Any) -> str:
    """Whose health is asked for."""
    try:
        return str(decoded(health_pb2.HealthCheckRequest, data).service)
    except ServiceError as error:
        told = refusal(error)
        await context.abort(told.code, told.message, told.trailers())
        raise
