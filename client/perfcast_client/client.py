"""The blocking client."""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Mapping, Sequence
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
from perfcast_client.local import REFRESH_S, LocalSurface
from perfcast_client.record import EngineLike
from perfcast_client.search import SearchTask
from perfcast_client.serving import Deployment, Limits, Workload
from perfcast_client.snapshot import Received
from perfcast_client.steps import Step
from perfcast_client.stream import StepStream

T = TypeVar("T")


class Questions:
    """What can be asked, whoever answers: a server through ``Client``, or this process."""

    def _run(self, call: Call[T], deadline_s: float | None) -> T:
        raise NotImplementedError

    def _stream(self, call: Call[T], deadline_s: float | None) -> Generator[T, None, None]:
        raise NotImplementedError

    def ask(self, call: Call[T], deadline_s: float | None = None) -> T:
        """Make a call that ``perfcast_client.planner`` or ``perfcast_client.calibration`` describes."""
        return self._run(call, deadline_s)

    def systems(self, deadline_s: float | None = None) -> tuple[results.System, ...]:
        return self._run(calls.systems(), deadline_s)

    def models(
        self, contains: str = "", family: str = "", deadline_s: float | None = None
    ) -> tuple[results.Model, ...]:
        return self._run(calls.models(contains, family), deadline_s)

    def versions(self, system: str, backend: str = "", deadline_s: float | None = None) -> tuple[results.Version, ...]:
        return self._run(calls.versions(system, backend), deadline_s)

    def check_support(self, config: EngineConfig, deadline_s: float | None = None) -> results.Support:
        """Whether each phase can be answered for; an unsupported engine is an answer, not an exception."""
        return self._run(calls.check_support(config), deadline_s)

    def support(
        self,
        system: str,
        backend: str = "",
        version: str = "",
        models: Sequence[str] = (),
        deadline_s: float | None = None,
    ) -> tuple[ModelSupport, ...]:
        """Which models (all, if none is named) are answered on a system, each under the smallest mapping that holds
        it."""
        return self._run(calls.support(system, backend, version, models), deadline_s)

    def coverage(
        self, engine: EngineLike, *, choose_parallel: bool = False, deadline_s: float | None = None
    ) -> Coverage:
        """What answers for each operator of an engine. ``choose_parallel``: under the smallest mapping that holds the
        model, whatever sizes the configuration has."""
        return self._run(calls.coverage(engine, choose_parallel), deadline_s)

    def resolve(self, engine: EngineLike, deadline_s: float | None = None) -> results.Engine:
        """The engine with everything filled in and its handle; pass it to the other calls."""
        return self._run(calls.resolve(engine), deadline_s)

    def predict(
        self, engine: EngineLike, step: Step, *, operators: bool = False, deadline_s: float | None = None
    ) -> results.Prediction:
        """The latency of one step, with its operators if asked."""
        return self._run(calls.predict(engine, step, operators), deadline_s)

    def predict_many(
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
        return self._run(calls.predict_many(engine, steps, operators, provenance, allow_misses), deadline_s)

    def estimate(
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
        return self._run(call, deadline_s)

    def estimate_memory(
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
        return self._run(calls.estimate_memory(engine, workload, *sizes), deadline_s)

    def recommend(
        self,
        task: SearchTask,
        *,
        requests_per_s: float | None = None,
        concurrency: float | None = None,
        max_gpus: int | None = None,
        deadline_s: float | None = None,
    ) -> SearchResult:
        """The fewest GPUs that carry a load; where ``max_gpus`` do not suffice, what serves most of it on those."""
        return self._run(calls.recommend(task, requests_per_s, concurrency, max_gpus), deadline_s)

    def generate(
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
        return self._run(calls.generate(deployment, workload, target, *given), deadline_s)

    def deploy_targets(self, deadline_s: float | None = None) -> DeployTargets:
        return self._run(calls.deploy_targets(), deadline_s)

    def validate_files(self, files: Mapping[str, bytes], deadline_s: float | None = None) -> Validation:
        """Whether files of one folder are those that were generated; bad files are an answer, not an exception."""
        return self._run(calls.validate_files(files), deadline_s)

    def search(
        self, task: SearchTask, deadline_s: float | None = None
    ) -> Generator[SearchProgress | SearchResult, None, None]:
        """Progress with the front as it grows, then the result, always last. Closing the generator cancels."""
        yield from self._stream(calls.search(task), deadline_s)

    def search_result(self, task: SearchTask, deadline_s: float | None = None) -> SearchResult:
        """The result of a search without its progress."""
        *_, result = self.search(task, deadline_s)
        assert isinstance(result, SearchResult)
        return result


class Client(Connection, Questions):
    """A connection to a perfcast server, safe to share between threads.

    target: "host:port", "dns:///name:port" (all addresses in turn) or "unix:/path".
    tls: None is insecure. metadata: asked before every call (see ``bearer``). deadline_s overrides the default of
    every call; ``wait_for_ready`` lets calls wait within it for a server that is not up yet.

    A client does not survive a fork: make a new one in the child.
    """

    _grpc = grpc

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._closed = True
        if os.getpid() == self._pid:
            self._channel.close()

    def server_info(self) -> results.ServerInfo:
        """The server's version and limits; asked once, before the first other call."""
        if self._info is None:
            try:
                self._info = calls.check_revision(self._make(calls.server_info(), None), self.target)
            except Unsupported:
                raise calls.no_contract(self.target) from None
        return self._info

    def reload_data(self, deadline_s: float | None = None) -> results.Reloaded:
        """Let the server take up the data that are on its disk now; needs the token of an admin. Raises DataRefused."""
        return self._run(calls.reload_data(), deadline_s)

    def stream(self, engine: EngineLike, *, deadline_s: float | None = None) -> StepStream:
        """A stream of steps on one engine for simulators, which ask one after another. deadline_s: of each answer."""
        self.server_info()
        return StepStream(self._stepping, engine, deadline_s or self._deadline_s or DEFAULT_DEADLINE_S)

    def surface(
        self,
        engine: EngineLike,
        *,
        max_pass_tokens: int = 0,
        ask: bool = True,
        refresh_s: float = REFRESH_S,
        file: str | Path | None = None,
    ) -> LocalSurface:
        """The engine's surface, to ask in this process: see ``LocalSurface`` for the options.

        max_pass_tokens: reach at least so many tokens in one pass; 0 is the server's default. Raises InvalidRequest
        where the engine has no surface.
        """
        return LocalSurface.fetch(
            self, engine, max_pass_tokens=max_pass_tokens, ask=ask, refresh_s=refresh_s, file=file
        )

    def get_surface(self, engine: EngineLike, max_pass_tokens: int = 0, known_hash: str = "") -> Received:
        """What ``surface`` is made of; without the surface itself where ``known_hash`` is its hash."""
        return self._run(calls.surface(engine, max_pass_tokens, known_hash), None)

    def _run(self, call: Call[T], deadline_s: float | None) -> T:
        if self._info is None:
            self.server_info()
        try:
            return self._make(call, deadline_s)
        except UnknownHandle:
            if call.inline is None:
                raise
        return self._make(call, deadline_s, inline=True)

    def _stream(self, call: Call[T], deadline_s: float | None) -> Generator[T, None, None]:
        self.server_info()
        patience = self._patience(call, deadline_s)
        while True:
            rpc = self._begun(call, call.request, patience)
            try:
                for answer in rpc:
                    yield call.read(answer)
                return
            except grpc.RpcError as error:
                failed = calls.failure(error)
            finally:
                rpc.cancel()
            time.sleep(patience.pause_s(failed))

    def _make(self, call: Call[T], deadline_s: float | None, inline: bool = False) -> T:
        patience = self._patience(call, deadline_s)
        while True:
            try:
                answer = self._begun(call, call.inline if inline else call.request, patience)
                return call.read(list(answer) if call.is_stream else answer)
            except grpc.RpcError as error:
                failed = calls.failure(error)
            if self._info is None and not self._wait_for_ready:
                raise failed  # it may be no server at all
            time.sleep(patience.pause_s(failed))
