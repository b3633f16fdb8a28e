"""The engines of a search, from measured tables (spec/06 10.1, 10.3)."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from perfcast_engine import quant
from perfcast_engine.config import EngineConfig, ParallelConfig
from perfcast_engine.errors import EngineError, InvalidField
from perfcast_engine.models.build import ModelPlan
from perfcast_engine.models.families import is_moe, runs_large_ep
from perfcast_engine.models.quantization import context_tables
from perfcast_engine.models.resolve import measured_fmha, modes_and_comm
from perfcast_engine.models.rules import complete
from perfcast_engine.models.spec import ModelSpec
from perfcast_engine.ops.gemm import measured_as
from perfcast_engine.predictor import Predictor
from perfcast_engine.system import SystemSpec
from perfcast_engine.tables.database import TRANSFER_PRESETS, Database, Mode

from perfcast_planning.search.shared import Shared
from perfcast_planning.search.space import EP_SIZES
from perfcast_planning.search.task import Candidate
from perfcast_planning.serving.worker import worker_of


@dataclass(frozen=True, slots=True)
class TableWorkshop:
    """Engines of a predictor, for one search."""

    predictor: Predictor
    _shared: Shared = field(default_factory=Shared, repr=False)
    _plans: dict[Hashable, ModelPlan] = field(default_factory=dict, repr=False)

    def model(self, config: EngineConfig) -> ModelSpec:
        return self.predictor.registry.spec(config)

    def system(self, config: EngineConfig) -> SystemSpec:
        return self.predictor.catalog.system(config.system)

    def database(self, config: EngineConfig) -> Database:
        policy = TRANSFER_PRESETS[config.transfer_policy]
        return self.predictor.catalog.database(
            config.system, config.backend, config.version, config.database_mode, policy, config.allow_unlisted_version
        )

    def admit(self, config: EngineConfig) -> None:
        """Raises where no mapping can be answered: a mode without a rate on this GPU, or without any measurement."""
        spec, db = self.model(config), self.database(config)
        one = complete(spec, ParallelConfig(moe_tp=1, moe_ep=1))
        modes, _ = modes_and_comm(replace(config, parallel=one), spec, one, db)
        db.system.rate(quant.mode(quant.GEMM, modes.gemm, "quant.gemm"))
        if db.mode is not Mode.SILICON:
            return
        asked = [("gemm", measured_as(modes.gemm), _measured(db, "gemm", "gemm_dtype"))]
        if is_moe(spec) and spec.moe.experts:
            experts = _measured(db, "moe", "moe_dtype") | _measured(db, "moe_expert_compute", "moe_dtype")
            asked.append(("moe", modes.moe, experts))
        if config.role != "decode":
            (table,) = context_tables(spec, db.backend, search=False)
            asked.append(("fmha", modes.fmha, measured_fmha(db, table, None)))
        for name, mode, known in asked:
            if known and mode not in known:
                where = f"{db.system.name} with {db.backend} {db.version}"
                message = f"{spec.id} runs in {mode}, which was not measured on {where}; measured: "
                raise InvalidField(f"quant.{name}", message + ", ".join(sorted(known)), why="no_data", mode=mode)

    def covered_ep(self, config: EngineConfig) -> Sequence[int]:
        spec, db = self.model(config), self.database(config)
        if not runs_large_ep(spec.family):
            return ()
        covered = []
        for ep in (ep for ep in EP_SIZES if ep > db.system.gpus_per_node):
            wide = ParallelConfig(attn_dp=ep, moe_tp=1, moe_ep=ep)
            try:
                if modes_and_comm(replace(config, parallel=wide), spec, wide, db)[1]:
                    covered.append(ep)
            except EngineError:
                continue  # not measured at this size
        return covered

    def workers(self, config: EngineConfig, mappings: Sequence[ParallelConfig]) -> Iterator[Candidate]:
        for mapping in mappings:
            try:
                at = replace(config, parallel=mapping)
                yield worker_of(self.predictor.engine(at, plans=self._plans, phase_of=self._shared.phase))
            except EngineError as error:
                yield error


def _measured(db: Database, name: str, column: str) -> frozenset[str]:
    table = db.find(name)
    return frozenset() if table is None else frozenset(table.vocab[column])
