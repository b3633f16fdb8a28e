"""DeepSeek-V4 attention: rooflines, head counts, top-k calibration, context parallelism (spec/04 section 4)."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from perfcast_engine.answer import Points, Source, Tier
from perfcast_engine.errors import EmpiricalBasisMissing, InvalidField, PerfDataMissing
from perfcast_engine.ops.dsv4 import Dsv4Context, Dsv4Generation
from perfcast_engine.tables.database import Mode

from tests.engine.handmade import SYSTEM, database, table
from tests.engine.pointwise import assert_pointwise

DSV4 = "kv_cache_dtype gemm_type native_heads num_heads compress_ratio"
FLASH = {
    "name": "attention",
    "native_heads": 64,
    "heads": 16,
    "tp": 4,
    "kv_quant": "fp8",
    "fmha_quant": "bfloat16",
    "gemm_quant": "fp8_block",
    "architecture": "DeepseekV4ForCausalLM",
    "hidden": 4096,
    "q_lora_rank": 1024,
    "o_lora_rank": 1024,
    "head_dim": 512,
    "rope_head_dim": 64,
    "index_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "window": 128,
    "o_groups": 2,
}


def context(kind="csa", **fields):
    return Dsv4Context(**{**FLASH, "kind": kind, **fields})


def generation(kind="csa", **fields):
    return Dsv4Generation(**{**FLASH, "kind": kind, **fields})


def context_table(kind="csa", heads=((64, 16),), prefixes=(0, 128)):
    ratio = {"csa": 4, "hca": 128}[kind]
    return table(
        f"dsv4_{kind}_context_module",
        f"mla_dtype {DSV4} step isl batch_size",
        [
            ("bfloat16", "fp8", "fp8_block", native, n, ratio, p, s, b, n / 16 + p / 128 + s / 64 * b)
            for native, n in heads
            for p in prefixes
            for s in (64, 256)
            for b in (1, 4)
        ],
    )


def ms(op, db, batch, s, prefix=0):
    return float(op.evaluate(db, Points.of(batch, s, prefix)).raise_first().ms[0])


class TestRoofline:
    @staticmethod
    def by_hand(kind, tokens, batch, length, pairs, n=16, attention=1e14, attention_bytes=2):
        """DeepSeek-V4 Flash in exact integers at one-byte GEMMs and cache."""
        h, q, o, head, rope, g, di, ni = 4096, 1024, 1024, 512, 64, 2, 128, 64
        c = 2 if kind == "csa" else 1
        gemm = 2 * tokens * (h * q + q * n * head + h * head + g * o * h) + 4 * tokens * h * c * head
        gemm += 2 * tokens * c * head
        half, index, cache = 2 * tokens * n * head * o, 0, 0
        weights = h * q + q * n * head + h * head + g * o * h + n * head * o * 2 + 2 * h * c * head
        if kind == "csa":
            entries = length // 4
            gemm += 4 * tokens * h * 2 * di + 2 * tokens * 2 * di
            index = 2 * tokens * q * ni * di + 2 * tokens * entries * ni * di
            half += 2 * tokens * h * ni
            cache = batch * entries * di / 2
            weights += q * ni * di + h * ni * 2
        moved = weights + tokens * (h + q + n * head + head + g * o) + pairs * head + cache
        moved += tokens * n * rope * attention_bytes
        math = gemm / 2e14 + half / 1e14 + index / 2e14 + 4 * n * head * pairs / attention
        return max(math, moved / 1e12) * 1000

    @given(st.sampled_from(["csa", "hca"]), st.integers(1, 3), st.integers(1, 5000), st.integers(0, 9000))
    def test_prefill(self, kind, b, s, p):
        ratio = {"csa": 4, "hca": 128}[kind]
        most = 512 if kind == "csa" else (p + s) // ratio
        seen = range(p + 1, p + s + 1)
        pairs = b * sum(min(t, 128) + min(t // ratio, most) for t in seen)
        expected = self.by_hand(kind, b * s, b, p + s, pairs)
        assert ms(context(kind), database(mode=Mode.SOL), b, s, p) == pytest.approx(expected, rel=1e-13)

    @pytest.mark.parametrize("kind, s", [("csa", 1), ("csa", 101), ("csa", 9000), ("hca", 9000)])
    def test_decode_attends_at_the_rate_of_its_cache(self, kind, s):
        length = s - 1
        entries = min(length // 4, 512) if kind == "csa" else length // 128
        pairs = 8 * (min(length, 128) + entries)
        fp8 = self.by_hand(kind, 8, 8, length, pairs, attention=2e14, attention_bytes=1)
        assert ms(generation(kind), database(mode=Mode.SOL), 8, s) == pytest.approx(fp8, rel=1e-14)
        ampere = replace(SYSTEM, sm_version=80)
        old = self.by_hand(kind, 8, 8, length, pairs)
        assert ms(generation(kind), database(mode=Mode.SOL, system=ampere), 8, s) == pytest.approx(old, rel=1e-14)

    def test_unknown_kind(self):
        with pytest.raises(InvalidField, match="csa, hca"):
            context("sliding")


class TestHeads:
    """Head counts are chosen, never blended: the exact one, else the next below, else the smallest."""

    DB = database(context_table(heads=((64, 8), (64, 32), (128, 16), (128, 64))))

    @pytest.mark.parametrize(
        "native, local, chosen", [(64, 32, 2), (64, 16, 0.5), (64, 4, 0.5), (96, 64, 2), (32, 8, 0.5), (256, 128, 4)]
    )
    def test_choice(self, native, local, chosen):
        assert ms(context(native_heads=native, heads=local), self.DB, 1, 64) == chosen + 1


class TestMeasured:
    def test_prefix_length_and_batch_interpolate(self):
        db = database(context_table("hca"))
        assert ms(context("hca"), db, 2, 160, 64) == pytest.approx(1 + 0.5 + 5)

    def test_decode_ignores_the_attention_mode(self):
        rows = table(
            "dsv4_hca_generation_module",
            f"{DSV4} batch_size seq",
            [("fp8", "fp8_block", 64, 16, 128, b, s, b + s / 100) for b in (1, 8) for s in (100, 200)],
        )
        assert ms(generation("hca", fmha_quant="fp8"), database(rows), 8, 150) == 9.5

    def test_no_table_and_no_slice(self):
        with pytest.raises(PerfDataMissing, match="dsv4_csa_context_module"):
            context().price(database(), Points.of(1, 64))
        with pytest.raises(PerfDataMissing, match="gemm_type was measured at fp8_block"):
            context(gemm_quant="bfloat16").price(database(context_table()), Points.of(1, 64))


class TestTopkCalibration:
    SCORES = table(
        "dsv4_csa_topk_calib",
        "num_heads score_mode step isl batch_size",
        [
            (64, f"v1_{kind}", p, s, b, value)
            for p in (0, 100)
            for s in (64, 256)
            for b in (1, 4)
            for kind, value in (("flat", 0.3 + p / 1000 + s / 1000), ("top_last", 0.1))
        ]
        + [(64, "v2_flat", 0, 1, 1, 0.5), (64, "v2_top_last", 0, 1, 1, 0.25)]
        + [(64, "v1_flat", 7, 7, 7, 99.0)],  # no partner: no calibration
    )

    def test_excess_is_taken_off_exact_hits_too(self):
        db = database(context_table(), self.SCORES)
        assert ms(context(), db, 4, 64) == pytest.approx(5 - 0.264)

    def test_excess_interpolates_and_is_held_at_its_ends(self):
        db = database(context_table(), self.SCORES)
        bare = database(context_table())
        assert ms(context(), bare, 2, 160, 50) - ms(context(), db, 2, 160, 50) == pytest.approx(0.2 + 0.05 + 0.16)
        assert ms(context(), bare, 9, 999, 999) - ms(context(), db, 9, 999, 999) == pytest.approx(0.2 + 0.1 + 0.256)

    def test_switch_and_kind(self):
        db = database(context_table(), context_table("hca"), self.SCORES)
        assert ms(context(correct_topk=False), db, 4, 64) == 5.0
        assert ms(context("hca"), db, 4, 64) == 5.0
        assert ms(context(native_heads=128), db, 4, 64) == 5.0  # not calibrated for

    def test_decode_and_floor_at_zero(self):
        rows = table(
            "dsv4_csa_generation_module",
            f"{DSV4} batch_size seq",
            [("fp8", "fp8_block", 64, 16, 4, 1, 10, 0.4), ("fp8", "fp8_block", 64, 16, 4, 1, 20, 0.2)],
        )
        db = database(rows, self.SCORES)
        assert ms(generation(), db, 1, 10) == pytest.approx(0.15)
        assert ms(generation(), db, 1, 20) == 0.0


class TestEstimate:
    def test_samples_are_reproduced_without_calibration(self):
        db = database(context_table(), TestTopkCalibration.SCORES, mode=Mode.EMPIRICAL)
        answer = context().evaluate(db, Points.of(4, 64))
        assert answer.ms[0] == pytest.approx(5.0)
        assert (answer.source[0], answer.tier[0]) == (Source.EMPIRICAL, Tier.EMPIRICAL)

    def test_a_prefix_beyond_the_measured_needs_samples_without_prefix(self):
        db = database(context_table(prefixes=(64, 128)), mode=Mode.EMPIRICAL)
        answer = context().evaluate(db, Points.of(1, 64, [100, 500]))
        assert answer.missing().tolist() == [False, True]
        assert isinstance(answer.first_error(), EmpiricalBasisMissing)


class TestContextParallel:
    NCCL = table("nccl", "nccl_dtype op_name num_gpus message_size", [("half", "all_gather", 2, 10**6, 1.0)])
    LOGITS = table(
        "dsv4_paged_mqa_logits_module",
        "num_heads tp_size step isl batch_size",
        [(64, 1, p, s, 1, (s + p) / 1000) for p in (0, 8192, 16384) for s in (1, 4096, 8192)],
    )
    LAST = table(
        "dsv4_csa_topk_calib",
        "num_heads score_mode step isl batch_size",
        [(64, "v1_top_last", 0, s, 1, s / 1000) for s in (1, 6000, 12000)],
    )

    def test_heavily_compressed_gathers_window_and_entries(self):
        db = database(context_table("hca"), self.NCCL)
        answer = context("hca", cp=2).evaluate(db, Points.of(1, 500))
        alone = ms(context("hca"), db, 1, 250)
        assert answer.ms[0] == pytest.approx(alone + 128 * 512 / 1e6 + 3 * 512 / 1e6)
        assert answer.source[0] == Source.ESTIMATED

    def test_learned_index_is_shared_call_by_call(self):
        db = database(context_table(), self.NCCL, self.LOGITS, self.LAST)
        # 12000 tokens: one call of 8192 and one of 3808 behind it; a rank's 6000 take one call
        whole, own = 8.192 + (3.808 + 8.192), 6.0
        topk = 12 / 2 - 6
        gathers = 12000 * 128 / 1e6 + 3000 * 512 / 1e6
        expected = ms(context(), db, 1, 6000) + whole / 2 - own + topk + gathers
        assert ms(context(cp=2), db, 1, 12000) == pytest.approx(expected)

    def test_missing_kernels(self):
        with pytest.raises(PerfDataMissing):
            context(cp=2).price(database(context_table(), self.NCCL, self.LOGITS), Points.of(1, 500))
        with pytest.raises(PerfDataMissing):
            context(cp=2).price(database(context_table(), self.NCCL, self.LAST), Points.of(1, 500))


@pytest.mark.parametrize("mode", list(Mode))
def test_arrays_are_answered_point_by_point(mode):
    rng = np.random.default_rng(7)
    at = Points.of(rng.integers(1, 9, 40), rng.integers(1, 20000, 40), rng.choice([0, 50, 128, 700], 40))
    parts = TestContextParallel
    both = table("dsv4_csa_topk_calib", "num_heads score_mode step isl batch_size", _scores())
    db = database(context_table(), context_table("hca"), parts.NCCL, parts.LOGITS, both, mode=mode)
    for op in (context(), context("hca"), context(cp=2), context("hca", cp=2)):
        assert_pointwise(op, db, at)


def _scores():
    return [
        (64, f"v1_{kind}", p, s, 1, f * s / 1000 + p / 1e5)
        for kind, f in (("flat", 2), ("top_last", 1))
        for p in (0, 100)
        for s in (1, 6000, 12000)
    ]


def test_weights():
    pro = {"hidden": 7168, "q_lora_rank": 1536, "index_topk": 1024, "native_heads": 128, "tp": 8}
    assert context("hca", scale=31.0, **pro).weight_bytes() == 2055997376.0
    assert generation("csa", scale=30.0, **pro).weight_bytes() == 2717738880.0
