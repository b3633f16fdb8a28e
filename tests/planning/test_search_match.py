"""Worker counts and shortlists of a disaggregated search against plain loops over spec/06 section 9."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from perfcast_planning.search import match
from perfcast_planning.search.match import Replica, Role
from perfcast_planning.serving.disaggregated import Matching
from perfcast_planning.serving.rows import Rows
from perfcast_planning.serving.workload import Workload

LOAD, FACTORS = Workload(1000, 100), Matching()


def role(seed, n, engines=3):
    random = np.random.default_rng(seed)
    engine = np.sort(random.integers(0, engines, n))
    gpus = np.array([1.0, 2.0, 4.0, 8.0])[engine]
    batch = np.arange(1.0, n + 1)
    rate = np.round(random.uniform(0.1, 20, n) * gpus, 3)
    columns = {
        "batch": batch,
        "concurrency": batch,
        "ttft_ms": np.round(random.uniform(50, 900, n), 3),
        "tpot_ms": np.round(random.uniform(2, 60, n), 3),
        "encode_ms": np.zeros(n),
        "requests_per_s": rate,
        "requests_per_s_per_gpu": np.round(rate / gpus, 3),
        "tokens_per_s_per_user": np.round(random.uniform(10, 200, n), 3),
        "gpus": gpus,
        "memory_gib": np.full(n, 40.0),
        "power_w": np.zeros(n),
        "engine": engine,
    }
    return Role(Rows(columns), engine, gpus.astype(np.intp), np.zeros(n, np.bool_))


def best_counts(p, d, counts, replica):
    """The reference's double loop: first strictly best."""
    best = None
    sizes = (range(1, most + 1) for most in (replica.max_decode_workers, replica.max_prefill_workers))
    for n_d, n_p in itertools.product(*sizes):
        gpus = p["gpus"] * n_p + d["gpus"] * n_d
        if counts and gpus not in counts:
            continue
        score = min(p["requests_per_s"] * n_p * 0.9, d["requests_per_s"] * n_d * 0.92) / gpus
        if best is None or score > best[0]:
            best = (score, gpus, n_p, n_d)
    return best


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10**6), st.sampled_from([(), (1, 2, 4, 8, 16), (3, 5, 6), (64,)]), st.integers(1, 32))
def test_counts_are_those_of_the_double_loop(seed, counts, most):
    prefill, decode = role(seed, 4), role(seed + 1, 6)
    replica = Replica(max_prefill_workers=most, max_decode_workers=32)
    found = match.match(prefill, decode, counts, replica, FACTORS)
    for i, j in itertools.product(range(6), range(4)):
        want = best_counts(prefill.rows.row(j), decode.rows.row(i), counts, replica)
        if want is None:
            assert np.isnan(found.score[i, j])
        else:
            assert (found.score[i, j], found.gpus[i, j]) == (pytest.approx(want[0], rel=1e-14), want[1])
            assert (found.prefill_workers[i, j], found.decode_workers[i, j]) == want[2:]


def test_pool_limits_apply_only_together():
    prefill, decode = role(1, 3), role(2, 3)
    free = match.match(prefill, decode, (), Replica(), FACTORS)
    one = match.match(prefill, decode, (), Replica(max_prefill_gpus=4), FACTORS)
    assert np.array_equal(free.gpus, one.gpus)
    both = match.match(prefill, decode, (), Replica(max_prefill_gpus=4, max_decode_gpus=8), FACTORS)
    assert (both.prefill_workers * prefill.rows["gpus"])[~np.isnan(both.score)].max() <= 4


def test_same_width_rule_and_its_exemption():
    prefill, decode = role(3, 4), role(4, 4)
    found = match.match(prefill, decode, (), Replica(same_tp=True), FACTORS)
    assert np.array_equal(~np.isnan(found.score), decode.tp[:, None] == prefill.tp)
    exempt = Role(prefill.rows, prefill.group, prefill.tp, np.ones(4, np.bool_))
    assert not np.isnan(match.match(exempt, decode, (), Replica(same_tp=True), FACTORS).score).any()


def scalar_sweep(prefill, decode, counts, pairs):
    """spec/06 section 9 step 2 with loops."""
    out = []
    for ttft, tpot in pairs:
        p_rows = sorted(
            (r for r in map(prefill.rows.row, range(len(prefill.rows))) if r["ttft_ms"] < ttft),
            key=lambda r: (-r["requests_per_s_per_gpu"], r["concurrency"]),
        )[:32]
        best = {}
        for group in np.unique(decode.group):
            members = [decode.rows.row(i) for i in np.flatnonzero(decode.group == group)]
            members = [r for r in members if 0 < r["tpot_ms"] < tpot]
            members.sort(key=lambda r: -r["requests_per_s_per_gpu"])
            for d, p in itertools.product(members[:16], p_rows):
                counted = best_counts(p, d, counts, Replica())
                if counted is None:
                    continue
                _, gpus, n_p, n_d = counted
                score = min(p["requests_per_s"] * n_p * 0.9, d["requests_per_s"] * n_d * 0.92) * 100 / gpus
                if group not in best or (score, -gpus) > best[group][0]:
                    best[group] = ((score, -gpus), (p["batch"], d["batch"], n_p, n_d, round(score, 3)))
        rows = sorted((row for _, row in best.values()), key=lambda row: -row[-1])[:5]
        out += [row for row in rows if row not in out]
    return out


@pytest.mark.parametrize("seed", range(6))
def test_sweep_is_the_references(seed):
    prefill, decode = role(seed, 5), role(seed + 50, 60, engines=4)
    counts, pairs = (1, 2, 4, 8, 16, 24, 32), [(600.0, float(t)) for t in (1, 5, 10, 20, 20, 40, 100)]
    rows = match.swept(prefill, decode, counts, Replica(), LOAD, FACTORS, pairs)
    names = ("prefill_batch", "decode_batch", "prefill_workers", "decode_workers", "tokens_per_s_per_gpu")
    got = [tuple(rows[name][i] for name in names) for i in range(len(rows))]
    assert np.array(sorted(got)) == pytest.approx(np.array(sorted(scalar_sweep(prefill, decode, counts, pairs))))
