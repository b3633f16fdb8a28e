"""What measured data cover: the operators of an engine, and the models of a system."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from perfcast.v1 import catalog_pb2

from perfcast_client.config import enum_word
from perfcast_client.errors import PerfcastError
from perfcast_client.reading import Result
from perfcast_client.results import SHARES, EngineStamp


def _mode(number: int) -> str:
    """The word of a mode; empty where none works."""
    return enum_word("database_mode", number) if number else ""


@dataclass(frozen=True, slots=True)
class OperatorCoverage(Result):
    """What answers for one operator over the probed points of a phase.

    standing: measured, computed (needs no table), estimated, roofline or missing; works_in: the first mode of silicon,
    hybrid and sol that answers every point, "" where none does; shares: of the points by origin in mode silicon.
    """

    renamed: ClassVar[Mapping[str, str]] = {"name": "operator_name", "error": "first_error"}

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
        shares = {name: getattr(m, name) for name in (*SHARES, "missing_share")}
        return cls.read(m, works_in=_mode(m.works_in), shares=shares)


@dataclass(frozen=True, slots=True)
class Coverage(Result):
    """The operators of one engine, prefill first; ``works_in`` is the first mode that answers all of them."""

    engine: EngineStamp
    parallel: Mapping[str, int]
    works_in: str
    operators: tuple[OperatorCoverage, ...]

    @classmethod
    def of(cls, m: catalog_pb2.CoverageResponse) -> Coverage:
        return cls.read(m, works_in=_mode(m.works_in))


@dataclass(frozen=True, slots=True)
class ModelSupport(Result):
    """Whether a model is answered on a system, under the smallest mapping that holds it.

    works_in: silicon, hybrid or "" for neither; error: why not silicon; unmeasured: operators, as phase/name.
    """

    renamed: ClassVar[Mapping[str, str]] = {"model": "model_id", "unmeasured": "unmeasured_operators"}

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
        return cls.read(m, works_in=_mode(m.works_in))
