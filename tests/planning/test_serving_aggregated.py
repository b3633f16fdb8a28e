"""In-flight batching against a scalar transcription of spec/06 section 3, and what each switch of a profile mends."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from perfcast_engine.backends import BACKENDS
from perfcast_engine.errors import InvalidField
from perfcast_engine.profiles import CORRECTED, REFERENCE
from perfcast_planning.serving.aggregated import aggregated, schedule
from perfcast_planning.serving.workload import EngineLimits, Workload

from tests.planning.toy import worker

BACKEND_NAMES = sorted(BACKENDS)


def scalar_schedule(backend, b, c, isl, osl, a):
    d = 1 + max(osl - 1, 0) / a
    n = math.ceil(isl * b / c)
    vllm = backend == "vllm"
    if b == 1:
        q = 1 if vllm else min(2 + (n - 3) / 2 / 10, 4)
        return 1, 0, 0, max(d - 1, 0), 1, q
    rest = max(1, b - math.ceil(c / isl))
    q = min(1 + math.log2(b) / 8, 2) if vllm else min(2 + (n - 3) / 2 / 10, 4)
    if n >= d:
        return n, rest if vllm else max(1, b // (n / d)), n, 0, 0, q
    return n, rest, n if vllm else max(1, n - 3), d - n, b, q


@settings(deadline=None, max_examples=200)
@given(
    st.sampled_from(BACKEND_NAMES),
    st.integers(1, 512),
    st.integers(1, 20000),
    st.integers(1, 10000),
    st.integers(1, 4000),
    st.sampled_from([1.0, 1.7, 3.0]),
)
def test_schedule_is_the_references(backend, b, c, isl, osl, a):
    got = schedule(BACKENDS[backend], REFERENCE, np.array([float(b)]), np.array([float(c)]), isl, osl, a - 1)
    mixed, decodes, charged, only, requests, queue = scalar_schedule(backend, b, c, isl, osl, a)
    assert got.mixed[0] == mixed
    assert got.mixed_decodes[0] == decodes
    assert got.charged[0] == charged
    assert got.decode_only[0] == pytest.approx(only, rel=1e-12)
    assert got.decodes[0] == requests
    assert got.queue[0] == pytest.approx(queue, rel=1e-12)


def test_rates_follow_from_the_steps():
    engine, load = worker("trtllm", tp=2), Workload(2048, 128)
    row = aggregated(engine, load, 8, 2048).rows.row(0)
    mixed = engine.step.mixed(2048, 7, 2048, 128).ms[0]
    decode = engine.step.decode_step(8, 2048, 128).ms[0]
    assert row["ttft_ms"] == pytest.approx(mixed * (2 + 5 / 20))
    assert row["tpot_ms"] == pytest.approx((mixed * 5 + decode * 120) / 125)
    assert row["tokens_per_s"] == pytest.approx(1000 / (8 * mixed + 120 * decode) * 8 * 127)
    assert row["requests_per_s"] == pytest.approx(row["tokens_per_s"] / 127)
    assert row["tokens_per_s_per_gpu"] == row["tokens_per_s"] / 2


def test_many_points_answer_like_one_at_a_time():
    engine, load = worker("vllm"), Workload(1000, 100, 200)
    batch, chunk = np.array([1, 2, 7, 64, 256]), np.array([1000, 2000, 512, 1000, 8192])
    together = aggregated(engine, load, batch, chunk).rows
    for i in range(len(batch)):
        assert together.row(i) == aggregated(engine, load, batch[i], chunk[i]).rows.row(0)


def test_littles_law_caps_vllm():
    engine, load = worker("vllm"), Workload(1000, 50)
    row = aggregated(engine, load, 32, 1000).rows.row(0)
    assert row["tokens_per_s"] <= 32 * 49 * 1000 / row["request_latency_ms"] * (1 + 1e-12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch": 0}, "batch"),
        ({"ctx_tokens": 0.5}, "ctx_tokens"),
        ({"limits": EngineLimits(accepted=1.0)}, "nextn_accepted"),
    ],
)
def test_bad_points_are_refused(change, message):
    arguments = {"batch": 4, "ctx_tokens": 512} | change
    with pytest.raises(InvalidField, match=message):
        aggregated(worker(), Workload(512, 64), **arguments)


def test_missing_data_is_a_nan_with_a_reason():
    served = aggregated(worker(known=3000), Workload(2000, 64), [4, 4], [2000, 4000])
    assert np.isnan(served.rows["ttft_ms"]).tolist() == [False, True]
    assert served.first_miss().details["op"] == "gemm"


# --- switches: what the reference does, and what the corrected profile does instead ---


def both(load, batch, chunk, backend="trtllm", **parallel):
    rows = {
        name: aggregated(worker(backend, name, **parallel), load, batch, chunk).rows
        for name in ("reference", "corrected")
    }
    return rows["reference"], rows["corrected"]


def test_a_lone_request_does_not_queue():
    load = Workload(2048, 128)
    reference, corrected = both(load, 1, 2048)
    prefill = worker().step.mixed(2048, 0, 2048, 128).ms[0]
    assert reference["ttft_ms"][0] == pytest.approx(1.9 * prefill)
    assert corrected["ttft_ms"][0] == pytest.approx(prefill)


def test_cached_prefix_takes_no_token_budget():
    load = Workload(4000, 100, 3000)
    reference, corrected = both(load, 16, 4000)
    assert reference["mixed_steps"][0] == 16
    assert corrected["mixed_steps"][0] == 4
    assert schedule(BACKENDS["trtllm"], CORRECTED, np.array([16.0]), np.array([1000.0]), 1000, 100, 0.0).chunks[0] == 1


@pytest.mark.parametrize("backend", BACKEND_NAMES)
def test_tpot_grows_strictly_with_the_batch(backend):
    batches = np.arange(1, 513)
    for load, chunk in ((Workload(4000, 500, 500), 4000), (Workload(8192, 16), 8192), (Workload(1000, 1000), 512)):
        tpot = aggregated(worker(backend, "corrected"), load, batches, chunk).rows["tpot_ms"]
        assert (np.diff(tpot) > 0).all()
    stuck = aggregated(worker("trtllm"), Workload(8192, 16), [64, 512], 8192).rows["tpot_ms"]
    assert stuck[1] <= stuck[0] * 1.1  # the reference: eight times the requests decode for free


def test_every_generated_token_counts():
    reference, corrected = both(Workload(2048, 2), 8, 2048)
    assert reference["tokens_per_s"][0] / reference["requests_per_s"][0] == pytest.approx(1)
    assert corrected["tokens_per_s"][0] / corrected["requests_per_s"][0] == pytest.approx(2)


@pytest.mark.parametrize("backend", BACKEND_NAMES)
def test_one_token_answers_are_legal(backend):
    row = aggregated(worker(backend, "corrected"), Workload(2048, 1), 8, 2048).rows.row(0)
    assert row["tpot_ms"] == 0
    assert row["requests_per_s"] > 0
    assert row["tokens_per_s"] == row["requests_per_s"]


def test_a_cached_answer_never_serves_another_prefix():
    engine = worker()
    first = aggregated(engine, Workload(4000, 100, 2000), 8, 4000).rows["ttft_ms"][0]
    aggregated(engine, Workload(4000, 100, 0), 8, 4000)
    assert aggregated(engine, Workload(4000, 100, 2000), 8, 4000).rows["ttft_ms"][0] == first


def test_a_measured_dip_is_bridged():
    reference, corrected = (worker(profile=p, dip=(40, 60)) for p in ("reference", "corrected"))
    load, batches = Workload(2000, 400), [32, 48, 64]
    times = [aggregated(w, load, batches, 2000).rows["decode_step_ms"] for w in (reference, corrected)]
    assert times[0][1] < times[0][0]
    assert times[1][0] == times[0][0] and times[1][2] == times[0][2]
    assert times[1][0] < times[1][1] < times[1][2]
