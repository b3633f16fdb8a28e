"""Profiles: which known faults of the reference an answer reproduces and which it mends (spec/06 and 05 section 16).

A switch is one fault. It names the value that reproduces the reference and the value that mends it; code asks
``profile[SWITCH]`` and never compares a profile's name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from perfcast_engine.errors import InvalidField

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Switch(Generic[T]):
    """One fault: ``row`` of section 16 of ``spec``, why it is one, and the value of each profile."""

    name: str
    row: int
    reason: str
    reference: T
    corrected: T
    spec: str = "06"


@dataclass(frozen=True, slots=True)
class Profile:
    """A named choice of switch values; ``reproduces`` the reference or mends its faults."""

    name: str
    reproduces: bool

    def __getitem__(self, switch: Switch[T]) -> T:
        return switch.reference if self.reproduces else switch.corrected


REFERENCE = Profile("reference", reproduces=True)
CORRECTED = Profile("corrected", reproduces=False)
PROFILES = {profile.name: profile for profile in (CORRECTED, REFERENCE)}


def profile_named(name: str) -> Profile:
    """The profile called ``name`` ("" is the default, corrected); InvalidField names the known ones."""
    if name and name not in PROFILES:
        raise InvalidField("profile", f"unknown profile {name!r}; one of {', '.join(PROFILES)}", why="profile")
    return PROFILES[name] if name else CORRECTED


# --- models ----------------------------------------------------------------------------------------------------------
MOE_PREFILL_SKIPS_HEAD = Switch(
    "moe_prefill_skips_lm_head",
    1,
    "MOE families list no logits GEMM in prefill, though every engine runs it for the last token of each request and "
    "keeps its weights",
    True,
    False,
    "05",
)
WIDE_SKIPS_HEAD = Switch(
    "sglang_large_ep_skips_lm_head",
    11,
    "SGLang's large-EP lists of latent and sparse attention have no LM head in either phase, nor its weights",
    True,
    False,
    "05",
)
ONE_IS_GLOBAL = Switch(
    "hybrid_pattern_one_is_global",
    2,
    "MiMo-V2-Flash publishes 9 global and 39 sliding layers, 1 for sliding; read the other way round it has 39 global",
    True,
    False,
    "05",
)
EVERY_SECOND_GLOBAL = Switch(
    "llama4_every_second_layer_global",
    2,
    "Llama 4 attends globally in every fourth layer (no_rope_layer_interval), the reference takes every second one",
    True,
    False,
    "05",
)
NORMS_NAME_ATTENTION = Switch(
    "norm_exclusions_name_attention",
    3,
    "an exclusion list that names norms inside self_attn (GLM-5-FP8) is taken to exclude its projections too",
    True,
    False,
    "05",
)
MLA_OF_128_HEADS = Switch(
    "mla_kernels_of_128_heads",
    7,
    "MLA kernels are asked for 128 / tp heads whatever the model has (Kimi K2 has 64)",
    True,
    False,
    "05",
)
NAS_WITHOUT_KV = Switch(
    "nemotron_nas_without_kv",
    14,
    "Nemotron-NAS states its KV heads per block; read from the top level they are 0 and so is the cache",
    True,
    False,
    "05",
)
STATE_LAYERS_HOLD_KV = Switch(
    "state_layers_hold_kv",
    20,
    "every layer of Nemotron-H is charged as attention; only attention layers hold KV, mamba layers a constant state",
    True,
    False,
)
WINDOWS_HOLD_ALL_KV = Switch(
    "windowed_layers_hold_all_kv",
    20,
    "hybrid models are charged full-length KV of one head count and width for sliding and global layers alike",
    True,
    False,
)
KV_ON_EVERY_STAGE = Switch(
    "kv_on_every_pipeline_stage",
    20,
    "every pipeline stage is charged the KV cache of all layers, though it holds those of its own",
    True,
    False,
)

# --- steps -----------------------------------------------------------------------------------------------------------
ATTENTION_BY_ROLE = Switch(
    "attention_by_role",
    4,
    "only operators of dense attention are priced apart in a mixed step: fused MLA and state layers see one sequence "
    "and their decode part is lost",
    True,
    False,
)
MIXED_LOGITS_ROWS = Switch(
    "mixed_logits_one_row",
    6,
    "a mixed step prices the vocabulary projection for one row, not one a request",
    True,
    False,
)
MIXED_PREFIX_PER_PROMPT = Switch(
    "mixed_prefix_per_whole_prompt",
    7,
    "a mixed step subtracts the cached prefix only for whole prompts that fit it; chunks pay for cached tokens",
    True,
    False,
)
MIXED_WHOLE_PROMPTS = Switch(
    "mixed_whole_prompts",
    8,
    "attention of a mixed step is priced for whole prompts, rounded up: one token more than a prompt costs two",
    True,
    False,
)

# --- aggregated serving ----------------------------------------------------------------------------------------------
LONE_REQUEST_QUEUES = Switch(
    "lone_request_queues",
    2,
    "a single request is charged a queueing factor (1.9) although nobody is ahead",
    True,
    False,
)
SCHEDULE_COUNTS_PREFIX = Switch(
    "schedule_counts_prefix", 7, "cached prompt tokens take part of the token budget of every iteration", True, False
)
DECODE_SATURATES = Switch(
    "decode_saturates",
    1,
    "when prefill fills the iterations, TPOT stays at the value of a smaller batch however many requests decode",
    True,
    False,
)
MEASURED_DIPS = Switch(
    "measured_dips_pass",
    31,
    "where a measurement dips, more requests decode faster than fewer",
    True,
    False,
)
FIRST_TOKEN_FREE = Switch(
    "first_token_uncounted",
    11,
    "aggregated throughput leaves out the first token of every request, disaggregated counts it",
    True,
    False,
)
FIXED_KV_FRACTION = Switch(
    "fixed_kv_fraction",
    18,
    "aggregated SGLang assumes a KV fraction of 0.88, its disaggregated workers the fraction that SGLang derives",
    True,
    False,
)

# --- disaggregated serving and search --------------------------------------------------------------------------------
LATENCY_CORRECTIONS: Switch[tuple[float, float]] = Switch(
    "disaggregated_latency_corrections",
    12,
    "fitted factors on prefill and decode latencies of disaggregated workers only, which bias the comparison",
    (1.1, 1.08),
    (1.0, 1.0),
)
STRICT_TARGETS = Switch(
    "strict_targets_when_disaggregated",
    12,
    "a latency equal to its target passes aggregated and fails disaggregated",
    True,
    False,
)
ROUNDED_ROWS = Switch(
    "rounded_rows",
    13,
    "rates are matched on numbers rounded to three decimals: 0.4 % error at 0.123 requests/s",
    True,
    False,
)
CP_RANKS_FREE = Switch(
    "context_parallel_ranks_free", 16, "rates per GPU of a static run ignore the context-parallel ranks", True, False
)
VIOLATING_PICKS = Switch(
    "violating_picks",
    17,
    "when no row meets the SLA the pick silently returns violating rows; TTFT is not checked",
    True,
    False,
)
LISTED_GPU_COUNTS = Switch(
    "listed_gpu_counts",
    24,
    "replicas may have 1, 2, 4, 8, 16, 24 ... GPUs only, so 3, 6 and 12 are never found",
    True,
    False,
)
SCALED_BY_SWEPT_TARGET = Switch(
    "scaled_pools_by_swept_target",
    26,
    "engines of pools that an autoscaler sizes need to meet the largest TPOT that the search looks at, not the target",
    True,
    False,
)
REPLICA_WITHIN_NODE = Switch(
    "recommended_replica_within_node",
    28,
    "recommend caps disaggregated replicas at one node however many GPUs it may use",
    True,
    False,
)
SINGLE_POINT_TTFT = Switch(
    "single_point_ttft_without_queue",
    29,
    "a search multiplies the TTFT of disaggregated rows, a single point does not",
    True,
    False,
)

SWITCHES: tuple[Switch[bool] | Switch[tuple[float, float]], ...] = tuple(
    value for value in list(globals().values()) if isinstance(value, Switch)
)
