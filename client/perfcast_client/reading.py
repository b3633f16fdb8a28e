"""From messages to what calls return: every field by its type, so that no list of fields is written twice."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from functools import cache
from operator import attrgetter
from types import NoneType
from typing import Any, ClassVar, Self, get_args, get_origin, get_type_hints

import numpy as np

from perfcast_client.config import EngineConfig
from perfcast_client.errors import PerfcastError, from_detail

Reader = Callable[[Any], Any]


class Result:
    """Base of results. ``renamed``: field to its name in the contract, where they differ."""

    __slots__ = ()
    renamed: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def of(cls, message: Any) -> Self:
        kind: Any = cls
        return cls(**{name: read(message) for name, read in _readers(kind, message.DESCRIPTOR)})

    @classmethod
    def read(cls, *messages: Any, **own: Any) -> Self:
        """From the fields of messages, each of the first that has it; ``own``: those that are told in another way."""
        kind: Any = cls
        for message in messages:
            own |= {name: read(message) for name, read in _readers(kind, message.DESCRIPTOR) if name not in own}
        return cls(**own)

    def to_dict(self) -> dict[str, Any]:
        """Plain values only, ready for JSON."""
        return {key: _plain(value) for key, value in asdict(self).items()}  # type: ignore[call-overload]


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return [None if isinstance(item, float) and item != item else item for item in value.tolist()]
    if isinstance(value, Mapping):
        return {key: _plain(member) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(member) for member in value]
    if isinstance(value, PerfcastError):
        return {"reason": value.reason, "message": value.message, "details": value.details}
    return value


@cache
def _readers(cls: Any, descriptor: Any) -> tuple[tuple[str, Reader], ...]:
    """How each field of ``cls`` that a message of this type has is read."""
    hints, known = get_type_hints(cls), descriptor.fields_by_name
    wires = {item.name: cls.renamed.get(item.name, item.name) for item in fields(cls)}
    return tuple((own, _reader(hints[own], known[name])) for own, name in wires.items() if name in known)


def _reader(hint: Any, told: Any) -> Reader:
    """How a field of a message, given by its descriptor, is read as ``hint``."""
    name, kinds = told.name, get_args(hint) or (hint,)
    value, optional = attrgetter(name), NoneType in kinds
    of: Any = next((kind.of for kind in kinds if hasattr(kind, "of")), None)
    if PerfcastError in kinds:
        return lambda m: error_of(m, name)
    if EngineConfig in kinds:
        return lambda m: EngineConfig.from_message(value(m))
    if get_origin(hint) is tuple:
        return lambda m: tuple(map(of, value(m)) if of else value(m))
    if get_origin(hint) is Mapping:
        entries = told.message_type.GetOptions().map_entry
        return lambda m: dict(value(m)) if entries else set_fields(value(m))
    if optional:
        return lambda m: (of(value(m)) if of else value(m)) if m.HasField(name) else None
    if of is not None:
        return lambda m: of(value(m))
    if told.enum_type is not None:
        words = _words(told.enum_type)
        return lambda m: words.get(value(m)) or str(value(m))
    return value


def given(message: Any, name: str) -> Any:
    """An optional field; None where it is absent."""
    return getattr(message, name) if message.HasField(name) else None


def set_fields(message: Any) -> dict[str, Any]:
    """The fields of a message that are set, by name."""
    return {item.name: value for item, value in message.ListFields()}


def error_of(message: Any, name: str = "error") -> PerfcastError | None:
    """The exception that an ErrorDetail stands for; None where there is none."""
    told = given(message, name)
    return None if told is None else from_detail(told.reason, told.message, told.metadata)


def _words(enum: Any) -> Mapping[int, str]:
    """The lower-case words of the values of an enum, e.g. "silicon"."""
    prefix = re.sub(r"(?<!^)(?=[A-Z])", "_", enum.name).upper() + "_"
    return {number: value.name.removeprefix(prefix).lower() for number, value in enum.values_by_number.items()}
