"""Step queries over loopback alone and beside a running search, in the same rounds.

    python -m benchmarks.beside_search [--rounds N] [--calls N] [--json]

Every round asks the same number of new steps three times: alone, beside searches that follow one another without a
pause, and beside a process that merely keeps a core busy at the priority of a search. Ratios are taken within a round;
the median over rounds is reported.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import grpc
from perfcast_client import Client, EngineConfig, SearchTask, Targets, Workload
from perfcast_server.search_process import NICENESS

from benchmarks.processes import environment, server
from benchmarks.step_queries import CONFIG, PREDICT_STEP, Seconds, Shapes, put_point, timed

TASK = SearchTask(
    engine=EngineConfig(model="Qwen/Qwen3-235B-A22B-FP8", system="h200_sxm", backend="trtllm"),
    workload=Workload(isl=4000, osl=500),
    targets=Targets(ttft_ms=2000, tpot_ms=30),
    total_gpus=64,
)


def search_on(address: str) -> None:
    """Searches one after another, no two alike, until standard input ends; says when the first is under way."""
    import threading
    from dataclasses import replace

    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    with Client(address) as client:
        for number in range(1, sys.maxsize):
            targets = Targets(ttft_ms=2000 + number % 1000 + os.getpid() * 1e-6, tpot_ms=30)
            for _ in client.search(replace(TASK, targets=targets)):
                if number == 1:
                    print("under way", flush=True)


def burn() -> None:
    """Keep a core busy at the priority of a search."""
    import threading

    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    os.nice(NICENESS)
    print("under way", flush=True)
    while True:
        sum(range(10_000))


@contextmanager
def beside(*arguments: str) -> Iterator[None]:
    """This module as another process, from when it is under way to the end of the block."""
    child = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.beside_search", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    assert child.stdin is not None and child.stdout is not None
    child.stdout.readline()
    try:
        yield
    finally:
        child.stdin.close()
        child.wait(10)


def asker(channel: grpc.Channel, handle: str) -> Callable[[int], Seconds]:
    """Seconds of n new decode steps, one after another."""
    from perfcast.v1 import prediction_pb2

    call, shapes = channel.unary_unary(PREDICT_STEP), Shapes()

    def ask(n: int) -> Seconds:
        requests = []
        for point in shapes.decode(n):
            message = prediction_pb2.PredictStepRequest(handle=handle)
            put_point(message.decode_step, point)
            requests.append(message.SerializeToString())
        return timed(call, requests)

    return ask


def measure(rounds: int, number: int) -> list[dict[str, Any]]:
    with server("perfcast_cli", "serve", "--port", "0", "--metrics-port", "-1") as address, Client(address) as client:
        handle = client.resolve(CONFIG).handle
        with grpc.insecure_channel(address) as channel:
            ask = asker(channel, handle)
            arms: dict[str, Callable[[], AbstractContextManager[None]]] = {
                "alone": nullcontext,
                "beside searches": lambda: beside("--search", address),
                "beside a busy core": lambda: beside("--burn"),
            }
            ask(number)
            rows: dict[str, list[tuple[float, float]]] = {name: [] for name in arms}
            for _ in range(rounds):
                for name, other in arms.items():
                    with other():
                        time.sleep(0.2)
                        seconds = sorted(ask(number))
                    rows[name].append((statistics.median(seconds), seconds[int(number * 0.99)]))
    found = []
    for name, own in rows.items():
        entry: dict[str, Any] = {"arm": name}
        for i, part in enumerate(("p50", "p99")):
            entry[f"{part}_us"] = 1e6 * statistics.median(row[i] for row in own)
            pairs = zip(own, rows["alone"], strict=True)
            entry[f"{part}_ratio"] = statistics.median(row[i] / alone[i] for row, alone in pairs)
        found.append(entry)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.beside_search", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--calls", type=int, default=1000, help="step queries of an arm in one round")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--search", help=argparse.SUPPRESS)
    parser.add_argument("--burn", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.search:
        search_on(options.search)
    if options.burn:
        burn()
    found = measure(options.rounds, options.calls)
    if options.json:
        print(json.dumps(found, indent=2))
        return
    print(f"{'PredictStep, new step':<24}{'p50 us':>10}{'p99 us':>10}{'p50 x':>8}{'p99 x':>8}")
    for entry in found:
        numbers = f"{entry['p50_us']:>10.0f}{entry['p99_us']:>10.0f}"
        print(f"{entry['arm']:<24}{numbers}{entry['p50_ratio']:>8.2f}{entry['p99_ratio']:>8.2f}")


if __name__ == "__main__":
    main()
