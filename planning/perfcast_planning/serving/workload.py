"""What is asked of a deployment: the requests, the targets, the link between prefill and decode."""

from __future__ import annotations

import math
from dataclasses import dataclass

from perfcast_engine.errors import InvalidField

MAX_TOKENS = 2**31 - 1


def _whole(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MAX_TOKENS:
        raise InvalidField(name, f"must be a whole number from {least}, not {value!r:.40}", why="range")


@dataclass(frozen=True, slots=True)
class Images:
    """Images of a request; without a size the encoder's ``tokens`` apply."""

    height: int = 0
    width: int = 0
    count: int = 0
    tokens: int = 0

    def __post_init__(self) -> None:
        for name in ("height", "width", "count", "tokens"):
            _whole(f"images.{name}", getattr(self, name), 0)

    def __bool__(self) -> bool:
        return self.count > 0 and (self.height > 0 < self.width or self.tokens > 0)


@dataclass(frozen=True, slots=True)
class Workload:
    """Every request alike: ``isl`` prompt tokens, ``prefix`` of them cached, ``osl`` generated tokens."""

    isl: int
    osl: int
    prefix: int = 0
    images: Images = Images()

    def __post_init__(self) -> None:
        _whole("isl", self.isl, 1)
        _whole("osl", self.osl, 1)
        _whole("prefix", self.prefix, 0)
        if self.prefix >= self.isl:
            raise InvalidField("prefix", f"must be smaller than isl ({self.isl}), not {self.prefix}", why="range")


@dataclass(frozen=True, slots=True)
class Targets:
    """Latency limits in ms. ``request_latency_ms`` replaces the TPOT limit, and the TTFT limit where that is None."""

    ttft_ms: float | None = 2000.0
    tpot_ms: float = 30.0
    request_latency_ms: float | None = None

    def __post_init__(self) -> None:
        for name in ("ttft_ms", "tpot_ms", "request_latency_ms"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise InvalidField(name, f"must be positive and finite, not {value!r}", why="range")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """How an engine is set up, where not as its framework does. ``accepted``: draft tokens of a decode step."""

    accepted: float = 0.0
    memory_fraction: float | None = None
    max_seq_len: int | None = None
    max_num_tokens: int | None = None

    def check(self, nextn: int) -> None:
        """Raises InvalidField where more is accepted than the ``nextn`` drafted."""
        if not 0 <= self.accepted <= nextn:
            message = f"must lie in [0, {nextn}] for a draft depth of {nextn}, not {self.accepted!r}"
            raise InvalidField("nextn_accepted", message, why="range")


DEFAULTS = EngineLimits()


@dataclass(frozen=True, slots=True)
class KvTransfer:
    """Hand-over of the uncached prompt's KV cache from prefill to decode, over one link per prefill GPU.

    ``concurrent`` transfers share the link. An infinite bandwidth leaves the hand-over out altogether.
    """

    bandwidth_bytes_s: float = math.inf
    latency_s: float = 0.0
    concurrent: int = 1

    def __post_init__(self) -> None:
        if not self.bandwidth_bytes_s > 0:
            raise InvalidField("kv_transfer.bandwidth_bytes_s", "must be positive", why="range")
        if not 0 <= self.latency_s < math.inf:
            raise InvalidField("kv_transfer.latency_s", "must be finite and not negative", why="range")
        _whole("kv_transfer.concurrent", self.concurrent, 1)

    @property
    def off(self) -> bool:
        return math.isinf(self.bandwidth_bytes_s)

    def ms(self, sent_bytes: float) -> float:
        return 0.0 if self.off else 1000 * (self.latency_s + sent_bytes * self.concurrent / self.bandwidth_bytes_s)

    def requests_per_s(self, sent_bytes: float) -> float:
        """The most hand-overs a link sustains."""
        return math.inf if self.off or sent_bytes <= 0 else self.bandwidth_bytes_s / sent_bytes


NO_TRANSFER = KvTransfer()
