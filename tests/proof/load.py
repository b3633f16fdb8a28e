"""Closed and open loops of calls against a server in another process, and against a bare echo beside it.

    python -m tests.proof.load [--callers N] [--rate CALLS_PER_S] [--seconds S] [--workers N] [--work KIND ...]

Closed: so many callers, each asking the next when it has its answer. Open: calls come at random (Poisson) at a rate,
whatever became of those before; latencies count from when a call was due. Nothing is asked twice. Prints p50, p99,
calls per second and errors by reason; asserts nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc
import numpy as np
from perfcast_client import Client, DecodeStep, EngineConfig, Prefill, Static, Workload, calls, errors

from benchmarks import echo
from benchmarks.processes import server
from tests.server.running import process

CONFIG = EngineConfig(model="Qwen/Qwen3-32B-FP8", system="h200_sxm", backend="trtllm", tp=4)
OPTIONS = [("grpc.max_receive_message_length", 64 << 20), ("grpc.use_local_subchannel_pool", 1)]
ESTIMATE_TOKENS = 2000  # generated one by one: takes a server a tenth of a second
PATIENCE_S = 60.0


@dataclass
class Heard:
    """Seconds of the calls that were answered, and of those that were refused by reason."""

    answered: list[float] = field(default_factory=list)
    refused: dict[str, list[float]] = field(default_factory=dict)
    took_s: float = 0.0

    @property
    def asked(self) -> int:
        return len(self.answered) + sum(map(len, self.refused.values()))

    @property
    def per_s(self) -> float:
        return len(self.answered) / self.took_s


def share(seconds: list[float], part: float) -> float:
    """So large a part of them is not longer; NaN of none."""
    return float(np.quantile(seconds, part)) if seconds else float("nan")


async def ask(call: Any, data: bytes, due: float, heard: Heard) -> None:
    try:
        await call(data, timeout=PATIENCE_S)
    except grpc.aio.AioRpcError as error:
        told = errors.from_call(error.code(), "", error.trailing_metadata())
        heard.refused.setdefault(told.reason or told.code, []).append(time.perf_counter() - due)
    else:
        heard.answered.append(time.perf_counter() - due)


async def closed(call: Any, requests: Iterator[bytes], callers: int, seconds: float) -> Heard:
    heard, began = Heard(), time.perf_counter()

    async def caller() -> None:
        while (now := time.perf_counter()) < began + seconds:
            await ask(call, next(requests), now, heard)

    await asyncio.gather(*(caller() for _ in range(callers)))
    heard.took_s = time.perf_counter() - began
    return heard


async def arrivals(rate: float, seconds: float, dice: random.Random) -> AsyncIterator[float]:
    """When each call is due, at about that time."""
    now = began = time.perf_counter()
    while (now := now + dice.expovariate(rate)) < began + seconds:
        if (pause := now - time.perf_counter()) > 0:
            await asyncio.sleep(pause)
        yield now


async def opened(call: Any, requests: Iterator[bytes], rate: float, seconds: float) -> Heard:
    heard, began = Heard(), time.perf_counter()
    under_way: set[asyncio.Task[None]] = set()
    async for due in arrivals(rate, seconds, random.Random(1)):
        task = asyncio.get_running_loop().create_task(ask(call, next(requests), due, heard))
        under_way.add(task)
        task.add_done_callback(under_way.discard)
    await asyncio.gather(*under_way)
    heard.took_s = time.perf_counter() - began
    return heard


def on(address: str, path: str, loop: Callable[[Any], Any]) -> Heard:
    """Run one loop over a connection of its own."""

    async def run() -> Heard:
        async with grpc.aio.insecure_channel(address, OPTIONS) as channel:
            heard: Heard = await loop(channel.unary_unary(path))
            return heard

    return asyncio.run(run())


def step(handle: str) -> Iterator[bytes]:
    for n in itertools.count():
        call = calls.predict(handle, Prefill(1 + n % 16, 100 + n // 16 % 60_000), False)
        yield call.request.SerializeToString()


def steps(handle: str) -> Iterator[bytes]:
    batch = np.arange(10_000) % 256 + 1
    for n in itertools.count():
        yield calls.predict_many(handle, DecodeStep(batch, 1 + n, 128), False, False, False).request.SerializeToString()


def estimate(handle: str) -> Iterator[bytes]:
    for n in itertools.count():
        load = Workload(isl=1000 + n % 50_000, osl=ESTIMATE_TOKENS + n // 50_000)
        call = calls.estimate(Static(engine=handle, batch=32, stride=1), load, None, 0.0, False, True)
        yield call.request.SerializeToString()


WORK: Mapping[str, tuple[str, Callable[[str], Iterator[bytes]]]] = {
    "step": (calls.PREDICTION + "PredictStep", step),
    "steps": (calls.PREDICTION + "PredictSteps", steps),
    "estimate": (calls.SERVING + "Estimate", estimate),
}


def line(name: str, heard: Heard) -> str:
    p50, p99 = share(heard.answered, 0.5) * 1e3, share(heard.answered, 0.99) * 1e3
    refused = Counter({reason: len(seconds) for reason, seconds in heard.refused.items()})
    told = ", ".join(f"{reason} {number}" for reason, number in refused.items()) or "none"
    return f"{name:<44}{p50:>10.2f}{p99:>10.2f}{heard.per_s:>10.0f}  {told}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.proof.load", description=__doc__.splitlines()[0])
    parser.add_argument("--callers", type=int, default=32)
    parser.add_argument("--rate", type=float, help="calls per second; default: half of what the closed loop reached")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--work", nargs="*", choices=WORK, default=list(WORK))
    options = parser.parse_args()
    print(f"{'':<44}{'p50 ms':>10}{'p99 ms':>10}{'calls/s':>10}  errors")
    with ExitStack() as stack:
        served = stack.enter_context(process("--workers", str(options.workers)))
        bare = stack.enter_context(server("benchmarks.echo"))
        with Client(served.address) as client:
            handle = client.resolve(CONFIG).handle
        for name in options.work:
            path, made = WORK[name]
            requests = made(handle)
            size = len(next(requests))
            with grpc.insecure_channel(served.address, OPTIONS) as channel:
                answer = len(channel.unary_unary(path)(next(requests), timeout=PATIENCE_S))
            echoed = itertools.repeat(echo.request(size, answer))
            arms = ((name, served.address, path, requests), (f"echo of {name}", bare, echo.UNARY, echoed))
            for callers in dict.fromkeys((1, options.callers)):
                for arm, address, where, asked in arms:
                    loop = partial(closed, requests=asked, callers=callers, seconds=options.seconds)
                    heard = on(address, where, loop)
                    print(line(f"{arm}, closed, {callers} callers", heard), flush=True)
                    if arm == name:
                        rate = options.rate or max(1.0, heard.per_s / 2)
            for arm, address, where, asked in arms:
                loop = partial(opened, requests=asked, rate=rate, seconds=options.seconds)
                print(line(f"{arm}, open, {rate:.0f} calls/s", on(address, where, loop)), flush=True)


if __name__ == "__main__":
    main()
