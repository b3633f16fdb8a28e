"""Kernels of state-space and linear attention: table first, else the memory roofline, whatever the mode (spec/04 7)."""

from dataclasses import replace

import numpy as np
import pytest
from perfcast_engine.answer import Points, Source, Tier
from perfcast_engine.ops.state_space import Gdn, Kda, Mamba2
from perfcast_engine.tables.database import Database, Mode

from tests.engine.handmade import SYSTEM, database, table
from tests.engine.pointwise import assert_pointwise

STATE = "kernel_source phase d_model num_k_heads head_k_dim num_v_heads head_v_dim d_conv batch_size seq_len"
HEADS = {"d_model": 2048, "d_conv": 4, "num_k_heads": 4, "head_k_dim": 128, "num_v_heads": 8, "head_v_dim": 128}
DIMS = (2048, 4, 128, 8, 128, 4)


def ask(op, db, batch, s):
    answer = op.evaluate(db, Points.of(batch, s))
    assert not answer.misses and answer.tier[0] == Tier.SILICON
    return float(answer.ms[0]), Source(int(answer.source[0]))


def gdn(kernel, phase="context", **fields):
    return Gdn(**{"name": "gdn", "kernel": kernel, "phase": phase, **HEADS, **fields})


def kda(kernel, phase="context", **fields):
    return Kda(**{"name": "kda", "kernel": kernel, "phase": phase, **HEADS, **fields})


def curves(name, *kernels, phase="context", dims=DIMS, scale=1.0):
    """batch x length rows of 0.01 ms a token; decode rows of 0.01 ms a request."""
    lengths = (0,) if phase == "generation" else (8, 64)
    return [(k, phase, *dims, b, s, scale * b * max(s, 1) / 100) for k in kernels for b in (1, 8) for s in lengths]


def at_version(db: Database, backend, version):
    return replace(db, backend=backend, version=version)


class TestModesAreIgnored:
    @pytest.mark.parametrize("mode", list(Mode))
    def test_measured(self, mode):
        db = database(table("gdn", STATE, curves("gdn", "causal_conv1d_fn")), mode=mode)
        assert ask(gdn("causal_conv1d_fn"), db, 4, 32) == (pytest.approx(1.28), Source.SILICON)

    @pytest.mark.parametrize("mode", list(Mode))
    def test_roofline(self, mode):
        moved = 2 * 4 * 32 * (2 * 4 * 128 + 8 * 128) * (4 + 2)
        assert ask(gdn("causal_conv1d_fn"), database(mode=mode), 4, 32) == (pytest.approx(moved / 1e9), Source.SOL)

    def test_no_length_is_the_roofline_of_one_token_each(self):
        db = database(table("gdn", STATE, curves("gdn", "causal_conv1d_fn")))
        moved = 2 * 4 * (2 * 4 * 128 + 8 * 128) * (4 + 2)
        assert ask(gdn("causal_conv1d_fn"), db, 4, 0) == (pytest.approx(moved / 1e9), Source.SOL)


MAMBA = {"d_model": 4096, "d_state": 128, "d_conv": 4, "nheads": 128, "head_dim": 64, "n_groups": 8}


class TestMamba2:
    KEY = "kernel_source phase d_model d_state d_conv nheads head_dim n_groups chunk_size batch_size seq_len"

    def op(self, kernel="causal_conv1d_fn", phase="context", **fields):
        return Mamba2(**{"name": "m", "kernel": kernel, "phase": phase, "chunk_size": 128, **MAMBA, **fields})

    def test_rooflines(self):
        inner, grouped = 128 * 64, 2 * 8 * 128
        conv = 2 * 64 * (inner + grouped) * 6
        scan = 2 * 64 * (inner + grouped + 128) + 2 * 64 * inner
        assert ask(self.op(), database(), 2, 32)[0] == pytest.approx(conv / 1e9)
        assert ask(self.op("mamba_chunk_scan_combined"), database(), 2, 32)[0] == pytest.approx(scan / 1e9)

    def test_other_shapes_of_the_model_width_stand_in_lowest_first(self):
        other = [(128, 4, 64, 64, 8, 256), (128, 4, 32, 64, 8, 256)]
        rows = [("causal_conv1d_fn", "context", 4096, *dims, 1, 8, dims[2]) for dims in other]
        db = database(table("mamba2", self.KEY, rows))
        assert ask(self.op(), db, 1, 8) == (32.0, Source.SILICON)
        assert ask(self.op(nheads=64, chunk_size=256), db, 1, 8) == (64.0, Source.SILICON)
        assert ask(self.op(d_model=1024), db, 1, 8)[1] == Source.SOL

    def test_decode_is_always_the_roofline(self):
        dims = (4096, 128, 4, 128, 64, 8, 128)
        rows = [("causal_conv1d_update", "generation", *dims, 4, 0, 1.0)]
        db = database(table("mamba2", self.KEY, rows))
        assert ask(self.op("causal_conv1d_update", "generation"), db, 4, 100)[1] == Source.SOL


