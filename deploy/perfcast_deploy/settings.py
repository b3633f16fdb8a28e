"""What an engine is told of a role, under our names (data/flags.yaml), and back."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from perfcast_engine.errors import InvalidField, UnsupportedCombination

from perfcast_deploy.deployment import Deployment, Role
from perfcast_deploy.flags import check

Settings = dict[str, Any]
SAME = (  # told as the role has them, unless the engine counts otherwise
    *("tp", "pp", "dp", "max_batch", "max_tokens", "max_seq_len", "kv_fraction", "kv_dtype", "chunked_prefill"),
    *("prefix_caching", "tokens_per_block", "moe_backend", "moe_all_to_all", "attention_backend"),
)


def round_up(value: int, step: int) -> int:
    return step * math.ceil(value / step)


def capture_sizes(batch: int) -> list[int]:
    """CUDA-graph batch sizes: fine below 16, coarser above, dense just around ``batch`` (specification 08, 5.2)."""
    spans = ((1, 17, 1), (16, 33, 4), (32, 65, 8), (64, 129, 16), (128, 257, 32), (256, 513, 64))
    low = 1 if batch <= 8 else batch - 8
    return sorted({size for span in spans for size in range(*span)} | set(range(low, batch + 9)))


def _vllm(d: Deployment, role: Role) -> Settings:
    sequences = role.max_batch * (d.nextn + 1)
    captured = sequences > 512 and role.cuda_graphs  # vLLM captures up to 512 sequences by itself
    return {
        "enable_expert_parallel": role.moe_ep > 1 or None,
        "cuda_graph_batch_sizes": capture_sizes(sequences) if captured else None,
        "speculation": {"method": "mtp", "num_speculative_tokens": d.nextn} if d.nextn else None,
    }


def _sglang(d: Deployment, role: Role) -> Settings:
    if role.dp > 1 and not d.is_moe:
        raise UnsupportedCombination(f"roles.{role.name}.dp", "SGLang attention DP is for MoE models; use more workers")
    drafts = {"speculative_algorithm": "NEXTN", "speculative_topk": 1, "speculative_draft_tokens": d.nextn + 1}
    # SGLang divides the request and chunk limits by the number of attention-DP ranks
    return {
        "tp": role.tp * role.dp,
        "enable_attention_dp": role.dp > 1 or None,
        "moe_ep": role.moe_ep if d.is_moe else None,
        "max_batch": role.max_batch * role.dp,
        "max_tokens": None,
        "max_prefill_tokens": role.max_tokens,
        "chunked_prefill": None,
        "chunked_prefill_tokens": role.max_tokens * role.dp if role.chunked_prefill else -1,
        "enable_mixed_chunk": (role.name == "agg" and role.chunked_prefill) or None,
        "prefix_caching": None,
        "disable_prefix_cache": not role.prefix_caching or None,
        "cuda_graph_max_batch_size": role.max_batch if role.cuda_graphs else None,
        "kv_transfer_backend": None if role.name == "agg" else "nixl",
    } | (drafts | {"speculative_steps": d.nextn} if d.nextn else {})


def _trtllm(d: Deployment, role: Role) -> Settings:
    paired = role.name != "agg"
    return {
        "engine_backend": "pytorch",
        "tp": role.tp * role.dp,
        "dp": None,
        "enable_attention_dp": role.dp > 1,
        "moe_tp": role.moe_tp if d.is_moe else None,
        "moe_ep": role.moe_ep if d.is_moe else None,
        "cuda_graph_padding": True if role.cuda_graphs else None,
        "cuda_graph_max_batch_size": role.max_batch if role.cuda_graphs else None,
        "disable_overlap_scheduler": role.name == "prefill",
        "transceiver_backend": "DEFAULT" if paired else None,
        "transceiver_tokens": round_up(role.max_seq_len, role.tokens_per_block or 32) if paired else None,
        "speculative_type": "MTP" if d.nextn else None,
        "speculative_steps": d.nextn or None,
        "gpus_per_node": d.cluster.gpus_per_node if d.nodes(role) > 1 else None,
    }


OWN: Mapping[str, Callable[[Deployment, Role], Settings]] = {"vllm": _vllm, "sglang": _sglang, "trtllm": _trtllm}


def told(d: Deployment, role: Role) -> Settings:
    """What the engine is told of ``role``, checked against its version."""
    settings = {name: getattr(role, name) for name in SAME} | OWN[d.backend](d, role)
    settings |= {"disable_cuda_graph": not role.cuda_graphs or None, "trust_remote_code": d.trust_remote_code or None}
    check(d.backend, d.version, settings)
    return settings


def role_of(backend: str, settings: Mapping[str, Any], is_moe: bool | None) -> Settings:
    """The inverse of ``told``: fields of ``Role``; what is not set is left out.

    ``is_moe`` None (unknown) leaves the expert sizes out.
    """
    found = {name: settings[name] for name in SAME if settings.get(name) is not None}
    tp, dp, expert = (settings.get(name, 1) for name in ("tp", "dp", "moe_ep"))
    if backend == "trtllm":
        tp, dp = (1, tp) if settings.get("enable_attention_dp") else (tp, 1)
    elif backend == "vllm":
        expert = tp * dp if settings.get("enable_expert_parallel") else 1
    elif settings.get("enable_attention_dp"):
        if dp < 1 or tp % dp:
            words = f"{dp} must divide the tensor size {tp} under attention DP"
            raise InvalidField("data-parallel-size", words, "parallel")
        tp //= dp
    found |= {"tp": tp, "pp": settings.get("pp", 1), "dp": dp, "cuda_graphs": not settings.get("disable_cuda_graph")}
    if is_moe is not None:
        found |= {"moe_ep": expert if is_moe else 1, "moe_tp": max(tp * dp // expert, 1) if is_moe else 1}
    if backend == "sglang":
        chunk, tokens = settings.get("chunked_prefill_tokens"), settings.get("max_prefill_tokens")
        found |= {"prefix_caching": not settings.get("disable_prefix_cache")}
        found |= {} if chunk is None else {"chunked_prefill": chunk > 0}
        found |= {} if tokens is None else {"max_tokens": tokens}
        found |= {"max_batch": max(found["max_batch"] // dp, 1)} if "max_batch" in found else {}
    return found


def nextn_of(settings: Mapping[str, Any]) -> int:
    """The speculative depth that settings say."""
    speculation = settings.get("speculation") or {}
    return int(settings.get("speculative_steps") or speculation.get("num_speculative_tokens") or 0)
