"""Fused experts and the exchange around them (spec/03 sections 3, 4)."""

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
    UnsupportedCombination,
)
from perfcast_engine.ops.collective import AllReduce, Nccl
from perfcast_engine.ops.moe import Moe
from perfcast_engine.ops.moe_dispatch import MoeDispatch
from perfcast_engine.tables.database import TRANSFER_PRESETS, Mode

from tests.engine.handmade import SYSTEM, database, table
from tests.engine.pointwise import assert_pointwise

BLACKWELL = replace(SYSTEM, sm_version=100, flops={**SYSTEM.flops, "fp4": 4e14})
KEY = "moe_dtype distribution topk num_experts hidden_size inter_size moe_tp_size moe_ep_size num_tokens"
POINTS = ((16, 1.0), (64, 2.0), (256, 8.0))


def curve(quant="fp8", shape=(2, 8, 1024, 512), distribution="balanced", factor=1.0, split=(1, 4), points=POINTS):
    return [(quant, distribution, *shape, *split, t, factor * ms) for t, ms in points]


def moe(**fields):
    usual = {"hidden": 1024, "inter": 512, "topk": 2, "experts": 8, "moe_tp": 1, "moe_ep": 4}
    return Moe(**{"name": "moe", "quant": "fp8", "distribution": "balanced", **usual, **fields})


def by_hand(t, topk=2, experts=8, h=1024, i=512, tp=1, ep=4, matrices=3, width=1, rate=2e14):
    pairs = t * topk
    ops = pairs * h * i * matrices * 2 // ep // tp
    moved = pairs // ep * h * 2 + pairs // ep * i * matrices // tp
    moved += h * i * matrices // tp * min(experts // ep, pairs // ep)
    return max(ops / rate, moved * width / 1e12) * 1000


def ask(op, db, x):
    return op.evaluate(db, Points.of(1, 1, x=x)).raise_first()


