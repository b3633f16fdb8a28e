"""Scatter plots in a terminal, two by four dots a character."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.text import Text

COLOURS = ("bright_blue", "bright_green", "bright_magenta", "bright_yellow", "bright_cyan", "bright_red")
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # of a braille character, by row and column
BLANK = 0x2800
TICKS = 5


@dataclass(frozen=True)
class Series:
    """Points of one name; ``marked`` ones are drawn as letters."""

    name: str
    points: Sequence[tuple[float, float]]
    marked: Sequence[tuple[float, float]] = ()


def scatter(series: Sequence[Series], x_name: str, y_name: str, width: int = 72, height: int = 16) -> Text:
    """All series on one canvas, with axes from zero and a legend."""
    from rich.text import Text

    everything = [point for one in series for point in (*one.points, *one.marked)]
    if not everything:
        return Text("nothing to plot\n")
    x_top, y_top = (nice_top(max(point[axis] for point in everything)) for axis in (0, 1))
    dots = [[0] * width for _ in range(height)]
    style = [[""] * width for _ in range(height)]
    letters: dict[tuple[int, int], str] = {}
    for number, one in enumerate(series):
        colour = COLOURS[number % len(COLOURS)]
        for x, y in joined(one.points, 2 * width):
            column, row = _at(x / x_top, 2 * width), 4 * height - 1 - _at(y / y_top, 4 * height)
            dots[row // 4][column // 2] |= DOTS[row % 4][column % 2]
            style[row // 4][column // 2] = colour
        for x, y in one.marked:
            where = height - 1 - _at(y / y_top, height), _at(x / x_top, width)
            letters[where] = chr(ord("A") + number % 26)
            style[where[0]][where[1]] = f"bold {colour}"
    ticks = {height - 1 - round(t * (height - 1) / (TICKS - 1)): _figure(y_top * t / (TICKS - 1)) for t in range(TICKS)}
    margin = max(map(len, ticks.values()))
    out = Text(f"{y_name}\n", style="dim")
    for row in range(height):
        out.append(f"{ticks.get(row, ''):>{margin}} {'┤' if row in ticks else '│'}", style="dim")
        for column in range(width):
            character = letters.get((row, column)) or chr(BLANK + dots[row][column])
            out.append(character, style=style[row][column] or None)
        out.append("\n")
    out.append(" " * margin + " └" + "─" * width + "\n", style="dim")
    axis = [" "] * (margin + width + 12)
    for tick in range(TICKS):
        figure = _figure(x_top * tick / (TICKS - 1))
        start = margin + 2 + round(tick * (width - 1) / (TICKS - 1)) - len(figure) // 2
        axis[start : start + len(figure)] = figure
    out.append("".join(axis).rstrip() + "\n", style="dim")
    out.append(f"{x_name:>{margin + 2 + width}}\n", style="dim")
    for number, one in enumerate(series):
        mark = chr(ord("A") + number % 26) if one.marked else "⣿"
        out.append(f"{'':>{margin}} {mark} {one.name}\n", style=COLOURS[number % len(COLOURS)])
    return out


def joined(points: Sequence[tuple[float, float]], steps: int) -> Iterator[tuple[float, float]]:
    """The points and a line from each to the next."""
    for (x0, y0), (x1, y1) in pairwise(points):
        for step in range(steps):
            share = step / steps
            yield x0 + share * (x1 - x0), y0 + share * (y1 - y0)
    yield from points[-1:]


def nice_top(value: float) -> float:
    """The least of 1, 2, 2.5, 4, 5, 8, 10 times a power of ten that is not below ``value``."""
    if not value > 0:
        return 1.0
    unit = 10.0 ** math.floor(math.log10(value))
    return next(unit * step for step in (1, 2, 2.5, 4, 5, 8, 10) if unit * step >= value * (1 - 1e-12))


def _at(share: float, cells: int) -> int:
    return min(cells - 1, max(0, int(share * cells)))


def _figure(value: float) -> str:
    return f"{value:,.2f}".rstrip("0").rstrip(".")
