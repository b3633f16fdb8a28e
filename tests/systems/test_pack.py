"""The pack format: what is written is read, and damage is told, never guessed at."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from perfcast_systems.build import BuildError, build_packs
from perfcast_systems.build.writer import PackWriter
from perfcast_systems.coding import Damaged, Reader, put_keys, take_body, take_keys
from perfcast_systems.pack import Identity, Pack, PackError

from tests.systems.trees import GEMM, MOE, Tree, leaves

CURRENT, NEXT = "gpu/vllm-1.0.0.pack", "gpu/vllm-1.1.0.pack"


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """``next`` has the GEMM rows of ``current`` and one MoE row more."""
    made = Tree(tmp_path / "root")
    rng = np.random.default_rng(7)
    rows = [{"m": m, "n": n, "latency": float(rng.random())} for m in range(1, 40) for n in (64, 128, 256)]
    made.put("gpu/gemm/vllm/1.0.0/gemm", rows, GEMM)
    tokens = [{"num_tokens": t, "latency": t / 7} for t in range(1, 300)]
    made.put("gpu/moe/vllm/1.0.0/moe", tokens, MOE)
    made.put("gpu/moe/vllm/1.1.0/moe", [{"num_tokens": 1000, "latency": 100.0}], MOE)
    return made


@pytest.fixture
def packs(tree: Tree) -> Path:
    tree.build()
    return tree.root.parent / "packs"


def test_sorted_keys_of_any_width_come_back_in_narrow_types():
    rng = np.random.default_rng(1)
    columns = [rng.integers(0, high, 500) for high in (3, 300, 70_000, 2**40)]
    order = np.lexsort(columns[::-1])
    columns = [column[order] for column in columns]
    back = take_keys(Reader(put_keys(columns)), 4)
    assert all(np.array_equal(left, right) for left, right in zip(columns, back, strict=True))
    assert [column.dtype.itemsize for column in back] == [1, 2, 4, 8]


def test_an_empty_table_comes_back_empty(tmp_path: Path):
    none = np.zeros(0, np.int64)
    writer = PackWriter(Identity("gpu", "vllm", "1.0.0", "current"))
    writer.add("moe", ("a", "b"), (none, none), {"a": ()}, np.zeros(0), None, np.zeros(0, np.uint8), [], [])
    table = Pack(writer.write(tmp_path, [], {}, {}, "here")).table("moe")
    assert table is not None and len(table.ms) == 0 and len(table.columns) == 2 and len(table.own) == 0


def test_building_twice_gives_the_same_bytes(tree: Tree, tmp_path: Path):
    for path in build_packs(tree.root, tmp_path / "a"):
        again = tmp_path / "b" / path.relative_to(tmp_path / "a")
        build_packs(tree.root, tmp_path / "b")
        assert path.read_bytes() == again.read_bytes()


def test_next_refers_to_what_current_holds(packs: Path):
    newer = Pack(packs / NEXT)
    older = newer.base
    assert older is not None and newer.header["tables"]["gemm"]["body"] == {"how": "same"}
    assert newer.header["tables"]["moe"]["body"]["how"] == "patch"
    gemm, moe = newer.table("gemm"), newer.table("moe")
    assert gemm is not None and gemm.ms is older.table("gemm").ms  # type: ignore[union-attr]
    assert not gemm.own.any() and moe is not None and moe.own.sum() == 1
    assert leaves(moe) == {**leaves(older.table("moe")), ("bfloat16", "balanced", 8, 128, 2048, 768, 1, 1, 1000): 100.0}


def test_a_part_of_the_tree_can_be_built_alone_and_a_version_outside_the_slots_by_name(tree: Tree, tmp_path: Path):
    (alone,) = build_packs(tree.root, tmp_path / "alone", ["gpu/vllm/1.1.0"])
    assert Pack(alone).base is None and Pack(alone).identity.slot == "next"
    tree.put("gpu/gemm/vllm/0.5.0/gemm", [{"latency": 1.0}], GEMM)
    (unlisted,) = build_packs(tree.root, tmp_path / "old", ["gpu/vllm/0.5.0"])
    assert Pack(unlisted).identity == Identity("gpu", "vllm", "0.5.0", "")
    with pytest.raises(BuildError, match="gpu/vllm/7"):
        build_packs(tree.root, tmp_path / "none", ["gpu/vllm/7"])


def test_every_truncation_is_told(packs: Path):
    whole = (packs / CURRENT).read_bytes()
    for size in [0, 7, 43, 44, 100, *range(200, len(whole), 97), len(whole) - 1]:
        (packs / CURRENT).write_bytes(whole[:size])
        with pytest.raises(PackError, match=r"gpu/vllm-1\.0\.0\.pack"):
            Pack(packs / CURRENT).verify()


def test_every_flipped_bit_is_told_and_spoils_only_its_table(packs: Path):
    whole = (packs / CURRENT).read_bytes()
    for at in range(0, len(whole), 53):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << at % 8
        (packs / CURRENT).write_bytes(damaged)
        with pytest.raises(PackError):
            Pack(packs / CURRENT).verify()
    pack = Pack(packs / CURRENT)  # the last flip lies in the last blob
    with pytest.raises(PackError, match="checksum mismatch") as error:
        pack.verify()
    others = set(pack.names) - {error.value.table}
    assert error.value.table and all(pack.table(name) is not None for name in others)


def test_a_base_of_another_build_or_none_is_told(packs: Path, tree: Tree, tmp_path: Path):
    tree.put("gpu/mhc/vllm/1.0.0/other", [{"latency": 1.0}])
    tree.put("gpu/gemm/vllm/1.0.0/gemm", [{"latency": 1.0}], GEMM)
    (other,) = build_packs(tree.root, tmp_path / "other", ["gpu/vllm/1.0.0"])
    shutil.copy(other, packs / CURRENT)
    with pytest.raises(PackError, match=r"another build of gpu/vllm-1\.0\.0\.pack"):
        Pack(packs / NEXT)
    (packs / CURRENT).unlink()
    with pytest.raises(PackError, match=r"vllm-1\.0\.0\.pack: cannot be read"):
        Pack(packs / NEXT)


def test_a_file_that_is_no_pack_or_of_another_format_is_told(packs: Path):
    whole = (packs / CURRENT).read_bytes()
    for content, words in ((b"PAR1" + bytes(100), "is not a pack"), (b"PFCPACK9" + whole[8:], "has format")):
        (packs / CURRENT).write_bytes(content)
        with pytest.raises(PackError, match=words):
            Pack(packs / CURRENT)


def test_bytes_that_decode_to_nonsense_are_told():
    keys = put_keys([np.array([0, 0, 1]), np.array([1, 2, 1])])
    for body in (keys, keys + bytes(3), bytes(40), b"\xff" * 60):
        with pytest.raises(Damaged):
            take_body(body, 2, 3)
