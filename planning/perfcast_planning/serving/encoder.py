"""Vision encoders: image tokens, encoding time and memory (spec/06 section 7)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from perfcast_engine.answer import F64, Points, total
from perfcast_engine.backends import MIB
from perfcast_engine.ops.base import Op
from perfcast_engine.tables.database import Database

from perfcast_planning.serving.workload import Images

MERGED_OPS = ("encoder_projector", "all_gather")  # run on merged tokens, all others on patches
ACTIVATION_FLOOR = 32 * MIB
PATCH_TENSORS, ELEMENT_BYTES = 3, 2


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """The vision tower of one engine. ``tp`` ranks share it; ``data_parallel``: they share images, not weights."""

    ops: tuple[Op, ...]
    db: Database
    patch: int
    merge: int
    hidden: int
    out_hidden: int
    projectors: int
    tp: int
    data_parallel: bool = True

    def image_tokens(self, images: Images) -> tuple[int, int]:
        """(tokens after merging, patches before it) of one image."""
        if not images:
            return 0, 0
        if images.height and images.width:
            unit = self.patch * self.merge
            height, width = (max(unit, round(side / unit) * unit) for side in (images.height, images.width))
            return (height // unit) * (width // unit), (height // self.patch) * (width // self.patch)
        return images.tokens, images.tokens * self.merge**2

    def prompt_tokens(self, images: Images) -> int:
        return self.image_tokens(images)[0] * images.count if images else 0

    def _local_images(self, images: Images, batch: F64) -> F64:
        return np.ceil(batch * images.count / (self.tp if self.data_parallel else 1))

    def ms(self, images: Images, batch: F64) -> F64:
        """Time (N,) to encode the images of ``batch`` requests."""
        if not images:
            return np.zeros(len(batch))
        merged, patches = self.image_tokens(images)
        count = self._local_images(images, batch)
        ms = np.zeros(len(batch))
        for on_merged, tokens in ((False, patches), (True, merged)):
            ops = [op for op in self.ops if any(name in op.name for name in MERGED_OPS) is on_merged]
            at = Points.of(count, tokens)
            ms += total((op.evaluate(self.db, at) for op in ops), len(at)).raise_first().ms
        return ms

    def bytes(self, images: Images, batch: F64) -> tuple[float, F64]:
        """(weights, activations (N,)) of one GPU; nothing is loaded for requests without images."""
        if not images or not self.ops:
            return 0.0, np.zeros(len(batch))
        weights = sum(op.weight_bytes() for op in self.ops)
        merged, patches = self.image_tokens(images)
        local = self._local_images(images, batch) * patches * self.hidden * PATCH_TENSORS
        gathered = batch * images.count * merged * self.out_hidden * self.projectors
        return weights, np.maximum(ELEMENT_BYTES * (local + gathered), ACTIVATION_FLOOR)
