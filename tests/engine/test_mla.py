"""Latent attention: kernels, absorbed GEMM, module, large-EP block (spec/03 sections 8-11)."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from perfcast_engine.answer import Points, Source, Tier
from perfcast_engine.errors import (
    EmpiricalBasisMissing,
    InvalidField,
    PerfDataMissing,
    SolNotDefined,
    SystemFlopsMissing,
)
from perfcast_engine.ops.composite import Fallback
from perfcast_engine.ops.mla import (
    ContextMla,
    ContextMlaModule,
    GenerationMla,
    GenerationMlaModule,
    MlaBmm,
    WideEpContextMla,
    WideEpGenerationMla,
)
from perfcast_engine.quick import short_cuts
from perfcast_engine.tables.database import Mode

from tests.engine.handmade import SYSTEM, database, table
from tests.engine.pointwise import assert_pointwise

F8, BF, BW = 2e14, 1e14, 1e12
HEADS, LENGTHS, BATCHES = (16, 64), (64, 256, 1024), (1, 4)


def prefill_ms(n, s, b):
    return n * s * s * b / 1e6


def decode_ms(n, b, s):
    return n * b * s / 1e4


def prefill_rows(*names):
    return [(*names, n, s, b, prefill_ms(n, s, b)) for n in HEADS for s in LENGTHS for b in BATCHES]


def decode_rows(*names, factor=1.0):
    return [(*names, n, b, s, factor * decode_ms(n, b, s)) for n in HEADS for b in BATCHES for s in LENGTHS]


KERNEL = table("context_mla", "mla_dtype kv_cache_dtype num_heads isl batch_size", prefill_rows("bfloat16", "fp8"))
DECODE = table("generation_mla", "kv_cache_dtype num_heads batch_size seq", decode_rows("fp8"))
MODULE_KEY = "mla_dtype kv_cache_dtype gemm_type native_heads num_heads isl batch_size"
MODULE = table("mla_context_module", MODULE_KEY, prefill_rows("bfloat16", "fp8", "fp8_block", 128))
DECODE_MODULE_KEY = "kv_cache_dtype gemm_type native_heads num_heads batch_size seq"
DECODE_MODULE = table("mla_generation_module", DECODE_MODULE_KEY, decode_rows("fp8", "fp8_block", 128))


def prefill(**fields):
    return ContextMla(**{"name": "mla", "heads": 16, "kv_quant": "fp8", "fmha_quant": "bfloat16", **fields})


def decode(**fields):
    return GenerationMla(**{"name": "mla", "heads": 16, "kv_quant": "fp8", **fields})


def module(**fields):
    names = {"kv_quant": "fp8", "fmha_quant": "bfloat16", "gemm_quant": "fp8_block"}
    return ContextMlaModule(**{"name": "module", "heads": 16, "native_heads": 128, **names, **fields})


def decode_module(**fields):
    names = {"kv_quant": "fp8", "gemm_quant": "fp8_block"}
    return GenerationMlaModule(**{"name": "module", "heads": 16, "native_heads": 128, **names, **fields})


def ask(op, db, batch, s, prefix=0):
    return op.evaluate(db, Points.of(batch, s, prefix)).raise_first()


def ms(op, db, batch, s, prefix=0):
    return float(ask(op, db, batch, s, prefix).ms[0])


def context_sol(n, s, b, prefix=0, rate=BF, kv=1):
    total = s + prefix
    ops = b * n * 320 * (total * total - prefix * prefix)
    return max(ops / rate, b * n * 320 * (kv * total + 2 * s) / BW) * 1000


def decode_sol(n, b, s, rate=F8, kv=1):
    return max(2 * b * n * 1088 * s / rate, b * (n * 2176 + (s - 1) * 576 * kv) / BW) * 1000


def bmm_parts(n, t, rate=BF, width=2):
    return 2 * t * n * 128 * 512 / rate * 1000, n * (t * 640 + 128 * 512) * width / BW * 1000


class TestPrefill:
    DB = database(KERNEL)

    @pytest.mark.parametrize("kind", [prefill, module])
    @pytest.mark.parametrize("b, s, prefix", [(1, 1, 0), (3, 700, 0), (3, 700, 9000), (2, 5, 100_000)])
    def test_roofline_knows_the_prefix(self, kind, b, s, prefix):
        expected = context_sol(16, s, b, prefix)
        assert ms(kind(), database(mode=Mode.SOL), b, s, prefix) == pytest.approx(expected, rel=1e-13)

    def test_square_roots_are_blended_along_the_length(self):
        """Quadratic times are met exactly between measured lengths, linear ones between batches and heads."""
        assert ms(prefill(), self.DB, 1, 100) == pytest.approx(prefill_ms(16, 100, 1))
        assert ms(prefill(heads=40, scale=2.0), self.DB, 3, 500) == pytest.approx(2 * prefill_ms(40, 500, 3))

    def test_prefix_saves_its_share_of_the_causal_area(self):
        assert ms(prefill(), self.DB, 1, 64, 192) == pytest.approx(prefill_ms(16, 256, 1) * (1 - 192**2 / 256**2))

    def test_estimate_knows_the_prefix_by_its_roofline(self):
        db = database(KERNEL, mode=Mode.EMPIRICAL)
        answer = ask(prefill(), db, 1, 64, 192)
        assert answer.ms[0] == pytest.approx(
            prefill_ms(16, 256, 1) * context_sol(16, 64, 1, 192) / context_sol(16, 256, 1)
        )
        assert (answer.source[0], answer.tier[0]) == (Source.EMPIRICAL, Tier.EMPIRICAL)

    def test_context_parallel_rank_computes_first_and_last_part(self):
        parts = ms(prefill(), self.DB, 1, 64, 100) + ms(prefill(), self.DB, 1, 64, 100 + 512 - 64)
        assert ms(prefill(cp=4), self.DB, 1, 512, 100) == pytest.approx(parts)
        split = prefill(cp=4).sol_split(self.DB, Points.of(1, 512, 100))
        assert split.time[0] == pytest.approx(context_sol(16, 64, 1, 100) + context_sol(16, 64, 1, 548))

    def test_misses(self):
        with pytest.raises(PerfDataMissing, match="kv_cache_dtype was measured at fp8"):
            ask(prefill(kv_quant="bfloat16"), self.DB, 1, 64)
        with pytest.raises(EmpiricalBasisMissing):
            ask(prefill(kv_quant="bfloat16"), database(KERNEL, mode=Mode.HYBRID), 1, 64)
        with pytest.raises(SystemFlopsMissing):
            ask(prefill(fmha_quant="fp8"), database(system=replace(SYSTEM, flops={"bfloat16": BF})), 1, 64)
        with pytest.raises(InvalidField):
            prefill(fmha_quant="fp4")
        with pytest.raises(InvalidField):
            prefill(heads=0)


class TestDecode:
    DB = database(DECODE)

    def test_measured(self):
        assert ask(decode(), self.DB, [1, 3], [64, 640]).ms == pytest.approx(
            [decode_ms(16, 1, 64), decode_ms(16, 3, 640)]
        )

    @pytest.mark.parametrize("kv, sm, rate, width", [("fp8", 90, F8, 1), ("fp8", 80, BF, 1), ("bfloat16", 90, BF, 2)])
    def test_rate_of_the_roofline_follows_cache_and_generation(self, kv, sm, rate, width):
        db = database(mode=Mode.SOL, system=replace(SYSTEM, sm_version=sm))
        expected = decode_sol(16, 8, 5000, rate, width)
        assert ms(decode(kv_quant=kv), db, 8, 5000) == pytest.approx(expected, rel=1e-14)

    def test_beyond_the_frontier_utilisation_is_held(self):
        far = ms(decode(), self.DB, 4, 10_000)
        utils = [decode_sol(n, b, s) / decode_ms(n, b, s) for n in HEADS for b in BATCHES for s in LENGTHS]
        assert decode_sol(16, 4, 10_000) / max(utils) <= far <= decode_sol(16, 4, 10_000) / min(utils)


class TestBmm:
    KEY = "bmm_dtype op_name num_heads num_tokens"
    ROWS = tuple(
        ("bfloat16", op, n, t, n * t * w)
        for op, w in (("mla_gen_pre", 1e-3), ("mla_gen_post", 2e-3))
        for n in (4, 32)
        for t in (1, 64)
    )

    def bmm(self, **fields):
        return MlaBmm(**{"name": "bmm", "heads": 4, "quant": "bfloat16", "is_pre": True, **fields})

    def test_roofline(self):
        db = database(mode=Mode.SOL)
        assert ms(self.bmm(heads=6), db, 300, 1) == pytest.approx(max(bmm_parts(6, 300)))

    def test_rows_are_requests(self):
        db = database(table("mla_bmm", self.KEY, self.ROWS))
        assert ms(self.bmm(), db, 64, 999) == pytest.approx(0.256)
        assert ms(self.bmm(is_pre=False, scale=3.0), db, 1, 1) == pytest.approx(0.024)

    def test_unmeasured_heads_are_a_share_of_the_next_power_of_two(self):
        db = database(table("mla_bmm", self.KEY, self.ROWS))
        assert ms(self.bmm(heads=24), db, 64, 1) == pytest.approx(32 * 64e-3 * 24 / 32)
        with pytest.raises(PerfDataMissing):
            ask(self.bmm(heads=8), db, 64, 1)

    def test_measured_heads_need_no_power_of_two(self):
        rows = (*self.ROWS, ("bfloat16", "mla_gen_pre", 24, 64, 0.5))
        assert ms(self.bmm(heads=24), database(table("mla_bmm", self.KEY, rows)), 64, 1) == 0.5

    def test_other_quantisation_reads_bfloat16_under_its_own_roofline(self):
        db = database(table("mla_bmm", self.KEY, self.ROWS))
        assert ms(self.bmm(quant="fp8"), db, 64, 1) == pytest.approx(0.256)
        scale = max(bmm_parts(4, 1000, F8, 1)) / max(bmm_parts(4, 64, F8, 1))
        assert ms(self.bmm(quant="fp8"), db, 1000, 1) == pytest.approx(0.256 * scale)

    def test_fallback_is_per_half_when_measured_and_per_quantisation_when_estimated(self):
        rows = (*self.ROWS, ("fp8", "mla_gen_pre", 4, 64, 0.1))
        silicon = database(table("mla_bmm", self.KEY, rows))
        assert ms(self.bmm(quant="fp8", is_pre=False), silicon, 64, 1) == pytest.approx(0.512)
        with pytest.raises(EmpiricalBasisMissing):
            ask(
                self.bmm(quant="fp8", is_pre=False),
                database(table("mla_bmm", self.KEY, rows), mode=Mode.EMPIRICAL),
                64,
                1,
            )


class TestModule:
    def test_measured(self):
        db = database(MODULE, DECODE_MODULE)
        assert ms(module(), db, 1, 64, 192) == pytest.approx(prefill_ms(16, 256, 1) * 7 / 16)
        assert ms(decode_module(), db, 3, 640) == pytest.approx(decode_ms(16, 3, 640))

    def test_decode_roofline_adds_the_projections(self):
        math, mem = bmm_parts(16, 8, F8, 1)
        attention = 2 * 8 * 16 * 1088 * 5000 / F8 * 1000, 8 * (16 * 2176 + 4999 * 576) / BW * 1000
        expected = max(attention[0] + 2 * math, attention[1] + 2 * mem)
        assert ms(decode_module(), database(mode=Mode.SOL), 8, 5000) == pytest.approx(expected, rel=1e-13)

    def test_prefill_roofline_is_that_of_the_kernel(self):
        db = database(mode=Mode.SOL)
        assert ms(module(), db, 3, 700, 9) == ms(prefill(), db, 3, 700, 9)

    @pytest.mark.parametrize(
        "held, asked, taken",
        [
            ((128,), 64, 128),
            ((128,), None, 128),
            ((64, 128), 64, 64),
            ((64, 128), 96, 64),
            ((64, 128), 32, 64),
            ((64, 128), None, None),
        ],
    )
    def test_size_of_the_model(self, held, asked, taken):
        rows = [row for size in held for row in decode_rows("fp8", "fp8_block", size, factor=size)]
        db, op = database(table("mla_generation_module", DECODE_MODULE_KEY, rows)), decode_module(native_heads=asked)
        if taken is None:
            with pytest.raises(PerfDataMissing):
                ask(op, db, 1, 64)
        else:
            assert ms(op, db, 1, 64) == pytest.approx(taken * decode_ms(16, 1, 64))

    def test_missing_rate_of_the_projections_is_not_caught_by_a_fallback(self):
        op = Fallback(name="block", primary=decode_module(gemm_quant="nvfp4"), fallback=(decode(),))
        with pytest.raises(SystemFlopsMissing, match="fp4"):
            ask(op, database(DECODE, DECODE_MODULE), 1, 64)

    def test_fallback_takes_the_parts_where_the_whole_is_missing(self):
        op = Fallback(name="block", primary=decode_module(kv_quant="bfloat16"), fallback=(decode(), decode()))
        for mode in (Mode.SILICON, Mode.HYBRID):
            answer = ask(op, database(DECODE, DECODE_MODULE, mode=mode), 1, 64)
            assert (answer.ms[0], answer.source[0]) == (pytest.approx(2 * decode_ms(16, 1, 64)), Source.SILICON)


def wide_context_sol(m, s, b, prefix=0, rate=F8, width=1):
    total = s + prefix
    q_f, q_m = 2 * 1536 * m * 192 * b * s, b * 1536 * s + 1536 * m * 192 + 2 * b * m * 192 * s
    k_f, k_m = 2 * 512 * m * 256 * b * s, b * s * 512 + m * 256 * 512 + 2 * b * m * 256 * s
    a_f = 2 * m * 320 * b * (total**2 - prefix**2) // 2
    a_m = b * s * m * 192 + b * total * m * 192 + b * total * m * 128 + b * s * m * 128
    o_f, o_m = 2 * m * 128 * 7168 * b * s, b * m * 128 * s + m * 128 * 7168 + 2 * b * 7168 * s
    math = (q_f + k_f + o_f) / rate + a_f / BF
    return max(math, (q_m + k_m + 2 * a_m + o_m) * width / BW) * 1000


def wide_decode_sol(m, b, s, rate=F8, width=1):
    flops = 2 * b * m * (1536 * 192 + 128 * 512 + 512 * 128 + 128 * 7168) / rate + 2 * b * s * m * (64 + 1024) / BF
    q_m = b * 1536 + 1536 * m * 192 + 2 * b * m * 192
    w_m = b * m * 128 + m * 512 * 128 + 2 * b * m * 512
    a_m = b * m * 576 + b * s * 576 + b * m * 512
    s_m = b * m * 512 + m * 128 * 512 + 2 * b * m * 128
    o_m = b * m * 128 + m * 128 * 7168 + 2 * b * 7168
    return max(flops, (q_m + w_m + 2 * a_m + s_m + o_m) * width / BW) * 1000


class TestLargeEp:
    CONTEXT_KEY = "kernel_source mla_dtype kv_cache_dtype num_heads isl batch_size"
    DECODE_KEY = "kernel_source kv_cache_dtype num_heads batch_size seq"

    def tables(self, kernel):
        return (
            table("wideep_context_mla", self.CONTEXT_KEY, prefill_rows(kernel, "fp8_block", "fp8")),
            table("wideep_generation_mla", self.DECODE_KEY, decode_rows(kernel, "fp8")),
        )

    def context(self, **fields):
        names = {"kv_quant": "fp8", "fmha_quant": "fp8_block"}
        return WideEpContextMla(**{"name": "wide", "heads": 16, **names, **fields})

    def generation(self, **fields):
        return WideEpGenerationMla(
            **{"name": "wide", "heads": 16, "kv_quant": "fp8", "fmha_quant": "fp8_block", **fields}
        )

    def test_rooflines(self):
        db = database(mode=Mode.SOL)
        assert ms(self.context(heads=24), db, 3, 700, 99) == pytest.approx(wide_context_sol(24, 700, 3, 99), rel=1e-13)
        assert ms(self.generation(heads=24), db, 8, 5000) == pytest.approx(wide_decode_sol(24, 8, 5000), rel=1e-13)

    def test_measured(self):
        db = database(*self.tables("fa3"))
        assert ms(self.context(attn_backend="fa3"), db, 1, 64, 192) == pytest.approx(prefill_ms(16, 256, 1) * 7 / 16)
        assert ms(self.context(attn_backend="fa3", cp=2), db, 1, 256) == pytest.approx(
            prefill_ms(16, 64, 1) + prefill_ms(16, 256, 1) * (1 - 192**2 / 256**2)
        )
        assert ms(self.generation(attn_backend="fa3"), db, 3, 640) == pytest.approx(decode_ms(16, 3, 640))

    def test_no_split_of_the_roofline(self):
        with pytest.raises(SolNotDefined):
            self.generation().sol_split(database(), Points.of(1, 64))

    def test_kernel_of_blackwell_stands_in(self):
        db = database(*self.tables("trtllm_mla"))
        assert ms(self.generation(), db, 1, 64) == decode_ms(16, 1, 64)

    @pytest.mark.parametrize("name", ["trtllm_mla", "odd"])
    def test_other_names_are_refused_where_measurements_are_asked(self, name):
        for mode in (Mode.SILICON, Mode.HYBRID):
            with pytest.raises(InvalidField, match="attn_backend"):
                ask(self.generation(attn_backend=name), database(*self.tables("trtllm_mla"), mode=mode), 1, 64)
        assert ms(self.generation(attn_backend=name), database(mode=Mode.SOL), 1, 64) > 0

    def test_estimates_take_any_measured_kernel_by_name(self):
        db = database(*self.tables("trtllm_mla"), mode=Mode.EMPIRICAL)
        assert ms(self.generation(attn_backend="trtllm_mla"), db, 1, 64) == pytest.approx(decode_ms(16, 1, 64))
        with pytest.raises(InvalidField, match="attn_backend"):
            ask(self.generation(attn_backend="odd"), db, 1, 64)
        with pytest.raises(EmpiricalBasisMissing):
            ask(self.generation(), database(mode=Mode.EMPIRICAL), 1, 64)


WIDE = TestLargeEp()


@given(
    st.sampled_from(
        [
            prefill(),
            prefill(cp=4),
            prefill(heads=5),
            decode(),
            module(scale=2.0),
            decode_module(),
            TestBmm().bmm(heads=24),
            WIDE.context(cp=2),
            WIDE.generation(heads=24),
        ]
    ),
    st.sampled_from(list(Mode)),
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3000), st.integers(0, 900)), min_size=1, max_size=6),
)
def test_arrays_answer_as_their_points_do(op, mode, asked):
    tables = (
        KERNEL,
        DECODE,
        MODULE,
        DECODE_MODULE,
        table("mla_bmm", TestBmm.KEY, TestBmm.ROWS),
        *WIDE.tables("flashinfer"),
    )
    batch, s, prefix = map(np.array, zip(*asked, strict=True))
    assert_pointwise(op, database(*tables, mode=mode), Points.of(batch, s, prefix))


@given(
    st.sampled_from(
        [prefill(), prefill(cp=4, scale=2.0), decode(), module(scale=2.0), decode_module(), WIDE.context(cp=2)]
    ),
    st.integers(0, 6),
    st.integers(1, 1100),
    st.integers(0, 900),
)
def test_one_point_without_arrays_is_the_same_or_left_to_them(op, batch, s, prefix):
    db = database(KERNEL, DECODE, MODULE, DECODE_MODULE, *WIDE.tables("flashinfer"))
    block = Fallback(name="block", primary=op, fallback=(), scale=3.0)
    (cut,) = short_cuts([block], db)
    quick = cut.one(batch, s, prefix)
    if 1 <= batch <= 4 and 512 <= s <= 1024 - prefix:
        assert quick == quick
    if quick == quick:
        assert quick == pytest.approx(ms(block, db, batch, s, prefix), rel=1e-12)


def test_no_short_cut_without_measurements():
    assert short_cuts([prefill()], database()) is None
    assert short_cuts([prefill()], database(KERNEL, mode=Mode.EMPIRICAL)) is None
    assert short_cuts([WIDE.context(attn_backend="odd")], database(*WIDE.tables("fa3"))) is None
