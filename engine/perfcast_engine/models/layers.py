"""The kinds of layers of a model: how many of each and how wide, on one GPU (spec/05 7, 9)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from perfcast_engine.models.deployment import Deployment
from perfcast_engine.models.spec import Runs
from perfcast_engine.profiles import EVERY_SECOND_GLOBAL, ONE_IS_GLOBAL

# architecture -> window of every second layer
ALTERNATING_WINDOW = {"GptOssForCausalLM": 128}
# architectures whose published pattern says 1 for a sliding layer
ONE_IS_SLIDING = frozenset({"MiMoV2FlashForCausalLM"})
SWAPPED = str.maketrans("GS", "SG")
NAS_HEAD_DIM = 128  # what the attention kernel of Nemotron-NAS is asked for
NAS_ROUNDING = 256  # FFN widths of Nemotron-NAS are multiples of this


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Equal layers: how many, what their operators are called, and their widths. KV heads are those on one GPU, query
    heads those of the model; ``v`` is the width of a value head; ``ffn`` the width of a dense FFN."""

    count: float = 1.0
    prefix: str = ""
    heads: int = 0
    kv_heads: int = 0
    qk: int = 0
    v: int = 0
    window: int = 0
    ffn: int = 0
    kernel_dim: int = 0  # head width that the attention kernel is asked for, where it is not qk
    keys_are_values: bool = False
    gated_q: bool = False  # queries carry a gate of their width
    qk_norm: bool = False
    quantised: bool = True  # whether the inputs of the output projections arrive quantised
    parts: tuple[str, str] = ("", "")  # of attention and FFN, whose gemm modes a checkpoint may keep apart
    attention_share: float = 1.0  # of the layers whose attention this describes; their other parts are all of them
    repeated: bool = True  # false for what a pass does once


Layers = Callable[[Deployment], list[Layer]]


def once(d: Deployment) -> list[Layer]:
    """What a pass does once, whatever its layers."""
    return [Layer(repeated=False)]


def both_sublayers(d: Deployment) -> list[Layer]:
    """Attention and FFN of all layers counted apart."""
    return [Layer(count=2 * d.spec.layers)]


def dense_layer(d: Deployment, count: int) -> Layer:
    """``count`` layers of the widths that the top of the configuration states."""
    spec, dim = d.spec, d.spec.head_dim
    layer = Layer(count=count, heads=spec.heads, kv_heads=d.kv_heads, qk=dim, v=dim)
    return replace(layer, ffn=spec.inter, qk_norm=spec.qk_norm)


def whole(d: Deployment) -> list[Layer]:
    """All layers alike; where every second one attends inside a window, the half that does not."""
    layer = dense_layer(d, d.spec.layers)
    return [replace(layer, attention_share=0.5) if d.spec.arch in ALTERNATING_WINDOW else layer]


def windowed_half(d: Deployment) -> list[Layer]:
    window = ALTERNATING_WINDOW.get(d.spec.arch)
    return [replace(layer, window=window) for layer in whole(d)] if window else []


def layer_runs(d: Deployment) -> Runs:
    """The layer pattern as the profile reads it."""
    runs, every = d.spec.x.layer_runs, d.spec.x.global_every
    if every and not d.profile[EVERY_SECOND_GLOBAL]:
        ffn = [kind[1] for kind, n in runs for _ in range(n)]
        return tuple((("S" if (i + 1) % every else "G") + kind, 1) for i, kind in enumerate(ffn))
    if d.spec.arch in ONE_IS_SLIDING and not d.profile[ONE_IS_GLOBAL]:
        return tuple((kind.translate(SWAPPED), n) for kind, n in runs)
    return runs


def counted(d: Deployment) -> Counter[str]:
    counts: Counter[str] = Counter()
    for kind, n in layer_runs(d):
        counts[kind] += n
    return counts


def linear(d: Deployment) -> list[Layer]:
    n = counted(d)["L"]
    return [replace(dense_layer(d, n), parts=("projection", "dense_ffn"))] if n else []


def full(d: Deployment) -> list[Layer]:
    """Full-attention layers beside linear ones; their queries are gated."""
    n = counted(d)["F"]
    layer = replace(dense_layer(d, n), gated_q=True, qk_norm=True, parts=("projection", "dense_ffn"))
    return [layer] if n else []


def of_block(letter: str) -> Layers:
    """The layers of one letter of a Nemotron-H pattern."""

    def select(d: Deployment) -> list[Layer]:
        n = d.spec.x.hybrid_override_pattern.count(letter)
        return [dense_layer(d, n)] if n else []

    return select


