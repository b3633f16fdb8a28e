"""From the row of a search to a deployment, and what is refused on the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from perfcast_deploy.deployment import Deployment, Facts
from perfcast_deploy.rows import from_row, naive_row, read_row
from perfcast_engine.errors import DataCorrupt, EngineError, InvalidField, OutOfMemory, UnsupportedCombination

GIVEN = {"model": "m/x", "system": "h200_sxm", "backend": "vllm", "version": "0.24.0", "isl": 4000, "osl": 500}
AGG = {"tp": 4, "bs": 20, "ttft": 284.06, "tpot": 10.052, "tokens/s/gpu": 471.213, "memory": 15.245, "kvcache": "fp8"}
PAIR = {"(p)parallel": "tp4pp1dp1etp1ep1", "(p)bs": 1, "(p)workers": 5, "(d)tp": 2, "(d)bs": 64, "(d)workers": 3}


def test_an_aggregated_row() -> None:
    d = from_row(AGG | {"ctx_tokens": 8000}, GIVEN | {"total_gpus": 11, "nextn": 1, "profile": "corrected"})
    (agg,) = d.roles
    assert (agg.workers, agg.tp, agg.max_batch, agg.max_tokens, agg.max_seq_len) == (2, 4, 20, 8040, 4500)
    assert (agg.kv_dtype, agg.kv_fraction) == ("fp8", 0.92)
    assert d.concurrency == 40
    assert d.predicted.ttft_ms == 284.06 and d.predicted.output_tokens_per_s == pytest.approx(471.213 * 8)
    assert d.predicted.profile == "corrected"


def test_a_disaggregated_row_keeps_its_ratio() -> None:
    d = from_row(PAIR, GIVEN | {"total_gpus": 60, "prefix": 500, "kv_fraction": 0.8})
    prefill, decode = d.roles
    assert (prefill.workers, decode.workers, prefill.gpus, decode.gpus) == (10, 6, 4, 2)
    assert (prefill.max_tokens, decode.max_tokens, prefill.prefix_caching) == (4000, 64, True)
    assert prefill.kv_fraction == decode.kv_fraction == 0.8


def test_names_of_our_own_search_are_understood() -> None:
    ours = {
        "prefill_batch": 2,
        "prefill_parallel": "tp1pp1dp4etp1ep4",
        "decode_batch": 8,
        "decode_parallel": "tp1pp1dp8etp1ep8",
    }
    d = from_row(ours | {"tokens_per_s_per_gpu": 10.0, "ttft_ms": 5.0}, GIVEN)
    assert d.is_moe and d.roles[0].moe_ep == 4 and d.roles[1].dp == 8
    assert d.predicted.output_tokens_per_s == 120.0


@pytest.mark.parametrize(
    ("row", "given", "message"),
    [
        (AGG | {"bs": "nan"}, {}, "no whole number"),
        (AGG | {"bs": 1.5}, {}, "no whole number"),
        (AGG | {"ttft": -1.0}, {}, "no positive finite"),
        (AGG | {"tpot": float("inf")}, {}, "no positive finite"),
        (AGG | {"parallel": "tp4"}, {}, "form tp4pp1"),
        (AGG | {"(e)workers": 1}, {}, "encode pool"),
        (AGG | {"cp": 2}, {}, "context parallelism"),
        ({"bs": 1}, {}, "no parallel sizes"),
        (AGG, {"total_gpus": 3}, "hold no replica"),
        (AGG, {"backend": None}, "neither in the row nor given"),
        (AGG, {"colour": "blue"}, "unknown field"),
        (AGG, {"kv_fraction": "most"}, "must be float"),
        (AGG, {"system": "h900"}, "unknown system"),
        ({"tp": 8, "dp": 8, "moe_tp": 2, "moe_ep": 2, "bs": 1}, {}, "must equal"),
    ],
)
def test_malformed_rows_are_refused(row: dict[str, Any], given: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        from_row(row, GIVEN | given)


def test_rows_are_held_against_facts() -> None:
    with pytest.raises(OutOfMemory):
        from_row(AGG | {"memory": 200.0}, GIVEN, Facts(gpu_memory_bytes=141 * 2**30))
    with pytest.raises(InvalidField, match="divide"):
        from_row(AGG, GIVEN, Facts(num_heads=6))
    assert from_row(AGG | {"moe_ep": 4}, GIVEN, Facts(num_experts=128)).is_moe


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.json", "{"),
        ("a.json", "[]"),
        ("a.json", "[1]"),
        ("a.json", '{"tp": NaN}'),
        ("a.yaml", "a: [b"),
        ("a.csv", ""),
        ("a.csv", "tp,bs\n1,2,3\n"),
    ],
)
def test_malformed_files_are_refused(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises((InvalidField, DataCorrupt)):
        read_row(tmp_path / name)


def test_files_of_rows(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("tp,bs,moe\n4,20,\n8,40,\n")
    assert from_row(read_row(tmp_path / "a.csv", 1), GIVEN).roles[0].tp == 8
    with pytest.raises(InvalidField, match="2 rows"):
        read_row(tmp_path / "a.csv", 2)
    (tmp_path / "a.bin").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidField):
        read_row(tmp_path / "a.bin")


def test_naive_sizes_hold_the_weights() -> None:
    assert naive_row(64 * 2**30, 80 * 2**30, 8, 8, False)["tp"] == 2
    with pytest.raises(OutOfMemory, match="16 GPUs, 8 may"):
        naive_row(700 * 2**30, 80 * 2**30, 8, 64, True)
    assert naive_row(64 * 2**30, 80 * 2**30, 8, 8, True)["moe_tp"] == 2


def test_deployments_as_data() -> None:
    d = from_row(PAIR, GIVEN)
    assert Deployment.from_dict(d.to_dict()) == d
    with pytest.raises(UnsupportedCombination):
        Deployment.from_dict(
            d.to_dict() | {"backend": "trtllm", "is_moe": True, "roles": [moe_role(n) for n in ("prefill", "decode")]}
        )
    for wrong in ([], {"model": "m"}, d.to_dict() | {"roles": "none"}, d.to_dict() | {"port": True}):
        with pytest.raises(InvalidField):
            Deployment.from_dict(wrong)


def moe_role(name: str) -> dict[str, Any]:
    limits = {"max_batch": 1, "max_tokens": 4000, "max_seq_len": 4500, "kv_fraction": 0.9}
    return {"name": name, "workers": 1, "tp": 2, "dp": 2, "moe_ep": 4} | limits
