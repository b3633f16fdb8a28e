"""Deployment: one model on one framework with every open question answered; what operator lists are built from."""

from __future__ import annotations

from dataclasses import dataclass

from perfcast_engine.config import FUSED, EngineConfig, MoeComm, ParallelConfig
from perfcast_engine.models.quantization import QuantModes
from perfcast_engine.models.spec import ModelSpec
from perfcast_engine.profiles import NORMS_NAME_ATTENTION, Profile, profile_named


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """A configuration and what it resolves to. Of ``parallel`` moe_tp and moe_ep are set for every MoE model; ``comm``
    is the large-EP all-to-all of each phase."""

    config: EngineConfig
    spec: ModelSpec
    parallel: ParallelConfig
    modes: QuantModes
    gpus_per_node: int
    nextn: int = 0
    comm: MoeComm = FUSED

    @property
    def backend(self) -> str:
        return self.config.backend

    @property
    def profile(self) -> Profile:
        return profile_named(self.config.profile)

    @property
    def tp(self) -> int:
        return self.parallel.tp

    @property
    def moe_tp(self) -> int:
        return self.parallel.moe_tp or 1

    @property
    def moe_ep(self) -> int:
        return self.parallel.moe_ep or 1

    @property
    def kv_heads(self) -> int:
        """KV heads on one GPU; they are replicated where there are fewer than ranks."""
        return -(-self.spec.kv_heads // self.tp)

    @property
    def keep_attn(self) -> frozenset[str]:
        """Groups of attention projections that the checkpoint leaves in bfloat16."""
        facts = self.spec.quant
        if self.profile[NORMS_NAME_ATTENTION] or facts.keep_attn_named is None:
            return facts.keep_attn
        return facts.keep_attn_named

    @property
    def nodes(self) -> int:
        """Nodes that the experts of one engine span."""
        return -(-self.moe_ep * self.moe_tp // self.gpus_per_node)
