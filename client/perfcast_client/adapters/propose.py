"""A propose plugin for planners that load theirs over gRPC (spec/07 section 8.3)."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import grpc

from perfcast_client import planner
from perfcast_client.adapters import fpm, plugin_schema
from perfcast_client.adapters.asking import Adapter, C, asking
from perfcast_client.adapters.msgpack import unpack
from perfcast_client.adapters.plugin_schema import messages
from perfcast_client.aio import AsyncClient
from perfcast_client.errors import PerfcastError
from perfcast_client.planner_types import Limits, RankLoad, Scenario, TickGroup, WorkerLoad
from perfcast_client.record import EngineLike
from perfcast_client.turns import Steps

log = logging.getLogger("perfcast.propose")

PROTOCOL = "1.0"
NEEDS = ("observations.traffic", "observations.fpm", "observations.workers", "predictions")
MAX_MESSAGE_BYTES = 10 << 20
HEARTBEAT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """The engines of one component ("prefill" or "decode"), all alike. ``role``: "aggregated" where decode engines do
    both."""

    engine: EngineLike
    role: str
    limits: Limits = field(default_factory=Limits)
    state: str = ""
    min_replicas: int = 1
    max_replicas: int = 1024


class Demand(NamedTuple):
    """What is to be served: requests/s of a mean shape."""

    rps: float
    isl: int
    osl: int
    kv_hit_rate: float
    accept_length: float


class ProposePlugin(Adapter[C]):
    """Proposes replicas: enough for the predicted (else the observed) rate by what one engine sustains, and one more
    than are ready while every live engine would miss its target with the next request.

    pools: by component, "prefill" and "decode". Without data, and whenever something fails, it has no opinion: a
    planner never has reason to break its circuit. The planner's own interval applies to the predicted number of
    requests; ``interval_s`` where it observes none.
    """

    def __init__(
        self,
        client: C,
        pools: Mapping[str, Pool],
        *,
        ttft_ms: float | None = 500.0,
        itl_ms: float | None = 50.0,
        interval_s: float = 180.0,
        deadline_s: float = 3.0,
    ) -> None:
        super().__init__(client)
        unknown = set(pools) - {"prefill", "decode"}
        if unknown or not pools:
            raise ValueError(f"pools are of prefill and decode, not {', '.join(sorted(unknown)) or 'of nothing'}")
        self.pools = dict(pools)
        self.ttft_ms, self.itl_ms = ttft_ms, itl_ms
        self.interval_s = interval_s
        self.deadline_s = deadline_s

    def _answer(self, question: Any) -> Any:
        return self._client.ask(question, self.deadline_s)

    @asking
    def propose(self, request: Any) -> Steps[Any]:
        """The answer to one ProposeStageRequest."""
        context = request.context
        targets, reasons = [], []
        for component, pool in self.pools.items():
            try:
                replicas, reason = yield from self._replicas(component, pool, context)
            except (PerfcastError, ValueError, ArithmeticError) as error:
                log.warning("no opinion on %s: %s", component, error)
                continue
            if replicas is not None:
                replicas = min(max(replicas, pool.min_replicas), pool.max_replicas)
                target = messages.ComponentTarget(
                    sub_component_type=component, replicas=replicas, type=plugin_schema.SET
                )
                targets.append(target)
                reasons.append(f"{component} {replicas}: {reason}")
        if not targets:
            return messages.ProposeStageResponse(accept=messages.AcceptResult())
        override = messages.OverrideResult(targets=targets, reason="; ".join(reasons))
        return messages.ProposeStageResponse(override=override)

    def _replicas(self, component: str, pool: Pool, context: Any) -> Steps[tuple[int | None, str]]:
        wanted: int | None = None
        reason = ""
        demand = self._demand(context)
        if demand is not None:
            found = yield self._capacity(pool, demand)
            if found is not None and found.rps > 0:
                wanted = math.ceil(demand.rps / found.rps)
                reason = f"{demand.rps:.3g} of {found.rps:.3g} requests/s an engine"
                if not found.eligible:
                    reason += f", which misses {', '.join(found.violated_targets)}"
        ready = _ready(context, component)
        if ready and (wanted is None or wanted <= ready) and (yield from self._is_overloaded(component, pool, context)):
            return ready + 1, "every engine would miss its target with the next request"
        return wanted, reason

    def _capacity(self, pool: Pool, demand: Demand) -> Any:
        return planner.capacity(
            pool.engine,
            role=pool.role,
            isl=demand.isl,
            osl=demand.osl,
            ttft_s=_s(self.ttft_ms) if pool.role != "decode" else None,
            itl_s=_s(self.itl_ms) if pool.role != "prefill" else None,
            kv_hit_rate=demand.kv_hit_rate,
            accept_length=demand.accept_length,
            limits=pool.limits,
            state=pool.state,
        )

    def _demand(self, context: Any) -> Demand | None:
        seen, told = context.observations.traffic, context.predictions
        interval = seen.duration_s or self.interval_s
        requests = told.predicted_num_req if told.HasField("predicted_num_req") else seen.num_req
        isl = told.predicted_isl if told.HasField("predicted_isl") else seen.isl
        osl = told.predicted_osl if told.HasField("predicted_osl") else seen.osl
        hit = told.predicted_kv_hit_rate if told.HasField("predicted_kv_hit_rate") else seen.kv_hit_rate
        accepted = told.predicted_accept_length if told.HasField("predicted_accept_length") else seen.accept_length
        if not (requests > 0 and isl > 0 and osl > 0 and all(map(math.isfinite, (requests, isl, osl, hit, accepted)))):
            return None
        return Demand(
            requests / interval, math.ceil(isl), max(1, math.ceil(osl)), min(max(hit, 0.0), 1.0), max(accepted, 1.0)
        )

    def _is_overloaded(self, component: str, pool: Pool, context: Any) -> Steps[bool]:
        engines = getattr(context.observations.fpm, f"{component}_engines")
        workers = _workers(engines)
        if not workers:
            return False
        traffic = context.observations.traffic
        hit = traffic.kv_hit_rate if math.isfinite(traffic.kv_hit_rate) else 0.0
        after = Scenario(
            kv_hit_rate=min(max(hit, 0.0), 1.0),
            next_prompt_tokens=max(traffic.isl, 0.0) if math.isfinite(traffic.isl) else 0.0,
            next_decode_kv_tokens=_mean_context(workers),
            itl_with_queued_decodes=True,
        )
        group = TickGroup(
            engine=pool.engine, workers=workers, role=pool.role, limits=pool.limits, state=pool.state, scenarios=[after]
        )
        (told,) = yield planner.evaluate_tick([group])
        if told.error is not None:
            raise told.error
        accepted = max(traffic.accept_length, 1.0)
        verdicts = [
            self._misses(outlook.drain_s, outlook.itl_s, accepted)
            for worker in told.workers
            for outlook in worker.outlooks
        ]
        return bool(verdicts) and all(verdicts)

    def _misses(self, drain_s: float | None, itl_s: float | None, accepted: float) -> bool:
        late = drain_s is not None and self.ttft_ms is not None and drain_s * 1000 > self.ttft_ms
        slow = itl_s is not None and self.itl_ms is not None and itl_s / accepted * 1000 > self.itl_ms
        return late or slow

    def handlers(self) -> tuple[Any, ...]:
        """gRPC handlers of the plugin's services, for a server of the client's kind."""
        m = messages
        services = {
            plugin_schema.PROPOSE: {"Propose": (self.propose, m.ProposeStageRequest)},
            plugin_schema.LIFECYCLE: {
                "Bootstrap": (lambda request: m.BootstrapResponse(ok=True), m.BootstrapRequest),
                "Reset": (lambda request: m.ResetResponse(ok=True), m.ResetRequest),
            },
        }
        is_async = isinstance(self._client, AsyncClient)
        return tuple(
            grpc.method_handlers_generic_handler(
                service,
                {
                    name: grpc.unary_unary_rpc_method_handler(
                        _handler(answer, is_async), request.FromString, lambda message: message.SerializeToString()
                    )
                    for name, (answer, request) in methods.items()
                },
            )
            for service, methods in services.items()
        )

    def server(self, address: str = "127.0.0.1:0") -> tuple[Any, int]:
        """A gRPC server of the plugin, not started yet, and its port; with an ``AsyncClient`` an asyncio one."""
        options = [(f"grpc.max_{way}_message_length", MAX_MESSAGE_BYTES) for way in ("receive", "send")]
        if isinstance(self._client, AsyncClient):
            made = grpc.aio.server(options=options)
        else:
            made = grpc.server(ThreadPoolExecutor(4, "propose"), options=options)
        made.add_generic_rpc_handlers(self.handlers())
        return made, made.add_insecure_port(address)


class Registration:
    """Keeps a plugin registered with a planner until closed; registers again where the planner has forgotten it."""

    def __init__(
        self,
        registry: str,
        endpoint: str,
        *,
        plugin_id: str = "perfcast-propose",
        priority: int = 100,
        auth_token: str = "",
        version: str = "1",
        channel: Any = None,
    ) -> None:
        self._channel = channel if channel is not None else grpc.insecure_channel(registry)
        self._request = messages.RegisterRequest(
            plugin_id=plugin_id,
            plugin_type="propose",
            priority=priority,
            endpoint=endpoint,
            version=version,
            needs=NEEDS,
            protocol_version=PROTOCOL,
            auth_token=auth_token,
        )
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def register(self, timeout_s: float = 5.0) -> None:
        """Raises RuntimeError with the planner's reason where it refuses."""
        told = self._call("Register", self._request, messages.RegisterResponse, timeout_s)
        if not told.accepted:
            raise RuntimeError(f"the planner refused the plugin: {told.reject_reason}")

    def start(self) -> None:
        """Register, then send heartbeats from a thread."""
        self.register()
        self._thread = threading.Thread(target=self._beat, name="perfcast-heartbeat", daemon=True)
        self._thread.start()

    def close(self, reason: str = "shutdown") -> None:
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(HEARTBEAT_S)
        request = messages.UnregisterRequest(
            plugin_id=self._request.plugin_id, reason=reason, auth_token=self._request.auth_token
        )
        try:
            self._call("Unregister", request, messages.UnregisterResponse, 2.0)
        except grpc.RpcError as error:
            log.warning("could not unregister: %s", error)
        self._channel.close()

    def _beat(self) -> None:
        request = messages.HeartbeatRequest(plugin_id=self._request.plugin_id, auth_token=self._request.auth_token)
        while not self._stopped.wait(HEARTBEAT_S):
            try:
                if not self._call("Heartbeat", request, messages.HeartbeatResponse, HEARTBEAT_S).ok:
                    self.register()
            except (grpc.RpcError, RuntimeError) as error:
                log.warning("heartbeat failed: %s", error)

    def _call(self, method: str, request: Any, response: Any, timeout_s: float) -> Any:
        path = f"/{plugin_schema.REGISTRY}/{method}"
        stub = self._channel.unary_unary(path, lambda m: m.SerializeToString(), response.FromString)
        return stub(request, timeout=timeout_s)


