"""The manifests fit the published schemas, each other, and what the server is set to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from click.testing import CliRunner
from kubernetes_validate import utils as published
from perfcast_cli.health import health
from perfcast_server.settings import Settings, load, require_guarded

FOLDER = Path(__file__).parents[2] / "ops" / "kubernetes"
MANIFESTS = sorted(path.name for path in FOLDER.glob("*.yaml") if path.name != "kustomization.yaml")
OTHERS: Mapping[str, Any] = yaml.safe_load(Path(__file__).with_name("schemas.yaml").read_text())
VERSIONS = published.all_versions()


def read(path: str) -> Any:
    return yaml.safe_load((FOLDER / path).read_text())


def merged(base: Any, patch: Any) -> Any:
    """As Kustomize merges: mappings by member, null removes, lists of named things by name."""
    if isinstance(base, dict) and isinstance(patch, dict):
        out = {key: merged(base.get(key), value) if key in base else value for key, value in patch.items()}
        return {key: value for key, value in (base | out).items() if value is not None}
    if isinstance(base, list) and isinstance(patch, list) and all("name" in item for item in patch):
        out = {item["name"]: item for item in base}
        for item in patch:
            out[item["name"]] = merged(out.get(item["name"], {}), item)
        return list(out.values())
    return patch


BASE = read("deployment.yaml")
TLS = merged(BASE, read("tls/deployment.yaml"))


def validate(document: Mapping[str, Any], version: str) -> None:
    """Against the strict schema of that version of Kubernetes, or the one of what is no part of it."""
    if document["kind"] in OTHERS:
        jsonschema.Draft202012Validator(OTHERS[document["kind"]]).validate(document)
    else:
        published.validate(document, version, strict=True)


@pytest.mark.parametrize("version", [VERSIONS[0], VERSIONS[-1]])
@pytest.mark.parametrize("path", MANIFESTS)
def test_a_manifest_fits_the_published_schema_of_its_kind(path: str, version: str) -> None:
    validate(read(path), version)


@pytest.mark.parametrize("version", [VERSIONS[0], VERSIONS[-1]])
def test_the_deployment_with_tls_fits_too(version: str) -> None:
    validate(TLS, version)


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        ("deployment.yaml", {"spec": {"replicas": "2"}}),
        ("deployment.yaml", {"spec": {"replica": 2}}),
        ("deployment.yaml", {"spec": {"selector": None}}),
        ("hpa.yaml", {"spec": {"maxReplicas": None}}),
        ("networkpolicy.yaml", {"spec": {"podSelector": []}}),
        ("pdb.yaml", {"spec": {"maxUnavailable": 0.5}}),
        ("service.yaml", {"spec": {"clusterIp": "None"}}),
        ("servicemonitor.yaml", {"spec": {"endpoints": [{"port": "metrics", "interval": "15"}]}}),
        ("servicemonitor.yaml", {"spec": {"selectors": {}}}),
    ],
)
def test_the_schemas_find_what_is_wrong(path: str, wrong: Mapping[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        validate(merged(read(path), wrong), VERSIONS[-1])


def test_everything_in_the_folders_is_applied() -> None:
    assert sorted(read("kustomization.yaml")["resources"]) == MANIFESTS
    overlay = read("tls/kustomization.yaml")
    assert overlay["resources"] == [".."]
    assert [patch["path"] for patch in overlay["patches"]] == ["deployment.yaml"]
    for document in (read("kustomization.yaml"), overlay):
        assert (document["apiVersion"], document["kind"]) == ("kustomize.config.k8s.io/v1beta1", "Kustomization")


def container(deployment: Any) -> Any:
    (found,) = deployment["spec"]["template"]["spec"]["containers"]
    return found


def settings(deployment: Any) -> Settings:
    """What the server makes of the image's and the manifest's environment."""
    dockerfile = (FOLDER.parents[1] / "Dockerfile").read_text()
    image = dict(word.split("=", 1) for word in dockerfile.split() if word.startswith("PERFCAST_"))
    given = {item["name"]: item["value"] for item in container(deployment)["env"]}
    assert {name.removeprefix("PERFCAST_").lower() for name in given} <= {item.name for item in fields(Settings)}
    return load({}, {**image, **given})


@pytest.mark.parametrize("deployment", [BASE, TLS], ids=["plain", "tls"])
def test_the_server_takes_the_environment(deployment: Any) -> None:
    own = settings(deployment)
    require_guarded(own)
    ports = {port["name"]: port["containerPort"] for port in container(deployment)["ports"]}
    assert ports == {"grpc": own.port, "metrics": own.metrics_port}
    spec = deployment["spec"]["template"]["spec"]
    assert spec["terminationGracePeriodSeconds"] > own.drain_delay_s + own.drain_grace_s
    mounts = {mount["name"]: mount["mountPath"] for mount in container(deployment)["volumeMounts"]}
    assert set(mounts) == {volume["name"] for volume in spec["volumes"]}
    assert own.token_file.startswith(mounts["tokens"])
    assert bool(own.tls_cert) == (deployment is TLS)
    assert own.insecure_anywhere == (deployment is BASE)


def test_the_manifests_name_each_other() -> None:
    labels = BASE["spec"]["template"]["metadata"]["labels"]
    service, policy = read("service.yaml"), read("networkpolicy.yaml")
    assert BASE["spec"]["selector"]["matchLabels"] == labels == service["spec"]["selector"]
    assert read("pdb.yaml")["spec"]["selector"]["matchLabels"] == labels == policy["spec"]["podSelector"]["matchLabels"]
    monitor = read("servicemonitor.yaml")["spec"]
    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert read("hpa.yaml")["spec"]["scaleTargetRef"]["name"] == BASE["metadata"]["name"]
    named = {port["name"] for port in container(BASE)["ports"]}
    assert {port["targetPort"] for port in service["spec"]["ports"]} == named
    assert {port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]} == named
    assert {end["port"] for end in monitor["endpoints"]} <= named


def test_the_probes_ask_for_services_that_there_are() -> None:
    for name, service in (("startupProbe", "perfcast.v1.Prediction"), ("livenessProbe", "")):
        assert container(BASE)[name]["grpc"].get("service", "") == service
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        program, command, *arguments = container(TLS)[probe]["exec"]["command"]
        assert (program, command) == ("perfcast", "health")
        told = CliRunner().invoke(health, [*arguments, "--help"])
        assert told.exit_code == 0
