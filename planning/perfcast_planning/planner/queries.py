"""Questions about the work that live engines have now: queue drain and the next decode iteration (spec/07 section 5).

Every question lays out its hypothetical passes for any number of engines at once; ``price_passes`` prices them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
from perfcast_engine.answer import F64
from perfcast_engine.errors import EngineError, InvalidField

from perfcast_planning.planner.capacity import kv_hit_share
from perfcast_planning.planner.engine_work import EngineLimits, EngineRole, Passes, RankLoads, price_passes
from perfcast_planning.planner.observed import Priced
from perfcast_planning.planner.pass_model import PassModel
from perfcast_planning.planner.telemetry import MAX_COUNT

LONGEST_S = 2.0**64  # no clock of the callers holds a longer duration


@dataclass(frozen=True, slots=True)
class Scenario:
    """What to change in the work of an engine before asking (spec/07 section 5.4). As it stands: nothing.

    The scales simulate fewer or more engines; ``next_prompt_tokens`` and ``next_decode_kv_tokens`` append one
    hypothetical request to each rank. The two ``itl_*`` flags count queued work as decoding already.
    """

    queue_scale: float = 1.0
    decode_scale: float = 1.0
    kv_hit_rate: float = 0.0
    next_prompt_tokens: float = 0.0
    next_decode_kv_tokens: float = 0.0
    drain_beside_queued_decodes: bool = False
    itl_with_queued_decodes: bool = False
    itl_with_queued_prompts: bool = False
    itl_with_scheduled_prefill: bool = True

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if not isinstance(value, bool) and not (math.isfinite(value) and 0 <= value <= MAX_COUNT):
                raise InvalidField(item.name, f"must be a number in [0, 2^32), not {value!r}", why="range")


def drain_passes(role: EngineRole, limits: EngineLimits, loads: RankLoads, scenario: Scenario) -> Passes:
    """The passes that prefill all queued prompts (spec/07 5.1). An aggregated engine keeps decoding beside them."""
    chunk, missed = float(limits.max_num_batched_tokens), 1 - kv_hit_share(scenario.kv_hit_rate)
    queued_tokens = loads.queued_prefill_tokens * scenario.queue_scale + scenario.next_prompt_tokens
    full, tail = np.divmod(_count(queued_tokens * missed), chunk)
    one_more = float(scenario.next_prompt_tokens > 0)
    prompts = np.maximum(_count(loads.queued_prefill_requests * scenario.queue_scale + one_more), 1)
    waiting, decoding = float(scenario.drain_beside_queued_decodes), scenario.decode_scale
    decodes = _count((loads.decode_requests + waiting * loads.queued_decode_requests) * decoding)
    decode_kv = _count((loads.decode_kv_tokens + waiting * loads.queued_decode_kv_tokens) * decoding)

    engines = len(full)
    edges = np.sort(np.concatenate([np.zeros((engines, 1)), full, np.where(tail > 0, full + 1, 0)], axis=1), axis=1)
    repeats = np.diff(edges, axis=1)
    owner, segment = np.nonzero(repeats)
    begin = edges[owner, segment][:, None]
    tokens = np.where(begin < full[owner], chunk, np.where(begin == full[owner], tail[owner], 0))
    work = {"prefill_tokens": tokens, "prefill_requests": np.where(tokens > 0, prompts[owner], 0)}
    if role.decodes:
        work |= {"decode_requests": decodes[owner], "decode_kv_tokens": decode_kv[owner]}
    return Passes.of(owner, repeats[owner, segment], engines, **work)


def itl_passes(
    role: EngineRole, loads: RankLoads, scenario: Scenario, usual_tokens: F64 | float, usual_requests: F64 | float
) -> Passes:
    """The next decode iteration of each engine (spec/07 5.2). usual_*: (W,) prefill of an average iteration, which a
    rank of an aggregated engine is assumed to run where it has none scheduled."""
    waiting, started = float(scenario.itl_with_queued_decodes), float(scenario.itl_with_queued_prompts)
    decodes = loads.decode_requests + waiting * loads.queued_decode_requests + started * loads.queued_prefill_requests
    kv = loads.decode_kv_tokens + waiting * loads.queued_decode_kv_tokens + started * loads.queued_prefill_tokens
    one_more = float(scenario.next_decode_kv_tokens > 0)
    work = {
        "decode_requests": _count(decodes * scenario.decode_scale + one_more),
        "decode_kv_tokens": _count(kv * scenario.decode_scale + scenario.next_decode_kv_tokens),
    }
    if role.prefills:
        scheduled = (loads.prefill_requests > 0) | (loads.prefill_tokens > 0)
        scheduled &= scenario.itl_with_scheduled_prefill
        tokens = np.ceil(np.broadcast_to(usual_tokens, len(scheduled)))[:, None]
        requests = np.maximum(np.ceil(np.broadcast_to(usual_requests, len(scheduled)))[:, None], 1) * (tokens > 0)
        work |= {
            "prefill_tokens": np.where(scheduled, loads.prefill_tokens, tokens),
            "prefill_requests": np.where(scheduled, loads.prefill_requests, requests),
            "prefill_kv_tokens": np.where(scheduled, loads.prefill_kv_tokens, 0),
        }
    return Passes.of_each(**work)


class Outlook(NamedTuple):
    """What W engines do under one scenario, in seconds (W,); None for what their role does not do. NaN where the model
    knows too little; errors: of the engines that miss data, by index."""

    drain_s: F64 | None
    itl_s: F64 | None
    errors: dict[int, EngineError]


def outlooks(
    model: PassModel,
    role: EngineRole,
    limits: EngineLimits,
    loads: RankLoads,
    scenarios: Sequence[Scenario] = (Scenario(),),
    usual_tokens: F64 | float = 0.0,
    usual_requests: F64 | float = 0.0,
    *,
    drain: bool = True,
    itl: bool = True,
) -> list[Outlook]:
    """Queue drain and decode ITL of many engines under every scenario, or one of the two, in one evaluation of the
    model."""
    drains, decodes = drain and role.prefills, itl and role.decodes
    questions: list[Passes] = []
    for scenario in scenarios:
        questions += [drain_passes(role, limits, loads, scenario)] if drains else []
        questions += [itl_passes(role, loads, scenario, usual_tokens, usual_requests)] if decodes else []
    answers = iter(price_passes(model, questions) if questions else ())
    told = []
    for _ in scenarios:
        drained, decoded = next(answers) if drains else None, next(answers) if decodes else None
        errors = {index: error for part in (decoded, drained) if part for index, error in part.errors.items()}
        told.append(Outlook(_seconds(drained), _seconds(decoded), errors))
    return told


def _seconds(priced: Priced | None) -> F64 | None:
    if priced is None:
        return None
    seconds = priced.ms / 1000
    if (seconds >= LONGEST_S).any():
        raise InvalidField("ranks", "ask for a duration beyond any clock", why="duration")
    return seconds


def _count(values: F64) -> F64:
    return np.minimum(np.ceil(values), MAX_COUNT)