class TestRoofline:
    @pytest.mark.parametrize("tokens", [1, 3, 500, 100_000, 4_000_000_000])
    def test_formula(self, tokens):
        assert ask(moe(), database(mode=Mode.SOL), [tokens]).ms == pytest.approx([by_hand(tokens)], rel=1e-14)

    def test_two_matrices_sharded(self):
        op = moe(gated=False, moe_tp=3, moe_ep=1, quant="bfloat16")
        expected = by_hand(77, tp=3, ep=1, matrices=2, width=2, rate=1e14)
        assert ask(op, database(mode=Mode.SOL), [77]).ms == pytest.approx([expected], rel=1e-14)

    def test_split(self):
        split = moe(scale=2.0).sol_split(database(), Points.of(1, 1, x=[100]))
        assert max(split.math[0], split.mem[0]) == split.time[0] == pytest.approx(2 * by_hand(100))

    def test_every_attention_rank_brings_its_tokens(self):
        db = database(mode=Mode.SOL)
        assert ask(moe(attn_dp=4), db, [25]).ms == ask(moe(), db, [100]).ms

    def test_missing_rate_is_named_before_missing_data(self):
        with pytest.raises(SystemFlopsMissing, match="fp4"):
            ask(moe(quant="nvfp4"), database(), [1])

    def test_weights_are_floored_after_each_split(self):
        assert moe(moe_ep=3, moe_tp=5, scale=2.0).weight_bytes() == 2 * (1024 * 512 * 8 * 3 // 3 // 5)
        assert moe(quant="nvfp4", gated=False, moe_ep=1).weight_bytes() == 1024 * 512 * 8 * 0.5625 * 2


class TestMeasured:
    DB = database(table("moe", KEY, curve()))

    def test_along_the_curve(self):
        answer = ask(moe(scale=3.0), self.DB, [16, 40, 256])
        assert answer.ms.tolist() == [3.0, 4.5, 24.0]
        assert set(answer.source) == {Source.SILICON}

    def test_beyond_it_the_end_point_keeps_its_utilisation(self):
        expected = [1.0 * by_hand(2) / by_hand(16), 8.0 * by_hand(4000) / by_hand(256)]
        assert ask(moe(), self.DB, [2, 4000]).ms == pytest.approx(expected)

    def test_no_tokens_is_a_miss(self):
        answer = moe().evaluate(self.DB, Points.of(1, 1, x=[0, 16]))
        assert answer.missing().tolist() == [True, False]

    def test_other_shape_is_a_miss_that_says_what_was_measured(self):
        with pytest.raises(PerfDataMissing, match="moe_ep_size was measured at 4"):
            ask(moe(moe_ep=8), self.DB, [16])

    def test_one_point_says_nothing_about_fewer_tokens(self):
        db = database(table("moe", KEY, curve(points=((64, 2.0),))))
        answer = moe().evaluate(db, Points.of(1, 1, x=[63, 64, 128]))
        assert answer.missing().tolist() == [True, False, False]
        assert answer.ms[2] == pytest.approx(2.0 * by_hand(128) / by_hand(64))

    def test_unknown_distribution_is_read_as_uniform(self):
        db = database(table("moe", KEY, curve() + curve(distribution="uniform", factor=7.0)))
        assert ask(moe(distribution="power_law_9"), db, [16]).ms == [7.0]
        with pytest.raises(PerfDataMissing):
            ask(moe(distribution="power_law_9"), self.DB, [16])

    def test_balanced_experts_of_sglang_see_fewer_prefill_tokens(self):
        db = replace(self.DB, backend="sglang", _kept={})
        assert ask(moe(eplb=True), db, [80]).ms == [2.0]
        assert ask(moe(eplb=True, is_context=False), db, [64]).ms == [2.0]
        assert ask(moe(eplb=True), self.DB, [64]).ms == [2.0]

    def test_retired_path(self):
        op = moe(moe_backend="deepep_moe")
        for mode in (Mode.SILICON, Mode.HYBRID, Mode.EMPIRICAL):
            with pytest.raises(PerfDataMissing, match="retired"):
                ask(op, replace(self.DB, backend="sglang", mode=mode, _kept={}), [16])
        assert ask(op, replace(self.DB, backend="sglang", mode=Mode.SOL, _kept={}), [16]).ms == [by_hand(16)]


class TestLowLatencyKernels:
    STANDARD = table("moe", KEY, curve("nvfp4"))
    LOW = table("moe_low_latency", KEY, curve("nvfp4", factor=0.1, points=((16, 1.0), (128, 2.0))))
    DB = database(STANDARD, LOW, system=BLACKWELL)

    def test_serve_up_to_128_tokens_of_one_array(self):
        assert ask(moe(quant="nvfp4"), self.DB, [16, 256, 128, 160]).ms == pytest.approx([0.1, 8.0, 0.2, 5.0])

    def test_only_gated_experts(self):
        assert ask(moe(quant="nvfp4", gated=False), self.DB, [16]).ms == [1.0]

    def test_only_where_the_shape_was_measured(self):
        other = table("moe", KEY, curve("nvfp4") + curve("nvfp4", split=(4, 1), factor=3.0))
        op = moe(quant="nvfp4", moe_tp=4, moe_ep=1)
        assert ask(op, database(other, self.LOW, system=BLACKWELL), [16]).ms == [3.0]

    def test_answer_where_the_standard_table_misses(self):
        db = database(self.LOW, system=BLACKWELL)
        assert moe(quant="nvfp4").evaluate(db, Points.of(1, 1, x=[16, 200])).missing().tolist() == [False, True]

    def test_estimates_lean_on_them(self):
        db = replace(self.DB, mode=Mode.EMPIRICAL, _kept={})
        assert ask(moe(quant="nvfp4"), db, [16, 256]).ms == pytest.approx([0.1, 8.0])


class TestTransfer:
    """What an unmeasured layer borrows, by policy."""

    OTHER = (2, 8, 2048, 512)  # as wide as twice ours

    def estimate(self, rows, tokens=64, policy="aggressive", **fields):
        db = database(table("moe", KEY, rows), mode=Mode.HYBRID, policy=TRANSFER_PRESETS[policy])
        answer = ask(moe(**fields), db, [tokens])
        return answer.ms[0], Tier(answer.tier[0])

    def test_own_curve_first(self):
        db = database(table("moe", KEY, curve()), mode=Mode.EMPIRICAL)
        answer = ask(moe(), db, [64, 1024])
        assert answer.ms == pytest.approx([2.0, 8.0 * by_hand(1024) / by_hand(256)])
        assert set(answer.tier) == {Tier.EMPIRICAL}

    def test_other_shape(self):
        ms, tier = self.estimate(curve(shape=self.OTHER) + curve(shape=(8, 256, 7168, 2048), factor=99.0))
        assert (ms, tier) == (pytest.approx(2.0 * by_hand(64) / by_hand(64, h=2048)), Tier.XSHAPE)

    def test_other_shape_at_the_same_split_only(self):
        with pytest.raises(EmpiricalBasisMissing):
            self.estimate(curve(shape=self.OTHER, split=(2, 2)))

    def test_other_quantisation_of_the_same_profile_is_judged_by_ours(self):
        ms, tier = self.estimate(curve("fp8_block"))
        assert (ms, tier) == (pytest.approx(2.0), Tier.XQUANT)

    def test_other_profile_is_judged_by_its_own_and_corrected(self):
        ms, tier = self.estimate(curve("bfloat16", factor=99.0) + curve("int4_wo"))
        own, reference = by_hand(64), by_hand(64, width=0.5, rate=1e14)
        assert (ms, tier) == (pytest.approx(2.0 * own / reference / (0.40 / 0.07)), Tier.XPROFILE)

    @pytest.mark.parametrize("policy, rows", [("off", "fp8"), ("conservative", "fp8_block"), ("balanced", "bfloat16")])
    def test_policy_forbids(self, policy, rows):
        with pytest.raises(EmpiricalBasisMissing):
            self.estimate(curve(rows, shape=self.OTHER), policy=policy)

    def test_without_any_rows(self):
        for policy, error in (("aggressive", PerfDataMissing), ("conservative", EmpiricalBasisMissing)):
            with pytest.raises(error):
                ask(moe(), database(mode=Mode.EMPIRICAL, policy=TRANSFER_PRESETS[policy]), [64])


COLLECTIVES = (
    table(
        "custom_allreduce",
        "nccl_dtype num_gpus strategy message_size",
        [("half", g, "AUTO", 1024, float(g)) for g in (2, 4, 8, 16)],
    ),
    table(
        "nccl",
        "nccl_dtype op_name num_gpus message_size",
        [("half", name, g, 1024, 10.0 * g) for name in ("all_gather", "reduce_scatter") for g in (2, 4, 8, 16)],
    ),
)


REDUCE = ("all_reduce", 8, 1)


class TestDispatch:
    DB = database(*COLLECTIVES)

    def op(self, backend="sglang", **fields):
        usual = {"hidden": 1024, "topk": 2, "experts": 8, "moe_tp": 1, "moe_ep": 8, "attn_dp": 1, "quant": "fp8"}
        flavor = "TrtllmAlltoall" if backend == "trtllm" else "CustomAllReduce"
        return MoeDispatch(**{"name": "d", "backend": backend, "flavor": flavor, "pre": True, **usual, **fields})

    @pytest.mark.parametrize(
        "backend, fields, pre, post",
        [
            ("vllm", {}, [REDUCE], [REDUCE]),
            ("vllm", {"attn_ar_modeled": True}, [], [REDUCE]),
            ("vllm", {"attn_dp": 8}, [("all_gather", 8, 8)], [("reduce_scatter", 8, 8)]),
            ("vllm", {"attn_dp": 2}, [REDUCE, ("all_gather", 8, 2)], [REDUCE, ("reduce_scatter", 8, 2)]),
            (
                "sglang",
                {"attn_dp": 2},
                [("reduce_scatter", 4, 1), ("all_gather", 8, 2)],
                [("reduce_scatter", 8, 2), ("all_gather", 4, 1)],
            ),
            ("sglang", {"attn_cp": 2}, [("all_gather", 8, 1)], [("reduce_scatter", 8, 1)]),
            ("sglang", {"attn_cp": 2, "is_context": False}, [], [REDUCE]),
            ("sglang", {"attn_dp": 8}, [("all_gather", 8, 8)], [("reduce_scatter", 8, 8)]),
            ("sglang", {}, [REDUCE], [REDUCE]),
            ("sglang", {"moe_ep": 1}, [], []),
            ("trtllm", {"attn_dp": 2}, [REDUCE], [REDUCE]),
            ("trtllm", {"attn_dp": 8}, [("all_gather", 8, 8)], [("reduce_scatter", 8, 8)]),
            ("trtllm", {"attn_dp": 2, "flavor": "CustomAllReduce"}, [("all_reduce", 4, 1)], [("all_reduce", 4, 1)]),
        ],
    )
    def test_collectives(self, backend, fields, pre, post):
        for half, parts in ((True, pre), (False, post)):
            answer = ask(self.op(backend, pre=half, **fields), self.DB, [3])
            assert answer.ms[0] == pytest.approx(sum(self.alone(*part) for part in parts))
            assert answer.source[0] == Source.SILICON

    def alone(self, operation, gpus, times):
        """Three tokens of each of ``times`` attention ranks through one collective."""
        if operation == "all_reduce":
            return ask(AllReduce(name="", hidden=1024, gpus=gpus), self.DB, [3]).ms[0]
        part = Nccl(name="", operation=operation, elements_per_token=1024, gpus=gpus)
        return ask(part, self.DB, [3 * times]).ms[0]

    def test_packed_on_the_first_blackwell_only(self):
        op, at = self.op("trtllm", attn_dp=2, quant="nvfp4"), [8]
        gathered = ask(Nccl(name="", operation="all_gather", elements_per_token=1024 * 0.28125, gpus=8), self.DB, [16])
        assert ask(op, database(*COLLECTIVES, system=BLACKWELL), at).ms == gathered.ms
        newer = replace(BLACKWELL, sm_version=103)
        reduced = ask(AllReduce(name="", hidden=1024, gpus=8), self.DB, at)
        assert ask(op, database(*COLLECTIVES, system=newer), at).ms == reduced.ms

    def test_rack_scale_node(self):
        key = "kernel_source op_name moe_dtype num_nodes hidden_size topk num_experts moe_ep_size num_tokens"
        rows = [("NVLinkOneSided", "alltoall_dispatch", "fp8", 2, 1024, 2, 8, 8, 16, 0.5)]
        db = database(table("trtllm_alltoall", key, rows), system=replace(BLACKWELL, gpus_per_node=72))
        op = self.op("trtllm", attn_dp=8, quant="fp8_block")
        assert ask(op, db, [16, 32]).ms.tolist() == [0.5, 1.0]
        roofline = ask(op, replace(db, mode=Mode.SOL, _kept={}), [16]).ms[0]
        assert roofline == pytest.approx(16 * 2 * 1024 / 5e10 * 1000)
        assert ask(op, replace(db, mode=Mode.EMPIRICAL, _kept={}), [32]).ms == pytest.approx([1.0])

    def test_roofline_split_of_nothing_only(self):
        at = Points.of(1, 1, x=[3])
        assert self.op(moe_ep=1).sol_split(self.DB, at).time.tolist() == [0.0]
        with pytest.raises(SolNotDefined):
            self.op().sol_split(self.DB, at)

    def test_refusals(self):
        with pytest.raises(UnsupportedCombination, match="retired"):
            ask(self.op(flavor="RetiredDeepEp"), self.DB, [3])
        with pytest.raises(InvalidField, match="backend"):
            self.op("other")
        with pytest.raises(InvalidField, match="quant"):
            self.op(quant="fp3")


@given(
    st.sampled_from(
        [
            moe(quant="nvfp4"),
            moe(quant="nvfp4", moe_ep=2),
            moe(quant="nvfp4", attn_dp=3, scale=2.0),
            TestDispatch().op("sglang", attn_dp=2),
            TestDispatch().op("trtllm", attn_dp=2),
        ]
    ),
    st.sampled_from(list(Mode)),
    st.lists(st.integers(0, 600), min_size=1, max_size=12),
)
def test_arrays_answer_as_their_points_do(op, mode, tokens):
    one = table("moe", KEY, curve("nvfp4") + curve("nvfp4", split=(1, 2), points=((64, 2.0),)))
    db = database(one, TestLowLatencyKernels.LOW, *COLLECTIVES, mode=mode, system=BLACKWELL)
    try:
        assert_pointwise(op, db, Points.of(1, 1, x=np.array(tokens)))
    except (PerfDataMissing, EmpiricalBasisMissing):
        assert mode is not Mode.SOL
        for t in tokens:
            with pytest.raises((PerfDataMissing, EmpiricalBasisMissing)):
                ask(op, db, [t])
