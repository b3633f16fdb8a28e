"""README and docs show what there is: their Python runs, their flags and files exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from perfcast_cli.main import main

from tests.server.running import SEARCH_PATIENCE_S, Running

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
README = PAGES[0].read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
OF_OTHERS = {"--max-num-seqs", "--reference-python", "--strict"}  # of vLLM, of a benchmark, of mypy


def test_the_python_of_the_readme_runs_from_top_to_bottom(
    served: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shown: dict[str, Any] = {}
    for block in BLOCKS:
        own = block.replace('Client("127.0.0.1:50051")', f'Client("{served.address}", deadline_s={SEARCH_PATIENCE_S})')
        exec(compile(own, block.splitlines()[0], "exec"), shown)
    shown["client"].close()


def flags(command: click.Command | None) -> Iterator[str]:
    assert command is not None
    for parameter in command.params:
        yield from (*parameter.opts, *parameter.secondary_opts)
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            yield from flags(command.get_command(context, name))


def test_the_flags_that_pages_name_exist() -> None:
    known = {*flags(main), "--help"} | OF_OTHERS
    for page in PAGES:
        text = page.read_text()
        named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", text))
        named -= set(re.findall(r"--[a-z-]+", " ".join(re.findall(r"\b(?:pip|docker|kubectl|grpcurl) .*", text))))
        assert named <= known, page.name


def test_the_files_that_pages_link_to_exist() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert target.startswith("https://") or (page.parent / target).exists(), f"{target} of {page.name}"


def test_the_readme_leads_to_every_page() -> None:
    for page in PAGES[1:]:
        assert f"({page.relative_to(ROOT)})" in README
