"""Flags over environment over file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from perfcast_server.settings import Settings, SettingsError, load


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_flags_win_over_environment_over_file(tmp_path: Path) -> None:
    file = write(tmp_path / "p.toml", 'port = 1\nhost = "a"\nthreads = 3\n')
    environment = {"PERFCAST_PORT": "2", "PERFCAST_HOST": "b", "OTHER": "x"}
    settings = load({"port": 4, "host": None}, environment, file)
    assert (settings.port, settings.host, settings.threads) == (4, "b", 3)


@pytest.mark.parametrize("name", ["p.yaml", "p.yml"])
def test_a_yaml_file_says_the_same(tmp_path: Path, name: str) -> None:
    file = write(tmp_path / name, "port: 7\ndata: [one, two]\nreflection: false\ndrain-delay-s: 2\n")
    settings = load({}, {}, file)
    assert settings == Settings(port=7, data=("one", "two"), reflection=False, drain_delay_s=2.0)


def test_the_environment_is_parsed_by_type() -> None:
    environment = {"PERFCAST_REFLECTION": "off", "PERFCAST_DATA": "a, b,", "PERFCAST_DRAIN_GRACE_S": "1.5"}
    assert load({}, environment) == Settings(reflection=False, data=("a", "b"), drain_grace_s=1.5)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("p.toml", "port = \n"),
        ("p.toml", "prot = 5\n"),
        ("p.toml", 'port = "many"\n'),
        ("p.toml", "port = true\n"),
        ("p.toml", "port = 1.5\n"),
        ("p.toml", "reflection = 1\n"),
        ("p.toml", "port = 70000\n"),
        ("p.toml", "max_engines = 0\n"),
        ("p.toml", 'log_level = "loud"\n'),
        ("p.yaml", "port: [\n"),
        ("p.yaml", "- port\n"),
        ("p.yaml", "a: &a [*a]\nport: {}\n"),
    ],
)
def test_a_bad_file_is_refused_with_its_place(tmp_path: Path, name: str, text: str) -> None:
    with pytest.raises(SettingsError):
        load({}, {}, write(tmp_path / name, text))


@pytest.mark.parametrize(
    "environment", [{"PERFCAST_PORT": "x"}, {"PERFCAST_REFLECTION": "maybe"}, {"PERFCAST_DRAIN_DELAY_S": "nan"}]
)
def test_a_bad_environment_is_refused(environment: dict[str, Any]) -> None:
    with pytest.raises(SettingsError):
        load({}, environment)


def test_a_missing_file_is_refused() -> None:
    with pytest.raises(SettingsError, match="cannot read"):
        load({}, {}, "/nowhere/p.toml")