class TestGdn:
    SCAN = "chunk_gated_delta_rule"
    RECURRENCE = "fused_sigmoid_gating_delta_rule_update"

    def test_rooflines(self):
        channels, values, state = 2 * 4 * 128 + 8 * 128, 8 * 128, 8 * 128 * 128
        tokens = 2 * 200
        scan = 2 * tokens * (channels + values) + 2 * state * 4 * 2 + 2 * 3 * state * 2 * 2
        assert ask(gdn(self.SCAN), database(), 2, 200)[0] == pytest.approx(scan / 1e9)
        step = 2 * 2 * (channels + values) + 2 * state * 2 * 2
        narrow = gdn(self.RECURRENCE, "generation", ssm_dtype="bfloat16")
        assert ask(narrow, database(), 2, 200)[0] == pytest.approx(step / 1e9)
        assert ask(gdn("norm"), database(), 2, 200)[0] == pytest.approx(4 * tokens * 2048 / 1e9)

    def test_decode_curve_has_no_length(self):
        db = database(table("gdn", STATE, curves("gdn", self.RECURRENCE, phase="generation")))
        op = gdn(self.RECURRENCE, "generation")
        assert ask(op, db, 4, 1000) == (pytest.approx(0.04), Source.SILICON)
        # beyond the curve: the utilisation of its end
        assert ask(op, db, 16, 1)[0] == pytest.approx(0.16)

    def test_recurrent_kernels_were_measured_with_a_full_state_only(self):
        db = database(table("gdn", STATE, curves("gdn", self.SCAN, "causal_conv1d_fn")))
        assert ask(gdn(self.SCAN), db, 1, 8)[1] == Source.SILICON
        assert ask(gdn(self.SCAN, ssm_dtype="bfloat16"), db, 1, 8)[1] == Source.SOL
        assert ask(gdn("causal_conv1d_fn", ssm_dtype="bfloat16"), db, 1, 8)[1] == Source.SILICON

    def test_narrow_state_on_blackwell_sglang(self):
        rows = curves("gdn", "flashinfer_gated_delta_rule_decode", phase="generation")
        db = database(table("gdn", STATE, rows), system=replace(SYSTEM, sm_version=103))
        op = gdn(self.RECURRENCE, "generation", ssm_dtype="bfloat16")
        assert ask(op, at_version(db, "sglang", "1"), 8, 1) == (0.08, Source.SILICON)
        assert ask(op, at_version(db, "vllm", "1"), 8, 1)[1] == Source.SOL
        assert ask(op, at_version(replace(db, system=SYSTEM, _kept={}), "sglang", "1"), 8, 1)[1] == Source.SOL

    def test_one_implementation_of_the_scan_stands_in_two_do_not(self):
        names = [f"{self.SCAN}_{by}" for by in ("triton", "cutedsl")]
        one = table("gdn", STATE, curves("gdn", names[0]) + curves("gdn", self.SCAN, scale=5.0))
        two = table("gdn", STATE, curves("gdn", *names) + curves("gdn", self.SCAN, scale=5.0))
        assert ask(gdn(self.SCAN), at_version(database(one), "vllm", "0.24.0"), 1, 8)[0] == 0.08
        assert ask(gdn(self.SCAN), at_version(database(one), "vllm", "0.25.0"), 1, 8)[0] == 0.4
        assert ask(gdn(self.SCAN), at_version(database(two), "vllm", "0.24.0"), 1, 8)[1] == Source.SOL

    def test_shapes_do_not_stand_in_for_each_other(self):
        db = database(table("gdn", STATE, curves("gdn", "causal_conv1d_fn")))
        assert ask(gdn("causal_conv1d_fn", num_v_heads=16), db, 1, 8)[1] == Source.SOL


