"""Dense attention: lanes, prefix, windows, context parallelism, decode averaging (spec/02 sections 5, 6.2 and 9)."""

import math

import numpy as np
import pytest
from perfcast_engine.answer import Points, Source, Tier
from perfcast_engine.errors import EmpiricalBasisMissing, InvalidField, PerfDataMissing
from perfcast_engine.ops.attention import ContextAttention, EncoderAttention, GenerationAttention
from perfcast_engine.quick import short_cuts
from perfcast_engine.tables.database import Mode

from tests.engine.handmade import database, table

CONTEXT = "lane attn_dtype kv_cache_dtype kvn head_dim window_size num_heads isl batch_size"
GENERATION = "lane kv_cache_dtype kvn head_dim window_size num_heads batch_size seq"
BF16 = ("bfloat16", "bfloat16")


def memop(moved, sol=False):
    return moved / 1e12 * 1e3 if sol else (moved / 0.8e12 + 3e-6) * 1e3


def extra(heads=8, kv_heads=2, head_dim=128, qk_norm=False, **kw):
    q, k = heads * head_dim, kv_heads * head_dim
    total = 2 * memop(2 * q + 2 * k, **kw) + 2 * memop(2 * k, **kw)
    if qk_norm:
        total += 2 * (2 * memop(2 * q, **kw) + 2 * memop(2 * k, **kw))
    return 1.1 * total


def context(**fields):
    usual = {
        "name": "attn",
        "heads": 8,
        "kv_heads": 2,
        "head_dim": 128,
        "kv_quant": "bfloat16",
        "fmha_quant": "bfloat16",
    }
    return ContextAttention(**usual | fields)


def generation(**fields):
    return GenerationAttention(
        **{"name": "attn", "heads": 8, "kv_heads": 2, "head_dim": 128, "kv_quant": "bfloat16"} | fields
    )


def prefill_table(slices=(("default", *BF16, 2, 128, 0),), factor=1.0):
    """ms = factor * heads * isl^2 * batch / 1e6, so that the root over isl is linear."""
    return table(
        "context_attention",
        CONTEXT,
        [
            (*key, n, s, b, (i + 1) * factor * n * s * s * b / 1e6)
            for i, key in enumerate(slices)
            for n in (4, 8)
            for s in (128, 256, 1024)
            for b in (1, 4)
        ],
    )


def decode_table(slices=(("default", "bfloat16", 2, 128, 0),), power=None):
    return table(
        "generation_attention",
        GENERATION,
        [
            (*key, n, b, s, (i + 1) * (n * b * s / 1e5 + 1), *(() if power is None else (power,)))
            for i, key in enumerate(slices)
            for n in (4, 8)
            for b in (1, 4)
            for s in (65, 129, 1025)
        ],
        power=power is not None,
    )


def ask(op, db, **at):
    return op.evaluate(db, Points.of(**at)).raise_first()


class TestPrefill:
    DB = database(prefill_table())

    def test_kernel_and_what_surrounds_it(self):
        answer = ask(context(), self.DB, batch=[1, 4, 2], s=[128, 1024, 512])
        kernel = np.array([8 * 128**2, 4 * 8 * 1024**2, 2 * 8 * 512**2]) / 1e6
        assert answer.ms == pytest.approx(kernel + extra())
        assert set(answer.source) == {Source.MIXED}
        assert ask(context(qk_norm=True), self.DB, batch=1, s=128).ms == pytest.approx(kernel[:1] + extra(qk_norm=True))

    def test_a_prefix_takes_its_share_of_the_causal_area(self):
        got = ask(context(), self.DB, batch=1, s=256, prefix=768).ms[0]
        assert got == pytest.approx(8 * 1024**2 / 1e6 * (1024**2 - 768**2) / 1024**2 + extra())

    def test_context_parallel_ranks_take_a_first_and_a_last_chunk(self):
        got = ask(context(cp=2), self.DB, batch=1, s=1024).ms[0]
        kernel = 8 * (256**2 + (1024**2 - 768**2)) / 1e6
        assert got == pytest.approx(kernel + extra())

    def test_imbalance_stretches_kernel_and_surroundings(self):
        got = ask(context(), self.DB, batch=1, s=128, imbalance=1.25).ms[0]
        assert got == pytest.approx(1.25 * (8 * 128**2 / 1e6 + extra()))

    def test_equal_query_and_kv_heads_are_their_own_slice(self):
        db = database(prefill_table([("default", *BF16, 0, 128, 0)]))
        assert ask(context(kv_heads=8), db, batch=1, s=128).ms[0] == pytest.approx(8 * 128**2 / 1e6 + extra(kv_heads=8))
        with pytest.raises(PerfDataMissing, match="kvn was measured at 0"):
            ask(context(), db, batch=1, s=128)

    def test_nothing_to_compute_misses_at_that_point_alone(self):
        answer = context().evaluate(self.DB, Points.of([1, 0, 1], [128, 128, 0]))
        assert answer.missing().tolist() == [False, True, True]
        assert np.isnan(answer.ms).tolist() == [False, True, True]
        assert isinstance(answer.first_error(), PerfDataMissing)

    def test_roofline_of_a_prefix_and_a_window(self):
        split = context(scale=2.0).sol_split(database(mode=Mode.SOL), Points.of(2, 1000, 3000))
        flops = 2 * 2 * (4000**2 - 3000**2) * 8 * 128
        moved = 2 * 2 * (2 * 8 * 1000 * 128) + 2 * 2 * 2 * 2 * 4000 * 128
        assert split.math[0] == pytest.approx(2 * flops / 1e14 * 1e3)
        assert split.mem[0] == pytest.approx(2 * (moved / 1e12 * 1e3 + extra(sol=True)))
        windowed = context(window=512).sol_split(database(mode=Mode.SOL), Points.of(1, [100, 1000]))
        assert windowed.math == pytest.approx([2 * a * 8 * 128 / 1e14 * 1e3 for a in (100**2, 2 * 512 * 1000)])


