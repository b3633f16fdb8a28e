"""Random requests to every RPC, as bytes and as fields: each is answered with finite numbers or refused with a reason.

    python -m tests.proof.fuzz [--requests N] [--senders N] [--workers N] [--seed N]

Fails on an ended process, an unforeseen error in a log, a status INTERNAL, UNKNOWN, UNAVAILABLE, CANCELLED or one that
has no ErrorInfo, a number that is not finite, or a hang: a request that takes a server more than HANG_S of processor
time, and POINT_S for each point that it asks for, when it is asked again, alone, of a fresh server that keeps no
answers. Whatever took longer than HANG_S on the clock is asked again. Not so the searches, which end after MAX_SEARCH_S
in processes of their own, and the list of all models that are supported, which is made in a thread.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2

from tests.proof.memory import children
from tests.proof.requests import Rpc, made, rpcs
from tests.server.running import Process, process

HANG_S, PATIENCE_S, MAX_SEARCH_S = 1.0, 60.0, 2.0
POINT_S = 10e-6
AT_ONCE = 12  # requests of a sender under way
BATCH = 2_000
MAY_TAKE_LONG = ("/perfcast.v1.Search/Search", "/perfcast.v1.Search/Recommend", "/perfcast.v1.Catalog/ListSupport")
WEIGHTS = {
    "PredictStep": 45.0, "PredictSteps": 20.0, "ResolveEngine": 4.0, "Estimate": 4.0, "StreamSteps": 5.0,
    "EstimateMemory": 2.0, "CheckSupport": 1.0, "EstimatePasses": 3.0, "QueueDrain": 2.0, "DecodeItl": 3.0,
    "Capacity": 1.0, "Coverage": 0.2, "GetSurface": 0.2, "ListSupport": 0.02, "Generate": 0.3,
    "Bootstrap": 0.3, "FitLatencyLaw": 0.1, "Search": 0.02, "Recommend": 0.02,
}  # fmt: skip
FORBIDDEN = tuple(
    getattr(grpc.StatusCode, name) for name in ("INTERNAL", "UNKNOWN", "UNAVAILABLE", "CANCELLED", "UNIMPLEMENTED")
)
FLAGS = ("--max-wait-s", "20", "--max-search-s", str(MAX_SEARCH_S), "--max-engines", "32", "--max-searches", "64")
Sent = tuple[Rpc, list[bytes]]  # several requests for a stream of them


@dataclass
class Told:
    """What came of the requests of one sender, or of all."""

    requests: int = 0
    by_rpc: Counter[str] = field(default_factory=Counter)
    by_code: Counter[str] = field(default_factory=Counter)
    bad: list[str] = field(default_factory=list)
    slow: list[tuple[float, str, list[bytes]]] = field(default_factory=list)

    def add(self, other: Told) -> None:
        self.requests += other.requests
        self.by_rpc += other.by_rpc
        self.by_code += other.by_code
        self.bad += other.bad
        self.slow += other.slow


def is_finite(message: Message) -> bool:
    descriptor: Any
    for descriptor, value in message.ListFields():
        values = value if descriptor.is_repeated else [value]
        if descriptor.type == descriptor.TYPE_MESSAGE:
            if not descriptor.message_type.GetOptions().map_entry and not all(map(is_finite, values)):
                return False
        elif descriptor.type in (descriptor.TYPE_DOUBLE, descriptor.TYPE_FLOAT) and not all(map(math.isfinite, values)):
            return False
    return True


def why_bad(code: grpc.StatusCode, text: str, trailers: Any) -> str | None:
    """What is wrong with a refusal."""
    if code in FORBIDDEN:
        return f"{code.name}: {text}"
    told = dict(trailers or ()).get("grpc-status-details-bin")
    if told is None:
        by_grpc = code is grpc.StatusCode.DEADLINE_EXCEEDED or "larger than max" in text or "unknown service" in text
        return None if by_grpc else f"{code.name} without a reason: {text}"
    info = error_details_pb2.ErrorInfo()
    details = status_pb2.Status.FromString(told).details
    return None if details and details[0].Unpack(info) and info.reason else f"{code.name} without a reason: {text}"


async def ask(channel: grpc.aio.Channel, sent: Sent, told: Told) -> None:
    rpc, requests = sent
    began = time.monotonic()
    code, wrong = grpc.StatusCode.OK, None
    try:
        if rpc.takes_many:
            answers = await ask_in_turn(channel.stream_stream(rpc.path)(timeout=PATIENCE_S), requests)
        elif rpc.tells_many:
            answers = [data async for data in channel.unary_stream(rpc.path)(requests[0], timeout=PATIENCE_S)]
        else:
            answers = [await channel.unary_unary(rpc.path)(requests[0], timeout=PATIENCE_S)]
        if not all(is_finite(rpc.response.FromString(data)) for data in answers):
            wrong = "an answer that is not finite"
    except grpc.aio.AioRpcError as error:
        code = error.code()
        wrong = why_bad(code, error.details() or "", error.trailing_metadata())
    seconds = time.monotonic() - began
    told.requests += len(requests)
    told.by_rpc[rpc.path] += len(requests)
    told.by_code[code.name] += 1
    if wrong is not None:
        told.bad.append(f"{rpc.path} {[data[:2000] for data in requests]}: {wrong}")
    if seconds > HANG_S and rpc.path not in MAY_TAKE_LONG:
        told.slow.append((seconds, rpc.path, requests))


async def ask_in_turn(call: Any, requests: list[bytes]) -> list[bytes]:
    """The answers of a stream, up to the request that ends it."""
    answers: list[bytes] = []
    for data in requests:
        await call.write(data)
        answer = await call.read()
        if answer is grpc.aio.EOF:
            return answers
        answers.append(answer)
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    return answers


def drawn(seed: int, number: int) -> Iterator[Sent]:
    """So many requests, the same for the same seed."""
    dice = random.Random(seed)
    every = rpcs()
    weights = [WEIGHTS.get(rpc.path.rpartition("/")[2], 1.0) for rpc in every]
    while number > 0:
        (rpc,) = dice.choices(every, weights)
        requests = [made(rpc, dice) for _ in range(dice.randrange(1, 5) if rpc.takes_many else 1)]
        number -= len(requests)
        yield rpc, requests


def batch(address: str, seed: int, number: int) -> Told:
    """Send a batch, in a process of its own."""
    told = Told()

    async def run() -> None:
        options = [("grpc.max_receive_message_length", 64 << 20), ("grpc.max_send_message_length", 64 << 20)]
        waiting = drawn(seed, number)
        async with grpc.aio.insecure_channel(address, [*options, ("grpc.use_local_subchannel_pool", 1)]) as channel:

            async def caller() -> None:
                for sent in waiting:
                    await ask(channel, sent, told)

            await asyncio.gather(*(caller() for _ in range(AT_ONCE)))

    asyncio.run(run())
    return told


@contextmanager
def served(*more: str) -> Iterator[Process]:
    with tempfile.TemporaryDirectory() as folder, process("--state-dir", folder, *FLAGS, *more) as server:
        yield server


def processor_s(pid: int) -> float:
    """Seconds of processor time of a server's processes that are alive, without those that search."""
    ticks = 0
    for each in children(pid):
        with open(f"/proc/{each}/stat") as stat:
            ticks += sum(map(int, stat.read().rpartition(")")[2].split()[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


def points(rpc: Rpc, data: bytes) -> int:
    """How many points a request asks for, as far as that is not told by its size: the samples of trajectories."""
    try:
        message: Any = rpc.request.FromString(data)
        asked = message.decode_trajectory
    except (AttributeError, DecodeError):
        return 0
    columns = (getattr(asked, name) for name in ("osl_tokens", "stride"))
    lengths, strides = (column if isinstance(column, int) else max(column, default=0) for column in columns)
    return int(lengths / max(1, strides or 32))


def hangs(slow: list[tuple[float, str, list[bytes]]], most: int = 50) -> tuple[list[str], float]:
    """Those of the slow ones that take too much of a server that does nothing else; and the most that any takes."""
    by_path, longest, found = {rpc.path: rpc for rpc in rpcs()}, 0.0, []
    if not slow:
        return [], 0.0
    with served("--response-cache-bytes", "0") as server:
        address, pid = server.address, server.popen.pid

        async def again(path: str, requests: list[bytes]) -> float:
            async with grpc.aio.insecure_channel(address, [("grpc.max_receive_message_length", 64 << 20)]) as channel:
                before = processor_s(pid)
                await ask(channel, (by_path[path], requests), Told())
                return processor_s(pid) - before

        for seconds, path, requests in sorted(slow, key=lambda entry: -entry[0])[:most]:
            alone = asyncio.run(again(path, requests)) - POINT_S * sum(points(by_path[path], data) for data in requests)
            longest = max(longest, alone)
            if alone > HANG_S:
                text = [data[:2000] for data in requests]
                found.append(f"{path} {text}: a hang, {alone:.1f} s of processor time, {seconds:.1f} s in the crowd")
    return found, longest


def fuzz(number: int, senders: int, seed: int, workers: int = 1, timed: bool = True) -> tuple[Told, dict[str, Any]]:
    """``timed``: look for hangs too."""
    told, began = Told(), time.monotonic()
    with served("--workers", str(workers)) as server:
        address = server.address
        if senders == 0:
            told.add(batch(address, seed, number))
        else:
            with ProcessPoolExecutor(senders, multiprocessing.get_context("spawn")) as pool:
                parts = [min(BATCH, number - at) for at in range(0, number, BATCH)]
                batches = [pool.submit(batch, address, seed + at, part) for at, part in enumerate(parts)]
                for done, each in enumerate(as_completed(batches), 1):
                    told.add(each.result())
                    if done % 20 == 0:
                        rate = told.requests / (time.monotonic() - began)
                        counts = f"{len(told.bad)} bad, {len(told.slow)} slow"
                        print(f"{told.requests} requests, {rate:.0f}/s, {counts}", file=sys.stderr, flush=True)
        seconds = time.monotonic() - began
        if server.popen.poll() is not None or server.logged("worker ended"):
            told.bad.append("a server process has ended")
    told.bad += [line for line in server.lines if "unforeseen error" in line or line.startswith("Traceback")]
    hung, longest_alone_s = hangs(told.slow if timed else [])
    told.bad += hung
    return told, {
        "requests": told.requests,
        "seed": seed,
        "requests_per_s": round(told.requests / seconds),
        "by_code": dict(told.by_code),
        "by_rpc": {path.rpartition("/")[2]: number for path, number in sorted(told.by_rpc.items())},
        "longer_than_1_s_in_the_crowd": len(told.slow),
        "longest_of_those_alone_processor_s": round(longest_alone_s, 2),
        "bad": len(told.bad),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.proof.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--senders", type=int, default=2, help="processes that send; 0 is this one")
    parser.add_argument("--workers", type=int, default=1, help="processes that answer")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    told, found = fuzz(options.requests, options.senders, options.seed, options.workers)
    print(json.dumps(found, indent=2))
    for line in told.bad[:50]:
        print(line[:3000])
    sys.exit(bool(told.bad))


if __name__ == "__main__":
    main()
