"""Which files a table is folded from (spec/01 section 5)."""

from pathlib import Path

import pytest
from perfcast_systems.build.sources import Sharing, resolve
from perfcast_systems.build.tree import BuildError, DataTree

from tests.systems.trees import GEMM, Tree


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path / "root")


def sources(tree: Tree, backend: str, version: str, stem: str, sharing: Sharing | None = None) -> list[tuple[str, str]]:
    data = DataTree(tree.root)
    found = resolve(data, sharing or Sharing(()), "gpu", backend, version, stem)
    return [(data.relative("gpu", source.path), source.channel) for source in found]


def test_older_versions_fill_backwards_newest_first_and_newer_ones_never(tree: Tree):
    for version in ("0.9.0", "0.10.0", "1.0.0", "1.1.0"):
        tree.put(f"gpu/gemm/vllm/{version}/gemm", [{"latency": 1.0}], GEMM)
    assert sources(tree, "vllm", "1.0.0", "gemm") == [
        ("gemm/vllm/1.0.0/gemm_perf.parquet", "primary"),
        ("gemm/vllm/0.10.0/gemm_perf.parquet", "fallback"),
        ("gemm/vllm/0.9.0/gemm_perf.parquet", "fallback"),
    ]
    assert sources(tree, "vllm", "main", "gemm") == []  # a version that has no order has no older ones


def test_a_declared_donor_may_be_newer_and_is_not_listed_twice(tree: Tree):
    for version in ("0.9.0", "1.0.0", "1.1.0"):
        tree.put(f"gpu/gemm/trtllm/{version}/gemm", [{"latency": 1.0}], GEMM)
    tree.put("gpu/moe/trtllm/1.0.0/other", [{"latency": 1.0}])
    tree.reuse("gpu/moe/trtllm/1.0.0", ("gemm_perf", "1.1.0"), ("gemm", "0.9.0"), ("gemm", "1.1.0"), ("moe", "0.9.0"))
    assert [(path.split("/")[2], channel) for path, channel in sources(tree, "trtllm", "1.0.0", "gemm")] == [
        ("1.0.0", "primary"),
        ("1.1.0", "declared_reuse"),
        ("0.9.0", "declared_reuse"),
    ]


def test_communication_tables_take_older_versions_but_no_donor_and_no_other_backend(tree: Tree):
    for version in ("0.9.0", "1.0.0", "1.1.0"):
        tree.put(f"gpu/comm/vllm/{version}/custom_allreduce", [{"latency": 1.0}])
    tree.put("gpu/comm/sglang/1.0.0/custom_allreduce", [{"latency": 1.0}])
    tree.reuse("gpu/comm/vllm/1.0.0", ("custom_allreduce", "1.1.0"))
    sharing = Sharing((("custom_allreduce", "default", frozenset({"vllm", "sglang"})),))
    assert [
        (path.split("/")[2], channel) for path, channel in sources(tree, "vllm", "1.0.0", "custom_allreduce", sharing)
    ] == [
        ("1.0.0", "primary"),
        ("0.9.0", "fallback"),
    ]


def test_other_backends_come_last_by_name_newest_first_whatever_their_age(tree: Tree):
    tree.put("gpu/linear_attention/vllm/1.0.0/gdn", [{"latency": 1.0}])
    for where in ("trtllm/0.1", "trtllm/7.0rc2", "trtllm/main", "sglang/3.0"):
        tree.put(f"gpu/linear_attention/{where}/gdn", [{"latency": 1.0}])
    sharing = Sharing(
        (
            ("gdn", "conv", frozenset({"vllm", "trtllm", "sglang"})),
            ("gdn", "scan", frozenset({"vllm", "trtllm"})),
            ("gdn", "theirs", frozenset({"trtllm", "sglang"})),
        )
    )
    data = DataTree(tree.root)
    found = resolve(data, sharing, "gpu", "vllm", "1.0.0", "gdn")
    assert [(data.relative("gpu", s.path).split("/", 1)[1].rsplit("/", 1)[0], s.kernels) for s in found] == [
        ("vllm/1.0.0", None),
        ("sglang/3.0", {"conv"}),
        ("trtllm/7.0rc2", {"conv", "scan"}),
        ("trtllm/0.1", {"conv", "scan"}),
        ("trtllm/main", {"conv", "scan"}),
    ]


def test_a_manifest_shares_only_kernels_of_two_frameworks_that_routing_does_not_need_absent():
    group = {"op_file": "kda_perf.parquet", "frameworks": ["sglang", "vllm"]}
    sharing = Sharing.of_manifest(
        {
            "groups": [
                {**group, "kernel_source": "conv", "tier": "shared"},
                {**group, "kernel_source": "default", "tier": "shared_fallback"},
                {**group, "kernel_source": "update", "tier": "absence_load_bearing"},
                {**group, "kernel_source": "alone", "tier": "shared", "frameworks": ["vllm"]},
            ]
        }
    )
    assert sharing.allowed("kda", "vllm") == {"sglang": {"conv", "default"}}
    assert sharing.allowed("kda", "trtllm") == {}
    assert sharing.allowed("gdn", "vllm") == {}


def test_a_directory_marked_incomplete_holds_no_tables(tree: Tree):
    tree.put("gpu/gemm/vllm/1.0.0/gemm", [{"latency": 1.0}], GEMM)
    (tree.root / "data/gpu/gemm/vllm/1.0.0/INCOMPLETE.txt").write_text("")
    assert sources(tree, "vllm", "1.0.0", "gemm") == []
    (tree.root / "data/gpu/gemm/vllm/1.0.0/collection_meta.yaml").write_text("schema_version: 1")
    assert len(sources(tree, "vllm", "1.0.0", "gemm")) == 1


def test_malformed_declarations_name_the_file(tree: Tree):
    tree.put("gpu/gemm/vllm/1.0.0/gemm", [{"latency": 1.0}], GEMM)
    (tree.root / "data/gpu/gemm/vllm/1.0.0/reuse.yaml").write_text("reuse: [{table: gemm}]")
    with pytest.raises(BuildError, match=r"reuse\.yaml: each reuse entry needs"):
        DataTree(tree.root)
    with pytest.raises(BuildError, match="no data directory"):
        DataTree(tree.root / "data/gpu")


@pytest.mark.parametrize("rules", [{"defaults": [1]}, {"defaults": {"vllm": "1.0.0"}}, {"overrides": {"gpu": 3}}])
def test_malformed_rules_of_a_tree_are_told(tree: Tree, rules: dict[str, object]):
    tree.put("gpu/gemm/vllm/1.0.0/gemm", [{"latency": 1.0}], GEMM)
    tree.rules(rules)
    with pytest.raises(BuildError, match="malformed"):
        tree.build()
    tree.rules({"defaults": {}})
    (tree.root / "perf_data_reuse_manifest.yaml").write_text("groups: [{tier: shared}]")
    with pytest.raises(BuildError, match="malformed"):
        tree.build()
