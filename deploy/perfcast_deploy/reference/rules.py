"""The reference's rule sets, production and benchmark, as a table in order of evaluation. Specification 08, 5."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from perfcast_deploy.reference.request import Request
from perfcast_deploy.settings import capture_sizes, round_up

RENAMED = {
    "tensor_parallel_size": "tp",
    "pipeline_parallel_size": "pp",
    "data_parallel_size": "dp",
    "moe_tensor_parallel_size": "moe_tp",
    "moe_expert_parallel_size": "moe_ep",
    "max_batch_size": "max_batch",
    "max_num_tokens": "max_tokens",
    "kv_cache_dtype": "kv_dtype",
    "enable_chunked_prefill": "chunked_prefill",
    "kv_cache_free_gpu_memory_fraction": "kv_fraction",
    "cuda_graph_enable_padding": "cuda_graph_padding",
    "moe_all2all_backend": "moe_all_to_all",
}


@dataclass(frozen=True)
class Scope:
    """What a rule sees: the workload and the parameters of its own role, as far as earlier rules set them."""

    role: str
    params: dict[str, Any]
    isl: int
    osl: int
    is_moe: bool
    margin: int

    def __getitem__(self, name: str) -> Any:
        return self.params.get(name) or 0

    @property
    def batch(self) -> int:
        return int(self["max_batch"])

    @property
    def block(self) -> int:
        return self.params.get("tokens_per_block") or 32

    def up(self, tokens: int) -> int:
        return round_up(tokens, self.block)

    def tensor(self, ranks: int = 1) -> Any:
        """Tensor size: of the experts over ``ranks`` for MoE, as the row says otherwise."""
        experts = self["moe_tp"] * self["moe_ep"]
        return experts // ranks if self.is_moe else self["tp"]


@dataclass(frozen=True)
class Rule:
    """``param = value(scope)`` for backends, roles and rule sets; ``limit``: not under preserve_engine_limits."""

    param: str
    backends: str
    roles: str
    value: Callable[[Scope], Any]
    sets: str = "production benchmark"
    limit: bool = False


ALL, PAIR, BOTH, ANY = "agg prefill decode", "prefill decode", "agg decode", "vllm sglang trtllm"
RULES = (
    Rule("cuda_graph_batch_sizes", "trtllm sglang", BOTH, lambda s: capture_sizes(s.batch), "production"),
    Rule("cuda_graph_padding", "trtllm sglang", BOTH, lambda s: True, "production"),
    Rule("max_batch", ANY, "prefill", lambda s: s.batch or 1, limit=True),
    Rule("max_batch", "trtllm", BOTH, lambda s: s.batch or 128, limit=True),
    Rule("max_batch", "vllm sglang", BOTH, lambda s: max(512, 2 * s.batch * (s.batch > 511)), "production", True),
    Rule("max_batch", "vllm", "decode", lambda s: s.batch or 128, "benchmark", True),
    Rule("max_batch", "sglang", BOTH, lambda s: s.batch or 128, "benchmark", True),
    Rule("cuda_graph_batch_sizes", ANY, ALL, lambda s: list(range(1, s.batch + 1)), "benchmark"),
    Rule("disable_overlap_scheduler", "trtllm", ALL, lambda s: s.role == "prefill"),
    Rule("tokens_per_block", "trtllm", ALL, lambda s: s.block),
    Rule("max_tokens", "trtllm", "prefill", lambda s: s.up(s.isl + s.margin), limit=True),
    Rule("max_tokens", "trtllm", "decode", lambda s: s.up(s.batch), limit=True),
    Rule("max_tokens", "trtllm", "agg", lambda s: s.up(s.batch + s.isl + s.margin), limit=True),
    Rule("transceiver_tokens", "trtllm", PAIR, lambda s: s.up(s.isl + s.osl + s.margin), limit=True),
    Rule("max_tokens", "vllm", "prefill", lambda s: s.isl + 1500, limit=True),
    Rule("max_tokens", "vllm", "decode", lambda s: s.batch, limit=True),
    Rule("max_tokens", "vllm", "agg", lambda s: s.batch + s.isl + 1500, limit=True),
    Rule("max_seq_len", "vllm", "agg", lambda s: s.isl + s.osl + 1500, limit=True),
    Rule("max_prefill_tokens", "sglang", ALL, lambda s: s.isl + 1500, limit=True),
    Rule("enable_mixed_chunk", "sglang", "agg", lambda s: True),
    Rule("kv_transfer_backend", "sglang", PAIR, lambda s: s.params.get("kv_transfer_backend") or "nixl"),
    Rule("tp", "trtllm sglang", ALL, lambda s: s.tensor()),
    Rule("tp", "vllm", ALL, lambda s: s.tensor(s["dp"]), "production"),
    Rule("enable_attention_dp", "trtllm sglang", ALL, lambda s: s["dp"] > 1 and s.is_moe),
    Rule("enable_expert_parallel", "vllm", ALL, lambda s: s["moe_ep"] > 1),
)


def role_params(request: Request) -> dict[str, dict[str, Any]]:
    """Engine parameters of every role after the rule set."""
    keep, nextn = bool(request.overrides.get("preserve_engine_limits")), request.get("nextn") or 0
    margin = 500 if request.rule == "production" else 1500
    result = {role: _given(request, role) for role in request.roles}
    merged = {name: value for params in result.values() for name, value in params.items()}
    for role, params in result.items():
        scope = Scope(role, params, request["isl"], request["osl"], request["is_moe"], margin)
        for rule in RULES:
            names = (request.backend, rule.backends), (role, rule.roles), (request.rule, rule.sets)
            if all(name in known.split() for name, known in names) and not (rule.limit and keep):
                params[rule.param] = rule.value(scope)
        params["gpus_per_worker"] = math.prod(params.get(name) or 1 for name in ("tp", "pp", "dp"))
        params |= _features(request, params, nextn)
        # this rule looks at the merged role, so that decode decides for prefill
        half = merged.get("kv_dtype") in ("bfloat16", "float16")
        if half and (request.backend == "trtllm" or request.rule == "benchmark"):
            params["kv_dtype"] = "auto"
    return result


def _given(request: Request, role: str) -> dict[str, Any]:
    row = request.roles[role]
    params: dict[str, Any] = {name: row.get(name) for name in ("tp", "pp", "dp", "moe_tp", "moe_ep")}
    params |= {"max_batch": row.get("bs"), "kv_dtype": row.get("kvcache")}
    if request.get("image_height") and request.get("image_width"):
        params["encoder_dp"] = True
    if request.backend == "sglang" and request.get("attention_backend") not in (None, "default"):
        params["attention_backend"] = request["attention_backend"]
    return params | {RENAMED.get(name, name): value for name, value in request.worker_overrides(role).items()}


def _features(request: Request, params: dict[str, Any], nextn: int) -> dict[str, Any]:
    """Prefix caching, speculation, and what follows from parameters that the rules set."""
    found: dict[str, Any] = {"disable_prefix_cache": False} if request.get("prefix") else {}
    if nextn and request.backend == "vllm":
        found["speculation"] = {"method": "mtp", "num_speculative_tokens": nextn}
    elif nextn and request.backend == "trtllm":
        found |= {"speculative_type": "MTP", "speculative_steps": nextn}
    elif nextn:
        found |= {"speculative_algorithm": "NEXTN", "speculative_steps": nextn, "speculative_topk": 1}
        found["speculative_draft_tokens"] = nextn + 1
    if request.backend == "trtllm":
        if (params | found).get("disable_prefix_cache") is False:
            found["prefix_caching"] = True
        if params.get("transceiver_tokens"):
            found["transceiver_backend"] = "DEFAULT"
    elif params.get("cuda_graph_padding") is False:
        found["disable_cuda_graph_padding"] = True
    return found
