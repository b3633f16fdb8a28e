"""Small source trees in the reference's layout, and what the builder makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from perfcast_systems.build import build_packs
from perfcast_systems.pack import Pack, PackTable

Row = dict[str, Any]
GEMM = {"gemm_dtype": "bfloat16", "m": 1, "n": 64, "k": 64, "kernel_source": "cublas"}
ATTENTION = {
    "attn_dtype": "bfloat16",
    "kv_cache_dtype": "fp8",
    "num_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "isl": 64,
    "batch_size": 1,
    "step": 0,
    "kernel_source": "fa3",
}
DSA = {
    "op_name": "dsa_context_module",
    "kernel_source": "default",
    "architecture": "DeepseekV32ForCausalLM",
    "mla_dtype": "bfloat16",
    "kv_cache_dtype": "fp8",
    "gemm_type": "fp8_block",
    "num_heads": 16,
    "isl": 128,
    "batch_size": 1,
    "step": 0,
    "tp_size": 1,
}
MOE = {
    "moe_dtype": "bfloat16",
    "distribution": "balanced",
    "topk": 8,
    "num_experts": 128,
    "hidden_size": 2048,
    "inter_size": 768,
    "moe_tp_size": 1,
    "moe_ep_size": 1,
    "num_tokens": 1,
    "kernel_source": "triton",
}
STATE = {
    "d_model": 1,
    "num_k_heads": 2,
    "head_k_dim": 3,
    "num_v_heads": 4,
    "head_v_dim": 5,
    "d_conv": 6,
    "batch_size": 1,
}


class Tree:
    """A tree under ``root`` whose default version of vllm, sglang and trtllm is 1.0.0."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.rules({"defaults": {name: {"current": "1.0.0"} for name in ("vllm", "sglang", "trtllm")}})

    def rules(self, content: dict[str, Any]) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        (self.root / "query_versions.yaml").write_text(yaml.safe_dump(content))

    def share(self, stem: str, kernel: str, frameworks: list[str], tier: str = "shared") -> None:
        path = self.root / "perf_data_reuse_manifest.yaml"
        groups = yaml.safe_load(path.read_text())["groups"] if path.exists() else []
        groups.append(
            {"op_file": f"{stem}_perf.parquet", "kernel_source": kernel, "tier": tier, "frameworks": frameworks}
        )
        path.write_text(yaml.safe_dump({"groups": groups}))

    def put(self, where: str, rows: Sequence[Row], base: Row | None = None) -> Path:
        """Write ``where`` = system/family/backend/version/stem with ``rows``, each over the columns of ``base``."""
        path = self.root / "data" / f"{where}_perf.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist([{**(base or {}), **row} for row in rows]), path)
        return path

    def reuse(self, where: str, *entries: tuple[str, str]) -> None:
        listed = [{"table": t, "from_version": v, "reason": "same kernels", "approved_by": "us"} for t, v in entries]
        (self.root / "data" / where / "reuse.yaml").write_text(yaml.safe_dump({"reuse": listed}))

    def build(self, only: Sequence[str] | None = None) -> dict[str, Pack]:
        """Packs by backend/version, built beside the tree."""
        out = self.root.parent / "packs"
        return {
            f"{pack.identity.backend}/{pack.identity.version}": pack
            for pack in map(Pack, build_packs(self.root, out, only))
        }


def leaves(table: PackTable | None, own: bool = False) -> dict[tuple[str | int, ...], float]:
    """Key -> ms of a table; of its own rows only if ``own``."""
    assert table is not None
    found: dict[tuple[str | int, ...], float] = {}
    for row in range(len(table.ms)):
        if own and not table.own[row]:
            continue
        key = [
            table.vocab[name][int(column[row])] if name in table.vocab else int(column[row])
            for name, column in zip(table.key, table.columns, strict=True)
        ]
        found[tuple(key)] = float(table.ms[row])
    return found
