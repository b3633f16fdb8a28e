"""What is changed between the prediction and the files, each change with its reason. Specification 08 section 11.4."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from perfcast_engine.errors import Reason, UnknownName, UnsupportedCombination

from perfcast_deploy.catalog import model_flags, release_of, system_facts, transport_facts
from perfcast_deploy.deployment import Cluster, Deployment, Role
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
class Step:
    """``field`` of the named roles becomes ``value(d, role)``, for the named backends."""

    field: str
    backends: str
    roles: str
    value: Callable[[Deployment, Role], int]
    reason: str


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
    Step("max_batch", "vllm sglang", "agg decode", _burst, "admit bursts beyond the predicted batch"),
    Step("max_seq_len", ANY, ALL, lambda d, r: max(r.max_seq_len, _length(d) + 1500),
         "requests longer than predicted"),
    Step("max_tokens", ANY, "agg prefill", _beside_decodes, "prompts longer than predicted beside a full decode batch"),
    Step("max_tokens", ANY, "decode", lambda d, r: max(r.max_tokens, r.max_batch * (d.nextn + 1)),
         "a full decode batch in one step"),
)
ENGINE = (  # without these the engine refuses to start, or refuses the benchmark's requests
    Step("max_seq_len", ANY, ALL, lambda d, r: max(r.max_seq_len, _length(d) + slack(d)),
         "room for chat template and re-encoding"),
    Step("max_tokens", "trtllm", "agg prefill", lambda d, r: _unchunked(r, d.workload.isl + slack(d)),
         "TRT-LLM refuses prompts above the token budget when chunking is off"),
    Step("chunked_prefill", "vllm", "decode", lambda d, r: r.chunked_prefill or r.max_tokens < r.max_seq_len,
         "decode workers run no prefill; vLLM refuses a budget below the longest sequence when chunking is off"),
    Step("max_tokens", "vllm", ALL, lambda d, r: _unchunked(r, r.max_seq_len),
         "vLLM refuses a token budget below the longest sequence when chunking is off"),
    Step("max_tokens", "vllm", ALL, lambda d, r: max(r.max_tokens, r.max_batch),
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
    # the benchmark visits the predicted point whatever the limits become
    work = _Work(replace(d, predicted=replace(d.predicted, concurrency=d.concurrency)))
    _fit_cluster(work, target)
    _fit_model(work)
    _fit_target(work, target)
    longest = Step(
        "max_seq_len", ANY, ALL, lambda d, r: min(r.max_seq_len, context or r.max_seq_len), "the model's context"
    )
    first, *engine = ENGINE
    for step in (*(HEADROOM if policy == "headroom" else ()), first, longest, *engine):
        for role in work.d.roles:
            if d.backend in step.backends.split() and role.name in step.roles.split():
                work.set_of_role(role, step.field, step.value(work.d, role), step.reason)
    return work.d, work.changes


class _Work:
    """A deployment under change, and the changes so far."""

    def __init__(self, d: Deployment) -> None:
        self.d = d
        self._told: dict[str, Change] = {}

    @property
    def changes(self) -> tuple[Change, ...]:
        return tuple(change for change in self._told.values() if change.predicted != change.deployed)

    def set(self, name: str, value: Any, reason: str) -> None:
        """Set a field of the deployment."""
        self._tell(name, getattr(self.d, name), value, reason)
        self.d = replace(self.d, **{name: value})

    def set_of_role(self, role: Role, name: str, value: Any, reason: str) -> None:
        self._tell(f"roles.{role.name}.{name}", getattr(role, name), value, reason)
        roles = tuple(replace(r, **{name: value}) if r.name == role.name else r for r in self.d.roles)
        self.d = replace(self.d, roles=roles)

    def _tell(self, path: str, old: Any, new: Any, reason: str) -> None:
        """Several changes of one field are one, with the last reason."""
        if old != new:
            first = self._told.get(path)
            self._told[path] = Change(path, first.predicted if first else old, new, reason)

    def leave_out(self, name: str, target: str) -> None:
        """Give a field of the cluster its default."""
        default = asdict(Cluster())[name]
        self._tell(f"cluster.{name}", getattr(self.d.cluster, name), default, f"target {target} has no place for it")
        self.set_cluster(**{name: default})

    def set_cluster(self, **fields: Any) -> None:
        """Another spelling of the same cluster."""
        self.d = replace(self.d, cluster=replace(self.d.cluster, **fields))


def _fit_cluster(work: _Work, target: str) -> None:
    for name in asdict(work.d.cluster):
        if name not in CLUSTER_FIELDS[target]:
            work.leave_out(name, target)
    cluster = work.d.cluster
    if not cluster.pvc:
        work.set_cluster(pvc_mount=Cluster().pvc_mount)
    given = system_facts(work.d.system)["env"] | transport_facts(cluster.transport)["env"]
    work.set_cluster(env={name: value for name, value in cluster.env.items() if given.get(name) != value})


def _fit_model(work: _Work) -> None:
    """Settings that the checkpoint needs on its engine, where the deployment leaves them open."""
    reason, grace = "the checkpoint needs it", system_facts(work.d.system)["grace"]
    for role in work.d.roles:
        needs = params_of(work.d.backend, model_flags(work.d.backend, work.d.model, role.name, grace))
        work.set_of_role(role, "tokens_per_block", role.tokens_per_block or needs.get("tokens_per_block"), reason)
        if needs.get("trust_remote_code"):
            work.set("trust_remote_code", True, reason)


def _fit_target(work: _Work, target: str) -> None:
    d, runtime = work.d, target in ("dynamo", "fpm")
    if target == "engine" and d.backend == "trtllm" and d.served_name != d.model:
        raise UnsupportedCombination(
            "served_name", "trtllm-serve names the model itself; leave it unset or use target dynamo"
        )
    if runtime and not d.cluster.image:
        version = release_of(d.backend, d.version)[1]
        work.set("version", version, "the engine in the Dynamo release that is deployed")
    if work.d.cluster.image == default_image(work.d, runtime):
        work.set_cluster(image=None)
    if target in ("llm-d-kustomize", "fpm"):
        work.set("port", 8000, f"target {target} has no place for it")
    alone = target == "engine" and d.mode == "agg" and d.roles[0].workers == 1
    if alone or target == "fpm" or (target == "llm-d-helm" and d.backend == "sglang"):
        work.set("router", False, "one worker needs no router" if alone else f"target {target} has none")
    if target == "fpm":
        for role in d.roles:
            work.set_of_role(role, "workers", 1, "one worker is timed")
