"""What planner questions are asked with and what they answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from perfcast_client.errors import PerfcastError
from perfcast_client.reading import Result
from perfcast_client.record import EngineLike
from perfcast_client.results import F64, EngineStamp


@dataclass(frozen=True, slots=True)
class RankPass(Result):
    """What one attention-DP rank runs in one iteration."""

    prefill_requests: int = 0
    prefill_tokens: int = 0
    prefill_kv_tokens: int = 0
    decode_requests: int = 0
    decode_kv_tokens: int = 0
    wall_time_s: float = 0.0
    dp_rank: int = 0


@dataclass(frozen=True, slots=True)
class RankLoad:
    """What waits in one attention-DP rank and what it runs now."""

    queued_prefill_requests: int = 0
    queued_prefill_tokens: int = 0
    queued_decode_requests: int = 0
    queued_decode_kv_tokens: int = 0
    prefill_requests: int = 0
    prefill_tokens: int = 0
    prefill_kv_tokens: int = 0
    decode_requests: int = 0
    decode_kv_tokens: int = 0
    dp_rank: int = 0


Iteration = Sequence[RankPass]


@dataclass(frozen=True, slots=True)
class Limits:
    """What one engine schedules at most; the planner's defaults. ``attention_dp`` is needed for a regression only."""

    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 512
    max_kv_tokens: int = 2_000_000
    attention_dp: int = 0


@dataclass(frozen=True, slots=True)
class Scenario:
    """What to change in the work of an engine before asking (see the contract). As it stands: nothing."""

    queue_scale: float = 1.0
    decode_scale: float = 1.0
    kv_hit_rate: float = 0.0
    next_prompt_tokens: float = 0.0
    next_decode_kv_tokens: float = 0.0
    drain_beside_queued_decodes: bool = False
    itl_with_queued_decodes: bool = False
    itl_with_queued_prompts: bool = False
    itl_with_usual_prefill_only: bool = False


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """One live engine with all its ranks."""

    worker_id: str
    ranks: Sequence[RankLoad]
    usual_prefill_tokens: float = 0.0
    usual_prefill_requests: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TickGroup:
    """Live engines of one configuration; ``engine`` None is a regression."""

    engine: EngineLike | None
    workers: Sequence[WorkerLoad]
    role: str = ""
    limits: Limits = field(default_factory=Limits)
    scenarios: Sequence[Scenario] = ()
    state: str = ""


@dataclass(frozen=True, slots=True)
class Estimates(Result):
    """latency_ms: (N,), NaN where a regression has observed too little. ``state_version`` 0: nothing learned yet."""

    latency_ms: F64
    state_version: int
    engine: EngineStamp | None


@dataclass(frozen=True, slots=True)
class Duration(Result):
    """seconds: None where the role of the engine does no such work."""

    seconds: float | None
    state_version: int
    engine: EngineStamp | None


@dataclass(frozen=True, slots=True)
class Capacity(Result):
    """What one engine sustains. Values that the role does not produce are None; ``candidates``: columns, if asked."""

    batch_total: int
    rps: float
    ttft_s: float | None
    itl_s: float | None
    e2e_s: float | None
    eligible: bool
    violated_targets: tuple[str, ...]
    corrections_held_back: bool
    state_version: int
    engine: EngineStamp | None
    candidates: Mapping[str, F64] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outlook(Result):
    drain_s: float | None
    itl_s: float | None
    error: PerfcastError | None = None


@dataclass(frozen=True, slots=True)
class WorkerOutlook(Result):
    """One outlook per scenario; none where ``error`` says why the ranks were refused."""

    worker_id: str
    outlooks: tuple[Outlook, ...]
    error: PerfcastError | None = None


@dataclass(frozen=True, slots=True)
class TickAnswer(Result):
    workers: tuple[WorkerOutlook, ...]
    state_version: int
    engine: EngineStamp | None
    error: PerfcastError | None = None


@dataclass(frozen=True, slots=True)
class BootstrapPoint(Result):
    """One iteration of the sweep: "prefill" or "decode", all ranks with the time that it takes."""

    renamed: ClassVar[Mapping[str, str]] = {"point_type": "type"}

    point_type: str
    ranks: tuple[RankPass, ...]


@dataclass(frozen=True, slots=True)
class Bootstrap(Result):
    points: tuple[BootstrapPoint, ...]
    engine: EngineStamp
    attention_dp: int
    gpus_total: int
    max_kv_tokens_total: int
    largest_batch_per_rank: int | None


@dataclass(frozen=True, slots=True)
class FitQuality(Result):
    r_squared: float
    worst_error_ms: float
    worst_relative_error: float
    samples: int


@dataclass(frozen=True, slots=True)
class LatencyLaw(Result):
    """ITL = alpha + beta * batch, TTFT = gamma + delta * input tokens * batch, in ms, inside of ``box``."""

    alpha_ms: float
    beta_ms_per_request: float
    gamma_ms: float
    delta_ms_per_token: float
    itl_fit: FitQuality
    ttft_fit: FitQuality
    box: Mapping[str, int]
    engine: EngineStamp
