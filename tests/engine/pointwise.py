"""An array of points must be answered as each of them alone."""

import numpy as np
from perfcast_engine.answer import Points
from perfcast_engine.errors import EngineError


def alone(op, db, at):
    """Each point asked on its own: (ms, source, tier), NaN where it misses."""
    rows = []
    for i in range(len(at)):
        try:
            answer = op.evaluate(db, at.take(np.array([i])))
            rows.append((answer.ms[0], answer.source[0], answer.tier[0]))
        except EngineError:
            rows.append((np.nan, 0, 0))
    return np.array(rows).T


def assert_pointwise(op, db, at: Points):
    together = op.evaluate(db, at)
    ms, source, tier = alone(op, db, at)
    np.testing.assert_allclose(together.ms, ms, rtol=1e-13)
    known = ~np.isnan(ms)
    np.testing.assert_array_equal(together.source[known], source[known])
    np.testing.assert_array_equal(together.tier[known], tier[known])
    np.testing.assert_array_equal(together.missing(), ~known)
