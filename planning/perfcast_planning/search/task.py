"""What a search is asked and what it answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import Literal, Protocol

import numpy as np
from perfcast_engine.answer import F64
from perfcast_engine.config import EngineConfig, ParallelConfig
from perfcast_engine.errors import EngineError, InvalidField
from perfcast_engine.models.spec import ModelSpec
from perfcast_engine.system import SystemSpec

from perfcast_planning.search.grids import MAX_BATCH
from perfcast_planning.search.match import Index, Replica
from perfcast_planning.search.pick import Load, Objective, Pick, Violation, cluster_throughput
from perfcast_planning.search.space import Space
from perfcast_planning.serving.disaggregated import Matching
from perfcast_planning.serving.rows import Rows, concatenated
from perfcast_planning.serving.worker import Worker
from perfcast_planning.serving.workload import DEFAULTS, EngineLimits, KvTransfer, Targets, Workload

Role = Literal["agg", "prefill", "decode"]
AGGREGATED: Literal["agg"] = "agg"
PREFILL: Literal["prefill"] = "prefill"
DECODE: Literal["decode"] = "decode"
DISAGGREGATED, AFD = "disagg", "afd"
MODES: tuple[str, ...] = (AGGREGATED, DISAGGREGATED)  # unless told otherwise
ALL_MODES = (*MODES, AFD)


class Workshop(Protocol):
    """Where a search gets its engines from."""

    def model(self, config: EngineConfig) -> ModelSpec: ...

    def system(self, config: EngineConfig) -> SystemSpec: ...

    def admit(self, config: EngineConfig) -> None:
        """Raises where no mapping of ``config`` can be answered."""
        ...

    def covered_ep(self, config: EngineConfig) -> Sequence[int]:
        """EP sizes wider than a node for which the all-to-all of the configuration's role is measured."""
        ...

    def workers(self, config: EngineConfig, mappings: Sequence[ParallelConfig]) -> Iterable[Candidate]:
        """An engine for each mapping in turn, or why there is none. ``config`` says everything but the mapping."""
        ...


Candidate = Worker | EngineError


@dataclass(frozen=True, kw_only=True)
class SearchTask:
    """One search: an engine without its parallel mapping, a workload, targets, a budget.

    ``backends``: tried side by side (empty: the engine's own). ``decode_engine``: what decode workers run on, where
    that is not ``engine``. ``encode_pool``: images are encoded by workers of their own. ``swept``: look beyond the
    TPOT target, so that the front is whole.
    """

    engine: EngineConfig
    load: Workload
    targets: Targets = field(default_factory=Targets)
    total_gpus: int | None = None
    modes: tuple[str, ...] = MODES
    backends: tuple[str, ...] = ()
    decode_engine: EngineConfig | None = None
    space: Space = field(default_factory=Space)
    prefill_space: Space = field(default_factory=Space)
    decode_space: Space = field(default_factory=Space)
    limits: EngineLimits = DEFAULTS
    chunked_prefill: bool = False
    prefill_max_batch: int = 1
    decode_max_batch: int = MAX_BATCH
    replica: Replica = field(default_factory=Replica)
    matching: Matching = field(default_factory=Matching)
    kv_transfer: KvTransfer = field(default_factory=KvTransfer)
    autoscale: bool = False
    encode_pool: bool = False
    swept: bool = True
    strict_sla: bool = False
    top: int = 5
    match_load: Load | None = None
    objective: Objective | None = None

    def __post_init__(self) -> None:
        for name in ("prefill_max_batch", "decode_max_batch", "top"):
            if not 1 <= getattr(self, name) <= 1 << 16:
                raise InvalidField(name, f"must lie in 1..65536, not {getattr(self, name)!r}", why="range")
        if self.total_gpus is not None and self.total_gpus < 1:
            raise InvalidField("total_gpus", "must be at least 1", why="range")
        if not self.modes or set(self.modes) - set(ALL_MODES):
            raise InvalidField("modes", f"must be some of {', '.join(ALL_MODES)}, not {self.modes!r:.60}", why="choice")
        if self.encode_pool and (self.autoscale or not self.load.images):
            raise InvalidField("encode_pool", "needs images, and pools that are not scaled apart", why="epd")
        if self.decode_engine is not None and self.decode_engine.model != self.engine.model:
            raise InvalidField("decode_engine.model", "prefill and decode must run the same model", why="model")
        if self.engine.nextn != "auto":
            self.limits.check(self.engine.nextn)

    def score(self, rows: Rows) -> F64:
        """What fronts and picks maximise: tokens per second and GPU, of the whole budget where there is one."""
        return cluster_throughput(rows, None if self.match_load is not None else self.total_gpus)

    def over(self, backend: str) -> SearchTask:
        """This task for one backend."""
        decode = self.decode_engine and replace(self.decode_engine, backend=backend)
        return replace(self, engine=replace(self.engine, backend=backend), decode_engine=decode, backends=())


class Status(Enum):
    OK = "ok"  # a row meets every target
    UNMET = "unmet"  # rows fit, none meets the targets
    NO_MEMORY = "no_memory"  # the model fits no mapping
    NO_KV = "no_kv"  # it fits, its KV cache does not
    NO_DATA = "no_data"  # what fits has no measured data
    FAILED = "failed"  # no mapping can be built


@dataclass(frozen=True)
class Experiment:
    """One mode of one backend. ``rows``: what was found, by ``engine`` (agg) or ``prefill_engine``, ``decode_engine``
    (disagg) into ``engines``; ``front``: its Pareto-optimal rows; ``closest``: where no row meets the targets, the one
    that misses them least, and ``missed`` by how much; ``asked``: mappings tried, by role;
    ``refused``: those without an engine, and why."""

    mode: str
    backend: str
    status: Status
    rows: Rows
    engines: tuple[Worker, ...]
    pick: Pick
    front: Index = field(default_factory=lambda: np.zeros(0, np.intp))
    closest: Rows | None = None
    missed: tuple[Violation, ...] = ()
    asked: Mapping[str, Sequence[ParallelConfig]] = field(default_factory=dict)
    refused: tuple[tuple[str, EngineError], ...] = ()
    evaluated: int = 0

    @property
    def name(self) -> str:
        return f"{self.mode}_{self.backend}"

    @property
    def eligible(self) -> bool:
        return self.status is Status.OK and self.pick.eligible


@dataclass(frozen=True)
class SearchResult:
    """The experiments of a search; ``best`` is the one with the best pick, None where none has one."""

    profile: str
    experiments: tuple[Experiment, ...]

    @property
    def best(self) -> Experiment | None:
        """Eligible picks first, then the higher score."""
        picked = [e for e in self.experiments if len(e.pick.rows)]
        return max(picked, key=lambda e: (e.eligible, e.pick.score), default=None)

    @property
    def eligible(self) -> bool:
        return self.best is not None and self.best.eligible

    @property
    def closest(self) -> Experiment | None:
        """Where nothing is eligible, the experiment whose closest row misses its targets least."""
        near = [e for e in self.experiments if e.missed]
        return min(near, key=lambda e: max(v.excess for v in e.missed), default=None)


@dataclass(frozen=True)
class Progress:
    """How far a search is: engines priced of all, in which experiment, and what was found in it so far."""

    mode: str
    backend: str
    done: int
    total: int
    parts: tuple[Rows, ...]
    rank: Callable[[Rows], Index]

    @cached_property
    def rows(self) -> Rows:
        return concatenated(self.parts)

    @cached_property
    def front(self) -> Index:
        return self.rank(self.rows)
