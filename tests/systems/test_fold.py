"""How rows become tables: which duplicate wins, and the exceptions (spec/01 sections 6 and 7.2)."""

from pathlib import Path

import pytest

from tests.systems.trees import ATTENTION, DSA, GEMM, MOE, STATE, Tree, leaves


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path / "root")


def test_the_first_row_wins_in_a_file_and_the_earlier_file_wins(tree: Tree):
    tree.put(
        "gpu/gemm/vllm/1.0.0/gemm",
        [{"m": 8, "latency": 3.0}, {"m": 1, "latency": 1.0}, {"m": 8, "latency": 4.0, "kernel_source": "other"}],
        GEMM,
    )
    tree.put("gpu/gemm/vllm/0.9.0/gemm", [{"m": 1, "latency": 9.0}, {"m": 2, "latency": 2.0}], GEMM)
    table = tree.build()["vllm/1.0.0"].table("gemm")
    assert leaves(table) == {
        ("bfloat16", 1, 64, 64): 1.0,
        ("bfloat16", 2, 64, 64): 2.0,
        ("bfloat16", 8, 64, 64): 3.0,
    }
    assert leaves(table, own=True) == {("bfloat16", 1, 64, 64): 1.0, ("bfloat16", 8, 64, 64): 3.0}
    assert table is not None and [s["version"] for s in table.sources] == ["1.0.0", "0.9.0"]
    assert table.first == (2, 0)  # m=8 opens the own file, m=1 the older one


def test_names_are_numbered_by_first_appearance_and_skipped_quants_leave_none(tree: Tree):
    rows = [{"gemm_dtype": name, "latency": 1.0} for name in ("awq", "nvfp4", "bfloat16", "gptq", "fp8")]
    tree.put("gpu/gemm/vllm/1.0.0/gemm", rows, GEMM)
    table = tree.build()["vllm/1.0.0"].table("gemm")
    assert table is not None and table.vocab == {"gemm_dtype": ("nvfp4", "bfloat16", "fp8")}


def test_gemm_sites_are_ranked_in_the_order_of_a_walk_over_m_then_n_then_k(tree: Tree):
    shapes = [(4, 128, 64), (8, 32, 32), (4, 64, 96), (4, 128, 32), (8, 64, 16), (4, 64, 32)]
    tree.put("gpu/gemm/vllm/1.0.0/gemm", [{"m": m, "n": n, "k": k, "latency": 1.0} for m, n, k in shapes], GEMM)
    ranks = leaves(tree.build()["vllm/1.0.0"].table("gemm_sites"))
    order = sorted(ranks, key=lambda key: ranks[key])
    assert [key[1:] for key in order] == [(128, 64), (128, 32), (64, 96), (64, 32), (32, 32), (64, 16)]


def test_sparse_modules_let_the_last_row_of_a_file_win_but_the_first_file(tree: Tree):
    where = "gpu/sparse_attention/sglang"
    tree.put(f"{where}/1.0.0/dsa_context_module", [{"latency": 1.0}, {"latency": 2.0}], DSA)
    tree.put(f"{where}/0.9.0/dsa_context_module", [{"latency": 8.0}, {"isl": 256, "latency": 9.0}], DSA)
    table = leaves(tree.build()["sglang/1.0.0"].table("dsa_context"))
    key = ("bfloat16", "fp8", "fp8_block", "DeepseekV32ForCausalLM", "flashmla_kv", 16, 0)
    assert table == {(*key, 128, 1): 2.0, (*key, 256, 1): 9.0}


def test_sparse_generation_collapses_isl_and_step_before_the_last_row_wins(tree: Tree):
    rows = [{"isl": 1, "step": 7, "latency": 1.0}, {"isl": 4, "step": 4, "latency": 2.0}]
    tree.put("gpu/sparse_attention/sglang/1.0.0/dsa_generation_module", rows, DSA)
    table = leaves(tree.build()["sglang/1.0.0"].table("dsa_generation"))
    assert table == {("fp8", "fp8_block", "DeepseekV32ForCausalLM", "flashmla_kv", 16, 1, 8): 2.0}


@pytest.mark.parametrize(
    ("kv", "kernel", "buckets"),
    [
        ("bfloat16", "anything", {"trtllm", "flashmla_kv"}),
        ("fp8", "sglang_dsa_dense_mha_trtllm_ragged", {"trtllm", "flashmla_kv"}),
        ("fp8", "sglang_dsa_indexer_trtllm", {"trtllm"}),
        ("fp8", "sglang_dsa_skip_indexer_flashmla_sparse", {"flashmla_kv"}),
        ("fp8", "new_trtllm_kernel", {"trtllm"}),
        ("fp8", "default", {"flashmla_kv"}),
    ],
)
def test_sparse_rows_fall_into_buckets_by_cache_type_and_kernel(tree: Tree, kv: str, kernel: str, buckets: set[str]):
    row = {"kv_cache_dtype": kv, "kernel_source": kernel, "latency": 1.0}
    tree.put("gpu/sparse_attention/sglang/1.0.0/dsa_context_module", [row], DSA)
    assert {key[4] for key in leaves(tree.build()["sglang/1.0.0"].table("dsa_context"))} == buckets


