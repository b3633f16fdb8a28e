"""The Catalog service."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from google.protobuf.message import Message
from perfcast.v1 import API_REVISION, catalog_pb2, prediction_pb2
from perfcast_engine.config import EngineConfig
from perfcast_engine.errors import EngineError
from perfcast_engine.models.spec import ModelSpec
from perfcast_engine.predictor import Engine
from perfcast_engine.system import SystemSpec
from perfcast_planning.support import cell, smallest

from perfcast_server import wire
from perfcast_server.coverage import PHASES, coverage_message, support_message
from perfcast_server.engines import PROBES, Engines, Probe, Ready
from perfcast_server.errors import ServiceError, invalid, refusal
from perfcast_server.rpc import Unary
from perfcast_server.settings import Settings

SERVICE = "perfcast.v1.Catalog"


class Catalog:
    """Says what can be asked for. ``methods_served`` is filled in by whoever assembles the server."""

    def __init__(self, engines: Engines, settings: Settings) -> None:
        self._engines = engines
        self._settings = settings
        self.methods_served: tuple[str, ...] = ()

    def methods(self) -> tuple[Unary, ...]:
        return (
            Unary("GetServerInfo", catalog_pb2.GetServerInfoRequest, self.get_server_info),
            Unary("ListSystems", catalog_pb2.ListSystemsRequest, self.list_systems),
            Unary("ListModels", catalog_pb2.ListModelsRequest, self.list_models),
            Unary("ListVersions", catalog_pb2.ListVersionsRequest, self.list_versions),
            Unary("CheckSupport", catalog_pb2.CheckSupportRequest, self.check_support),
            Unary("ListSupport", catalog_pb2.ListSupportRequest, self.list_support),
            Unary("Coverage", catalog_pb2.CoverageRequest, self.coverage),
        )

    async def get_server_info(self, request: catalog_pb2.GetServerInfoRequest) -> Message:
        settings = self._settings
        return catalog_pb2.GetServerInfoResponse(
            version=build_version(),
            api_revision=API_REVISION,
            methods=self.methods_served,
            limits=catalog_pb2.Limits(
                max_message_bytes=settings.max_message_bytes,
                max_points_per_request=settings.max_points_per_request,
                max_concurrent_requests=settings.max_concurrent_requests,
                max_config_json_bytes=settings.max_config_json_bytes,
            ),
        )

    async def list_systems(self, request: catalog_pb2.ListSystemsRequest) -> Message:
        systems = []
        for name in self._engines.predictor.catalog.systems():
            try:
                spec = self._engines.predictor.catalog.system(name)
            except EngineError:
                continue  # a bad description is told to whoever asks for its system
            systems.append(_system(spec, self._versions(name)))
        return catalog_pb2.ListSystemsResponse(systems=systems)

    async def list_models(self, request: catalog_pb2.ListModelsRequest) -> Message:
        text = request.contains.lower()
        found = [
            _model(spec)
            for name, spec in sorted(self._engines.predictor.registry.models.items())
            if text in name.lower() and request.family in ("", spec.family)
        ]
        return catalog_pb2.ListModelsResponse(models=found)

    async def list_versions(self, request: catalog_pb2.ListVersionsRequest) -> Message:
        self._named(request, "system", "backend")
        return catalog_pb2.ListVersionsResponse(backends=self._versions(request.system, request.backend))

    async def check_support(self, request: catalog_pb2.CheckSupportRequest) -> Message:
        if not request.HasField("config"):
            raise invalid("config", "is missing")
        wanted = prediction_pb2.ResolveEngineRequest(config=request.config)
        try:
            ready = await self._engines.of(wanted)
        except (EngineError, ServiceError) as error:
            return catalog_pb2.CheckSupportResponse(supported=False, error=refusal(error).detail())
        phases = [_phase(name, probe, ready) for name, probe in PROBES]
        return catalog_pb2.CheckSupportResponse(
            supported=all(phase.supported for phase in phases), engine=ready.stamp, phases=phases
        )

    async def list_support(self, request: catalog_pb2.ListSupportRequest) -> Message:
        self._named(request, "system", "backend", "version")
        predictor, version = self._engines.predictor, request.version or "current"
        known = predictor.registry.models
        if len(request.model_ids) > len(known):
            raise invalid("model_ids", f"names more than the {len(known)} models that there are")
        models = [predictor.registry.get(name).id for name in request.model_ids] or sorted(known)
        backends = [request.backend] if request.backend else predictor.catalog.backends(request.system)
        cells = []
        for backend in backends:
            predictor.catalog.resolve_version(request.system, backend, version)
            for model in models:
                config = EngineConfig(model=model, system=request.system, backend=backend, version=version)
                cells.append(await self._engines.lanes.loads.run(partial(cell, predictor, config)))
        return catalog_pb2.ListSupportResponse(models=map(support_message, cells))

    async def coverage(self, request: catalog_pb2.CoverageRequest) -> Message:
        if not request.choose_parallel:
            ready = await self._engines.of(request)
            return await self._engines.off_loop(partial(coverage_message, ready.engine))
        if not request.HasField("config"):
            raise invalid("config", "is missing; a mapping is chosen for a configuration")
        config = wire.engine_config(request.config, self._settings.max_config_json_bytes)
        return await self._engines.off_loop(lambda: coverage_message(self._chosen(config)))

    def _chosen(self, config: EngineConfig) -> Engine:
        predictor = self._engines.predictor
        found = cell(predictor, config)
        if found.parallel is None:
            return smallest(predictor, config)[0]
        return predictor.engine(replace(config, parallel=found.parallel))

    def _named(self, request: Any, *names: str) -> None:
        for name in names:
            if len(getattr(request, name)) > wire.MAX_NAME:
                raise invalid(name, f"is longer than {wire.MAX_NAME} characters")
        if not request.system:
            raise invalid("system", "is missing")

    def _versions(self, system: str, backend: str = "") -> list[catalog_pb2.BackendVersions]:
        catalog = self._engines.predictor.catalog
        backends = [backend] if backend else catalog.backends(system)
        return [
            catalog_pb2.BackendVersions(
                backend=name,
                versions=[
                    catalog_pb2.Version(version=version, slot=slot)
                    for slot, version in catalog.slots(system, name).items()
                ],
            )
            for name in backends
        ]


def build_version() -> str:
    try:
        return version("perfcast")
    except PackageNotFoundError:
        return "0+source"


def _phase(name: str, probe: Probe, ready: Ready) -> catalog_pb2.PhaseSupport:
    phase: Any = PHASES[name]
    try:
        result = probe(ready.engine).raise_first()
    except EngineError as error:
        return catalog_pb2.PhaseSupport(phase=phase, supported=False, error=refusal(error).detail())
    provenance = wire.provenance(result.by_source[0], int(result.tier[0]))
    return catalog_pb2.PhaseSupport(phase=phase, supported=True, provenance=provenance)


def _system(spec: SystemSpec, backends: list[catalog_pb2.BackendVersions]) -> catalog_pb2.System:
    return catalog_pb2.System(
        name=spec.name,
        gpus_per_node=spec.gpus_per_node,
        gpus_per_rack=spec.gpus_per_rack,
        sm_version=spec.sm_version,
        memory_bytes=spec.mem_capacity,
        memory_bandwidth_bytes_per_s=spec.mem_bw,
        intra_node_bandwidth_bytes_per_s=spec.intra_node_bw,
        inter_node_bandwidth_bytes_per_s=spec.inter_node_bw,
        power_w=spec.power_w,
        flops_per_s=spec.flops,
        backends=backends,
    )


def _model(spec: ModelSpec) -> catalog_pb2.Model:
    quant = spec.quant
    return catalog_pb2.Model(
        model_id=spec.id,
        family=spec.family,
        architecture=spec.arch,
        layers=spec.layers,
        hidden_size=spec.hidden,
        context_tokens=spec.ctx,
        experts=spec.moe.experts,
        quant=wire.quant_message(quant.gemm, quant.moe, quant.kv, quant.fmha),
    )
