"""An autoscaler over a synthetic day of arrivals, against a live server.

    python examples/autoscaling.py 127.0.0.1:50051 --minutes 20

Every 5 s it asks one EvaluateTick for all engines and adds one while each of them would miss its targets with the next
request, or removes one while the rest would carry its load with room to spare. Every 180 s it asks Capacity and makes
sure that there are enough engines for the rate. What the engines do in between is simulated as a fluid of requests.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

import numpy as np
from perfcast_client import Client, EngineConfig, planner
from perfcast_client.planner_types import RankLoad, RankPass, Scenario, TickAnswer, TickGroup, WorkerLoad

TICK_S, STEPS, THROUGHPUT_TICKS = 5.0, 50, 36
ISL, OSL, TTFT_S, ITL_S, ROOM = 3000, 150, 0.5, 0.05, 0.8


@dataclass
class Engine:
    """One engine as a fluid: requests that wait for prefill, and requests that decode."""

    waiting: float = 0.0
    decoding: float = 0.0

    def load(self, name: str) -> WorkerLoad:
        waiting, decoding = math.ceil(self.waiting), math.ceil(self.decoding)
        kv = decoding * (ISL + OSL // 2)
        rank = RankLoad(waiting, waiting * ISL, decode_requests=decoding, decode_kv_tokens=kv)
        return WorkerLoad(name, [rank], usual_prefill_tokens=512, usual_prefill_requests=1)

    def run(self, seconds: float, prompt_s: float, itl_s: float) -> None:
        """Prefill what waits, then decode for the rest of the time, at the pace of the predictions."""
        prefilled = min(self.waiting, seconds / prompt_s)
        left = seconds - prefilled * prompt_s
        finished = min(self.decoding, self.decoding * left / (itl_s * OSL))
        self.waiting -= prefilled
        self.decoding += prefilled - finished


def rate(minute: float, minutes: float) -> float:
    """Requests/s: a slow wave with a burst in the middle."""
    return 6 + 30 * math.sin(math.pi * minute / minutes) ** 2 + 25 * (0.45 < minute / minutes < 0.55)


def misses(answer: TickAnswer, scenario: int, room: float = 1.0) -> list[bool]:
    """Whether each engine would miss a target, or ``room`` of it."""
    told = [worker.outlooks[scenario] for worker in answer.workers]
    return [(o.drain_s or 0) > TTFT_S * room or (o.itl_s or 0) > ITL_S * room for o in told]


def autoscale(client: Client, minutes: float, seed: int = 0) -> list[tuple[float, float, int, float, float]]:
    """(minute, rate, engines, worst TTFT s, worst ITL s) for each tick."""
    rng = np.random.default_rng(seed)
    engine = client.resolve(EngineConfig(model="Qwen/Qwen3-32B-FP8", system="h200_sxm", backend="trtllm", tp=4))
    found = client.ask(planner.capacity(engine, isl=ISL, osl=OSL, ttft_s=TTFT_S, itl_s=ITL_S))
    assert found is not None
    prompt = client.ask(planner.estimate_passes(engine, [[RankPass(1, ISL)]])).latency_ms[0] / 1000
    pool, floor, seen, itl, history = [Engine()], 1, 0.0, ITL_S, []
    for tick in range(int(minutes * 60 / TICK_S)):
        minute = tick * TICK_S / 60
        for _ in range(STEPS):
            arrived = rng.poisson(rate(minute, minutes) * TICK_S / STEPS)
            seen += arrived
            for _ in range(arrived):
                min(pool, key=lambda e: (e.waiting, e.decoding)).waiting += 1
            for each in pool:
                each.run(TICK_S / STEPS, prompt, itl)
        if tick % THROUGHPUT_TICKS == THROUGHPUT_TICKS - 1:
            floor, seen = max(1, math.ceil(seen / (THROUGHPUT_TICKS * TICK_S) / found.rps)), 0.0
            pool += [Engine() for _ in range(floor - len(pool))]

        fewer = len(pool) / max(len(pool) - 1, 1)
        next_kv = ISL + OSL // 2
        scenarios = [
            Scenario(next_prompt_tokens=ISL, next_decode_kv_tokens=next_kv),
            Scenario(queue_scale=fewer, decode_scale=fewer, next_prompt_tokens=ISL, next_decode_kv_tokens=next_kv),
        ]
        workers = [each.load(f"engine-{number}") for number, each in enumerate(pool)]
        (answer,) = client.ask(planner.evaluate_tick([TickGroup(engine=engine, workers=workers, scenarios=scenarios)]))
        outlooks = [worker.outlooks[0] for worker in answer.workers]
        worst_ttft = max(o.drain_s or 0.0 for o in outlooks)
        worst_itl = max(o.itl_s or 0.0 for o in outlooks)
        history.append((minute, rate(minute, minutes), len(pool), worst_ttft, worst_itl))

        itl = worst_itl
        if all(misses(answer, 0)):
            pool.append(Engine())
        elif len(pool) > floor and not any(misses(answer, 1, ROOM)):
            gone = pool.pop()
            pool[0].waiting += gone.waiting
            pool[0].decoding += gone.decoding
    return history


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("server", nargs="?", default="127.0.0.1:50051")
    options.add_argument("--minutes", type=float, default=20.0, help="length of the trace")
    given = options.parse_args()
    with Client(given.server) as client:
        for minute, requests, engines, ttft, itl in autoscale(client, given.minutes)[::6]:
            print(
                f"{minute:6.1f} min {requests:6.1f} requests/s {engines:3d} engines  "
                f"next TTFT {ttft * 1000:7.1f} ms  ITL {itl * 1000:5.1f} ms"
            )


if __name__ == "__main__":
    main()
