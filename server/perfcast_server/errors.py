"""From exceptions to google.rpc.Status: one table of reasons, nothing of the server's insides in a message."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from google.protobuf import duration_pb2
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2
from grpc import StatusCode
from perfcast.v1 import common_pb2
from perfcast_engine.errors import EngineError

M = TypeVar("M", bound=Message)
DOMAIN = "perfcast"
MAX_TEXT, MAX_DETAIL, MAX_DETAILS = 500, 200, 10  # all of it must fit an 8 kB trailer
RETRY_S = {"LIMIT": 0.1, "LOADING": 0.25, "DRAINING": 0.5, "NOT_READY": 5.0, "STATE_STORE": 0.5}

# reason -> gRPC code; the contract with every client (spec/07 section 12).
CODES: Mapping[str, StatusCode] = {
    "INVALID_FIELD": StatusCode.INVALID_ARGUMENT,
    "UNSUPPORTED": StatusCode.INVALID_ARGUMENT,
    "UNKNOWN_MODEL": StatusCode.NOT_FOUND,
    "UNKNOWN_SYSTEM": StatusCode.NOT_FOUND,
    "UNKNOWN_BACKEND": StatusCode.NOT_FOUND,
    "UNKNOWN_VERSION": StatusCode.NOT_FOUND,
    "UNKNOWN_HANDLE": StatusCode.NOT_FOUND,
    "UNKNOWN_STATE": StatusCode.NOT_FOUND,
    "PERF_DATA_MISSING": StatusCode.FAILED_PRECONDITION,
    "EMPIRICAL_BASIS_MISSING": StatusCode.FAILED_PRECONDITION,
    "SYSTEM_FLOPS_MISSING": StatusCode.FAILED_PRECONDITION,
    "SOL_NOT_DEFINED": StatusCode.FAILED_PRECONDITION,
    "OUT_OF_MEMORY": StatusCode.FAILED_PRECONDITION,
    "NOT_READY": StatusCode.FAILED_PRECONDITION,
    "CALIBRATION_OFF": StatusCode.FAILED_PRECONDITION,
    "EXTRAPOLATION": StatusCode.OUT_OF_RANGE,
    "DATA_CORRUPT": StatusCode.DATA_LOSS,
    "STATE_CONFLICT": StatusCode.ABORTED,
    "STATE_STORE": StatusCode.UNAVAILABLE,
    "LIMIT": StatusCode.RESOURCE_EXHAUSTED,
    "UNAUTHENTICATED": StatusCode.UNAUTHENTICATED,
    "DATA_REFUSED": StatusCode.FAILED_PRECONDITION,
    "FORBIDDEN": StatusCode.PERMISSION_DENIED,
    "LOADING": StatusCode.UNAVAILABLE,
    "DRAINING": StatusCode.UNAVAILABLE,
    "DEADLINE": StatusCode.DEADLINE_EXCEEDED,
    "INTERNAL": StatusCode.INTERNAL,
}


class ServiceError(Exception):
    """A refusal by the server itself rather than by the engine."""

    def __init__(self, reason: str, message: str, retry_s: float | None = None, /, **details: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.retry_s = RETRY_S.get(reason) if retry_s is None else retry_s
        self.details = details


def invalid(field: str, message: str) -> ServiceError:
    return ServiceError("INVALID_FIELD", f"{field}: {message}", field=field)


def decoded(kind: type[M], data: bytes) -> M:
    """The message, refused if malformed."""
    try:
        return kind.FromString(data)
    except DecodeError:
        raise invalid("request", f"is not a well-formed {kind.DESCRIPTOR.full_name}") from None


@dataclass(frozen=True, slots=True)
class Refusal:
    """What a failed call tells its caller."""

    code: StatusCode
    reason: str
    message: str
    metadata: Mapping[str, str]
    retry_s: float | None = None

    def trailers(self) -> tuple[tuple[str, bytes], ...]:
        status = status_pb2.Status(code=self.code.value[0], message=self.message)
        for detail in self._details():
            status.details.add().Pack(detail)
        return (("grpc-status-details-bin", status.SerializeToString()),)

    def detail(self) -> common_pb2.ErrorDetail:
        """The same for a part of a call that fails alone."""
        return common_pb2.ErrorDetail(reason=self.reason, message=self.message, metadata=self.metadata)

    def _details(self) -> list[Message]:
        about = self.metadata
        details: list[Message] = [
            error_details_pb2.ErrorInfo(reason=self.reason, domain=DOMAIN, metadata=dict(about)),
        ]
        if self.code is StatusCode.INVALID_ARGUMENT:
            violation = error_details_pb2.BadRequest.FieldViolation(
                field=about.get("field", ""), description=self.message, reason=self.reason
            )
            details.append(error_details_pb2.BadRequest(field_violations=[violation]))
        elif self.code is StatusCode.NOT_FOUND:
            details.append(
                error_details_pb2.ResourceInfo(
                    resource_type=about.get("kind", ""), resource_name=about.get("name", ""), description=self.message
                )
            )
        elif self.code is StatusCode.RESOURCE_EXHAUSTED:
            quota = error_details_pb2.QuotaFailure.Violation(subject=about.get("limit", ""), description=self.message)
            details.append(error_details_pb2.QuotaFailure(violations=[quota]))
        if self.retry_s is not None and about.get("retry", "yes") == "yes":
            delay = duration_pb2.Duration()
            delay.FromMilliseconds(math.ceil(self.retry_s * 1000))
            details.append(error_details_pb2.RetryInfo(retry_delay=delay))
        return details


def refusal(error: Exception, incident: str = "") -> Refusal:
    """How ``error`` is told to a caller; anything unforeseen is INTERNAL with only the ``incident`` of the log."""
    if isinstance(error, EngineError | ServiceError):
        reason = str(error.reason)
        details = {key: _clean(str(value), MAX_DETAIL) for key, value in list(error.details.items())[:MAX_DETAILS]}
        code = CODES.get(reason, StatusCode.FAILED_PRECONDITION)
        retry_s = error.retry_s if isinstance(error, ServiceError) else RETRY_S.get(reason)
        return Refusal(code, reason, _clean(error.message), details, retry_s)
    message = f"internal error; the server's log has it as incident {incident}"
    return Refusal(StatusCode.INTERNAL, "INTERNAL", message, {"incident": incident} if incident else {})


_PATH = re.compile(r"(?<![\w.~-])~?/(?:[^\s/'\":,;)]+/)+")


def _clean(text: str, longest: int = MAX_TEXT) -> str:
    """In printable ASCII, without directories of absolute paths and undue length."""
    text = _PATH.sub("", text[: 4 * longest])
    text = "".join(c if c.isprintable() else " " for c in text).encode("ascii", "backslashreplace").decode()
    return text if len(text) <= longest else text[: longest - 3] + "..."


def code_name(code: StatusCode) -> str:
    """CamelCase as the grpc_server_handled_total metric spells codes."""
    if code is StatusCode.OK:
        return "OK"
    return "".join(part.capitalize() for part in code.name.split("_"))
