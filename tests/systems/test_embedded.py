"""The embedded packs: all there, all sound, small, and equal to the reference (slow)."""

import os
import resource
from pathlib import Path

import pytest
from perfcast_engine.tables.catalog import Catalog
from perfcast_systems.build.schema import TABLES

from tests.parity import check

GOLDENS = Path(os.environ.get("PERFCAST_GOLDENS", Path(__file__).parents[3] / "shared" / "goldens"))
MAX_PACKS_BYTES = 60e6
MAX_RESIDENT_KIB = 1.5 * 2**20


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return Catalog()


def test_every_queryable_version_has_a_pack(catalog: Catalog):
    packs = catalog.ls()
    assert len(packs) == 53 and not any(pack.problem for pack in packs)
    assert sum(pack.bytes for pack in packs) < MAX_PACKS_BYTES
    assert catalog.slots("h200_sxm", "vllm") == {"current": "0.24.0", "next": "0.27.0"}
    assert catalog.slots("b60", "vllm") == {"current": "0.26.0", "previous": "0.20.0"}
    assert catalog.slots("b60", "sglang") == {} == catalog.slots("l4", "trtllm")


def test_tables_are_keyed_as_the_schema_says_and_no_source_failed(catalog: Catalog):
    for info in catalog.ls():
        header = catalog.pack(info.system, info.backend, info.version).header
        assert header["problems"] == {}
        for name, table in header["tables"].items():
            assert tuple(table["key"]) == TABLES[name].key
            assert set(table["vocab"]) == set(TABLES[name].names)


@pytest.mark.slow
def test_every_table_is_sound_and_all_of_them_fit_in_memory(catalog: Catalog):
    assert catalog.verify() == []
    for info in catalog.ls():
        database = catalog.database(info.system, info.backend, info.version)
        for name in TABLES:
            database.find(name)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < MAX_RESIDENT_KIB


@pytest.mark.slow
def test_tables_are_those_of_the_reference():
    goldens = GOLDENS / "perfdata.jsonl.gz"
    if not goldens.is_file():
        pytest.skip(f"no golden vectors at {GOLDENS} (PERFCAST_GOLDENS)")
    groups = check.run([goldens], {}, show=5)
    assert sum(group.cases for group in groups.values()) > 300
    assert all(group.within == group.cases for group in groups.values())
