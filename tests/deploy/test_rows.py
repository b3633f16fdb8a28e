"""Rows of a search read back, and what is refused on the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from perfcast_deploy.deployment import Deployment
from perfcast_deploy.rows import parse, read_row
from perfcast_engine.errors import DataCorrupt, EngineError, InvalidField, UnsupportedCombination

from tests.deploy.deployments import deployment, role

AGG = {"tp": 4, "bs": 20, "ttft": 284.06, "tpot": 10.052, "tokens/s/gpu": 471.213, "memory": 15.245, "kvcache": "fp8"}
PAIR = {"(p)parallel": "tp4pp1dp1etp1ep1", "(p)bs": 1, "(p)workers": 5, "(d)tp": 2, "(d)bs": 64, "(d)workers": 3}


def test_an_aggregated_row() -> None:
    row = parse(AGG | {"ctx_tokens": 8000, "replicas": "2", "model": "m/x", "isl": 4000, "prefix": 0})
    agg = row.roles["agg"]
    assert (agg.widths["tp"], agg.widths["moe_ep"], agg.batch, agg.workers) == (4, 1, 20, 1)
    assert (row.ctx_tokens, row.replicas, row.gpus) == (8000, 2, 4)
    assert row.known == {"model": "m/x", "isl": 4000, "prefix": 0}


def test_a_disaggregated_row_has_both_roles() -> None:
    row = parse(PAIR | {"(p)system": "h200_sxm"})
    prefill, decode = row.roles["prefill"], row.roles["decode"]
    assert (prefill.workers, decode.workers, prefill.gpus, decode.gpus, row.gpus) == (5, 3, 20, 6, 26)
    assert row.known == {"system": "h200_sxm"}


def test_names_of_our_own_search_are_understood() -> None:
    ours = {"prefill_batch": 2, "prefill_parallel": "tp1pp1dp4etp1ep4", "replicas_total": 3}
    row = parse(ours | {"decode_batch": "8", "decode_parallel": "tp1pp1dp8etp1ep8cp2", "decode_version": "0.24.0"})
    assert row.roles["prefill"].widths["moe_ep"] == 4 and row.roles["decode"].widths["attn_dp"] == 8
    assert (row.roles["decode"].widths["cp"], row.replicas, row.known) == (2, 3, {"version": "0.24.0"})


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (AGG | {"bs": "nan"}, "no whole number"),
        (AGG | {"bs": 1.5}, "no whole number"),
        (AGG | {"bs": True}, "no whole number"),
        (AGG | {"parallel": "tp4"}, "form tp4pp1"),
        (AGG | {"(e)workers": 1}, "encode pool"),
        (AGG | {"dp": 0}, "at least 1"),
        (AGG | {"isl": "long"}, "isl: 'long'"),
        ({"bs": 1}, "no parallel sizes"),
        ({"(p)tp": 1, "(p)bs": 1, "(d)tp": 1}, r"decode\.bs"),
    ],
)
def test_malformed_rows_are_refused(row: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        parse(row)


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
    assert parse(read_row(tmp_path / "a.csv", 1)).roles["agg"].widths["tp"] == 8
    with pytest.raises(InvalidField, match="2 rows"):
        read_row(tmp_path / "a.csv", 2)
    (tmp_path / "a.yaml").write_text("tp: 4\nbs: 20\n")
    assert parse(read_row(tmp_path / "a.yaml")).gpus == 4
    (tmp_path / "a.bin").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidField):
        read_row(tmp_path / "a.bin")


def test_deployments_as_data() -> None:
    d = deployment("vllm", role("prefill"), role("decode"))
    assert Deployment.from_dict(d.to_dict()) == d
    experts = {"workers": 1, "tp": 2, "dp": 2, "moe_ep": 4, "max_batch": 1, "max_tokens": 4000, "max_seq_len": 4500}
    roles = [experts | {"name": name, "kv_fraction": 0.9} for name in ("prefill", "decode")]
    with pytest.raises(UnsupportedCombination):
        Deployment.from_dict(d.to_dict() | {"backend": "trtllm", "is_moe": True, "roles": roles})
    for wrong in ([], {"model": "m"}, d.to_dict() | {"roles": "none"}, d.to_dict() | {"port": True}):
        with pytest.raises(InvalidField):
            Deployment.from_dict(wrong)
