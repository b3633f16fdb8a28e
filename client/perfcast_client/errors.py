"""One hierarchy of exceptions, made from what a failed call says of itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2

STATUS_KEY = "grpc-status-details-bin"


class PerfcastError(Exception):
    """Base of everything that this package raises.

    ``reason`` is the server's stable code ("PERF_DATA_MISSING", ...), ``details`` what it says beside the message
    (op, key, nearest, field, ...), ``code`` the name of the gRPC status, ``retry_after_s`` when a retry may help.
    """

    def __init__(
        self,
        message: str,
        *,
        reason: str = "",
        code: str = "",
        details: Mapping[str, str] | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason
        self.code = code
        self.details = dict(details or {})
        self.retry_after_s = retry_after_s

    @property
    def nearest(self) -> list[str]:
        """Names or data near to what was asked for."""
        return [name for name in self.details.get("nearest", "").split(", ") if name]


class InvalidRequest(PerfcastError, ValueError):
    """A field is malformed or inconsistent; ``details["field"]`` names it."""


def refused(field: str, value: object, why: str) -> InvalidRequest:
    """For what the client need not ask the server about."""
    text = f"{field}: {why}" if value is None else f"{field}: {value!r:.60} {why}"
    return InvalidRequest(text, reason="INVALID_FIELD", code="INVALID_ARGUMENT", details={"field": field})


class NotFound(PerfcastError, LookupError):
    """A model, system, backend, version or handle that the server does not know; see ``nearest``."""


class UnknownHandle(NotFound):
    """A handle whose configuration this replica has not seen."""


class PerfDataMissing(PerfcastError):
    """The engine is known, but what the question needs was not measured."""


class DataRefused(PerfcastError):
    """New data are damaged; the server goes on with the old ones."""


class OutOfMemory(PerfcastError):
    """The deployment does not fit the GPU memory."""


class NotReady(PerfcastError):
    """Too little data so far; not a fault."""


class CalibrationOff(PerfcastError):
    """The server keeps no calibration states; ``details["flag"]`` names the flag that it needs."""


class OutOfDomain(PerfcastError):
    """Outside the declared domain, with extrapolation forbidden."""


class OutOfSurface(OutOfDomain):
    """A point that a local surface does not reach, and no server to ask; ``details["point"]`` is its index."""


class DamagedSurface(PerfcastError, ValueError):
    """A file or an answer that is no whole surface, or one that this version cannot read."""


class LimitExceeded(PerfcastError):
    """Too many points, bytes or calls at once."""


class Unavailable(PerfcastError):
    """The server cannot be reached, is loading or is stopping."""


class DeadlineExceeded(PerfcastError, TimeoutError):
    """No answer within the deadline."""


class StateConflict(PerfcastError):
    """Another caller changed the state first."""


class Unsupported(PerfcastError):
    """The server's build has no such call."""


class AccessDenied(PerfcastError):
    """The server does not accept the caller's credentials."""


class ServerFault(PerfcastError):
    """The server failed; its log has the incident named in ``details``."""


class IncompatibleServer(PerfcastError):
    """The server speaks another contract, or an older revision of it."""


class ClientMisuse(PerfcastError, RuntimeError):
    """A client that is closed, or that was made before a fork."""


BY_REASON: Mapping[str, type[PerfcastError]] = {
    "UNKNOWN_HANDLE": UnknownHandle,
    "DATA_REFUSED": DataRefused,
    "OUT_OF_MEMORY": OutOfMemory,
    "NOT_READY": NotReady,
    "CALIBRATION_OFF": CalibrationOff,
}
BY_CODE: Mapping[grpc.StatusCode, type[PerfcastError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.FAILED_PRECONDITION: PerfDataMissing,
    grpc.StatusCode.OUT_OF_RANGE: OutOfDomain,
    grpc.StatusCode.RESOURCE_EXHAUSTED: LimitExceeded,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.CANCELLED: Unavailable,  # not by us: by a server that stops, to calls that it had not looked at yet
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.ABORTED: StateConflict,
    grpc.StatusCode.UNIMPLEMENTED: Unsupported,
    grpc.StatusCode.UNAUTHENTICATED: AccessDenied,
    grpc.StatusCode.PERMISSION_DENIED: AccessDenied,
}


def from_call(code: grpc.StatusCode, message: str, trailers: Iterable[tuple[str, Any]] | None) -> PerfcastError:
    """The exception for a call that ended with ``code``; details come from the status in its trailers."""
    reason, retry_after_s = "", None
    details: dict[str, str] = {}
    for key, value in trailers or ():
        if key == STATUS_KEY:
            reason, details, retry_after_s = _read(value)
    kind = BY_REASON.get(reason) or BY_CODE.get(code, ServerFault)
    return kind(message, reason=reason, code=code.name, details=details, retry_after_s=retry_after_s)


def from_detail(reason: str, message: str, details: Mapping[str, str]) -> PerfcastError:
    """The exception for a part of a call that failed alone."""
    kind = BY_REASON.get(reason) or _REASONS.get(reason, PerfDataMissing)
    return kind(message, reason=reason, details=details)


_REASONS: Mapping[str, type[PerfcastError]] = {
    "INVALID_FIELD": InvalidRequest,
    "UNSUPPORTED": InvalidRequest,
    "UNKNOWN_MODEL": NotFound,
    "UNKNOWN_SYSTEM": NotFound,
    "UNKNOWN_BACKEND": NotFound,
    "UNKNOWN_VERSION": NotFound,
    "UNKNOWN_STATE": NotFound,
    "EXTRAPOLATION": OutOfDomain,
    "LIMIT": LimitExceeded,
    "DATA_CORRUPT": ServerFault,
    "INTERNAL": ServerFault,
}


def _read(data: bytes) -> tuple[str, dict[str, str], float | None]:
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    retry_after_s: float | None = None
    for packed in status_pb2.Status.FromString(data).details:
        packed.Unpack(info)
        if packed.Unpack(retry):
            retry_after_s = retry.retry_delay.ToTimedelta().total_seconds()
    return info.reason, dict(info.metadata), retry_after_s
