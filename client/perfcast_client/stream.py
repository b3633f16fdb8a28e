"""Streams of steps on one engine, which outlive the connection and the server process that they began with."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Self, cast

import grpc
from perfcast.v1 import prediction_pb2

from perfcast_client import calls
from perfcast_client.errors import ClientMisuse, DeadlineExceeded, PerfcastError, Unavailable
from perfcast_client.patience import Patience
from perfcast_client.record import EngineLike
from perfcast_client.steps import Step

Opened = Callable[..., Any]  # a call over the stream's channel, given an iterator of requests or nothing
LOOKS = 8  # at an answer that is waited for, within the time that it may take


class _Asked:
    """Steps that were sent, until they are answered: a stream that is opened again begins with those."""

    def __init__(self, engine: EngineLike, deadline_s: float) -> None:
        self._engine = engine
        self._deadline_s = deadline_s
        self._sequence = 0
        self._unanswered: deque[tuple[int, Step]] = deque()

    def _ask(self, step: Step) -> int:
        self._sequence += 1
        self._unanswered.append((self._sequence, step))
        return self._sequence

    def _message(self, sequence: int, step: Step, is_first: bool) -> prediction_pb2.StreamStepsRequest:
        return calls.step_message(sequence, step, self._engine if is_first else None)

    def _is_answer(self, answer: prediction_pb2.StreamStepsResponse, sequence: int) -> bool:
        """Whether that step is answered by it; nobody waits for the answers to earlier ones any more."""
        while self._unanswered and self._unanswered[0][0] <= answer.sequence:
            self._unanswered.popleft()
        return bool(answer.sequence == sequence)

    def _overdue(self) -> PerfcastError:
        told = f"no answer to a step within {self._deadline_s:g} s"
        return DeadlineExceeded(told, code="DEADLINE_EXCEEDED")


def _ended() -> PerfcastError:
    return Unavailable("the server has ended the stream", code="UNAVAILABLE")


class StepStream(_Asked):
    """Steps one after another over one stream. A refused step raises and leaves the stream usable.

    A stream that breaks is opened again, and what was not answered is asked again, for as long as a call may take. An
    answer that takes longer than that raises DeadlineExceeded.
    """

    def __init__(self, opened: Opened, engine: EngineLike, deadline_s: float) -> None:
        super().__init__(engine, deadline_s)
        self._opened = opened
        self._lock, self._taken_by = threading.Lock(), 0
        self._outbox: queue.SimpleQueue[prediction_pb2.StreamStepsRequest | None] = queue.SimpleQueue()
        self._call: Any = None
        self._awaited = self._given_up = 0  # steps by their sequence, which begins with 1
        self._closed = threading.Event()  # one for each call

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            self._closed.set()
            self._outbox.put(None)
            call.cancel()

    def predict_ms(self, step: Step) -> float:
        """The latency of ``step``."""
        with self._turn():
            return self._receive(self._send(step))

    def predict_all_ms(self, steps: Iterable[Step]) -> Iterator[float]:
        """Latencies in order; all steps are sent ahead of the first answer."""
        with self._turn():
            for sequence in [self._send(step) for step in steps]:
                yield self._receive(sequence)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Threads take turns; one that asks in its own turn would wait for itself."""
        if self._taken_by == threading.get_ident():
            raise ClientMisuse("predict_all_ms is not at its end: take all of it, close it, or use another stream")
        with self._lock:
            self._taken_by = threading.get_ident()
            try:
                yield
            finally:
                self._taken_by = 0

    def _send(self, step: Step) -> int:
        message = self._message(self._sequence + 1, step, self._call is None)  # raises on a step that cannot be sent
        sequence = self._ask(step)
        if self._call is None:
            self._open()
        else:
            self._outbox.put(message)
        return sequence

    def _open(self) -> None:
        outbox: queue.SimpleQueue[prediction_pb2.StreamStepsRequest | None] = queue.SimpleQueue()
        for number, (sequence, step) in enumerate(self._unanswered):
            outbox.put(self._message(sequence, step, number == 0))
        self._outbox, self._closed, self._call = outbox, threading.Event(), self._opened(iter(outbox.get, None))
        threading.Thread(target=self._watch, args=(self._call, self._closed), daemon=True).start()

    def _watch(self, call: Any, closed: threading.Event) -> None:
        """End a call whose caller waits for the same answer for too long: gRPC has deadlines for whole streams only."""
        seen = looks = 0
        while call.is_active() and not closed.wait(self._deadline_s / LOOKS):
            looks = looks + 1 if seen == self._awaited else 0
            seen = self._awaited
            if seen and looks == LOOKS:
                self._given_up = seen
                call.cancel()

    def _receive(self, sequence: int) -> float:
        self._awaited = sequence
        try:
            return self._received(sequence)
        finally:
            self._awaited = 0

    def _received(self, sequence: int) -> float:
        patience: Patience | None = None
        while True:
            try:
                for answer in self._call:
                    if self._is_answer(answer, sequence):
                        return calls.stream_answer(answer)
                failed = _ended()
            except grpc.RpcError as error:
                failed = self._overdue() if self._given_up == sequence else calls.failure(error)
            self.close()
            patience = patience or Patience(self._deadline_s)
            try:
                time.sleep(patience.pause_s(failed))
            except PerfcastError:
                self._unanswered.clear()
                raise
            self._open()


class AsyncStepStream(_Asked):
    """As ``StepStream``, for one event loop."""

    def __init__(self, opened: Opened, engine: EngineLike, deadline_s: float) -> None:
        super().__init__(engine, deadline_s)
        self._opened = opened
        self._lock = asyncio.Lock()
        self._call: Any = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            call.cancel()

    async def predict_ms(self, step: Step) -> float:
        """The latency of ``step``. Tasks that ask at once take turns."""
        async with self._lock:
            return await self._predict_ms(step)

    async def _predict_ms(self, step: Step) -> float:
        self._unanswered.clear()
        self._message(self._sequence + 1, step, False)  # raises on a step that cannot be sent
        sequence = self._ask(step)
        patience: Patience | None = None
        while True:
            told = await self._try(sequence, step)
            if not isinstance(told, PerfcastError):
                return calls.stream_answer(told)
            self.close()
            patience = patience or Patience(self._deadline_s)
            await asyncio.sleep(patience.pause_s(told))

    async def _try(self, sequence: int, step: Step) -> prediction_pb2.StreamStepsResponse | PerfcastError:
        try:
            async with asyncio.timeout(self._deadline_s):
                return await self._answer(sequence, step)
        except grpc.aio.AioRpcError as error:
            return calls.failure(error)
        except TimeoutError:
            return self._overdue()

    async def _answer(self, sequence: int, step: Step) -> prediction_pb2.StreamStepsResponse | PerfcastError:
        is_new = self._call is None or self._call.done()
        if is_new:
            self._call = self._opened()
        try:
            await self._call.write(self._message(sequence, step, is_new))
        except asyncio.InvalidStateError:  # it has ended since the last step
            return _ended()
        except grpc.aio.AioRpcError as error:  # INTERNAL is what gRPC has for a connection that broke under a write
            if error.code() is grpc.StatusCode.INTERNAL:
                return _ended()
            raise
        answer: Any
        while (answer := await self._call.read()) is not grpc.aio.EOF:
            if self._is_answer(answer, sequence):
                return cast(prediction_pb2.StreamStepsResponse, answer)
        return _ended()
