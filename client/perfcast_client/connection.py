"""What a client of either kind is: a channel, and what its calls carry."""

from __future__ import annotations

import os
from typing import Any, ClassVar

from perfcast.v1 import prediction_pb2

from perfcast_client import calls, results
from perfcast_client.calls import Call
from perfcast_client.channel import OPTIONS, Metadata, Tls
from perfcast_client.errors import ClientMisuse
from perfcast_client.patience import Patience


class Connection:
    """``_grpc``: where channels come from, ``grpc`` or ``grpc.aio``."""

    _grpc: ClassVar[Any]

    def __init__(
        self,
        target: str,
        *,
        tls: Tls | None = None,
        metadata: Metadata | None = None,
        deadline_s: float | None = None,
        wait_for_ready: bool = False,
    ) -> None:
        self.target = target
        self._metadata = metadata
        self._deadline_s = deadline_s
        self._wait_for_ready = wait_for_ready
        self._pid = os.getpid()
        self._info: results.ServerInfo | None = None
        self._closed = False
        self._stubs: dict[str, Any] = {}
        self._channel = (
            self._grpc.insecure_channel(target, OPTIONS)
            if tls is None
            else self._grpc.secure_channel(target, tls.credentials(), [*OPTIONS, *tls.options()])
        )

    def _check(self) -> None:
        if self._closed or os.getpid() != self._pid:
            why = "is closed" if self._closed else "was made before a fork; make a new one in this process"
            raise ClientMisuse(f"this client {why}")

    def _patience(self, call: Call[Any], deadline_s: float | None) -> Patience:
        return Patience(deadline_s or self._deadline_s or call.deadline_s)

    def _begun(self, call: Call[Any], request: Any, patience: Patience) -> Any:
        """The answer of a unary call, or the stream of answers; of an asyncio channel what is awaited for either."""
        self._check()
        stub = self._stubs.get(call.path)
        if stub is None:
            kind = self._channel.unary_stream if call.is_stream else self._channel.unary_unary
            stub = kind(call.path, type(call.request).SerializeToString, call.response.FromString)
            self._stubs[call.path] = stub
        return stub(
            request,
            timeout=patience.left_s,
            metadata=self._call_metadata(),
            wait_for_ready=self._wait_for_ready,
        )

    def _stepping(self, *requests: Any) -> Any:
        """A stream of steps as gRPC has it, from an iterator of requests where its kind takes one."""
        self._check()
        opened = self._channel.stream_stream(
            calls.STREAM_STEPS,
            prediction_pb2.StreamStepsRequest.SerializeToString,
            prediction_pb2.StreamStepsResponse.FromString,
        )
        return opened(*requests, metadata=self._call_metadata(), wait_for_ready=self._wait_for_ready)

    def _call_metadata(self) -> tuple[tuple[str, str], ...] | None:
        return None if self._metadata is None else tuple(self._metadata())
