"""Collectives, memory-bound operators, groups of operators, and arrays of points (spec/02 sections 5.7, 5.8, 6)."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from perfcast_engine.answer import Points, Source, Tier
from perfcast_engine.errors import EmpiricalBasisMissing, EngineError, PerfDataMissing, SolNotDefined
from perfcast_engine.ops.base import Reads
from perfcast_engine.ops.collective import P2P, AllReduce, Nccl
from perfcast_engine.ops.composite import Fallback, Overlap
from perfcast_engine.ops.gemm import Gemm
from perfcast_engine.ops.memory_bound import Elementwise, Embedding
from perfcast_engine.tables.database import Mode

from tests.engine import test_dense_attention as attention
from tests.engine.handmade import SYSTEM, database, table

ALLREDUCE = table(
    "custom_allreduce",
    "nccl_dtype num_gpus strategy message_size",
    [("half", g, "AUTO", x, g * t) for g in (2, 4) for x, t in ((1024, 1.0), (4096, 2.0))],
)
NCCL = table(
    "nccl",
    "nccl_dtype op_name num_gpus message_size",
    [("half", "all_gather", 4, 1024, 1.0), ("half", "all_gather", 4, 4096, 2.0), ("half", "all_reduce", 8, 1024, 7.0)],
)
ONECCL = table("oneccl", "nccl_dtype op_name num_gpus message_size", [("half", "all_gather", 16, 1024, 9.0)])


def ask(op, db, x):
    return op.evaluate(db, Points.of(1, 1, x=x)).raise_first()


def all_reduce(gpus, hidden=64, **fields):
    return AllReduce(name="ar", hidden=hidden, gpus=gpus, **fields)


def gather(gpus, operation="all_gather", **fields):
    return Nccl(name="nccl", operation=operation, elements_per_token=64.0, gpus=gpus, **fields)


class TestAllReduce:
    DB = database(ALLREDUCE)

    def test_curve_over_elements_held_in_proportion_to_size(self):
        assert ask(all_reduce(4), self.DB, [16, 64, 40, 128, 8]).ms.tolist() == [4.0, 8.0, 6.0, 16.0, 2.0]

    def test_context_parallel_ranks_share_the_tokens(self):
        assert ask(all_reduce(4, seq_split=3), self.DB, [46]).ms.tolist() == [4.0]

    def test_beyond_the_largest_measured_group(self):
        factor = 15 / 16 * 4 / 3 * (4e11 / 5e10)
        assert ask(all_reduce(16), self.DB, [16]).ms == pytest.approx([4.0 * factor])

    def test_between_measured_groups_is_a_miss(self):
        with pytest.raises(PerfDataMissing, match="num_gpus was measured at 2, 4"):
            ask(all_reduce(3), self.DB, [16])

    def test_no_tokens_miss_alone(self):
        assert all_reduce(4).evaluate(self.DB, Points.of(1, 1, x=[0, 16])).missing().tolist() == [True, False]

    @pytest.mark.parametrize("mode", Mode)
    def test_one_gpu_has_nothing_to_reduce(self, mode):
        answer = ask(all_reduce(1), database(mode=mode), [16])
        assert (answer.ms[0], answer.source[0]) == (0.0, Source.EMPIRICAL)

    def test_rack_scale_nodes_use_nccl_above_four(self):
        db = database(ALLREDUCE, NCCL, system=replace(SYSTEM, gpus_per_node=72))
        assert ask(all_reduce(8), db, [16]).ms.tolist() == [7.0]
        assert ask(all_reduce(4), db, [16]).ms.tolist() == [4.0]

    def test_estimate_borrows_the_largest_group(self):
        answer = ask(all_reduce(8), database(ALLREDUCE, mode=Mode.EMPIRICAL), [16])
        assert answer.ms == pytest.approx([4.0 * (7 / 8) / (3 / 4)])
        assert answer.tier[0] == Tier.XSHAPE

    def test_estimate_of_nothing_is_nothing_and_needs_no_table(self):
        db = database(mode=Mode.EMPIRICAL)
        answer = ask(all_reduce(8), db, [0])
        assert (answer.ms[0], answer.tier[0]) == (0.0, Tier.SILICON)
        assert all_reduce(8).evaluate(db, Points.of(1, 1, x=[0, 1])).missing().tolist() == [False, True]

    def test_roofline_has_no_parts(self):
        split = all_reduce(8).sol_split(self.DB, Points.of(1, 1, x=16))
        assert [part[0] for part in split] == pytest.approx([2 * 1024 * 2 / 8 * 7 / 4e11 * 1e3, 0, 0])


class TestNccl:
    DB = database(NCCL, ONECCL)

    def test_one_table_then_the_other(self):
        assert ask(gather(4), self.DB, [16, 40]).ms.tolist() == [1.0, 1.5]
        assert ask(gather(16), self.DB, [16]).ms.tolist() == [9.0]
        assert ask(gather(32), self.DB, [16]).ms == pytest.approx([9.0 * 31 / 32 * 16 / 15])

    def test_misses_name_what_was_measured(self):
        with pytest.raises(PerfDataMissing, match="num_gpus was measured at 4"):
            ask(gather(8), self.DB, [16])
        with pytest.raises(PerfDataMissing, match="nccl_dtype was measured at half"):
            ask(gather(4, quant="fp8"), self.DB, [16])
        with pytest.raises(PerfDataMissing, match="no nccl table"):
            ask(gather(4), database(), [16])

    def test_an_unknown_operation_costs_nothing_but_in_silicon(self):
        assert ask(gather(4, "broadcast"), database(mode=Mode.SOL), [16]).ms.tolist() == [0.0]
        assert ask(gather(4, "broadcast"), database(mode=Mode.EMPIRICAL), [16]).ms.tolist() == [0.0]
        with pytest.raises(PerfDataMissing):
            ask(gather(4, "broadcast"), self.DB, [16])

    def test_estimates_lean_on_one_library_only(self):
        answer = ask(gather(16), database(NCCL, ONECCL, mode=Mode.EMPIRICAL), [16])
        assert answer.ms == pytest.approx([(15 / 16 / 5e10) / (3 / 4 / 4e11)])
        assert answer.tier[0] == Tier.XSHAPE
        with pytest.raises(EmpiricalBasisMissing):
            ask(gather(3), database(NCCL, mode=Mode.EMPIRICAL), [16])

    def test_one_gpu(self):
        assert ask(gather(1), database(), [16]).source[0] == Source.EMPIRICAL
        assert ask(gather(1), database(mode=Mode.SOL), [16]).source[0] == Source.SOL


class TestMemoryBound:
    @pytest.mark.parametrize("mode", [Mode.SILICON, Mode.HYBRID, Mode.EMPIRICAL])
    def test_bytes_over_bandwidth_plus_a_launch(self, mode):
        op = Elementwise(name="norm", bytes_per_token=1e6, token_div=2, seq_split=2, scale=3.0)
        answer = ask(op, database(mode=mode), [0, 7])
        assert answer.ms == pytest.approx([3 * 3e-3, 3 * (2e6 / 0.8e12 * 1e3 + 3e-3)])  # 7 // 2 = 3, then 2 of 2
        assert set(answer.source) == {Source.EMPIRICAL}

    def test_roofline_knows_no_launch(self):
        op = Embedding(name="embedding", rows=1000, dim=512, scale=2.0)
        assert ask(op, database(mode=Mode.SOL), [0, 100]).ms == pytest.approx([0, 2 * 100 * 1024 / 1e12 * 1e3])
        assert op.weight_bytes() == 2 * 1000 * 512 * 2

    def test_pipeline_hand_over(self):
        op = P2P(name="p2p", hidden=4096, pp=4)
        assert ask(op, database(), [100]).ms == pytest.approx([(2 * 100 * 4096 / 5e10 + 1e-5) * 1e3])
        assert ask(op, database(mode=Mode.SOL), [100]).ms == pytest.approx([2 * 100 * 4096 / 5e10 * 1e3])
        assert ask(replace(op, pp=1), database(), [100]).source[0] == Source.SILICON


GEMM = Gemm(name="gemm", n=1024, k=1024, quant="bfloat16")
LOST = Gemm(name="lost", n=1024, k=1024, quant="fp8")
NORM = Elementwise(name="norm", bytes_per_token=1e6)
PRODUCTS = table("gemm", "gemm_dtype m n k", [("bfloat16", 16, 1024, 1024, 1.0), ("bfloat16", 64, 1024, 1024, 2.0)])


class TestGroups:
    DB = database(PRODUCTS)

    def test_overlap_takes_the_longer_side(self):
        answer = ask(Overlap(name="both", a=(GEMM, NORM), b=(GEMM,)), self.DB, [16])
        assert answer.ms == pytest.approx([1.0 + 16e6 / 0.8e12 * 1e3 + 3e-3])
        assert answer.source[0] == Source.MIXED

    def test_overlap_of_nothing(self):
        answer = ask(Overlap(name="both", a=(), b=()), self.DB, [16])
        assert (answer.ms[0], answer.source[0]) == (0.0, Source.EMPIRICAL)
        assert Overlap(name="both", a=(), b=(GEMM,)).weight_bytes() == GEMM.weight_bytes()

    def test_a_member_that_misses_is_a_miss(self):
        with pytest.raises(PerfDataMissing):
            ask(Overlap(name="both", a=(GEMM,), b=(LOST,)), self.DB, [16])

    def test_fallback_to_the_parts(self):
        op = Fallback(name="whole", primary=LOST, fallback=(GEMM, GEMM))
        assert ask(op, self.DB, [16, 64]).ms.tolist() == [2.0, 4.0]
        assert ask(replace(op, primary=GEMM), self.DB, [16]).ms.tolist() == [1.0]
        assert op.weight_bytes() == LOST.weight_bytes()

    def test_measured_parts_win_over_an_estimated_whole(self):
        op = Fallback(name="whole", primary=LOST, fallback=(GEMM,))
        assert ask(op, database(PRODUCTS, mode=Mode.HYBRID), [16]).source[0] == Source.SILICON
        assert ask(op, database(PRODUCTS, mode=Mode.EMPIRICAL), [16]).tier[0] == Tier.XPROFILE

    def test_what_a_group_reads(self):
        assert Overlap(name="both", a=(GEMM,), b=(NORM,)).reads is Reads.TOKENS
        assert Overlap(name="both", a=(attention.context(),), b=(NORM,)).reads is Reads.SEQUENCE

    def test_rooflines(self):
        at = Points.of(1, 1, x=16)
        with pytest.raises(SolNotDefined):
            Overlap(name="both", a=(GEMM,), b=()).sol_split(self.DB, at)
        whole = Fallback(name="whole", primary=GEMM, fallback=()).sol_split(self.DB, at)
        assert whole == GEMM.sol_split(self.DB, at)


OPS = [
    GEMM,
    Gemm(name="near", n=1500, k=800, quant="bfloat16"),
    Gemm(name="saved", n=1024, k=1024, quant="fp8_static", low_precision_input=True),
    LOST,
    attention.context(cp=2),
    attention.context(head_dim=64, window=128),
    attention.generation(),
    all_reduce(4),
    all_reduce(16),
    gather(4),
    NORM,
    Overlap(name="both", a=(GEMM, all_reduce(4)), b=(NORM,)),
    Fallback(name="whole", primary=all_reduce(4), fallback=(NORM, gather(4))),
]
TABLES = (PRODUCTS, ALLREDUCE, NCCL, attention.prefill_table(), attention.decode_table(power=400.0))

points = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 3000), st.integers(0, 900), st.integers(0, 5000)),
    min_size=1,
    max_size=8,
)


@given(st.sampled_from(OPS), st.sampled_from(list(Mode)), points)
def test_arrays_answer_as_their_points_do(op, mode, asked):
    """Latency, energy, tags and misses of an array are those of its points asked one by one."""
    db = database(*TABLES, mode=mode)

    def outcome(at):
        try:
            answer = op.evaluate(db, at)
        except EngineError as error:
            return [(type(error),)] * len(at)
        gone = answer.missing()
        np.testing.assert_array_equal(gone, np.isnan(answer.ms))
        errors = [next((type(e) for mask, e in answer.misses if mask[i]), None) for i in range(len(at))]
        columns = zip(answer.ms, answer.energy, answer.source, answer.tier, strict=True)
        return [(error,) if error else tuple(map(float, row)) for error, row in zip(errors, columns, strict=True)]

    batch, s, prefix, x = map(np.array, zip(*asked, strict=True))
    together = outcome(Points.of(batch, s, prefix, x))
    apart = [outcome(Points.of(*point))[0] for point in asked]
    assert [pytest.approx(one, rel=1e-12) if len(one) > 1 else one for one in apart] == together
