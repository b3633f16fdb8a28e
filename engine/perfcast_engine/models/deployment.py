"""Deployment: one model on one framework with every open question answered; what operator lists are built from."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from perfcast_engine.config import FUSED, EngineConfig, MoeComm, ParallelConfig
from perfcast_engine.models.quantization import QuantModes
from perfcast_engine.models.spec import ModelSpec
from perfcast_engine.profiles import EVERY_SECOND_GLOBAL, NORMS_NAME_ATTENTION, ONE_IS_GLOBAL, Profile, profile_named

# architectures whose published pattern says 1 for a sliding layer
ONE_IS_SLIDING = frozenset({"MiMoV2FlashForCausalLM"})
SWAPPED = str.maketrans("GS", "SG")


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

    @property
    def kinds(self) -> Counter[str]:
        """Layers by the letters of their kind, as the profile reads the layer pattern."""
        spec, runs, every = self.spec, self.spec.x.layer_runs, self.spec.x.global_every
        if every and not self.profile[EVERY_SECOND_GLOBAL]:
            ffn = [kind[1] for kind, n in runs for _ in range(n)]
            return Counter(("S" if (i + 1) % every else "G") + kind for i, kind in enumerate(ffn))
        swap = spec.arch in ONE_IS_SLIDING and not self.profile[ONE_IS_GLOBAL]
        counts: Counter[str] = Counter()
        for kind, n in runs:
            counts[kind.translate(SWAPPED) if swap else kind] += n
        return counts

    @property
    def ratios(self) -> Counter[int]:
        """Layers by their compression ratio; those without compression count as the strongest one."""
        counts: Counter[int] = Counter()
        for ratio, n in sorted(self.spec.x.compress_runs, key=lambda run: not run[0]):
            counts[ratio or 128] += n
        return counts
