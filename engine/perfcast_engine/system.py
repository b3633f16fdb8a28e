"""What one GPU system can do: peak rates, bandwidths, topology and memory, read from its YAML (spec/01 section 1)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from perfcast_engine.errors import SystemFlopsMissing
from perfcast_engine.quant import QuantMode

T = TypeVar("T", float, NDArray[np.float64])


@dataclass(frozen=True, slots=True)
class SystemSpec:
    """One GPU system. Bandwidths in bytes/s, rates in FLOP/s, latencies in s, memory in bytes."""

    name: str
    mem_bw: float
    flops: Mapping[str, float]  # by rate name: bfloat16, int8, fp8, fp4
    gpus_per_node: int
    intra_node_bw: float
    inter_node_bw: float
    mem_bw_efficiency: float = 1.0
    mem_latency_s: float = 0.0
    mem_capacity: float | None = None
    sm_version: int | None = None
    power_w: float | None = None
    gpus_per_rack: int | None = None
    inter_rack_bw: float | None = None
    pcie_bw: float | None = None
    p2p_latency_s: float = 0.0
    inter_rack_latency_s: float | None = None
    nccl_mem: Mapping[int, float] = field(default_factory=dict)  # ranks -> bytes
    other_mem: float = 0.0
    nccl_version: str | None = None
    oneccl_version: str | None = None

    def rate(self, quant: QuantMode) -> float:
        """Peak FLOP/s of the compute type of ``quant``; SystemFlopsMissing where the system states none."""
        value = self.flops.get(quant.rate, 0.0)
        if not (math.isfinite(value) and value > 0):
            raise SystemFlopsMissing(
                f"{self.name} states no {quant.rate} rate, needed by quantisation {quant.name}",
                system=self.name,
                rate=quant.rate,
                quant=quant.name,
            )
        return value

    def group_bw(self, gpus: int) -> float:
        """Bytes/s of one GPU, one direction, inside a group of ``gpus`` (node, rack or beyond)."""
        if gpus <= self.gpus_per_node:
            return self.intra_node_bw
        if self.gpus_per_rack is None or gpus <= self.gpus_per_rack:
            return self.inter_node_bw
        return self.inter_rack_bw if self.inter_rack_bw is not None else self.inter_node_bw

    def memory_ms(self, bytes_moved: T) -> T:
        """Time to move bytes at the bandwidth that kernels reach, plus the start of one (spec/02 section 6)."""
        return (bytes_moved / (self.mem_bw * self.mem_bw_efficiency) + self.mem_latency_s) * 1000

    def memory_sol_ms(self, bytes_moved: T) -> T:
        """Time to move bytes at the peak bandwidth."""
        return bytes_moved / self.mem_bw * 1000

    @property
    def has_fp8_decode_attention(self) -> bool:
        """Whether decode attention over an fp8 cache runs at the fp8 rate (sm >= 89)."""
        return (self.sm_version or -1) >= 89
