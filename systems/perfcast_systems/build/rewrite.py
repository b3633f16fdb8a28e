"""From the rows of a file to the rows of tables: the exceptions of spec/01 sections 6.2 to 6.6.

A rewrite takes the admitted rows of one file and gives ``Part``s, one per table that the file feeds. Order of rows is
kept: it decides which duplicate wins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from perfcast_systems.build.parts import Part, nodes_of_ep, plain
from perfcast_systems.build.rows import Index, Names, Rows
from perfcast_systems.build.tree import BuildError

GPUS_PER_DEEPEP_NODE = 8
MOE_BY_KERNEL = {
    ("w4a8_mxfp4_mxfp8", "sglang_mxfp4_flashinfer_trtllm_moe"): "w4a8_mxfp4_mxfp8_trtllm",
    ("w4a16_mxfp4", "sglang_flashinfer_cutlass_moe"): "w4a16_mxfp4_cutlass",
}
LOW_LATENCY_MOE = "moe_torch_flow_min_latency"
GATED_DELTA_ALIASES = (
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gated_delta_rule_packed_decode",
)
GATED_DELTA = "fused_sigmoid_gating_delta_rule_update"
ALLTOALL_KERNELS = {"NVLinkTwoSided": "nvlink_two_sided", "NVLinkOneSided": "nvlink_one_sided"}
ALLTOALL_PHASES = {
    "alltoall_prepare": "prepare",
    "alltoall_dispatch": "dispatch",
    "alltoall_combine": "combine",
    "alltoall_combine_low_precision": "combine",
}
ONE_BUCKET = {
    "sglang_dsa_indexer_trtllm": "trtllm",
    "sglang_dsa_skip_indexer_trtllm": "trtllm",
    "sglang_dsa_indexer_flashmla_sparse": "flashmla_kv",
    "sglang_dsa_skip_indexer_flashmla_sparse": "flashmla_kv",
}
BOTH_BUCKETS = "sglang_dsa_dense_mha_trtllm_ragged"


def _gemm(rows: Rows, system: str) -> list[Part]:
    return [plain(rows.take(~rows.name("gemm_dtype").where(lambda dtype: dtype in ("awq", "gptq"))), "gemm")]


def _allreduce(rows: Rows, system: str) -> list[Part]:
    if system != "b60":
        eager = np.zeros(rows.n, np.bool_)
        for column in ("kernel_source", "backend"):
            if column in rows.names:
                eager |= rows.names[column].where(lambda kernel: kernel.endswith("_eager"))
        rows = rows.take(~eager)
    return [plain(rows, "custom_allreduce")]


def _moe(rows: Rows, system: str) -> list[Part]:
    kernel, dtype = rows.name("kernel_source", "default"), rows.name("moe_dtype")
    for (old, by), new in MOE_BY_KERNEL.items():
        routed = kernel.where(by.__eq__) & dtype.where(old.__eq__)
        if routed.any():
            names = (*dtype.values, new)
            dtype = Names(np.where(routed, len(names) - 1, dtype.codes), names)
    low = kernel.where(LOW_LATENCY_MOE.__eq__)
    return [
        plain(rows.take(rows_of), table, moe_dtype=dtype.take(rows_of))
        for table, rows_of in (("moe", ~low), ("moe_low_latency", low))
    ]


def _buckets(rows: Rows) -> tuple[Index, Names]:
    """Row numbers, those in both buckets twice in a row, and the bucket of each."""
    kernel = rows.name("kernel_source", "default")
    both = rows.name("kv_cache_dtype").where("bfloat16".__eq__) | kernel.where(BOTH_BUCKETS.__eq__)
    trtllm = kernel.where(
        lambda name: ONE_BUCKET.get(name, "trtllm" if "trtllm" in name else "flashmla_kv") == "trtllm"
    )
    index = np.repeat(np.arange(rows.n), np.where(both, 2, 1))
    second = np.r_[False, index[1:] == index[:-1]]
    bucket = np.where(both[index], second, ~trtllm[index]).astype(np.int64)
    return index, Names(bucket, ("trtllm", "flashmla_kv"))


def _sparse(*tables: str) -> Callable[[Rows, str], list[Part]]:
    """Bucketed module tables; the second one, if any, takes the rows that skip the indexer."""

    def rewrite(rows: Rows, system: str) -> list[Part]:
        skip = rows.name("op_name", "").where(lambda name: "skip_indexer" in name)
        parts = []
        for table, chosen in zip(tables, (~skip, skip), strict=False):
            part = rows.take(chosen)
            index, bucket = _buckets(part)
            parts.append(plain(part.take(index), table, bucket=bucket))
        return parts

    return rewrite


def _dsv4(table: str) -> Callable[[Rows, str], list[Part]]:
    def e4m3(name: str) -> str:
        return "fp8" if name == "fp8_e4m3" else name

    def rewrite(rows: Rows, system: str) -> list[Part]:
        given = {column: rows.name(column).renamed(e4m3) for column in ("mla_dtype", "kv_cache_dtype")}
        return [plain(rows, table, **given)]

    return rewrite


def _megamoe(rows: Rows, system: str) -> list[Part]:
    wanted = {"used_cuda_graph": 1, "includes_gate_topk": 0, "includes_routed_scale": 1}
    bad = [column for column, value in wanted.items() if np.any(rows.number(column) != value)]
    if bad or rows.name("phase").where(lambda phase: phase not in ("context", "generation")).any():
        raise BuildError(f"{rows.origin}: rows outside the modelled form ({', '.join(bad) or 'phase'})")
    part = plain(rows, "dsv4_megamoe_module")
    codes = [column.codes if isinstance(column, Names) else column for column in part.columns]
    if len(np.unique(np.stack(codes), axis=1).T) < part.n:
        raise BuildError(f"{rows.origin}: a key occurs twice")
    return [part]


def _state(table: str, rename: Mapping[str, str], lengths: tuple[str, ...]) -> Callable[[Rows, str], list[Part]]:
    """State-space kernels: ``lengths`` are the phases that have a length axis; kernels renamed by ``rename``."""

    def rewrite(rows: Rows, system: str) -> list[Part]:
        kernel = rows.name("kernel_source").renamed(lambda name: rename.get(name, name))
        long = rows.name("phase").where(lambda phase: phase in lengths)
        return [plain(rows, table, kernel_source=kernel, seq_len=np.where(long, rows.number("seq_len"), 0))]

    return rewrite


def _mamba2(rows: Rows, system: str) -> list[Part]:
    return [plain(rows.take(rows.name("phase").where("context".__eq__)), "mamba2")]


def _a2a(rows: Rows, system: str) -> list[Part]:
    part = plain(rows, "moe_a2a", sms=rows.number("sms", 0))
    return [Part(part.table, part.columns, part.ms / 1000)]


def _deepep(backend: str, terms: Mapping[str, tuple[str, ...]]) -> Callable[[Rows, str], list[Part]]:
    """DeepEP files: one row gives one leaf per phase, the sum of its microsecond ``terms``."""

    def rewrite(rows: Rows, system: str) -> list[Part]:
        micros = np.stack([sum((rows.real(term, 0.0) for term in part), np.zeros(rows.n)) for part in terms.values()])
        n = len(terms)
        twice = rows.take(np.repeat(np.arange(rows.n), n))
        nodes = twice.number("node_num")
        key = plain(
            Rows(rows.origin, twice.n, twice.names, twice.numbers, {"latency": micros.T.ravel() / 1000}),
            "moe_a2a",
            comm_backend=Names.constant(backend, twice.n),
            phase=Names(np.tile(np.arange(n), rows.n), tuple(terms)),
            comm_dtype=Names.constant("default", twice.n),
            ep_size=nodes * GPUS_PER_DEEPEP_NODE,
            topk=twice.number("num_topk"),
            sms=twice.number("dispatch_sms", 0),
            num_tokens=twice.number("num_token"),
        )
        return [key]

    return rewrite


def _alltoall(rows: Rows, system: str) -> list[Part]:
    own = plain(rows, "trtllm_alltoall")
    kernel, op = rows.name("kernel_source", "NVLinkTwoSided"), rows.name("op_name")
    known = rows.take(kernel.where(ALLTOALL_KERNELS.__contains__) & op.where(ALLTOALL_PHASES.__contains__))
    dtype = known.name("moe_dtype")
    low = known.name("op_name").where("alltoall_combine_low_precision".__eq__)
    unified = plain(
        known,
        "moe_a2a",
        comm_backend=known.name("kernel_source", "NVLinkTwoSided").renamed(ALLTOALL_KERNELS.__getitem__),
        phase=known.name("op_name").renamed(ALLTOALL_PHASES.__getitem__),
        comm_dtype=Names(np.where(low, len(dtype.values), dtype.codes), (*dtype.values, "fp4")).renamed(str),
        ep_size=known.number("moe_ep_size"),
        node_num=nodes_of_ep(known),
        sms=np.zeros(known.n, np.int64),
    )
    return [own, unified]


def _expert_compute(phase: str) -> Callable[[Rows, str], list[Part]]:
    def rewrite(rows: Rows, system: str) -> list[Part]:
        return [
            plain(
                rows,
                "moe_expert_compute",
                kernel_source=Names.constant("deepep_moe", rows.n),
                inference_phase=Names.constant(phase, rows.n),
                num_slots=rows.number("num_experts"),
            )
        ]

    return rewrite


def _wideep_moe(rows: Rows, system: str) -> list[Part]:
    twice = rows.take(np.repeat(np.arange(rows.n), 2))
    phase = Names(np.tile(np.arange(2), rows.n), ("context", "generation"))
    kernel = twice.name("kernel_source", "moe_torch_flow")
    return [plain(twice, "moe_expert_compute", inference_phase=phase, kernel_source=kernel)]


REWRITES: Mapping[str, Callable[[Rows, str], list[Part]]] = {
    "gemm": _gemm,
    "custom_allreduce": _allreduce,
    "moe": _moe,
    "dsa_context_module": _sparse("dsa_context", "dsa_context_skip"),
    "dsa_generation_module": _sparse("dsa_generation", "dsa_generation_skip"),
    "msa_context_module": _sparse("msa_context"),
    "msa_generation_module": _sparse("msa_generation"),
    "dsv4_csa_context_module": _dsv4("dsv4_csa_context_module"),
    "dsv4_hca_context_module": _dsv4("dsv4_hca_context_module"),
    "dsv4_csa_generation_module": _dsv4("dsv4_csa_generation_module"),
    "dsv4_hca_generation_module": _dsv4("dsv4_hca_generation_module"),
    "dsv4_megamoe_module": _megamoe,
    "mamba2": _mamba2,
    "gdn": _state("gdn", dict.fromkeys(GATED_DELTA_ALIASES, GATED_DELTA), ("context",)),
    "kda": _state("kda", {}, ("context", "verify")),
    "moe_a2a": _a2a,
    "wideep_deepep_normal": _deepep(
        "deepep_ht",
        {
            "dispatch": ("dispatch_transmit_us", "dispatch_notify_us"),
            "combine": ("combine_transmit_us", "combine_notify_us"),
        },
    ),
    "wideep_deepep_ll": _deepep("deepep_ll", {"dispatch": ("dispatch_avg_t_us",), "combine": ("combine_avg_t_us",)}),
    "trtllm_alltoall": _alltoall,
    "wideep_context_moe": _expert_compute("context"),
    "wideep_generation_moe": _expert_compute("generation"),
    "wideep_moe": _wideep_moe,
}


def rewrite(stem: str, rows: Rows, system: str) -> list[Part]:
    """What the rows of one file mean for the tables it feeds."""
    special = REWRITES.get(stem)
    return special(rows, system) if special else [plain(rows, stem)]
