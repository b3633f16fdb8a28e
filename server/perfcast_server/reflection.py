"""gRPC reflection, under the name of its current version too."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import grpc
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha._async import ReflectionServicer

from perfcast_server.errors import decoded

V1, V1ALPHA = "grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection"


def add(server: grpc.aio.Server, services: Iterable[str], guarded: Callable[[Any], Any]) -> None:
    """Serve reflection of ``services`` to whom ``guarded`` lets in. v1 and v1alpha are equal on the wire."""
    servicer = ReflectionServicer((*services, V1, V1ALPHA))

    async def answers(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[Any]:
        asked = (decoded(reflection_pb2.ServerReflectionRequest, data) async for data in requests)
        async for answer in servicer.ServerReflectionInfo(asked, context):
            yield answer

    respond = reflection_pb2.ServerReflectionResponse.SerializeToString
    handler = grpc.stream_stream_rpc_method_handler(guarded(answers), None, respond)
    server.add_generic_rpc_handlers(
        tuple(grpc.method_handlers_generic_handler(name, {"ServerReflectionInfo": handler}) for name in (V1, V1ALPHA))
    )
