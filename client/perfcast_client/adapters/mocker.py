"""Step times for mock engines: the two-method session and the trait of timing providers (spec/07 section 3)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from perfcast_client import calls
from perfcast_client.adapters.asking import Adapter, C, Timing, as_runtime_error, asking
from perfcast_client.adapters.records import engine_of, session_modes
from perfcast_client.aio import AsyncClient
from perfcast_client.config import EngineConfig
from perfcast_client.errors import PerfcastError
from perfcast_client.record import EngineLike
from perfcast_client.steps import DecodeTrajectory, Prefill, Step
from perfcast_client.turns import Steps

PHASES = {"both": ("prefill", "decode"), "prefill": ("prefill",), "decode": ("decode",)}
ACCEPT_RATES = (0.85, 0.3, 0.0, 0.0, 0.0)


class _Session(Adapter[C]):
    """An engine that answers its phases; RuntimeError with the reason's code where it does not."""

    def __init__(self, client: C, config: EngineConfig, surface: Timing | None) -> None:
        super().__init__(client, surface)
        self.config = config
        self._engine: EngineLike | None = None
        if not isinstance(client, AsyncClient):
            self._run(self._ready())

    def _ready(self) -> Steps[EngineLike]:
        if self._engine is None:
            try:
                told = yield calls.check_support(self.config)
                wanted = PHASES[self.config.role]
                for error in (told.error, *(phase.error for phase in told.phases if phase.phase in wanted)):
                    if error is not None:
                        raise error
                self._engine = yield calls.resolve(self.config)
            except PerfcastError as error:
                raise as_runtime_error(error) from None
        return self._engine

    def _checked(self, step: Step) -> Steps[float]:
        engine = yield from self._ready()
        try:
            ms = yield from self._time(engine, step)
        except PerfcastError as error:
            raise as_runtime_error(error) from None
        return _legal(ms)


def _legal(ms: float) -> float:
    if not (math.isfinite(ms) and ms >= 0):
        raise RuntimeError(f"a step cannot take {ms} ms")
    return ms


def _whole(name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__") or value.__index__() < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, not {value!r}")
    return int(value.__index__())


class MockerSession(_Session[C]):
    """Stands in for the sessions of the mocker: ms of one pass of uniform requests.

    ``surface`` (a LocalSurface or a step stream) times the steps in place of a call for each. With an ``AsyncClient``
    the methods are awaited, and faults of the configuration are told by the first of them.
    """

    def __init__(
        self,
        client: C,
        backend_name: str,
        system: str,
        model_path: str,
        tp_size: int,
        backend_version: str | None = None,
        moe_tp_size: int | None = None,
        moe_ep_size: int | None = None,
        attention_dp_size: int | None = None,
        gemm_dtype: str | None = None,
        moe_dtype: str | None = None,
        fmha_dtype: str | None = None,
        kv_cache_dtype: str | None = None,
        comm_dtype: str | None = None,
        nextn: int | None = None,
        nextn_accept_rates: Sequence[float] | str | None = None,
        database_mode: str | None = None,
        *,
        profile: str = "corrected",
        surface: Timing | None = None,
    ) -> None:
        if nextn is not None and not 0 <= nextn <= 5:
            raise ValueError(f"nextn must lie in [0, 5], not {nextn}")
        self.nextn_accept_rates = accept_rates(nextn_accept_rates)
        modes = session_modes(gemm=gemm_dtype, moe=moe_dtype, fmha=fmha_dtype, kv_cache=kv_cache_dtype, comm=comm_dtype)
        config = EngineConfig(
            model=model_path,
            system=system,
            backend=backend_name,
            version=backend_version or "current",
            tp=tp_size,
            attn_dp=attention_dp_size or 1,
            moe_tp=moe_tp_size,
            moe_ep=moe_ep_size,
            nextn=nextn or 0,
            database_mode=database_mode or "silicon",
            profile=profile,
            **modes,
        )
        super().__init__(client, config, surface)

    @classmethod
    def from_config(
        cls,
        client: C,
        config: Mapping[str, Any],
        *,
        worker_type: str | None = None,
        profile: str = "corrected",
        surface: Timing | None = None,
    ) -> MockerSession[C]:
        """From one configuration mapping. ``worker_type``: what the caller needs it to be."""
        if worker_type is not None and config.get("worker_type") != worker_type:
            raise ValueError("worker_type of the configuration is not the one asked for")
        session = cls.__new__(cls)
        session.nextn_accept_rates = list(ACCEPT_RATES)
        _Session.__init__(session, client, engine_of(config, profile=profile), surface)
        return session

    @asking
    def predict_prefill(self, batch_size: int, effective_isl: int, prefix: int) -> Steps[float]:
        """One prefill pass of requests with ``effective_isl`` new and ``prefix`` cached tokens each, in ms. A prompt
        that is cached whole takes no time."""
        batch, fresh = _whole("batch_size", batch_size, 1), _whole("effective_isl", effective_isl, 0)
        cached = _whole("prefix", prefix, 0)
        if fresh == 0 and cached > 0:
            return 0.0
        _whole("effective_isl", fresh, 1)
        return (yield from self._checked(Prefill(batch, fresh + cached, cached)))

    @asking
    def predict_decode(self, batch_size: int, isl: int, osl: int) -> Steps[float]:
        """All osl - 1 decode steps from a KV length of isl + 1 on, in ms; one step with ``osl`` 2."""
        batch, length, tokens = _whole("batch_size", batch_size, 1), _whole("isl", isl, 0), _whole("osl", osl, 1)
        if tokens == 1:
            return 0.0
        if length == 0:
            raise ValueError("isl must be at least 1")
        return (yield from self._checked(DecodeTrajectory(batch, length, tokens)))


