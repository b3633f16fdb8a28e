"""Records that are asked with: their messages and their dictionaries, from the fields themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Self, Union, get_args, get_origin, get_type_hints

from perfcast_client.config import EngineConfig
from perfcast_client.errors import refused
from perfcast_client.results import Engine

EngineLike = EngineConfig | Engine | str
"""A configuration, a resolved engine, or a handle."""


def wire(name: str, default: Any = MISSING, *, enum: Any = None, prefix: str = "") -> Any:
    """A field that the contract calls ``name``. The words of ``enum`` are its values without ``prefix``."""
    return field(default=default, metadata={"wire": name, "enum": enum, "prefix": prefix})


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Base of records. A field that is None, "", () or {} stays unset in a message."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], path: str = "") -> Self:
        """Strict: an unknown member, a missing one or one of another type is refused by its path."""
        return read(cls, values, path)  # type: ignore[no-any-return]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, message: Any) -> Self:
        """The inverse of ``put``, for records of numbers and records; what is not set takes its default."""
        told: dict[str, Any] = {}
        hints = get_type_hints(cls)
        for item in fields(cls):
            name, hint = item.metadata.get("wire", item.name), hints[item.name]
            value = getattr(message, name)
            kinds = [kind for kind in get_args(hint) or (hint,) if isinstance(kind, type) and issubclass(kind, Record)]
            if kinds and message.HasField(name):
                told[item.name] = kinds[0].of(value)
            elif not kinds and (value or item.default is MISSING):
                told[item.name] = value
        return cls(**told)

    def put(self, message: Any, path: str = "", inline: bool = False) -> Any:
        """Fill ``message``, refusing what its fields cannot hold. ``inline``: no engine by its handle."""
        for item in fields(self):
            own, name = getattr(self, item.name), item.metadata.get("wire", item.name)
            where = f"{path}.{item.name}".lstrip(".")
            if own is None or own == "" or own == () or own == {}:
                continue
            if isinstance(own, Record):
                getattr(message, name).SetInParent()
                own.put(getattr(message, name), where, inline)
            elif name in message.DESCRIPTOR.oneofs_by_name:
                put_engine(message, own, inline)
            elif isinstance(own, EngineConfig):
                getattr(message, name).CopyFrom(own.to_message())
            else:
                unset = own == 0 and own is not False and not message.DESCRIPTOR.fields_by_name[name].has_presence
                if unset and item.default not in (0, MISSING):
                    raise refused(where, own, "must be above 0; leave it out for the default")
                _assign(message, name, _told(item.metadata, own, where), where)
        return message


def put_engine(message: Any, engine: EngineLike, inline: bool = False) -> Any:
    """Name an engine in the oneof of a message."""
    if isinstance(engine, Engine):
        engine = engine.config if inline else engine.handle
    if isinstance(engine, str):
        message.handle = engine
    elif isinstance(engine, EngineConfig):
        message.config.CopyFrom(engine.to_message())
    else:
        raise refused("engine", engine, "is no EngineConfig, no resolved engine and no handle")
    return message


def _told(metadata: Mapping[str, Any], value: Any, path: str) -> Any:
    if metadata.get("enum") is None:
        return value
    if isinstance(value, tuple):
        return [_number(metadata, word, f"{path}[{number}]") for number, word in enumerate(value)]
    return _number(metadata, value, path)


def _number(metadata: Mapping[str, Any], word: Any, path: str) -> int:
    known = {name.removeprefix(metadata["prefix"]).lower(): n for name, n in metadata["enum"].items()}
    if not isinstance(word, str) or word.lower() not in known:
        words = ", ".join(name for name in known if name != "unspecified")
        raise refused(path, word, f"is not one of {words}")
    return int(known[word.lower()])


def _assign(message: Any, name: str, value: Any, path: str) -> None:
    try:
        if isinstance(value, list | tuple):
            getattr(message, name).extend(value)
        elif isinstance(value, Mapping):
            getattr(message, name).update(value)
        elif isinstance(value, bool) and not isinstance(getattr(message, name), bool):
            raise TypeError
        else:
            setattr(message, name, value)
    except (TypeError, ValueError):
        raise refused(path, value, "is not legal here") from None


NAMES = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


def read(kind: Any, value: Any, path: str) -> Any:
    """``value`` of plain mappings, lists and scalars as ``kind``; refuses by the path of what does not fit."""
    if get_origin(kind) in (Union, UnionType):
        return _read_union(get_args(kind), value, path)
    if get_origin(kind) is tuple:
        items = value if isinstance(value, list | tuple) else [value]
        return tuple(read(get_args(kind)[0], item, f"{path}[{number}]") for number, item in enumerate(items))
    if get_origin(kind) is Mapping:
        if not isinstance(value, Mapping):
            raise refused(path, value, "is not a mapping")
        return {name: read(get_args(kind)[1], item, f"{path}.{name}") for name, item in value.items()}
    if isinstance(kind, type) and is_dataclass(kind):
        return value if isinstance(value, kind) else _read_members(kind, value, path)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise refused(path, value, f"is not {NAMES.get(kind, kind.__name__)}")
    return value


def _read_union(kinds: tuple[Any, ...], value: Any, path: str) -> Any:
    if value is None and NoneType in kinds:
        return None
    if EngineConfig in kinds:
        return value if isinstance(value, Engine | str) else read(EngineConfig, value, path)
    (kind,) = (kind for kind in kinds if kind is not NoneType)
    return read(kind, value, path)


def _read_members(kind: Any, values: Any, path: str) -> Any:
    if not isinstance(values, Mapping):
        raise refused(path or kind.__name__, values, "is not a mapping")
    known = {item.name: item for item in fields(kind)}
    for name, value in values.items():
        if name not in known:
            raise refused(f"{path}.{name}".lstrip("."), value, f"is no member; known are {', '.join(known)}")
    for name, item in known.items():
        if name not in values and item.default is MISSING and item.default_factory is MISSING:
            raise refused(f"{path}.{name}".lstrip("."), None, "is missing")
    hints = _hints(kind)
    return kind(**{name: read(hints[name], value, f"{path}.{name}".lstrip(".")) for name, value in values.items()})


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)