class TestLanes:
    SLICES = (("beta", *BF16, 2, 128, 0), ("alpha", *BF16, 2, 128, 0), ("alpha", *BF16, 2, 64, 0))
    DB = database(prefill_table(SLICES))

    def kernel(self, **fields):
        op = context(**fields)
        return ask(op, self.DB, batch=1, s=128).ms[0] - extra(head_dim=op.head_dim)

    def test_the_first_lane_that_holds_the_slice_answers(self):
        assert self.kernel(lanes=("alpha", "beta")) == pytest.approx(2 * 8 * 128**2 / 1e6)

    def test_unlisted_lanes_follow_in_order_of_appearance(self):
        assert self.kernel(lanes=("default",)) == pytest.approx(8 * 128**2 / 1e6)

    def test_a_lane_without_the_slice_is_passed_over(self):
        assert self.kernel(lanes=("beta",), head_dim=64) == pytest.approx(3 * 8 * 128**2 / 1e6)


class TestDecode:
    DB = database(decode_table())

    def test_mean_of_five_lengths_even_on_a_measured_one(self):
        # 0.9 * 129 .. 1.1 * 129 in four whole steps, on a line that bends at 129
        lengths = [116, 122, 128, 134, 141]
        curve = np.interp(lengths, [65, 129, 1025], [8 * s / 1e5 + 1 for s in (65, 129, 1025)])
        assert ask(generation(), self.DB, batch=1, s=129).ms == pytest.approx([curve.mean()])

    def test_head_counts_between_measured_ones(self):
        lengths = [180, 190, 200, 210, 220]
        curve = [np.interp(s, [129, 1025], [(6 * 2 * x / 1e5 + 1) for x in (129, 1025)]) for s in lengths]
        assert ask(generation(heads=6), self.DB, batch=2, s=200).ms == pytest.approx([np.mean(curve)])
        db = database(prefill_table())
        kernel = ask(context(heads=6), db, batch=2, s=512).ms[0] - extra(heads=6)
        assert kernel == pytest.approx(6 * 512**2 * 2 / 1e6)

    def test_a_short_cache_is_sampled_from_one_token_up(self):
        answer = generation().evaluate(self.DB, Points.of([1, 1, 0], [1, 0, 100]))
        assert answer.ms[0] == answer.ms[1] > 0
        assert answer.missing().tolist() == [False, False, True]

    def test_energy_follows_the_power(self):
        answer = ask(generation(scale=3.0), database(decode_table(power=500.0)), batch=[1, 100], s=[100, 100])
        assert answer.energy == pytest.approx(500.0 * answer.ms)
        assert ask(generation(), self.DB, batch=1, s=100).energy.tolist() == [0.0]

    def test_lifted_to_the_roofline(self):
        fast = table("generation_attention", GENERATION, [("default", "fp8", 2, 128, 0, 8, 1, 65, 1e-9)])
        got = ask(generation(kv_quant="fp8"), database(fast), batch=64, s=4096).ms[0]
        # utilisation 1 at the only sample, so the mean of the rooflines around 4096
        lengths = [3686, 3890, 4095, 4300, 4505]
        sol = [64 * (4 * 8 * 128 + 2 * 2 * (s - 1) * 128) / 1e12 * 1e3 for s in lengths]
        assert got == pytest.approx(np.mean(sol))

    def test_window_bounds_the_roofline(self):
        split = generation(window=128).sol_split(database(mode=Mode.SOL), Points.of(1, [100, 1000]))
        assert split.math == pytest.approx([4 * 8 * 128 * length / 1e14 * 1e3 for length in (99, 128)])