def global_and_sliding(d: Deployment) -> tuple[Layer, Layer]:
    """Widths of a global and of a sliding layer of a hybrid MoE model; counts are left at one."""
    spec, x = d.spec, d.spec.x
    ffn = x.dense_inter_size or spec.inter
    own = Layer(
        prefix="global_",
        heads=spec.heads,
        kv_heads=d.kv_heads,
        qk=spec.head_dim,
        v=x.global_v_head_dim or spec.head_dim,
        ffn=ffn,
        qk_norm=x.use_qk_norm,
    )
    sliding = Layer(
        prefix="swa_",
        heads=x.swa_num_heads or spec.heads,
        kv_heads=-(-(x.swa_num_kv_heads or spec.kv_heads) // d.tp),
        qk=x.swa_head_dim or spec.head_dim,
        v=x.swa_v_head_dim or spec.head_dim,
        window=x.sliding_window_size,
        ffn=ffn,
        qk_norm=x.use_qk_norm,
    )
    return own, sliding


def hybrid(kind: str) -> Layers:
    """Layers of a hybrid MoE model: G(lobal) or S(liding), m(ixture) or d(ense)."""

    def select(d: Deployment) -> list[Layer]:
        n = counted(d)[kind]
        layer = global_and_sliding(d)["GS".index(kind[0])]
        prefix = layer.prefix + ("dense_" if kind[1] == "d" else "")
        return [replace(layer, count=n, prefix=prefix)] if n else []

    return select


def hybrid_attention(d: Deployment) -> list[Layer]:
    """The same layers by their attention only: global ones, then sliding ones."""
    counts = counted(d)
    layers = zip("GS", global_and_sliding(d), strict=True)
    sized = [(sum(n for kind, n in counts.items() if kind[0] == letter), layer) for letter, layer in layers]
    return [replace(layer, count=n) for n, layer in sized if n]


def shared_expert_tail(d: Deployment) -> list[Layer]:
    """Step lists the shared expert of all MoE layers by itself."""
    width, n = d.spec.x.share_expert_dim, d.spec.count("m")
    return [Layer(count=n, prefix="shared_expert_dense_", ffn=width)] if width and n else []


def gemma(letter: str) -> Layers:
    """Sliding (S) or full (F) layers of Gemma 4."""

    def select(d: Deployment) -> list[Layer]:
        x, n = d.spec.x, counted(d)[letter]
        if letter == "S":
            kv, dim = x.swa_num_kv_heads, x.swa_head_dim
        else:
            kv, dim = x.global_num_kv_heads or x.swa_num_kv_heads, x.global_head_dim or x.swa_head_dim
        layer = Layer(
            count=n,
            prefix="swa_" if letter == "S" else "global_",
            heads=d.spec.heads,
            kv_heads=-(-kv // d.tp),
            qk=dim,
            v=dim,
            window=x.sliding_window_size if letter == "S" else 0,
            ffn=d.spec.inter,
            keys_are_values=letter == "F" and x.attention_k_eq_v,
            parts=("attn", "mlp"),
        )
        return [layer] if n else []

    return select


def gemma_attention(d: Deployment) -> list[Layer]:
    return gemma("S")(d) + gemma("F")(d)


def leading_dense(d: Deployment) -> list[Layer]:
    """The first layers of Kimi K3, whose FFN is dense."""
    n = d.spec.x.first_k_dense_replace
    return [Layer(count=n, prefix="dense_", ffn=d.spec.x.dense_inter_size)] if n else []


def after_dense(d: Deployment) -> list[Layer]:
    return [Layer(count=d.spec.layers - d.spec.x.first_k_dense_replace)]


def nas_blocks(d: Deployment) -> list[Layer]:
    """Runs of equal Nemotron-NAS blocks; no heads where there is no attention, no ffn where there is none."""
    spec = d.spec
    out = []
    for run in spec.x.blocks:
        width = 0 if run.no_ffn else int(2 * run.mult * spec.hidden / 3)
        out.append(
            Layer(
                count=run.n,
                heads=0 if run.no_attn else spec.heads,
                kv_heads=0 if run.no_attn else -(-(spec.heads // run.group) // d.tp),
                qk=spec.head_dim,
                v=spec.head_dim,
                kernel_dim=NAS_HEAD_DIM,
                quantised=False,
                ffn=-(-width // NAS_ROUNDING) * NAS_ROUNDING,
            )
        )
    return out


SELECTORS = (
    *(once, whole, windowed_half, both_sublayers, linear, full, leading_dense, after_dense),
    *(hybrid_attention, gemma_attention, shared_expert_tail, nas_blocks),
)
