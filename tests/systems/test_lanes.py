"""Orders of attention lanes (spec/01 7.2)."""

from dataclasses import replace
from pathlib import Path

import pytest
from perfcast_engine.errors import UnsupportedCombination
from perfcast_engine.tables.catalog import PackSource
from perfcast_engine.tables.database import Database
from perfcast_engine.tables.lanes import densities, lane_order
from perfcast_systems.pack import Pack

from tests.engine.handmade import SYSTEM
from tests.systems.trees import ATTENTION, Tree

TABLE = "context_attention"


@pytest.fixture
def pack(tmp_path: Path) -> Pack:
    """Own (slices, rows): mine (1, 3), triton (2, 2), fa3 (1, 1), default (1, 1); lent: flashinfer (3, 3), lent (1, 1)
    and two rows of fa3, one in a new slice."""
    tree = Tree(tmp_path / "root")

    def rows(lane: str, *points: tuple[int, int]) -> list[dict[str, object]]:
        return [{"kernel_source": lane, "head_dim": h, "isl": s, "latency": 1.0} for h, s in points]

    own = [
        *rows("mine", (64, 1), (64, 2), (64, 3)),
        *rows("triton", (64, 1), (128, 1)),
        *rows("fa3", (64, 1)),
        *rows("default", (64, 1)),
    ]
    lent = [*rows("flashinfer", (64, 1), (128, 1), (256, 1)), *rows("lent", (64, 9)), *rows("fa3", (64, 8), (128, 8))]
    tree.put("gpu/attention/sglang/1.0.0/context_attention", own, ATTENTION)
    tree.put("gpu/attention/sglang/0.9.0/context_attention", lent, ATTENTION)
    return tree.build()["sglang/1.0.0"]


def opened(pack: Pack, sm: int = 100, backend: str = "sglang", version: str = "0.6.0") -> Database:
    return Database(replace(SYSTEM, sm_version=sm), backend, version, PackSource(pack).table)


def test_density_counts_slices_and_rows_with_and_without_lent_ones(pack: Pack):
    every, own = densities(opened(pack), TABLE)
    assert own == {"mine": (1, 3), "triton": (2, 2), "fa3": (1, 1), "default": (1, 1)}
    assert every == {**own, "fa3": (2, 3), "flashinfer": (3, 3), "lent": (1, 1)}


def test_pinned_then_own_then_lent_each_by_density(pack: Pack):
    assert lane_order(opened(pack), TABLE) == (
        *("triton",),
        *("fa3", "default", "mine"),
        *("flashinfer", "fla", "trtllm_mha", "lent"),
    )


def test_without_a_framework_default_the_table_decides(pack: Pack):
    assert lane_order(opened(pack, sm=89), TABLE) == ("default",)
    assert lane_order(opened(pack, version="0.5.13"), TABLE) == ("default",)
    assert lane_order(opened(pack, backend="trtllm", version="1.3.0rc20"), TABLE) == ("default",)


def test_a_default_that_pins_nothing_still_ranks(pack: Pack):
    order = lane_order(opened(pack, backend="vllm", version="0.24.0"), TABLE)
    assert order[:4] == ("triton", "fa3", "default", "mine")


def test_an_override_goes_first_and_must_have_been_measured(pack: Pack):
    assert lane_order(opened(pack), TABLE, "flashinfer")[:2] == ("flashinfer", "triton")
    assert lane_order(opened(pack, sm=89), TABLE, "flashinfer")[0] == "flashinfer"
    assert lane_order(opened(pack), TABLE, "default") == lane_order(opened(pack), TABLE)
    for backend, override in (("sglang", "fla"), ("sglang", "fa9"), ("vllm", "triton"), ("trtllm", "fa3")):
        with pytest.raises(UnsupportedCombination) as error:
            lane_order(opened(pack, backend=backend), TABLE, override)
        assert error.value.details["field"] == "attention_backend"


def test_a_table_without_rows_keeps_the_plain_order(pack: Pack):
    assert lane_order(opened(pack), "generation_attention") == (
        *("triton", "fa3", "fla", "flashinfer", "trtllm_mha"),
        "default",
    )
