"""The asyncio client."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import grpc

from perfcast_client import calls, results
from perfcast_client.calls import Call
from perfcast_client.channel import DEFAULT_DEADLINE_S
from perfcast_client.config import EngineConfig
from perfcast_client.connection import Connection
from perfcast_client.coverage import Coverage, ModelSupport
from perfcast_client.deploy import Cluster, DeployFiles, DeployTargets, EngineSettings, Validation
from perfcast_client.deployments import Estimate, MemoryEstimate, SearchProgress, SearchResult
from perfcast_client.errors import UnknownHandle, Unsupported
from perfcast_client.local import REFRESH_S
from perfcast_client.local_aio import AsyncLocalSurface
from perfcast_client.record import EngineLike
from perfcast_client.search import SearchTask
from perfcast_client.serving import Deployment, Limits, Workload
from perfcast_client.snapshot import Received
from perfcast_client.steps import Step
from perfcast_client.stream import AsyncStepStream

T = TypeVar("T")


class AsyncClient(Connection):
    """As ``Client``, for one event loop: every call is awaited."""

    _grpc = grpc.aio

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        self._closed = True
        if os.getpid() == self._pid:
            await self._channel.close()

    async def server_info(self) -> results.ServerInfo:
        """The server's version and limits; asked once, before the first other call."""
        if self._info is None:
            try:
                self._info = calls.check_revision(await self._make(calls.server_info(), None), self.target)
            except Unsupported:
                raise calls.no_contract(self.target) from None
        return self._info

    async def reload_data(self, deadline_s: float | None = None) -> results.Reloaded:
        """Let the server take up the data that are on its disk now; needs the token of an admin. Raises DataRefused."""
        return await self._run(calls.reload_data(), deadline_s)

    async def systems(self, deadline_s: float | None = None) -> tuple[results.System, ...]:
        return await self._run(calls.systems(), deadline_s)

    async def models(
        self, contains: str = "", family: str = "", deadline_s: float | None = None
    ) -> tuple[results.Model, ...]:
        return await self._run(calls.models(contains, family), deadline_s)

    async def versions(
        self, system: str, backend: str = "", deadline_s: float | None = None
    ) -> tuple[results.Version, ...]:
        return await self._run(calls.versions(system, backend), deadline_s)

    async def check_support(self, config: EngineConfig, deadline_s: float | None = None) -> results.Support:
        """Whether each phase can be answered for; an unsupported engine is an answer, not an exception."""
        return await self._run(calls.check_support(config), deadline_s)

    async def support(
        self,
        system: str,
        backend: str = "",
        version: str = "",
        models: Sequence[str] = (),
        deadline_s: float | None = None,
    ) -> tuple[ModelSupport, ...]:
        """Which models (all, if none is named) are answered on a system, each under the smallest mapping that holds
        it."""
        return await self._run(calls.support(system, backend, version, models), deadline_s)

    async def coverage(
        self, engine: EngineLike, *, choose_parallel: bool = False, deadline_s: float | None = None
    ) -> Coverage:
        """What answers for each operator of an engine. ``choose_parallel``: under the smallest mapping that holds the
        model, whatever sizes the configuration has."""
        return await self._run(calls.coverage(engine, choose_parallel), deadline_s)

    async def resolve(self, engine: EngineLike, deadline_s: float | None = None) -> results.Engine:
        """The engine with everything filled in and its handle; pass it to the other calls."""
        return await self._run(calls.resolve(engine), deadline_s)

    async def predict(
        self, engine: EngineLike, step: Step, *, operators: bool = False, deadline_s: float | None = None
    ) -> results.Prediction:
        """The latency of one step, with its operators if asked."""
        return await self._run(calls.predict(engine, step, operators), deadline_s)

    async def predict_many(
        self,
        engine: EngineLike,
        steps: Step,
        *,
        operators: bool = False,
        provenance: bool = False,
        allow_misses: bool = False,
        deadline_s: float | None = None,
    ) -> results.Predictions:
        """The latencies of many steps, given as arrays (N,) or numbers that hold for all of them."""
        return await self._run(calls.predict_many(engine, steps, operators, provenance, allow_misses), deadline_s)

    async def estimate(
        self,
        deployment: Deployment,
        workload: Workload,
        *,
        limits: Limits | None = None,
        nextn_accepted: float = 0.0,
        operators: bool = False,
        allow_out_of_memory: bool = False,
        deadline_s: float | None = None,
    ) -> Estimate:
        """What one deployment delivers under a load, and the memory that it takes."""
        call = calls.estimate(deployment, workload, limits, nextn_accepted, operators, allow_out_of_memory)
        return await self._run(call, deadline_s)

    async def estimate_memory(
        self,
        engine: EngineLike,
        workload: Workload | None = None,
        *,
        batch: int | None = None,
        max_num_tokens: int | None = None,
        memory_fraction: float | None = None,
        tolerance: float | None = None,
        block_size: int | None = None,
        deadline_s: float | None = None,
    ) -> MemoryEstimate:
        """Memory of one GPU and the KV cache that is left; with a workload, the largest batch per rank too."""
        sizes = (batch, max_num_tokens, memory_fraction, tolerance, block_size)
        return await self._run(calls.estimate_memory(engine, workload, *sizes), deadline_s)

    async def recommend(
        self,
        task: SearchTask,
        *,
        requests_per_s: float | None = None,
        concurrency: float | None = None,
        max_gpus: int | None = None,
        deadline_s: float | None = None,
    ) -> SearchResult:
        """The fewest GPUs that carry a load; where ``max_gpus`` do not suffice, what serves most of it on those."""
        return await self._run(calls.recommend(task, requests_per_s, concurrency, max_gpus), deadline_s)

    async def generate(
        self,
        deployment: Deployment,
        workload: Workload,
        target: str,
        *,
        policy: str = "as_predicted",
        limits: Limits | None = None,
        nextn_accepted: float = 0.0,
        replicas: int = 1,
        settings: EngineSettings | None = None,
        cluster: Cluster | None = None,
        deadline_s: float | None = None,
    ) -> DeployFiles:
        """The files that deploy what ``estimate`` would be asked about; see ``deploy_targets`` for the targets.

        policy: "as_predicted" (the engines get the limits that were predicted) or "headroom" (margins of production).
        """
        given = (policy, limits, nextn_accepted, replicas, settings, cluster)
        return await self._run(calls.generate(deployment, workload, target, *given), deadline_s)

    async def deploy_targets(self, deadline_s: float | None = None) -> DeployTargets:
        return await self._run(calls.deploy_targets(), deadline_s)

    async def validate_files(self, files: Mapping[str, bytes], deadline_s: float | None = None) -> Validation:
        """Whether files of one folder are those that were generated; bad files are an answer, not an exception."""
        return await self._run(calls.validate_files(files), deadline_s)

    async def search(
        self, task: SearchTask, deadline_s: float | None = None
    ) -> AsyncGenerator[SearchProgress | SearchResult]:
        """Progress with the front as it grows, then the result, always last. Closing the generator cancels."""
        async with aclosing(self._stream(calls.search(task), deadline_s)) as events:
            async for event in events:
                yield event

    async def _stream(self, call: Call[T], deadline_s: float | None) -> AsyncGenerator[T]:
        await self.server_info()
        patience = self._patience(call, deadline_s)
        while True:
            rpc = self._begun(call, call.request, patience)
            try:
                async for answer in rpc:
                    yield call.read(answer)
                return
            except grpc.aio.AioRpcError as error:
                failed = calls.failure(error)
            finally:
                rpc.cancel()
            await asyncio.sleep(patience.pause_s(failed))

    def stream(self, engine: EngineLike, *, deadline_s: float | None = None) -> AsyncStepStream:
        """A stream of steps on one engine for simulators, which ask one after another. deadline_s: of each answer."""
        return AsyncStepStream(self._stepping, engine, deadline_s or self._deadline_s or DEFAULT_DEADLINE_S)

    async def surface(
        self,
        engine: EngineLike,
        *,
        max_pass_tokens: int = 0,
        ask: bool = True,
        refresh_s: float = REFRESH_S,
        file: str | Path | None = None,
    ) -> AsyncLocalSurface:
        """The engine's surface, to ask in this process: see ``LocalSurface`` for the options.

        max_pass_tokens: reach at least so many tokens in one pass; 0 is the server's default. Raises InvalidRequest
        where the engine has no surface.
        """
        return await AsyncLocalSurface.fetch(
            self, engine, max_pass_tokens=max_pass_tokens, ask=ask, refresh_s=refresh_s, file=file
        )

    async def get_surface(self, engine: EngineLike, max_pass_tokens: int = 0, known_hash: str = "") -> Received:
        """What ``surface`` is made of; without the surface itself where ``known_hash`` is its hash."""
        return await self._run(calls.surface(engine, max_pass_tokens, known_hash), None)

    async def ask(self, call: Call[T], deadline_s: float | None = None) -> T:
        """Make a call that ``perfcast_client.planner`` or ``perfcast_client.calibration`` describes."""
        return await self._run(call, deadline_s)

    async def _run(self, call: Call[T], deadline_s: float | None) -> T:
        if self._info is None:
            await self.server_info()
        try:
            return await self._make(call, deadline_s)
        except UnknownHandle:
            if call.inline is None:
                raise
        return await self._make(call, deadline_s, inline=True)

    async def _make(self, call: Call[T], deadline_s: float | None, inline: bool = False) -> T:
        patience = self._patience(call, deadline_s)
        while True:
            going = self._begun(call, call.inline if inline else call.request, patience)
            try:
                return call.read([part async for part in going] if call.is_stream else await going)
            except grpc.aio.AioRpcError as error:
                failed = calls.failure(error)
            if self._info is None and not self._wait_for_ready:
                raise failed  # it may be no server at all
            await asyncio.sleep(patience.pause_s(failed))
