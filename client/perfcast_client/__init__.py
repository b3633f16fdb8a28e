"""Clients of a perfcast server, blocking and asyncio.

from perfcast_client import Client, EngineConfig, Prefill

with Client("127.0.0.1:50051") as client:
    engine = client.resolve(EngineConfig(model="Qwen/Qwen3-32B-FP8", system="h200_sxm", backend="trtllm", tp=4))
    print(client.predict(engine, Prefill(batch=1, isl=4096)).latency_ms)
"""

from perfcast_client._version import __version__
from perfcast_client.aio import AsyncClient
from perfcast_client.channel import Tls, bearer, bearer_file
from perfcast_client.client import Client
from perfcast_client.config import EngineConfig
from perfcast_client.deploy import Cluster, EngineSettings
from perfcast_client.errors import PerfcastError
from perfcast_client.local import LocalSurface
from perfcast_client.local_aio import AsyncLocalSurface
from perfcast_client.search import Replica, SearchTask, Space, Targets
from perfcast_client.serving import (
    Afd,
    Aggregated,
    Disaggregated,
    Images,
    KvTransfer,
    Limits,
    Matching,
    Pool,
    Static,
    Workload,
)
from perfcast_client.steps import DecodeStep, DecodeTrajectory, Mixed, Prefill

__all__ = [
    "Afd",
    "Aggregated",
    "AsyncClient",
    "AsyncLocalSurface",
    "Client",
    "Cluster",
    "DecodeStep",
    "DecodeTrajectory",
    "Disaggregated",
    "EngineConfig",
    "EngineSettings",
    "Images",
    "KvTransfer",
    "Limits",
    "Matching",
    "LocalSurface",
    "Mixed",
    "PerfcastError",
    "Pool",
    "Prefill",
    "Replica",
    "SearchTask",
    "Space",
    "Static",
    "Targets",
    "Tls",
    "Workload",
    "__version__",
    "bearer",
    "bearer_file",
]
