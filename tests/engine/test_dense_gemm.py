"""GEMM: measured shapes, shapes between them, quantise steps, borrowed calibration (spec/02 sections 4, 5 and 9)."""

from dataclasses import replace

import numpy as np
import pytest
from perfcast_engine.answer import Points, Source, Tier
from perfcast_engine.errors import EmpiricalBasisMissing, InvalidField, PerfDataMissing, SystemFlopsMissing
from perfcast_engine.ops.gemm import Gemm
from perfcast_engine.tables.database import Mode

from tests.engine.handmade import SYSTEM, database, table

KEY = "gemm_dtype m n k"


def roofline(m, n, k, bytes_each=2.0, rate=1e14):
    return max(2 * m * n * k / rate, bytes_each * (m * n + m * k + n * k) / 1e12) * 1000


def rows(sites, tokens=(1, 16, 64, 256), util=0.5, dtype="bfloat16"):
    """Rows of (n, k) sites at one utilisation, or one a site."""
    utils = util if isinstance(util, dict) else dict.fromkeys(sites, util)
    return [(dtype, m, n, k, roofline(m, n, k) / utils[n, k]) for m in tokens for n, k in sites]


def ask(db, n, k, m, quant="bfloat16", **fields):
    op = Gemm(name="gemm", n=n, k=k, quant=quant, **fields)
    return op.evaluate(db, Points.of(1, 1, x=m))


def ms(db, n, k, m, quant="bfloat16", **fields):
    return ask(db, n, k, m, quant, **fields).raise_first().ms.tolist()


class TestMeasuredShape:
    DB = database(table("gemm", KEY, [("bfloat16", m, 1024, 1024, t) for m, t in ((16, 1.0), (64, 2.0), (256, 4.0))]))

    def test_points_between_and_tokens_split(self):
        assert ms(self.DB, 1024, 1024, [16, 64, 40, 160]) == [1.0, 2.0, 1.5, 3.0]
        assert ms(self.DB, 1024, 1024, [83], token_div=2) == pytest.approx([1.0 + 25 / 48])  # 41 tokens
        got = ms(self.DB, 1024, 1024, [83], token_div=2, seq_split=2)
        assert got == pytest.approx([1.0 + 5 / 48])  # 21 tokens

    def test_scale_multiplies(self):
        assert ms(self.DB, 1024, 1024, [16], scale=32.0) == [32.0]

    def test_ends_hold_the_median_utilisation_of_three_points(self):
        utils = sorted(roofline(m, 1024, 1024) / t for m, t in ((16, 1.0), (64, 2.0), (256, 4.0)))
        got = ms(self.DB, 1024, 1024, [4096, 1, 0])
        assert got == pytest.approx([roofline(m, 1024, 1024) / utils[1] for m in (4096, 1, 0)])

    def test_latency_below_the_roofline_is_lifted_to_it(self):
        db = database(table("gemm", KEY, [("bfloat16", 1024, 4096, 4096, 1e-6), ("bfloat16", 2048, 4096, 4096, 10.0)]))
        assert ms(db, 4096, 4096, [1024]) == [roofline(1024, 4096, 4096)]


