"""The Admin service, for whoever runs the server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from google.protobuf.message import Message
from perfcast.v1 import admin_pb2

from perfcast_server.data import DataRefused, Reloaded
from perfcast_server.errors import ServiceError
from perfcast_server.rpc import Method, Unary

SERVICE = "perfcast.v1.Admin"


class Admin:
    """``reload`` reaches every process that answers. Raises DataRefused."""

    def __init__(self, reload: Callable[[], Awaitable[Reloaded]]) -> None:
        self._reload = reload

    def methods(self) -> tuple[Method, ...]:
        request = admin_pb2.ReloadDataRequest
        return (Unary("ReloadData", request, self.reload_data, pure=lambda request: False, admin=True, writes=True),)

    async def reload_data(self, request: admin_pb2.ReloadDataRequest) -> Message:
        try:
            done = await self._reload()
        except DataRefused as error:
            raise ServiceError("DATA_REFUSED", f"the old data stay in use: {error}") from None
        return admin_pb2.ReloadDataResponse(
            data_version=done.data.version, changed=done.changed, packs=done.data.packs, workers=done.workers
        )
