"""Reading one JSON object field by field: every value checked, every refusal names its field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perfcast_engine.errors import InvalidField

LARGEST = 2**24  # of any width, count or context length; products of three still fit an int64
MAX_DEPTH = 24
MAX_NODES = 2_000_000
MAX_LAYERS = 4096


def check_size(value: Any, path: str) -> None:
    """InvalidField when a decoded JSON value nests too deep or has too many members."""
    stack, nodes = [(value, 0)], 0
    while stack:
        item, depth = stack.pop()
        members = item.values() if isinstance(item, Mapping) else item if isinstance(item, list | tuple) else ()
        nodes += len(members)
        if depth > MAX_DEPTH or nodes > MAX_NODES:
            raise InvalidField(
                path, f"nests deeper than {MAX_DEPTH} or has over {MAX_NODES} members", why="config_size"
            )
        stack.extend((member, depth + 1) for member in members)


@dataclass(frozen=True, slots=True)
class Reader:
    """A JSON object and where it stands. Methods that take several names answer with the first that is there."""

    data: Mapping[str, Any]
    path: str

    def refuse(self, name: str, message: str, why: str = "config_field") -> InvalidField:
        return InvalidField(f"{self.path}.{name}", message, why=why)

    def get(self, name: str) -> Any:
        return self.data.get(name)

    def _of(self, kind: Any, name: str, must: str, default: Any) -> Any:
        """The value called ``name``, of type ``kind``; ``default`` where it is absent."""
        value = self.data.get(name)
        if value is not None and not isinstance(value, kind):
            raise self.refuse(name, must)
        return default if value is None else value

    def object(self, name: str) -> Reader:
        """The object called ``name``; an empty one where it is absent."""
        return Reader(self._of(Mapping, name, "must be an object", {}), f"{self.path}.{name}")

    def text(self, name: str) -> str:
        return str(self._of(str, name, "must be a string", ""))

    def flag(self, name: str) -> bool:
        return bool(self._of(bool, name, "must be true or false", False))

    def items(self, name: str) -> Sequence[Any]:
        """The array called ``name``; empty where it is absent."""
        array: Sequence[Any] = self._of(list | tuple, name, "must be an array", ())
        return array

    def integer(self, *names: str, default: int | None = None, least: int = 0, falsy: bool = True) -> int:
        """The first of ``names`` that is not null (nor zero, unless ``falsy`` values count); ``default`` after that."""
        for name in names:
            value = self.data.get(name)
            if value is None or (not falsy and value == 0):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= LARGEST:
                raise self.refuse(name, f"must be a whole number from {least} to {LARGEST}")
            return value
        if default is None:
            raise self.refuse(names[0], "is missing")
        return default

    def number(self, name: str, default: float) -> float:
        value = self._of(int | float, name, must := f"must be a number from 0 to {LARGEST}", default)
        if isinstance(value, bool) or not 0 <= value <= LARGEST:
            raise self.refuse(name, must)
        return float(value)

    def strings(self, name: str) -> list[str]:
        """The strings of an array (a lone string is an array of one); empty where it is absent."""
        value = self.data.get(name)
        members = [value] if isinstance(value, str) else self.items(name)
        if not all(isinstance(member, str) for member in members):
            raise self.refuse(name, "must be an array of strings")
        return list(members)

    def layer_list(self, name: str, layers: int, allowed: Mapping[Any, str], slack: int = 0) -> list[str]:
        """An array with one entry a layer (up to ``slack`` more are cut), each translated by ``allowed``."""
        values = self.items(name)
        if len(values) not in (layers, layers + slack):
            raise self.refuse(
                name, f"must have one entry for each of {layers} layers, not {len(values)}", "pattern_len"
            )
        try:
            return [allowed[value] for value in values[:layers]]
        except (KeyError, TypeError):
            raise self.refuse(name, f"entries must be of {', '.join(map(str, allowed))}", "pattern_value") from None


def runs(letters: Sequence[str] | Sequence[int]) -> list[list[Any]]:
    """Run-length form: [[letter, how many in a row], ...]."""
    out: list[list[Any]] = []
    for letter in letters:
        if out and out[-1][0] == letter:
            out[-1][1] += 1
        else:
            out.append([letter, 1])
    return out