class TestUnmeasuredShape:
    def test_uniform_utilisation_comes_back(self):
        db = database(table("gemm", KEY, rows([(512, 512), (512, 2048), (2048, 512), (2048, 2048)])))
        assert ms(db, 1000, 900, [16, 64]) == pytest.approx([roofline(m, 1000, 900) / 0.5 for m in (16, 64)])

    def test_four_nearest_by_inverse_square_distance_and_rank_decides_ties(self):
        near, corners = (1024, 2048), [(512, 512), (512, 2048), (2048, 512), (2048, 2048)]  # 1 and sqrt(2) octaves
        utils = dict(zip((near, *corners), (0.9, 0.1, 0.2, 0.3, 0.4), strict=True))
        measured = table("gemm", KEY, rows(utils, util=utils))
        for left_out in corners:
            ranks = [("bfloat16", n, k, 9 if (n, k) == left_out else 1) for n, k in utils]
            db = database(measured, table("gemm_sites", "gemm_dtype n k", ranks))
            util = (0.9 + sum(utils[site] for site in corners if site != left_out) / 2) / 2.5
            assert ms(db, 1024, 1024, [64])[0] == pytest.approx(roofline(64, 1024, 1024) / util, rel=1e-9)

    def test_nothing_within_two_octaves_misses(self):
        db = database(table("gemm", KEY, rows([(1024, 1024)])))
        with pytest.raises(PerfDataMissing, match="octaves"):
            ms(db, 64, 64, [16])
        with pytest.raises(PerfDataMissing):
            ms(db, 65536, 65536, [16])

    def test_beyond_all_sites_on_one_axis_answers(self):
        db = database(table("gemm", KEY, rows([(1024, 1024), (1024, 2048)])))
        assert ms(db, 65536, 1024, [16]) == pytest.approx([roofline(16, 65536, 1024) / 0.5])

    def test_only_sites_that_span_m_count_and_all_where_none_does(self):
        short, long = rows([(512, 1024)], (1, 16), 0.5), rows([(2048, 1024)], (1, 16, 4096), 0.25)
        db = database(table("gemm", KEY, short + long))
        got = ms(db, 1024, 1024, [16, 4096, 65536])
        utils = [0.375, 0.25, 0.375]
        assert got == pytest.approx(
            [roofline(m, 1024, 1024) / u for m, u in zip((16, 4096, 65536), utils, strict=True)]
        )

    def test_below_grid_answers_with_the_roofline_when_asked_to(self):
        db = database(table("gemm", KEY, rows([(1024, 1024)])))
        answer = ask(db, 64, 64, [16, 32], below_grid_sol=True)
        assert answer.ms.tolist() == [roofline(16, 64, 64), roofline(32, 64, 64)]
        assert set(answer.source) == {Source.SOL}
        with pytest.raises(PerfDataMissing, match="fp8_block"):
            ms(db, 64, 64, [16], "fp8_block", below_grid_sol=True)


class TestErrors:
    DB = database(table("gemm", KEY, rows([(1024, 1024)])))

    def test_a_mode_that_was_not_measured_names_those_that_were(self):
        with pytest.raises(PerfDataMissing, match="measured at bfloat16"):
            ms(self.DB, 1024, 1024, [16], "fp8")

    @pytest.mark.parametrize("mode", Mode)
    def test_a_missing_rate_wins_over_missing_data(self, mode):
        with pytest.raises(SystemFlopsMissing):
            ms(database(mode=mode), 1024, 1024, [16], "nvfp4")

    def test_no_table_at_all(self):
        with pytest.raises(PerfDataMissing, match="no gemm table"):
            ms(database(), 1024, 1024, [16])

    @pytest.mark.parametrize("fields", [{"quant": "fp9"}, {"n": 0}, {"k": -1}, {"n": float("nan")}, {"token_div": -1}])
    def test_bad_fields_are_refused_at_once(self, fields):
        with pytest.raises(InvalidField):
            Gemm(**{"name": "gemm", "n": 8, "k": 8, "quant": "fp8"} | fields)


class TestStaticFp8:
    TABLES = (
        table("gemm", KEY, [("fp8", 64, 1024, 1024, 1.0), ("fp8", 128, 1024, 1024, 2.0)]),
        table("computescale", "quant_dtype m k", [("fp8", 64, 1024, 0.25), ("fp8", 128, 1024, 0.5)]),
        table("scale_matrix", "quant_dtype m k", [("fp8", 64, 1024, 0.125), ("fp8", 128, 1024, 0.25)]),
    )

    def test_saves_the_quantise_steps(self):
        answer = ask(database(*self.TABLES), 1024, 1024, [64, 128], "fp8_static")
        assert answer.ms.tolist() == [0.75, 1.5]
        assert set(answer.source) == {Source.ESTIMATED}
        assert ms(database(*self.TABLES), 1024, 1024, [64], "fp8_static", low_precision_input=True) == [0.625]

    def test_outside_the_grid_one_is_flat_and_one_follows_its_roofline(self):
        product = ms(database(*self.TABLES), 1024, 1024, [256], "fp8")[0]
        got = ms(database(*self.TABLES), 1024, 1024, [256], "fp8_static", low_precision_input=True)[0]
        assert got == pytest.approx(product - 0.5 - 0.25 * 2)

    def test_never_below_its_roofline(self):
        steep = table("computescale", "quant_dtype m k", [("fp8", 64, 1024, 5.0)])
        got = ms(database(self.TABLES[0], steep), 1024, 1024, [64], "fp8_static")
        assert got == [roofline(64, 1024, 1024, 1.0, 2e14)]

    def test_a_missing_step_is_a_miss_of_the_whole(self):
        with pytest.raises(PerfDataMissing, match="computescale"):
            ms(database(self.TABLES[0]), 1024, 1024, [64], "fp8_static")

    def test_zero_is_a_measurement_of_the_scale_step(self):
        flat = table("computescale", "quant_dtype m k", [("fp8", 64, 1024, 0.0), ("fp8", 128, 1024, 0.5)])
        db = database(self.TABLES[0], flat, mode=Mode.EMPIRICAL)
        assert ms(db, 1024, 1024, [64, 128], "fp8_static") == pytest.approx([1.0, 1.5])


