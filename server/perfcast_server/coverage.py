"""What the engine covers, as messages."""

from __future__ import annotations

from typing import Any

from perfcast.v1 import catalog_pb2
from perfcast_engine.coverage import OperatorCoverage, Standing, coverage
from perfcast_engine.predictor import Engine
from perfcast_planning.support import Cell

from perfcast_server import wire
from perfcast_server.errors import refusal

PHASES = {
    "prefill": catalog_pb2.PHASE_PREFILL,
    "decode": catalog_pb2.PHASE_DECODE,
    "mixed": catalog_pb2.PHASE_MIXED,
}
STANDINGS = (None, *Standing)  # in the order of the enum's values


def coverage_message(engine: Engine) -> catalog_pb2.CoverageResponse:
    """What ``engine`` is answered from; asks every operator."""
    covered = coverage(engine)
    return catalog_pb2.CoverageResponse(
        engine=wire.stamp(engine),
        operators=map(_operator, covered.operators),
        works_in=wire.mode_number(covered.works_in),
        parallel=wire.parallel_message(engine.parallel),
    )


def _operator(item: OperatorCoverage) -> catalog_pb2.OperatorCoverage:
    phase: Any = PHASES[item.phase]
    standing: Any = STANDINGS.index(item.standing)
    return catalog_pb2.OperatorCoverage(
        phase=phase,
        operator_name=item.name,
        **dict(zip(wire.SHARES, item.shares, strict=True)),
        missing_share=item.missing,
        first_error=None if item.error is None else refusal(item.error).detail(),
        kind=item.kind,
        standing=standing,
        works_in=wire.mode_number(item.works_in),
        tier=wire.tier_number(item.tier),
        table=item.table,
        key=item.key,
        nearest=item.nearest,
    )


def support_message(cell: Cell) -> catalog_pb2.ModelSupport:
    return catalog_pb2.ModelSupport(
        model_id=cell.model,
        system=cell.system,
        backend=cell.backend,
        version=cell.version,
        parallel=None if cell.parallel is None else wire.parallel_message(cell.parallel),
        works_in=wire.mode_number(cell.works_in),
        error=None if cell.error is None else refusal(cell.error).detail(),
        unmeasured_operators=cell.operators,
    )
