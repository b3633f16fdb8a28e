"""Threads for work that would hold up the event loop, and how long such work may wait for them."""

from __future__ import annotations

import asyncio
import math
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from perfcast_surface.bands import before_each

from perfcast_server.errors import ServiceError
from perfcast_server.metrics import Metrics
from perfcast_server.settings import Settings

T = TypeVar("T")
# times --max-wait-s that work may wait, and the most threads, 0 for as many as there are: planners ask of all their
# engines at once, an engine is loaded but once, and what is learned is kept, one change after another
LANES = {"steps": (1, 0), "work": (1, 0), "questions": (10, 0), "loads": (10, 0), "states": (10, 1)}
CALM_S = 0.25  # without a refusal, and an overload is over
FIRST_GUESS_S = 0.005  # per unit of cost, until the first work is done
FORGET = 0.1  # weight of the newest measurement in the mean
SHORT_S = 0.005  # of work that may hold up the event loop, as Python lets a thread by default


class Unwanted(Exception):
    """Nobody waits for the work any more, so that nobody hears of this either."""


class Lane:
    """So many threads, and a queue before them that is bounded by the time it takes.

    A burst may wait up to ``patience_s``; what would have to wait for longer is refused at once, with the time after
    which to try again. From the first refusal until there was none for a while is an overload: one works at a time and
    none waits, so that what is accepted takes little longer than alone: threads of one interpreter slow each other.
    """

    def __init__(
        self,
        name: str,
        threads: int,
        patience_s: float,
        metrics: Metrics,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.name = name
        self._threads = threads
        self._patience_s = patience_s
        self._clock = clock
        self._pool = ThreadPoolExecutor(threads, name)
        self._counting = threading.Lock()
        self._inside = 0
        self._cost = 0.0
        self._mean_s = FIRST_GUESS_S
        self._refused_at = -math.inf
        self._rested_at = clock()
        self._waited = metrics.lane_wait.labels(name)
        metrics.lane_in_work.labels(name).set_function(lambda: self._inside)

    async def run(self, work: Callable[[], T], cost: float = 1.0) -> T:
        """What ``work`` returns, in a thread. cost: its size in the lane's own unit. Raises ServiceError LIMIT.

        Cancelled, it ends the work before its next band of points. Until then that has its place in the lane.
        """
        self.admit()
        asked, unwanted = self._clock(), threading.Event()

        def check() -> None:
            if unwanted.is_set():
                raise Unwanted

        def timed() -> T:
            began = self._clock()
            self._waited.observe(began - asked)
            before_each.set(check)
            try:
                return work()
            finally:
                if not unwanted.is_set():
                    self._mean_s += FORGET * ((self._clock() - began) / cost - self._mean_s)

        task = self._pool.submit(timed)
        self._count(1, cost)
        task.add_done_callback(lambda _: self._count(-1, -cost))
        try:
            return await asyncio.wrap_future(task)
        finally:
            unwanted.set()

    def _count(self, number: int, cost: float) -> None:
        with self._counting:
            self._inside += number
            self._cost += cost

    def at_once(self, work: Callable[[], T]) -> T | None:
        """What ``work`` returns, here and now, which spares it two changes of thread; for work that is mostly short.

        None where others are in work or the event loop should rest: after work of SHORT_S for as long as that took,
        after what took twice as long for four times as long. So a lone caller is answered, but not a crowd.
        """
        began = self._clock()
        if self._inside or began < self._rested_at:
            return None
        try:
            return work()
        finally:
            ended = self._clock()
            self._rested_at = ended + (ended - began) ** 2 / SHORT_S

    @property
    def _overloaded(self) -> bool:
        return self._clock() - self._refused_at <= CALM_S

    def admit(self) -> None:
        """Refuse what would have to wait for too long."""
        wait_s = self._cost * self._mean_s / self._threads
        if not self._inside or (not self._overloaded and (self._inside < self._threads or wait_s <= self._patience_s)):
            return
        self._refused_at = self._clock()
        raise ServiceError(
            "LIMIT",
            f"the {self.name} lane has {self._inside} in work, which is more than it can do in time",
            max(0.001, wait_s),
            limit="max_wait_s",
        )

    def close(self) -> None:
        """Let go of the threads; what has not begun is dropped."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class Lanes:
    """One lane for each kind of work, so that none waits for another kind: ``steps`` by points, ``questions`` of
    planners, other ``work``, ``loads`` of engines and their surfaces, and what is learned, one change of ``states``
    after another."""

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        threads = settings.threads or max(2, os.cpu_count() or 2)
        self._all = tuple(
            Lane(name, most or threads, patience * settings.max_wait_s, metrics)
            for name, (patience, most) in LANES.items()
        )
        self.steps, self.work, self.questions, self.loads, self.states = self._all

    def close(self) -> None:
        for lane in self._all:
            lane.close()
