"""Everything a prediction assumed about a deployment, as one immutable object. Specification 08 section 11."""

from __future__ import annotations

import math
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from typing import Any, TypeVar

from perfcast_engine.errors import InvalidField, OutOfMemory, UnsupportedCombination

from perfcast_deploy.catalog import backend_facts, system_facts, transport_facts

NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?$")
OWN_ENV = ("CUDA_VISIBLE_DEVICES", "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT", "HF_HOME")
MAX_COUNT = 2**31 - 1
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Role:
    """One kind of worker. Batch and token limits are per attention-DP rank; tp counts one rank's attention GPUs."""

    name: str
    workers: int
    tp: int = 1
    pp: int = 1
    dp: int = 1
    moe_tp: int = 1
    moe_ep: int = 1
    max_batch: int
    max_tokens: int
    max_seq_len: int
    kv_fraction: float
    kv_dtype: str = "bfloat16"
    chunked_prefill: bool = False
    prefix_caching: bool = False
    cuda_graphs: bool = True
    tokens_per_block: int | None = None
    moe_backend: str | None = None
    moe_all_to_all: str | None = None
    attention_backend: str | None = None

    @property
    def gpus(self) -> int:
        """GPUs of one worker."""
        return self.tp * self.pp * self.dp


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Request shape in tokens; ``prefix`` of ``isl`` is common to all requests."""

    isl: int
    osl: int
    prefix: int = 0


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """What was predicted at ``concurrency`` requests in flight in all, with ``accepted`` draft tokens a step.

    ``basis``: what the predicted engine was asked with, beside what the deployment says, in the words of EngineConfig.
    """

    concurrency: int | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    output_tokens_per_s: float | None = None
    profile: str | None = None
    accepted: float = 0.0
    basis: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Where the deployment runs.

    ``hosts`` name the nodes of plain engine commands, ``gateway`` the URL of llm-d's inference gateway.
    """

    name: str = "perfcast"
    namespace: str | None = None
    image: str | None = None
    pull_secret: str | None = None
    pvc: str | None = None
    pvc_mount: str = "/model-cache"
    transport: str = "nvlink"
    gpus_per_node: int = 8
    hosts: tuple[str, ...] = ()
    gateway: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """A chosen configuration. Invalid combinations raise, naming the field and what would work."""

    model: str
    backend: str
    version: str
    system: str
    roles: tuple[Role, ...]
    workload: Workload
    is_moe: bool = False
    served_name: str = ""
    nextn: int = 0
    router: bool = False
    port: int = 8000
    trust_remote_code: bool = False
    quant: Mapping[str, str] = field(default_factory=dict)
    predicted: Predicted = Predicted()
    cluster: Cluster = Cluster()

    def __post_init__(self) -> None:
        object.__setattr__(self, "served_name", self.served_name or self.model)
        _check(self)

    @property
    def mode(self) -> str:
        """``agg`` or ``disagg``."""
        return "agg" if self.roles[0].name == "agg" else "disagg"

    @property
    def gpus(self) -> int:
        return sum(role.gpus * role.workers for role in self.roles)

    @property
    def concurrency(self) -> int:
        """Requests in flight that the prediction assumed; filled decode batches when it does not say."""
        last = self.roles[-1]
        return self.predicted.concurrency or last.max_batch * last.pp * last.dp * last.workers

    def nodes(self, role: Role) -> int:
        """Nodes that one worker of ``role`` spans."""
        return math.ceil(role.gpus / self.cluster.gpus_per_node)

    def length(self, role: Role) -> int:
        """Tokens that a sequence leaves in the KV cache of ``role``."""
        return self.workload.isl + (0 if role.name == "prefill" else self.workload.osl)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Any) -> Deployment:
        """The inverse of ``to_dict``; refuses unknown and mistyped fields by path."""
        return decode(cls, data, "deployment")


def decode(kind: type[T], data: Any, path: str) -> T:
    """A dataclass from plain data, every value checked against its declared type."""
    if not isinstance(data, Mapping):
        raise InvalidField(path, f"must be a mapping, not {type(data).__name__}", "type")
    hints = typing.get_type_hints(kind)
    known = {item.name: item for item in fields(kind)}  # type: ignore[arg-type]
    for name in map(str, data):
        if name not in known:
            raise InvalidField(f"{path}.{name}", f"unknown field; known: {', '.join(known)}", "unknown")
    for name, item in known.items():
        if name not in data and item.default is MISSING and item.default_factory is MISSING:
            raise InvalidField(f"{path}.{name}", "is required", "missing")
    return kind(**{name: _value(hints[name], value, f"{path}.{name}") for name, value in data.items()})


def _value(hint: Any, value: Any, path: str) -> Any:
    arguments, origin, plain = typing.get_args(hint), typing.get_origin(hint), not isinstance(value, bool)
    if origin is types.UnionType:
        return None if value is None else _value(arguments[0], value, path)
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_value(arguments[0], item, f"{path}[{i}]") for i, item in enumerate(value))
    if origin is Mapping and isinstance(value, Mapping):
        return {name: _value(arguments[1], item, f"{path}.{name}") for name, item in value.items()}
    if is_dataclass(hint):
        return decode(typing.cast(type[Any], hint), value, path)
    if hint is float and isinstance(value, int | float) and plain:
        return float(value)
    if isinstance(hint, type) and isinstance(value, hint) and (plain or hint is bool):
        return value
    raise InvalidField(path, f"must be {getattr(origin or hint, '__name__', hint)}, not {value!r:.60}", "type")