def test_rows_that_skip_the_indexer_are_a_table_of_their_own(tree: Tree):
    rows = [{"latency": 1.0}, {"op_name": "dsa_context_module_skip_indexer", "latency": 2.0}]
    tree.put("gpu/sparse_attention/sglang/1.0.0/dsa_context_module", rows, DSA)
    pack = tree.build()["sglang/1.0.0"]
    assert list(leaves(pack.table("dsa_context")).values()) == [1.0]
    assert list(leaves(pack.table("dsa_context_skip")).values()) == [2.0]


def test_attention_keeps_a_row_per_lane_and_knows_which_lane_came_first(tree: Tree):
    rows = [
        {"kernel_source": "triton", "latency": 1.0},
        {"kernel_source": "fa3", "latency": 2.0},
        {"kernel_source": "fa3", "isl": 32, "latency": 3.0},
        {"kernel_source": "triton", "latency": 4.0},
    ]
    tree.put("gpu/attention/sglang/1.0.0/context_attention", rows, ATTENTION)
    table = tree.build()["sglang/1.0.0"].table("context_attention")
    rest = ("bfloat16", "fp8", 0, 128, 0, 8)  # as many KV heads as heads, and no window column
    assert leaves(table) == {
        ("triton", *rest, 64, 1): 1.0,
        ("fa3", *rest, 32, 1): 3.0,
        ("fa3", *rest, 64, 1): 2.0,
    }
    assert table is not None and table.shadowed.tolist() == [False, False, True]


def test_moe_rewrites_types_by_kernel_and_parts_the_low_latency_kernel(tree: Tree):
    rows = [
        {"moe_dtype": "w4a16_mxfp4", "kernel_source": "sglang_flashinfer_cutlass_moe", "latency": 1.0},
        {"moe_dtype": "w4a16_mxfp4", "kernel_source": "triton", "latency": 2.0},
        {"moe_dtype": "w4a8_mxfp4_mxfp8", "kernel_source": "sglang_mxfp4_flashinfer_trtllm_moe", "latency": 3.0},
        {"moe_dtype": "nvfp4", "kernel_source": "moe_torch_flow_min_latency", "latency": 4.0},
        {"moe_dtype": "nvfp4", "kernel_source": "moe_torch_flow", "latency": 5.0},
        {"moe_dtype": "nvfp4", "kernel_source": "slower", "latency": 6.0},
    ]
    tree.put("gpu/moe/sglang/1.0.0/moe", rows, MOE)
    pack = tree.build()["sglang/1.0.0"]
    assert {key[0]: ms for key, ms in leaves(pack.table("moe")).items()} == {
        "w4a16_mxfp4_cutlass": 1.0,
        "w4a16_mxfp4": 2.0,
        "w4a8_mxfp4_mxfp8_trtllm": 3.0,
        "nvfp4": 5.0,
    }
    assert {key[0]: ms for key, ms in leaves(pack.table("moe_low_latency")).items()} == {"nvfp4": 4.0}


@pytest.mark.parametrize(("system", "kept"), [("gpu", [2.0]), ("b60", [1.0])])
def test_allreduce_drops_eager_kernels_except_on_b60_and_merges_strategies(tree: Tree, system: str, kept: list[float]):
    base = {"num_gpus": 2, "message_size": 2**33, "allreduce_dtype": "float16"}
    rows = [{"kernel_source": "x_eager", "latency": 1.0}, {"kernel_source": "one", "latency": 2.0}]
    tree.put(f"{system}/comm/vllm/1.0.0/custom_allreduce", rows, base)
    table = tree.build([f"{system}/vllm"])["vllm/1.0.0"].table("custom_allreduce")
    assert leaves(table) == {("half", 2, "AUTO", 2**33): kept[0]}


def test_other_backends_lend_only_admitted_kernels(tree: Tree):
    base = {**STATE, "phase": "context", "seq_len": 16, "kernel_source": "conv"}
    tree.share("gdn", "conv", ["sglang", "vllm"])
    tree.share("gdn", "scan", ["sglang", "vllm"], tier="absence_load_bearing")
    tree.put("gpu/linear_attention/vllm/1.0.0/gdn", [{"latency": 1.0}], base)
    lent = [
        {"latency": 8.0},
        {"seq_len": 32, "latency": 2.0},
        {"kernel_source": "scan", "latency": 9.0},
    ]
    tree.put("gpu/linear_attention/sglang/1.0.0/gdn", lent, base)
    table = tree.build(["gpu/vllm"])["vllm/1.0.0"].table("gdn")
    key = ("conv", "context", 1, 2, 3, 4, 5, 6, 1)
    assert leaves(table) == {(*key, 16): 1.0, (*key, 32): 2.0}
    assert leaves(table, own=True) == {(*key, 16): 1.0}
    assert table is not None and [(s["channel"], s["rows"]) for s in table.sources] == [
        ("primary", 1),
        ("cross_backend", 2),
    ]


