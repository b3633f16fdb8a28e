"""Experts under a large-EP all-to-all, and whether data allow one (spec/03 sections 5-7, 13)."""

from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from perfcast_engine.answer import Points, Source
from perfcast_engine.errors import (
    EmpiricalBasisMissing,
    InvalidField,
    PerfDataMissing,
    UnsupportedCombination,
)
from perfcast_engine.models.large_ep import ExpertPlacement, choose_comm_backend
from perfcast_engine.ops.large_ep import MegaMoe, MoeAllToAll, MoeExperts, comm_backend, wire_dtype
from perfcast_engine.tables.database import Mode

from tests.engine.handmade import SYSTEM, database, table
from tests.engine.pointwise import assert_pointwise

BLACKWELL = replace(SYSTEM, sm_version=100, flops={**SYSTEM.flops, "fp4": 4e14})
SHAPE = (7168, 8, 256)


def on(backend, *tables, **fields):
    return replace(database(*tables, **fields), backend=backend, _kept={})


def ask(op, db, x):
    return op.evaluate(db, Points.of(1, 1, x=x)).raise_first()


A2A = "comm_backend phase comm_dtype ep_size node_num hidden_size topk num_experts sms num_tokens"
COMPUTE = (
    "kernel_source moe_dtype distribution inference_phase topk num_experts num_slots hidden_size inter_size"
    " moe_tp_size moe_ep_size num_tokens"
)
ORDINARY = "moe_dtype distribution topk num_experts hidden_size inter_size moe_tp_size moe_ep_size num_tokens"
MEGA = (
    "phase kernel_source kernel_dtype moe_dtype pre_dispatch source_policy distribution topk num_experts"
    " num_fused_shared_experts hidden_size inter_size moe_tp_size moe_ep_size num_tokens"
)
MEGA_NAMES = ("context", "deepgemm_megamoe", "fp8_fp4", "w4a8_mxfp4_mxfp8", "sglang_jit", "random", "balanced")

HALVES = ("dispatch", "combine")
BOTH_HALVES = (("dispatch", 16, 1.0), ("dispatch", 20, 3.0), ("combine", 16, 2.0), ("combine", 20, 2.5))


def exchange(backend="deepep_ll", half="dispatch", dtype="default", spread=(8, 1), sms=0, factor=1.0):
    return [(backend, half, dtype, *spread, *SHAPE, sms, t, factor * (t + 1)) for t in (1, 8, 64)]


def computed(kernel="deepep_moe", distribution="uniform", phase="context", slots=256, factor=1.0, tokens=(64, 256)):
    shape = (8, 256, slots, 7168, 2048, 1, 8)
    return [(kernel, "fp8_block", distribution, phase, *shape, t, factor * t) for t in tokens]


def ordinary(factor=1.0, ep=8):
    rows = [("fp8_block", "uniform", 8, 256, 7168, 2048, 1, ep, t, factor * t) for t in (64, 256)]
    return table("moe", ORDINARY, rows)


def folded(name, key, *rows):
    return table(name, key, list(chain.from_iterable(rows)))