def _check(d: Deployment) -> None:
    backend_facts(d.backend), system_facts(d.system), transport_facts(d.cluster.transport)
    names = tuple(role.name for role in d.roles)
    if names not in (("agg",), ("prefill", "decode")):
        raise InvalidField("roles", f"must be (agg) or (prefill, decode), not ({', '.join(names)})", "roles")
    if not d.model or any(c.isspace() for c in d.model + d.served_name) or (d.model + d.served_name).startswith("-"):
        raise InvalidField("model", "must be a model id or path without spaces", "empty")
    for name, text in (("cluster.name", d.cluster.name), ("cluster.namespace", d.cluster.namespace)):
        if text is not None and (not NAME.match(text) or len(text) > 45):
            raise InvalidField(name, f"{text!r} is no Kubernetes name: lower case, digits, dashes, at most 45", "name")
    taken = sorted(set(d.cluster.env) & set(OWN_ENV))
    if taken:
        raise InvalidField(f"cluster.env.{taken[0]}", "is set by the generated files themselves; leave it out", "owned")
    _positive("workload", d.workload, "isl", "osl")
    _positive("cluster", d.cluster, "gpus_per_node")
    if not 0 <= d.workload.prefix < d.workload.isl:
        raise InvalidField("workload.prefix", f"must be 0..{d.workload.isl - 1} (below isl)", "range")
    if not 1 <= d.port <= 65535 or d.nextn < 0:
        raise InvalidField("port" if d.nextn >= 0 else "nextn", "out of range", "range")
    for name, value in asdict(d.predicted).items():
        if isinstance(value, int | float) and not (math.isfinite(value) and (value > 0 or name == "accepted")):
            raise InvalidField(f"predicted.{name}", f"{value} is not a positive finite number", "range")
    for role in d.roles:
        _check_role(d, role)


def _check_role(d: Deployment, role: Role) -> None:
    path = f"roles.{role.name}"
    _positive(path, role, *(item.name for item in fields(role) if item.type == "int"))
    if not 0 < role.kv_fraction < 1:
        raise InvalidField(f"{path}.kv_fraction", f"{role.kv_fraction} is not between 0 and 1", "range")
    if role.max_seq_len < (needed := d.workload.isl + d.workload.osl):
        raise InvalidField(f"{path}.max_seq_len", f"{role.max_seq_len} is below isl + osl = {needed}", "range")
    wide, experts = role.tp * role.dp, role.moe_tp * role.moe_ep
    if experts != (wide if d.is_moe else 1):
        rule = "moe_tp * moe_ep must equal tp * dp" if d.is_moe else "a dense model has moe_tp = moe_ep = 1"
        raise InvalidField(f"{path}.moe_ep", f"{rule} (tp {role.tp}, dp {role.dp}, moe_tp {role.moe_tp})", "parallel")
    if d.backend == "vllm" and role.moe_tp > 1 and role.moe_ep > 1:
        words = "vLLM shards experts either by tensor or by expert; set one to 1"
        raise UnsupportedCombination(f"{path}.moe_tp", words)
    if d.backend == "trtllm" and role.dp > 1 and (role.tp > 1 or not d.is_moe):
        words = "TRT-LLM attention DP gives every GPU its own rank; use tp = 1, MoE only"
        raise UnsupportedCombination(f"{path}.dp", words)
    if role.gpus % d.nodes(role):
        raise InvalidField(f"{path}.tp", f"{role.gpus} GPUs do not divide over {d.nodes(role)} nodes", "nodes")


def _positive(path: str, owner: object, *names: str) -> None:
    for name in names:
        if not 1 <= (value := getattr(owner, name)) <= MAX_COUNT:
            raise InvalidField(f"{path}.{name}", f"must be from 1 to {MAX_COUNT}, not {value}", "range")


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known of the model and its memory; None or absent means unknown and is not checked."""

    num_heads: int | None = None
    num_layers: int | None = None
    num_experts: int | None = None
    max_context_tokens: int | None = None
    kv_capacity_tokens: Mapping[str, int] = field(default_factory=dict)

    def check(self, d: Deployment) -> None:
        """Refuse a deployment that the model cannot be split for, or whose sequences its KV cache does not hold."""
        if self.num_experts is not None and (self.num_experts > 1) != d.is_moe:
            raise InvalidField("is_moe", f"is {d.is_moe}, but the model has {self.num_experts} experts", "model")
        for role in d.roles:
            path, context = f"roles.{role.name}", self.max_context_tokens
            for name, size, count in (("tp", role.tp, self.num_heads), ("moe_ep", role.moe_ep, self.num_experts)):
                if count and count % size:
                    raise InvalidField(f"{path}.{name}", f"{size} does not divide the model's {count}", "model")
            if self.num_layers and role.pp > self.num_layers:
                raise InvalidField(f"{path}.pp", f"{role.pp} stages for {self.num_layers} layers", "model")
            if context and role.max_seq_len > context:
                words = f"{role.max_seq_len} exceeds the model's context of {context}"
                raise InvalidField(f"{path}.max_seq_len", words, "model")
            held = self.held(d, role)
            if held is not None and role.max_batch > held:
                words = f"{role.name}: the KV cache holds {held} of {role.max_batch} sequences"
                raise OutOfMemory(words, field=f"{path}.max_batch")

    def held(self, d: Deployment, role: Role) -> int | None:
        """Sequences of nominal length that the KV cache of ``role`` holds; None where that is not known."""
        capacity = self.kv_capacity_tokens.get(role.name)
        return None if capacity is None else capacity // d.length(role)
