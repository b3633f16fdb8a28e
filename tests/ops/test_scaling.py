"""What docs/scaling.md shows works as it is shown."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import yaml
from distributed import LocalCluster
from perfcast_cli import experiments
from perfcast_cli.local import Local
from perfcast_client import Client, EngineConfig, PerfcastError, Prefill
from perfcast_client.deployments import SearchResult
from perfcast_server.settings import Settings

from tests.cli.test_search import FILE
from tests.server.running import Running, eventually, running

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "scaling.md").read_text()


def shown(mark: str) -> str:
    """The block of code below a mark."""
    return re.search(rf"<!-- {mark} -->\n```\w+\n(.*?)```", PAGE, re.DOTALL)[1]


def test_replicas_agree_on_handles_and_share_the_calls_of_one_client(served: Running) -> None:
    config = EngineConfig(model="Qwen/Qwen3-32B-FP8", system="h200_sxm", backend="vllm", tp=2)
    method = {
        "grpc_type": "unary",
        "grpc_service": "perfcast.v1.Prediction",
        "grpc_method": "PredictStep",
        "grpc_code": "OK",
    }
    with running() as other, Client(other.address) as one, Client(served.address) as another:
        engine = one.resolve(config)
        assert another.resolve(config).handle == engine.handle
        expected = one.predict(engine, Prefill(1, 333)).latency_ms
        replicas = (served, other)
        before = [replica.metric("grpc_server_handled_total", **method) for replica in replicas]

        def both_were_asked() -> bool:
            assert both.predict(engine, Prefill(1, 333)).latency_ms == expected
            after = [replica.metric("grpc_server_handled_total", **method) for replica in replicas]
            return all(a > b for a, b in zip(after, before, strict=True))

        with Client(f"ipv4:{served.address},{other.address}") as both:
            eventually(both_were_asked)


def test_a_study_on_a_dask_cluster_finds_what_this_process_finds(tmp_path: Path) -> None:
    (tmp_path / "study.py").write_text(shown("dask"))
    study = runpy.run_path(str(tmp_path / "study.py"))["study"]
    file = tmp_path / "experiments.yaml"
    file.write_text(FILE)
    # Workers in threads, asked over TCP: tasks and results are pickled as between machines, no process has to start.
    with LocalCluster(
        n_workers=2,
        threads_per_worker=1,
        processes=False,
        protocol="tcp",
        host="127.0.0.1",
        dashboard_address="127.0.0.1:0",
        worker_dashboard_address="127.0.0.1:0",
        local_directory=str(tmp_path),
    ) as cluster:
        found = study(file, cluster.scheduler_address)
    asked = experiments.experiments(FILE)
    here = {name: experiments.answer(asked[name], Local(), 60) for name in asked if name != "nowhere"}
    failed = found.pop("nowhere")
    assert isinstance(failed, PerfcastError) and failed.reason == "UNKNOWN_SYSTEM"
    assert all(isinstance(result, SearchResult) for result in found.values())
    assert {name: result.to_dict() for name, result in found.items()} == {n: r.to_dict() for n, r in here.items()}


def test_envoy_is_told_of_the_port_and_the_health_that_a_server_has() -> None:
    (cluster,) = yaml.safe_load(shown("envoy"))["static_resources"]["clusters"]
    (check,) = cluster["health_checks"]
    assert check["grpc_health_check"]["service_name"] == "perfcast.v1.Prediction"
    (endpoint,) = cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]
    assert endpoint["endpoint"]["address"]["socket_address"]["port_value"] == Settings().port


def test_the_settings_that_the_page_names_exist() -> None:
    named = set(re.findall(r"`--([a-z-]+)", PAGE))
    assert named and {name.replace("-", "_") for name in named} <= set(Settings.__dataclass_fields__)
