"""Profiles: which known faults of the reference an answer reproduces and which it mends (spec/06 and 05 section 16).

A switch is one fault; profiles.yaml tells why it is one. Code asks ``profile[SWITCH]`` and never compares a profile's
name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from perfcast_engine.data import table
from perfcast_engine.errors import InvalidField

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Switch(Generic[T]):
    """One fault: where it is told (``spec``: chapter/row of section 16), why it is one, and each profile's value."""

    name: str
    spec: str
    reason: str
    reference: T
    corrected: T


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


def _switch(name: str) -> Switch[Any]:
    told: dict[str, Any] = {"reference": True, "corrected": False} | table("profiles")[name]
    lists: dict[str, Any] = {key: tuple(value) for key, value in told.items() if isinstance(value, list)}
    return Switch(name, **(told | lists))


# models; formulas of models/*.yaml name all of these
ONE_IS_GLOBAL: Switch[bool] = _switch("hybrid_pattern_one_is_global")
EVERY_SECOND_GLOBAL: Switch[bool] = _switch("llama4_every_second_layer_global")
NORMS_NAME_ATTENTION: Switch[bool] = _switch("norm_exclusions_name_attention")
KV_ON_EVERY_STAGE: Switch[bool] = _switch("kv_on_every_pipeline_stage")
# steps
ATTENTION_BY_ROLE: Switch[bool] = _switch("attention_by_role")
MIXED_LOGITS_ROWS: Switch[bool] = _switch("mixed_logits_one_row")
MIXED_PREFIX_PER_PROMPT: Switch[bool] = _switch("mixed_prefix_per_whole_prompt")
MIXED_WHOLE_PROMPTS: Switch[bool] = _switch("mixed_whole_prompts")
# aggregated serving
LONE_REQUEST_QUEUES: Switch[bool] = _switch("lone_request_queues")
SCHEDULE_COUNTS_PREFIX: Switch[bool] = _switch("schedule_counts_prefix")
DECODE_SATURATES: Switch[bool] = _switch("decode_saturates")
MEASURED_DIPS: Switch[bool] = _switch("measured_dips_pass")
FIRST_TOKEN_FREE: Switch[bool] = _switch("first_token_uncounted")
FIXED_KV_FRACTION: Switch[bool] = _switch("fixed_kv_fraction")
# disaggregated serving and search
LATENCY_CORRECTIONS: Switch[tuple[float, float]] = _switch("disaggregated_latency_corrections")
STRICT_TARGETS: Switch[bool] = _switch("strict_targets_when_disaggregated")
ROUNDED_ROWS: Switch[bool] = _switch("rounded_rows")
CP_RANKS_FREE: Switch[bool] = _switch("context_parallel_ranks_free")
VIOLATING_PICKS: Switch[bool] = _switch("violating_picks")
LISTED_GPU_COUNTS: Switch[bool] = _switch("listed_gpu_counts")
SCALED_BY_SWEPT_TARGET: Switch[bool] = _switch("scaled_pools_by_swept_target")
REPLICA_WITHIN_NODE: Switch[bool] = _switch("recommended_replica_within_node")
SINGLE_POINT_TTFT: Switch[bool] = _switch("single_point_ttft_without_queue")

SWITCHES: tuple[Switch[Any], ...] = tuple(map(_switch, table("profiles")))
MODEL_SWITCHES: tuple[Switch[bool], ...] = SWITCHES[: SWITCHES.index(ATTENTION_BY_ROLE)]
