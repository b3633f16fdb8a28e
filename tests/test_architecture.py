"""Who may import whom, and how large things may grow."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = {
    "protos": "perfcast",
    "surface": "perfcast_surface",
    "systems": "perfcast_systems",
    "engine": "perfcast_engine",
    "planning": "perfcast_planning",
    "server": "perfcast_server",
    "client": "perfcast_client",
    "deploy": "perfcast_deploy",
    "cli": "perfcast_cli",
}
MAY_IMPORT = {
    "protos": set(),
    "surface": set(),
    "systems": set(),
    "engine": {"surface", "systems"},
    "planning": {"engine"},
    "server": {"engine", "planning", "surface", "protos", "deploy"},
    "client": {"surface", "protos"},
    "deploy": {"engine", "planning"},
    "cli": {"surface", "protos", "systems", "engine", "planning", "server", "client", "deploy"},
}
# What a planner's environment gets with the client: nothing that is not a base dependency.
CLIENT_NEEDS = {"grpc", "google", "numpy"}
# From the ground up; a module imports only what stands before it.
FLOORS = {
    "engine": (
        "errors", "data", "formula", "quant", "system", "answer", "profiles", "interp", "tables", "ops", "backends",
        "models.spec", "config", "models", "origin",
        "step_result", "token_table", "phase", "quick", "step", "compiled", "memory", "predictor",
        "coverage",
    ),
    "planning": ("support", "serving", "search", "planner"),
}  # fmt: skip
MAX_LINES, MAX_ENGINE_LINES = 500, 9_000


def sources(room: str) -> list[Path]:
    return sorted(path for path in (ROOT / room / ROOMS[room]).rglob("*.py") if "_pb2" not in path.name)


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_what_lies_below_it(room: str) -> None:
    forbidden = {package for other, package in ROOMS.items() if other not in MAY_IMPORT[room] | {room}}
    for path in sources(room):
        for name in imported(path):
            assert name.split(".")[0] not in forbidden, f"{path.relative_to(ROOT)} imports {name}"


def test_the_client_needs_the_base_dependencies_only() -> None:
    import sys

    allowed = CLIENT_NEEDS | {"perfcast", "perfcast_client", "perfcast_surface"} | set(sys.stdlib_module_names)
    for path in sources("client"):
        for name in imported(path):
            assert name.split(".")[0] in allowed, f"{path.relative_to(ROOT)} imports {name}"


@pytest.mark.parametrize("room", ["engine", "planning"])
def test_the_physics_knows_no_grpc_and_no_clock(room: str) -> None:
    for path in sources(room):
        for name in imported(path):
            assert name.split(".")[0] not in {"grpc", "google", "time", "asyncio", "logging"}, f"{path} imports {name}"


def floor(floors: tuple[str, ...], parts: tuple[str, ...]) -> int | None:
    """The floor of a module, given as its path inside the package."""
    for name in (".".join(parts[:2]), parts[0]):
        if name in floors:
            return floors.index(name)
    return None


@pytest.mark.parametrize(("room", "floors"), FLOORS.items())
def test_a_room_of_floors_imports_downwards(room: str, floors: tuple[str, ...]) -> None:
    package = ROOT / room / ROOMS[room]
    for path in sources(room):
        own = floor(floors, path.relative_to(package).with_suffix("").parts)
        for name in imported(path):
            parts = tuple(name.split("."))
            other = floor(floors, parts[1:]) if parts[0] == ROOMS[room] and len(parts) > 1 else None
            if own is not None and other is not None:
                assert other <= own, f"{path.relative_to(ROOT)} imports {name} from a floor above"


@pytest.mark.parametrize("room", ROOMS)
def test_files_stay_small(room: str) -> None:
    for path in sources(room):
        assert len(path.read_text().splitlines()) <= MAX_LINES, path.relative_to(ROOT)


def test_the_engine_stays_small() -> None:
    assert sum(len(path.read_text().splitlines()) for path in sources("engine")) < MAX_ENGINE_LINES


def test_nothing_is_called_a_helper() -> None:
    for room in ROOMS:
        for path in sources(room):
            assert path.stem not in {"helpers", "helper", "utils", "manager"}, path.relative_to(ROOT)
