"""Ten times as many calls as a server can answer: it answers what it can as fast as ever, and refuses the rest at once.

    python -m tests.proof.overload [--seconds S] [--times N]

The calls take a tenth of a second each (estimates that price 2,000 decode steps one by one) and come at random. Fails
if a process ends, if the p99 of the answered calls is more than SLOWER times that of a single caller alone, if a call
fails otherwise than by LIMIT, if a refusal takes more than REFUSED_S longer than the slowest call of a bare echo beside
it, or if memory grows by more than GROWTH over the second half. Asked beside it, now and then: new single steps, which
are never refused, and that echo, in a process of its own, which tells how much of all this is the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from typing import Any

import grpc
from perfcast_client import Client

from benchmarks import echo
from benchmarks.processes import server
from tests.proof.load import CONFIG, OPTIONS, WORK, Heard, closed, on, opened, share
from tests.proof.memory import MIB, resident
from tests.server.running import process

SLOWER, REFUSED_S, GROWTH = 3.0, 0.020, 0.05
STEPS_PER_S = 20.0


@contextmanager
def sampled(pid: int) -> Iterator[list[int]]:
    """Bytes resident, several times a second."""
    samples: list[int] = []
    stop = threading.Event()

    def sample() -> None:
        while not stop.wait(0.25):
            samples.append(sum(total for total, _ in resident(pid).values()))

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        stop.set()
        thread.join()


Loop = tuple[str, str, Iterator[bytes], float]  # where, what, with which requests, how many a second


async def at_once(loops: Sequence[Loop], seconds: float) -> list[Heard]:
    """Open loops side by side, each over a connection of its own."""
    async with AsyncExitStack() as stack:
        going = []
        for address, path, requests, rate in loops:
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(address, OPTIONS))
            going.append(opened(channel.unary_unary(path), requests, rate, seconds))
        return await asyncio.gather(*going)


def overload(seconds: float, times: float, *flags: str) -> tuple[list[str], dict[str, Any]]:
    """What is wrong, and the figures."""
    with process(*flags) as served, server("benchmarks.echo") as bare:
        address = served.address
        with Client(address) as client:
            handle = client.resolve(CONFIG).handle
        path, made = WORK["estimate"]
        asked, steps = made(handle), WORK["step"][1](handle)
        on(address, path, partial(closed, requests=asked, callers=3, seconds=max(3, seconds / 10)))
        alone: Heard = on(address, path, partial(closed, requests=asked, callers=1, seconds=max(5, seconds / 5)))
        step_alone: Heard = on(address, WORK["step"][0], partial(closed, requests=steps, callers=1, seconds=2))
        capacity = on(address, path, partial(closed, requests=asked, callers=3, seconds=max(5, seconds / 5))).per_s
        with sampled(served.popen.pid) as memory:
            loops: list[Loop] = [
                (address, path, asked, times * capacity),
                (address, WORK["step"][0], steps, STEPS_PER_S),
                (bare, echo.UNARY, itertools.repeat(echo.request(200, 100)), STEPS_PER_S),
            ]
            heard, beside, echoed = asyncio.run(at_once(loops, seconds))
        ended = served.popen.poll() is not None or bool(served.logged("worker ended"))
    refused = heard.refused.pop("LIMIT", [])
    half = memory[len(memory) // 2 :]
    growth = max(half[-8:]) - max(half[:8])
    ratio = share(heard.answered, 0.99) / share(alone.answered, 0.99)
    allowed_s = REFUSED_S + max(echoed.answered)
    wrong = [
        *(["a process ended"] if ended else []),
        *([f"other failures: { {k: len(v) for k, v in heard.refused.items()} }"] if heard.refused else []),
        *([f"steps refused: { {k: len(v) for k, v in beside.refused.items()} }"] if beside.refused else []),
        *(["nothing was refused: this was no overload"] if not refused else []),
        *([f"answered calls took {ratio:.1f} times as long as alone"] if not ratio <= SLOWER else []),
        *([f"a refusal took {max(refused) * 1e3:.0f} ms"] if refused and max(refused) > allowed_s else []),
        *([f"memory grew by {growth / MIB:.0f} MiB"] if growth > max(8 * MIB, GROWTH * half[0]) else []),
    ]
    return wrong, {
        "seconds": seconds,
        "capacity_per_s": round(capacity, 1),
        "asked_per_s": round(heard.asked / heard.took_s + len(refused) / heard.took_s, 1),
        "answered": len(heard.answered),
        "refused": len(refused),
        "alone_p50_ms": round(share(alone.answered, 0.5) * 1e3, 2),
        "alone_p99_ms": round(share(alone.answered, 0.99) * 1e3, 2),
        "answered_p50_ms": round(share(heard.answered, 0.5) * 1e3, 2),
        "answered_p99_ms": round(share(heard.answered, 0.99) * 1e3, 2),
        "p99_ratio": round(ratio, 2),
        "refused_p50_ms": round(share(refused, 0.5) * 1e3, 2),
        "refused_p99_ms": round(share(refused, 0.99) * 1e3, 2),
        "refused_longest_ms": round(max(refused, default=0.0) * 1e3, 2),
        "refused_within_20_ms_percent": round(100 * sum(s <= REFUSED_S for s in refused) / max(1, len(refused)), 2),
        "step_alone_p99_ms": round(share(step_alone.answered, 0.99) * 1e3, 2),
        "step_beside_p50_ms": round(share(beside.answered, 0.5) * 1e3, 2),
        "step_beside_p99_ms": round(share(beside.answered, 0.99) * 1e3, 2),
        "echo_beside_p50_ms": round(share(echoed.answered, 0.5) * 1e3, 2),
        "echo_beside_p99_ms": round(share(echoed.answered, 0.99) * 1e3, 2),
        "echo_beside_longest_ms": round(max(echoed.answered) * 1e3, 2),
        "rss_mib": [round(memory[0] / MIB, 1), round(half[0] / MIB, 1), round(memory[-1] / MIB, 1)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.proof.overload", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--times", type=float, default=10.0, help="of the capacity")
    parser.add_argument("flags", nargs="*", help="of the server, after --")
    options = parser.parse_args()
    began = time.monotonic()
    wrong, figures = overload(options.seconds, options.times, *options.flags)
    print(json.dumps(figures, indent=2))
    for what in wrong:
        print(what)
    print(f"took {time.monotonic() - began:.0f} s")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
