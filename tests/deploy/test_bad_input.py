"""Whatever is twisted in rows, deployments, manifests, bundles, results: a typed error or an answer, never a crash."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from perfcast_deploy.bundle import MANIFEST, generate, parse
from perfcast_deploy.deployment import Deployment
from perfcast_deploy.explain import explain_manifest
from perfcast_deploy.verify import read_result
from perfcast_engine.errors import EngineError

from tests.deploy.deployments import deployment, moe, role
from tests.deploy.test_verify import AIPERF, INFERENCEX, VLLM

JUNK: tuple[Any, ...] = (None, 1, -1, "", [], {}, "x", {"a": 1}, [1], 1.5, True, float("nan"))


def twisted(rng: random.Random, tree: Any) -> Any:
    """``tree`` with one value, anywhere, left out or replaced by something else."""
    tree = copy.deepcopy(tree)
    node, parent, key = tree, None, None
    while isinstance(node, dict | list) and node and (parent is None or rng.random() < 0.8):
        key = rng.choice(list(node) if isinstance(node, dict) else range(len(node)))
        parent, node = node, node[key]
    if parent is None:
        return rng.choice(JUNK)
    if rng.random() < 0.4:
        del parent[key]
    else:
        parent[key] = rng.choice(JUNK)
    return tree


def survive(seed: int, count: int, attempt: Callable[[random.Random], Any]) -> None:
    rng = random.Random(seed)
    for _ in range(count):
        with suppress(EngineError):
            attempt(rng)


def test_manifests() -> None:
    graphs = [generate(d, "dynamo") for d in (moe("trtllm"), deployment("vllm", role("prefill"), role("decode")))]
    documents = [list(yaml.safe_load_all(graph.files["k8s_deploy.yaml"])) for graph in graphs]
    survive(1, 300, lambda rng: explain_manifest(yaml.dump_all(twisted(rng, d) for d in rng.choice(documents))))


def test_deployments() -> None:
    whole = moe("vllm").to_dict()
    survive(4, 200, lambda rng: Deployment.from_dict(twisted(rng, whole)))


def test_bundles() -> None:
    for target in ("engine", "dynamo", "llm-d-helm", "llm-d-kustomize", "fpm"):
        files = dict(generate(deployment("vllm", role("prefill"), role("decode")), target).files)
        manifest = json.loads(files[MANIFEST])
        survive(5, 40, lambda rng, f=files, m=manifest: parse(f | {MANIFEST: json.dumps(twisted(rng, m)).encode()}))

        def cut(rng: random.Random, files: dict[str, bytes] = files) -> Any:
            name = rng.choice(sorted(files))
            return parse(files | {name: files[name][: rng.randrange(len(files[name]))]})

        survive(6, 40, cut)


def test_results(tmp_path: Path) -> None:
    def attempt(rng: random.Random) -> Any:
        path = tmp_path / "result.json"
        path.write_text(json.dumps(twisted(rng, rng.choice((VLLM, AIPERF, INFERENCEX)))))
        return read_result(path, 8)

    survive(7, 500, attempt)
    deep = tmp_path / "deep.json"
    deep.write_text('{"a":' * 100_000)
    with suppress(EngineError):
        read_result(deep, 8)
