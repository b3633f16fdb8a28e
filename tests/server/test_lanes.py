"""Queues bounded by the time they take: bursts wait, overloads are refused at once."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
from perfcast_client import (
    AsyncClient,
    Client,
    DecodeTrajectory,
    EngineConfig,
    Prefill,
    Static,
    Workload,
    errors,
    planner,
)
from perfcast_server.errors import ServiceError
from perfcast_server.lanes import CALM_S, SHORT_S, Lane
from perfcast_server.metrics import Metrics
from perfcast_surface.arrays import F64, Ints
from perfcast_surface.bands import BAND, in_bands

from tests.server.running import PATIENCE_S, eventually, running

CONFIG = EngineConfig(model="Qwen/Qwen3-32B-FP8", system="h200_sxm", backend="trtllm", tp=4)


class Bench:
    """A lane, a clock that is set by hand, and work that ends when it is told to."""

    def __init__(self, patience_s: float = 1.0, threads: int = 1) -> None:
        self.now = 0.0
        self.lane = Lane("steps", threads, patience_s, Metrics(), clock=lambda: self.now)
        self.doors: list[threading.Event] = []
        self._tasks: list[asyncio.Task[Any]] = []

    def ask(self, cost: float = 1.0) -> None:
        """Raises what the lane refuses with."""
        self.lane.admit()
        door = threading.Event()
        self.doors.append(door)
        self._tasks.append(asyncio.get_running_loop().create_task(self.lane.run(door.wait, cost)))

    async def begun(self) -> None:
        """Let what was asked get to its thread."""
        await asyncio.sleep(0.02)

    async def end_one(self, after_s: float) -> None:
        self.now += after_s
        self.doors.pop(0).set()
        await self._tasks.pop(0)
        await self.begun()

    async def close(self) -> None:
        for door in self.doors:
            door.set()
        await asyncio.gather(*self._tasks)
        self.lane.close()


async def test_a_burst_may_wait_and_one_that_would_take_too_long_is_refused() -> None:
    bench = Bench()
    for _ in range(30):  # learn that one takes 0.25 s
        bench.ask()
        await bench.begun()
        await bench.end_one(0.25)
    for _ in range(5):
        bench.ask()
        await bench.begun()
    with pytest.raises(ServiceError) as caught:
        bench.ask()
    assert caught.value.reason == "LIMIT"
    assert caught.value.retry_s is not None and 1.0 < caught.value.retry_s < 1.25
    await bench.close()


async def test_short_work_is_done_at_once_and_the_event_loop_then_rests_the_longer_the_longer_it_took() -> None:
    bench = Bench()

    def take(seconds: float) -> str:
        bench.now += seconds
        return "done"

    for took, rest in ((SHORT_S, SHORT_S), (2 * SHORT_S, 4 * SHORT_S), (20 * SHORT_S, 400 * SHORT_S)):
        assert bench.lane.at_once(partial(take, took)) == "done"
        bench.now += 0.99 * rest
        assert bench.lane.at_once(lambda: take(0)) is None
        bench.now += 0.02 * rest
    bench.ask()
    await bench.begun()
    assert bench.lane.at_once(lambda: take(0)) is None
    await bench.close()


async def test_work_that_is_refused_at_once_counts_as_work() -> None:
    bench = Bench()

    def refuse() -> None:
        bench.now += SHORT_S
        raise ServiceError("RANGE", "no")

    with pytest.raises(ServiceError, match="no"):
        bench.lane.at_once(refuse)
    assert bench.lane.at_once(lambda: "too soon") is None
    await bench.close()


async def test_the_cost_of_what_waits_counts_not_its_number() -> None:
    bench = Bench()
    for _ in range(40):
        bench.ask(cost=10)
        await bench.begun()
        await bench.end_one(1.0)
    bench.ask(cost=1)
    for _ in range(8):
        bench.ask(cost=1)
    await bench.begun()
    bench.ask(cost=10)
    await bench.begun()
    with pytest.raises(ServiceError):
        bench.ask(cost=1)
    await bench.close()


async def test_in_an_overload_one_works_and_none_waits_until_nothing_is_refused_for_a_while() -> None:
    bench = Bench(threads=3)
    for _ in range(40):  # learn that one takes 0.5 s
        bench.ask()
        await bench.begun()
        await bench.end_one(0.5)
    for _ in range(7):
        bench.ask()
        await bench.begun()
    for left in (7, 6, 5, 4, 3, 2, 1):
        with pytest.raises(ServiceError):
            bench.ask()
        assert len(bench.doors) == left
        await bench.end_one(CALM_S * 0.9)
    bench.ask()
    await bench.begun()
    with pytest.raises(ServiceError):  # though two threads are free
        bench.ask()
    bench.now += CALM_S * 1.1
    for _ in range(3):
        bench.ask()
        await bench.begun()
    await bench.close()


async def test_where_nothing_may_wait_nothing_does_in_an_overload_either() -> None:
    bench = Bench(patience_s=0.0)
    bench.ask()
    await bench.begun()
    for _ in range(2):
        with pytest.raises(ServiceError):
            bench.ask()
    await bench.close()


async def test_work_that_fails_gives_its_place_back() -> None:
    lane = Lane("steps", 1, 1.0, Metrics())

    def fails() -> None:
        raise ValueError("no")

    for _ in range(3):
        with pytest.raises(ValueError, match="no"):
            await lane.run(fails)
    assert await lane.run(lambda: 7) == 7
    lane.close()


async def test_work_that_nobody_waits_for_ends_before_its_next_points_and_has_its_place_until_then() -> None:
    metrics = Metrics()
    lane = Lane("steps", 1, 1.0, metrics)
    begun, door, bands = threading.Event(), threading.Event(), list[int]()

    def evaluated(points: Ints) -> F64:
        bands.append(len(points))
        return points.astype(np.float64)

    def work() -> None:
        begun.set()
        door.wait(PATIENCE_S)
        in_bands(evaluated, np.arange(3 * BAND))

    def in_work() -> float | None:
        return metrics.registry.get_sample_value("lane_in_work", {"lane": "steps"})

    left = asyncio.create_task(lane.run(work))
    assert await asyncio.to_thread(begun.wait, PATIENCE_S)
    left.cancel()
    with pytest.raises(asyncio.CancelledError):
        await left
    assert in_work() == 1
    door.set()
    assert await lane.run(lambda: "next") == "next"
    assert (bands, in_work()) == ([], 0)
    await lane.run(work)
    assert bands == [BAND] * 3
    lane.close()


def slow(number: int) -> DecodeTrajectory:
    return DecodeTrajectory(number, 1000, 100_000, stride=1)


def test_step_queries_are_answered_while_everything_else_is_refused() -> None:
    with running(max_wait_s=0.0, threads=1) as served, Client(served.address) as client, ThreadPoolExecutor(8) as pool:
        handle = client.resolve(CONFIG).handle
        client.predict(handle, slow(100))

        def ask(number: int) -> errors.LimitExceeded | float:
            try:
                return client.predict(handle, slow(number), deadline_s=60).latency_ms
            except errors.LimitExceeded as error:
                return error

        with served.held():
            asked = [pool.submit(ask, number) for number in range(1, 9)]
            eventually(lambda: sum(one.done() for one in asked) == 7)
            for number in range(1, 200):
                assert client.predict(handle, Prefill(1, number)).latency_ms > 0
        told = [one.result() for one in asked]
    refused = [one for one in told if isinstance(one, errors.LimitExceeded)]
    assert len(refused) == 7
    assert {(one.details["limit"], one.retry_after_s is not None) for one in refused} == {("max_wait_s", True)}


def test_bytes_of_requests_in_work_are_bounded() -> None:
    config = EngineConfig(model="x", system="h200_sxm", backend="trtllm", config_json="[" + " " * 200_000 + "]")
    with running(max_request_bytes_in_work=100_000) as served, Client(served.address) as client:
        handle = client.resolve(CONFIG).handle
        with ThreadPoolExecutor() as pool:
            with served.held():
                busy = pool.submit(client.predict, handle, slow(1), deadline_s=60)
                eventually(lambda: served.metric("grpc_server_in_work") == 1)
                with pytest.raises(errors.LimitExceeded) as caught:
                    client.resolve(config)
            assert caught.value.details["limit"] == "max_request_bytes_in_work"
            assert busy.result().latency_ms > 0
        with pytest.raises(errors.InvalidRequest):
            client.resolve(config)  # alone it is let in, and refused for what it is


def test_a_search_that_takes_too_long_is_ended() -> None:
    from perfcast_client import SearchTask, Workload

    task = SearchTask(
        engine=EngineConfig(model="deepseek-ai/DeepSeek-V3", system="h200_sxm", backend="trtllm"),
        workload=Workload(isl=4000, osl=500),
        total_gpus=64,
    )
    with running(max_search_s=0.01) as served, Client(served.address) as client:
        with pytest.raises(errors.DeadlineExceeded) as caught:
            client.search_result(task)
        assert caught.value.details["limit"] == "max_search_s"


async def test_a_planner_asks_of_many_engines_at_once_also_where_others_have_asked_for_long_work() -> None:
    with running() as served:
        async with AsyncClient(served.address, deadline_s=PATIENCE_S) as client:
            engine = await client.resolve(CONFIG)
            for batch in range(1, 6):  # a lane learns how long its work takes
                task = Static(engine=engine, batch=batch, stride=1)
                await client.estimate(task, Workload(isl=1000, osl=3000))
            asked = (planner.capacity(engine, isl=1000 + n, osl=100) for n in range(40))
            told = await asyncio.gather(*map(client.ask, asked))
    assert all(found is not None for found in told)
