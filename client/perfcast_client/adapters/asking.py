"""Adapters written once for blocking and asyncio clients.

A method is a generator: it yields what it wants answered (a Call, or a Step to be timed) and returns its result. With a
blocking client it runs at once; with an ``AsyncClient`` it returns an awaitable.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from functools import update_wrapper
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, overload

from perfcast_client import calls
from perfcast_client.aio import AsyncClient
from perfcast_client.calls import Call
from perfcast_client.client import Questions
from perfcast_client.errors import InvalidRequest, NotFound, PerfcastError, PerfDataMissing
from perfcast_client.record import EngineLike
from perfcast_client.steps import Step
from perfcast_client.turns import Steps, later, now

P = ParamSpec("P")
T = TypeVar("T")
C = TypeVar("C", bound=Questions | AsyncClient)


class Timing(Protocol):
    """What times steps instead of a call for each: a step stream, or a surface in this process; blocking or not."""

    def predict_ms(self, step: Step) -> Any: ...


class Adapter(Generic[C]):
    """Base of adapters. ``timing``: times the steps of ``engine`` instead of the client."""

    def __init__(self, client: C, timing: Timing | None = None) -> None:
        self._client = client
        self._timing = timing

    def _answer(self, question: Any) -> Any:
        if isinstance(question, Call):
            return self._client.ask(question)
        assert self._timing is not None, "steps are yielded where something times them"
        return self._timing.predict_ms(question)

    def _time(self, engine: EngineLike, step: Step) -> Steps[float]:
        """Milliseconds of ``step``."""
        if self._timing is not None:
            return float((yield step))
        told = yield calls.predict(engine, step, False)
        return float(told.latency_ms)

    def _run(self, steps: Steps[Any]) -> Any:
        run: Any = later if isinstance(self._client, AsyncClient) else now
        return run(steps, self._answer)


class Asking(Generic[P, T]):
    """A method of an Adapter, written as a generator."""

    def __init__(self, steps: Callable[Concatenate[Any, P], Steps[T]]) -> None:
        self._steps = steps
        update_wrapper(self, steps)  # type: ignore[arg-type]

    @overload
    def __get__(self, adapter: Adapter[AsyncClient], owner: type) -> Callable[P, Awaitable[T]]: ...
    @overload
    def __get__(self, adapter: Adapter[Any], owner: type) -> Callable[P, T]: ...
    def __get__(self, adapter: Any, owner: type) -> Any:
        return lambda *args, **kwargs: adapter._run(self._steps(adapter, *args, **kwargs))


def asking(steps: Callable[Concatenate[Any, P], Steps[T]]) -> Asking[P, T]:
    return Asking(steps)


Built = TypeVar("Built", bound=Adapter[Any])


def build(adapter: Built, steps: Callable[[Built], Steps[None]]) -> Any:
    """``adapter`` once ``steps`` have made it ready; awaitable where its client is."""

    def ready() -> Steps[Built]:
        yield from steps(adapter)
        return adapter

    made: Built | Coroutine[Any, Any, Built] = adapter._run(ready())
    return made


class PerfDataNotAvailable(RuntimeError):
    """The engine is known in general, but nothing was measured of what was asked; or its system is not known."""


def as_value_error(error: PerfcastError) -> ValueError | RuntimeError:
    """As the libraries that adapters stand in for tell it, with the reason in the message."""
    text = f"{error.message} [{error.reason or error.code}]"
    if isinstance(error, PerfDataMissing) or error.reason == "UNKNOWN_SYSTEM":
        return PerfDataNotAvailable(text)
    return ValueError(text) if isinstance(error, InvalidRequest | NotFound) else RuntimeError(text)


def as_runtime_error(error: PerfcastError) -> RuntimeError:
    return RuntimeError(f"{error.message} [{error.reason or error.code}]")
