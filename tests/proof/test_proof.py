"""A short part of each proof suite. The whole of each has a command of its own: see README.md beside this file."""

from __future__ import annotations

import random

from perfcast.v1 import prediction_pb2

from tests.proof import fault, fuzz, requests
from tests.proof.memory import MIB
from tests.proof.soak import Soak


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
