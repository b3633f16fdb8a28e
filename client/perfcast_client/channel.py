"""How a client reaches a server: address, security, retries, keepalive."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from perfcast_client._version import __version__

MAX_MESSAGE_BYTES = 16 << 20
DEFAULT_DEADLINE_S = 5.0
SURFACE_DEADLINE_S = 30.0
SEARCH_DEADLINE_S = 60.0
RELOAD_DEADLINE_S = 600.0

Metadata = Callable[[], Iterable[tuple[str, str]]]

# A stream that breaks is opened again by the client, which knows what was not answered; gRPC would do so beside it.
SERVICE_CONFIG = json.dumps(
    {
        "loadBalancingConfig": [{"round_robin": {}}],
        "methodConfig": [
            {
                "name": [{}],
                "retryPolicy": {
                    "maxAttempts": 4,
                    "initialBackoff": "0.1s",
                    "maxBackoff": "2s",
                    "backoffMultiplier": 3,
                    "retryableStatusCodes": ["UNAVAILABLE"],
                },
            },
            {"name": [{"service": "perfcast.v1.Prediction", "method": "StreamSteps"}]},
        ],
    }
)

OPTIONS: list[tuple[str, Any]] = [
    ("grpc.service_config", SERVICE_CONFIG),
    ("grpc.enable_retries", 1),
    ("grpc.per_rpc_retry_buffer_size", MAX_MESSAGE_BYTES + (1 << 16)),  # larger requests would not be tried again
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 5_000),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.primary_user_agent", f"perfcast-python/{__version__}"),
]


@dataclass(frozen=True, slots=True)
class Tls:
    """Files in PEM. Without ``ca`` the system's roots are trusted; ``cert`` and ``key`` make it mutual."""

    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    server_name: str | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        def read(path: str | None) -> bytes | None:
            return None if path is None else Path(path).read_bytes()

        return grpc.ssl_channel_credentials(read(self.ca), read(self.key), read(self.cert))

    def options(self) -> list[tuple[str, Any]]:
        return [] if self.server_name is None else [("grpc.ssl_target_name_override", self.server_name)]


def bearer(token: Callable[[], str]) -> Metadata:
    """Metadata that carries a token; ``token`` is asked before every call, so it may rotate."""
    return lambda: (("authorization", f"Bearer {token()}"),)


def bearer_file(path: str) -> Metadata:
    """Metadata that carries the token that the file holds, read again when the file changes."""
    seen, token = None, ""

    def current() -> str:
        nonlocal seen, token
        status = os.stat(path)
        if (stamp := (status.st_mtime_ns, status.st_ino)) != seen:
            token, seen = Path(path).read_text().strip(), stamp
        return token

    return bearer(current)
