"""A short part of each proof suite. The whole of each has a command of its own: see README.md beside this file."""

from __future__ import annotations

import asyncio
import random
from functools import partial

from perfcast.v1 import prediction_pb2
from perfcast_client import Client

from tests.proof import fault, fuzz, load, overload, requests
from tests.proof.memory import MIB
from tests.proof.soak import Soak
from tests.server.running import process


def test_no_call_fails_while_a_worker_is_killed_and_another_stopped() -> None:
    assert not fault.killed_and_drained().failed


def test_random_requests_to_every_rpc_are_answered_or_refused_with_a_reason() -> None:
    told, _ = fuzz.fuzz(1000, senders=0, seed=7, timed=False)
    assert told.requests >= 1000
    assert not told.bad


def test_a_nested_message_is_as_deep_as_it_says() -> None:
    data = requests.nested(7, 300)
    for _ in range(300):
        assert data[0] == 7 << 3 | 2
        size, at = 0, 1
        for shift in range(0, 35, 7):
            size |= (data[at] & 127) << shift
            at += 1
            if data[at - 1] < 128:
                break
        assert len(data) == at + size
        data = data[at:]
    assert data == b""


def test_the_same_seed_makes_the_same_requests() -> None:
    def asked() -> list[bytes]:
        dice = random.Random(3)
        step = next(rpc for rpc in requests.rpcs() if rpc.request is prediction_pb2.PredictStepRequest)
        return [requests.made(step, dice) for _ in range(200)]

    assert asked() == asked()
    assert len(set(asked())) > 100


def test_memory_that_grows_is_told_from_memory_that_does_not() -> None:
    flat, grown = Soak(), Soak()
    for second in range(100):
        flat.samples.append((float(second), {"serve": (500 * MIB + second % 7, 400 * MIB)}))
        grown.samples.append((float(second), {"serve": ((500 + second) * MIB, 400 * MIB)}))
    assert flat.is_flat and not grown.is_flat


def test_more_calls_than_can_be_answered_are_answered_or_refused_by_limit() -> None:
    with process() as served:
        with Client(served.address) as client:
            handle = client.resolve(load.CONFIG).handle
        asked: list[overload.Loop] = []
        for kind, rate in (("estimate", 200.0), ("step", 20.0)):
            path, made = load.WORK[kind]
            asked.append((served.address, path, made(handle), rate))
        heard, beside = asyncio.run(overload.at_once(asked, 1.5))
        assert heard.answered and set(heard.refused) <= {"LIMIT"}
        assert beside.answered and set(beside.refused) <= {"LIMIT"}
        path, made = load.WORK["steps"]
        again = load.on(served.address, path, partial(load.closed, requests=made(handle), callers=4, seconds=0.5))
        assert again.answered and set(again.refused) <= {"LIMIT"}
        assert served.popen.poll() is None