class TestAllToAll:
    def a2a(self, **fields):
        usual = {"phase": "dispatch", "comm_backend": "deepep_ll", "moe_ep": 8, "nodes": 1}
        return MoeAllToAll(**{"name": "a2a", "hidden": 7168, "topk": 8, "experts": 256, **usual, **fields})

    def db(self, *rows, backend="sglang", **fields):
        return on(backend, folded("moe_a2a", A2A, *rows), **fields)

    def test_curve_held_in_proportion_to_tokens(self):
        answer = ask(self.a2a(scale=2.0), self.db(exchange()), [8, 36, 640])
        assert answer.ms.tolist() == [18.0, 74.0, 1300.0]
        assert set(answer.source) == {Source.SILICON}

    def test_tokens_are_shared_by_attention_ranks_without_a_floor_of_one(self):
        answer = self.a2a(attn_tp=8).evaluate(self.db(exchange()), Points.of(1, 1, x=[71, 7]))
        assert answer.ms[0] == 9.0
        assert answer.missing().tolist() == [False, True]

    def test_one_node_stands_in_for_several(self):
        db = self.db(exchange())
        answer = ask(self.a2a(moe_ep=64, nodes=8), db, [8])
        assert (answer.ms[0], answer.source[0]) == (9.0, Source.ESTIMATED)
        assert self.a2a(moe_ep=64, nodes=8).measured_spread(db) == (8, 1)
        with pytest.raises(PerfDataMissing):
            ask(self.a2a(moe_ep=64, nodes=1), db, [8])

    def test_the_node_that_stands_in_is_the_systems_own_elsewhere(self):
        db = self.db(exchange(spread=(4, 1)), backend="vllm", system=replace(SYSTEM, gpus_per_node=4))
        assert ask(self.a2a(moe_ep=64, nodes=16), db, [8]).source == [Source.ESTIMATED]

    def test_measured_nodes_come_first(self):
        db = self.db(exchange(), exchange(spread=(16, 2), factor=5.0))
        answer = ask(self.a2a(moe_ep=16, nodes=2), db, [8])
        assert (answer.ms[0], answer.source[0]) == (45.0, Source.SILICON)

    def test_nvlink_is_never_stood_in_for(self):
        db = self.db(exchange("nvlink_one_sided", dtype="fp8"), backend="trtllm")
        with pytest.raises(PerfDataMissing):
            ask(self.a2a(comm_backend="nvlink_one_sided", comm_dtype="fp8", moe_ep=16, nodes=2), db, [8])

    @pytest.mark.parametrize(
        "asked, held, answers",
        [
            ("fp8_block", ["fp8"], True),
            ("fp8_block", ["default"], True),
            ("fp8", ["bfloat16"], False),
            ("nvfp4", ["default", "fp8"], False),
        ],
    )
    def test_wire_dtype(self, asked, held, answers):
        db = self.db(*(exchange(dtype=dtype) for dtype in held))
        if answers:
            assert ask(self.a2a(comm_dtype=asked), db, [8]).ms == [9.0]
        else:
            with pytest.raises(PerfDataMissing):
                ask(self.a2a(comm_dtype=asked), db, [8])

    def test_between_swept_multiprocessors(self):
        """Inside what was measured, the correction to the sum of both halves changes nothing."""
        halves = [exchange("deepep_ht", h, sms=s, factor=f) for h, s, f in BOTH_HALVES]
        op = self.a2a(comm_backend="deepep_ht", sms=18)
        assert ask(op, self.db(*halves), [8]).ms == pytest.approx([9.0 * (1 + 3) / 2])

    def test_beyond_them_the_halves_share_the_held_sum(self):
        halves = [exchange("deepep_ht", h, sms=s, factor=f) for h, s, f in BOTH_HALVES]
        db = self.db(*halves)
        parts = [ask(self.a2a(comm_backend="deepep_ht", phase=h, sms=18), db, [640]).ms[0] for h in HALVES]
        own = [self.a2a(comm_backend="deepep_ht", phase=h, sms=18) for h in HALVES]
        alone = [ask(op, self.db(*(rows for rows in halves if rows[0][1] == op.phase)), [640]).ms[0] for op in own]
        assert parts[0] / parts[1] == pytest.approx(alone[0] / alone[1])
        assert sum(parts) != pytest.approx(sum(alone), rel=1e-6)

    def test_modes(self):
        for mode in (Mode.SOL, Mode.EMPIRICAL):
            with pytest.raises(EmpiricalBasisMissing):
                ask(self.a2a(), self.db(exchange(), mode=mode), [8])
        with pytest.raises(EmpiricalBasisMissing):
            ask(self.a2a(topk=4), self.db(exchange(), mode=Mode.HYBRID), [8])
        with pytest.raises(PerfDataMissing):
            ask(self.a2a(), on("sglang", mode=Mode.HYBRID), [8])

    def test_bad_names_are_refused_in_every_mode(self):
        for mode in Mode:
            for fields in ({"phase": "prepare"}, {"comm_backend": "carrier_pigeon"}):
                with pytest.raises(InvalidField):
                    ask(self.a2a(**fields), self.db(exchange(), mode=mode), [8])

    @given(st.sampled_from([0, 16, 18, 20, 40]), st.lists(st.integers(0, 900), min_size=1, max_size=10))
    def test_arrays_answer_as_their_points_do(self, sms, tokens):
        db = self.db(*(exchange("deepep_ht", h, sms=s, factor=f) for h, s, f in BOTH_HALVES))
        assert_pointwise(self.a2a(comm_backend="deepep_ht", sms=sms), db, Points.of(1, 1, x=np.array(tokens)))


