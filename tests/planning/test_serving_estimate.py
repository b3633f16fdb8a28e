"""Single estimates: static batches, pairs of pools, draft tokens, transfer, encoders, fit."""

import numpy as np
import pytest
from perfcast_engine.errors import InvalidField, OutOfMemory, PerfDataMissing
from perfcast_planning.serving.disaggregated import Matching, sent_bytes
from perfcast_planning.serving.encoder import Encoder
from perfcast_planning.serving.estimate import (
    Pool,
    estimate_aggregated,
    estimate_disaggregated,
    estimate_static,
)
from perfcast_planning.serving.static import Phases
from perfcast_planning.serving.workload import EngineLimits, Images, KvTransfer, Targets, Workload

from tests.planning.toy import KV_BYTES, LAYERS, Dense, worker

LOAD = Workload(2000, 200, 500)


def pools(profile="corrected", **limits):
    engines = worker("trtllm", profile, tp=2, nextn=2), worker("trtllm", profile, tp=4, nextn=2)
    return (
        Pool(worker=engines[0], batch=1, workers=3, limits=EngineLimits(**limits)),
        Pool(worker=engines[1], batch=32, workers=2, limits=EngineLimits(**limits)),
    )


def test_a_static_batch_is_its_prefill_and_its_decode():
    engine = worker(tp=2)
    row = estimate_static(engine, LOAD, 8).rows.row(0)
    prefill, decode = engine.step.prefill(8, 2000, 500).ms[0], engine.step.decode(8, 2000, 200).ms[0]
    assert (row["ttft_ms"], row["tpot_ms"]) == (prefill, decode / 199)
    assert row["requests_per_s"] == pytest.approx(8 * 1000 / (prefill + decode))
    assert row["tokens_per_s"] == pytest.approx(row["requests_per_s"] * 200)
    assert estimate_static(engine, LOAD, 8, Phases.PREFILL).rows["tokens_per_s"][0] == pytest.approx(8000 / prefill)
    only = estimate_static(engine, LOAD, 8, Phases.DECODE).rows.row(0)
    assert (only["ttft_ms"], only["tokens_per_s"]) == (0, pytest.approx(8 * 199 * 1000 / decode))


def test_context_parallel_ranks_count_as_gpus():
    rates = [
        estimate_static(worker("sglang", profile, cp=4), LOAD, 1, Phases.PREFILL).rows["requests_per_s_per_gpu"][0]
        for profile in ("reference", "corrected")
    ]
    assert rates[0] == pytest.approx(4 * rates[1])


def test_accepted_drafts_speed_up_decode_only():
    engine = worker(nextn=2)
    plain, drafted = (estimate_static(engine, LOAD, 8, limits=EngineLimits(accepted=a)).rows.row(0) for a in (0.0, 1.0))
    assert drafted["tpot_ms"] == plain["tpot_ms"] / 2
    assert drafted["ttft_ms"] == plain["ttft_ms"]
    assert drafted["request_latency_ms"] == pytest.approx(plain["ttft_ms"] + 199 * drafted["tpot_ms"])
    assert drafted["requests_per_s"] == pytest.approx(8000 / drafted["request_latency_ms"])
    with pytest.raises(InvalidField, match=r"nextn_accepted: must lie in \[0, 2\]"):
        estimate_static(engine, LOAD, 8, limits=EngineLimits(accepted=2.5))


def test_a_pair_of_pools_runs_at_the_rate_of_the_slower():
    prefill, decode = pools()
    row = estimate_disaggregated(prefill, decode, LOAD).rows.row(0)
    p = estimate_static(prefill.worker, LOAD, 1, Phases.PREFILL).rows.row(0)
    d = estimate_static(decode.worker, LOAD, 32, Phases.DECODE).rows.row(0)
    assert row["requests_per_s"] == min(p["requests_per_s"] * 3 * 0.9, d["requests_per_s"] * 2 * 0.92)
    assert row["gpus"] == 3 * 2 + 2 * 4
    assert row["ttft_ms"] == p["ttft_ms"] * 1.8
    assert row["tpot_ms"] == d["tpot_ms"]
    assert row["tokens_per_s_per_gpu"] == pytest.approx(row["requests_per_s"] * 200 / 14)


def test_the_reference_corrects_rounds_and_forgets_the_wait():
    mended, faulty = (estimate_disaggregated(*pools(p), LOAD).rows.row(0) for p in ("corrected", "reference"))
    assert faulty["ttft_ms"] == round(mended["ttft_ms"] / 1.8 * 1.1, 3)
    assert faulty["tpot_ms"] == round(mended["tpot_ms"] * 1.08, 3)
    assert faulty["prefill_requests_per_s"] == round(mended["prefill_requests_per_s"] / 1.1, 3)


