"""Everything that a server can be asked, for half an hour, while its data change: memory must not grow.

    python -m tests.proof.soak [--minutes N] [--workers N] [--json]

Caches are small, so that they are full before the measuring begins. Fails if a call fails for another reason than what
it asks, or if the resident memory of all processes, as the median over the last fifth of the time, is more than
GROWTH above that over the fifth after the warm-up.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from perfcast_client import (
    Aggregated,
    Client,
    DecodeStep,
    DecodeTrajectory,
    EngineConfig,
    Mixed,
    Prefill,
    SearchTask,
    Workload,
    calibration,
    errors,
    planner,
)
from perfcast_client.planner_types import RankPass

from tests.proof.memory import MIB, resident
from tests.server.running import Process, process
from tests.server.test_reload import SHEET, Place, faster

GROWTH = 0.05
SLACK_BYTES = 16 * MIB  # of an allocator, in a run of a minute
WARM_SHARE, WINDOW_SHARE = 0.3, 0.2
SAMPLE_S, RELOAD_S = 1.0, 60.0
FULL_SOON = (
    *("--response-cache-bytes", str(2 * MIB), "--max-surface-bytes", str(8 * MIB), "--max-engines", "12"),
    *("--max-engine-bytes", str(128 * MIB)),
    *("--max-handles", "32", "--max-wait-s", "5", "--max-states", "64"),
)
MODELS = (
    *("Qwen/Qwen3-32B-FP8", "Qwen/Qwen3-30B-A3B", "openai/gpt-oss-120b", "deepseek-ai/DeepSeek-V3", "no/such-model"),
)
SYSTEMS, BACKENDS = ("h200_sxm", "h100_sxm", "b200_sxm"), ("trtllm", "vllm", "sglang")
FAULTS = (errors.ServerFault, errors.Unavailable, errors.DeadlineExceeded, errors.DamagedSurface)
Ask = Callable[[Client, random.Random], object]


def engine(dice: random.Random) -> EngineConfig:
    return EngineConfig(
        model=dice.choice(MODELS),
        system=dice.choice(SYSTEMS),
        backend=dice.choice(BACKENDS),
        tp=dice.choice((1, 2, 4, 8)),
        database_mode=dice.choice(("silicon", "hybrid")),
    )


def usual(dice: random.Random) -> EngineConfig:
    return EngineConfig(model=MODELS[0], system="h200_sxm", backend="trtllm", tp=dice.choice((2, 4)))


def step(client: Client, dice: random.Random) -> None:
    kind = dice.choice(
        (Prefill(dice.randrange(1, 9), dice.randrange(1, 9000)), Mixed(dice.randrange(1, 4000), 8, 999, 99))
    )
    client.predict(usual(dice), kind, operators=dice.random() < 0.1)


def trajectory(client: Client, dice: random.Random) -> None:
    client.predict(usual(dice), DecodeTrajectory(dice.randrange(1, 64), 1000, dice.randrange(500, 5000), stride=1))


def steps(client: Client, dice: random.Random) -> None:
    number = dice.choice((10, 1_000, 20_000))
    points = DecodeStep(np.arange(number) % 256 + 1, dice.randrange(1, 9000), np.full(number, 128))
    client.predict_many(usual(dice), points, provenance=dice.random() < 0.3, operators=number == 10)


def new_engine(client: Client, dice: random.Random) -> None:
    client.predict(client.resolve(engine(dice)), Prefill(1, 128))


def stream(client: Client, dice: random.Random) -> None:
    with client.stream(usual(dice)) as stream:
        for _ in stream.predict_all_ms(Prefill(1, dice.randrange(1, 9000)) for _ in range(100)):
            pass


def surface(client: Client, dice: random.Random) -> None:
    config = replace(engine(dice), database_mode="silicon")
    client.get_surface(config, dice.choice((4096, 8192)))


def estimate(client: Client, dice: random.Random) -> None:
    config = engine(dice)
    client.estimate(
        Aggregated(engine=config, batch=dice.choice((1, 8, 64))), Workload(isl=dice.randrange(9, 9999), osl=99)
    )
    client.estimate_memory(config)


def plan(client: Client, dice: random.Random) -> None:
    client.ask(planner.capacity(usual(dice), isl=dice.randrange(100, 9000), osl=150, ttft_s=1.0, itl_s=0.05))


def learn(client: Client, dice: random.Random) -> None:
    name, config = f"state-{dice.randrange(16)}", usual(dice)
    record = RankPass(1, dice.randrange(1, 8000), 0, 4, 4000, dice.uniform(0.01, 0.4))
    client.ask(calibration.tune(config, name, [[record]], client_id="soak", sequence=time.monotonic_ns()))
    client.ask(calibration.diagnose(config, name))


def listing(client: Client, dice: random.Random) -> None:
    client.models(dice.choice(("qwen", "llama", "")))
    client.check_support(engine(dice))
    client.systems()


def search(client: Client, dice: random.Random) -> None:
    config = EngineConfig(model=dice.choice(MODELS[:2]), system="h200_sxm", backend=dice.choice(BACKENDS))
    task = SearchTask(engine=config, workload=Workload(isl=dice.randrange(500, 5000), osl=200), total_gpus=8)
    if dice.random() < 0.2:
        next(client.search(task))  # and leave
    else:
        client.search_result(task)


def wrong(client: Client, dice: random.Random) -> None:
    client.predict(usual(dice), Prefill(1, 1 + dice.randrange(100), prefix=500))


ASKS: tuple[Ask, ...] = (
    *(step, trajectory, steps, new_engine, stream, surface, estimate, plan, learn, listing, search, wrong),
)


@dataclass
class Soak:
    """What was asked and what it came to; ``samples`` are (seconds, bytes by kind of process)."""

    calls: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)
    samples: list[tuple[float, dict[str, tuple[int, int]]]] = field(default_factory=list)
    reloads: int = 0

    def window(self, begin: float, end: float) -> tuple[float, float]:
        """Medians in a part of the time, given as shares of it: of all bytes, and of those not backed by a file."""
        last = self.samples[-1][0]
        part = [told for at, told in self.samples if begin * last <= at <= end * last]
        return (
            statistics.median(sum(total for total, _ in told.values()) for told in part),
            statistics.median(sum(anonymous for _, anonymous in told.values()) for told in part),
        )

    @property
    def growth(self) -> tuple[float, float]:
        """Bytes, in all and of those not backed by a file."""
        before, after = self.window(WARM_SHARE, WARM_SHARE + WINDOW_SHARE), self.window(1 - WINDOW_SHARE, 1.0)
        return after[0] - before[0], after[1] - before[1]

    @property
    def allowed(self) -> float:
        return max(SLACK_BYTES, GROWTH * self.window(WARM_SHARE, WARM_SHARE + WINDOW_SHARE)[0])

    @property
    def is_flat(self) -> bool:
        return max(self.growth) <= self.allowed


def caller(address: str, ask: Ask, told: Soak, stop: threading.Event, pause_s: float) -> None:
    dice = random.Random(ask.__name__)
    with Client(address, deadline_s=60.0) as client:
        while not stop.wait(pause_s):
            told.calls[ask.__name__] += 1
            try:
                ask(client, dice)
            except FAULTS as error:
                told.failed.append(f"{ask.__name__}: {type(error).__name__} {error.reason}: {error}")
            except errors.PerfcastError as error:
                told.refused[error.reason] += 1
            except Exception as error:
                told.failed.append(f"{ask.__name__}: {error!r}")


@contextmanager
def callers(address: str, told: Soak, pause_s: float) -> Iterator[None]:
    stop = threading.Event()
    threads = [threading.Thread(target=caller, args=(address, ask, told, stop, pause_s), daemon=True) for ask in ASKS]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(90)
        told.failed += ["a caller hangs" for thread in threads if thread.is_alive()]


def soak(seconds: float, workers: int, pause_s: float = 0.02, say: Callable[[str], None] = lambda line: None) -> Soak:
    told = Soak()
    with tempfile.TemporaryDirectory() as folder:
        place = Place(Path(folder))
        flags = ("--data", str(place.root), "--state-dir", str(Path(folder) / "states"), "--workers", str(workers))
        with process(*FULL_SOON, *flags) as served, callers(served.address, told, pause_s):
            _watch(served, place, told, seconds, say)
        if served.popen.returncode != 0:
            told.failed.append(f"the server ended with {served.popen.returncode}")
    told.failed += [line for line in served.lines if '"level": "error"' in line or "Traceback" in line]
    return told


def _watch(served: Process, place: Place, told: Soak, seconds: float, say: Callable[[str], None]) -> None:
    began = reloaded = said = time.monotonic()
    while (now := time.monotonic()) < began + seconds:
        told.samples.append((now - began, resident(served.popen.pid)))
        if now - reloaded > min(RELOAD_S, seconds / 8):
            reloaded, told.reloads = now, told.reloads + 1
            place.put(faster(2) if told.reloads % 2 else SHEET)
            served.popen.send_signal(signal.SIGHUP)
        if now - said > 60:
            said = now
            sizes = ", ".join(f"{kind} {total / MIB:.0f}" for kind, (total, _) in sorted(told.samples[-1][1].items()))
            say(f"{(now - began) / 60:5.1f} min: {sum(told.calls.values())} calls, MiB resident: {sizes}")
        time.sleep(SAMPLE_S)


def report(told: Soak) -> dict[str, Any]:
    first, last = told.window(WARM_SHARE, WARM_SHARE + WINDOW_SHARE), told.window(1 - WINDOW_SHARE, 1.0)
    return {
        "minutes": round(told.samples[-1][0] / 60, 1),
        "calls": sum(told.calls.values()),
        "calls_by_kind": dict(told.calls),
        "refused_by_reason": dict(told.refused),
        "reloads": told.reloads,
        "failed": len(told.failed),
        "rss_mib_after_warm_up": round(first[0] / MIB, 1),
        "rss_mib_at_the_end": round(last[0] / MIB, 1),
        "anonymous_mib_after_warm_up": round(first[1] / MIB, 1),
        "anonymous_mib_at_the_end": round(last[1] / MIB, 1),
        "allowed_growth_mib": round(told.allowed / MIB, 1),
        "is_flat": told.is_flat,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.proof.soak", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    told = soak(options.minutes * 60, options.workers, say=lambda line: print(line, file=sys.stderr, flush=True))
    print(json.dumps(report(told), indent=2))
    for line in told.failed[:40]:
        print(line)
    sys.exit(bool(told.failed) or not told.is_flat)


if __name__ == "__main__":
    main()
