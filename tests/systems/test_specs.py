"""System descriptions: the embedded ones, and what is wrong with bad ones."""

from pathlib import Path

import pytest
import yaml
from perfcast_engine.errors import DataCorrupt, InvalidField
from perfcast_engine.tables.catalog import Catalog
from perfcast_engine.tables.specs import read_spec, spec_of

GOOD = {
    "gpu": {"mem_bw_bytes_per_s": 1e12},
    "links": {"gpus_per_node": 8, "intra_node_bw_bytes_per_s": 4e11, "inter_node_bw_bytes_per_s": 5e10},
}


def test_all_systems_are_described():
    catalog = Catalog()
    assert {"h200_sxm", "gb300", "b60", "l4"} <= set(catalog.systems()) and len(catalog.systems()) >= 14
    gb200 = catalog.system("gb200")
    assert [gb200.group_bw(gpus) for gpus in (4, 5, 72, 73)] == [9e11, 9e11, 9e11, 1e11]
    b60 = catalog.system("b60")
    assert b60.sm_version is None and b60.flops["fp8"] == b60.flops["bfloat16"] and b60.oneccl_version == "2021.15.9"
    assert catalog.system("h200_sxm").nccl_mem == {1: 0, 2: 358612992, 4: 411041792, 8: 411041792}


def test_what_is_not_said_has_the_reference_defaults():
    spec = spec_of("paper", GOOD)
    assert (spec.mem_bw_efficiency, spec.mem_latency_s, spec.p2p_latency_s, spec.flops) == (1.0, 0.0, 0.0, {})


@pytest.mark.parametrize(
    ("section", "key", "value", "named"),
    [
        ("gpu", "mem_bw_bytes_per_s", None, "paper.gpu.mem_bw_bytes_per_s"),
        ("gpu", "mem_bw_bytes_per_s", "fast", "paper.gpu.mem_bw_bytes_per_s"),
        ("gpu", "mem_bw_bytes_per_s", float("nan"), "paper.gpu.mem_bw_bytes_per_s"),
        ("gpu", "mem_bw_bytes_per_s", -1, "paper.gpu.mem_bw_bytes_per_s"),
        ("gpu", "mem_bw_bytes_per_s", True, "paper.gpu.mem_bw_bytes_per_s"),
        ("gpu", "mem_bw", 1, "paper.gpu.mem_bw"),
        ("gpu", "sm_version", 9.5, "paper.gpu.sm_version"),
        ("gpu", "dense_flop_per_s", 1e15, "paper.gpu.dense_flop_per_s"),
        ("gpu", "dense_flop_per_s", {"fp3": 1e15}, "paper.gpu.dense_flop_per_s.fp3"),
        ("gpu", "dense_flop_per_s", {"fp8": 0}, "paper.gpu.dense_flop_per_s.fp8"),
        ("links", "gpus_per_node", 0, "paper.links.gpus_per_node"),
        ("reserved_memory", "nccl_bytes_by_ranks", {0: 1}, "paper.reserved_memory.nccl_bytes_by_ranks.0"),
        ("libraries", "nccl", 2.27, "paper.libraries.nccl"),
        ("fans", "count", 2, "paper.fans"),
    ],
)
def test_a_bad_figure_is_named(section: str, key: str, value: object, named: str):
    content = {name: dict(entries) for name, entries in GOOD.items()}
    content.setdefault(section, {})[key] = value
    with pytest.raises(InvalidField) as error:
        spec_of("paper", content)
    assert error.value.details["field"] == named


def test_a_missing_figure_is_named():
    with pytest.raises(InvalidField, match=r"paper\.links\.gpus_per_node: is required"):
        spec_of("paper", {"gpu": GOOD["gpu"], "links": {}})
    with pytest.raises(InvalidField, match=r"paper\.gpu: must be a mapping"):
        spec_of("paper", {"gpu": 3})


@pytest.mark.parametrize("text", ["gpu: [", "- 1", "", "\x00"])
def test_a_file_that_is_no_mapping_is_told(tmp_path: Path, text: str):
    (tmp_path / "paper.yaml").write_text(text)
    with pytest.raises(DataCorrupt, match=r"paper\.yaml"):
        read_spec(tmp_path / "paper.yaml")


def test_a_description_reads_back_from_yaml(tmp_path: Path):
    (tmp_path / "paper.yaml").write_text(yaml.safe_dump(GOOD))
    assert read_spec(tmp_path / "paper.yaml") == spec_of("paper", GOOD)
