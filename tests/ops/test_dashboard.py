"""The dashboard asks for metrics that there are, by labels that they have."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from perfcast_client import Client, EngineConfig, Prefill, errors
from perfcast_server.metrics import Metrics
from prometheus_client import Metric

from tests.server.running import Running

DASHBOARD = json.loads((Path(__file__).parents[2] / "ops" / "grafana" / "perfcast.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]
VARIABLES = [variable for variable in DASHBOARD["templating"]["list"] if variable["type"] == "query"]
OF_SUPERVISOR = {  # tests/server/test_workers.py reads them from its page
    "server_workers": set(),
    "server_worker_restarts_total": set(),
}
OF_PROMETHEUS = {"job", "instance"}


def labels(families: list[Metric]) -> dict[str, set[str]]:
    """The labels of every sample."""
    return {sample.name: set(sample.labels) for family in families for sample in family.samples}


@pytest.fixture(scope="module")
def known(served: Running) -> dict[str, set[str]]:
    config = EngineConfig(model="Qwen/Qwen3-32B-FP8", system="h200_sxm", backend="trtllm", tp=4)
    with Client(served.address) as client:
        client.predict(config, Prefill(1, 128))
        with pytest.raises(errors.InvalidRequest):
            client.predict(config, Prefill(0, 128))
    served.server.metrics.data_misses.labels("gemm")
    return {**labels(list(served.server.metrics.registry.collect())), **OF_SUPERVISOR}


def test_every_query_is_for_a_metric_with_such_labels(known: dict[str, set[str]]) -> None:
    for query in QUERIES:
        names = re.findall(r"([a-z_]+)\{", query)
        assert names, query
        for name in names:
            assert name in known, f"{name} of {query}"
        for by in re.findall(r"by \(([^)]*)\)", query):
            for label in by.split(", "):
                assert label in known[names[0]] | OF_PROMETHEUS, f"{label} of {query}"
        for label in re.findall(r"[{,](\w+)[=!]", query):
            assert label in known[names[0]] | OF_PROMETHEUS, f"{label} of {query}"


def test_the_variables_are_labels_of_metrics_that_there_are(known: dict[str, set[str]]) -> None:
    for variable in VARIABLES:
        name, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]["query"]).groups()
        assert label in known[name] | OF_PROMETHEUS


def test_the_legends_name_labels_that_the_query_leaves() -> None:
    for panel in PANELS:
        for target in panel["targets"]:
            kept = {label for by in re.findall(r"by \(([^)]*)\)", target["expr"]) for label in by.split(", ")}
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= kept


def test_the_panels_are_described_and_do_not_overlap() -> None:
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken and place["x"] + place["w"] <= 24
        taken |= cells
        assert panel["title"] and (panel["type"] == "row" or panel["description"])


def test_every_metric_of_our_own_has_a_help_text() -> None:
    assert all(family.documentation for family in Metrics().registry.collect())
