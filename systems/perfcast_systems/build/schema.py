"""The tables of a pack as data: name, key columns in nesting order, and the parquet files they come from.

Operators read this list to know what they may ask a database for (spec/01 sections 3 and 6). ``names`` are the key
columns that hold names, coded in order of first appearance in the row stream; all others are numbers. Latencies are
milliseconds in every table but ``gemm_sites``, whose value is a rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

NAMES = frozenset(
    {
        "architecture",
        "attn_dtype",
        "bmm_dtype",
        "bucket",
        "comm_backend",
        "comm_dtype",
        "distribution",
        "gemm_dtype",
        "gemm_type",
        "inference_phase",
        "kernel_dtype",
        "kernel_source",
        "kv_cache_dtype",
        "lane",
        "mla_dtype",
        "moe_dtype",
        "nccl_dtype",
        "op_name",
        "phase",
        "pre_dispatch",
        "quant_dtype",
        "score",
        "score_mode",
        "source_policy",
        "strategy",
    }
)


@dataclass(frozen=True, slots=True)
class TableSchema:
    """One table: its key columns, outermost first, and the stems of the files whose rows it folds."""

    name: str
    key: tuple[str, ...]
    files: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(column for column in self.key if column in NAMES)


def _tables(*rows: tuple[str, str, str]) -> Mapping[str, TableSchema]:
    return MappingProxyType(
        {name: TableSchema(name, tuple(key.split()), tuple(files.split())) for name, key, files in rows}
    )


_ATTENTION = "kv_cache_dtype kvn head_dim window_size num_heads"
_MOE = "moe_dtype distribution topk num_experts hidden_size inter_size moe_tp_size moe_ep_size num_tokens"
_SPARSE = "kv_cache_dtype gemm_type architecture bucket num_heads"
_DSV4 = "kv_cache_dtype gemm_type native_heads num_heads compress_ratio"
_STATE = "d_model num_k_heads head_k_dim num_v_heads head_v_dim d_conv batch_size seq_len"

TABLES = _tables(
    # dense
    ("gemm", "gemm_dtype m n k", "gemm"),
    # rank of each (n, k) in the reference's enumeration, which breaks exact distance ties (spec/02 section 4)
    ("gemm_sites", "gemm_dtype n k", "gemm"),
    ("computescale", "quant_dtype m k", "computescale"),
    ("scale_matrix", "quant_dtype m k", "scale_matrix"),
    # a lane is the kernel_source; kvn is 0 where the KV heads equal the query heads; seq is isl + step
    ("context_attention", f"lane attn_dtype {_ATTENTION} isl batch_size", "context_attention"),
    ("generation_attention", f"lane {_ATTENTION} batch_size seq", "generation_attention"),
    ("encoder_attention", "attn_dtype head_dim num_heads isl batch_size", "encoder_attention"),
    # communication; message_size in elements
    ("custom_allreduce", "nccl_dtype num_gpus strategy message_size", "custom_allreduce"),
    ("nccl", "nccl_dtype op_name num_gpus message_size", "nccl"),
    ("oneccl", "nccl_dtype op_name num_gpus message_size", "oneccl"),
    # latent attention
    ("context_mla", "mla_dtype kv_cache_dtype num_heads isl batch_size", "context_mla"),
    ("generation_mla", "kv_cache_dtype num_heads batch_size seq", "generation_mla"),
    ("mla_bmm", "bmm_dtype op_name num_heads num_tokens", "mla_bmm"),
    (
        "mla_context_module",
        "mla_dtype kv_cache_dtype gemm_type native_heads num_heads isl batch_size",
        "mla_context_module",
    ),
    (
        "mla_generation_module",
        "kv_cache_dtype gemm_type native_heads num_heads batch_size seq",
        "mla_generation_module",
    ),
    ("wideep_context_mla", "kernel_source mla_dtype kv_cache_dtype num_heads isl batch_size", "wideep_context_mla"),
    ("wideep_generation_mla", "kernel_source kv_cache_dtype num_heads batch_size seq", "wideep_generation_mla"),
    # mixture of experts
    ("moe", _MOE, "moe"),
    ("moe_low_latency", _MOE, "moe"),
    (
        "moe_expert_compute",
        "kernel_source moe_dtype distribution inference_phase topk num_experts num_slots hidden_size inter_size"
        " moe_tp_size moe_ep_size num_tokens",
        "wideep_context_moe wideep_generation_moe wideep_moe",
    ),
    (
        "moe_a2a",
        "comm_backend phase comm_dtype ep_size node_num hidden_size topk num_experts sms num_tokens",
        "moe_a2a wideep_deepep_normal wideep_deepep_ll trtllm_alltoall",
    ),
    (
        "trtllm_alltoall",
        "kernel_source op_name moe_dtype num_nodes hidden_size topk num_experts moe_ep_size num_tokens",
        "trtllm_alltoall",
    ),
    (
        "dsv4_megamoe_module",
        "phase kernel_source kernel_dtype moe_dtype pre_dispatch source_policy distribution topk num_experts"
        " num_fused_shared_experts hidden_size inter_size moe_tp_size moe_ep_size num_tokens",
        "dsv4_megamoe_module",
    ),
    # sparse attention; step is the prefix; bucket trtllm or flashmla_kv (a row may be in both)
    ("dsa_context", f"mla_dtype {_SPARSE} step isl batch_size", "dsa_context_module"),
    ("dsa_context_skip", f"mla_dtype {_SPARSE} step isl batch_size", "dsa_context_module"),
    ("dsa_generation", f"{_SPARSE} batch_size seq", "dsa_generation_module"),
    ("dsa_generation_skip", f"{_SPARSE} batch_size seq", "dsa_generation_module"),
    ("msa_context", f"mla_dtype {_SPARSE} step isl batch_size", "msa_context_module"),
    ("msa_generation", f"{_SPARSE} batch_size seq", "msa_generation_module"),
    ("dsv4_csa_context_module", f"mla_dtype {_DSV4} step isl batch_size", "dsv4_csa_context_module"),
    ("dsv4_hca_context_module", f"mla_dtype {_DSV4} step isl batch_size", "dsv4_hca_context_module"),
    ("dsv4_csa_generation_module", f"{_DSV4} batch_size seq", "dsv4_csa_generation_module"),
    ("dsv4_hca_generation_module", f"{_DSV4} batch_size seq", "dsv4_hca_generation_module"),
    (
        "dsv4_paged_mqa_logits_module",
        "num_heads tp_size step isl batch_size",
        "dsv4_paged_mqa_logits_module",
    ),
    # score_mode v1_flat, v1_top_last, v2_flat or v2_top_last
    ("dsv4_csa_topk_calib", "num_heads score_mode step isl batch_size", "dsv4_csa_topk_calib"),
    # score flat or last; prefixes dsv32_ are known to the reference but ship no rows
    ("glm5_mqa_logits_module", "num_heads batch_size isl step", "glm5_mqa_logits_module"),
    ("glm5_topk_module", "num_heads score batch_size isl step", "glm5_topk_module"),
    ("dsv32_mqa_logits_module", "num_heads batch_size isl step", "dsv32_mqa_logits_module"),
    ("dsv32_topk_module", "num_heads score batch_size isl step", "dsv32_topk_module"),
    ("mhc_module", "op_name hc_mult hidden_size num_tokens", "mhc_module"),
    # state-space and linear attention; seq_len is 0 where a phase has no length axis; mamba2 holds context rows only
    (
        "mamba2",
        "kernel_source phase d_model d_state d_conv nheads head_dim n_groups chunk_size batch_size seq_len",
        "mamba2",
    ),
    ("gdn", f"kernel_source phase {_STATE}", "gdn"),
    ("kda", f"kernel_source phase {_STATE}", "kda"),
)
