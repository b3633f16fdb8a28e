"""What is changed between the prediction and the files, each change with its reason. Specification 08 section 11.4."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from perfcast_engine.errors import Reason, UnknownName, UnsupportedCombination

from perfcast_deploy.catalog import model_flags, release_of, system_facts, transport_facts
from perfcast_deploy.deployment import Cluster, Deployment, Role
from perfcast_deploy.describe import TARGETS
from perfcast_deploy.flags import params_of
from perfcast_deploy.plan import default_image, round_up

POLICIES = ("as_predicted", "headroom")
CLUSTER_FIELDS = {  # what a target has a place for; the rest falls back to its default
    "engine": ("hosts", "env"),
    "dynamo": ("name", "namespace", "image", "pull_secret", "pvc", "pvc_mount", "env"),
    "llm-d-helm": ("image", "env", "gateway"),
    "llm-d-kustomize": ("name", "namespace", "image", "env", "gateway"),
    "fpm": ("name", "namespace", "image", "pull_secret", "pvc", "pvc_mount", "env"),
}
ALWAYS = ("transport", "gpus_per_node")


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


def _nominal(d: Deployment) -> int:
    return d.workload.isl + d.workload.osl


ALL, ANY = "agg prefill decode", "vllm sglang trtllm"
HEADROOM = (
    Step(
        "max_batch",
        "vllm sglang",
        "agg decode",
        lambda d, r: 512 if r.max_batch < 512 else 2 * r.max_batch,
        "admit bursts beyond the predicted batch",
    ),
    Step(
        "max_seq_len", ANY, ALL, lambda d, r: max(r.max_seq_len, _nominal(d) + 1500), "requests longer than predicted"
    ),
    Step(
        "max_tokens",
        ANY,
        "agg prefill",
        lambda d, r: max(r.max_tokens, round_up(d.workload.isl + 1500 + (r.max_batch if r.name == "agg" else 0), 32)),
        "prompts longer than predicted beside a full decode batch",
    ),
    Step(
        "max_tokens",
        ANY,
        "decode",
        lambda d, r: max(r.max_tokens, r.max_batch * (d.nextn + 1)),
        "a full decode batch in one step",
    ),
)
ENGINE = (  # without these the engine refuses to start, or refuses the benchmark's requests
    Step(
        "max_seq_len",
        ANY,
        ALL,
        lambda d, r: max(r.max_seq_len, _nominal(d) + slack(d)),
        "room for chat template and re-encoding",
    ),
    Step(
        "max_tokens",
        "trtllm",
        "agg prefill",
        lambda d, r: r.max_tokens if r.chunked_prefill else max(r.max_tokens, d.workload.isl + slack(d)),
        "TRT-LLM refuses prompts above the token budget when chunking is off",
    ),
    Step(
        "chunked_prefill",
        "vllm",
        "decode",
        lambda d, r: r.chunked_prefill or r.max_tokens < r.max_seq_len,
        "decode workers run no prefill; vLLM refuses a budget below the longest sequence when chunking is off",
    ),
    Step(
        "max_tokens",
        "vllm",
        ALL,
        lambda d, r: r.max_tokens if r.chunked_prefill else max(r.max_tokens, r.max_seq_len),
        "vLLM refuses a token budget below the longest sequence when chunking is off",
    ),
    Step(
        "max_tokens", "vllm", ALL, lambda d, r: max(r.max_tokens, r.max_batch), "vLLM needs a token for each sequence"
    ),
)


def apply(d: Deployment, target: str, policy: str, context: int | None = None) -> tuple[Deployment, tuple[Change, ...]]:
    """The deployment as it will be written, and what was changed for it.

    ``context``: the model's longest sequence, which no policy exceeds.
    """
    if target not in TARGETS:
        raise UnknownName("target", target, TARGETS, Reason.INVALID_FIELD)
    if policy not in POLICIES:
        raise UnknownName("policy", policy, POLICIES, Reason.INVALID_FIELD)
    changes: list[Change] = []
    # the benchmark visits the predicted point whatever the limits become
    deployed = replace(d, predicted=replace(d.predicted, concurrency=d.concurrency))
    deployed = _fit_target(deployed, target, changes)
    longest = Step(
        "max_seq_len", ANY, ALL, lambda d, r: min(r.max_seq_len, context or r.max_seq_len), "the model's context"
    )
    first, *engine = ENGINE
    for step in (*(HEADROOM if policy == "headroom" else ()), first, longest, *engine):
        deployed = _take(deployed, step, changes)
    return deployed, _merged(changes)


def _take(d: Deployment, step: Step, changes: list[Change]) -> Deployment:
    roles = []
    for role in d.roles:
        if d.backend in step.backends.split() and role.name in step.roles.split():
            old, new = getattr(role, step.field), step.value(d, role)
            if new != old:
                changes.append(Change(f"roles.{role.name}.{step.field}", old, new, step.reason))
                update: dict[str, Any] = {step.field: new}
                role = replace(role, **update)
        roles.append(role)
    return replace(d, roles=tuple(roles))


def _merged(changes: list[Change]) -> tuple[Change, ...]:
    """Several changes of one field as one, with the last reason."""
    merged: dict[str, Change] = {}
    for change in changes:
        first = merged.get(change.field)
        merged[change.field] = replace(change, predicted=first.predicted) if first else change
    return tuple(change for change in merged.values() if change.predicted != change.deployed)


def _fit_target(d: Deployment, target: str, changes: list[Change]) -> Deployment:
    def become(name: str, old: Any, new: Any, reason: str) -> Any:
        if old != new:
            changes.append(Change(name, old, new, reason))
        return new

    default, given = asdict(Cluster()), asdict(d.cluster)
    lost = [name for name in given if name not in (*CLUSTER_FIELDS[target], *ALWAYS)]
    for name in lost:
        become(f"cluster.{name}", given[name], default[name], f"target {target} has no place for it")
    cluster = replace(d.cluster, **{name: default[name] for name in lost})
    if not cluster.pvc:
        cluster = replace(cluster, pvc_mount=default["pvc_mount"])
    facts = system_facts(d.system)
    given_env = facts["env"] | transport_facts(cluster.transport)["env"]
    cluster = replace(cluster, env={key: value for key, value in cluster.env.items() if given_env.get(key) != value})
    d = _with_model_needs(replace(d, cluster=cluster), facts["grace"], become)
    if target == "engine" and d.backend == "trtllm" and d.served_name != d.model:
        raise UnsupportedCombination(
            "served_name", "trtllm-serve names the model itself; leave it unset or use target dynamo"
        )
    if target in ("dynamo", "fpm") and not cluster.image:
        _, version = release_of(d.backend, d.version)
        d = replace(
            d, version=become("version", d.version, version, "the engine in the Dynamo release that is deployed")
        )
    if cluster.image and cluster.image == default_image(d, target in ("dynamo", "fpm")):
        d = replace(d, cluster=replace(cluster, image=None))
    if target in ("llm-d-kustomize", "fpm"):
        d = replace(d, port=become("port", d.port, 8000, f"target {target} has no place for it"))
    alone = target == "engine" and d.mode == "agg" and d.roles[0].workers == 1
    if d.router and (alone or target == "fpm" or (target == "llm-d-helm" and d.backend == "sglang")):
        d = replace(
            d,
            router=become(
                "router", True, False, "one worker needs no router" if alone else f"target {target} has none"
            ),
        )
    if target == "fpm":
        roles = tuple(
            replace(role, workers=become(f"roles.{role.name}.workers", role.workers, 1, "one worker is timed"))
            for role in d.roles
        )
        d = replace(d, roles=roles)
    return d


def _with_model_needs(d: Deployment, grace: bool, become: Callable[..., Any]) -> Deployment:
    """Settings that the checkpoint needs on its engine, where the deployment leaves them open."""
    reason, roles = "the checkpoint needs it", []
    for role in d.roles:
        needs = params_of(d.backend, model_flags(d.backend, d.model, role.name, grace))
        block = role.tokens_per_block or needs.get("tokens_per_block")
        roles.append(
            replace(
                role,
                tokens_per_block=become(f"roles.{role.name}.tokens_per_block", role.tokens_per_block, block, reason),
            )
        )
        if needs.get("trust_remote_code"):
            d = replace(d, trust_remote_code=become("trust_remote_code", d.trust_remote_code, True, reason))
    return replace(d, roles=tuple(roles))


def as_rows(changes: tuple[Change, ...]) -> list[Mapping[str, Any]]:
    return [asdict(change) for change in changes]
