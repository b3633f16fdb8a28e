"""What is changed between the prediction and the files, each change with its reason. Specification 08 section 11.4."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from perfcast_engine.errors import Reason, UnknownName, UnsupportedCombination

from perfcast_deploy.catalog import model_flags, release_of, system_facts, transport_facts
from perfcast_deploy.deployment import MAX_COUNT, Cluster, Deployment, Role
from perfcast_deploy.describe import TARGETS
from perfcast_deploy.flags import params_of
from perfcast_deploy.plan import default_image
from perfcast_deploy.settings import round_up

POLICIES = ("as_predicted", "headroom")
OBJECTS = ("name", "namespace", "image", "pull_secret", "pvc", "pvc_mount", "env", "transport", "gpus_per_node")
CLUSTER_FIELDS = {  # what a target has a place for; the rest falls back to its default
    "engine": ("hosts", "env", "transport", "gpus_per_node"),
    "dynamo": OBJECTS,
    "llm-d-helm": ("image", "env", "gateway", "transport", "gpus_per_node"),
    "llm-d-kustomize": ("name", "namespace", "image", "env", "gateway", "transport", "gpus_per_node"),
    "fpm": OBJECTS,
}


@dataclass(frozen=True)
class Change:
    """One value that differs from the prediction."""

    field: str
    predicted: Any
    deployed: Any
    reason: str


@dataclass(frozen=True)
class Limit:
    """``field`` of the named roles becomes ``value(d, role)``, for the named backends."""

    field: str
    backends: str
    roles: str
    value: Callable[[Deployment, Role], int]
    reason: str

    def set(self, d: Deployment) -> Deployment:
        if d.backend not in self.backends.split():
            return d
        return _with_roles(d, lambda r: {self.field: self.value(d, r)} if r.name in self.roles.split() else {})


def _with_roles(d: Deployment, fields: Callable[[Role], dict[str, Any]]) -> Deployment:
    return replace(d, roles=tuple(replace(role, **fields(role)) for role in d.roles))


def slack(d: Deployment) -> int:
    """Tokens a request may exceed its nominal length by: chat template, special tokens, re-encoding of random text."""
    return max(256, d.workload.isl // 20)


def _length(d: Deployment) -> int:
    return d.workload.isl + d.workload.osl


def _burst(d: Deployment, r: Role) -> int:
    return 512 if r.max_batch < 512 else 2 * r.max_batch


def _beside_decodes(d: Deployment, r: Role) -> int:
    return max(r.max_tokens, round_up(d.workload.isl + 1500 + (r.max_batch if r.name == "agg" else 0), 32))


def _unchunked(r: Role, least: int) -> int:
    return r.max_tokens if r.chunked_prefill else max(r.max_tokens, least)


ALL, ANY = "agg prefill decode", "vllm sglang trtllm"
# fmt: off
HEADROOM = (
    Limit("max_batch", "vllm sglang", "agg decode", _burst, "admit bursts beyond the predicted batch"),
    Limit("max_seq_len", ANY, ALL, lambda d, r: max(r.max_seq_len, _length(d) + 1500),
          "requests longer than predicted"),
    Limit("max_tokens", ANY, "agg prefill", _beside_decodes,
          "prompts longer than predicted beside a full decode batch"),
    Limit("max_tokens", ANY, "decode", lambda d, r: max(r.max_tokens, r.max_batch * (d.nextn + 1)),
          "a full decode batch in one step"),
)
ENGINE = (  # without these the engine refuses to start, or refuses the benchmark's requests
    Limit("max_seq_len", ANY, ALL, lambda d, r: max(r.max_seq_len, _length(d) + slack(d)),
          "room for chat template and re-encoding"),
    Limit("max_tokens", "trtllm", "agg prefill", lambda d, r: _unchunked(r, d.workload.isl + slack(d)),
          "TRT-LLM refuses prompts above the token budget when chunking is off"),
    Limit("chunked_prefill", "vllm", "decode", lambda d, r: r.chunked_prefill or r.max_tokens < r.max_seq_len,
          "decode workers run no prefill; vLLM refuses a budget below the longest sequence when chunking is off"),
    Limit("max_tokens", "vllm", ALL, lambda d, r: _unchunked(r, r.max_seq_len),
          "vLLM refuses a token budget below the longest sequence when chunking is off"),
    Limit("max_tokens", "vllm", ALL, lambda d, r: max(r.max_tokens, r.max_batch),
          "vLLM needs a token for each sequence"),
)
# fmt: on


def apply(d: Deployment, target: str, policy: str, context: int | None = None) -> tuple[Deployment, tuple[Change, ...]]:
    """The deployment as it will be written, and what was changed for it.

    ``context``: the model's longest sequence, which no policy exceeds.
    """
    for kind, name, known in (("target", target, TARGETS), ("policy", policy, POLICIES)):
        if name not in known:
            raise UnknownName(kind, name, known, Reason.INVALID_FIELD)
    if target == "engine" and d.backend == "trtllm" and d.served_name != d.model:
        words = "trtllm-serve names the model itself; leave it unset or use target dynamo"
        raise UnsupportedCombination("served_name", words)
    first, *engine = ENGINE
    longest = context or MAX_COUNT
    within = Limit("max_seq_len", ANY, ALL, lambda d, r: min(r.max_seq_len, longest), "the model's context")
    limits = (*(HEADROOM if policy == "headroom" else ()), first, within, *engine)
    # the benchmark visits the predicted point whatever the limits become
    d = replace(d, predicted=replace(d.predicted, concurrency=d.concurrency))
    told: dict[str, Change] = {}
    for reason, step in (*_steps(d, target), *((limit.reason, limit.set) for limit in limits)):
        old, new = _leaves(d), _leaves(d := step(d))
        for path in (path for path in old if reason and old[path] != new[path]):
            predicted = told[path].predicted if path in told else old[path]
            told[path] = Change(path, predicted, new[path], reason)
    return d, tuple(change for change in told.values() if change.predicted != change.deployed)


def _leaves(d: Deployment) -> dict[str, Any]:
    """Every field by its path."""
    leaves = d.to_dict()
    parts = {"cluster": leaves.pop("cluster")} | {f"roles.{role['name']}": role for role in leaves.pop("roles")}
    return leaves | {f"{path}.{name}": value for path, part in parts.items() for name, value in part.items()}


def _steps(d: Deployment, target: str) -> Iterator[tuple[str, Callable[[Deployment], Deployment]]]:
    """What a target makes of a deployment before its limits are set, by the reason; none for another spelling."""
    placeless, runtime = f"target {target} has no place for it", target in ("dynamo", "fpm")
    default = vars(Cluster())
    left_out = {name: default[name] for name in default if name not in CLUSTER_FIELDS[target]}
    yield placeless, lambda d: replace(d, cluster=replace(d.cluster, **left_out))
    yield "", _plain_cluster
    yield "the checkpoint needs it", _with_model_needs
    if runtime and not d.cluster.image:
        shipped = release_of(d.backend, d.version)[1]
        yield "the engine in the Dynamo release that is deployed", lambda d: replace(d, version=shipped)
    yield "", lambda d: _without_usual_image(d, runtime)
    if target in ("llm-d-kustomize", "fpm"):
        yield placeless, lambda d: replace(d, port=8000)
    if target == "engine" and d.mode == "agg" and d.roles[0].workers == 1:
        yield "one worker needs no router", lambda d: replace(d, router=False)
    if target == "fpm" or (target == "llm-d-helm" and d.backend == "sglang"):
        yield f"target {target} has none", lambda d: replace(d, router=False)
    if target == "fpm":
        yield "one worker is timed", lambda d: _with_roles(d, lambda role: {"workers": 1})


def _plain_cluster(d: Deployment) -> Deployment:
    """Without what says nothing: a mount without a volume, environment that the system has anyway."""
    given = system_facts(d.system)["env"] | transport_facts(d.cluster.transport)["env"]
    env = {name: value for name, value in d.cluster.env.items() if given.get(name) != value}
    mount = d.cluster.pvc_mount if d.cluster.pvc else Cluster().pvc_mount
    return replace(d, cluster=replace(d.cluster, env=env, pvc_mount=mount))


def _without_usual_image(d: Deployment, runtime: bool) -> Deployment:
    usual = d.cluster.image is not None and d.cluster.image == default_image(d, runtime)
    return replace(d, cluster=replace(d.cluster, image=None)) if usual else d


def _with_model_needs(d: Deployment) -> Deployment:
    """Settings that the checkpoint needs on its engine, where the deployment leaves them open."""
    grace = system_facts(d.system)["grace"]
    needs = {r.name: params_of(d.backend, model_flags(d.backend, d.model, r.name, grace)) for r in d.roles}
    trusted = d.trust_remote_code or any(own.get("trust_remote_code") for own in needs.values())
    d = _with_roles(d, lambda r: {"tokens_per_block": r.tokens_per_block or needs[r.name].get("tokens_per_block")})
    return replace(d, trust_remote_code=trusted)
