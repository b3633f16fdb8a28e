"""Whole passes from a user's measured table: files, cells, look-ups, sums over ranks (spec/04 section 10)."""

import hashlib
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from perfcast_engine.answer import Source
from perfcast_engine.errors import PerfDataMissing
from perfcast_engine.ops.dsv4 import Mhc
from perfcast_engine.ops.memory_bound import Elementwise
from perfcast_planning.planner.pass_table import PassTable
from perfcast_planning.planner.whole_pass import WholePass
from perfcast_systems.passes import HEADER, IDENTITY, SIDECAR, TABLE, PassTableError, read_passes

from tests.engine.handmade import database

CELL = {
    "model_path": "org/model",
    "gemm_quant_mode": "bfloat16",
    "moe_quant_mode": "bfloat16",
    "fmha_quant_mode": "bfloat16",
    "comm_quant_mode": "half",
    "kv_cache_dtype": "bfloat16",
    "tp": 2,
    "pp": 1,
    "dp": 1,
    "moe_tp": 1,
    "moe_ep": 1,
    "cp": 1,
    "moe_backend": "auto",
    "attention_backend": "flashinfer",
    "enable_wideep": False,
    "enable_eplb": False,
}
WHERE = {"system": "paper_gpu", "backend": "trtllm", "backend_version": "1.0"}
PREFILL = [(b, t, kv, t / 100 + kv / 10000) for b in (1, 2, 4) for t in (128, 1024) for kv in (0, 1000 * b)]
DECODE = [(b, 0, b * s, 4 + b / 10 + b * s / 10000) for b in (1, 2, 8, 9, 16) for s in (1, 1000)]


def rows(prefill=PREFILL, decode=DECODE, **overrides):
    base = {"cell_id": "a", **CELL, **WHERE, "weight_quantization": "none", "partition_policy": "balanced_v1"}
    names = ("batch_size", "total_prefill_tokens", "total_kv_read_tokens", "latency_ms")
    return [
        {**base, "workload_kind": kind, **dict(zip(names, row, strict=False)), "kv_seed_regime": regime, **overrides}
        for kind, part in (("prefill", prefill), ("decode", decode))
        for *row, regime in ((*row, "real_kv")[:5] if len(row) < 5 else row for row in part)
    ]


def write(folder, content, **header):
    parquet.write_table(pa.Table.from_pylist(content), folder / TABLE)
    digest = hashlib.sha256((folder / TABLE).read_bytes()).hexdigest()
    sidecar = {**HEADER, **WHERE, "parquet_sha256": digest, "row_count": len(content), **header}
    (folder / SIDECAR).write_text(json.dumps(sidecar))


def read(folder):
    return read_passes(folder, "paper_gpu", "trtllm", "1.0")


def columns(content):
    return {name: [row[name] for row in content] for name in content[0]}


class TestFiles:
    def test_absent(self, tmp_path):
        assert read(tmp_path) is None

    def test_read(self, tmp_path):
        write(tmp_path, rows())
        found = read(tmp_path)
        assert len(found["latency_ms"]) == len(PREFILL) + len(DECODE)
        table = PassTable.of(found, CELL)
        assert table.prefill.sites.tolist()[:2] == [[1, 0], [1, 1000]]
        assert table.decode.sites[:, 0].tolist() == [1, 2, 8, 9, 16]

    @pytest.mark.parametrize(
        "header",
        [
            {"schema_name": "other"},
            {"schema_version": 5},
            {"coordinate_system": "other"},
            {"measurement_policy": "other"},
            {"system": "h200_sxm"},
            {"backend_version": "2.0"},
            {"parquet_sha256": "0" * 64},
            {"row_count": 3},
        ],
    )
    def test_sidecar_must_describe_the_file(self, tmp_path, header):
        write(tmp_path, rows(), **header)
        with pytest.raises(PassTableError):
            read(tmp_path)

    def test_a_whole_float_version_is_the_version(self, tmp_path):
        write(tmp_path, rows(), schema_version=6.0)
        assert read(tmp_path) is not None

    @pytest.mark.parametrize(
        "damage",
        [
            {"workload_kind": "train"},
            {"partition_policy": "other"},
            {"backend": "vllm"},
            {"latency_ms": float("nan")},
            {"latency_ms": 0.0},
            {"batch_size": 0},
            {"total_prefill_tokens": 0},
            {"moe_backend": ""},
            {"enable_wideep": "yes"},
        ],
    )
    def test_one_bad_row_refuses_the_table(self, tmp_path, damage):
        content = rows()
        content[0] |= damage
        if isinstance(damage.get("enable_wideep"), str):
            content = [{**row, "enable_wideep": str(row["enable_wideep"])} for row in content]
        write(tmp_path, content)
        with pytest.raises(PassTableError, match="row 0"):
            read(tmp_path)

    def test_decode_rows_have_no_new_tokens_and_no_pass_is_measured_twice(self, tmp_path):
        for content in (rows(decode=[(1, 5, 1, 1.0)]), rows(decode=[*DECODE, DECODE[0]])):
            write(tmp_path, content)
            with pytest.raises(PassTableError):
                read(tmp_path)

    def test_garbage(self, tmp_path):
        write(tmp_path, rows())
        (tmp_path / SIDECAR).write_text("[]")
        with pytest.raises(PassTableError, match="not an object"):
            read(tmp_path)
        (tmp_path / TABLE).write_bytes(b"PAR1")
        digest = hashlib.sha256(b"PAR1").hexdigest()
        (tmp_path / SIDECAR).write_text(json.dumps({**HEADER, **WHERE, "parquet_sha256": digest, "row_count": 1}))
        with pytest.raises(PassTableError, match="cannot be read"):
            read(tmp_path)


