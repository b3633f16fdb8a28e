"""From an engine to the surface that can leave its process (DESIGN section 3, idea 4)."""

from __future__ import annotations

import numpy as np
from perfcast_surface.surface import Counts, PhaseSurface, StepSurface
from perfcast_surface.terms import Term

from perfcast_engine.errors import EngineError, UnsupportedCombination
from perfcast_engine.ops.base import Op
from perfcast_engine.phase import Phase
from perfcast_engine.step import StepModel
from perfcast_engine.token_table import CountTable

DEFAULT_PASS_TOKENS = 1 << 15
MAX_PASS_TOKENS = 1 << 18
REQUESTS = 1 << 12  # rows of the tables over requests


def compile_surface(steps: StepModel, max_pass_tokens: int = DEFAULT_PASS_TOKENS) -> StepSurface:
    """The surface of ``steps`` for passes of up to ``max_pass_tokens`` tokens.

    Raises UnsupportedCombination where an operator that reads the sequence has no form outside of this process.
    """
    size = min(max(max_pass_tokens, 1), MAX_PASS_TOKENS)
    return StepSurface(
        _phase(steps.context_phase, size), _phase(steps.generation_phase, min(size, REQUESTS)), steps.rules
    )


def _phase(phase: Phase, tokens: int) -> PhaseSurface:
    return PhaseSurface(
        _counted(phase.tokens, tokens),
        _counted(phase.logits, REQUESTS),
        _counted(phase.requests, REQUESTS),
        tuple(term for op in phase.attention for term in _terms(op, phase)),
        tuple(term for op in phase.others for term in _terms(op, phase)),
    )


def _counted(table: CountTable, last: int) -> Counts | None:
    """Sums at 0 to ``last``; None where no operator depends on the count."""
    return Counts.of(table(np.arange(last + 1, dtype=np.float64)).ms) if table.ops else None


def _terms(op: Op, phase: Phase) -> tuple[Term, ...]:
    try:
        terms = op.terms(phase.db)
    except EngineError:
        terms = None
    if terms is None:
        raise UnsupportedCombination(
            "engine",
            f"{op.name} has no surface on {phase.db.system.name} with {phase.db.backend} in mode {phase.db.mode}; "
            "ask PredictSteps",
            why="surface",
            op=op.name,
        )
    return terms