class TestKda:
    P, S = 8 * 128, 4 * 8 * 128 * 128

    @pytest.mark.parametrize(
        "kernel, phase, moved",
        [
            ("causal_conv1d_fn_qkv3", "context", 6 * 400 * P * 6),
            ("chunk_kda", "context", 10 * 400 * P + 2 * S * 2 + 2 * 3 * S * 2),
            ("flashkda_fwd", "context", 10 * 400 * P + 2 * S * 2 + 2 * 3 * S * 2),
            ("fused_kda_decode", "generation", 10 * 2 * P + 2 * S * 2),
            ("kda_fused_decode", "generation", 6 * 2 * P * 6 + 10 * 2 * P + 2 * S * 2),
            ("something", "context", 4 * 400 * 2048),
        ],
    )
    def test_rooflines(self, kernel, phase, moved):
        assert ask(kda(kernel, phase), database(), 2, 200) == (pytest.approx(moved / 1e9), Source.SOL)

    @pytest.mark.parametrize("batch, requests", [(1, 1), (10, 2), (12, 3), (100, 25)])
    def test_verification_counts_requests_of_draft_tokens(self, batch, requests):
        moved = 10 * requests * 4 * self.P + self.S * (requests + requests * 4)
        op = kda("fused_recurrent_kda", "verify", draft_tokens=4)
        assert ask(op, database(), batch, 999)[0] == pytest.approx(moved / 1e9)

    def test_nearest_heads_stand_in(self):
        rows = [
            ("chunk_kda", "context", 2048, n, 128, n, 128, 4, b, s, n * b * s / 1000)
            for n in (4, 12, 64)
            for b in (1, 8)
            for s in (8, 64)
        ]
        db = database(table("kda", STATE, rows))
        assert ask(kda("chunk_kda"), db, 1, 8) == (4 * 8 / 1000, Source.SILICON)  # 4 and 12 are as near
        assert ask(kda("chunk_kda", num_v_heads=9), db, 1, 8) == (12 * 8 / 1000, Source.SILICON)
        assert ask(kda("chunk_kda", d_model=1024), db, 1, 8)[1] == Source.SOL

    def test_fused_verification_replaces_both_kernels(self):
        fused = [("fused_kda_decode_mtp_dspark", "verify", *DIMS, b, 4, b / 10) for b in (1, 8)]
        plain = [("fused_sigmoid_gating_delta_rule_update", "verify", *DIMS, b, 4, b / 20) for b in (1, 8)]
        conv = kda("causal_conv1d_update", "verify", draft_tokens=4)
        recurrence = kda("fused_sigmoid_gating_delta_rule_update", "verify", draft_tokens=4)
        db = database(table("kda", STATE, fused))
        assert ask(conv, db, 32, 1) == (0.0, Source.SILICON)
        assert ask(recurrence, db, 32, 1) == (0.8, Source.SILICON)
        both = database(table("kda", STATE, fused + plain))
        assert ask(recurrence, both, 32, 1) == (0.4, Source.SILICON)

    def test_fused_decode_replaces_both_kernels_where_the_shape_was_measured_only_so(self):
        fused = curves("kda", "kda_fused_decode", phase="generation", scale=3.0)
        packed = curves("kda", "fused_recurrent_kda_packed_decode", phase="generation", dims=(2048, 4, 128, 16, 128, 4))
        db = database(table("kda", STATE, fused + packed))
        assert ask(kda("causal_conv1d_update", "generation"), db, 8, 1) == (0.0, Source.SILICON)
        assert ask(kda("fused_recurrent_kda_packed_decode", "generation"), db, 8, 1) == (0.24, Source.SILICON)
        own = kda("fused_recurrent_kda_packed_decode", "generation", num_v_heads=16)
        assert ask(own, db, 8, 1) == (0.08, Source.SILICON)


def test_arrays_are_answered_point_by_point():
    rng = np.random.default_rng(7)
    at = Points.of(rng.integers(1, 20, 40), rng.integers(0, 100, 40))
    db = database(
        table("gdn", STATE, curves("gdn", "causal_conv1d_fn", TestGdn.SCAN)),
        table("kda", STATE, curves("kda", "chunk_kda")),
    )
    for op in (gdn("causal_conv1d_fn"), gdn(TestGdn.SCAN), kda("chunk_kda"), kda("flashkda_fwd")):
        assert_pointwise(op, db, at)
