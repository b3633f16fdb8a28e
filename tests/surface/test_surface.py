"""A surface gives the engine's digits where it reaches, NaN where it does not, and survives being sent."""

from __future__ import annotations

import json

import numpy as np
import pytest
from perfcast_engine.compiled import compile_surface
from perfcast_engine.errors import UnsupportedCombination
from perfcast_surface.surface import StepSurface, SurfaceError

from tests.engine.test_quick import ENGINES, points, steps

SURFACED = ("dense", "moe", "mla", "context parallel")
KINDS = {"prefill": "prefill", "decode": "decode_step", "mixed": "mixed"}


@pytest.mark.parametrize("profile", ["reference", "corrected"])
@pytest.mark.parametrize("name", SURFACED)
def test_a_surface_gives_the_digits_of_the_engine(name: str, profile: str) -> None:
    model = steps(name, profile)
    surface = compile_surface(model)
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


def test_a_surface_survives_being_taken_apart_and_put_together() -> None:
    surface = compile_surface(steps("mla", "corrected"), 4096)
    header, arrays = surface.parts
    copy = StepSurface.from_parts(json.loads(json.dumps(header)), {name: a.copy() for name, a in arrays.items()})
    assert copy.content_hash == surface.content_hash
    assert copy.mixed(1000, 8, 2000, 100, 50) == surface.mixed(1000, 8, 2000, 100, 50)
    arrays = dict(arrays) | {"context.tokens": arrays["context.tokens"] * 2}
    assert StepSurface.from_parts(header, arrays).content_hash != surface.content_hash


def test_a_surface_does_not_answer_beyond_itself() -> None:
    surface = compile_surface(steps("dense", "corrected"), 4096)
    assert np.isnan(surface.prefill(1, 5000))
    assert np.isnan(surface.prefill(1, 100, 100))
    assert np.isnan(surface.decode_step(0, 100, 10))
    assert np.isnan(surface.mixed(10, -1, 100, 10))
    np.testing.assert_array_equal(np.isnan(surface.prefill(np.array([1, 1, 0]), np.array([5000, 100, 100]))), [1, 0, 1])


@pytest.mark.parametrize("damage", [{"format": 2}, {"rules": {"nextn": 0, "depth": 1}}, {"phases": {"context": []}}])
def test_what_is_not_a_surface_is_refused(damage: dict[str, object]) -> None:
    header, arrays = compile_surface(steps("dense", "corrected"), 64).parts
    with pytest.raises(SurfaceError):
        StepSurface.from_parts(header | damage, arrays)


@pytest.mark.parametrize("name", sorted(set(ENGINES) - set(SURFACED)))
def test_an_engine_without_a_surface_says_so(name: str) -> None:
    with pytest.raises(UnsupportedCombination, match="PredictSteps"):
        compile_surface(steps(name, "corrected"), 64)
