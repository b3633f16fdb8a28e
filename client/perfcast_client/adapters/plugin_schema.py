"""Messages of dynamo.planner.plugin.v1, as far as a propose plugin needs them, in a descriptor pool of their own.

Made from this table rather than from generated stubs, so that a process may hold the planner's own stubs as well.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "dynamo.planner.plugin.v1"
REGISTRY, PROPOSE, LIFECYCLE = (f"{PACKAGE}.{name}" for name in ("PluginRegistry", "ProposePlugin", "PluginLifecycle"))
SET, AT_LEAST, AT_MOST = range(3)

# message: field number type, with * for repeated, ? for optional, @ for a map of strings, and | for a oneof
TABLE = """
RegisterRequest: plugin_id 1 string, plugin_type 2 string, priority 3 uint32, endpoint 4 string, version 5 string,
  execution_interval_seconds 6 float, hold_policy 7 int32, needs 8 string*, protocol_version 9 string,
  auth_token 10 string, requires_produced_fields 13 string*, observation_window_seconds 14 float
RegisterResponse: accepted 1 bool, reject_reason 2 string, negotiated_protocol_version 3 string
HeartbeatRequest: plugin_id 1 string, auth_token 2 string
HeartbeatResponse: ok 1 bool
UnregisterRequest: plugin_id 1 string, reason 2 string, auth_token 3 string
UnregisterResponse: ok 1 bool
PipelineContext: request_id 1 string, decision_id 2 string, observations 3 ObservationData?,
  predictions 4 PredictionData?
ObservationData: traffic 1 TrafficMetrics?, fpm 2 FpmData?, workers 3 WorkerState?
TrafficMetrics: duration_s 1 double, num_req 2 double, isl 3 double, osl 4 double, kv_hit_rate 5 double?,
  accept_length 6 double?
FpmData: prefill_engines 1 bytes@, decode_engines 2 bytes@
WorkerState: ready_prefill 1 int32?, ready_decode 2 int32?, expected_prefill 3 int32?, expected_decode 4 int32?
PredictionData: predicted_num_req 1 double?, predicted_isl 2 double?, predicted_osl 3 double?, source 4 string,
  predicted_kv_hit_rate 5 double?, predicted_accept_length 6 double?
ComponentTarget: sub_component_type 1 string, replicas 3 int32?, type 4 int32
OverrideResult: targets 1 ComponentTarget*, reason 2 string
AcceptResult:
RejectResult: reason 1 string
ProposeStageRequest: context 1 PipelineContext
ProposeStageResponse: accept 1 AcceptResult|, override 2 OverrideResult|, reject 3 RejectResult|, final 4 bool
BootstrapRequest: bootstrap_data 1 bytes
BootstrapResponse: ok 1 bool, message 2 string
ResetRequest: reason 1 string
ResetResponse: ok 1 bool, message 2 string
"""

Field = descriptor_pb2.FieldDescriptorProto


def _file() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(name="perfcast/plugin.proto", package=PACKAGE, syntax="proto3")
    for line in TABLE.replace("\n  ", " ").strip().splitlines():
        name, _, fields = line.partition(":")
        message = file.message_type.add(name=name)
        optional = []
        for text in filter(None, (part.strip() for part in fields.split(","))):
            field, number, kind = text.split()
            made = message.field.add(name=field, number=int(number), label=Field.LABEL_OPTIONAL)
            mark = kind[-1] if kind[-1] in "*?@|" else ""
            kind = kind.rstrip("*?@|")
            if mark == "@":
                _map(message, made, kind)
                continue
            _typed(made, kind)
            if mark == "*":
                made.label = Field.LABEL_REPEATED
            elif mark == "|":
                if not message.oneof_decl:
                    message.oneof_decl.add(name="result")
                made.oneof_index = 0
            elif mark == "?":
                made.proto3_optional = True
                optional.append(made)
        for made in optional:
            made.oneof_index = len(message.oneof_decl)
            message.oneof_decl.add(name=f"_{made.name}")
    return file


def _typed(field: Any, kind: str) -> None:
    if kind[0].isupper():
        field.type, field.type_name = Field.TYPE_MESSAGE, f".{PACKAGE}.{kind}"
    else:
        field.type = getattr(Field, f"TYPE_{kind.upper()}")


def _map(message: Any, field: Any, kind: str) -> None:
    entry = "".join(part.capitalize() for part in field.name.split("_")) + "Entry"
    nested = message.nested_type.add(name=entry)
    nested.options.map_entry = True
    for number, (name, of) in enumerate((("key", "string"), ("value", kind)), start=1):
        _typed(nested.field.add(name=name, number=number, label=Field.LABEL_OPTIONAL), of)
    field.label, field.type = Field.LABEL_REPEATED, Field.TYPE_MESSAGE
    field.type_name = f".{PACKAGE}.{message.name}.{entry}"


_pool = descriptor_pool.DescriptorPool()
_pool.Add(_file())
_known = _pool.FindFileByName("perfcast/plugin.proto").message_types_by_name
messages: Any = SimpleNamespace(**{name: message_factory.GetMessageClass(kind) for name, kind in _known.items()})
"""The message classes, by name."""
