"""Searches: every mapping of every role swept, matched, filtered, ranked (spec/06 sections 8-11)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property

import numpy as np
from perfcast_engine.backends import backend_named
from perfcast_engine.config import EngineConfig, ParallelConfig
from perfcast_engine.errors import EngineError, InvalidField, UnsupportedCombination
from perfcast_engine.models.families import is_moe
from perfcast_engine.profiles import CORRECTED, ROUNDED_ROWS, SCALED_BY_SWEPT_TARGET, Profile, profile_named

from perfcast_planning.search import afd, grids, match
from perfcast_planning.search.encode import WIDTHS, best_cells, cells, encode_pool
from perfcast_planning.search.pick import (
    Pick,
    Violation,
    closest,
    eligible,
    front,
    pick,
    pick_by_objective,
    pick_for_load,
)
from perfcast_planning.search.space import Space, default_space, mappings
from perfcast_planning.search.sweep import Sweep, sweep_aggregated, sweep_role
from perfcast_planning.search.task import (
    AFD,
    AGGREGATED,
    DECODE,
    DISAGGREGATED,
    PREFILL,
    Experiment,
    Progress,
    Role,
    SearchResult,
    SearchTask,
    Status,
    Workshop,
)
from perfcast_planning.serving.afd import MATCHING
from perfcast_planning.serving.aggregated import prompt_to_compute
from perfcast_planning.serving.disaggregated import with_transfer
from perfcast_planning.serving.rows import Rows, concatenated
from perfcast_planning.serving.static import Phases
from perfcast_planning.serving.worker import Worker

AFD_PREFILL_BATCH = 32

Report = Callable[[Progress], None]


def search(
    task: SearchTask,
    shop: Workshop,
    progress: Report = lambda _: None,
) -> SearchResult:
    """All modes over all backends of a task. ``progress`` is told after every mapping; what it raises ends the search.
    Nothing found is an answer, not an error."""
    profile = profile_named(task.engine.profile)
    experiments = []
    for backend in task.backends or (task.engine.backend,):
        one = task.over(backend)
        for mode in task.modes:
            if mode != AGGREGATED and task.total_gpus == 1:
                if len(task.modes) == 1:
                    raise InvalidField("total_gpus", "disaggregation needs at least 2 GPUs", why="range")
                continue
            run = _Run(one, mode, shop, profile, progress)
            try:
                found = {AGGREGATED: run.aggregated, DISAGGREGATED: run.disaggregated, AFD: run.afd}[mode]()
            except EngineError as error:
                if len(task.backends) < 2:
                    raise
                run.refused.append((backend, error))
                found = run.nothing(Rows({}), Status.FAILED)
            experiments.append(found)
    return SearchResult(profile.name, tuple(experiments))


class _Run:
    """One mode on one backend under way."""

    def __init__(self, task: SearchTask, mode: str, shop: Workshop, profile: Profile, progress: Report) -> None:
        self.task, self.mode, self.shop, self.profile, self.progress = task, mode, shop, profile, progress
        self.backend = backend_named(task.engine.backend)
        self.asked: dict[str, list[ParallelConfig]] = {}
        self.engines: list[Worker] = []
        self.refused: list[tuple[str, EngineError]] = []
        self.sweeps: list[Sweep] = []
        self.asked_for = task.targets, task.load.osl
        self.pairs = grids.target_pairs(*self.asked_for, task.swept)

    # --- sweeps ---

    def sweep(
        self, role: Role, config: EngineConfig, space: Space, one: Callable[[Worker], Sweep], report: bool
    ) -> Rows:
        """Every mapping of a role through ``one``; its rows with the index of their engine."""
        config = replace(config, role="both" if role == AGGREGATED else role, resolution="search")
        if self.task.encode_pool:
            config = replace(config, language_only=True)
        self.shop.admit(config)
        model, system = self.shop.model(config), self.shop.system(config)
        megamoe = config.moe_backend == "megamoe"
        default = default_space(
            self.backend,
            system,
            model,
            role,
            moe_backend=config.moe_backend,
            covered_ep=self.shop.covered_ep(config),
            total_gpus=self.task.total_gpus,
        )
        allowed = space.over(default).within(self.task.total_gpus)
        asked = self.asked[role] = list(mappings(allowed, self.backend, is_moe(model), megamoe))
        parts: list[Rows] = []
        built = zip(asked, self.shop.workers(config, asked), strict=True)
        for done, (mapping, candidate) in enumerate(built, 1):
            if isinstance(candidate, EngineError):
                self.refused.append((str(mapping), candidate))
            else:
                swept = one(candidate)
                self.sweeps.append(swept)
                if swept.error is not None:
                    self.refused.append((candidate.label, swept.error))
                elif swept.rows is not None and len(swept.rows):
                    parts.append(swept.rows.with_(engine=np.full(len(swept.rows), len(self.engines))))
                    self.engines.append(candidate)
            found = tuple(parts) if report else ()
            self.progress(Progress(self.mode, self.task.engine.backend, done, len(asked), found, self._front))
        return concatenated(parts)

    def aggregated(self) -> Experiment:
        task = self.task

        def one(worker: Worker) -> Sweep:
            chunks = grids.chunk_sizes(prompt_to_compute(worker, task.load), task.chunked_prefill)
            batches = grids.up_to(grids.AGGREGATED_BATCHES, grids.MAX_BATCH)
            return sweep_aggregated(worker, task.load, batches, chunks, task.limits, self.pairs)

        rows = self.sweep(AGGREGATED, task.engine, task.space, one, True)
        if not len(rows):
            return self.nothing(concatenated([s.priced for s in self.sweeps if s.priced is not None]))
        rows = rows.distinct()
        if self.encoders:
            found = self._cells(rows, waiting=1.0, degradation=1.0)
            rows = best_cells(found, task.targets.ttft_ms or math.inf)
        rows = rows.sorted("-tokens_per_s_per_gpu", "gpus", "tpot_ms")
        return self._ranked(rows, self._groups(rows["engine"]))

    # --- disaggregated ---

    def disaggregated(self) -> Experiment:
        prefill = self._prefill(self.task.prefill_max_batch)
        decode = self._decode() if len(prefill) else prefill
        if not len(decode):
            return self.nothing(decode)
        if self.encoders:
            factors = self.task.matching
            prefill = self._cells(prefill, factors.ttft_factor, factors.prefill_degradation)
        return self._matched(self._role(prefill), self._role(decode))

    def afd(self) -> Experiment:
        """Attention-FFN disaggregation decodes for a pool of prefill workers."""
        task, index = self.task, dict[int, int]()
        parts: list[Rows] = []
        prefill = self._prefill(max(task.prefill_max_batch, AFD_PREFILL_BATCH))
        if not len(prefill):
            return self.nothing(prefill)
        for found in afd.candidates(task, task.decode_engine or task.engine, self.shop):
            if isinstance(found, EngineError):
                self.refused.append(("afd", found))
                continue
            worker, rows = found
            if id(worker) not in index:
                index[id(worker)] = len(self.engines)
                self.engines.append(worker)
            parts.append(rows.with_(engine=np.full(len(rows), index[id(worker)])))
        decode = concatenated(parts)
        if not len(decode):
            return self.nothing(decode)
        names = [column for name, column in decode.columns.items() if name.startswith("afd_")]
        shape = np.unique(np.stack(names, axis=1), axis=0, return_inverse=True)[1].ravel()
        counts = task.replica.counts(CORRECTED, task.total_gpus, False)
        shared = (task.load, MATCHING)
        side = match.useful(replace(self._role(decode), group=shape), "tpot_ms")
        rows = match.every_pair(self._role(prefill), side, counts, task.replica, *shared)
        if not len(rows):
            return self.nothing(rows, Status.UNMET)
        rows = rows.sorted("-tokens_per_s_per_gpu", "gpus", "tpot_ms")
        return self._ranked(rows, self._groups(rows["decode_engine"]))

    def _prefill(self, most: int) -> Rows:
        task = self.task

        def one(worker: Worker) -> Sweep:
            swept = sweep_role(worker, task.load, np.arange(1.0, most + 1), Phases.PREFILL, task.limits)
            if swept.rows is None:
                return swept
            factor = task.matching.ttft_factor
            return replace(swept, rows=with_transfer(swept.rows, worker, task.load, task.kv_transfer, factor))

        return self.sweep(PREFILL, task.engine, task.prefill_space, one, False)

    def _decode(self) -> Rows:
        task, self.sweeps = self.task, []
        batches = grids.up_to(grids.DECODE_BATCHES, task.decode_max_batch)

        def one(worker: Worker) -> Sweep:
            return sweep_role(worker, task.load, batches, Phases.DECODE, task.limits)

        return self.sweep(DECODE, task.decode_engine or task.engine, task.decode_space, one, False)

    def _role(self, rows: Rows) -> match.Role:
        engine = rows["engine"]
        tp = np.array([worker.parallel.tp for worker in self.engines])
        exempt = np.array([worker.large_ep for worker in self.engines])
        return match.Role(rows, self._groups(engine), tp[engine], exempt[engine])

    def _matched(self, prefill: match.Role, decode: match.Role) -> Experiment:
        task = self.task
        large_ep = bool(prefill.exempt.any() or decode.exempt.any())
        replica = replace(task.replica, same_tp=task.replica.same_tp or self.backend.same_tp)
        if self.encoders:
            replica = replace(replica, max_prefill_workers=1)  # a cell has its number of them
        counts = replica.counts(self.profile, task.total_gpus, large_ep)
        shared = (task.load, task.matching)
        if task.autoscale:
            limits = self.pairs if self.profile[SCALED_BY_SWEPT_TARGET] else grids.target_pairs(*self.asked_for, False)
            ttft, tpot = self.pairs[0][0], max(tpot for _, tpot in limits)
            rows = match.scaled_apart(prefill, decode, ttft, tpot, *shared, self.profile)
        elif self.profile[ROUNDED_ROWS] and not task.encode_pool:
            rows = match.swept(prefill, decode, counts, replica, *shared, self.pairs)
        else:
            rows = match.every_pair(prefill, decode, counts, replica, *shared)
            if task.match_load is not None:
                fewest = match.every_pair(prefill, decode, counts, replica, *shared, task.match_load)
                rows = concatenated([rows, fewest]).distinct()
        if not len(rows):
            near = match.every_pair(prefill, decode, (), replace(replica, same_tp=False), *shared)
            return self.nothing(near, Status.UNMET)
        rows = rows.sorted("-tokens_per_s_per_gpu", "gpus", "tpot_ms")
        return self._ranked(rows, self._groups(rows["decode_engine"]))

    # --- encoders ---

    @cached_property
    def encoders(self) -> Rows | None:
        """Encode workers, where images are encoded by workers of their own."""
        if not self.task.encode_pool:
            return None
        moe = is_moe(self.shop.model(self.task.engine))
        widths = [ParallelConfig(tp=tp, moe_tp=1, moe_ep=tp if moe else 1) for tp in WIDTHS]
        built = self.shop.workers(replace(self.task.engine, encoder_dp=False, language_only=False), widths)
        pool = encode_pool([worker for worker in built if isinstance(worker, Worker)], self.task.load)
        if not len(pool):
            raise UnsupportedCombination("encode_pool", "no encode worker of this model fits the GPU")
        return pool

    def _cells(self, rows: Rows, waiting: float, degradation: float) -> Rows:
        assert self.encoders is not None
        budget = self.task.total_gpus or match.MAX_REPLICA_GPUS
        return cells(rows, self.encoders, self.task.matching, waiting, degradation, budget)

    # --- results ---

    def _groups(self, engine: match.Index) -> match.Index:
        """Rows of equally named mappings share a group; groups are in the order of the names."""
        return np.unique([worker.label for worker in self.engines], return_inverse=True)[1][engine]

    def _front(self, rows: Rows) -> match.Index:
        if not len(rows):
            return np.zeros(0, np.intp)
        score = self.task.score(rows)
        return front(rows, score, self.task.targets, self.task.strict_sla)

    def _ranked(self, rows: Rows, group: match.Index) -> Experiment:
        task, profile = self.task, self.profile
        if task.match_load is not None:
            best = pick_for_load(rows, group, task.targets, task.match_load, task.top, profile)
        elif task.objective is not None:
            best = pick_by_objective(rows, group, task.objective, task.total_gpus, task.top)
        else:
            best = pick(rows, group, task.targets, task.total_gpus, task.top, profile)
        met = bool(eligible(rows, task.targets, profile).any())
        return self._experiment(Status.OK if met else Status.UNMET, rows, best, rows)

    def nothing(self, near: Rows, status: Status | None = None) -> Experiment:
        if status is None:
            fits, kv = any(s.fits_memory for s in self.sweeps), any(s.fits_kv for s in self.sweeps)
            missed = any(s.miss for s in self.sweeps)
            usable = [s for s in self.sweeps if s.error is None]
            if not usable:
                status = Status.FAILED
            elif not fits:
                status = Status.NO_MEMORY
            elif not kv:
                status = Status.NO_KV
            else:
                status = Status.NO_DATA if missed else Status.UNMET
        return self._experiment(status, Rows({}), Pick(Rows({}), 0.0, False), near)

    def _experiment(self, status: Status, rows: Rows, best: Pick, near: Rows) -> Experiment:
        nearest: Rows | None = None
        missed: tuple[Violation, ...] = ()
        if status is Status.UNMET and len(near):
            index, found = closest(near, self.task.targets)
            nearest, missed = near.take(slice(index, index + 1)), tuple(found)
        return Experiment(
            mode=self.mode,
            backend=self.task.engine.backend,
            status=status,
            rows=rows,
            engines=tuple(self.engines),
            pick=best,
            front=self._front(rows),
            closest=nearest,
            missed=missed,
            asked=self.asked,
            refused=tuple(self.refused),
            evaluated=sum(len(s.rows) for s in self.sweeps if s.rows is not None),
        )