class TestEstimate:
    def estimate(self, measured, quant="bfloat16", **kw):
        return ask(database(table("gemm", KEY, measured), mode=Mode.EMPIRICAL, **kw), 1000, 1000, [100], quant)

    def test_own_samples(self):
        answer = self.estimate(rows([(512, 512), (2048, 2048)]))
        assert answer.ms[0] == pytest.approx(roofline(100, 1000, 1000) / 0.5)
        assert (answer.source[0], answer.tier[0]) == (Source.EMPIRICAL, Tier.EMPIRICAL)

    def test_a_mode_of_equal_profile_lends_its_points(self):
        measured = [("fp8_block", 64, 1024, 1024, 2 * roofline(64, 1024, 1024, 1.0, 2e14))]
        answer = self.estimate(measured, "fp8")
        assert answer.ms[0] == pytest.approx(2 * roofline(100, 1000, 1000, 1.0, 2e14))
        assert answer.tier[0] == Tier.XQUANT

    def test_the_nearest_profile_lends_its_utilisation_corrected_for_how_well_each_does(self):
        answer = self.estimate(rows([(1024, 1024)]), "fp8")
        assert answer.ms[0] == pytest.approx(roofline(100, 1000, 1000, 1.0, 2e14) / (0.5 * 0.45 / 0.70))
        assert answer.tier[0] == Tier.XPROFILE

    def test_policy_forbids_borrowing(self):
        with pytest.raises(EmpiricalBasisMissing):
            self.estimate(rows([(1024, 1024)]), "fp8", policy=frozenset({Tier.XQUANT})).raise_first()

    def test_hybrid_estimates_only_what_was_not_measured(self):
        db = database(table("gemm", KEY, rows([(1024, 1024)])), mode=Mode.HYBRID)
        near, far = ask(db, 1024, 1024, [16]), ask(db, 64, 64, [16])
        assert (near.source[0], near.tier[0]) == (Source.SILICON, Tier.SILICON)
        assert (far.source[0], far.tier[0]) == (Source.EMPIRICAL, Tier.EMPIRICAL)


def test_roofline_split():
    op = Gemm(name="gemm", n=4096, k=4096, quant="fp8", scale=2.0)
    split = op.sol_split(database(mode=Mode.SOL), Points.of(1, 1, x=[1, 8192]))
    np.testing.assert_allclose(split.math, [2 * 2 * m * 4096**2 / 2e14 * 1e3 for m in (1, 8192)])
    np.testing.assert_allclose(split.mem, [2 * (m * 8192 + 4096**2) / 1e12 * 1e3 for m in (1, 8192)])
    assert split.time.tolist() == [split.mem[0], split.math[1]]


def test_weight_bytes():
    assert Gemm(name="gemm", n=100, k=10, quant="nvfp4", scale=2.0).weight_bytes() == 1125.0


def test_int8_runs_at_its_own_rate():
    slow = replace(SYSTEM, flops={"bfloat16": 1e14, "int8": 5e13})
    op = Gemm(name="gemm", n=8192, k=8192, quant="sq")
    split = op.sol_split(database(mode=Mode.SOL, system=slow), Points.of(1, 1, x=8192))
    assert split.math[0] == pytest.approx(2 * 8192**3 / 5e13 * 1e3)
