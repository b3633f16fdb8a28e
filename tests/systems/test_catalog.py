"""Opening systems and packs by name, from the embedded data and from folders of the user."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from perfcast_engine.errors import DataCorrupt, EngineError, InvalidField, PerfDataMissing, Reason, UnknownName
from perfcast_engine.tables import catalog as catalog_module
from perfcast_engine.tables.catalog import Catalog
from perfcast_engine.tables.database import Mode

from tests.systems.trees import GEMM, MOE, Tree

SPEC = """
gpu: {mem_bw_bytes_per_s: 1.0e+12, dense_flop_per_s: {bfloat16: 1.0e+14}, sm_version: 90}
links: {gpus_per_node: 8, intra_node_bw_bytes_per_s: 4.0e+11, inter_node_bw_bytes_per_s: 5.0e+10}
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A user's folder: system ``paper`` with vllm packs current (1.0.0) and next (1.1.0)."""
    tree = Tree(tmp_path / "tree")
    tree.put("paper/gemm/vllm/1.0.0/gemm", [{"latency": 1.0}], GEMM)
    tree.put("paper/gemm/vllm/0.9.0/gemm", [{"m": 2, "latency": 2.0}], GEMM)
    tree.put("paper/moe/vllm/1.1.0/moe", [{"latency": 3.0}], MOE)
    tree.build()
    (tmp_path / "packs/gpus").mkdir()
    (tmp_path / "packs/gpus/paper.yaml").write_text(SPEC)
    return tmp_path / "packs"


def test_shared_and_own_rows_of_one_pack(root: Path):
    catalog = Catalog([root])
    assert catalog.backends("paper") == ["vllm"]
    assert catalog.slots("paper", "vllm") == {"current": "1.0.0", "next": "1.1.0"}
    silicon = catalog.database("paper", "vllm")
    hybrid = catalog.database("paper", "vllm", mode="HYBRID")
    empirical = catalog.database("paper", "vllm", mode=Mode.EMPIRICAL)
    assert silicon.table("gemm").ms.tolist() == [1.0, 2.0] and hybrid.find("gemm") is silicon.find("gemm")
    assert empirical.table("gemm").ms.tolist() == [1.0]
    assert catalog.database("paper", "vllm", "1.0.0") is silicon
    newer = catalog.database("paper", "vllm", "next", Mode.EMPIRICAL)
    assert newer.find("gemm") is None and newer.table("moe").ms.tolist() == [3.0]
    with pytest.raises(PerfDataMissing, match=r"no gemm table for vllm 1\.1\.0 on paper"):
        newer.table("gemm")


def test_grids_are_int64_whatever_key_columns_are_stored_in(root: Path):
    table = Catalog([root]).database("paper", "vllm").table("gemm")
    assert [column.dtype.name for column in table.grid("bfloat16").coords] == ["int64"] * 3
    assert table.rows("bfloat16", 2) == slice(1, 2)
    assert table.rows("bfloat16", 70_000) is None and table.rows("bfloat16", -1) is None and table.rows("fp8") is None
    assert table.children("bfloat16") == [1, 2]


def test_unknown_names_tell_the_nearest(root: Path):
    catalog = Catalog([root])
    for call, kind, near in (
        (lambda: catalog.system("papr"), Reason.UNKNOWN_SYSTEM, "paper"),
        (lambda: catalog.slots("paper", "vlm"), Reason.UNKNOWN_BACKEND, "vllm"),
        (lambda: catalog.database("paper", "vllm", "1.0.1"), Reason.UNKNOWN_VERSION, "1.0.0"),
        (lambda: catalog.database("paper", "vllm", "previous"), Reason.UNKNOWN_VERSION, "1.0.0, 1.1.0, current, next"),
        (lambda: catalog.slots("paper", "VLLM"), Reason.UNKNOWN_BACKEND, "vllm"),
        (lambda: catalog.slots("paper", "jax"), Reason.UNKNOWN_BACKEND, "trtllm, sglang, vllm"),
    ):
        with pytest.raises(UnknownName) as error:
            call()
        assert error.value.reason is kind and near in error.value.details["nearest"] and near in str(error.value)
    for field, arguments in (("version", ("",)), ("database_mode", ("current", "SOL_FULL"))):
        with pytest.raises(InvalidField) as invalid:
            catalog.database("paper", "vllm", *arguments)
        assert invalid.value.details["field"] == field
    with pytest.raises(InvalidField, match="is not a folder"):
        Catalog([root / "nowhere"])


def test_a_system_without_measurements_answers_in_sol_mode_only():
    catalog = Catalog()
    with pytest.raises(PerfDataMissing) as error:
        catalog.database("h100_pcie", "vllm", "0.24.0")
    assert error.value.details["mode_that_works"] == "SOL"
    assert catalog.database("h100_pcie", "vllm", "0.24.0", Mode.SOL).system.mem_bw == 2e12
    with pytest.raises(UnknownName):
        catalog.database("h100_pcie", "vllm", "current", Mode.SOL)


def test_an_unlisted_version_opens_on_request_without_tables(root: Path):
    opened = Catalog([root]).database("paper", "vllm", "0.1.0", allow_unlisted=True)
    assert opened.version == "0.1.0" and opened.find("gemm") is None