def accept_rates(given: Sequence[float] | str | None) -> list[float]:
    """Five acceptance rates in [0, 1], padded with zeros or cut; also from comma-separated text."""
    if isinstance(given, str):
        try:
            given = [float(part) for part in given.split(",") if part.strip()]
        except ValueError:
            raise ValueError(f"accept rates must be numbers, not {given!r}") from None
    rates = list(given or ACCEPT_RATES)
    if not all(0 <= rate <= 1 for rate in rates):
        raise ValueError(f"accept rates must lie in [0, 1], not {rates}")
    return (rates + [0.0] * len(ACCEPT_RATES))[: len(ACCEPT_RATES)]


@dataclass(slots=True)
class Evidence:
    """What one operator took in all passes of a phase. energy None is unknown, not free."""

    name: str
    latency_ms: float
    covered_latency_ms: float
    source: str
    energy_wms: float | None = None


class TimingModel(_Session[C]):
    """Stands in for an external timing provider: ms of the scheduler's passes, given as means.

    ``evidence`` asks for operators with every pass and adds them up; it leaves ``surface`` unused.
    """

    def __init__(
        self,
        client: C,
        config: Mapping[str, Any] | EngineConfig,
        *,
        profile: str = "corrected",
        surface: Timing | None = None,
        evidence: bool = False,
    ) -> None:
        own = config if isinstance(config, EngineConfig) else engine_of(config, profile=profile)
        self._evidence: dict[str, dict[str, Evidence]] | None = None
        if evidence:
            self.reset_evidence()
        super().__init__(client, own, None if evidence else surface)

    @asking
    def predict_prefill_ms(self, batch_size: int, mean_isl: int, mean_prefix: int) -> Steps[float]:
        """A pass over prompts of ``mean_isl`` tokens, ``mean_prefix`` of them cached. Nothing to compute takes 0 ms
        and is not asked."""
        batch, isl = _whole("batch_size", batch_size, 0), _whole("mean_isl", mean_isl, 0)
        prefix = _whole("mean_prefix", mean_prefix, 0)
        if batch == 0 or isl <= prefix:
            return 0.0
        return (yield from self._pass("prefill", Prefill(batch, isl, prefix)))

    @asking
    def predict_decode_ms(
        self, batch_size: int, active_kv_tokens: int, mean_context_length: int, total_kv_tokens: int
    ) -> Steps[float]:
        """One decode step of requests at ``mean_context_length``. ``active_kv_tokens``: their logical sum, which may
        exceed the pool of ``total_kv_tokens`` tokens (tokens, not blocks)."""
        batch, length = _whole("batch_size", batch_size, 0), _whole("mean_context_length", mean_context_length, 0)
        _whole("active_kv_tokens", active_kv_tokens, 0)
        _whole("total_kv_tokens", total_kv_tokens, 1)
        if batch == 0:
            return 0.0
        return (yield from self._pass("decode", DecodeTrajectory(batch, max(length, 1), 2)))

    def evidence_summary(self) -> dict[str, list[dict[str, Any]]] | None:
        """Operators of all passes since the last reset, by phase; None unless asked for at construction."""
        if self._evidence is None:
            return None
        return {phase: [asdict(row) for row in rows.values()] for phase, rows in self._evidence.items()}

    def reset_evidence(self) -> None:
        self._evidence = {"prefill": {}, "decode": {}}

    def _pass(self, phase: str, step: Step) -> Steps[float]:
        if self._evidence is None:
            return (yield from self._checked(step))
        engine = yield from self._ready()
        try:
            told = yield calls.predict(engine, step, True)
        except PerfcastError as error:
            raise as_runtime_error(error) from None
        rows = self._evidence[phase]
        for op in told.operators:
            row = rows.setdefault(op.name, Evidence(op.name, 0.0, 0.0, op.source))
            row.latency_ms += op.latency_ms
            row.covered_latency_ms += op.latency_ms if op.source == "silicon" else 0.0
            row.source = op.source if row.source == op.source else "mixed"
        return _legal(told.latency_ms)
