"""Prometheus metrics: the ecosystem's grpc_server_* names and our own (spec/07 section 12)."""

from __future__ import annotations

from time import perf_counter
from wsgiref.simple_server import WSGIServer

import grpc
from prometheus_client import CollectorRegistry, Gauge, ProcessCollector, start_http_server

from perfcast_server.errors import code_name
from perfcast_server.tally import Counter, Histogram

RPC = ("grpc_type", "grpc_service", "grpc_method")
RPC_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 60)
POINT_SECONDS = (1e-7, 3e-7, 1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
SEARCH_SECONDS = (0.03, 0.1, 0.3, 1, 3, 10, 30, 100)
LOAD_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10)


class Metrics:
    """The metrics of one server, in a registry of their own so that servers in one process do not mix."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self.started = Counter("grpc_server_started", "RPCs started", RPC, registry=registry)
        self.handled = Counter("grpc_server_handled", "RPCs finished", (*RPC, "grpc_code"), registry=registry)
        self.seconds = Histogram(
            "grpc_server_handling_seconds", "Time in the handler", RPC, buckets=RPC_SECONDS, registry=registry
        )
        self.received = Counter("grpc_server_msg_received", "Stream messages received", RPC, registry=registry)
        self.sent = Counter("grpc_server_msg_sent", "Stream messages sent", RPC, registry=registry)
        self.in_work = Gauge("grpc_server_in_work", "RPCs in work or waiting", registry=registry)
        self.lane_in_work = Gauge("lane_in_work", "Work in or before the threads", ("lane",), registry=registry)
        self.lane_wait = Histogram(
            "lane_wait_seconds", "Time before a thread was free", ("lane",), buckets=RPC_SECONDS, registry=registry
        )
        self.points = Counter("predict_points", "Points predicted", ("kind",), registry=registry)
        self.point_seconds = Histogram(
            "predict_point_seconds", "Engine time per point", ("kind",), buckets=POINT_SECONDS, registry=registry
        )
        self.engine_hits = Counter("engine_cache_hits", "Requests that found their engine ready", registry=registry)
        self.engine_misses = Counter("engine_cache_misses", "Requests that had to load one", registry=registry)
        self.engines = Gauge("engine_cache_entries", "Engines kept ready", registry=registry)
        self.engine_bytes = Gauge("engine_cache_bytes", "Bytes of them and of the data behind them", registry=registry)
        self.load_seconds = Histogram(
            "engine_load_seconds", "Time to make an engine ready", buckets=LOAD_SECONDS, registry=registry
        )
        self.searches = Gauge("searches_in_work", "Searches in work", registry=registry)
        self.search_seconds = Histogram(
            "search_seconds", "Time of a search in work", buckets=SEARCH_SECONDS, registry=registry
        )
        self.response_hits = Counter("response_cache_hits", "Answers given from bytes", registry=registry)
        self.response_misses = Counter("response_cache_misses", "Answers worked out", registry=registry)
        self.response_bytes = Gauge("response_cache_bytes", "Bytes of kept answers", registry=registry)
        self.surface_bytes = Gauge("surface_cache_bytes", "Bytes of kept surfaces", registry=registry)
        self.surface_seconds = Histogram(
            "surface_compile_seconds", "Time to compile a surface", buckets=LOAD_SECONDS, registry=registry
        )
        self.data_misses = Counter("data_miss", "Points without measured data", ("op",), registry=registry)
        self.correction_factor = Gauge(
            "correction_factor", "Mean factor of a calibration state", ("engine", "state", "kind"), registry=registry
        )
        self.reloads = Counter("data_reloads", "Times that data were read anew and taken", registry=registry)
        self.refusals = Counter("refusals", "Calls refused, by reason", ("reason",), registry=registry)

    def serve(self, host: str, port: int) -> WSGIServer:
        """Start the HTTP endpoint in a thread of its own; the server's ``server_port`` says where."""
        server, _thread = start_http_server(port, host, self.registry)
        return server


class Meter:
    """The grpc_server_* metrics of one method, resolved once."""

    def __init__(self, metrics: Metrics, kind: str, service: str, method: str) -> None:
        labels = (kind, service, method)
        self.name = f"{service}/{method}"
        self._started = metrics.started.labels(*labels)
        self._seconds = metrics.seconds.labels(*labels)
        self._labels, self._handled = labels, metrics.handled
        self._handled_well = metrics.handled.labels(*labels, "OK")
        self.received = metrics.received.labels(*labels)
        self.sent = metrics.sent.labels(*labels)

    def start(self) -> float:
        self._started.inc()
        return perf_counter()

    def finish(self, began: float, code: grpc.StatusCode | None = None) -> None:
        """code: None for OK."""
        self._seconds.observe(perf_counter() - began)
        (self._handled_well if code is None else self._handled.labels(*self._labels, code_name(code))).inc()
