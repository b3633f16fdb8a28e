"""What is asked with: read strictly, refused by path, told back."""

from __future__ import annotations

import dataclasses
import json

import pytest
from perfcast.v1 import search_pb2, serving_pb2
from perfcast_client import (
    Aggregated,
    Client,
    Disaggregated,
    EngineConfig,
    Images,
    KvTransfer,
    Pool,
    SearchTask,
    Space,
    Static,
    Targets,
    Workload,
)
from perfcast_client.errors import InvalidRequest

from tests.server.running import SEARCH_PATIENCE_S, Running

ENGINE = EngineConfig(model="Qwen/Qwen3-32B-FP8", system="h200_sxm", backend="trtllm", tp=4)
LOAD = Workload(isl=4000, osl=500, prefix=500, images=Images(count=1, height=720, width=1280))
TASK = SearchTask(
    engine=dataclasses.replace(ENGINE, tp=1),
    workload=LOAD,
    targets=Targets(ttft_ms=300, request_latency_ms=5000.0),
    backends=("vllm",),
    modes=("aggregated",),
    space=Space(tp=(1, 2)),
    kv_transfer=KvTransfer(bandwidth_bytes_per_s=5e10),
)
ASKED = [
    TASK,
    LOAD,
    Static(engine=ENGINE, batch=1, phases="decode"),
    Aggregated(engine="handle", batch=4, ctx_tokens=100),
    Disaggregated(prefill=Pool(engine=ENGINE, batch=1), decode=Pool(engine=ENGINE, batch=8, workers=2)),
]


@pytest.mark.parametrize("asked", ASKED, ids=lambda asked: type(asked).__name__)
def test_a_record_survives_a_dictionary_and_json(asked) -> None:
    assert type(asked).from_dict(json.loads(json.dumps(asked.to_dict()))) == asked


def test_units_stand_in_the_contract() -> None:
    message = TASK.put(search_pb2.SearchRequest())
    assert message.workload.isl_tokens == 4000 and message.workload.images.height_pixels == 720
    assert list(message.modes) == [serving_pb2.SERVING_MODE_AGGREGATED] and list(message.space.tp) == [1, 2]
    assert message.targets.tpot_ms == 0 and message.kv_transfer.concurrent_transfers == 1
    part = ASKED[3].put(serving_pb2.AggregatedDeployment())
    assert part.WhichOneof("engine") == "handle" and part.batch_per_rank == 4


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"modes": ["aggregate"]}, "modes[0]"),
        ({"objective": "speed"}, "objective"),
        ({"top": "many"}, "top"),
        ({"top": True}, "top"),
        ({"top": 0}, "top"),
        ({"total_gpus": 0}, "total_gpus"),
        ({"targets": {"ttft_ms": "soon"}}, "targets.ttft_ms"),
        ({"targets": {"ttft": 1}}, "targets.ttft"),
        ({"space": {"tp": [1, 2.5]}}, "space.tp[1]"),
        ({"workload": {"isl": 1}}, "workload.osl"),
        ({"engine": {"model": "m", "system": "s"}}, "engine.backend"),
        ({"engine": 3}, "engine"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_what_does_not_fit_is_refused_by_its_path(change, path: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SearchTask.from_dict(TASK.to_dict() | change).put(search_pb2.SearchRequest())
    assert caught.value.details["field"] == path


def test_results_are_frozen_and_json(served: Running) -> None:
    with Client(served.address, deadline_s=SEARCH_PATIENCE_S) as client:
        task = dataclasses.replace(TASK, workload=Workload(isl=4000, osl=500), targets=Targets(), total_gpus=8)
        found = client.search_result(task)
        told = json.loads(json.dumps(found.to_dict(), allow_nan=False))
        assert told["experiments"][0]["picks"][0]["workers"][0]["batch_per_rank"] > 0
        with pytest.raises(dataclasses.FrozenInstanceError):
            found.best = ""
        estimate = client.estimate(Aggregated(engine=ENGINE, batch=4), Workload(isl=100, osl=1))
        assert json.loads(json.dumps(estimate.to_dict(), allow_nan=False))["deployment"]["tpot_ms"] == 0
        memory = client.estimate_memory(ENGINE)
        assert json.loads(json.dumps(memory.to_dict(), allow_nan=False))["kv_cache_tokens"] == memory.kv_cache_tokens
