"""Drop-in stand-ins for what planners and mock engines of the ecosystem use, answered by a server (spec/07 section 11).

Each has the methods, units and exception classes of what it replaces. With a ``Client`` they run at once; with an
``AsyncClient`` every method, and every constructor that asks the server, is awaited.
"""

from perfcast_client.adapters.asking import PerfDataNotAvailable
from perfcast_client.adapters.bootstrap import benchmark, bootstrap_fpms
from perfcast_client.adapters.engine_queries import (
    EngineCapacity,
    EngineCapacityRequest,
    EnginePerfLimits,
    EngineQueries,
    OptimizationTarget,
)
from perfcast_client.adapters.estimator import PerfEstimator
from perfcast_client.adapters.forward_pass import ForwardPassPerfModel
from perfcast_client.adapters.mocker import MockerSession, TimingModel
from perfcast_client.adapters.planner_model import PlannerEngineCapacity, PlannerPerfModel
from perfcast_client.adapters.propose import Pool, ProposePlugin, Registration

__all__ = [
    "EngineCapacity",
    "EngineCapacityRequest",
    "EnginePerfLimits",
    "EngineQueries",
    "ForwardPassPerfModel",
    "MockerSession",
    "OptimizationTarget",
    "PerfDataNotAvailable",
    "PerfEstimator",
    "PlannerEngineCapacity",
    "PlannerPerfModel",
    "Pool",
    "ProposePlugin",
    "Registration",
    "TimingModel",
    "benchmark",
    "bootstrap_fpms",
]
