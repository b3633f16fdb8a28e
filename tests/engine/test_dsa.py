"""DeepSeek sparse attention: rooflines, tables, shared indexes, estimates, context parallelism (spec/04 section 3)."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from perfcast_engine.answer import Points, Source, Tier
from perfcast_engine.errors import EmpiricalBasisMissing, InvalidField, PerfDataMissing, SystemFlopsMissing
from perfcast_engine.ops.dsa import DsaContext, DsaGeneration
from perfcast_engine.ops.roofline import causal_pairs
from perfcast_engine.tables.database import Mode

from tests.engine.handmade import SYSTEM, database, table
from tests.engine.pointwise import assert_pointwise

GLM = "GlmMoeDsaForCausalLM"
SPARSE = "kv_cache_dtype gemm_type architecture bucket num_heads"
CONTEXT = f"mla_dtype {SPARSE} step isl batch_size"
GENERATION = f"{SPARSE} batch_size seq"


def context_rows(bucket="trtllm", factor=1.0, prefixes=(0, 128), heads=(16, 64)):
    return [
        ("bfloat16", "fp8", "fp8_block", GLM, bucket, n, p, s, b, factor * (n / 16 + p / 1024 + s / 64 * b))
        for n in heads
        for p in prefixes
        for s in (64, 256)
        for b in (1, 4)
    ]


def context(**fields):
    base = {
        "name": "context_attention",
        "heads": 16,
        "kv_quant": "fp8",
        "fmha_quant": "bfloat16",
        "gemm_quant": "fp8_block",
        "architecture": GLM,
    }
    return DsaContext(**{**base, **fields})


def generation(**fields):
    return DsaGeneration(**{k: v for k, v in vars(context()).items() if k != "cp"} | {"name": "g"} | fields)


MEASURED = table("dsa_context", CONTEXT, context_rows())


def ms(op, db, batch, s, prefix=0):
    return float(op.evaluate(db, Points.of(batch, s, prefix)).raise_first().ms[0])


@given(st.integers(1, 3), st.integers(0, 60), st.integers(0, 40), st.integers(1, 30))
def test_pairs_count_what_each_token_sees(batch, s, prefix, topk):
    counted = batch * sum(min(prefix + i, topk) for i in range(1, s + 1))
    assert causal_pairs(*(np.array([float(v)]) for v in (batch, s, prefix)), topk)[0] == counted


class TestRoofline:
    @staticmethod
    def by_hand(b, s, p, n, skip=False):
        """GLM-5 in exact integers, at fp8 cache and GEMMs."""
        h, ql, kvl, nope, rope, v, di, ni, k = 6144, 2048, 512, 192, 64, 256, 128, 32, 2048
        total, t, a, qk = s + p, b * s, kvl + rope, nope + rope
        pairs = b * sum(min(p + i, k) for i in range(1, s + 1))
        weights = h * (ql + kvl + rope + di) + ql * n * qk + ql * ni * di + h * ni + n * v * h
        gemm = 2 * t * weights + 2 * n * t * nope * kvl + 2 * n * t * kvl * v
        searched = not skip and total > k
        math = gemm / 2e14 + searched * 2 * t * ni * di * total / 2e14 + 2 * n * (a + kvl) * pairs / 1e14
        moved = weights + b * n * min(total, k) * a + searched * b * total * 132 + t * n * qk * 2 * 2
        return max(math, moved / 1e12) * 1000

    @pytest.mark.parametrize("b, s, p", [(1, 1, 0), (2, 100, 50), (1, 3000, 0), (3, 500, 1800), (1, 10, 5000)])
    def test_prefill(self, b, s, p):
        db = database(mode=Mode.SOL)
        assert ms(context(), db, b, s, p) == pytest.approx(self.by_hand(b, s, p, 16), rel=1e-14)

    def test_layers_that_reuse_an_index(self):
        share = 0.25 * self.by_hand(1, 3000, 0, 16) + 0.75 * self.by_hand(1, 3000, 0, 16, skip=True)
        assert ms(context(full_fraction=0.25), database(mode=Mode.SOL), 1, 3000) == pytest.approx(share, rel=1e-14)

    def test_split_adds_up_and_is_refused_under_context_parallelism(self):
        db, at = database(mode=Mode.SOL), Points.of(2, 4000, 100)
        split = context(scale=3.0).sol_split(db, at)
        assert split.time[0] == context(scale=3.0).evaluate(db, at).ms[0] == max(split.math[0], split.mem[0])
        with pytest.raises(InvalidField):
            context(cp=2).sol(db, at)

    def test_decode_attends_at_the_bfloat16_rate(self):
        weights = 6144 * (2048 + 576 + 128) + 2048 * 16 * 256 + 2048 * 4096 + 6144 * 32 + 16 * 256 * 6144
        math = 2 * 8 * (weights + 16 * 512 * 448) / 2e14 + 2 * 8 * 4096 * 5000 / 2e14 + 2 * 8 * 16 * 1088 * 2048 / 1e14
        moved = weights + 8 * 5000 * 132 + 8 * 2048 * 576
        sol = ms(generation(fmha_quant="fp8"), database(mode=Mode.SOL), 8, 5000)
        assert sol == pytest.approx(max(math, moved / 1e12) * 1000, rel=1e-14)

    def test_a_missing_rate_wins_over_missing_data(self):
        bare = replace(SYSTEM, flops={"bfloat16": 1e14})
        for mode in Mode:
            with pytest.raises(SystemFlopsMissing):
                context(gemm_quant="bfloat16").price(database(mode=mode, system=bare), Points.of(1, 1))


class TestMeasured:
    def test_heads_prefix_length_and_batch_interpolate(self):
        db = database(MEASURED)
        assert ms(context(), db, 4, 64, 128) == 1 + 128 / 1024 + 4
        assert ms(context(heads=40), db, 1, 64) == pytest.approx(2.5 + 1)
        assert ms(context(), db, 2, 160, 64) == pytest.approx(1 + 64 / 1024 + 160 / 64 * 2)

    def test_scale_and_source(self):
        answer = context(scale=61.0).evaluate(database(MEASURED), Points.of(1, 64))
        assert answer.ms[0] == 61 * 2.0
        assert (answer.source[0], answer.tier[0]) == (Source.SILICON, Tier.SILICON)

    def test_falls_back_to_another_bucket_but_never_merges(self):
        other = table("dsa_context", CONTEXT, context_rows("flashmla_kv", factor=7))
        both = table("dsa_context", CONTEXT, context_rows(heads=(16,)) + context_rows("flashmla_kv", factor=7))
        assert ms(context(), database(other), 1, 64) == 14.0
        assert ms(context(), database(both), 1, 64) == 2.0

    def test_miss_names_what_was_measured(self):
        with pytest.raises(PerfDataMissing, match=r"gemm_type was measured at fp8_block"):
            context(gemm_quant="nvfp4").price(
                database(MEASURED, system=replace(SYSTEM, flops={**SYSTEM.flops, "fp4": 4e14})), Points.of(1, 64)
            )

    def test_decode_was_measured_with_bfloat16_attention_only(self):
        rows = table("dsa_generation", GENERATION, [("fp8", "fp8_block", GLM, "trtllm", 16, 4, 100, 0.5)])
        assert ms(generation(), database(rows), 4, 100) == 0.5
        with pytest.raises(PerfDataMissing):
            generation(fmha_quant="fp8").price(database(rows), Points.of(4, 100))
        with pytest.raises(EmpiricalBasisMissing):
            generation(fmha_quant="fp8").price(database(rows, mode=Mode.HYBRID), Points.of(4, 100))


class TestSharedIndex:
    SKIP = table("dsa_context_skip", CONTEXT, context_rows(factor=0.5))

    def test_blend(self):
        assert ms(context(full_fraction=0.25), database(MEASURED, self.SKIP), 1, 64) == 0.25 * 2 + 0.75 * 1

    def test_all_layers_are_full_where_the_phase_was_never_measured_otherwise(self):
        assert ms(context(full_fraction=0.25), database(MEASURED), 1, 64) == 2.0

    def test_missing_slice_of_a_measured_kind_is_a_miss(self):
        other = table("dsa_context_skip", CONTEXT, [("bfloat16", "fp8", "fp8_block", "x", "trtllm", 16, 0, 1, 1, 1.0)])
        with pytest.raises(PerfDataMissing):
            context(full_fraction=0.25).price(database(MEASURED, other), Points.of(1, 64))


class TestEstimate:
    DB = database(MEASURED, mode=Mode.EMPIRICAL)

    def roofline(self, batch, s, prefix=0, heads=16):
        return ms(context(heads=heads), database(mode=Mode.SOL), batch, s, prefix)

    def test_a_sample_is_reproduced(self):
        answer = context().evaluate(self.DB, Points.of(4, 64, 128))
        assert answer.ms[0] == pytest.approx(1 + 128 / 1024 + 4)
        assert (answer.source[0], answer.tier[0]) == (Source.EMPIRICAL, Tier.EMPIRICAL)

    def test_a_prefix_beyond_the_measured_is_read_as_length(self):
        # utilisation of the sample without prefix at s + p = 256
        expected = self.roofline(1, 56, 200) / (self.roofline(1, 256) / 5.0)
        assert ms(context(), self.DB, 1, 56, 200) == pytest.approx(expected)

    def test_unmeasured_heads_take_the_samples_of_all_heads(self):
        # at the middle of ln 16 .. ln 64 both head counts weigh the same
        util = [self.roofline(1, 64, heads=n) / (n / 16 + 1) for n in (16, 64)]
        expected = self.roofline(1, 64, heads=32) / np.mean(util)
        assert ms(context(heads=32), self.DB, 1, 64) == pytest.approx(expected)

    def test_without_an_anchor_the_prefix_stays_an_axis(self):
        rows = table("dsa_context", CONTEXT, context_rows(prefixes=(128, 1024)))
        at_sample = self.roofline(1, 64, 2000) / (self.roofline(1, 64, 1024) / (1 + 1 + 1))
        assert ms(context(), database(rows, mode=Mode.EMPIRICAL), 1, 64, 2000) == pytest.approx(at_sample)

    def test_nothing_measured(self):
        with pytest.raises(EmpiricalBasisMissing):
            context().price(database(mode=Mode.EMPIRICAL), Points.of(1, 64))


class TestContextParallel:
    KERNELS = (
        table(
            "glm5_mqa_logits_module",
            "num_heads batch_size isl step",
            [(16, 1, s, p, s / 100 + p / 1000) for s in (64, 128) for p in (0, 1000)],
        ),
        table(
            "glm5_topk_module",
            "num_heads score batch_size isl step",
            [(16, k, 1, s, 0, f * s / 100) for k, f in (("flat", 1.0), ("last", 3.0)) for s in (64, 128)],
        ),
        table("nccl", "nccl_dtype op_name num_gpus message_size", [("half", "all_gather", 2, 10**6, 1.0)]),
    )
    DB = database(MEASURED, *KERNELS)

    def gather(self, tokens):
        return tokens * 128 / 1e6 + tokens * 576 / 1e6  # held linearly from the one measured size

    def test_base_deltas_and_gathers(self):
        answer = context(cp=2).evaluate(self.DB, Points.of(1, 128, 0))
        base, logits, topk = 2.0, 1.28 / 2 - 0.64, 3 * 1.28 / 2 - 0.64
        assert answer.ms[0] == pytest.approx(base + logits + topk + self.gather(128))
        assert answer.source[0] == Source.ESTIMATED

    def test_kernels_are_read_at_the_nearest_length_and_between_prefixes(self):
        # 110 new tokens read as 128, 55 as 64; prefix 100 lies between 0 and 1000
        delta = ms(context(cp=2), self.DB, 1, 110, 100) - ms(context(), self.DB, 1, 55, 100)
        logits = (1.28 + 0.1) / 2 - (0.64 + 0.1)
        assert delta == pytest.approx(logits + 3 * 1.28 / 2 - 0.64 + self.gather(110))

    def test_beyond_the_measured_lengths_is_a_miss_of_that_point_alone(self):
        answer = context(cp=2).evaluate(self.DB, Points.of(1, [128, 4096]))
        assert answer.missing().tolist() == [False, True]
        assert isinstance(answer.first_error(), PerfDataMissing)

    def test_missing_kernels_are_told_in_every_mode(self):
        for mode in Mode:
            with pytest.raises(PerfDataMissing, match="glm5_mqa_logits_module"):
                context(cp=2).price(database(mode=mode), Points.of(1, 128))

    def test_a_negative_sum_stands(self):
        cheap = table("dsa_context", CONTEXT, [("bfloat16", "fp8", "fp8_block", GLM, "trtllm", 16, 0, 64, 1, 1e-9)])
        last = table(
            "glm5_topk_module",
            "num_heads score batch_size isl step",
            [(16, k, 1, s, 0, 1.0) for k in ("flat", "last") for s in (64, 128)],
        )
        db = database(cheap, self.KERNELS[0], last, self.KERNELS[2])
        assert ms(context(cp=2), db, 1, 128) == pytest.approx(-0.5 + self.gather(128), abs=1e-6)


@pytest.mark.parametrize("mode", list(Mode))
def test_arrays_are_answered_point_by_point(mode):
    rng = np.random.default_rng(7)
    at = Points.of(rng.integers(1, 9, 40), rng.integers(1, 400, 40), rng.choice([0, 50, 128, 700], 40))
    db = database(MEASURED, TestSharedIndex.SKIP, *TestContextParallel.KERNELS, mode=mode)
    for op in (context(), context(heads=32, full_fraction=0.3), context(cp=2)):
        assert_pointwise(op, db, at)


def test_weights_of_glm5():
    op = context(heads=64, gemm_quant="bfloat16", scale=78.0)
    assert op.weight_bytes() == 27082358784.0
    assert replace(op, projection_quants=("fp8", "fp8", "fp8", "fp8")).weight_bytes() == 27082358784.0 / 2
