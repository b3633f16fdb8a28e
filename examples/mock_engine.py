"""A mock engine: 100,000 iterations of continuous batching with chunked prefill, each timed in this process.

    python examples/mock_engine.py 127.0.0.1:50051 --requests-per-s 8

The scheduler is the usual one: what decodes goes first, with one token each; prompts in order of arrival fill the rest
of the token budget; one is let in when the KV cache has room for the whole request. The clock is what the surface says,
and no server is asked but for steps beyond what was measured.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from perfcast_client import Client, EngineConfig, LocalSurface

TOKENS_PER_STEP, MAX_RUNNING, KV_TOKENS = 4096, 128, 250_000
MEAN_PROMPT, MAX_PROMPT, MEAN_OUTPUT, MAX_OUTPUT = 2000, 8000, 200, 2000


@dataclass(slots=True)
class Request:
    arrived_s: float
    prompt: int
    output: int
    prefilled: int = 0

    @property
    def tokens(self) -> int:
        return self.prompt + self.output


Chunk = tuple[Request, int]  # and how many tokens of its prompt


@dataclass(frozen=True, slots=True)
class Replay:
    """What the engine did: of each request its time to first token, of each step its time and how many decoded."""

    simulated_s: float
    finished: int
    ttft_s: np.ndarray
    step_ms: np.ndarray
    decoding: np.ndarray


def arrivals(requests_per_s: float, seed: int) -> Iterator[Request]:
    """A Poisson stream of requests, prompts and outputs of exponential lengths."""
    rng, now = np.random.default_rng(seed), 0.0
    while True:
        now += rng.exponential(1 / requests_per_s)
        prompt, output = rng.exponential((MEAN_PROMPT, MEAN_OUTPUT))
        yield Request(now, min(1 + int(prompt), MAX_PROMPT), min(2 + int(output), MAX_OUTPUT))


def plan(waiting: deque[Request], decoding: int, room: int) -> list[Chunk]:
    """The prompts that the next step works on."""
    chunks: list[Chunk] = []
    budget = TOKENS_PER_STEP - decoding
    for request in waiting:
        room -= 0 if request.prefilled else request.tokens
        if budget == 0 or room < 0 or decoding + len(chunks) == MAX_RUNNING:
            break
        taken = min(budget, request.prompt - request.prefilled)
        budget -= taken
        chunks.append((request, taken))
    return chunks


def latency_ms(surface: LocalSurface, chunks: Sequence[Chunk], decoding: int, kv_tokens: int) -> float:
    """One step of the chunks, each as long as their mean, beside requests that hold ``kv_tokens`` together."""
    kv = kv_tokens // decoding if decoding else 0
    if not chunks:
        return surface.decode_step(decoding, kv, 1)
    prefix = sum(request.prefilled for request, _ in chunks) // len(chunks)
    isl = prefix + -(-sum(taken for _, taken in chunks) // len(chunks))
    if not decoding:
        return surface.prefill(len(chunks), isl, prefix)
    osl = max(1, 2 * (kv - isl))  # its decodes are in the middle of their output
    return surface.mixed(len(chunks) * isl, decoding, isl, osl, prefix)


def replay(surface: LocalSurface, steps: int, requests_per_s: float, seed: int = 0) -> Replay:
    """``steps`` iterations of an engine that starts empty."""
    trace = arrivals(requests_per_s, seed)
    coming = next(trace)
    waiting: deque[Request] = deque()
    leaving: dict[int, list[Request]] = {}  # by the step that makes their last token
    now, room, kv_tokens, decoding, finished = 0.0, KV_TOKENS, 0, 0, 0
    ttft_s, step_ms, batches = [], np.empty(steps), np.empty(steps, int)
    for step in range(steps):
        if not (waiting or decoding):
            now = max(now, coming.arrived_s)
        while coming.arrived_s <= now:
            waiting.append(coming)
            coming = next(trace)

        chunks = plan(waiting, decoding, room)
        batches[step] = decoding
        step_ms[step] = ms = latency_ms(surface, chunks, decoding, kv_tokens)
        now += ms / 1000

        kv_tokens += decoding
        for request in leaving.pop(step, ()):
            finished, decoding = finished + 1, decoding - 1
            kv_tokens -= request.tokens
            room += request.tokens
        for request, taken in chunks:
            room -= 0 if request.prefilled else request.tokens
            request.prefilled += taken
            if request.prefilled == request.prompt:  # its prefill makes the first token
                waiting.popleft()
                ttft_s.append(now - request.arrived_s)
                decoding, kv_tokens = decoding + 1, kv_tokens + request.prompt + 1
                leaving.setdefault(step + request.output - 1, []).append(request)
    return Replay(now, finished, np.array(ttft_s), step_ms, batches)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("server", nargs="?", default="127.0.0.1:50051")
    options.add_argument("--steps", type=int, default=100_000)
    options.add_argument("--requests-per-s", type=float, default=8.0)
    given = options.parse_args()
    engine = EngineConfig(model="Qwen/Qwen3-32B-FP8", system="h200_sxm", backend="trtllm", tp=4)
    with Client(given.server) as client, client.surface(engine) as surface:
        began = time.perf_counter()
        done = replay(surface, given.steps, given.requests_per_s)
        took = time.perf_counter() - began
    ttft, worst = np.quantile(done.ttft_s, [0.5, 0.99]) * 1000
    itl = np.average(done.step_ms, weights=done.decoding)
    print(f"{given.steps} steps, {done.simulated_s:.0f} s of the engine, replayed in {took:.2f} s")
    print(f"{done.finished} requests, {done.decoding.mean():.1f} of them decoding at a time")
    print(f"TTFT {ttft:.1f} ms, of one in a hundred above {worst:.1f} ms; mean ITL {itl:.2f} ms")


if __name__ == "__main__":
    main()
