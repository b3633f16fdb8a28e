"""Whatever is deployed: valid by schema, read back exactly, GPUs as predicted, no flag unknown to the engine."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import yaml
from perfcast_deploy.bundle import MANIFEST, Bundle, generate, parse, validate
from perfcast_deploy.describe import TARGETS
from perfcast_deploy.flags import rows_of
from perfcast_deploy.readback import READERS
from perfcast_deploy.validate import problems
from perfcast_engine.errors import UnsupportedCombination

from tests.deploy.random_deployments import random_deployment


def check(bundle: Bundle) -> None:
    d, texts = bundle.deployment, {name: data.decode() for name, data in bundle.files.items()}
    assert parse(bundle.files) == d
    assert validate(bundle.files) == d
    assert list(problems({name: text for name, text in texts.items() if name != MANIFEST})) == []
    found = READERS[bundle.target](texts)
    known = {row.param for row in rows_of(d.backend, d.version)}
    for role in d.roles:
        assert set(found.roles[role.name]) <= known
        assert found.workers[role.name] == role.workers
        assert role.gpus == role.tp * role.pp * role.dp
    if bundle.target == "dynamo":
        check_gpus_of_graph(bundle)


def check_gpus_of_graph(bundle: Bundle) -> None:
    """The operator multiplies the limit of a pod with the nodes of a worker and the replicas of a service."""
    d = bundle.deployment
    graph = next(x for x in yaml.safe_load_all(bundle.files["k8s_deploy.yaml"]) if x["kind"] == "DynamoGraphDeployment")
    total = 0
    for service in graph["spec"]["services"].values():
        if service["componentType"] == "worker":
            pod = int(service["resources"]["limits"]["gpu"])
            assert pod <= d.cluster.gpus_per_node
            total += pod * service.get("multinode", {}).get("nodeCount", 1) * service["replicas"]
    assert total == d.gpus


def sweep(seed: int, count: int) -> Counter[str]:
    rng, done = random.Random(seed), Counter[str]()
    while sum(done.values()) < count:
        deployment = random_deployment(rng)
        target, policy = rng.choice(list(TARGETS)), rng.choice(("as_predicted", "headroom"))
        try:
            bundle = generate(deployment, target, policy)
        except UnsupportedCombination as refusal:
            assert refusal.details["field"]
            continue
        check(bundle)
        done[target] += 1
    return done


def test_random_deployments() -> None:
    assert set(sweep(1, 60)) == set(TARGETS)


@pytest.mark.slow
def test_many_random_deployments() -> None:
    done = sweep(2, 2500)
    assert min(done[target] for target in TARGETS) > 100
