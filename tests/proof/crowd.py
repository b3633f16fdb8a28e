"""Callers with the shipped clients that ask everything there is, for as long as something is done to the server."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np
from perfcast_client import (
    AsyncClient,
    Client,
    DecodeStep,
    DecodeTrajectory,
    EngineConfig,
    Prefill,
    SearchTask,
    Workload,
)
from perfcast_client.stream import AsyncStepStream, StepStream

CONFIG = EngineConfig(model="Qwen/Qwen3-32B-FP8", system="h200_sxm", backend="trtllm", tp=4)
SEARCH = SearchTask(
    engine=EngineConfig(model="Qwen/Qwen3-32B-FP8", system="h200_sxm", backend="trtllm"),
    workload=Workload(isl=4000, osl=500),
    total_gpus=8,
)
LARGE_POINTS = 40_000  # three columns of four bytes: more than gRPC keeps for another try unless told to
ROUND = 50  # questions of a kind before it begins anew, so that answers can be compared


class Told:
    """What came of all calls. An answer that differs from an earlier one to the same question is a failure."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.failed: list[str] = []
        self.longest_s = 0.0
        self._known: dict[tuple[str, int], Any] = {}
        self._lock = threading.Lock()

    def answer(self, kind: str, number: int, value: Any, seconds: float) -> None:
        with self._lock:
            self.calls[kind] += 1
            self.longest_s = max(self.longest_s, seconds)
            if self._known.setdefault((kind.rpartition(" ")[2], number), value) != value:
                self.failed.append(f"{kind} {number}: another answer than before")

    def failure(self, kind: str, error: BaseException) -> None:
        with self._lock:
            self.calls[kind] += 1
            self.failed.append(f"{kind}: {type(error).__name__} {getattr(error, 'code', '')}: {error}")

    @property
    def total(self) -> int:
        return sum(self.calls.values())


class Crowd:
    """Callers from the beginning of the block to its end, each asking the next question when it has the answer."""

    def __init__(self, target: str, deadline_s: float, kinds: tuple[str, ...] | None = None) -> None:
        self.told = Told()
        self._target = target
        self._deadline_s = deadline_s
        self._stop = threading.Event()
        wanted = kinds or (*BLOCKING, *AWAITED)
        self._threads = [
            *(
                threading.Thread(target=self._blocking, args=(kind,), daemon=True)
                for kind in wanted
                if kind in BLOCKING
            ),
            threading.Thread(target=self._awaited, args=([kind for kind in wanted if kind in AWAITED],), daemon=True),
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(self._deadline_s + 30)
        self.told.failed += ["a caller hangs" for thread in self._threads if thread.is_alive()]

    def until_asked(self, more: int, patience_s: float = 120.0) -> None:
        """Wait until so many more calls have come to an end."""
        wanted, until = self.told.total + more, time.monotonic() + patience_s
        while self.told.total < wanted:
            if time.monotonic() > until:
                raise TimeoutError(f"the crowd stands at {self.told.total} of {wanted} calls")
            time.sleep(0.01)

    def _questions(self) -> Iterator[int]:
        return itertools.takewhile(lambda _: not self._stop.is_set(), itertools.cycle(range(ROUND)))

    def _blocking(self, kind: str) -> None:
        try:
            with Client(self._target, deadline_s=self._deadline_s, wait_for_ready=True) as client:
                engine = client.resolve(CONFIG)
                stream = client.stream(engine) if "stream" in kind else None
                for number in self._questions():
                    began = time.monotonic()
                    try:
                        answer = BLOCKING[kind](client, stream, engine, number)
                    except Exception as error:
                        self.told.failure(kind, error)
                    else:
                        self.told.answer(kind, number, answer, time.monotonic() - began)
                if stream is not None:
                    stream.close()
        except Exception as error:
            self.told.failure(kind, error)

    def _awaited(self, kinds: Sequence[str]) -> None:
        async def all_asked() -> None:
            await asyncio.gather(*map(self._asked, kinds))

        asyncio.run(all_asked())

    async def _asked(self, kind: str) -> None:
        try:
            async with AsyncClient(self._target, deadline_s=self._deadline_s, wait_for_ready=True) as client:
                engine = await client.resolve(CONFIG)
                stream = client.stream(engine) if "stream" in kind else None
                for number in self._questions():
                    began = time.monotonic()
                    try:
                        answer = await AWAITED[kind](client, stream, engine, number)
                    except Exception as error:
                        self.told.failure(kind, error)
                    else:
                        self.told.answer(kind, number, answer, time.monotonic() - began)
        except Exception as error:
            self.told.failure(kind, error)


def _many(number: int) -> DecodeStep:
    points = np.arange(LARGE_POINTS)
    return DecodeStep(points % 256 + 1, points % 999 + 1 + number, np.full(LARGE_POINTS, 128))


def _step(client: Client, stream: StepStream, engine: Any, number: int) -> float:
    return client.predict(engine, Prefill(1, 100 + number)).latency_ms


def _slow(client: Client, stream: StepStream, engine: Any, number: int) -> float:
    return client.predict(engine, DecodeTrajectory(1 + number, 1000, 20_000, stride=1)).latency_ms


def _steps(client: Client, stream: StepStream, engine: Any, number: int) -> float:
    return float(client.predict_many(engine, _many(number)).latency_ms.sum())


def _streamed(client: Client, stream: StepStream, engine: Any, number: int) -> float:
    return stream.predict_ms(Prefill(1, 100 + number))


def _streamed_ahead(client: Client, stream: StepStream, engine: Any, number: int) -> list[float]:
    return list(stream.predict_all_ms(Prefill(1, 1000 + number + n) for n in range(200)))


def _engines(client: Client, stream: StepStream, engine: Any, number: int) -> str:
    model = "Qwen/Qwen3-30B-A3B"
    config = EngineConfig(model=model, system="h200_sxm", backend="vllm", tp=2, moe_ep=2, nextn=number % 4)
    return client.resolve(config).handle


def _surface(client: Client, stream: StepStream, engine: Any, number: int) -> str:
    return client.get_surface(engine).surface_hash


def _search(client: Client, stream: StepStream, engine: Any, number: int) -> int:
    return len(client.search_result(SEARCH).experiments)


async def _step_awaited(client: AsyncClient, stream: AsyncStepStream, engine: Any, number: int) -> float:
    return (await client.predict(engine, Prefill(1, 100 + number))).latency_ms


async def _steps_awaited(client: AsyncClient, stream: AsyncStepStream, engine: Any, number: int) -> float:
    return float((await client.predict_many(engine, _many(number))).latency_ms.sum())


async def _streamed_awaited(client: AsyncClient, stream: AsyncStepStream, engine: Any, number: int) -> float:
    return await stream.predict_ms(Prefill(1, 100 + number))


BLOCKING: Mapping[str, Callable[[Client, Any, Any, int], Any]] = {
    "step": _step,
    "trajectory": _slow,
    "steps": _steps,
    "stream": _streamed,
    "stream ahead": _streamed_ahead,
    "engine": _engines,
    "surface": _surface,
    "search": _search,
}
AWAITED: Mapping[str, Callable[[AsyncClient, Any, Any, int], Awaitable[Any]]] = {
    "asyncio step": _step_awaited,
    "asyncio steps": _steps_awaited,
    "asyncio stream": _streamed_awaited,
}