class TestExperts:
    def experts(self, **fields):
        usual = {"hidden": 7168, "inter": 2048, "topk": 8, "experts": 256, "moe_ep": 8, "attn_dp": 1}
        named = {"quant": "fp8_block", "distribution": "uniform", "phase": "context"}
        return MoeExperts(**{"name": "experts", **usual, **named, **fields})

    def db(self, *rows, backend="sglang", extra=(), **fields):
        return on(backend, folded("moe_expert_compute", COMPUTE, *rows), *extra, **fields)

    def test_tokens_of_all_attention_ranks(self):
        assert ask(self.experts(attn_dp=4, scale=0.5), self.db(computed()), [32]).ms == [64.0]

    def test_balanced_prefill_sees_fewer_after_they_met(self):
        db = self.db(computed(), computed(phase="generation"))
        assert ask(self.experts(eplb=True, attn_dp=2), db, [101]).ms == [161.0]
        assert ask(self.experts(eplb=True, phase="generation"), db, [100]).ms == [100.0]

    def test_beyond_the_curve_compute_is_counted_at_the_ratio_to_bfloat16(self):
        """Long enough to be bound by compute: 2 x the bfloat16 rate, whatever the fp8 rate of the system is."""
        slow = replace(SYSTEM, flops={"bfloat16": 1e14, "fp8": 1.1e14})
        end, asked = 256, 100_000
        pairs = asked * 8 // 8
        compute = asked * 8 * 7168 * 2048 * 3 * 2 // 8 / 2e14
        weights = 7168 * 2048 * 3 * min(256 // 8, end * 8 // 8)
        memory = ((end * 8 // 8) * (7168 * 2 + 2048 * 3) + weights) / 1e12
        assert compute > (pairs * (7168 * 2 + 2048 * 3) + weights) / 1e12
        expected = 256.0 * compute / max(memory, end * 8 * 7168 * 2048 * 3 * 2 // 8 / 2e14)
        assert ask(self.experts(), self.db(computed(), system=slow), [asked]).ms == pytest.approx([expected])

    def test_distribution_falls_back_to_uniform_then_to_the_first(self):
        db = self.db(computed(distribution="power_law_1.2", factor=9.0), computed())
        assert ask(self.experts(distribution="odd"), db, [64]).ms == [64.0]
        db = self.db(computed(distribution="power_law_1.2", factor=9.0), computed(distribution="a", factor=2.0))
        assert ask(self.experts(distribution="odd"), db, [64]).ms == [576.0]

    @pytest.mark.parametrize(
        "kernels, sm, taken",
        [
            (("moe_torch_flow", "deepgemm"), 90, "moe_torch_flow"),
            (("moe_torch_flow", "deepgemm"), 100, "deepgemm"),
            (("zeta", "alpha"), 90, "alpha"),
        ],
    )
    def test_kernel_of_trtllm(self, kernels, sm, taken):
        rows = [computed(kernel, factor=i + 1.0) for i, kernel in enumerate(kernels)]
        db = self.db(*rows, backend="trtllm", system=replace(SYSTEM, sm_version=sm))
        assert ask(self.experts(), db, [64]).ms == [64.0 * (kernels.index(taken) + 1)]
        assert ask(self.experts(kernel=kernels[1]), db, [64]).ms == [128.0]

    def test_replicas_are_part_of_the_key(self):
        db = self.db(computed(), computed(slots=288, factor=3.0))
        assert ask(self.experts(slots=288), db, [64]).ms == [192.0]

    def test_ordinary_experts_stand_in_for_some_frameworks(self):
        for backend in ("vllm", "trtllm"):
            answer = ask(self.experts(), on(backend, ordinary(7.0)), [64])
            assert (answer.ms[0], answer.source[0]) == (448.0, Source.SILICON)
        with pytest.raises(PerfDataMissing):
            ask(self.experts(), on("sglang", ordinary(7.0)), [64])

    def test_they_stand_in_point_by_point(self):
        db = self.db(computed(tokens=(128,)), backend="vllm", extra=(ordinary(7.0),))
        assert ask(self.experts(), db, [64, 128]).ms.tolist() == [448.0, 128.0]

    def test_modes(self):
        for mode in (Mode.SOL, Mode.EMPIRICAL):
            with pytest.raises(EmpiricalBasisMissing):
                ask(self.experts(), self.db(computed(), mode=mode), [64])
        hybrid = {"mode": Mode.HYBRID}
        with pytest.raises(EmpiricalBasisMissing):
            ask(self.experts(topk=4), self.db(computed(), **hybrid), [64])
        with pytest.raises(PerfDataMissing):
            ask(self.experts(topk=4), self.db(computed(), backend="vllm", **hybrid), [64])
        with pytest.raises(InvalidField, match="phase"):
            ask(self.experts(phase="both"), self.db(computed(), mode=Mode.SOL), [64])

    def test_weights_count_experts_not_replicas(self):
        assert self.experts(slots=288, scale=2.0).weight_bytes() == 2 * 7168 * 2048 * 256 * 3 // 8


class TestMegaMoe:
    ROWS = table("dsv4_megamoe_module", MEGA, [(*MEGA_NAMES, 6, 256, 0, 4096, 2048, 1, 8, t, t) for t in (16, 64)])

    def op(self, **fields):
        usual = {"hidden": 4096, "inter": 2048, "topk": 6, "experts": 256, "moe_tp": 1, "moe_ep": 8}
        named = {"quant": "w4a8_mxfp4_mxfp8", "distribution": "uniform", "is_context": True}
        return MegaMoe(**{"name": "mega", **usual, **named, **fields})

    def test_curve_of_rank_local_tokens(self):
        db = on("sglang", self.ROWS, system=BLACKWELL)
        assert ask(self.op(), db, [16, 40, 128]).ms.tolist() == [16.0, 40.0, 128.0]

    def test_refusals(self):
        with pytest.raises(UnsupportedCombination, match="sm 100"):
            ask(self.op(), on("sglang", self.ROWS), [16])
        with pytest.raises(PerfDataMissing, match="measurements only"):
            ask(self.op(), on("sglang", self.ROWS, system=BLACKWELL, mode=Mode.SOL), [16])
        with pytest.raises(PerfDataMissing):
            ask(self.op(is_context=False), on("sglang", self.ROWS, system=BLACKWELL, mode=Mode.HYBRID), [16])


class TestChoice:
    """Which all-to-all a worker may run, by what was measured."""

    LAYER = ExpertPlacement(hidden=7168, inter=2048, topk=8, experts=256, quant="fp8_block", attn_dp=8, moe_ep=8)

    def db(self, backend="sglang", halves=HALVES, comm="deepep_ht", dtype="default", experts=None, **fields):
        sent = folded("moe_a2a", A2A, *(exchange(comm, half, dtype, sms=20) for half in halves))
        return on(backend, sent, experts or folded("moe_expert_compute", COMPUTE, computed()), **fields)

    def choose(self, db, family="DEEPSEEK", phase="context", **fields):
        return choose_comm_backend(db, family, phase, replace(self.LAYER, **fields))

    def test_covered(self):
        assert self.choose(self.db()) == "deepep_ht"
        assert self.choose(self.db("vllm", experts=ordinary())) == "deepep_ht"

    @pytest.mark.parametrize(
        "fields",
        [
            {"family": "QWEN35"},
            {"phase": "generation"},
            {"topk": 4},
            {"quant": "bfloat16"},
            {"inter": 1024},
            {"moe_ep": 1},
        ],
    )
    def test_not_covered(self, fields):
        assert self.choose(self.db(), **fields) is None

    def test_both_halves_must_be_measured(self):
        assert self.choose(self.db(halves=("dispatch",))) is None

    def test_one_node_covers_several(self):
        db = self.db("vllm", experts=ordinary(ep=64))
        assert self.choose(db, moe_ep=64) == "deepep_ht"
        assert self.choose(db, moe_ep=32) is None

    def test_trtllm_needs_attention_ranks_and_a_wire(self):
        db = self.db("trtllm", comm="trtllm_deepep_ht", dtype="bfloat16")
        assert self.choose(db) == "trtllm_deepep_ht"
        assert self.choose(db, attn_dp=1) is None

    def test_nvlink_needs_blackwell(self):
        fields = {"comm": "nvlink_one_sided", "dtype": "fp8"}
        assert self.choose(self.db("trtllm", **fields)) is None
        assert self.choose(self.db("trtllm", system=BLACKWELL, **fields)) == "nvlink_one_sided"


@pytest.mark.parametrize(
    "backend, phase, step, quant, system, sent",
    [
        ("deepep_ll", "generation", "combine", "nvfp4", "b200_sxm", "default"),
        ("trtllm_deepep_ht", "context", "dispatch", "fp8_block", "h200_sxm", "bfloat16"),
        ("trtllm_deepep_ht", "context", "combine", "nvfp4", "h200_sxm", "nvfp4"),
        ("trtllm_deepep_ll", "generation", "dispatch", "fp8_block", "h200_sxm", "fp8"),
        ("trtllm_deepep_ll", "generation", "combine", "nvfp4", "b200_sxm", "fp4"),
        ("trtllm_deepep_ll", "generation", "dispatch", "nvfp4", "h200_sxm", None),
        ("trtllm_deepep_ht", "context", "dispatch", "w4a16_mxfp4", "b200_sxm", None),
        ("nvlink_two_sided", "generation", "combine", "nvfp4", "gb200", "fp4"),
        ("nvlink_two_sided", "context", "combine", "nvfp4", "gb200", "nvfp4"),
        ("nvlink_two_sided", "context", "prepare", "fp8_block", "gb200", "fp8"),
    ],
)
def test_wire_dtype(backend, phase, step, quant, system, sent):
    if sent is None:
        with pytest.raises(InvalidField, match="cannot carry"):
            wire_dtype(comm_backend(backend), phase, step, quant, system)
    else:
        assert wire_dtype(comm_backend(backend), phase, step, quant, system) == sent
