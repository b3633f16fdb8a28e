"""What measured data cover: the operators of an engine, and the models of a system."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from perfcast.v1 import catalog_pb2, common_pb2

from perfcast_client.config import enum_word
from perfcast_client.errors import PerfcastError
from perfcast_client.results import SHARES, EngineStamp, Result, error_of, word


def _mode(number: int) -> str:
    """The word of a mode; empty where none works."""
    return enum_word("database_mode", number) if number else ""


def _parallel(m: common_pb2.ParallelConfig) -> dict[str, int]:
    return {item.name: value for item, value in m.ListFields()}


@dataclass(frozen=True, slots=True)
class OperatorCoverage(Result):
    """What answers for one operator over the probed points of a phase.

    standing: measured, computed (needs no table), estimated, roofline or missing; works_in: the first mode of silicon,
    hybrid and sol that answers every point, "" where none does; shares: of the points by origin in mode silicon.
    """

    phase: str
    name: str
    kind: str
    standing: str
    works_in: str
    tier: str
    table: str
    key: str
    nearest: str
    shares: Mapping[str, float]
    error: PerfcastError | None

    @classmethod
    def of(cls, m: catalog_pb2.OperatorCoverage) -> OperatorCoverage:
        return cls(
            word(catalog_pb2.Phase, m.phase, "PHASE_"),
            m.operator_name,
            m.kind,
            word(catalog_pb2.Standing, m.standing, "STANDING_"),
            _mode(m.works_in),
            word(common_pb2.Tier, m.tier, "TIER_"),
            m.table,
            m.key,
            m.nearest,
            {name: getattr(m, name) for name in (*SHARES, "missing_share")},
            error_of(m, "first_error"),
        )


@dataclass(frozen=True, slots=True)
class Coverage(Result):
    """The operators of one engine, prefill first; ``works_in`` is the first mode that answers all of them."""

    engine: EngineStamp
    parallel: Mapping[str, int]
    works_in: str
    operators: tuple[OperatorCoverage, ...]

    @classmethod
    def of(cls, m: catalog_pb2.CoverageResponse) -> Coverage:
        operators = tuple(map(OperatorCoverage.of, m.operators))
        return cls(EngineStamp.of(m.engine), _parallel(m.parallel), _mode(m.works_in), operators)


@dataclass(frozen=True, slots=True)
class ModelSupport(Result):
    """Whether a model is answered on a system, under the smallest mapping that holds it.

    works_in: silicon, hybrid or "" for neither; error: why not silicon; unmeasured: operators, as phase/name.
    """

    model: str
    system: str
    backend: str
    version: str
    parallel: Mapping[str, int]
    works_in: str
    error: PerfcastError | None
    unmeasured: tuple[str, ...]

    @property
    def verdict(self) -> str:
        """PASS, HYBRID or FAIL."""
        return {"silicon": "PASS", "hybrid": "HYBRID"}.get(self.works_in, "FAIL")

    def to_dict(self) -> dict[str, Any]:
        return {"verdict": self.verdict, **Result.to_dict(self)}

    @classmethod
    def of(cls, m: catalog_pb2.ModelSupport) -> ModelSupport:
        return cls(
            m.model_id,
            m.system,
            m.backend,
            m.version,
            _parallel(m.parallel),
            _mode(m.works_in),
            error_of(m),
            tuple(m.unmeasured_operators),
        )