class TestCells:
    def test_engine_chosen_backends_and_sizes_compare_as_words(self):
        content = columns(rows())
        assert PassTable.of(content, {**CELL, "attention_backend": "auto", "tp": "2", "enable_eplb": "False"}).decode

    def test_no_other_cell_stands_in(self):
        content = columns(rows())
        for other in ({"tp": 4}, {"model_path": "org/other"}, {"enable_wideep": True}):
            with pytest.raises(PerfDataMissing, match="0 cells"):
                PassTable.of(content, {**CELL, **other})
        both = columns(rows() + rows(cell_id="b"))
        with pytest.raises(PerfDataMissing, match="2 cells"):
            PassTable.of(both, CELL)

    def test_identity_is_complete(self):
        assert set(IDENTITY) == set(CELL)


class TestRepair:
    CURVE = (
        (4, 0, 10, 1.0, "real_kv"),
        (4, 0, 20, 2.0, "real_kv"),
        (4, 0, 30, 9.0, "fake_fallback"),
        (4, 0, 40, 9.0, "legacy"),
        (4, 0, 50, 2.5, "real_kv"),
        (4, 0, 60, 9.0, "fake_fallback"),
    )

    def latencies(self, curve, **options):
        return PassTable.of(columns(rows(prefill=(), decode=curve)), CELL, **options).decode.ms[0].tolist()

    def test_faked_caches_follow_the_two_nearest_real_ones_below(self):
        assert self.latencies(self.CURVE) == pytest.approx([1, 2, 3, 9, 2.5, 2.5 + 0.5 / 30 * 10])

    def test_switched_off_and_kept(self):
        assert self.latencies(self.CURVE, repair=False) == [1, 2, 9, 9, 2.5, 9]
        falling = [(4, 0, 10, 5.0, "real_kv"), (4, 0, 20, 1.0, "real_kv"), (4, 0, 30, 7.0, "fake_fallback")]
        assert self.latencies(falling) == [5, 1, 7]
        assert self.latencies(falling[1:]) == [1, 7]


# 8 bytes a token and a request at 1 TB/s: a roofline in proportion to the tokens of the pass
ROOFLINE = (Elementwise(name="norm", bytes_per_token=8e6),)


def passes(prefill=PREFILL, decode=DECODE, ops=ROOFLINE):
    table = PassTable.of(columns(rows(prefill, decode)), CELL)
    return WholePass(table, ops, ops, database())


def decode_ms(engine, batch, kv):
    answer = engine.decode(*np.array([[batch], [kv]], np.float64))
    return float(answer.ms[0])


def prefill_ms(engine, batch, tokens, kv):
    answer = engine.prefill(*np.array([[batch], [tokens], [kv]], np.float64))
    return float(answer.ms[0])


