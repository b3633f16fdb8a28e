"""Step queries over loopback, beside a bare gRPC echo of the same message sizes in the same rounds.

    python -m benchmarks.step_queries [--rounds N] [--calls N] [--json]

Every round runs every arm once, in turn; a ratio is taken within a round, and the median over rounds is reported.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
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
PREDICT_STEP = calls.PREDICTION + "PredictStep"
PREDICT_STEPS = calls.PREDICTION + "PredictSteps"
Seconds = list[float]


@dataclass(frozen=True)
class Arm:
    """One thing that is timed: ``run(n)`` gives the seconds of n calls; ``beside`` names the arm to compare with."""

    name: str
    run: Callable[[int], Seconds]
    beside: str | None = None


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

    echo_large, echo_crowd = f"echo of {BATCH_POINTS:,} points", f"echo, {CALLERS} callers"
    return [
        Arm("echo", lambda n: timed(unary, [alike] * n)),
        Arm("PredictStep, kept answer", lambda n: timed(step, [known] * n), "echo"),
        Arm("PredictStep, new step", lambda n: timed(step, new(n)), "echo"),
        Arm("Client.predict, new step", by_client, "echo"),
        Arm(echo_large, lambda n: timed(unary, [alike_large] * max(1, n // 100))),
        Arm(f"PredictSteps, {BATCH_POINTS:,} points", lambda n: timed(steps, large(n)), echo_large),
        Arm("echo stream", lambda n: streamed(bare, echo.STREAM, [alike_streamed] * n)),
        Arm("StreamSteps, new steps", sent, "echo stream"),
        Arm(echo_crowd, crowd(echo_address, echo.UNARY, lambda n: [alike] * n)),
        Arm(
            f"PredictStep, kept answer, {CALLERS} callers",
            crowd(address, PREDICT_STEP, lambda n: [known] * n),
            echo_crowd,
        ),
        Arm(f"PredictStep, new step, {CALLERS} callers", crowd(address, PREDICT_STEP, new), echo_crowd),
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


def concurrent(address: str, method: str, requests: list[bytes]) -> Seconds:
    """All requests by CALLERS callers at once; the time of one over all of them (1 / throughput)."""

    async def run() -> float:
        async with grpc.aio.insecure_channel(address) as channel:
            call, waiting = channel.unary_unary(method), iter(requests)
            await call(requests[0])

            async def caller() -> None:
                for request in waiting:
                    await call(request)

            began = time.perf_counter()
            await asyncio.gather(*(caller() for _ in range(CALLERS)))
            return time.perf_counter() - began

    return [asyncio.run(run()) / len(requests)]


def measure(arms: list[Arm], rounds: int, number: int) -> list[dict[str, Any]]:
    for arm in arms:
        arm.run(max(200, number // 5))
    rows: dict[str, list[tuple[float, float]]] = {arm.name: [] for arm in arms}
    for _ in range(rounds):
        for arm in arms:
            seconds = sorted(arm.run(number))
            rows[arm.name].append((statistics.median(seconds), seconds[int(len(seconds) * 0.99)]))
    found = []
    for arm in arms:
        p50, p99 = (statistics.median(column) for column in zip(*rows[arm.name], strict=True))
        entry: dict[str, Any] = {"arm": arm.name, "p50_us": p50 * 1e6, "p99_us": p99 * 1e6}
        if arm.beside is not None:
            pairs = list(zip(rows[arm.name], rows[arm.beside], strict=True))
            entry["beside"] = arm.beside
            entry["p50_ratio"], entry["p99_ratio"] = (
                statistics.median(own[i] / other[i] for own, other in pairs) for i in (0, 1)
            )
        found.append(entry)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step_queries", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--calls", type=int, default=1000, help="calls of an arm in one round")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    shapes = Shapes()
    with ExitStack() as stack:
        address = stack.enter_context(server("perfcast_cli", "serve", "--port", "0", "--metrics-port", "-1"))
        echo_address = stack.enter_context(server("benchmarks.echo"))
        found = measure(loopback(address, echo_address, shapes, stack), options.rounds, options.calls)
    if options.json:
        print(json.dumps(found, indent=2))
        return
    print(f"{'':<46}{'p50 us':>10}{'p99 us':>10}{'p50 x':>8}{'p99 x':>8}  beside")
    for entry in found:
        line = f"{entry['arm']:<46}{entry['p50_us']:>10.2f}{entry['p99_us']:>10.2f}"
        if "beside" in entry:
            line += f"{entry['p50_ratio']:>8.2f}{entry['p99_ratio']:>8.2f}  {entry['beside']}"
        print(line)


if __name__ == "__main__":
    main()
