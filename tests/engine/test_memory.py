"""Memory of one GPU: components, budgets, capacity (spec/06 section 4)."""

import dataclasses

import numpy as np
import pytest
from perfcast_engine.backends import BACKENDS
from perfcast_engine.config import ParallelConfig
from perfcast_engine.errors import InvalidField, OutOfMemory, UnsupportedCombination
from perfcast_engine.models.spec import MoeShape

from tests.planning.toy import SPEC, WEIGHT_BYTES, worker


def memory(backend="vllm", **fields):
    return dataclasses.replace(worker(backend).memory, **fields)


def test_components_are_the_formulas():
    held = memory().footprint(8, 1000, 200, 5000)
    assert held.weights[0] == WEIGHT_BYTES
    assert held.activations[0] == 2 * 5000 * 4096 * 11
    assert held.kv[0] == 8 * 16384 * 16 * 1200
    assert (held.nccl[0], held.others[0]) == (0, 3e9)
    assert held.total[0] == sum(part[0] for part in held)
    assert held.fixed[0] == held.total[0] - held.kv[0]


def test_no_tokens_in_flight_means_the_uncached_prompts():
    asked = memory().footprint(4, 1000, 1, 0, 400).activations
    assert asked[0] == memory().footprint(4, 1000, 1, 2400).activations[0]


def test_floors_and_overheads_come_from_the_backend_table():
    for name, backend in BACKENDS.items():
        held = memory(name).footprint(1, 1, 1, 1)
        assert held.activations[0] == backend.activation_floor * (1 + backend.activation_overhead)
        assert held.others[0] == 3e9 * (1 + backend.other_overhead)
    assert BACKENDS["sglang"].activation_floor == 90 * 2**20


def test_draft_tokens_widen_activations_by_their_share():
    drafting = memory(nextn=2)
    plain, full = (m.footprint(8, 100, 100, 10000).activations[0] for m in (memory(), drafting))
    assert full == 3 * plain
    some = drafting.footprint(8, 100, 100, 10000, drafted=100).activations[0]
    assert some == pytest.approx(plain * (9900 + 300) / 10000)


def test_experts_need_a_routing_workspace():
    spec = dataclasses.replace(SPEC, family="DEEPSEEK")
    routing = dataclasses.replace(spec, moe=MoeShape(topk=8, experts=256, inter=1024))
    dense, routed = memory(spec=spec), memory(spec=routing, parallel=ParallelConfig(attn_dp=2, moe_ep=8))
    extra = routed.footprint(1, 1, 1, 4096).activations - dense.footprint(1, 1, 1, 4096).activations
    assert extra[0] == 4096 * 4096 * 2 * 256 * 8 / 8 / 128 * 4


def test_widths_beyond_eight_take_the_figures_of_eight_and_odd_ones_are_refused():
    eight, sixteen = (memory(parallel=ParallelConfig(tp=n)).footprint(1, 1, 1, 9999).activations[0] for n in (8, 16))
    assert eight == sixteen
    with pytest.raises(UnsupportedCombination, match="width of 3"):
        memory(parallel=ParallelConfig(tp=3)).footprint(1, 1, 1)


@pytest.mark.parametrize(
    ("backend", "version", "fraction"),
    [
        ("vllm", "0.14.1", 0.9),
        ("vllm", "0.19.0", 0.9),
        ("vllm", "0.24.0", 0.92),
        ("vllm", "9.9", 0.92),
        ("trtllm", "1", 0.9),
    ],
)
def test_default_fraction_depends_on_backend_and_version(backend, version, fraction):
    assert memory(backend, version=version).kv_fraction() == fraction


def test_sglang_derives_its_fraction_unless_fixed_or_given():
    sglang = memory("sglang")
    assert sglang.kv_fraction() == 0.824
    assert sglang.kv_fraction(fixed=True) == 0.88
    assert sglang.kv_fraction(0.5, fixed=True) == 0.5
    with pytest.raises(InvalidField, match="free_gpu_memory_fraction"):
        sglang.kv_fraction(1.5)


def test_budget_is_of_what_is_free_or_of_the_whole():
    free, whole = memory("trtllm"), memory("vllm")
    assert free.kv_budget(np.array([20e9]), 0.9)[0] == pytest.approx(60e9 * 0.9 * 0.985 * 0.98)
    assert whole.kv_budget(np.array([20e9]), 0.9)[0] == pytest.approx(80e9 * 0.9 * 0.98 - 20e9)


def test_out_of_memory_hides_the_kv_verdict():
    model = memory()
    held = model.footprint([1, 180, 400], 1000, 200, 100)
    out, over = model.verdict(held, 0.9)
    assert out.tolist() == [False, False, True]
    assert over.tolist() == [False, True, False]


def test_largest_batch_is_the_last_that_fits():
    model = memory()
    most = model.largest_batch(1000, 200)
    verdicts = [model.verdict(model.footprint(b, 1000, 200, b), model.kv_fraction()) for b in (most, most + 1)]
    assert [bool(out[0] | over[0]) for out, over in verdicts] == [False, True]
    assert [model.largest_batch(1000, 200, limit=limit) for limit in (1, 2, 66, most - 1, most + 1)] == [
        1, 2, 66, most - 1, most,
    ]  # fmt: skip
    assert memory(weight_bytes=1e12).largest_batch(1000, 200) == 0


def test_capacity_in_bytes_tokens_and_blocks():
    found = memory("trtllm").kv_capacity(8192, 0.9, "of_free", 0.05)
    fixed = WEIGHT_BYTES + 2 * 8192 * 4096 * 11 + 3e9
    assert found.kv_bytes == int((80e9 - fixed) * 0.9)
    assert found.bytes_per_token == 16384 * 16
    assert found.kv_tokens == found.kv_bytes // found.bytes_per_token
    assert found.within_tolerance == (int(found.kv_bytes * 0.95), int(found.kv_bytes * 0.95) // found.bytes_per_token)
    assert found.blocks(64) == found.within_tolerance[1] // 64
    assert sum(found.breakdown.values()) == fixed


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"kind": "of_total"}, "memory_fraction_kind"),
        ({"fraction": 1.1}, "memory_fraction"),
        ({"fraction": float("nan")}, "memory_fraction"),
        ({"tolerance": 1.0}, "tolerance_fraction"),
    ],
)
def test_capacity_requests_are_checked(arguments, field):
    with pytest.raises(InvalidField, match=field):
        memory("trtllm").kv_capacity(**{"max_num_tokens": 8192, "fraction": 0.9} | arguments)


def test_no_budget_is_an_error_that_shows_the_sum():
    model = memory("vllm")
    with pytest.raises(OutOfMemory) as error:
        dataclasses.replace(model, system=dataclasses.replace(model.system, mem_capacity=15e9)).kv_capacity(8192, 0.9)
    assert error.value.details["capacity_bytes"] == str(int(15e9))
