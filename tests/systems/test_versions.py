"""Slots and orders of versions (spec/01 section 4)."""

from itertools import pairwise
from pathlib import Path

import pytest
from perfcast_systems.build.tree import DataTree
from perfcast_systems.build.versions import newest_first, slot_order, slots

from tests.systems.trees import GEMM, Tree


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path / "root")


def test_slot_order_ranks_candidates_below_releases_and_trailing_integers_last():
    ascending = ["0.1.dev19262", "0.5.6", "0.5.6.post2", "0.5.10", "1.3.0rc5", "1.3.0rc20", "1.3.0", "v2.0"]
    keys = [slot_order(version) for version in ascending]
    assert all(low < high for low, high in pairwise(keys))
    assert slot_order("1.3.0rc20") == (1, 3, 0, 0, 20, 20)
    assert slot_order("0.5.6.post2") == (0, 5, 6, 1, 0, 2)
    assert slot_order("nightly") == (0, 0, 0, 1, 0, 0)


def test_pep440_descending_with_unreadable_versions_last():
    assert newest_first(["0.9", "0.10", "0.10rc1", "main", "0.10.post1", "beta"]) == [
        *("0.10.post1", "0.10", "0.10rc1", "0.9"),
        *("main", "beta"),
    ]


def test_next_is_the_newest_of_the_fleet_and_needs_no_directory_of_the_system(tree: Tree):
    for where in ("gpu_a/gemm/vllm/1.0.0", "gpu_b/gemm/vllm/1.0.0", "gpu_b/gemm/vllm/1.1.0"):
        tree.put(f"{where}/gemm", [{"latency": 1.0}], GEMM)
    (tree.root / "data/gpu_b/gemm/vllm/9.0.0").mkdir()
    (tree.root / "data/gpu_b/gemm/vllm/9.0.0/collection_meta.yaml").write_text("schema_version: 1")
    data = DataTree(tree.root)
    rules = {"defaults": {"vllm": {"current": "1.0.0", "previous": None}, "sglang": {"current": "1.0.0"}}}
    assert slots(data, rules, "gpu_a", "vllm") == {"current": "1.0.0", "next": "1.1.0"}
    assert slots(data, rules, "gpu_a", "sglang") == {}
    assert slots(data, rules, "gpu_a", "trtllm") == {}


def test_an_override_has_no_next_and_does_not_make_one_for_others(tree: Tree):
    tree.put("gpu_a/gemm/vllm/1.0.0/gemm", [{"latency": 1.0}], GEMM)
    tree.put("old/gemm/vllm/2.0.0/gemm", [{"latency": 1.0}], GEMM)
    rules = {
        "defaults": {"vllm": {"current": "1.0.0"}},
        "overrides": {"old": {"vllm": {"current": "0.9.0", "previous": "0.8.0"}}},
    }
    data = DataTree(tree.root)
    assert slots(data, rules, "gpu_a", "vllm") == {"current": "1.0.0"}
    assert slots(data, rules, "old", "vllm") == {"current": "0.9.0", "previous": "0.8.0"}
