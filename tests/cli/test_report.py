"""The report of a search, read in a real browser."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from perfcast_cli.main import main

from tests.cli import chromium

HEADLINE = (
    "--model Qwen/Qwen3-32B-FP8 --system h200_sxm --gpus 32 --isl 4000 --osl 500 --prefix 500 --ttft 300 --tpot 10"
    " --profile reference --backend trtllm --backend vllm"
)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    outcome = CliRunner().invoke(main, ["search", *HEADLINE.split(), "--no-plot", "--out", str(folder)])
    assert outcome.exit_code == 0, outcome.output
    return folder


@pytest.fixture(scope="module")
def page(report: Path, tmp_path_factory: pytest.TempPathFactory):
    if not chromium.CHROMIUM.exists():
        pytest.skip(f"no {chromium.CHROMIUM}: apt-get install chromium")
    with chromium.page(tmp_path_factory.mktemp("profile")) as page:
        page.open((report / "report.html").as_uri())
        yield page


def place(page: chromium.Page, selector: str, number: int = 0) -> tuple[float, float]:
    """The middle of an element on the screen."""
    box = f"document.querySelectorAll({selector!r})[{number}].getBoundingClientRect()"
    found = page.evaluate(f"(b => [b.x + b.width / 2, b.y + b.height / 2])({box})")
    return found[0], found[1]


def hovered(page: chromium.Page, name: str) -> str:
    """What the page tells of a point when the mouse is over it."""
    selector = f'circle[aria-label="{name}"]'
    point = f"document.querySelector({json.dumps(selector)})"
    page.evaluate(f"{point}.parentNode.append({point})")  # not under another one
    x, y = page.evaluate(f"(b => [b.x + b.width / 2, b.y + b.height / 2])({point}.getBoundingClientRect())")
    page.move_mouse(x, y)
    assert page.evaluate("document.querySelector('.tip').style.visibility") == "visible"
    return str(page.evaluate("document.querySelector('.tip').innerText"))


def test_hovering_a_point_shows_its_configuration(page: chromium.Page) -> None:
    told = hovered(page, "disagg_trtllm: 5 x tp4 b1 + 3 x tp4 b64")
    for words in ("disagg_trtllm", "572.657", "194.378", "9.659", "decode batch per rank\t64", "prefill workers\t5"):
        assert words in told, told
    assert "tp4pp1dp1etp1ep1" in told and "true" in told
    page.move_mouse(5, 5)
    assert page.evaluate("document.querySelector('.tip').style.visibility") == "hidden"


def test_the_page_loads_nothing_and_reports_no_problem(page: chromium.Page, report: Path) -> None:
    assert page.problems == []
    assert [url for url in page.requests if url != (report / "report.html").as_uri()] == []


def test_tables_and_verdict_are_there(page: chromium.Page) -> None:
    text = page.evaluate("document.body.innerText")
    for words in ("Qwen/Qwen3-32B-FP8 on h200_sxm", "426.904", "572.657", "best: disagg_trtllm", "agg_vllm: tpot"):
        assert words in text


def test_a_click_on_the_legend_hides_a_series(page: chromium.Page) -> None:
    points = "document.querySelectorAll('circle').length"
    before = page.evaluate(points)
    page.click(*place(page, ".bar button"))
    assert 0 < page.evaluate(points) < before
    page.click(*place(page, ".bar button"))
    assert page.evaluate(points) == before


def test_the_horizontal_axis_can_be_another_latency(page: chromium.Page) -> None:
    at = place(page, "circle")
    page.evaluate(
        "(s => { s.value = 'ttft_ms'; s.dispatchEvent(new Event('change')); })(document.querySelector('select'))"
    )
    assert place(page, "circle") != at
    assert "time to first token" in page.evaluate("document.querySelector('svg').textContent")


def test_a_click_on_a_heading_sorts_the_table(page: chromium.Page) -> None:
    column = "[...document.querySelector('table.rows').querySelectorAll('tbody tr')].map(r => r.cells[6].innerText)"
    page.evaluate("document.querySelector('table.rows th:nth-child(7)').click()")
    told = [float(text) for text in page.evaluate(column)]
    assert told == sorted(told)
