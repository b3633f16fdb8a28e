"""Searches that nobody wants any more: how soon their caller hears so, and how soon their CPU work ends.

    python -m benchmarks.cancelling [--number N] [--busy N] [--seed N] [--json]

Searches of seconds are ended at random moments, by turns by a cancellation and by a deadline. Told are, in ms from that
moment: until the caller has its status; until no process below the server's works any more, which is when it sleeps,
is gone, or will never run again as it has been killed; until the killed one has left the machine, for which it needs a
turn at a CPU; the longest time between two looks at /proc, which says how far the rest can be trusted; and from its own
start until a new search gives its first word. ``--busy`` keeps as many processes busy beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
from perfcast.v1 import common_pb2, search_pb2, serving_pb2

from benchmarks.processes import server

SEARCH = "/perfcast.v1.Search/Search"
FIGURES = (
    "cancelled, status",
    "deadline, status",
    "no more work",
    "process gone",
    "kept waiting itself",
    "next search, first word",
)
LAST_MOMENT_S = 1.0
WORKING = "RD"  # states of a process: running or ready to run, waiting for a disk
EXITING, KILLED = 0x4, 0x100  # among its flags, among its pending signals


def request(number: int, model: str = "deepseek-ai/DeepSeek-V3") -> bytes:
    """A search like no other, which takes seconds."""
    return search_pb2.SearchRequest(
        engine=common_pb2.EngineConfig(model_id=model, system="h200_sxm", backend="sglang"),
        workload=serving_pb2.Workload(isl_tokens=5000, osl_tokens=1500),
        targets=search_pb2.Targets(ttft_ms=2000 + number, tpot_ms=30),
        backends=["sglang", "trtllm"],
        total_gpus=256,
    ).SerializeToString()


def below(pid: int) -> dict[int, list[str]]:
    """The fields of /proc/PID/stat from the state on, of every process that descends from ``pid``."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            fields = _read(entry / "stat").rpartition(")")[2].split()
            if fields:
                found[int(entry.name)] = fields
    family, fresh = set[int](), {pid}
    while fresh:
        fresh = {child for child, fields in found.items() if int(fields[1]) in fresh}
        family |= fresh
    return {child: found[child] for child in family}


def works(pid: int, fields: list[str]) -> bool:
    """Whether a process will run any more of its own instructions soon."""
    if fields[0] not in WORKING or int(fields[6]) & EXITING:
        return False
    pending = _read(Path(f"/proc/{pid}/status")).partition("SigPnd:")[2].split()
    return bool(pending) and not int(pending[0], 16) & KILLED


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""  # it has ended meanwhile


def ms_until_idle(pid: int, since: float) -> tuple[float, float, float]:
    """Until nothing below ``pid`` works; until nothing wants a CPU, twice in a row; the longest time between looks."""
    idle, gone, last, longest = 0.0, 0.0, 0.0, 0.0
    while True:
        now = 1000 * (time.perf_counter() - since)
        last, longest = now, max(longest, now - (last or now))
        family = below(pid)
        idle = (idle or now) if not any(works(*process) for process in family.items()) else 0.0
        if any(fields[0] in WORKING for fields in family.values()):
            gone = 0.0
        elif gone:
            return idle, gone, longest
        else:
            gone = now
        time.sleep(0.001)


@contextmanager
def burner() -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", "while True: sum(range(10_000))"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def measure(number: int, rng: random.Random) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in FIGURES}
    with (
        server("perfcast_cli", "serve", "--port", "0", "--metrics-port", "-1", "--search-workers", "1") as address,
        grpc.insecure_channel(address) as channel,
    ):
        (pid,) = (child for child in below(os.getpid()) if "serve" in _read(Path(f"/proc/{child}/cmdline")))
        search = channel.unary_stream(SEARCH)

        def first_word(at: int) -> float:
            began = time.perf_counter()
            call = search(request(at))
            next(call)
            word = 1000 * (time.perf_counter() - began)
            call.cancel()
            ms_until_idle(pid, began)
            return word

        first_word(0)
        for at in range(1, number + 1):
            moment = rng.uniform(0, LAST_MOMENT_S)
            if at % 2:
                call = search(request(at))
                next(call)
                time.sleep(moment)
                ended = time.perf_counter()
                call.cancel()
                assert call.code() is grpc.StatusCode.CANCELLED
                found["cancelled, status"].append(1000 * (time.perf_counter() - ended))
            else:
                ended = time.perf_counter() + moment + 0.05
                call = search(request(at), timeout=moment + 0.05)
                try:
                    for _ in call:
                        pass
                    raise SystemExit("the search was over too soon; make it longer")
                except grpc.RpcError as error:
                    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
                found["deadline, status"].append(1000 * (time.perf_counter() - ended))
            for name, ms in zip(FIGURES[2:5], ms_until_idle(pid, ended), strict=True):
                found[name].append(ms)
            found["next search, first word"].append(first_word(-at))
        zombies = [child for child, fields in below(pid).items() if fields[0] == "Z"]
        assert not zombies, f"processes {zombies} were not waited for"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cancelling", description=__doc__.splitlines()[0])
    parser.add_argument("--number", type=int, default=120, help="searches to end")
    parser.add_argument("--busy", type=int, default=0, help="processes that keep cores busy meanwhile")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with ExitStack() as busy:
        for _ in range(options.busy):
            busy.enter_context(burner())
        load = os.getloadavg()[0]
        found = measure(options.number, random.Random(options.seed))
    report = {"load": {"before": load, "after": os.getloadavg()[0], "cores": os.cpu_count()}}
    for name, times in found.items():
        if times:
            p99 = statistics.quantiles(times, n=100, method="inclusive")[98]
            report[name] = {"n": len(times), "median": statistics.median(times), "p99": p99, "max": max(times)}
    if options.json:
        print(json.dumps(report))
        return
    for name, figures in report.items():
        print(f"{name:<32}", *(f"{key} {value:>8.1f}" for key, value in figures.items() if value is not None))


if __name__ == "__main__":
    main()