class TestOnePointAtATime:
    """Short cuts say what ``evaluate`` says, or nothing."""

    OPS = (
        context(),
        context(cp=2, qk_norm=True, scale=3.0),
        context(heads=6),
        generation(scale=2.0),
        generation(heads=6),
    )

    @pytest.mark.parametrize("op", OPS)
    def test_inside_and_outside_of_the_measurements(self, op):
        db = database(prefill_table(), decode_table())
        (cut,) = short_cuts([op], db)
        within, beyond = [(1, 128, 0), (2, 300, 100), (1, 1024, 0)], [(8, 300, 0), (1, 5000, 0), (0, 9, 0), (1, 0, 0)]
        for batch, s, prefix in within + beyond:
            expected = op.evaluate(db, Points.of(batch, s, prefix)).ms[0]
            for got in (cut.one(batch, s, prefix), cut.outside(batch, s, prefix)):
                assert math.isnan(got) or got == pytest.approx(expected, rel=1e-12)
        assert not math.isnan(cut.one(2, 300, 100))

    @pytest.mark.parametrize("mode", [Mode.EMPIRICAL, Mode.SOL])
    def test_only_where_measurements_answer(self, mode):
        assert short_cuts([context()], database(mode=mode)) is None
        assert short_cuts([generation()], database(mode=mode)) is None


class TestEstimate:
    def test_head_size_borrowed_at_the_ratio_of_the_backend(self):
        db = database(prefill_table(factor=100.0), mode=Mode.EMPIRICAL)
        own = ask(context(), db, batch=1, s=1024)
        lent = ask(context(head_dim=64), db, batch=1, s=1024)
        assert (own.tier[0], lent.tier[0]) == (Tier.EMPIRICAL, Tier.XSHAPE)
        sol = max(2 * 1024**2 * 8 * 64 / 1e14, (2 * 2 * 8 * 1024 * 64 + 2 * 2 * 2 * 1024 * 64) / 1e12) * 1e3
        sol_128 = 2 * 1024**2 * 8 * 128 / 1e14 * 1e3
        util = sol_128 / (100 * 8 * 1024**2 / 1e6)
        assert lent.ms[0] - extra(head_dim=64) == pytest.approx(sol / (util * 0.58), rel=1e-6)

    def test_a_window_falls_back_to_full_attention(self):
        db = database(prefill_table(), mode=Mode.EMPIRICAL, policy=frozenset())
        assert ask(context(window=4096), db, batch=1, s=1024).tier[0] == Tier.EMPIRICAL

    def test_nothing_to_borrow_from(self):
        db = database(prefill_table(), mode=Mode.EMPIRICAL, policy=frozenset())
        with pytest.raises(EmpiricalBasisMissing):
            ask(context(head_dim=64), db, batch=1, s=1024)
        with pytest.raises(EmpiricalBasisMissing):
            ask(generation(), database(mode=Mode.HYBRID), batch=1, s=1024)

    def test_decode_takes_the_length_as_it_is(self):
        db = database(decode_table(), mode=Mode.EMPIRICAL)
        answer = ask(generation(), db, batch=1, s=129)
        assert answer.ms[0] == pytest.approx(8 * 129 / 1e5 + 1)
        assert answer.source[0] == Source.EMPIRICAL


class TestEncoder:
    DB = database(
        table("encoder_attention", "attn_dtype head_dim num_heads isl batch_size", [("bfloat16", 64, 16, 256, 1, 2.0)])
    )

    def test_rotary_on_top(self):
        op = EncoderAttention(name="vit", heads=16, head_dim=64, partial_rotary=0.5)
        answer = ask(op, self.DB, batch=1, s=256)
        assert answer.ms[0] == pytest.approx(2.0 + 1.1 * memop(2 * 2 * 16 * 64 * 256))
        assert answer.source[0] == Source.MIXED

    def test_bare(self):
        assert ask(EncoderAttention(name="vit", heads=16, head_dim=64), self.DB, batch=1, s=256).ms.tolist() == [2.0]

    def test_bfloat16_only(self):
        with pytest.raises(InvalidField):
            EncoderAttention(name="vit", heads=16, head_dim=64, fmha_quant="fp8")


@pytest.mark.parametrize(
    "fields", [{"kv_quant": "fp4"}, {"fmha_quant": "int8"}, {"heads": 0}, {"head_dim": math.nan}, {"cp": 0}]
)
def test_bad_fields_are_refused_at_once(fields):
    with pytest.raises(InvalidField):
        context(**fields)