def test_gated_delta_kernels_are_renamed_and_decode_has_no_length(tree: Tree):
    row = {**STATE, "phase": "generation", "kernel_source": "fused_recurrent_gated_delta_rule"}
    tree.put("gpu/linear_attention/vllm/1.0.0/gdn", [{**row, "seq_len": s, "latency": float(s)} for s in (7, 9)])
    assert leaves(tree.build()["vllm/1.0.0"].table("gdn")) == {
        ("fused_sigmoid_gating_delta_rule_update", "generation", 1, 2, 3, 4, 5, 6, 1, 0): 7.0
    }


def test_all_to_all_files_are_one_table_tier_by_tier(tree: Tree):
    shape = {"hidden_size": 7168, "num_experts": 256}
    legacy = {**shape, "node_num": 1, "num_topk": 8, "num_token": 16, "kernel_source": "deepep"}
    normal = {**legacy, "dispatch_sms": 20}
    newer = {**shape, "topk": 8, "comm_backend": "deepep_ht", "comm_dtype": "default", "ep_size": 8, "node_num": 1}
    times = {
        "dispatch_transmit_us": 10.0,
        "dispatch_notify_us": 2.0,
        "combine_transmit_us": 5.0,
        "combine_notify_us": 1.0,
    }
    tree.put("gpu/comm/sglang/1.0.0/wideep_deepep_normal", [{**normal, **times}])
    tree.put(
        "gpu/comm/sglang/0.9.0/wideep_deepep_ll", [{**legacy, "dispatch_avg_t_us": 30.0, "combine_avg_t_us": 40.0}]
    )
    unified = [
        {**newer, "phase": phase, "sms": 20, "num_tokens": tokens, "latency": us}
        for phase, tokens, us in (("dispatch", 16, 99000.0), ("combine", 32, 7000.0))
    ]
    tree.put("gpu/comm/sglang/0.9.0/moe_a2a", unified, {"kernel_source": "deepep"})
    table = leaves(tree.build()["sglang/1.0.0"].table("moe_a2a"))
    tail = (8, 1, 7168, 8, 256)
    assert table == {
        ("deepep_ht", "dispatch", "default", *tail, 20, 16): 0.012,  # the requested version, whatever an older one says
        ("deepep_ht", "combine", "default", *tail, 20, 16): 0.006,
        ("deepep_ht", "combine", "default", *tail, 20, 32): 7.0,
        ("deepep_ll", "dispatch", "default", *tail, 0, 16): 0.03,
        ("deepep_ll", "combine", "default", *tail, 0, 16): 0.04,
    }


def test_expert_compute_unites_both_families_and_enters_trtllm_rows_in_both_phases(tree: Tree):
    row = {**MOE, "latency": 1.0}
    tree.put("gpu/moe/sglang/1.0.0/wideep_generation_moe", [row])
    tree.put("gpu/moe/sglang/1.0.0/wideep_moe", [{**row, "kernel_source": "cutlass", "num_slots": 288, "latency": 2.0}])
    table = leaves(tree.build()["sglang/1.0.0"].table("moe_expert_compute"))
    shape = (2048, 768, 1, 1, 1)
    assert table == {
        ("deepep_moe", "bfloat16", "balanced", "generation", 8, 128, 128, *shape): 1.0,
        ("cutlass", "bfloat16", "balanced", "context", 8, 128, 288, *shape): 2.0,
        ("cutlass", "bfloat16", "balanced", "generation", 8, 128, 288, *shape): 2.0,
    }


def test_a_table_that_cannot_be_used_is_left_out_and_the_others_are_kept(tree: Tree):
    row = {**DSA, "model": "who/knows", "latency": 1.0}
    tree.put("gpu/mla/vllm/1.0.0/mla_context_module", [row])
    tree.put("gpu/gemm/vllm/1.0.0/gemm", [{"latency": 1.0}], GEMM)
    damaged = tree.put("gpu/moe/vllm/1.0.0/moe", [{"latency": 1.0}], MOE)
    damaged.write_bytes(damaged.read_bytes()[:-30])
    pack = tree.build()["vllm/1.0.0"]
    assert pack.table("mla_context_module") is None and pack.table("moe") is None
    assert "unknown model 'who/knows'" in pack.header["problems"]["mla_context_module"]
    assert "moe_perf.parquet" in pack.header["problems"]["moe"]
    assert pack.table("gemm") is not None


def test_power_is_kept_where_any_row_has_it(tree: Tree):
    tree.put("gpu/gemm/vllm/1.0.0/gemm", [{"latency": 1.0}], GEMM)
    tree.put("gpu/gemm/vllm/0.9.0/gemm", [{"m": 2, "latency": 1.0, "power": 450.0}], GEMM)
    table = tree.build()["vllm/1.0.0"].table("gemm")
    assert table is not None and table.power is not None and table.power.tolist() == [0.0, 450.0]
