"""MiniMax sparse attention: roofline, tables, and what it borrows from DSA (spec/04 section 6)."""

import numpy as np
import pytest
from perfcast_engine.answer import Points, Source, Tier
from perfcast_engine.errors import EmpiricalBasisMissing, PerfDataMissing
from perfcast_engine.ops.dsa import DsaContext, MsaContext, MsaGeneration
from perfcast_engine.tables.database import Mode

from tests.engine.handmade import database, table
from tests.engine.pointwise import assert_pointwise
from tests.engine.test_dsa import CONTEXT, GENERATION, GLM, MEASURED

M3 = {
    "name": "attention",
    "heads": 16,
    "kv_heads": 1,
    "hidden": 6144,
    "head_dim": 128,
    "v_head_dim": 128,
    "index_heads": 4,
    "index_head_dim": 128,
    "index_topk": 2048,
    "block_size": 128,
    "kv_quant": "fp8",
    "fmha_quant": "bfloat16",
    "gemm_quant": "fp8_block",
    "donor_architecture": GLM,
}


def ms(op, db, batch, s, prefix=0):
    return float(op.evaluate(db, Points.of(batch, s, prefix)).raise_first().ms[0])


def by_hand(tokens, batch, length, pairs):
    h, n, k, d, index = 6144, 16, 1, 128, 4 * 128
    weights = h * n * d + 2 * h * k * d + n * d * h + h * index
    blocks = -(-length // 128) if length > 2048 else 0
    math = 2 * tokens * weights / 2e14 + 2 * tokens * index * blocks / 2e14 + 2 * n * 2 * d * pairs / 1e14
    moved = weights + batch * k * min(length, 2048) * 2 * d + batch * blocks * index + 2 * tokens * n * d * 2
    return max(math, moved / 1e12) * 1000


@pytest.mark.parametrize("b, s, p", [(1, 100, 0), (2, 3000, 100), (1, 50, 5000)])
def test_prefill_roofline(b, s, p):
    pairs = b * sum(min(p + i, 2048) for i in range(1, s + 1))
    expected = by_hand(b * s, b, s + p, pairs)
    assert ms(MsaContext(**M3), database(mode=Mode.SOL), b, s, p) == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("b, s", [(1, 1), (8, 1000), (8, 5001)])
def test_decode_roofline(b, s):
    expected = by_hand(b, b, s - 1, b * min(s - 1, 2048))
    assert ms(MsaGeneration(**M3), database(mode=Mode.SOL), b, s) == pytest.approx(expected, rel=1e-14)


OWN = table(
    "msa_context",
    CONTEXT,
    [
        ("bfloat16", "fp8", "fp8_block", "MiniMaxM3ForCausalLM", "trtllm", n, 0, s, 1, n * s / 100)
        for n in (16, 64)
        for s in (64, 256)
    ],
)


def test_own_rows_interpolate_over_heads():
    assert ms(MsaContext(**{**M3, "heads": 40}), database(OWN), 1, 160) == pytest.approx(40 * 160 / 100)


def test_decode_rows_are_not_told_apart_by_attention_mode():
    key = ("fp8", "fp8_block", "MiniMaxM3ForCausalLM", "trtllm", 16, 4, 100)
    db = database(table("msa_generation", GENERATION, [(*key, 0.5)]))
    assert ms(MsaGeneration(**{**M3, "fmha_quant": "fp8"}), db, 4, 100) == 0.5


class TestBorrowed:
    def expected(self, scale=1.0):
        donor = DsaContext(
            **{k: M3[k] for k in ("name", "heads", "kv_quant", "fmha_quant", "gemm_quant")}, architecture=GLM
        )
        sol = database(mode=Mode.SOL)
        util = ms(donor, sol, 4, 64, 128) / ms(donor, database(MEASURED), 4, 64, 128)
        return ms(MsaContext(**M3), sol, 4, 64, 128) / (util * scale)

    @pytest.mark.parametrize("mode", [Mode.HYBRID, Mode.EMPIRICAL])
    def test_utilisation_of_the_donor(self, mode):
        answer = MsaContext(**M3, donor_scale=2.0).evaluate(database(MEASURED, mode=mode), Points.of(4, 64, 128))
        assert answer.ms[0] == pytest.approx(self.expected(2.0), rel=1e-14)
        assert (answer.source[0], answer.tier[0]) == (Source.EMPIRICAL, Tier.XOP)

    def test_own_rows_first_in_hybrid_but_never_in_empirical(self):
        at = (1, 64, 0)
        assert ms(MsaContext(**M3), database(OWN, MEASURED, mode=Mode.HYBRID), *at) == 16 * 64 / 100
        assert ms(MsaContext(**M3), database(OWN, MEASURED, mode=Mode.EMPIRICAL), *at) != 16 * 64 / 100

    def test_refused(self):
        for db in (
            database(MEASURED, mode=Mode.HYBRID, policy=frozenset({Tier.XSHAPE})),
            database(mode=Mode.EMPIRICAL),
            database(OWN, mode=Mode.EMPIRICAL),
        ):
            with pytest.raises(EmpiricalBasisMissing):
                MsaContext(**M3).price(db, Points.of(4, 64, 128))
        with pytest.raises(PerfDataMissing):
            MsaContext(**M3).price(database(MEASURED), Points.of(4, 64, 128))


@pytest.mark.parametrize("mode", list(Mode))
def test_arrays_are_answered_point_by_point(mode):
    rng = np.random.default_rng(7)
    at = Points.of(rng.integers(1, 9, 40), rng.integers(1, 3000, 40), rng.choice([0, 50, 700], 40))
    assert_pointwise(MsaContext(**M3), database(OWN, MEASURED, mode=mode), at)
    if mode is not Mode.SILICON:
        assert_pointwise(MsaContext(**M3), database(MEASURED, mode=mode), at)


def test_weights_are_not_counted():
    assert MsaContext(**M3).weight_bytes() == 0
