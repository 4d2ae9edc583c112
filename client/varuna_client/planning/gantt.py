"""A mini-batch as a Gantt chart, like the paper's figure 7: one row per stage, in the terminal or as SVG or HTML.

Pure and deterministic: the same chart gives the same text. What it draws has no outside parts: no script, no fonts, no
links.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final, NamedTuple

from rich.text import Text

__all__ = ["Bar", "Chart", "as_html", "as_svg", "as_text"]


class Bar(NamedTuple):
    """One action of a stage."""

    op: str
    """A letter of OPS."""
    micro_batch: int | None
    """None for what belongs to the whole mini-batch."""
    begin_us: float
    end_us: float


@dataclass(frozen=True, kw_only=True)
class Chart:
    """What to draw."""

    title: str
    subtitle: str
    stages: tuple[tuple[Bar, ...], ...]
    """In order of time, without overlap."""
    lower_bound_us: float
    """No schedule ends earlier."""

    @property
    def length_us(self) -> float:
        return max((row[-1].end_us for row in self.stages if row), default=0.0)

    @property
    def ops(self) -> list[str]:
        """Those that occur, as the legend shows them."""
        return [op for op in OPS if any(bar.op == op for row in self.stages for bar in row)]


class _ChartStyle(NamedTuple):
    name: str
    fill: str
    ink: str


OPS: Final = {
    "F": _ChartStyle("forward", "#d1495b", "#ffffff"),
    "R": _ChartStyle("recompute", "#edae49", "#3b2a06"),
    "B": _ChartStyle("backward", "#3f8f5b", "#ffffff"),
    "W": _ChartStyle("weight gradients", "#9ccf8f", "#1d3a17"),
    "A": _ChartStyle("all-reduce", "#7b5ea7", "#ffffff"),
}
"""Red, orange, green and purple as in the paper."""

IDLE: Final = "#eef0f3"
INK: Final = "#1f2430"
FAINT: Final = "#6b7280"
FONT: Final = "ui-sans-serif,system-ui,'Segoe UI','Helvetica Neue',Arial,sans-serif"


def ticks(length_us: float, most: int) -> tuple[list[float], float, str]:
    """(round moments from 0 on, at most `most` steps of them; µs in their unit; the unit)."""
    unit_us, unit = next(((u, name) for u, name in ((1e6, "s"), (1e3, "ms")) if length_us >= u), (1.0, "µs"))
    if length_us <= 0:
        return [0.0], unit_us, unit
    least = length_us / max(1, most)
    power = 10.0 ** math.floor(math.log10(least))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least * (1 - 1e-9))
    return [step * i for i in range(math.floor(length_us / step + 1e-9) + 1)], unit_us, unit


# ---------------------------------------------------------------- terminal


def as_text(chart: Chart, width: int) -> Text:
    """The chart in `width` columns: a column shows what a stage does for most of its time.

    Where actions are shorter than a column they take turns, so that each op has as many columns as its time is worth.
    """
    label = len(f"stage {len(chart.stages) - 1}") + 1
    columns = max(10, width - label)
    text = Text(no_wrap=True)
    for stage, row in enumerate(chart.stages):
        text.append(f"stage {stage}".ljust(label), style="dim")
        for op, cell in _cells(row, chart.length_us, columns):
            look = OPS.get(op)
            text.append(cell, style=f"{look.ink} on {look.fill}" if look else "dim")
        text.append("\n")
    text.append(" " * label + _ruler(chart.length_us, columns) + "\n", style="dim")
    text.append(" " * label)
    for op in chart.ops:
        text.append(f" {op} ", style=f"{OPS[op].ink} on {OPS[op].fill}")
        text.append(f" {OPS[op].name}   ")
    text.append("·", style="dim")
    text.append(" idle")
    return text


def _cells(row: Sequence[Bar], length_us: float, columns: int) -> Iterator[tuple[str, str]]:
    """(op, its text) of the runs of columns of a stage; idle time is an op of its own: a dot."""
    shown = _shown(row, length_us, columns)
    start = 0
    for column in range(1, columns + 1):
        if column == columns or shown[column] is not shown[start]:
            bar, length = shown[start], column - start
            if bar is None:
                yield "·", "·" * length
            else:
                name = bar.op if bar.micro_batch is None else f"{bar.op}{bar.micro_batch}"
                # A blank behind, so that neighbours stay apart where there is no colour.
                yield bar.op, name.ljust(length) if len(name) < length else bar.op.ljust(length)
            start = column


def _shown(row: Sequence[Bar], length_us: float, columns: int) -> list[Bar | None]:
    """For each column the bar it shows; None for idleness."""
    inside: list[list[tuple[float, Bar | None]]] = [[] for _ in range(columns)]  # parts of the column, and whose
    free = [1.0] * columns
    for bar in row:
        begin, end = (at / length_us * columns if length_us else 0.0 for at in (bar.begin_us, bar.end_us))
        for column in range(int(begin), min(columns, math.ceil(end))):
            part = min(end, column + 1) - max(begin, column)
            free[column] -= part
            inside[column].append((part, bar))
    owed: dict[str, float] = {}  # columns that an op has not been given yet
    shown = []
    for parts, idle in zip(inside, free, strict=True):
        largest: dict[str, tuple[float, Bar | None]] = {}
        for part, what in [*parts, (idle, None)]:
            op = what.op if what else "idle"
            owed[op] = owed.get(op, 0.0) + part
            if part > 1e-9 and part > largest.get(op, (0.0, None))[0]:
                largest[op] = (part, what)
        op = max(largest, key=lambda op: round(owed[op], 6))
        shown.append(largest[op][1])
        owed[op] -= 1.0
        if len(largest) == 1:
            owed.clear()
    return shown


def _ruler(length_us: float, columns: int) -> str:
    moments, unit_us, unit = ticks(length_us, columns // 12)
    ruler = [" "] * (columns + 12)
    for moment in moments:
        name = f"|{moment / unit_us:g} {unit}"
        at = round(moment / length_us * columns) if length_us else 0
        if at + len(name) <= columns:
            ruler[at : at + len(name)] = name
    return "".join(ruler).rstrip()


# ---------------------------------------------------------------- SVG and HTML

WIDTH = 1280
LEFT, RIGHT, TOP, BOTTOM = 76, 28, 96, 76
LEGIBLE_PX = 8.0
"""Type smaller than this is left out."""


def as_svg(chart: Chart) -> str:
    """The chart as an SVG document."""
    rows = len(chart.stages)
    pitch = min(40.0, max(9.0, 760.0 / max(1, rows)))
    bottom = TOP + rows * pitch
    height = math.ceil(bottom + BOTTOM)
    scale = (WIDTH - LEFT - RIGHT) / max(chart.length_us, 1e-9)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'font-family="{FONT}" font-size="12" fill="{INK}" role="img" aria-label="{escape(chart.title)}">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="34" font-size="19" font-weight="600">{escape(chart.title)}</text>',
        f'<text x="{LEFT}" y="56" fill="{FAINT}">{escape(chart.subtitle)}</text>',
        *_axis(chart, scale, bottom),
    ]
    for stage, row in enumerate(chart.stages):
        y = TOP + stage * pitch
        parts += _row(stage, row, y=y, pitch=pitch, scale=scale, length_us=chart.length_us)
    parts += _bound(chart, scale, bottom)
    parts += _legend(chart, bottom + 58)
    return "\n".join([*parts, "</svg>"])


def as_html(chart: Chart) -> str:
    """The chart as a page of its own."""
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(chart.title)}</title>\n'
        "<style>body{margin:24px;background:#f6f7f9}svg{display:block;width:100%;max-width:1600px;height:auto;"
        "margin:auto;border-radius:10px;box-shadow:0 1px 4px #0003}</style>\n</head>\n<body>\n"
        f"{as_svg(chart)}\n</body>\n</html>"
    )


def _axis(chart: Chart, scale: float, bottom: float) -> Iterable[str]:
    moments, unit_us, unit = ticks(chart.length_us, 10)
    for moment in moments:
        x = LEFT + moment * scale
        yield f'<path d="M{_n(x)} {TOP - 6}V{_n(bottom + 4)}" stroke="#d9dce2"/>'
        yield (
            f'<text x="{_n(x)}" y="{_n(bottom + 19)}" text-anchor="middle" fill="{FAINT}">{moment / unit_us:g}'
            f"{' ' + unit if moment == moments[0] else ''}</text>"
        )


def _row(stage: int, row: Sequence[Bar], *, y: float, pitch: float, scale: float, length_us: float) -> Iterable[str]:
    gap = 3.0 if pitch >= 18 else 1.0
    height = pitch - gap
    size = min(12.0, height * 0.8)
    middle = y + height / 2
    yield (
        f'<text x="{LEFT - 10}" y="{_n(middle)}" font-size="{_n(size)}" text-anchor="end" dominant-baseline="central">'
        f"stage {stage}</text>"
    )
    yield f'<rect x="{LEFT}" y="{_n(y)}" width="{_n(length_us * scale)}" height="{_n(height)}" fill="{IDLE}"/>'
    names = []
    for op, look in OPS.items():
        path = []
        for bar in row:
            if bar.op != op:
                continue
            x, width = LEFT + bar.begin_us * scale, (bar.end_us - bar.begin_us) * scale
            # Neighbours stay apart where there is room for a gap.
            inner = width - min(1.0, width / 8) if width > 4.0 else width
            path.append(f"M{_n(x)} {_n(y)}h{_n(inner)}v{_n(height)}h-{_n(inner)}z")
            name = "" if bar.micro_batch is None else f"{op}{bar.micro_batch}" if width > 26 else f"{bar.micro_batch}"
            fits = min(size * 0.92, (inner - 2.0) / (0.62 * max(1, len(name))))
            if name and fits >= LEGIBLE_PX:
                names.append(
                    f'<text x="{_n(x + inner / 2)}" y="{_n(middle)}" font-size="{_n(fits)}" fill="{look.ink}" '
                    f'text-anchor="middle" dominant-baseline="central">{name}</text>'
                )
        if path:
            yield f'<path fill="{look.fill}" d="{"".join(path)}"/>'
    yield from names


def _bound(chart: Chart, scale: float, bottom: float) -> Iterable[str]:
    x = LEFT + chart.lower_bound_us * scale
    yield f'<path d="M{_n(x)} {TOP - 12}V{_n(bottom + 4)}" stroke="{INK}" stroke-width="1.5" stroke-dasharray="5 4"/>'
    name = "lower bound: no schedule is faster"
    yield f'<text x="{_n(x + 4)}" y="{TOP - 16}" text-anchor="end" fill="{FAINT}">{name}</text>'


def _legend(chart: Chart, y: float) -> Iterable[str]:
    x = float(LEFT)
    for fill, name in [*((OPS[op].fill, OPS[op].name) for op in chart.ops), (IDLE, "idle")]:
        edge = ' stroke="#c3c8d0"' if fill == IDLE else ""
        yield f'<rect x="{_n(x)}" y="{_n(y - 11)}" width="14" height="14" rx="3" fill="{fill}"{edge}/>'
        yield f'<text x="{_n(x + 21)}" y="{_n(y)}">{name}</text>'
        x += 21 + 6.2 * len(name) + 30


def _n(value: float) -> str:
    """A coordinate: two decimals are a fiftieth of what an eye can see."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
