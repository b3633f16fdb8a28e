"""Bounded memory of answers, and equal work in flight done once."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Coroutine, Hashable, Iterator
from contextlib import aclosing
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
Key = tuple[str, bytes]  # a method and a request to it
LARGEST_KEPT = 1 << 20  # request or answer; larger ones are not worth their room


class Lru(Generic[K, V]):
    """A mapping that forgets the least recently used entries beyond ``bound``, the sum of ``size`` over entries."""

    def __init__(self, bound: int, size: Callable[[K, V], int] = lambda key, value: 1) -> None:
        self.bound = bound
        self.held = 0
        self._size = size
        self._entries: OrderedDict[K, V] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def get(self, key: K) -> V | None:
        value = self._entries.get(key)
        if value is not None:
            self._entries.move_to_end(key)
        return value

    def put(self, key: K, value: V) -> None:
        size = self._size(key, value)
        if size > self.bound:
            return
        if key in self._entries:
            self.pop(key)
        self._entries[key] = value
        self.held += size
        while self.held > self.bound:
            self.pop_oldest()

    def pop(self, key: K) -> V | None:
        value = self._entries.pop(key, None)
        if value is not None:
            self.held -= self._size(key, value)
        return value

    def pop_oldest(self) -> V | None:
        """Drop what was used longest ago."""
        return self.pop(next(iter(self._entries)))

    def __iter__(self) -> Iterator[K]:
        return iter(list(self._entries))

    def values(self) -> list[V]:
        return list(self._entries.values())

    def clear(self) -> None:
        self._entries.clear()
        self.held = 0


class _Flight(Generic[V]):
    def __init__(self, task: asyncio.Task[V]) -> None:
        self.task = task
        self.waiters = 0


class SingleFlight(Generic[K, V]):
    """Callers that ask for the same key while it is being worked on share one outcome.

    The work outlives a caller that gives up; once all have, it is cancelled, unless ``finish`` asks to end it anyway.
    """

    def __init__(self, finish: bool = False) -> None:
        self._finish = finish
        self._flights: dict[K, _Flight[V]] = {}

    async def do(self, key: K, work: Callable[[], Coroutine[Any, Any, V]]) -> V:
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = _Flight(asyncio.create_task(work()))
            flight.task.add_done_callback(lambda _: self._landed(key, flight))
        flight.waiters += 1
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.waiters -= 1
            if not flight.waiters and not flight.task.done() and not self._finish:
                flight.task.cancel()
                self._landed(key, flight)

    def _landed(self, key: K, flight: _Flight[V]) -> None:
        if self._flights.get(key) is flight:
            del self._flights[key]
        if flight.task.done() and not flight.task.cancelled():
            flight.task.exception()  # seen, also when every caller has left


class Broadcast(Generic[K, V]):
    """Callers that ask for the same stream while it runs share it: each hears what is told from then on, to the end.

    The stream outlives a caller that gives up; once all have, it is cancelled.
    """

    def __init__(self) -> None:
        self._shows: dict[K, _Show[V]] = {}

    async def watch(self, key: K, stream: Callable[[], AsyncGenerator[V]]) -> AsyncGenerator[V]:
        show = self._shows.get(key)
        if show is None:
            show = self._shows[key] = _Show(stream())
            show.task.add_done_callback(lambda _: self._ended(key, show))
        show.watchers += 1
        try:
            heard = max(0, len(show.told) - 1)
            while heard < len(show.told) or not show.task.done():
                if heard == len(show.told):
                    await show.news()
                    continue
                heard += 1
                yield show.told[heard - 1]
            show.task.result()  # raises what ended it
        finally:
            show.watchers -= 1
            if not show.watchers and not show.task.done():
                show.task.cancel()
                self._ended(key, show)

    def _ended(self, key: K, show: _Show[V]) -> None:
        show.tell()
        if self._shows.get(key) is show:
            del self._shows[key]
        if show.task.done() and not show.task.cancelled():
            show.task.exception()  # seen, also when every caller has left


class _Show(Generic[V]):
    """What a stream has told so far."""

    def __init__(self, stream: AsyncGenerator[V]) -> None:
        self.told: list[V] = []
        self.watchers = 0
        self._news = asyncio.Event()
        self.task = asyncio.create_task(self._run(stream))

    async def _run(self, stream: AsyncGenerator[V]) -> None:
        async with aclosing(stream):
            async for item in stream:
                self.told.append(item)
                self.tell()

    async def news(self) -> None:
        await self._news.wait()

    def tell(self) -> None:
        """Wake all who wait now."""
        news, self._news = self._news, asyncio.Event()
        news.set()


class Answers:
    """What is remembered of one version of the data: answers given, and those being worked out."""

    def __init__(self, bound: int) -> None:
        self.flights: SingleFlight[Key, bytes] = SingleFlight()
        self.kept: Lru[Key, bytes] = Lru(bound, size=lambda key, answer: len(key[1]) + len(answer) + 256)

    def keep(self, key: Key, answer: bytes) -> bytes:
        if len(answer) <= LARGEST_KEPT and len(key[1]) <= LARGEST_KEPT:
            self.kept.put(key, answer)
        return answer