def test_transfer_adds_to_ttft_and_bounds_the_rate():
    prefill, decode = pools()
    plain = estimate_disaggregated(prefill, decode, LOAD).rows
    sent = sent_bytes(prefill.worker, LOAD)
    assert sent == 1500 * KV_BYTES * LAYERS / 2  # the uncached prompt, on each of two GPUs
    link = KvTransfer(bandwidth_bytes_s=10e9, latency_s=0.002, concurrent=4)
    row = estimate_disaggregated(prefill, decode, LOAD, kv_transfer=link).rows.row(0)
    assert row["ttft_ms"] == pytest.approx(plain["ttft_ms"][0] + 2 + 1000 * sent * 4 / 10e9)
    slow = estimate_disaggregated(prefill, decode, LOAD, kv_transfer=KvTransfer(sent)).rows.row(
        0
    )  # one request a second
    assert slow["requests_per_s"] == pytest.approx(3 * 0.9)
    for free in (KvTransfer(), KvTransfer(np.inf, 1.0, 8)):
        same = estimate_disaggregated(prefill, decode, LOAD, kv_transfer=free).rows
        assert all(np.array_equal(column, same[name]) for name, column in plain.columns.items())


def test_what_does_not_fit_is_told_and_can_be_refused():
    found = estimate_aggregated(worker(capacity=40e9), Workload(20000, 2000), 16)
    fit = found.fit["engine"]
    assert fit.out_of_memory[0]
    with pytest.raises(OutOfMemory) as error:
        found.require_fit()
    assert error.value.details["role"] == "engine"
    assert float(error.value.details["needed_bytes"]) == round(fit.memory.total[0])
    assert estimate_aggregated(worker(), LOAD, 4).require_fit().fit["engine"].kv_budget_bytes[0] > 0


def test_aggregated_sglang_of_the_reference_has_a_fraction_of_its_own():
    found = [estimate_aggregated(worker("sglang", profile), LOAD, 4) for profile in ("reference", "corrected")]
    fractions = [estimate.fit["engine"].kv_fraction for estimate in found]
    assert fractions == [0.88, 0.824]
    assert estimate_static(worker("sglang", "reference"), LOAD, 4).fit["engine"].kv_fraction == 0.824


def test_missing_data_are_an_error_of_an_estimate():
    with pytest.raises(PerfDataMissing):
        estimate_aggregated(worker(known=100), LOAD, 4)


@pytest.mark.parametrize("osl", [1, 2])
def test_single_tokens_are_legal(osl):
    prefill, decode = pools()
    row = estimate_disaggregated(prefill, decode, Workload(2000, osl)).rows.row(0)
    assert np.isfinite(list(row.values())).all()
    assert row["requests_per_s"] > 0
    assert (row["tpot_ms"] == 0) == (osl == 1)


def test_images_lengthen_the_prompt_and_cost_encoding():
    op = Dense(name="encoder_attention", base=1.0, per_token=0.001)
    merged = Dense(name="encoder_projector_fc0_gemm", base=0.5, per_token=0.0)
    engine = worker()
    encoder = Encoder(
        ops=(op, merged), db=engine.step.db, patch=16, merge=2, hidden=1024, out_hidden=4096, projectors=1, tp=1
    )
    images = Images(height=250, width=500, count=2)
    assert encoder.image_tokens(images) == (8 * 16, 16 * 32)
    assert encoder.prompt_tokens(images) == 256
    assert encoder.ms(images, np.array([3.0]))[0] == pytest.approx(1.5 + 0.001 * 6 * 512)
    weights, activations = encoder.bytes(images, np.array([300.0]))
    assert (weights, activations[0]) == (0, 2 * (600 * 512 * 1024 * 3 + 600 * 128 * 4096))
    seeing = worker()
    object.__setattr__(seeing, "encoder", encoder)
    load = Workload(1000, 100, images=images)
    row = estimate_aggregated(seeing, load, 4).rows.row(0)
    blind = estimate_aggregated(worker(), Workload(1256, 100), 4).rows.row(0)
    assert row["ctx_tokens"] == 1256
    assert row["ttft_ms"] == pytest.approx(blind["ttft_ms"] + encoder.ms(images, np.array([4.0]))[0])


@pytest.mark.parametrize(
    ("build", "field"),
    [
        (lambda: Workload(0, 10), "isl"),
        (lambda: Workload(10, 0), "osl"),
        (lambda: Workload(10, 10, 10), "prefix"),
        (lambda: Workload(1.5, 10), "isl"),
        (lambda: Targets(ttft_ms=0), "ttft_ms"),
        (lambda: Targets(tpot_ms=float("nan")), "tpot_ms"),
        (lambda: KvTransfer(0), "bandwidth"),
        (lambda: KvTransfer(1e9, -1), "latency"),
        (lambda: KvTransfer(1e9, 0, 0), "concurrent"),
        (lambda: Images(count=-1), "count"),
        (lambda: Matching(ttft_factor=0), "ttft_factor"),
        (lambda: Pool(worker=worker(), batch=0, workers=1), "batch"),
    ],
)
def test_bad_questions_are_refused(build, field):
    with pytest.raises(InvalidField, match=field):
        build()