def _handler(answer: Any, is_async: bool) -> Any:
    async def later(request: Any, context: Any) -> Any:
        told = answer(request)
        return await told if hasattr(told, "__await__") else told

    return later if is_async else lambda request, context: answer(request)


def _workers(engines: Mapping[str, bytes]) -> list[WorkerLoad]:
    """Live engines from records by "worker/rank"; engines with a record that cannot be read are left out."""
    ranks: dict[str, list[RankLoad]] = {}
    broken = set()
    for key, data in engines.items():
        worker, _, number = key.rpartition("/")
        try:
            record = fpm.stamped(unpack(data))
            load = fpm.rank_load(
                {**record, "dp_rank": int(number) if number.isdigit() else fpm.member(record, "dp_rank")}
            )
            ranks.setdefault(worker, []).append(load)
        except (ValueError, TypeError) as error:
            log.warning("left out metrics of %s: %s", key, error)
            broken.add(worker)
    return [WorkerLoad(worker, loads) for worker, loads in ranks.items() if worker not in broken]


def _mean_context(workers: list[WorkerLoad]) -> float:
    loads = [load for worker in workers for load in worker.ranks]
    requests = sum(load.decode_requests for load in loads)
    return sum(load.decode_kv_tokens for load in loads) / requests if requests else 0.0


def _ready(context: Any, component: str) -> int:
    state = context.observations.workers
    ready: int = getattr(state, f"ready_{component}")
    return ready


def _s(ms: float | None) -> float | None:
    return None if ms is None else ms / 1000
