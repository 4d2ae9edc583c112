"""Charts of a goodput report, as SVG that needs nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

COLOURS = {
    "varuna-2021": "#97a0b0",
    "checkpoint": "#7f8aa0",
    "parcae": "#c9a227",
    "survivors": "#8fb2f5",
    "auto": "#5b8def",
    "copies": "#1f4fd1",
    "design": "#3f9d63",
}
PARTS = (
    ("kept_s", "kept", "#1f4fd1"),
    ("redone_s", "redone", "#d1495b"),
    ("launching_s", "launching", "#edae49"),
    ("detecting_s", "noticing", "#8d6a9f"),
    ("saving_s", "saving", "#66a182"),
    ("waiting_s", "waiting", "#c9ced8"),
)
NOT_BUILT = "design"
WIDTH, LEFT, BAR, GAP = 860, 150, 18, 6
Replays = Sequence[Mapping[str, Any]]


def draw_goodput(replays: Replays) -> str:
    """Bars: of the bound, by global batch and policy."""
    parts, y = [_text(LEFT, 22, "Examples kept, of a bound that knows the future", size=15)], 40.0
    scale = (WIDTH - LEFT - 70) / 1.0
    for batch in dict.fromkeys(replay["global_batch"] for replay in replays):
        parts.append(_text(8, y + 14, f"batch of {batch:,}", bold=True))
        y += 22
        for replay in (one for one in replays if one["global_batch"] == batch):
            share = replay["of_bound"] or 0.0
            parts.append(_text(LEFT - 8, y + 13, _label(replay["policy"]), anchor="end"))
            parts.append(_bar(LEFT, y, share * scale, COLOURS[replay["policy"]]))
            parts.append(
                _text(LEFT + share * scale - 6, y + 13, f"{share:.1%}", anchor="end", bold=True, colour="#ffffff")
            )
            y += BAR + GAP
        y += 8
    goal = LEFT + 0.97 * scale
    parts.append(f'<line x1="{goal:.1f}" y1="34" x2="{goal:.1f}" y2="{y:.1f}" stroke="#222" stroke-dasharray="4 3"/>')
    parts.append(_text(goal, y + 14, "97 %", anchor="middle"))
    return _page(y + 24, parts)


def draw_hours(replays: Replays) -> str:
    """Stacked bars: where the hours of the trace go."""
    parts, y = [_text(LEFT, 22, "Hours of the trace", size=15)], 34.0
    x = float(LEFT)
    for _, name, colour in PARTS:
        parts += [_bar(x, y, 12, colour, height=12), _text(x + 17, y + 11, name)]
        x += 30 + 8 * len(name)
    y += 26
    for batch in dict.fromkeys(replay["global_batch"] for replay in replays):
        parts.append(_text(8, y + 14, f"batch of {batch:,}", bold=True))
        y += 22
        for replay in (one for one in replays if one["global_batch"] == batch):
            total = sum(max(0.0, replay[key]) for key, _, _ in PARTS)
            parts.append(_text(LEFT - 8, y + 13, _label(replay["policy"]), anchor="end"))
            x = float(LEFT)
            for key, _, colour in PARTS:
                width = max(0.0, replay[key]) / total * (WIDTH - LEFT - 70)
                parts.append(_bar(x, y, width, colour))
                x += width
            parts.append(_text(x + 6, y + 13, f"{total / 3600:.1f} h"))
            y += BAR + GAP
        y += 8
    return _page(y + 8, parts)


def draw_progress(replays: Replays) -> str:
    """Lines: examples that count over time, for the largest global batch."""
    batch = max(replay["global_batch"] for replay in replays)
    shown = [replay for replay in replays if replay["global_batch"] == batch]
    first_s = min(replay["progress"][0][0] for replay in shown)
    last_s = max(replay["progress"][-1][0] for replay in shown)
    most = max(replay["upper_bound_examples"] for replay in shown)
    height, left, right = 380, 70, 160
    across, up = (WIDTH - left - right) / (last_s - first_s), (height - 90) / most
    bottom = height - 40
    parts = [_text(left, 22, f"Examples that count, batch of {batch:,}", size=15)]
    for part in range(5):
        y = bottom - part / 4 * most * up
        parts.append(f'<line x1="{left}" y1="{y:.1f}" x2="{WIDTH - right}" y2="{y:.1f}" stroke="#e3e6ec"/>')
        parts.append(_text(left - 6, y + 4, f"{part / 4 * most / 1e6:.2f} M", anchor="end"))
    for hour in range(0, int((last_s - first_s) / 3600) + 1, max(1, int((last_s - first_s) / 36000))):
        parts.append(_text(left + hour * 3600 * across, bottom + 18, f"{hour} h", anchor="middle"))
    ends = []
    for replay in shown:
        points = [
            f"{left + (at_s - first_s) * across:.1f},{bottom - examples * up:.1f}"
            for at_s, examples in _thin(replay["progress"])
        ]
        dashes = ' stroke-dasharray="5 3"' if replay["policy"] == NOT_BUILT else ""
        parts.append(
            f'<polyline fill="none" stroke="{COLOURS[replay["policy"]]}" stroke-width="2"{dashes} '
            f'points="{" ".join(points)}"/>'
        )
        ends.append((bottom - replay["progress"][-1][1] * up, replay["policy"]))
    ends.append((bottom - most * up, "bound"))
    below = -1e9
    for y, name in sorted(ends):
        below = max(y, below + 15)  # labels do not cover each other
        parts.append(_text(WIDTH - right + 8, below + 4, _label(name)))
    end_y = bottom - most * up
    parts.append(
        f'<line x1="{left}" y1="{end_y:.1f}" x2="{WIDTH - right}" y2="{end_y:.1f}" stroke="#222" '
        'stroke-dasharray="2 3"/>'
    )
    return _page(height, parts)


def _thin(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    """At most some hundred points, the last one among them."""
    return [*points[:: max(1, len(points) // 400)], points[-1]]


def _label(policy: str) -> str:
    return f"{policy} (not built)" if policy == NOT_BUILT else policy


def _text(
    x: float, y: float, text: str, *, size: int = 12, anchor: str = "start", bold: bool = False, colour: str = "#1c2333"
) -> str:
    weight = ' font-weight="bold"' if bold else ""
    look = f'font-size="{size}" text-anchor="{anchor}" fill="{colour}"{weight}'
    return f'<text x="{x:.1f}" y="{y:.1f}" {look}>{escape(text)}</text>'


def _bar(x: float, y: float, width: float, colour: str, *, height: int = BAR) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{height}" fill="{colour}"/>'


def _page(height: float, parts: Sequence[str]) -> str:
    size = f'width="{WIDTH}" height="{height:.0f}" viewBox="0 0 {WIDTH} {height:.0f}"'
    style = 'font-family="system-ui, sans-serif" fill="#1c2333"'
    background = f'<rect width="{WIDTH}" height="{height:.0f}" fill="#ffffff"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n' + "\n".join([background, *parts, "</svg>\n"])
