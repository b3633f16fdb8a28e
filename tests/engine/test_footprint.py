"""What engines hold: counted once, shared while any of them is there, and gone with the last."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import numpy as np
import pytest
from perfcast_engine.config import EngineConfig, ParallelConfig
from perfcast_engine.errors import EngineError
from perfcast_engine.predictor import Engine, Predictor
from perfcast_engine.tables.footprint import footprint

DENSE, LATENT, LINEAR = "Qwen/Qwen3-32B-FP8", "deepseek-ai/DeepSeek-V3", "nvidia/Qwen3.6-27B-NVFP4"
EXPERTS = {LATENT: {"moe_tp": 1, "moe_ep": 4}}


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Only reference counts free anything."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def engine(predictor: Predictor, model: str = DENSE, tp: int = 4, mode: str = "SILICON") -> Engine:
    parallel = ParallelConfig(tp=tp, **EXPERTS.get(model, {}))
    return predictor.engine(
        EngineConfig(model=model, system="h200_sxm", backend="trtllm", parallel=parallel, database_mode=mode)
    )


def ask(engine: Engine, longest: int = 4000) -> None:
    lengths = np.arange(1, longest, 97)
    for question in (
        lambda: engine.steps.prefill(1, lengths, 0),
        lambda: engine.steps.decode_step(8, lengths, 2),
        lambda: engine.steps.prefill_ms(1, 128),
        lambda: engine.steps.prefill(1, 3_000_000).raise_first(),
        lambda: engine.steps.mixed(512, 8, 1000, 100, operators=True),
    ):
        try:
            question()
        except EngineError:
            continue


def held(engine: Engine) -> int:
    engine.resolved.db.weigh()
    return engine.steps.nbytes + sum(each.nbytes for each in engine.resolved.db.derived())


class Node:
    def __init__(self, *parts: object) -> None:
        self.parts = parts


def test_everything_behind_an_object_counts_once() -> None:
    array = np.zeros(10_000)
    own = footprint(Node(), set())
    assert footprint(Node(array, array[5:], array.data, lambda: array), set()) - own == pytest.approx(80_000, abs=2_000)
    assert footprint([0.5] * 1000, set()) == pytest.approx(32_000, abs=100)
    assert footprint(Node(Node(array)), set(), (np.ndarray,)) < 1_000
    seen: set[int] = set()
    assert footprint(array, seen) == 80_000
    assert footprint(Node(array), seen) < 1_000
    ring = Node([])
    ring.parts[0].append(ring)  # type: ignore[attr-defined]
    assert footprint(ring, set()) < 1_000


def test_an_engine_holds_more_as_it_is_asked_more() -> None:
    asked = engine(Predictor())
    ask(asked)
    before = held(asked)
    assert before > 500_000
    asked.steps.decode_step(8, np.arange(1, 60_000, 97), 2)
    means = 50 * 1024 * 8 * 8  # at least as many blocks, and measured batches
    assert held(asked) > before + means


@pytest.mark.parametrize("mode", ["SILICON", "HYBRID", "SOL"])
@pytest.mark.parametrize("model", [DENSE, LATENT, LINEAR])
def test_an_engine_that_is_let_go_of_frees_what_it_held(model: str, mode: str, uncollected: None) -> None:
    predictor = Predictor()
    try:
        asked = engine(predictor, model, mode=mode)
    except EngineError as error:
        pytest.skip(error.message)
    ask(asked)
    gone = [weakref.ref(asked.resolved.db), *map(weakref.ref, asked.resolved.db.derived())]
    predictor.catalog.let_go()
    assert (predictor.catalog.nbytes > 0 and len(gone) > 1) or mode == "SOL"
    del asked
    assert not [each() for each in gone if each() is not None]
    assert predictor.catalog.nbytes == 0


def test_engines_share_what_they_derive_until_the_last_is_gone(uncollected: None) -> None:
    predictor = Predictor()
    first, second = engine(predictor), engine(predictor, tp=8)
    ask(first)
    ask(second)
    mine, theirs = (set(map(id, each.resolved.db.derived())) for each in (first, second))
    assert mine & theirs and mine - theirs and theirs - mine
    theirs |= set(map(id, predictor.catalog.derived()))
    predictor.catalog.let_go()
    third = engine(predictor)  # needs nothing that the first one has not
    ask(third)
    assert set(map(id, third.resolved.db.derived())) <= mine
    shared = {weakref.ref(each) for each in first.resolved.db.derived() if id(each) in theirs}
    own = {weakref.ref(each) for each in first.resolved.db.derived() if id(each) not in theirs}
    del first, third
    assert all(each() is None for each in own)
    assert all(each() is not None for each in shared)