def test_the_first_root_wins_and_adds_to_the_embedded_systems(root: Path, tmp_path: Path):
    other = tmp_path / "other"
    (other / "gpus").mkdir(parents=True)
    (other / "gpus/paper.yaml").write_text(SPEC.replace("gpus_per_node: 8", "gpus_per_node: 4"))
    (other / "gpus/l4.yaml").write_text(SPEC)
    assert Catalog([root, other]).system("paper").gpus_per_node == 8
    catalog = Catalog([other, root])
    assert catalog.system("paper").gpus_per_node == 4 and catalog.system("l4").mem_bw == 1e12
    assert "h200_sxm" in catalog.systems()
    assert catalog.database("paper", "vllm").system.gpus_per_node == 4


def test_damage_spoils_only_what_it_hits(root: Path):
    newer = root / "paper/vllm-1.1.0.pack"
    newer.write_bytes(newer.read_bytes()[:50])
    (root / "gpus/torn.yaml").write_text("gpu: [")
    (root / "gpus/wrong.yaml").write_text(SPEC.replace("sm_version: 90", "sm_version: ninety"))
    catalog = Catalog([root])
    assert catalog.database("paper", "vllm").table("gemm").ms.tolist() == [1.0, 2.0]
    for call, error in (
        (lambda: catalog.database("paper", "vllm", "1.1.0"), DataCorrupt),
        (lambda: catalog.database("paper", "vllm", "next"), DataCorrupt),
        (lambda: catalog.system("torn"), DataCorrupt),
        (lambda: catalog.system("wrong"), DataCorrupt),
    ):
        with pytest.raises(error):
            call()
    named = [str(problem) for problem in catalog.verify()]
    assert len(named) == 3 and any("paper/vllm-1.1.0.pack" in problem for problem in named)
    assert [info.version for info in catalog.ls() if info.problem] == ["1.1.0"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: " + "[" * 3000, "recursion"),
        (SPEC.replace("1.0e+12", "9" * 6000), "digits"),
        (SPEC.replace("1.0e+12", "9" * 400), r"mem_bw_bytes_per_s: must be a number up to 1e\+30"),
        (SPEC.replace("1.0e+12", "1.0e+400"), r"mem_bw_bytes_per_s: must be a number"),
        ("gpu: [\n\n", "while parsing a flow node expected"),
        (None, "No such file or directory$"),
    ],
)
def test_whatever_a_description_holds_is_told_in_a_line(root: Path, text: str | None, words: str):
    path = root / "gpus/wrong.yaml"
    path.symlink_to("nowhere") if text is None else path.write_text(text)
    catalog = Catalog([root])
    for _ in range(2):  # told again, the error has not grown
        with pytest.raises(DataCorrupt, match=words) as caught:
            catalog.system("wrong")
        assert len(caught.traceback) == 2 and "\n" not in caught.value.message
    assert catalog.system("paper").mem_bw == 1e12


def test_swapped_packs_are_told_though_one_is_coded_against_the_other(root: Path):
    older, newer = (root / f"paper/vllm-{version}.pack" for version in ("1.0.0", "1.1.0"))
    content = older.read_bytes(), newer.read_bytes()
    newer.write_bytes(content[0])
    older.write_bytes(content[1])
    told = sorted(str(info.problem) for info in Catalog([root]).ls() if info.system == "paper")
    assert told == [
        "paper/vllm-1.0.0.pack: holds paper/vllm-1.1.0.pack",
        "paper/vllm-1.1.0.pack: holds paper/vllm-1.0.0.pack",
    ]


def test_a_link_that_leads_nowhere_is_told(root: Path):
    (root / "paper/sglang-1.0.0.pack").symlink_to(root / "nowhere")
    with pytest.raises(DataCorrupt, match="cannot be read: No such file or directory"):
        Catalog([root]).database("paper", "sglang", "1.0.0")


def test_a_pack_under_another_name_is_told(root: Path):
    shutil.copy(root / "paper/vllm-1.0.0.pack", root / "paper/sglang-1.0.0.pack")
    with pytest.raises(DataCorrupt, match=r"paper/sglang-1\.0\.0\.pack: holds paper/vllm-1\.0\.0\.pack"):
        Catalog([root]).database("paper", "sglang", "1.0.0")


def test_a_table_damaged_after_opening_is_told_by_name(root: Path):
    path = root / "paper/vllm-1.0.0.pack"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    database = Catalog([root]).database("paper", "vllm")
    raised: list[EngineError] = []
    for name in ("gemm", "gemm_sites"):
        try:
            database.table(name)
        except EngineError as error:
            raised.append(error)
    assert [type(error) for error in raised] == [DataCorrupt] and raised[0].details["table"] == "gemm_sites"


def test_many_threads_get_one_database_and_one_table(root: Path):
    catalog = Catalog([root])
    with ThreadPoolExecutor(8) as pool:
        tables = list(pool.map(lambda _: catalog.database("paper", "vllm").table("gemm"), range(64)))
    assert len({id(table) for table in tables}) == 1


def test_only_the_databases_asked_for_last_are_kept(root: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(catalog_module, "MAX_DATABASES", 2)
    catalog = Catalog([root])
    first = catalog.database("h200_sxm", "trtllm", mode="SILICON")
    catalog.database("h200_sxm", "trtllm", mode="HYBRID")
    assert catalog.database("h200_sxm", "trtllm", mode="SILICON") is first
    catalog.database("h200_sxm", "trtllm", mode="EMPIRICAL")
    assert catalog.database("h200_sxm", "trtllm", mode="SILICON") is first
    hybrid = catalog.database("h200_sxm", "trtllm", mode="HYBRID")
    assert catalog.database("h200_sxm", "trtllm", mode="HYBRID") is hybrid
    assert catalog.database("h200_sxm", "trtllm", mode="EMPIRICAL").source == first.source