class TestDecode:
    def test_on_a_measured_curve(self):
        assert decode_ms(passes(), 2, 2000) == pytest.approx(4.4)
        assert decode_ms(passes(), 2, 1001) == pytest.approx(4.2 + 0.1001)

    def test_between_rungs_the_row_just_above_the_last_and_the_next_rung_blend(self):
        # 1, 2 and 8, 9 make 1 and 8 rungs: 5 lies between 2 and 8
        low, high = 4.2 + 0.15, 4.8 + 0.15
        assert decode_ms(passes(), 5, 1500) == pytest.approx(low + (high - low) / 2)
        # beyond the last rung: between 9 and the largest batch
        low, high = 4.9 + 0.5, 5.6 + 0.5
        assert decode_ms(passes(), 12, 5000) == pytest.approx(low + (high - low) * 3 / 7)

    def test_one_covering_row_answers_alone_and_none_is_a_miss(self):
        assert decode_ms(passes(), 5, 2500) == pytest.approx(4.8 + 0.25)
        assert np.isnan(decode_ms(passes(decode=[r for r in DECODE if r[0] != 16]), 5, 8500))

    def test_without_rungs_neighbours_lend_their_utilisation(self):
        sparse = [row for row in DECODE if row[0] in (2, 8)]
        # the roofline is 0.008 ms a request; batch 4 is one octave from both
        util = np.mean([0.008 * 2 / (4.2 + 0.15), 0.008 * 8 / (4.8 + 0.15)])
        assert decode_ms(passes(decode=sparse), 4, 1500) == pytest.approx(0.008 * 4 / util)

    def test_nothing_outside_what_was_measured(self):
        for point in ((1, 0), (17, 17), (16, 99999)):
            assert np.isnan(decode_ms(passes(), *point))

    def test_baseline_is_the_least_cache(self):
        engine = passes()
        assert engine.baseline(np.array([9.0])).ms[0] == pytest.approx(4.9 + 0.0009)


class TestPrefill:
    def test_on_a_measured_curve(self):
        assert prefill_ms(passes(), 2, 576, 2000) == pytest.approx(5.76 + 0.2)

    def test_between_sites(self):
        # 500 tokens of cache at batch 1: nearer in octaves to 1000 (1) than to 0 (infinitely far); batch 2 is at 2
        answer = prefill_ms(passes(), 1, 128, 500)
        near = {(1, 1000): 1.0, (2, 2000): np.hypot(1, 2)}
        ms = {(1, 1000): 1.28 + 0.1, (2, 2000): 1.28 + 0.2}
        kept = {site: d for site, d in near.items() if d <= 2}
        util = sum(1 / (d * d) * 1.024 / ms[site] for site, d in kept.items()) / sum(1 / d**2 for d in kept.values())
        assert answer == pytest.approx(1.024 / util)

    def test_a_larger_batch_of_equal_totals_costs_the_same_where_batches_do(self):
        assert prefill_ms(passes(), 100, 1024, 0) == pytest.approx(10.24)
        steep = [(b, t, kv, ms * b) for b, t, kv, ms in PREFILL]
        assert np.isnan(prefill_ms(passes(prefill=steep), 100, 1024, 0))

    def test_without_a_roofline_only_measured_curves_answer(self):
        other = (Mhc(name="mhc", half="pre", hc_mult=4, hidden=64, architecture="x"),)
        engine = passes(ops=other)
        assert prefill_ms(engine, 2, 576, 2000) == pytest.approx(5.96)
        assert np.isnan(prefill_ms(engine, 1, 128, 500))

    def test_what_is_measured_is_told_from_what_misses(self):
        answer = passes().prefill(*np.array([[2, 2], [576, 576], [2000, 199998]], np.float64))
        assert answer.ms[0] == pytest.approx(5.96)
        assert answer.source[0] == Source.SILICON
        assert answer.missing().tolist() == [False, True]
        assert isinstance(answer.first_error(), PerfDataMissing)


def test_a_pass_adds_what_its_decodes_cost_beyond_an_empty_pass():
    engine = passes()
    columns = np.array([[1, 1024, 0, 0, 0], [0, 0, 0, 8, 8000], [1, 1024, 0, 8, 8000]], np.float64).T
    prefill, decode, empty = 10.24, 4.8 + 0.8, 4.8 + 0.0008
    assert engine.totals(*columns).ms == pytest.approx([prefill, decode, prefill + decode - empty])


def test_arrays_are_answered_point_by_point():
    rng = np.random.default_rng(7)
    engine = passes()
    points = np.array(
        [
            rng.choice([0, 1, 3, 50], 60),
            rng.integers(0, 1100, 60),
            rng.integers(0, 4000, 60),
            rng.integers(0, 17, 60),
            rng.integers(0, 16000, 60),
        ],
        np.float64,
    )
    together = engine.totals(*points)
    alone = [engine.totals(*points[:, [i]]) for i in range(60)]
    np.testing.assert_allclose(together.ms, [answer.ms[0] for answer in alone], rtol=1e-13)
    np.testing.assert_array_equal(together.missing(), [answer.missing()[0] for answer in alone])
