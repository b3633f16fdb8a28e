"""What a supervisor and its workers say to each other: questions and answers as lines of JSON over a socket."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Self

log = logging.getLogger("perfcast.control")

LONGEST_LINE = 16 << 20
Answers = Mapping[str, Callable[..., Awaitable[Any]]]


class Gone(ConnectionError):
    """The other side has ended."""


class Refused(RuntimeError):
    """The other side could not do it."""


class Peer:
    """One end. Either side may ask at any time; ``answers`` says what this side can be asked, by name."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answers: Answers) -> None:
        self._reader = reader
        self._writer = writer
        self._answers = answers
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._asked = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self.gone = asyncio.get_running_loop().create_task(self._listen())

    @classmethod
    async def over(cls, end: socket.socket, answers: Answers) -> Self:
        return cls(*await asyncio.open_unix_connection(sock=end, limit=LONGEST_LINE), answers)

    async def ask(self, what: str, timeout_s: float = 30.0, **arguments: Any) -> Any:
        """What the other side answers. Raises Refused, Gone or TimeoutError."""
        self._asked += 1
        number, answer = self._asked, asyncio.get_running_loop().create_future()
        if self.gone.done():
            raise Gone(what)
        self._waiting[number] = answer
        try:
            self._say({"ask": number, "what": what, "arguments": arguments})
            return await asyncio.wait_for(answer, timeout_s)
        finally:
            del self._waiting[number]

    def close(self) -> None:
        self._writer.close()

    def _say(self, message: Mapping[str, Any]) -> None:
        self._writer.write(json.dumps(message).encode() + b"\n")

    async def _listen(self) -> None:
        """Until the other side ends."""
        try:
            while line := await self._reader.readline():
                message = json.loads(line)
                if "ask" in message:
                    task = asyncio.get_running_loop().create_task(self._answer(message))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
                elif (waiting := self._waiting.get(message["answer"])) is not None and not waiting.done():
                    if "error" in message:
                        waiting.set_exception(Refused(message["error"]))
                    else:
                        waiting.set_result(message["value"])
        except ConnectionError:
            pass
        finally:
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(Gone("the other side has ended"))

    async def _answer(self, message: Mapping[str, Any]) -> None:
        try:
            told = {"value": await self._answers[message["what"]](**message["arguments"])}
        except Exception as error:
            log.warning("refused", extra={"asked": message["what"], "why": str(error)})
            told = {"error": str(error)}
        self._say({"answer": message["ask"], **told})
