"""What makes a deployment impossible: the rules of spec/05 section 4, as models/rules.yaml tells them."""

from __future__ import annotations

from dataclasses import replace

from perfcast_engine.backends import backend_named
from perfcast_engine.config import ParallelConfig
from perfcast_engine.data import table
from perfcast_engine.errors import InvalidField, UnsupportedCombination
from perfcast_engine.formula import Names, compiled, value
from perfcast_engine.models.deployment import Deployment
from perfcast_engine.models.families import family_row, is_moe, runs_large_ep
from perfcast_engine.models.spec import ModelSpec


def complete(spec: ModelSpec, parallel: ParallelConfig) -> ParallelConfig:
    """``parallel`` with both expert widths, which together cover tp x attn_dp x cp. Raises InvalidField."""
    if not is_moe(spec):
        return parallel
    tp, ep, width = parallel.moe_tp, parallel.moe_ep, parallel.width
    if tp is None and ep is None:
        raise InvalidField("parallel.moe_ep", "one of moe_tp and moe_ep is needed for a MoE model", why="moe_unset")
    tp = width // ep if tp is None and ep is not None else tp
    ep = width // tp if ep is None and tp else ep
    if not tp or not ep or tp * ep != width:
        raise InvalidField(
            "parallel.moe_ep",
            f"moe_tp x moe_ep must equal tp x attn_dp x cp = {width}, not {parallel.moe_tp} x {parallel.moe_ep}",
            why="moe_width",
        )
    return replace(parallel, moe_tp=tp, moe_ep=ep)


def check(d: Deployment, figures: Names) -> None:
    """Raises InvalidField, or UnsupportedCombination, for the first rule that ``d`` breaks. ``figures``: its own."""
    family, tables = d.spec.family, table("models/rules")
    splits = backend_named(d.backend).context_parallel and family_row(family, d.backend, False).cp is not None
    facts = {"is_moe": is_moe(d.spec), "large_ep": bool(d.comm), "runs_large_ep": runs_large_ep(family)}
    sets = {name: family in families for name, families in tables["sets"].items()}
    names = figures | facts | sets | {"runs_context_parallel": splits}
    for why, rule in tables["rules"].items():
        if value(compiled(rule["when"]), names):
            error = UnsupportedCombination if rule.get("unsupported") else InvalidField
            raise error(rule["field"], rule["message"].format_map(names), why=why)
