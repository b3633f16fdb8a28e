"""Work that asks in between, written once as a generator and run at once or awaited.

The generator yields its questions and is sent the answers; what fails is raised where it was asked.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from inspect import isawaitable
from typing import Any, TypeVar

T = TypeVar("T")
Steps = Generator[Any, Any, T]


def now(steps: Steps[T], answer: Callable[[Any], Any]) -> T:
    try:
        question = next(steps)
        while True:
            try:
                told = answer(question)
            except Exception as error:
                question = steps.throw(error)
            else:
                question = steps.send(told)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]


async def later(steps: Steps[T], answer: Callable[[Any], Any]) -> T:
    """As ``now``; answers that are awaitable are awaited."""
    try:
        question = next(steps)
        while True:
            try:
                told = answer(question)
                if isawaitable(told):
                    told = await told
            except Exception as error:
                question = steps.throw(error)
            else:
                question = steps.send(told)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
