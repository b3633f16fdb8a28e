"""Bytes of KV cache of one sequence on one GPU, and the longest sequence that fits (spec/05 section 10)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from perfcast_engine import quant
from perfcast_engine.answer import F64
from perfcast_engine.models.deployment import Deployment
from perfcast_engine.models.layers import ALTERNATING_WINDOW, Layer, full, gemma_attention, hybrid_attention, nas_blocks
from perfcast_engine.profiles import KV_ON_EVERY_STAGE, NAS_WITHOUT_KV, STATE_LAYERS_HOLD_KV, WINDOWS_HOLD_ALL_KV

SSM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
DEFAULT_LATENT = (512, 64)  # KV LoRA rank and rotary width where the checkpoint states none
DRAFT_LAYERS = 5  # of the Kimi K3 draft model; the states of its layers are kept as often


@dataclass(frozen=True, slots=True)
class Piece:
    """``each`` bytes for each entry; one entry a ``ratio`` tokens, of the last ``window`` tokens where there is one."""

    each: float
    window: int = 0
    ratio: int = 1


@dataclass(frozen=True, slots=True)
class KvCurve:
    """Bytes over length: pieces that grow with it and a constant. ``elements``: elements per token, as reported."""

    elements: float
    pieces: tuple[Piece, ...]
    constant: float = 0.0

    def bytes(self, tokens: Any) -> F64:
        """Bytes of sequences of ``tokens`` tokens, any shape."""
        length = np.asarray(tokens, np.float64)
        total = np.full(length.shape, self.constant)
        for piece in self.pieces:
            held = np.minimum(length, piece.window) if piece.window else length
            total = total + piece.each * np.floor(held / piece.ratio)
        return total

    def tokens(self, budget: float, longest: int) -> int:
        """The longest sequence within ``budget`` bytes; ``longest`` where the cache stops growing before it is full."""
        if budget <= 0 or self.bytes(1) <= 0:
            return 0
        if all(piece.window == 0 and piece.ratio == 1 for piece in self.pieces):
            slope = sum(piece.each for piece in self.pieces)
            rest = budget - self.constant
            return max(0, int(rest // slope)) if slope > 0 else longest * (rest >= 0)
        high = 1
        while self.bytes(high) <= budget:
            if self.bytes(2 * high) == self.bytes(high):
                return longest if longest > 0 else 2 * high
            high *= 2
        low = high // 2
        while low + 1 < high:
            middle = (low + high) // 2
            low, high = (middle, high) if self.bytes(middle) <= budget else (low, middle)
        return low


def kv_curve(d: Deployment, per_stage: bool = True) -> KvCurve:
    """The KV cache of one sequence on one GPU; of all pipeline stages together unless ``per_stage``."""
    curve = CURVES.get(d.spec.family, _uniform)(d, quant.KV_CACHE[d.modes.kv].bytes)
    stages = d.parallel.pp
    if not per_stage or stages == 1 or d.profile[KV_ON_EVERY_STAGE]:
        return curve
    pieces = tuple(replace(piece, each=piece.each / stages) for piece in curve.pieces)
    return KvCurve(curve.elements / stages, pieces, curve.constant / stages)


def _linear(elements: float, each: float, constant: float = 0.0) -> KvCurve:
    return KvCurve(elements, (Piece(each),), constant)


def _of_layers(layers: list[Layer], each: float) -> KvCurve:
    """Dense attention layers with their own heads, widths and windows."""
    sized = [(layer.count * layer.kv_heads * (layer.qk + layer.v), layer.window) for layer in layers]
    return KvCurve(sum(n for n, _ in sized), tuple(Piece(n * each, window) for n, window in sized))


def _uniform(d: Deployment, each: float) -> KvCurve:
    spec = d.spec
    elements = 2.0 * d.kv_heads * spec.head_dim * spec.layers
    return _linear(elements, elements * each)


def _alternating(d: Deployment, each: float) -> KvCurve:
    window, spec = ALTERNATING_WINDOW.get(d.spec.arch, 0), d.spec
    if not window:
        return _uniform(d, each)
    layer = 2.0 * d.kv_heads * spec.head_dim
    windowed = spec.layers // 2
    pieces = (Piece(layer * each * windowed, window), Piece(layer * each * (spec.layers - windowed)))
    return KvCurve(layer * spec.layers, pieces)


def _latent(d: Deployment, each: float) -> KvCurve:
    x = d.spec.x
    lora, rope = x.kv_lora_rank or DEFAULT_LATENT[0], x.qk_rope_head_dim or DEFAULT_LATENT[1]
    elements = float(d.spec.layers * (lora + rope))
    return _linear(elements, elements * each)


def _indexed(d: Deployment, each: float) -> KvCurve:
    x, layers = d.spec.x, d.spec.layers
    index = x.index_head_dim + 4 * -(-x.index_head_dim // 128)  # one byte an element and a scale for 128 of them
    per_token = x.kv_lora_rank * each + 2 * x.qk_rope_head_dim + index
    return _linear(float(layers * (x.kv_lora_rank + x.qk_rope_head_dim)), float(layers * per_token))


def _compressed(d: Deployment, each: float) -> KvCurve:
    spec, x = d.spec, d.spec.x
    pieces, constant = [Piece(spec.x.head_dim * each * _layers(x.compress_runs), x.sliding_window)], 0.0
    for ratio in (4, 128):
        layers = sum(n for r, n in x.compress_runs if r == ratio)
        pieces.append(Piece(layers * x.head_dim * each, 0, ratio))
        constant += layers * 8.0 * ratio * (2 if ratio == 4 else 1) * x.head_dim
        if ratio == 4:
            pieces.append(Piece(layers * 0.5 * x.index_head_dim, 0, ratio))
            constant += layers * 64.0 * x.index_head_dim
    return KvCurve(2.0 * d.kv_heads * spec.head_dim * spec.layers, tuple(pieces), constant)


def _layers(runs: tuple[tuple[int, int], ...]) -> int:
    return sum(n for _, n in runs)


def _gemma(d: Deployment, each: float) -> KvCurve:
    return _of_layers(gemma_attention(d), each)


def _hybrid(d: Deployment, each: float) -> KvCurve:
    if d.profile[WINDOWS_HOLD_ALL_KV]:
        return _uniform(d, each)
    return _windowed(d, each)


def _windowed(d: Deployment, each: float) -> KvCurve:
    return _of_layers(hybrid_attention(d), each)


def _step(d: Deployment, each: float) -> KvCurve:
    if not d.profile[WINDOWS_HOLD_ALL_KV]:
        return _windowed(d, each)
    spec, layer = d.spec, 2.0 * d.kv_heads * d.spec.head_dim
    pieces = (Piece(layer * each * spec.count("S"), spec.x.sliding_window_size), Piece(layer * each * spec.count("G")))
    return KvCurve(layer * spec.layers, pieces)


def _delta_net(d: Deployment, each: float) -> KvCurve:
    x, tp = d.spec.x, d.tp
    keys, values = x.linear_num_key_heads, x.linear_num_value_heads
    state = (values // tp) * x.linear_key_head_dim * x.linear_value_head_dim * SSM_BYTES[x.ssm_dtype or "float32"]
    channels = (2 * keys * x.linear_key_head_dim + values * x.linear_value_head_dim) // tp
    constant = d.spec.count("L") * (state + channels * (x.linear_conv_kernel_dim - 1) * 2.0)
    curve = _of_layers(full(d), each)
    return replace(curve, constant=constant)


def _kimi_k3(d: Deployment, each: float) -> KvCurve:
    x, local = d.spec.x, max(1, d.spec.x.kda_num_heads // d.tp)
    elements = float(d.spec.count("F") * (x.kv_lora_rank + x.qk_rope_head_dim))
    if d.nextn:
        elements += DRAFT_LAYERS * (DRAFT_KV.get(d.backend) or 2 * max(1, 16 // d.tp) * 64)
    state = local * x.kda_head_dim**2 * 4 + (x.kda_conv_kernel - 1) * 3 * local * x.kda_head_dim * 2
    return _linear(elements, elements * each, float(DRAFT_LAYERS * d.spec.count("L") * state))


DRAFT_KV = {"vllm": 576}  # KV elements of one draft layer; the other frameworks keep 16 shared heads of 64


def _state_space(d: Deployment, each: float) -> KvCurve:
    if d.profile[STATE_LAYERS_HOLD_KV]:
        return _uniform(d, each)
    x, tp = d.spec.x, d.tp
    elements = 2.0 * d.kv_heads * d.spec.head_dim * x.hybrid_override_pattern.count("*")
    inner = (x.mamba_num_heads // tp) * x.mamba_head_dim
    channels = inner + 2 * max(x.n_groups // tp, 1) * x.ssm_state_size
    state = inner * x.ssm_state_size * SSM_BYTES.get(x.ssm_dtype, 2) + channels * (x.conv_kernel - 1) * 2.0
    return _linear(elements, elements * each, state * x.hybrid_override_pattern.count("M"))


def _nas(d: Deployment, each: float) -> KvCurve:
    if d.profile[NAS_WITHOUT_KV]:
        return _linear(0.0, 0.0)
    return _of_layers(nas_blocks(d), each)


CURVES: Mapping[str, Callable[[Deployment, float], KvCurve]] = {
    "MOE": _alternating,
    "DEEPSEEK": _latent,
    "KIMIK25": _latent,
    "DEEPSEEKV32": _indexed,
    "DEEPSEEKV4": _compressed,
    "GEMMA4MIX": _gemma,
    "HYBRIDMOE": _hybrid,
    "STEP3P7": _step,
    "QWEN35": _delta_net,
    "KIMIK3": _kimi_k3,
    "NEMOTRONH": _state_space,
    "NEMOTRONNAS": _nas,
}
