"""Step queries over loopback, beside a bare gRPC echo of the same message sizes in the same rounds.

    python -m benchmarks.step_queries [--rounds N] [--calls N] [--echo asyncio|uvloop|threads] [--json]

Every round runs every arm once, in an order of its own: what follows a busy arm finds its processor awake, which is
worth a sixth of a call. A ratio is taken within a round, and the median over rounds is reported: of the median and the
99th percentile of a call, and of the time a call takes where many are under way (1 / throughput).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import queue
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
from perfcast.v1 import prediction_pb2
from perfcast_client import Client, DecodeStep, EngineConfig, Prefill, calls

from benchmarks import echo
from benchmarks.processes import server

MODEL, SYSTEM, BACKEND, TP = "Qwen/Qwen3-32B-FP8", "h200_sxm", "trtllm", 4
CONFIG = EngineConfig(model=MODEL, system=SYSTEM, backend=BACKEND, tp=TP)
CALLERS = 32
BATCH_POINTS = 10_000
STREAMED_ANSWER_BYTES = 12
MOST_P99 = 1.5
PREDICT_STEP = calls.PREDICTION + "PredictStep"
PREDICT_STEPS = calls.PREDICTION + "PredictSteps"
Seconds = list[float]


@dataclass(frozen=True)
class Arm:
    """One thing that is timed: ``run(n)`` gives the seconds of n calls; ``beside`` names the arm to compare with, and
    ``most`` how many times as long as that its median call may take, or a call of its throughput if ``crowd``."""

    name: str
    run: Callable[[int], Seconds]
    beside: str | None = None
    most: float = 0.0
    crowd: bool = False


def timed(call: Callable[[Any], Any], arguments: Sequence[Any]) -> Seconds:
    seconds = []
    for argument in arguments:
        began = time.perf_counter()
        call(argument)
        seconds.append(time.perf_counter() - began)
    return seconds


class Shapes:
    """Never the same step twice."""

    def __init__(self) -> None:
        self._next: Iterator[int] = itertools.count()

    def prefill(self, n: int) -> list[tuple[int, int, int]]:
        return [(1 + i % 16, 200 + 3 * (i // 16), 0) for i in itertools.islice(self._next, n)]

    def decode(self, n: int) -> list[tuple[int, int, int]]:
        return [(1 + i % 256, 300 + 5 * (i // 256) + i % 7, 100 + i % 900) for i in itertools.islice(self._next, n)]


def loopback(address: str, echo_address: str, shapes: Shapes, stack: ExitStack) -> list[Arm]:
    channel = stack.enter_context(grpc.insecure_channel(address, [("grpc.max_receive_message_length", 16 << 20)]))
    bare = stack.enter_context(grpc.insecure_channel(echo_address, [("grpc.max_receive_message_length", 16 << 20)]))
    client = stack.enter_context(Client(address))
    engine = client.resolve(CONFIG)
    step, steps = channel.unary_unary(PREDICT_STEP), channel.unary_unary(PREDICT_STEPS)
    unary = bare.unary_unary(echo.UNARY)

    def request(point: tuple[int, int, int]) -> bytes:
        message = prediction_pb2.PredictStepRequest(handle=engine.handle)
        put_point(message.decode_step, point)
        return message.SerializeToString()

    known = request((8, 4096, 512))
    alike = echo.request(len(known), len(step(known)))
    columns = calls.predict_many(engine, DecodeStep(np.arange(BATCH_POINTS) % 256 + 1, 1000, 128), False, False, False)

    def large(n: int) -> list[bytes]:
        requests = []
        for isl in shapes.decode(max(1, n // 100)):
            columns.request.decode_step.isl_tokens[0] = isl[1]
            requests.append(columns.request.SerializeToString())
        return requests

    alike_streamed = echo.request(len(stream_messages("", [(8, 4096, 512)] * 2)[1]), STREAMED_ANSWER_BYTES)
    alike_large = echo.request(len(large(1)[0]), len(steps(large(1)[0])))

    def new(n: int) -> list[bytes]:
        return [request(point) for point in shapes.decode(n)]

    def by_client(n: int) -> Seconds:
        return timed(lambda point: client.predict(engine, Prefill(*point)), shapes.prefill(n))

    def sent(n: int) -> Seconds:
        return streamed(channel, calls.STREAM_STEPS, stream_messages(engine.handle, shapes.decode(n)))

    def crowd(where: str, method: str, requests: Callable[[int], list[bytes]]) -> Callable[[int], Seconds]:
        return lambda n: concurrent(where, method, requests(n))

    def talk(n: int) -> Seconds:
        return in_turn(channel, calls.STREAM_STEPS, stream_messages(engine.handle, shapes.decode(n)))

    echo_large, echo_crowd = f"echo of {BATCH_POINTS:,} points", f"echo, {CALLERS} callers"
    kept_crowd, new_crowd = (f"PredictStep, {what}, {CALLERS} callers" for what in ("kept answer", "new step"))
    return [
        Arm("echo", lambda n: timed(unary, [alike] * n)),
        Arm("PredictStep, kept answer", lambda n: timed(step, [known] * n), "echo", 1.15),
        Arm("PredictStep, new step", lambda n: timed(step, new(n)), "echo", 1.40),
        Arm("Client.predict, new step", by_client, "echo"),
        Arm(echo_large, lambda n: timed(unary, [alike_large] * max(1, n // 100))),
        Arm(f"PredictSteps, {BATCH_POINTS:,} points", lambda n: timed(steps, large(n)), echo_large),
        Arm("echo stream, in turn", lambda n: in_turn(bare, echo.STREAM, [alike_streamed] * n)),
        Arm("StreamSteps, in turn", talk, "echo stream, in turn", 1 / 0.8),
        Arm("echo stream, all sent", lambda n: streamed(bare, echo.STREAM, [alike_streamed] * n)),
        Arm("StreamSteps, all sent", sent, "echo stream, all sent", 1 / 0.8),
        Arm(echo_crowd, crowd(echo_address, echo.UNARY, lambda n: [alike] * n), crowd=True),
        Arm(kept_crowd, crowd(address, PREDICT_STEP, lambda n: [known] * n), echo_crowd, 1 / 0.85, crowd=True),
        Arm(new_crowd, crowd(address, PREDICT_STEP, new), echo_crowd, 1 / 0.85, crowd=True),
    ]


def put_point(step: prediction_pb2.DecodeStep, point: tuple[int, int, int]) -> None:
    step.batch_per_rank, step.isl_tokens, step.osl_tokens = point


def stream_messages(handle: str, points: list[tuple[int, int, int]]) -> list[bytes]:
    messages = []
    for sequence, point in enumerate(points):
        message = prediction_pb2.StreamStepsRequest(sequence=sequence)
        if not sequence:
            message.handle = handle
        put_point(message.decode_step, point)
        messages.append(message.SerializeToString())
    return messages


def streamed(channel: grpc.Channel, method: str, messages: list[bytes]) -> Seconds:
    """All messages through one stream; the mean time of one."""
    began = time.perf_counter()
    answers = sum(1 for _ in channel.stream_stream(method)(iter(messages)))
    assert answers == len(messages)
    return [(time.perf_counter() - began) / answers]


def in_turn(channel: grpc.Channel, method: str, messages: list[bytes]) -> Seconds:
    """Each message after the answer to the one before it, as a simulator asks."""
    outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    answers = channel.stream_stream(method)(iter(outbox.get, None))

    def ask(message: bytes) -> None:
        outbox.put(message)
        next(answers)

    seconds = timed(ask, messages)
    outbox.put(None)
    return seconds


def concurrent(address: str, method: str, requests: list[bytes]) -> Seconds:
    """All requests by CALLERS callers at once."""

    async def run() -> Seconds:
        async with grpc.aio.insecure_channel(address) as channel:
            call, waiting, seconds = channel.unary_unary(method), iter(requests), []
            await call(requests[0])

            async def caller() -> None:
                for request in waiting:
                    began = time.perf_counter()
                    await call(request)
                    seconds.append(time.perf_counter() - began)

            await asyncio.gather(*(caller() for _ in range(CALLERS)))
            return seconds

    return asyncio.run(run())


def measure(arms: list[Arm], rounds: int, number: int) -> list[dict[str, Any]]:
    for arm in arms:
        arm.run(max(200, number // 5))
    rows: dict[str, list[tuple[float, float]]] = {arm.name: [] for arm in arms}
    dice = random.Random(1)
    for _ in range(rounds):
        for arm in dice.sample(arms, len(arms)):
            seconds = sorted(arm.run(number))
            # CALLERS calls are under way all the time, so that the mean of a call over them is 1 / throughput
            usual = statistics.fmean(seconds) / CALLERS if arm.crowd else statistics.median(seconds)
            rows[arm.name].append((usual, seconds[int(len(seconds) * 0.99)]))
    found = []
    for arm in arms:
        usual, p99 = (statistics.median(column) for column in zip(*rows[arm.name], strict=True))
        entry: dict[str, Any] = {"arm": arm.name, "us": usual * 1e6, "p99_us": p99 * 1e6}
        if arm.beside is not None:
            pairs = list(zip(rows[arm.name], rows[arm.beside], strict=True))
            entry["beside"] = arm.beside
            entry["ratio"], entry["p99_ratio"] = (
                statistics.median(own[i] / other[i] for own, other in pairs) for i in (0, 1)
            )
            if arm.most:
                entry["most"] = arm.most
        found.append(entry)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step_queries", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--calls", type=int, default=400, help="calls of an arm in one round")
    parser.add_argument("--echo", choices=echo.KINDS, default=echo.KINDS[0], help="what the bare server runs on")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with ExitStack() as stack:
        address = stack.enter_context(server("perfcast_cli", "serve", "--port", "0", "--metrics-port", "-1"))
        echo_address = stack.enter_context(server("benchmarks.echo", options.echo))
        found = measure(loopback(address, echo_address, Shapes(), stack), options.rounds, options.calls)
    if options.json:
        print(json.dumps(found, indent=2))
        return
    print(f"{'':<42}{'us':>9}{'p99 us':>9}{'x':>7}{'at most':>9}{'p99 x':>7}  beside")
    for entry in found:
        line = f"{entry['arm']:<42}{entry['us']:>9.1f}{entry['p99_us']:>9.1f}"
        if "beside" in entry:
            most = f"{entry['most']:.2f}" if "most" in entry else ""
            line += f"{entry['ratio']:>7.2f}{most:>9}{entry['p99_ratio']:>7.2f}  {entry['beside']}"
        print(line)
    print(f"p99 x: at most {MOST_P99}")


if __name__ == "__main__":
    main()
