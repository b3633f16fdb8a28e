"""Configurations to engines: validation, handles, modes of both paths, all-to-all, lanes (spec/05 3.7, 8.6, 11)."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from perfcast_engine.config import EngineConfig, MoeComm, ParallelConfig, QuantOverrides
from perfcast_engine.errors import EngineError, InvalidField, PerfDataMissing, UnknownName, UnsupportedCombination
from perfcast_engine.models.config_json import from_json
from perfcast_engine.models.quantization import Situation, choose, context_tables
from perfcast_engine.models.registry import Registry
from perfcast_engine.models.resolve import Engine, resolve
from perfcast_engine.tables.catalog import Catalog

from tests.engine.test_models_config_json import LLAMA, QWEN_MOE

REGISTRY = Registry.load()
NOTHING = frozenset[str]()


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return Catalog()


def config(
    model: Any = "Qwen/Qwen3-32B-FP8", system: str = "h200_sxm", backend: str = "trtllm", **more: Any
) -> EngineConfig:
    return EngineConfig(model=model, system=system, backend=backend, **more)


def engine(catalog: Catalog, *args: Any, **more: Any) -> Engine:
    return resolve(config(*args, **more), catalog, REGISTRY)


def modes(
    model: str, backend: str, sm: int, resolution: Any, measured: dict[str, set[str]] | None = None, **asked: str
):
    known, spec = measured or {}, REGISTRY.get(model)
    return choose(
        spec,
        QuantOverrides(**asked),
        Situation(backend, sm, context_tables(spec, backend, resolution == "search"), resolution),
        lambda table, kv: frozenset(known.get(table, NOTHING)),
    )


def test_fp4_checkpoints_below_blackwell_count_as_asked_for_in_an_estimate_only():
    estimate = modes("nvidia/Qwen3.5-122B-A10B-NVFP4", "trtllm", 90, "estimate")
    search = modes("nvidia/Qwen3.5-122B-A10B-NVFP4", "trtllm", 90, "search")
    assert (estimate.gemm, estimate.moe, estimate.gemm_explicit) == ("nvfp4_wo", "nvfp4_wo", True)
    assert (search.gemm, search.moe, search.gemm_explicit) == ("nvfp4_wo", "nvfp4_wo", False)
    assert modes("nvidia/Qwen3.5-122B-A10B-NVFP4", "trtllm", 100, "estimate").gemm == "nvfp4"
    assert modes("Qwen/Qwen3-32B", "trtllm", 90, "estimate", gemm="nvfp4").gemm == "nvfp4_wo"


def test_inferred_fp8_attention_on_vllm_is_bfloat16_in_an_estimate_and_follows_the_data_in_a_search():
    data = {"context_attention": {"fp8", "bfloat16"}}
    assert modes("Qwen/Qwen3-32B-FP8", "vllm", 90, "estimate", data).fmha == "bfloat16"
    assert modes("Qwen/Qwen3-32B-FP8", "vllm", 90, "search", data).fmha == "fp8"
    assert modes("Qwen/Qwen3-32B-FP8", "vllm", 90, "search", {"context_attention": {"bfloat16"}}).fmha == "bfloat16"
    assert modes("Qwen/Qwen3-32B-FP8", "vllm", 90, "estimate", data, fmha="fp8").fmha == "fp8"


def test_explicit_fp8_attention_without_data_is_refused_and_inferred_falls_back():
    data = {"context_attention": {"bfloat16"}}
    assert modes("Qwen/Qwen3-32B-FP8", "trtllm", 90, "estimate", data).fmha == "bfloat16"
    with pytest.raises(InvalidField, match="measured: bfloat16") as error:
        modes("Qwen/Qwen3-32B-FP8", "trtllm", 90, "estimate", data, fmha="fp8")
    assert error.value.details["why"] == "fmha_no_data"


@pytest.mark.parametrize("model", ["Qwen/Qwen3-32B-FP8", "nvidia/Llama-3.1-70B-Instruct-FP8", "nvidia/Kimi-K2.5-NVFP4"])
def test_quantised_checkpoints_keep_an_fp8_cache(model):
    assert modes(model, "trtllm", 100, "estimate").kv == "fp8"
    assert modes(model, "trtllm", 100, "estimate", kv_cache="bfloat16").kv == "bfloat16"


def test_expert_modes_that_a_framework_substitutes():
    assert modes("openai/gpt-oss-20b", "trtllm", 100, "search").moe == "w4a8_mxfp4_mxfp8"
    assert modes("openai/gpt-oss-20b", "trtllm", 100, "estimate").moe == "w4a16_mxfp4"
    assert modes("deepseek-ai/DeepSeek-V4-Flash", "sglang", 90, "estimate").moe == "w4a16_mxfp4_cutlass"
    assert modes("deepseek-ai/DeepSeek-V4-Flash", "sglang", 100, "estimate").moe == "w4a8_mxfp4_mxfp8_trtllm"
    assert modes("moonshotai/Kimi-K3", "sglang", 100, "estimate").moe == "w4a8_mxfp4_mxfp8"
    lightning = "nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-NVFP4"
    assert modes(lightning, "vllm", 100, "estimate").moe == "nvfp4"
    assert modes(lightning, "vllm", 90, "estimate").moe == "nvfp4_wo"
    with pytest.raises(InvalidField) as error:
        modes("deepseek-ai/DeepSeek-V4-Flash", "sglang", 90, "search")
    assert error.value.details["why"] == "hopper_fp4"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"parallel": {"tp": 0}}, "parallel.tp"),
        ({"parallel": {"tp": 2.0}}, "parallel.tp"),
        ({"parallel": {"tp": 10**5000}}, "parallel.tp"),
        ({"parallel": {"pp": None}}, "parallel.pp"),
        ({"parallel": {"moe_ep": -1}}, "parallel.moe_ep"),
        ({"quant": {"gemm": "fp3"}}, "quant.gemm"),
        ({"quant": {"kv_cache": "nvfp4"}}, "quant.kv_cache"),
        ({"nextn": -1}, "nextn"),
        ({"nextn": "some"}, "nextn"),
        ({"nextn": None}, "nextn"),
        ({"layers": 0}, "layers"),
        ({"slots": 2**40}, "slots"),
        ({"database_mode": "FAST"}, "database_mode"),
        ({"transfer_policy": "bold"}, "transfer_policy"),
        ({"resolution": "guess"}, "resolution"),
        ({"role": "cook"}, "role"),
        ({"moe_backend": "magic"}, "moe_backend"),
        ({"profile": "tuned"}, "profile"),
        ({"system": ""}, "system"),
        ({"model": 7}, "model"),
        ({"workload_distribution": "x" * 1000}, "workload_distribution"),
        ({"attention_backend": 3}, "attention_backend"),
    ],
)
def test_bad_configurations_name_their_field(change, field):
    with pytest.raises(InvalidField) as error:
        if "parallel" in change:
            change["parallel"] = ParallelConfig(**change["parallel"])
        if "quant" in change:
            change["quant"] = QuantOverrides(**change["quant"])
        config(**change)
    assert error.value.details["field"] == field


def test_handles_depend_on_content_and_not_on_the_process():
    one, other = config(parallel=ParallelConfig(tp=4)), config(parallel=ParallelConfig(tp=4))
    assert one == other and hash(one) == hash(other) and one.handle == other.handle
    assert config(parallel=ParallelConfig(tp=8)).handle != one.handle != config(profile="reference").handle
    inline = config(from_json(QWEN_MOE))
    assert inline.handle == config(from_json(dict(reversed(QWEN_MOE.items())))).handle
    assert inline.handle != config(from_json(QWEN_MOE | {"vocab_size": 31999})).handle
    code = (
        "from tests.engine.test_models_resolve import *;"
        "print(config(from_json(QWEN_MOE)).handle, config(parallel=ParallelConfig(tp=4)).handle)"
    )
    fresh = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert fresh == [inline.handle, one.handle]


def test_models_of_no_registry_resolve(catalog):
    dense = engine(catalog, from_json(LLAMA), parallel=ParallelConfig(tp=2))
    assert (dense.spec.family, dense.modes.gemm, len(dense.plan.context)) == ("LLAMA", "bfloat16", 14)
    moe = engine(catalog, from_json(QWEN_MOE), parallel=ParallelConfig(tp=2, moe_ep=2))
    assert (moe.parallel.moe_tp, moe.modes.gemm, moe.modes.moe) == (1, "fp8_block", "fp8_block")


def test_draft_depth_may_follow_the_checkpoint(catalog):
    for model, depth in (("deepseek-ai/DeepSeek-V3", 1), ("moonshotai/Kimi-K3", 0), ("Qwen/Qwen3-32B", 0)):
        assert engine(catalog, model, parallel=ParallelConfig(moe_ep=1), nextn="auto").nextn == depth


def test_attention_tries_the_framework_s_kernel_first_and_obeys_an_override(catalog):
    def lanes(**more: Any) -> tuple[str, ...]:
        ops = engine(catalog, "Qwen/Qwen3-32B", "h200_sxm", "sglang", **more).plan.context
        return next(op.lanes for op in ops if op.name == "context_attention")

    assert lanes()[0] == "fa3"
    assert lanes(attention_backend="triton")[:2] == ("triton", "fa3")
    with pytest.raises(UnsupportedCombination, match="attention_backend"):
        lanes(attention_backend="quick")


def test_experts_across_nodes_need_a_measured_all_to_all(catalog):
    wide = ParallelConfig(attn_dp=32, moe_ep=32)
    found = engine(catalog, "deepseek-ai/DeepSeek-V3", "b200_sxm", "trtllm", parallel=wide).plan.deployment.comm
    assert found == MoeComm("trtllm_deepep_ht", "trtllm_deepep_ll")
    with pytest.raises(PerfDataMissing, match="all-to-all"):
        engine(catalog, "Qwen/Qwen3.5-397B-A17B", "b200_sxm", "trtllm", parallel=wide)
    with pytest.raises(InvalidField) as error:
        engine(catalog, "deepseek-ai/DeepSeek-V3", "b200_sxm", parallel=ParallelConfig(attn_dp=32, moe_ep=16))
    assert error.value.details["why"] == "cross_node_tp"


def test_a_search_takes_an_all_to_all_inside_a_node_and_an_estimate_does_not(catalog):
    near = {"parallel": ParallelConfig(attn_dp=8, moe_ep=8)}
    search = engine(catalog, "deepseek-ai/DeepSeek-V3", "h200_sxm", "sglang", resolution="search", **near)
    estimate = engine(catalog, "deepseek-ai/DeepSeek-V3", "h200_sxm", "sglang", **near)
    assert search.plan.deployment.comm == MoeComm("deepep_ht", "deepep_ll")
    assert (search.modes.fmha, search.modes.kv) == ("fp8_block", "fp8")
    assert estimate.plan.deployment.comm == MoeComm()
    asked = engine(
        catalog, "deepseek-ai/DeepSeek-V3", "h200_sxm", "sglang", resolution="search", moe_comm=MoeComm(), **near
    )
    assert asked.plan.deployment.comm == MoeComm()


def test_a_prefill_worker_needs_an_all_to_all_for_prefill_only(catalog):
    wide = {"parallel": ParallelConfig(tp=4, attn_dp=8, moe_ep=32), "resolution": "search"}
    args = ("zai-org/GLM-5.3-FP8", "gb200", "trtllm")
    assert engine(catalog, *args, role="prefill", **wide).plan.deployment.comm.context is not None
    with pytest.raises(PerfDataMissing):
        engine(catalog, *args, role="both", **wide)


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (("Qwen/Qwen4",), UnknownName),
        (("Qwen/Qwen3-32B", "h300"), UnknownName),
        (("Qwen/Qwen3-32B", "h200_sxm", "tgi"), EngineError),
    ],
)
def test_unknown_names_are_typed(catalog, args, error):
    with pytest.raises(error):
        engine(catalog, *args)
