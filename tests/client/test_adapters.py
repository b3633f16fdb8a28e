"""Adapters against recorded answers of what they replace, over TCP and a Unix socket, blocking and asyncio."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from perfcast_client import Client, EngineConfig, Mixed, Prefill, planner
from perfcast_client.adapters import (
    EngineCapacityRequest,
    EnginePerfLimits,
    EngineQueries,
    ForwardPassPerfModel,
    MockerSession,
    PerfDataNotAvailable,
    PerfEstimator,
    PlannerPerfModel,
    TimingModel,
    benchmark,
    bootstrap_fpms,
)
from perfcast_client.adapters.mocker import accept_rates
from perfcast_client.adapters.records import engine_of

from tests.client.conftest import Way

RECORDED = Path(__file__).parent / "recorded"
LIMITS = EnginePerfLimits(8192, 512, 2_000_000)


def recorded(name: str) -> Any:
    return json.loads((RECORDED / f"{name}.json").read_text())


def session(way: Way, record: dict[str, Any]) -> MockerSession:
    return MockerSession(
        way.client, record["backend"], record["system_name"], record["model_name"], record["tp_size"],
        record["backend_version"], record.get("moe_tp_size"), record.get("moe_ep_size"),
        record.get("attention_dp_size"), profile="reference",
    )  # fmt: skip


@pytest.mark.parametrize("case", recorded("mocker"), ids=["dense", "moe"])
def test_mocker_sessions_time_passes_as_recorded(way: Way, case: dict[str, Any]) -> None:
    own = session(way, case["config"])
    other = MockerSession.from_config(way.client, case["config"], profile="reference")
    timing = TimingModel(way.client, case["config"], profile="reference")
    for batch, fresh, prefix, ms in case["prefill"]:
        assert way.do(own.predict_prefill(batch, fresh, prefix)) == pytest.approx(ms, rel=1e-9)
        assert way.do(other.predict_prefill(batch, fresh, prefix)) == pytest.approx(ms, rel=1e-9)
        assert way.do(timing.predict_prefill_ms(batch, fresh + prefix, prefix)) == pytest.approx(ms, rel=1e-9)
    for batch, isl, osl, ms in case["decode"]:
        assert way.do(own.predict_decode(batch, isl, osl)) == pytest.approx(ms, rel=1e-9)
        if osl == 2:
            told = timing.predict_decode_ms(batch, batch * isl, isl, 1_000_000)
            assert way.do(told) == pytest.approx(ms, rel=1e-9)


def test_mocker_sessions_refuse_what_the_originals_do(way: Way) -> None:
    own = session(way, recorded("mocker")[0]["config"])
    assert way.do(own.predict_prefill(4, 0, 100)) == 0.0
    for call in (
        lambda: own.predict_prefill(0, 10, 0),
        lambda: own.predict_prefill(1, 0, 0),
        lambda: own.predict_prefill(1, -1, 0),
        lambda: own.predict_prefill(1, 1.5, 0),
        lambda: own.predict_decode(-1, 10, 2),
        lambda: MockerSession(way.client, "vllm", "h200_sxm", "m", 1, gemm_dtype="fp9"),
        lambda: MockerSession(way.client, "vllm", "h200_sxm", "m", 1, nextn=6),
        lambda: MockerSession.from_config(way.client, {"worker_type": "decode"}, worker_type="prefill"),
    ):
        with pytest.raises(ValueError):
            way.do(call())
    for arguments, code in (
        (("vllm", "h900", "Qwen/Qwen3-32B", 4), "UNKNOWN_SYSTEM"),
        (("vllm", "h200_sxm", "Qwen/Qwen3-32B", 4, "0.0.0"), "UNKNOWN_VERSION"),
        (("vllm", "h200_sxm", "no/such", 4), "UNKNOWN_MODEL"),
    ):
        with pytest.raises(RuntimeError, match=code):
            way.do(MockerSession(way.client, *arguments).predict_prefill(1, 10, 0))
    assert accept_rates("0.5, 0.25") == [0.5, 0.25, 0, 0, 0] and len(accept_rates([0.1] * 9)) == 5
    with pytest.raises(ValueError):
        accept_rates([1.5])


def test_idle_passes_take_no_time_and_ask_nobody() -> None:
    with Client("127.0.0.1:1") as nobody:
        timing = TimingModel.__new__(TimingModel)
        timing._client, timing._evidence = nobody, None
        assert timing.predict_prefill_ms(0, 100, 0) == timing.predict_prefill_ms(4, 100, 100) == 0.0
        assert timing.predict_decode_ms(0, 0, 0, 1) == 0.0
        with pytest.raises(ValueError, match="total_kv_tokens"):
            timing.predict_decode_ms(1, 1, 1, 0)


def test_evidence_adds_up_operators_by_phase(way: Way) -> None:
    config = engine_of(recorded("mocker")[0]["config"], profile="reference")
    plain, timing = TimingModel(way.client, config), TimingModel(way.client, config, evidence=True)
    assert plain.evidence_summary() is None
    spent = sum(way.do(timing.predict_prefill_ms(1, isl, 0)) for isl in (100, 200))
    told = timing.evidence_summary()
    assert told is not None and told["decode"] == []
    assert sum(row["latency_ms"] for row in told["prefill"]) == pytest.approx(spent, rel=1e-9)
    assert all(row["energy_wms"] is None for row in told["prefill"])
    timing.reset_evidence()
    assert timing.evidence_summary() == {"prefill": [], "decode": []}


def test_a_surface_times_in_place_of_calls(way: Way) -> None:
    config = EngineConfig(model="Qwen/Qwen3-32B-FP8", system="h200_sxm", backend="trtllm", tp=4)
    surface = way.do(way.client.surface(config, refresh_s=0))
    record = {"model_name": config.model, "system_name": config.system, "backend": config.backend, "tp_size": 4}
    local, remote = (MockerSession.from_config(way.client, record, surface=s) for s in (surface, None))
    for arguments in ((1, 1000, 0), (4, 500, 64)):
        assert way.do(local.predict_prefill(*arguments)) == way.do(remote.predict_prefill(*arguments))
    assert way.do(local.predict_decode(8, 2000, 2)) == way.do(remote.predict_decode(8, 2000, 2))
    way.do(surface.close())


@pytest.mark.parametrize("case", recorded("forward_pass")["cases"], ids=["bounded", "unbounded", "regression"])
def test_forward_pass_models_learn_as_recorded(way: Way, case: dict[str, Any]) -> None:
    if case["kind"] == "regression":
        model = way.do(ForwardPassPerfModel.from_regression(way.client, case["options"]))
    else:
        made = ForwardPassPerfModel.from_native(way.client, case["config"], case["options"], profile="reference")
        model = way.do(made)
    for step in case["rounds"]:
        way.do(model.tune_with_fpms(step["tune"]))
        for record, ms in step["queries"]:
            told = way.do(model.estimate_forward_pass_time_ms(record))
            assert told == (None if ms is None else pytest.approx(ms, rel=1e-6))
        assert way.do(model.diagnostics()) == step["diagnostics"]
        factors = (model.get_min_correction_factor, model.get_max_correction_factor, model.get_avg_correction_factor)
        for factor, wanted in zip(factors, step["factors"], strict=True):
            assert way.do(factor()) == (None if wanted is None else pytest.approx(wanted, rel=1e-9))
    model.close()


@pytest.mark.parametrize(("constructor", "config", "options", "error"), recorded("forward_pass")["built"])
def test_forward_pass_models_are_refused_as_recorded(way: Way, constructor, config, options, error) -> None:
    build = getattr(ForwardPassPerfModel, constructor)
    if error is None:
        model = way.do(build(way.client, config, options))
        told = way.do(model.diagnostics())
        native = constructor == "from_native"
        assert told["readiness"] == ("ready" if native else "unsupported_config")
        assert bool(told["last_warning"]) == (not native)
        return
    kind = {"ValueError": ValueError, "PerfDataNotAvailableError": PerfDataNotAvailable}[error[0]]
    with pytest.raises(kind):
        way.do(build(way.client, config, options))


@pytest.mark.parametrize(
    ("change", "error"),
    [({"tp_size": 3}, ValueError), ({"forward_model": "fpm"}, PerfDataNotAvailable),
     ({"estimation_mode": "fpm_regression"}, PerfDataNotAvailable)],
)  # fmt: skip
def test_what_no_native_model_answers_falls_back_where_that_is_wanted(way: Way, change, error) -> None:
    config = recorded("forward_pass")["config"] | change
    with pytest.raises(error):
        way.do(ForwardPassPerfModel.from_native(way.client, config))
    told = way.do(way.do(ForwardPassPerfModel.best_available(way.client, config)).diagnostics())
    assert (told["source"], told["readiness"]) == ("fallback_regression", "unsupported_config") and told["last_warning"]


def test_a_way_to_predict_that_nobody_knows_is_refused(way: Way) -> None:
    config = recorded("forward_pass")["config"]
    with pytest.raises(ValueError, match="op_level"):
        way.do(ForwardPassPerfModel.from_native(way.client, config | {"forward_model": "x"}))
    way.do(ForwardPassPerfModel.from_native(way.client, config | {"forward_model": "op_level"}))


def test_forward_passes_are_refused_as_recorded(way: Way) -> None:
    told = recorded("forward_pass")
    model = way.do(ForwardPassPerfModel.from_native(way.client, told["config"], profile="reference"))
    regression = way.do(ForwardPassPerfModel.from_regression(way.client))
    for record, error, ms in told["asked"]:
        if error is None:
            assert way.do(model.estimate_forward_pass_time_ms(record)) == pytest.approx(ms, rel=1e-9)
            continue
        for refusing in (model, regression):
            with pytest.raises(ValueError):
                way.do(refusing.estimate_forward_pass_time_ms(record))
            with pytest.raises(ValueError):
                way.do(refusing.tune_with_fpms([[record]] if record else [[]]))
    assert way.do(regression.estimate_forward_pass_time_ms({"scheduled_requests": {}})) == 0.0
    assert way.do(regression.diagnostics())["readiness"] == "insufficient_data"


@pytest.mark.parametrize(
    "path",
    ["version", "worker_id", "dp_rank", "counter_id", "wall_time", "scheduled_requests", "queued_requests",
     "scheduled_requests.num_decode_requests", "scheduled_requests.var_prefill_length",
     "queued_requests.sum_prefill_tokens", "queued_requests.var_decode_kv_tokens"],
)  # fmt: skip
def test_members_of_another_type_are_refused_also_where_no_use_is_made_of_them(way: Way, path: str) -> None:
    regression = way.do(ForwardPassPerfModel.from_regression(way.client))
    *parts, name = path.split(".")
    for value in (
        None,
        True,
        "x" if name != "worker_id" else 5,
        1.5 if "var" not in name and "time" not in name else math.nan,
    ):
        record: dict[str, Any] = {name: value}
        record = {parts[0]: record} if parts else record
        with pytest.raises(ValueError):
            way.do(regression.estimate_forward_pass_time_ms(record))
        with pytest.raises(ValueError):
            way.do(regression.tune_with_fpms([[record]]))
    legal = {
        "dp_rank": 3,
        "counter_id": 2**64 - 1,
        "queued_requests": {"var_prefill_length": -1, "more": "x"},
        "more": 1,
    }
    assert way.do(regression.estimate_forward_pass_time_ms(legal)) == 0.0
    limits = EnginePerfLimits(8192, 512, 2_000_000)
    both = EngineQueries(model=regression, worker_type="decode", limits=limits, attention_dp_size=2)
    for ranks in ([{"dp_rank": 0}, {"dp_rank": "x"}], [{"dp_rank": 1}, {"dp_rank": 1}], [{}], []):
        with pytest.raises(ValueError):
            way.do(both.get_scheduled_decode_itl(ranks))
        with pytest.raises(ValueError):
            way.do(both.tune_with_fpms([ranks]))


@pytest.mark.parametrize("case", recorded("engine_queries"), ids=lambda case: f"{case['worker_type']}-{case['ranks']}")
def test_engine_queries_answer_as_recorded(way: Way, case: dict[str, Any]) -> None:
    made = EngineQueries.best_available(
        way.client, aic_config=case["config"], worker_type=case["worker_type"], limits=LIMITS, options={},
        attention_dp_size=case["ranks"], profile="reference", legacy=True,
    )  # fmt: skip
    queries = way.do(made)
    for asked, wanted in case["capacities"]:
        request = EngineCapacityRequest(**asked)
        if case["ranks"] > 1:  # recorded with each rank holding the KV tokens of its own requests
            continue
        found = way.do(queries.find_engine_capacity_rps(request))
        assert (found is None) == (wanted is None)
        for name, value in (wanted or {}).items():
            assert getattr(found, name) == pytest.approx(value, rel=1e-9), name
    for ranks, drain, itl in case["live"]:
        assert way.do(queries.get_queued_prefill_time(ranks)) == (drain and pytest.approx(drain, rel=1e-9))
        assert way.do(queries.get_scheduled_decode_itl(ranks)) == (itl and pytest.approx(itl, rel=1e-9))
    for wrong in (case["live"][0][0][1:], [*case["live"][0][0], case["live"][0][0][0]]):
        if case["worker_type"] != "decode":
            with pytest.raises(ValueError, match="ranks"):
                way.do(queries.get_queued_prefill_time(wrong))


@pytest.mark.parametrize("case", recorded("engine_queries")[3:], ids=lambda case: case["worker_type"])
def test_capacities_of_many_ranks_are_as_recorded(way: Way, case: dict[str, Any]) -> None:
    engine = engine_of(case["config"], profile="reference")
    for asked, wanted in case["capacities"]:
        told = {name.replace("_sla_s", "_s").replace("optimization_target", "objective"): value
                for name, value in asked.items()}  # fmt: skip
        call = planner.capacity(
            engine, role=case["worker_type"], on_infeasible="max_rps", legacy_single_request=True, **told
        )
        found = way.do(way.client.ask(call))
        assert (found is None) == (wanted is None)
        for name, value in (wanted or {}).items():
            assert getattr(found, name.replace("e2e_latency", "e2e")) == pytest.approx(value, rel=1e-9), name


def iteration(tokens: int, decodes: int, ms: float) -> list[dict[str, Any]]:
    scheduled = {"num_prefill_requests": int(tokens > 0), "sum_prefill_tokens": tokens,
                 "num_decode_requests": decodes, "sum_decode_kv_tokens": decodes * 1000}  # fmt: skip
    return [{"scheduled_requests": scheduled, "wall_time": ms / 1000}]


def test_engine_queries_remember_the_usual_prefill_and_learn(way: Way) -> None:
    made = EngineQueries.best_available(
        way.client, aic_config=None, worker_type="aggregated", limits=LIMITS, options={"max_observations": 64}
    )
    queries = way.do(made)
    live = iteration(0, 10, 0)
    assert way.do(queries.get_scheduled_decode_itl(live)) is None
    assert way.do(queries.find_engine_capacity_rps(EngineCapacityRequest(isl=100, osl=10))) is None
    way.do(queries.tune_with_fpms([iteration(0, 10, 5.0), iteration(400, 10, 9.0), iteration(0, 12, 5.2)]))
    assert queries.usual_prefill == (200.0, 0.5)
    line = [iteration(100 * n, 10 + n, 5 + n) for n in range(1, 12)]
    way.do(queries.tune_with_fpms(line))
    assert way.do(queries.diagnostics())["readiness"] == "ready"
    told = way.do(queries.get_scheduled_decode_itl(live))
    tokens, _ = queries.usual_prefill
    assert told == pytest.approx((5 + tokens / 100) / 1000, rel=0.1)


CONFIG = SimpleNamespace(
    max_num_fpm_samples=64,
    load_min_observations=5,
    fpm_sample_bucket_size=16,
    speculative_nextn=0,
    aic_perf_model=SimpleNamespace(
        hf_id="Qwen/Qwen3-32B", system="h200_sxm", backend="vllm", backend_version="0.24.0", weight_dtype=None,
        prefill_pick=SimpleNamespace(tp=4, pp=1, dp=1, moe_tp=None, moe_ep=None),
        decode_pick={"tp": 4, "pp": 1, "dp": 1},
    ),
)  # fmt: skip


def planner_model(way: Way, worker_type: str, **options: Any) -> PlannerPerfModel:
    given = {"config": CONFIG, "capabilities": SimpleNamespace(max_num_seqs=512), "profile": "reference"} | options
    return PlannerPerfModel(way.client, worker_type=worker_type, **given)


@pytest.mark.parametrize("case", recorded("engine_queries")[:3], ids=lambda case: case["worker_type"])
def test_planner_models_say_the_same_in_ms(way: Way, case: dict[str, Any]) -> None:
    model = planner_model(way, case["worker_type"], legacy=True)
    assert way.do(model.has_sufficient_data())
    for asked, wanted in case["capacities"]:
        told = {name.replace("_sla_s", "_sla_ms"): value for name, value in asked.items()}
        told = {name: value * 1000 if name.endswith("_sla_ms") else value for name, value in told.items()}
        if told.pop("optimization_target", "throughput") == "latency":
            continue
        found = way.do(model.find_engine_capacity_rps(**told))
        assert (found is None) == (wanted is None)
        if found is not None:
            assert (found.rps, found.eligible) == (pytest.approx(wanted["rps"], rel=1e-9), wanted["eligible"])
            for name in ("ttft", "itl", "e2e_latency"):
                value = wanted.get(f"{name}_s")
                assert getattr(found, f"{name}_ms") == (value and pytest.approx(value * 1000, rel=1e-9))
    for ranks, drain, itl in case["live"]:
        plain = {"add_next_request": False}
        told = model.estimate_queued_prefill_time(ranks, max_num_batched_tokens=8192, **plain)
        assert way.do(told) == (drain and pytest.approx(drain, rel=1e-9))
        told = model.estimate_scheduled_decode_itl(ranks, include_queued_decode=False, **plain)
        assert way.do(told) == (itl and pytest.approx(itl, rel=1e-9))


def test_planner_models_append_the_next_request_of_average_shape(way: Way) -> None:
    model = planner_model(way, "decode")
    way.do(model.add_observations({("w", 0): iteration(0, 10, 5.0)[0], ("v", 0): iteration(0, 30, 6.0)[0]}))
    assert (model.avg_isl, model.avg_decode_length) == (0.0, 1000.0)
    assert way.do(model.num_observations()) == 2
    live = iteration(0, 10, 0)
    told = way.do(model.estimate_scheduled_decode_itl(live, decode_scale=2.0))
    scaled = way.do(model.estimate_scheduled_decode_itl(iteration(0, 21, 0), add_next_request=False))
    assert told == scaled
    assert [label for label, _ in model.query_groups({("w", 0): dict(live[0], worker_id="w")})] == ["w:dp0"]


def test_planner_models_let_metrics_without_a_version_pass_and_leave_malformed_ones_out(way: Way) -> None:
    model = planner_model(way, "decode")
    (live,) = iteration(0, 10, 5.0)
    odd = {"scheduled_requests": {"num_decode_requests": "x", "sum_decode_kv_tokens": 9}}
    way.do(model.add_observations({("w", 0): live | {"version": 0}, ("v", 0): odd, ("u", 0): live | {"version": 2}}))
    way.do(model.load_benchmark_fpms([live | {"version": 0}, odd]))
    assert way.do(model.num_observations()) == 2 and model.avg_decode_length == 1000.0
    told, unstamped = (way.do(model.estimate_scheduled_decode_itl([live | {"version": version}])) for version in (1, 0))
    assert told is not None and told == unstamped


def test_planner_models_never_raise(way: Way, caplog: pytest.LogCaptureFixture) -> None:
    idle = planner_model(way, "decode", capabilities=None)
    assert way.do(idle.has_sufficient_data()) is False
    assert way.do(idle.find_engine_capacity_rps(isl=10, osl=10)) is None
    model = planner_model(way, "prefill")
    for live in ([], [{"scheduled_requests": {"num_prefill_requests": -1}}], [{"version": 9}], ["x"]):
        assert way.do(model.estimate_queued_prefill_time(live)) is None
    assert way.do(model.find_engine_capacity_rps(isl=10, osl=10, ttft_sla_ms=float("nan"))) is None
    assert caplog.text.count("perfcast.planner") >= 4
    unknown = SimpleNamespace(**{**vars(CONFIG), "aic_perf_model": {"hf_id": "no/such", "system": "h200_sxm",
                                 "backend": "vllm", "decode_pick": {"tp": 4}}})  # fmt: skip
    fallback = planner_model(way, "decode", config=unknown)
    assert way.do(fallback.has_sufficient_data()) is False
    assert way.do(fallback.find_engine_capacity_rps(isl=10, osl=10)) is None


def test_a_change_of_capabilities_makes_the_model_anew_with_its_history(way: Way) -> None:
    model = planner_model(way, "decode", state=f"anew-{way.name}")
    way.do(model.add_observations({("w", 0): iteration(0, 10, 12.0)[0]}))
    model.update_capabilities({"max_num_seqs": 64})
    assert way.do(model.num_observations()) == 1
    found = way.do(model.find_engine_capacity_rps(isl=1000, osl=100))
    assert found is not None
    model.update_capabilities({"max_num_seqs": 0})
    assert way.do(model.num_observations()) == 0


@pytest.mark.parametrize("case", recorded("perf_estimator"), ids=["dense", "moe"])
def test_the_estimator_gives_rows_as_recorded(way: Way, case: dict[str, Any]) -> None:
    estimator = PerfEstimator(way.client, case["hf_id"], case["system"], case["backend"], profile="reference")
    for isl, osl, batch, mode, wanted in case["rows"]:
        row = way.do(estimator.estimate_perf(isl, osl, batch, mode=mode, **case["parallel"]))
        assert set(wanted) <= set(row)
        for name, value in wanted.items():
            if name in ("moe_tp", "moe_ep", "parallel") and case["parallel"].get("moe_ep_size") is None:
                continue  # of a dense model
            assert row[name] == (pytest.approx(value, abs=6e-4) if isinstance(value, float) else value), name
    alone = way.do(estimator.estimate_prefill_perf(1000, **case["parallel"]))
    assert alone["context_latency"] > 0 and alone["tpot"] == 0
    for isl, osl, most in case["max_batch"]:
        assert way.do(estimator.get_max_batch_size(isl, osl, **case["parallel"])) == most
        assert way.do(estimator.get_max_kv_tokens(isl, osl, **case["parallel"])) == most * (isl + osl)
    with pytest.raises(ValueError, match="mode"):
        way.do(estimator.estimate_perf(10, 10, 1, mode="all"))
    with pytest.raises(ValueError, match="unknown"):
        way.do(estimator.estimate_perf(10, 10, 1, tp=4))


def test_bootstraps_are_flat_or_by_rank(way: Way) -> None:
    dense = EngineConfig(model="Qwen/Qwen3-32B", system="h200_sxm", backend="vllm", tp=4)
    moe = EngineConfig(model="Qwen/Qwen3-235B-A22B", system="h200_sxm", backend="trtllm", attn_dp=8, moe_ep=8)
    sweep = {"prefill_granularity": 4, "decode_granularity": 2, "max_context_tokens": 4096}
    flat = way.do(bootstrap_fpms(way.client, dense, **sweep))
    assert all(isinstance(record, dict) and record["wall_time"] > 0 for record in flat)
    groups = way.do(bootstrap_fpms(way.client, moe, **sweep))
    assert all([record["dp_rank"] for record in group] == list(range(8)) for group in groups)
    sums = way.do(bootstrap_fpms(way.client, moe, grouped=False, **sweep))
    decode = [(group, record) for group, record in zip(groups, sums, strict=True)
              if record["scheduled_requests"]["num_decode_requests"]]  # fmt: skip
    for group, record in decode:
        counts = [rank["scheduled_requests"]["num_decode_requests"] for rank in group]
        assert record["scheduled_requests"]["num_decode_requests"] == sum(counts)
    told = way.do(benchmark(way.client, moe, **sweep))
    assert {result["point"]["point_type"] for result in told["results"]} == {"prefill", "decode"}
    assert [result["fpms"] for result in told["results"]] == groups
    model = planner_model(way, "prefill")
    way.do(model.load_benchmark_fpms(flat))
    assert way.do(model.num_observations()) > 3
    with pytest.raises(ValueError, match="max_context_tokens"):
        way.do(bootstrap_fpms(way.client, dense, max_context_tokens=10))


def test_adapters_and_plain_calls_tell_the_same(way: Way) -> None:
    record = {"model_name": "Qwen/Qwen3-32B", "system_name": "h200_sxm", "backend": "vllm", "tp_size": 4}
    canonical = {"model": "Qwen/Qwen3-32B", "system": "h200_sxm", "backend": "vllm", "tp": 4, "worker_type": "decode"}
    assert engine_of(canonical).role == "decode"
    engine = engine_of(record)
    own = way.do(MockerSession.from_config(way.client, record).predict_prefill(2, 500, 10))
    assert own == way.do(way.client.predict(engine, Prefill(2, 510, 10))).latency_ms
    assert way.do(way.client.predict(engine, Mixed(128, 4, 128, 16))).latency_ms > 0
    assert way.do(way.client.ask(planner.capacity(engine, isl=100, osl=10))).rps > 0
