"""A surface gives the engine's digits where it reaches, NaN where it does not, and survives being sent."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from perfcast_engine.compiled import compile_surface
from perfcast_engine.errors import UnsupportedCombination
from perfcast_surface.mixed import StepRules
from perfcast_surface.parts import SurfaceError, content_hash, put_together, take_apart
from perfcast_surface.surface import Counts, PhaseSurface, StepSurface
from perfcast_surface.terms import Traffic

from tests.engine.test_quick import ENGINES, points, steps

KINDS = {"prefill": "prefill", "decode": "decode_step", "mixed": "mixed"}


def copied(surface: StepSurface) -> StepSurface:
    """As it comes out of JSON and bytes."""
    header, arrays = take_apart(surface)
    return put_together(json.loads(json.dumps(header)), {name: array.copy() for name, array in arrays.items()})


@pytest.mark.parametrize("profile", ["reference", "corrected"])
@pytest.mark.parametrize("name", ENGINES)
def test_a_surface_gives_the_digits_of_the_engine(name: str, profile: str) -> None:
    model = steps(name, profile)
    surface = copied(compile_surface(model))
    for kind, method in KINDS.items():
        asked = points(kind, 300)
        columns = list(map(np.array, zip(*asked, strict=True)))
        wanted, found = getattr(model, method)(*columns).ms, getattr(surface, method)(*columns)
        inside = ~np.isnan(found)
        assert inside.sum() > 60, (kind, inside.sum())
        np.testing.assert_allclose(found[inside], wanted[inside], rtol=1e-13)
        one_by_one = np.array([getattr(surface, method)(*point) for point in asked])
        np.testing.assert_array_equal(np.isnan(one_by_one), np.isnan(found))
        np.testing.assert_allclose(one_by_one[inside], found[inside], rtol=1e-13)


def phase(rng: np.random.Generator) -> PhaseSurface:
    tokens, rows, requests = (Counts.of(rng.uniform(1, 2, n)) for n in (9000, 900, 200))
    kernel, state = (Traffic(scale, 0.02, 0.5, 0.1, True) for scale in (1.0, 3.0))
    return PhaseSurface(tokens, rows, requests, (kernel,), (state,))


@pytest.mark.parametrize("habits", list(itertools.product([0, 2], *[[False, True]] * 3)))
def test_numbers_are_answered_as_arrays_are_whatever_an_engine_makes_of_a_mixed_step(habits: tuple[int, ...]) -> None:
    rng = np.random.default_rng(5)
    surface = StepSurface(phase(rng), phase(rng), StepRules(habits[0], *map(bool, habits[1:])))
    columns = rng.integers([-1, -1, 0, 0, -1], [4000, 300, 3000, 500, 2000], (2000, 5)) * (rng.random((2000, 5)) < 0.8)
    found = surface.mixed(*columns.T)
    assert 300 < np.isnan(found).sum() < 1700
    np.testing.assert_allclose([surface.mixed(*point) for point in columns.tolist()], found, rtol=1e-13)


@pytest.mark.parametrize("name", ["dense", "compressed"])
def test_single_values_hold_for_many_points_and_prompts_may_be_absent(name: str) -> None:
    model = steps(name, "corrected")
    surface = compile_surface(model)
    tokens, requests = np.arange(30_000) % 97, np.arange(30_000) % 13 + 1
    wanted = model.mixed(tokens, requests, 40, 20, 3).ms
    np.testing.assert_allclose(surface.mixed(tokens, requests, 40, 20, 3), wanted, rtol=1e-13)
    for i in range(0, 30_000, 999):
        assert surface.mixed(int(tokens[i]), int(requests[i]), 40, 20, 3) == pytest.approx(wanted[i], rel=1e-13)
    np.testing.assert_allclose(surface.prefill(2, tokens + 9, 4), model.prefill(2, tokens + 9, 4).ms, rtol=1e-13)


@pytest.mark.parametrize("name", ["dense", "compressed", "state space"])
def test_trajectories_are_those_of_the_engine(name: str) -> None:
    model = steps(name, "corrected")
    surface = compile_surface(model)
    batch, isl, osl = np.random.default_rng(7).integers(1, [100, 3000, 600], (300, 3)).T
    osl[:2] = 1, 5000
    for beam, stride in ((1, 32), (3, 7)):
        wanted, found = model.decode(batch, isl, osl, beam, stride).ms, surface.decode(batch, isl, osl, beam, stride)
        inside = ~np.isnan(found)
        assert inside.sum() > 100
        np.testing.assert_allclose(found[inside], wanted[inside], rtol=1e-13)
        for i in range(0, 300, 10):
            one = surface.decode(int(batch[i]), int(isl[i]), int(osl[i]), beam, stride)
            assert one == pytest.approx(found[i], rel=1e-13, nan_ok=True)


def test_long_trajectories_are_summed_in_parts() -> None:
    model = steps("mla", "corrected")
    surface = compile_surface(model)
    osl = np.array([2, 100_000, 1, 90_000, 3])
    found = surface.decode(4, 10, osl, 1, 1)
    np.testing.assert_allclose(found, model.decode(4, 10, osl, 1, 1).ms, rtol=1e-12)
    assert surface.decode(4, 10, 100_000, 1, 1) == pytest.approx(found[1], rel=1e-13)


def test_a_surface_survives_being_taken_apart_and_put_together() -> None:
    surface = compile_surface(steps("mla", "corrected"), 4096)
    header, arrays = take_apart(surface)
    copy = copied(surface)
    assert content_hash(*take_apart(copy)) == content_hash(header, arrays)
    assert copy.mixed(1000, 8, 2000, 100, 50) == surface.mixed(1000, 8, 2000, 100, 50)
    changed = put_together(header, arrays | {"context.tokens": arrays["context.tokens"] * 2})
    assert content_hash(*take_apart(changed)) != content_hash(header, arrays)


def test_a_surface_does_not_answer_beyond_itself() -> None:
    surface = compile_surface(steps("dense", "corrected"), 4096)
    assert surface.domain.pass_tokens == 4096
    assert np.isnan(surface.prefill(1, 5000))
    assert np.isnan(surface.prefill(1, 100, 100))
    assert np.isnan(surface.decode_step(0, 100, 10))
    assert np.isnan(surface.decode(1, 100, 0))
    assert np.isnan(surface.mixed(10, -1, 100, 10))
    assert np.isnan(surface.mixed(0, 0, 100, 10))
    np.testing.assert_array_equal(np.isnan(surface.prefill(np.array([1, 1, 0]), np.array([5000, 100, 100]))), [1, 0, 1])


@pytest.mark.parametrize(
    "damage",
    [
        {"format": 2},
        {"rules": {"nextn": 0, "depth": 1}},
        {"rules": {"nextn": -1}},
        {"phases": {"context": []}},
        {"planes": [{"axes": 1, "roots": False}] * 2},
        {"planes": [{"axes": 2.5, "roots": False}] * 2},
        {"planes": []},
        {"phases": 4},
    ],
)
def test_what_is_not_a_surface_is_refused(damage: dict[str, object]) -> None:
    header, arrays = take_apart(compile_surface(steps("dense", "corrected"), 64))
    with pytest.raises(SurfaceError):
        put_together(header | damage, arrays)


@pytest.mark.parametrize(
    ("array", "damage"),
    [
        ("plane0.axis0", lambda a: a[:-1]),
        ("plane0.axis0", lambda a: a - 10),
        ("plane0.axis1", lambda a: a[::-1]),
        ("plane1.axis1", lambda a: a + 0.5),
        ("plane1.axis1", lambda a: a * np.inf),
        ("plane0.values", lambda a: a[:-1]),
        ("plane0.values", lambda a: a[None]),
        ("plane0.values", lambda a: np.nan_to_num(a, nan=np.inf)),
        ("context.tokens", lambda a: a[None]),
        ("context.tokens", lambda a: np.full_like(a, np.inf)),
    ],
)
def test_arrays_that_do_not_fit_are_refused(array: str, damage) -> None:
    header, arrays = take_apart(compile_surface(steps("dense", "corrected"), 64))
    with pytest.raises(SurfaceError):
        put_together(header, arrays | {array: damage(arrays[array])})


def test_an_engine_without_a_surface_says_so() -> None:
    with pytest.raises(UnsupportedCombination, match="PredictSteps"):
        compile_surface(steps("dense", "corrected", "EMPIRICAL"), 64)
