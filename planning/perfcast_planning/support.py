"""Which engines can be answered: models on systems and backends, each under the smallest mapping that holds it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from perfcast_engine.config import EngineConfig, ParallelConfig
from perfcast_engine.coverage import Coverage, coverage
from perfcast_engine.errors import EngineError, OutOfMemory
from perfcast_engine.models.families import is_moe
from perfcast_engine.predictor import Engine, Predictor
from perfcast_engine.tables.database import Mode

MOST_GPUS = 64  # of a mapping that is chosen
LEAST_LOAD = (4096, 512)  # isl and osl of the one request that a chosen mapping must hold


@dataclass(frozen=True, slots=True)
class Cell:
    """Whether one model can be answered on one system and backend.

    parallel: the mapping that was tried last, None where none can be built; works_in: SILICON, HYBRID or None;
    error: why not SILICON; operators: those that were not measured, as phase/name.
    """

    model: str
    system: str
    backend: str
    version: str
    parallel: ParallelConfig | None = None
    works_in: Mode | None = None
    error: EngineError | None = None
    operators: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        return {Mode.SILICON: "PASS", Mode.HYBRID: "HYBRID"}.get(self.works_in or Mode.SOL, "FAIL")


def support(
    predictor: Predictor,
    models: Sequence[str] = (),
    systems: Sequence[str] = (),
    backends: Sequence[str] = (),
    version: str = "current",
) -> Iterator[Cell]:
    """Model after model over systems and backends; empty lists stand for all that there are (measured backends)."""
    known = predictor.catalog.systems()
    for system in systems or [name for name in known if predictor.catalog.backends(name)]:
        for backend in backends or predictor.catalog.backends(system):
            for model in models or sorted(predictor.registry.models):
                yield cell(predictor, EngineConfig(model=model, system=system, backend=backend, version=version))


def cell(predictor: Predictor, config: EngineConfig) -> Cell:
    """``config`` under the smallest mapping that fits, whatever mapping it states; its mode does not count either."""
    name = config.model if isinstance(config.model, str) else config.model.id
    found = Cell(name, config.system, config.backend, config.version)
    try:
        version = predictor.catalog.resolve_version(
            config.system, config.backend, config.version, config.allow_unlisted_version
        )
        found = replace(found, version=version)
        engines = smallest(predictor, replace(config, database_mode=Mode.SILICON))
    except EngineError as error:
        return replace(found, error=error)
    told: list[tuple[ParallelConfig, Coverage]] = []
    for engine in engines:
        told.append((engine.parallel, coverage(engine)))
        if told[-1][1].works_in is Mode.SILICON:
            return replace(found, parallel=engine.parallel, works_in=Mode.SILICON)
    missed = [operator for operator in told[0][1].operators if operator.error is not None]
    hybrid = next((parallel for parallel, covered in told if covered.works_in is Mode.HYBRID), None)
    return replace(
        found,
        parallel=hybrid or told[0][0],
        works_in=Mode.HYBRID if hybrid else None,
        error=missed[0].error,
        operators=tuple(dict.fromkeys(f"{operator.phase}/{operator.name}" for operator in missed)),
    )


def smallest(predictor: Predictor, config: EngineConfig) -> list[Engine]:
    """Engines of ``config`` under the mappings of the least GPUs that hold a request of ``LEAST_LOAD``, the usual
    mapping first. Raises what refuses the first mapping where none can be built, OutOfMemory where none fits."""
    system = predictor.catalog.system(config.system)
    spec = predictor.registry.spec(config)
    refused: EngineError | None = None
    built = False
    for gpus in (1 << i for i in range(MOST_GPUS.bit_length())):
        fitting = []
        for parallel in mappings(gpus, system.gpus_per_node, is_moe(spec)):
            try:
                engine = predictor.engine(replace(config, parallel=parallel))
                fits = engine.memory.largest_batch(*LEAST_LOAD, limit=1) > 0
            except EngineError as error:
                refused = refused or error
                continue
            built = True
            fitting += [engine] if fits else []
        if fitting:
            return fitting
    if refused is not None and not built:
        raise refused
    raise OutOfMemory(f"{spec.id} does not fit {MOST_GPUS} GPUs of {config.system}", system=config.system)


def mappings(gpus: int, per_node: int, moe: bool) -> Iterator[ParallelConfig]:
    """Mappings of so many GPUs, the usual first: tensor-parallel within a node, stages beyond it; experts whole, then
    split, then attention replicated."""
    width, stages = min(gpus, per_node), max(gpus // per_node, 1)
    if not moe:
        yield ParallelConfig(tp=width, pp=stages)
        return
    yield ParallelConfig(tp=width, pp=stages, moe_tp=1, moe_ep=width)
    if width > 1:
        yield ParallelConfig(tp=width, pp=stages, moe_tp=width, moe_ep=1)
        yield ParallelConfig(attn_dp=width, pp=stages, moe_tp=1, moe_ep=width)
