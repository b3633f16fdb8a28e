"""Columns by their bytes are the columns of the messages."""

from __future__ import annotations

import numpy as np
import pytest
from perfcast.v1 import prediction_pb2
from perfcast_server import packed


@pytest.mark.parametrize("n", [0, 1, 31, 32, 5000])
def test_columns_are_those_of_the_message(n: int) -> None:
    values = np.arange(n) * 7 - 3
    message = prediction_pb2.DecodeTrajectoryColumns(
        batch_per_rank=values, isl_tokens=[1, 2], beam_width=1 << 40, stride=-1
    )
    found = packed.columns(message)
    assert found.pop("isl_tokens").tolist() == [1, 2]
    assert {name: column.tolist() for name, column in found.items()} == (
        {"batch_per_rank": values.tolist()} if n else {}
    )


def test_columns_that_came_unpacked_are_read_too() -> None:
    one = bytes([8 << 0 | 5]) + (77).to_bytes(4, "little")  # field 1, a single fixed32
    message = prediction_pb2.PrefillColumns.FromString(one * 3)
    assert packed.columns(message)["batch_per_rank"].tolist() == [77] * 3
    imbalance = prediction_pb2.PrefillColumns(attention_imbalance=[0.5, float("inf")])
    assert packed.columns(imbalance)["attention_imbalance"].tolist() == [0.5, float("inf")]


@pytest.mark.parametrize("n", [0, 1, 15, 16, 5000])
def test_what_is_put_is_what_is_read(n: int) -> None:
    message = prediction_pb2.PredictStepsResponse()
    values = np.linspace(0, 1, n)
    packed.put(message, "latency_ms", values)
    assert list(message.latency_ms) == values.tolist()
    assert prediction_pb2.PredictStepsResponse(latency_ms=values) == message
