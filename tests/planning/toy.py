"""An analytic engine: operators with closed-form latencies, so that serving and search run without tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from perfcast_engine.answer import Answer, Points, Source
from perfcast_engine.backends import BACKENDS
from perfcast_engine.config import EngineConfig, ParallelConfig
from perfcast_engine.errors import EngineError, PerfDataMissing, UnsupportedCombination
from perfcast_engine.memory import MemoryModel
from perfcast_engine.models.kv_cache import KvCurve, Piece
from perfcast_engine.models.spec import ModelSpec
from perfcast_engine.ops.base import Op, Reads, Role
from perfcast_engine.profiles import profile_named
from perfcast_engine.step import StepModel
from perfcast_engine.system import SystemSpec
from perfcast_engine.tables.database import Database
from perfcast_planning.serving.worker import Worker

LAYERS, KV_BYTES, WEIGHT_BYTES = 16, 16384.0, 16e9
EVERY = 1e18  # tokens
NCCL_BYTES = {1: 0.0, 2: 3e8, 4: 4e8, 8: 4e8}
SYSTEM = SystemSpec(
    "toy", 4e12, {"bfloat16": 1e15}, 8, 4e11, 5e10, mem_capacity=80e9, nccl_mem=NCCL_BYTES, other_mem=3e9
)


@dataclass(frozen=True, kw_only=True)
class Dense(Op):
    """base + per_token * x ms, but half of it between the counts of ``dip``; no data beyond ``known`` tokens."""

    base: float
    per_token: float
    known: float = EVERY
    dip: tuple[float, float] = (np.inf, np.inf)

    def price(self, db: Database, at: Points) -> Answer:
        ms = np.where(at.x > self.known, np.nan, self.base + self.per_token * at.x)
        ms = np.where((at.x > self.dip[0]) & (at.x < self.dip[1]), ms / 2, ms)
        return Answer.of(ms, Source.SILICON, miss=PerfDataMissing("no toy data", op=self.name))


@dataclass(frozen=True, kw_only=True)
class Attention(Op):
    """per_pair * batch * new tokens * context."""

    per_pair: float
    decode: bool
    role: Role = Role.ATTENTION
    reads = Reads.SEQUENCE

    def price(self, db: Database, at: Points) -> Answer:
        if self.decode:
            return Answer.of(self.per_pair * at.batch * at.s, Source.SILICON)
        return Answer.of(self.per_pair * at.batch * at.s * (at.s / 2 + at.prefix) * at.imbalance, Source.SILICON)


def worker(
    backend: str = "trtllm",
    profile: str = "reference",
    *,
    nextn: int = 0,
    capacity: float = 80e9,
    known: float = EVERY,
    dip: tuple[float, float] = (np.inf, np.inf),
    version: str = "1.0",
    **parallel: int,
) -> Worker:
    """A toy engine of ``parallel`` widths; twice the tensor-parallel width makes it 1.8 times as fast."""
    mapping = ParallelConfig(**{"moe_tp": 1, "moe_ep": 1, **parallel})
    speed = 1.8 ** np.log2(mapping.tp * mapping.cp)
    system = SystemSpec(**{**{f: getattr(SYSTEM, f) for f in SYSTEM.__slots__}, "mem_capacity": capacity})
    db = Database(system, backend, version, lambda name, shared: None)
    tokens = Dense(name="gemm", base=2.0 / speed, per_token=0.01 / speed, known=known, dip=dip)
    logits = Dense(name="logits_gemm", base=0.05, per_token=0.002 / speed, role=Role.LOGITS)
    step = StepModel(
        (tokens, logits, Attention(name="context_attention", per_pair=1e-6 / speed, decode=False)),
        (tokens, logits, Attention(name="generation_attention", per_pair=1e-5 / speed, decode=True)),
        db,
        nextn,
        profile_named(profile),
    )
    memory = MemoryModel(
        system=system,
        backend=BACKENDS[backend],
        version=version,
        spec=SPEC,
        parallel=mapping,
        nextn=nextn,
        weight_bytes=WEIGHT_BYTES / mapping.tp,
        kv=KvCurve(0.0, (Piece(KV_BYTES * LAYERS / min(mapping.tp, 8)),)),
    )
    return Worker(step=step, memory=memory, parallel=mapping, layers=LAYERS, profile=profile_named(profile))


SPEC = ModelSpec(
    id="toy", family="LLAMA", arch="LlamaForCausalLM", layers=LAYERS, heads=32, kv_heads=8, head_dim=128, hidden=4096,
    inter=16384, vocab=32000, ctx=131072,
)  # fmt: skip


@dataclass(frozen=True)
class ToyShop:
    """A search's engines; tp = 3 is refused."""

    options: Any = None

    def model(self, config: EngineConfig) -> ModelSpec:
        return SPEC

    def system(self, config: EngineConfig) -> SystemSpec:
        return SYSTEM

    def admit(self, config: EngineConfig) -> None:
        if config.backend == "vllm" and (self.options or {}).get("known") == 0:
            raise UnsupportedCombination("backend", "not measured")

    def covered_ep(self, config: EngineConfig) -> Sequence[int]:
        return ()

    def workers(self, config: EngineConfig, mappings: Sequence[ParallelConfig]) -> Iterator[Worker | EngineError]:
        return (self._worker(config, mapping) for mapping in mappings)

    def _worker(self, config: EngineConfig, mapping: ParallelConfig) -> Worker | EngineError:
        if mapping.tp == 3 or (mapping.cp > 1 and mapping.tp > 1):
            return UnsupportedCombination("tp", "32 heads do not divide by 3")
        widths = {"tp": mapping.tp, "pp": mapping.pp, "cp": mapping.cp}
        return worker(config.backend, config.profile, nextn=int(config.nextn), **widths, **(self.options or {}))
