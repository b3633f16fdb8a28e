"""Servers that go away: what a client asks again, for how long, and what it leaves alone."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import grpc
import numpy as np
import pytest
from perfcast.v1 import catalog_pb2, prediction_pb2
from perfcast_client import AsyncClient, Client, DecodeStep, EngineConfig, Prefill, errors
from perfcast_client.patience import FIRST_PAUSE_S, LONGEST_PAUSE_S, Patience

from tests.client.stand_in import standing_in

CONFIG = EngineConfig(model="Qwen/Qwen3-32B-FP8", system="h200_sxm", backend="trtllm", tp=4)
UNARY, STREAM = grpc.unary_unary_rpc_method_handler, grpc.stream_stream_rpc_method_handler
Answer = Callable[[Any, grpc.ServicerContext], Any]
PATIENCE_S = 60.0


def info(_: bytes, context: grpc.ServicerContext) -> bytes:
    return catalog_pb2.GetServerInfoResponse(version="9", api_revision=99).SerializeToString()


def answering(method: str, handler: grpc.RpcMethodHandler) -> AbstractContextManager[str]:
    """A server of the current contract with one RPC of Prediction that behaves as is wanted here."""
    return standing_in({"perfcast.v1.Catalog/GetServerInfo": UNARY(info), f"perfcast.v1.Prediction/{method}": handler})


def test_patience_waits_longer_each_time_and_never_past_the_deadline() -> None:
    now = 100.0
    patience = Patience(10.0, lambda: now)
    away = errors.Unavailable("away", code="UNAVAILABLE")
    pauses = []
    with pytest.raises(errors.Unavailable, match="away"):
        for _ in range(100):
            pauses.append(patience.pause_s(away))
            now += pauses[-1]
    assert pauses[:3] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    assert max(pauses) == LONGEST_PAUSE_S and 10.0 - LONGEST_PAUSE_S <= sum(pauses) < 10.0
    assert patience.left_s == pytest.approx(10.0 - sum(pauses))


@pytest.mark.parametrize(
    "lasting",
    [
        errors.LimitExceeded("full", reason="LIMIT"),
        errors.InvalidRequest("no", reason="INVALID_FIELD"),
        errors.Unavailable("the disk is full", reason="STATE_STORE"),
    ],
)
def test_what_will_not_pass_is_not_tried_again(lasting: errors.PerfcastError) -> None:
    with pytest.raises(type(lasting)) as caught:
        Patience(10.0).pause_s(lasting)
    assert caught.value is lasting


def test_time_that_ran_out_while_the_server_was_away_says_that_it_is_away() -> None:
    patience, late = Patience(10.0), errors.DeadlineExceeded("late", code="DEADLINE_EXCEEDED")
    with pytest.raises(errors.DeadlineExceeded):
        patience.pause_s(late)
    patience.pause_s(errors.Unavailable("away", code="UNAVAILABLE"))
    with pytest.raises(errors.Unavailable, match="away"):
        patience.pause_s(late)


def predicting(failures: int, code: grpc.StatusCode, sizes: list[int]) -> Answer:
    """Fails so many times, then answers."""

    def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
        sizes.append(len(request))
        if len(sizes) <= failures:
            context.abort(code, "as told")
        return prediction_pb2.PredictStepsResponse(latency_ms=[7.0]).SerializeToString()

    return answer


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED])
@pytest.mark.parametrize("points", [1, 200_000])
def test_a_known_server_is_asked_again_until_it_answers(code: grpc.StatusCode, points: int) -> None:
    """More often than gRPC alone would, and also with more than it would keep unless told to."""
    sizes: list[int] = []
    steps = DecodeStep(np.arange(points) % 99 + 1, np.arange(points) % 999 + 1, np.full(points, 128))
    with answering("PredictSteps", UNARY(predicting(6, code, sizes))) as address, Client(address) as client:
        assert client.predict_many(CONFIG, steps, deadline_s=PATIENCE_S).latency_ms.tolist() == [7.0]
    assert len(sizes) == 7 and len(set(sizes)) == 1


async def test_the_asyncio_client_asks_again_too() -> None:
    sizes: list[int] = []
    with answering("PredictSteps", UNARY(predicting(6, grpc.StatusCode.CANCELLED, sizes))) as address:
        async with AsyncClient(address) as client:
            told = await client.predict_many(CONFIG, Prefill(np.ones(3, int), 128), deadline_s=PATIENCE_S)
    assert told.latency_ms.tolist() == [7.0] and len(sizes) == 7


def test_other_failures_are_told_at_once() -> None:
    sizes: list[int] = []
    answer = predicting(1, grpc.StatusCode.RESOURCE_EXHAUSTED, sizes)
    with (
        answering("PredictSteps", UNARY(answer)) as address,
        Client(address) as client,
        pytest.raises(errors.LimitExceeded),
    ):
        client.predict_many(CONFIG, Prefill(1, 128))
    assert len(sizes) == 1


def breaking(after: int, opened: list[str]) -> Answer:
    """A stream that breaks after so many answers; each is the length of its prompt."""

    def answers(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        for number, data in enumerate(requests):
            request = prediction_pb2.StreamStepsRequest.FromString(data)
            if number == 0:
                opened.append(request.config.model_id)
            if number == after:
                context.abort(grpc.StatusCode.UNAVAILABLE, "as told")
            told = prediction_pb2.StreamStepsResponse(sequence=request.sequence, latency_ms=request.prefill.isl_tokens)
            yield told.SerializeToString()

    return answers


def test_a_stream_that_breaks_is_opened_again_and_goes_on_where_it_was() -> None:
    opened: list[str] = []
    with (
        answering("StreamSteps", STREAM(breaking(3, opened))) as address,
        Client(address, deadline_s=PATIENCE_S) as client,
        client.stream(CONFIG) as stream,
    ):
        assert [stream.predict_ms(Prefill(1, n)) for n in range(1, 8)] == list(range(1, 8))
        assert list(stream.predict_all_ms(Prefill(1, n) for n in range(10, 20))) == list(range(10, 20))
        abandoned = stream.predict_all_ms(Prefill(1, n) for n in range(30, 34))
        assert next(abandoned) == 30
        abandoned.close()
        assert stream.predict_ms(Prefill(1, 40)) == 40
    assert len(opened) > 5 and set(opened) == {CONFIG.model}


async def test_an_asyncio_stream_that_breaks_is_opened_again() -> None:
    opened: list[str] = []
    with answering("StreamSteps", STREAM(breaking(3, opened))) as address:
        async with AsyncClient(address, deadline_s=PATIENCE_S) as client, client.stream(CONFIG) as stream:
            assert [await stream.predict_ms(Prefill(1, n)) for n in range(1, 12)] == list(range(1, 12))
            waiting = asyncio.ensure_future(stream.predict_ms(Prefill(1, 50)))
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            assert await stream.predict_ms(Prefill(1, 60)) == 60
    assert len(opened) >= 4 and set(opened) == {CONFIG.model}


def test_a_stream_that_was_given_up_can_be_asked_again() -> None:
    broken = itertools.chain([True], itertools.repeat(False))

    def answers(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        if next(broken):
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "as told")
        for data in requests:
            sequence = prediction_pb2.StreamStepsRequest.FromString(data).sequence
            yield prediction_pb2.StreamStepsResponse(sequence=sequence, latency_ms=5.0).SerializeToString()

    with (
        answering("StreamSteps", STREAM(answers)) as address,
        Client(address) as client,
        client.stream(CONFIG) as stream,
    ):
        with pytest.raises(errors.LimitExceeded):
            stream.predict_ms(Prefill(1, 1))
        assert stream.predict_ms(Prefill(1, 2)) == 5.0


def mute_at_first(opened: list[int]) -> Answer:
    """A stream that answers nothing the first time that it is opened; then each answer is the length of its prompt."""

    def answers(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        opened.append(1)
        mute = len(opened) == 1
        for data in requests:
            if not mute:
                told = prediction_pb2.StreamStepsRequest.FromString(data)
                answer = prediction_pb2.StreamStepsResponse(sequence=told.sequence, latency_ms=told.prefill.isl_tokens)
                yield answer.SerializeToString()

    return answers


@pytest.mark.parametrize("ahead", [False, True])
def test_an_answer_of_a_stream_that_does_not_come_is_overdue(ahead: bool) -> None:
    opened: list[int] = []
    with (
        answering("StreamSteps", STREAM(mute_at_first(opened))) as address,
        Client(address) as client,
        client.stream(CONFIG, deadline_s=0.4) as hasty,
        client.stream(CONFIG, deadline_s=PATIENCE_S) as stream,
    ):
        with pytest.raises(errors.DeadlineExceeded, match=r"within 0\.4 s"):
            list(hasty.predict_all_ms([Prefill(1, 1), Prefill(1, 2)])) if ahead else hasty.predict_ms(Prefill(1, 1))
        assert stream.predict_ms(Prefill(1, 3)) == 3
    assert len(opened) == 2


async def test_an_answer_of_an_asyncio_stream_that_does_not_come_is_overdue_too() -> None:
    opened: list[int] = []
    with answering("StreamSteps", STREAM(mute_at_first(opened))) as address:
        async with AsyncClient(address) as client, client.stream(CONFIG, deadline_s=0.4) as hasty:
            with pytest.raises(errors.DeadlineExceeded, match=r"within 0\.4 s"):
                await hasty.predict_ms(Prefill(1, 1))
    assert len(opened) == 1


def test_a_stream_of_a_closed_client_says_so() -> None:
    with answering("StreamSteps", STREAM(breaking(99, []))) as address:
        client = Client(address)
        stream = client.stream(CONFIG)
        assert stream.predict_ms(Prefill(1, 1)) == 1
        client.close()
        with pytest.raises(errors.ClientMisuse, match="closed"):
            stream.predict_ms(Prefill(1, 2))
