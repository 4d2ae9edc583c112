"""Draws the pictures of docs/concepts.md: `python docs/images/draw_concepts.py`."""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).parent
INK, QUIET, LINE, PAPER = "#1b2330", "#41506a", "#b8c2d3", "#f3f5f9"
STAGES = ("#cfe0ff", "#d3f0e2", "#ffe6bf")
LOST, NEW = "#b3261e", "#1f4e9c"


class Picture:
    def __init__(self, width: int, height: int, title: str) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f"""font-family="system-ui, 'DejaVu Sans', sans-serif" font-size="14" role="img">""",
            f"<title>{title}</title>",
            f'<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
            f'orient="auto"><path d="M0 0L10 5L0 10z" fill="{QUIET}"/></marker></defs>',
            f'<rect width="{width}" height="{height}" rx="10" fill="#ffffff"/>',
        ]

    def box(self, x: float, y: float, w: float, h: float, fill: str, stroke: str = LINE, dash: str = "") -> None:
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        self._parts.append(
            f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="6" fill="{fill}" stroke="{stroke}"{dashed}/>'
        )

    def text(
        self, x: float, y: float, text: str, *, at: str = "start", size: float = 14, fill: str = INK, bold: bool = False
    ) -> None:
        weight = ' font-weight="600"' if bold else ""
        self._parts.append(
            f'<text x="{x}" y="{y}" text-anchor="{at}" font-size="{size}" fill="{fill}"{weight}>{text}</text>'
        )

    def arrow(self, x1: float, y1: float, x2: float, y2: float, *, colour: str = QUIET, tip: bool = True) -> None:
        end = ' marker-end="url(#tip)"' if tip else ""
        self._parts.append(f'<path d="M{x1} {y1}L{x2} {y2}" stroke="{colour}" stroke-width="1.5" fill="none"{end}/>')

    def write(self, name: str) -> None:
        (HERE / name).write_text("\n".join([*self._parts, "</svg>"]) + "\n")


def grid() -> None:
    """P = 3 stages by D = 2 replicas, a global batch of 8 in micro-batches of 1."""
    picture = Picture(
        920, 400, "A model of 9 sections in 3 stages and 2 replicas; each replica trains half of the batch"
    )
    picture.text(24, 34, "The model: 9 sections, with a cut-point between each two", bold=True)
    for section in range(9):
        picture.box(190 + 62 * section, 50, 54, 30, STAGES[section // 3])
        picture.text(217 + 62 * section, 70, f"C{section + 1}", at="middle", size=13)
    for stage in range(3):
        x = 283 + 186 * stage
        picture.arrow(x, 86, x, 128)
        picture.text(x + 8, 112, f"stage {stage}", size=12.5, fill=QUIET)
    for replica in range(2):
        y = 136 + 100 * replica
        first = 4 * replica + 1
        picture.text(24, y + 28, f"replica {replica}", bold=True)
        picture.text(24, y + 48, f"examples {first} to {first + 3}", size=12.5, fill=QUIET)
        for stage in range(3):
            x = 194 + 186 * stage
            picture.box(x, y, 158, 62, STAGES[stage])
            picture.text(x + 79, y + 27, f"rank {replica * 3 + stage}", at="middle", bold=True)
            picture.text(x + 79, y + 47, "one worker, one device", at="middle", size=12, fill=QUIET)
            if stage < 2:
                picture.arrow(x + 158, y + 24, x + 184, y + 24)
                picture.arrow(x + 186, y + 40, x + 160, y + 40)
    for stage in range(3):
        x = 273 + 186 * stage
        picture.arrow(x, 200, x, 234)
        picture.arrow(x, 234, x, 200)
        picture.text(x + 8, 222, "all-reduce", size=12, fill=QUIET)
    picture.text(752, 158, "→ activations, forward", size=12.5, fill=QUIET)
    picture.text(752, 180, "← gradients, backward", size=12.5, fill=QUIET)
    picture.text(752, 222, "↕ once a step: the sum", size=12.5, fill=QUIET)
    picture.text(752, 240, "of a stage's gradients", size=12.5, fill=QUIET)
    picture.text(24, 342, "P×D = 3×2", bold=True)
    picture.text(
        120,
        342,
        "Six devices train one step of 8 examples: each replica runs its 4 micro-batches of 1 through its stages.",
    )
    picture.text(120, 366, "With four devices the same step runs as 2×2, 4×1 or 1×4, and gives the same loss.")
    picture.write("grid.svg")


def preemption() -> None:
    """Time goes to the right; a VM goes without a notice, and one goes with a notice."""
    picture = Picture(920, 470, "A VM is lost: its generation ends, the next one loads the checkpoint and goes on")
    for top, title in ((20, "A VM vanishes without a word"), (256, "A VM gets a notice (30 s on Azure)")):
        picture.text(24, top + 14, title, bold=True)
    _lost(picture, 44)
    _noticed(picture, 280)
    picture.text(
        24,
        456,
        "Each box is a step. The samples of a step are the same whenever, wherever and in whatever shape it is done.",
        size=12,
        fill=QUIET,
    )
    picture.write("preemption.svg")


def _steps(picture: Picture, x: float, y: float, steps: list[int], fill: str, *, done_before: int = 0) -> float:
    for step in steps:
        again = step <= done_before
        picture.box(x, y, 34, 30, "#ffffff" if again else fill, NEW if again else LINE, "4 3" if again else "")
        picture.text(x + 17, y + 20, str(step), at="middle", size=12.5)
        x += 38
    return x


def _lost(picture: Picture, y: float) -> None:
    for row in range(4):
        picture.text(24, y + 30 + 36 * row, f"vm-{row + 1}", size=13, fill=LOST if row == 3 else INK)
        x = _steps(picture, 80, y + 10 + 36 * row, [40, 41, 42, 43, 44], STAGES[0])
        if row == 3:
            picture.text(x + 4, y + 30 + 36 * row, "✘ gone", fill=LOST, bold=True)
        else:
            _steps(picture, 520, y + 10 + 36 * row, [43, 44, 45, 46, 47, 48], STAGES[1], done_before=44)
    picture.text(80, y + 172, "generation 7, 2×2", size=12.5, fill=QUIET)
    picture.text(520, y + 172, "generation 8, 3×1: 43 and 44 are done again (dashed)", size=12.5, fill=QUIET)
    for index, (text, where) in enumerate(
        (
            ("noticed: the stream broke", 26),
            ("the others leave at once", 54),
            ("plan 3×1, place, launch", 82),
            ("load checkpoint 42", 110),
        )
    ):
        picture.text(282, y + where + 4, f"{index + 1}. {text}", size=12.5, fill=QUIET)
    picture.text(156, y + 192, "▲ checkpoint 42", size=12.5, fill=NEW)


def _noticed(picture: Picture, y: float) -> None:
    for row in range(4):
        picture.text(24, y + 30 + 36 * row, f"vm-{row + 1}", size=13, fill=LOST if row == 3 else INK)
        _steps(picture, 80, y + 10 + 36 * row, [40, 41, 42, 43, 44], STAGES[0])
        if row == 3:
            picture.text(520, y + 30 + 36 * row, "✘ taken away, and nobody minds", fill=LOST)
        else:
            _steps(picture, 520, y + 10 + 36 * row, [45, 46, 47, 48, 49, 50], STAGES[1])
    for index, (text, where) in enumerate(
        (
            ("the agent tells of the notice", 26),
            ("all finish their step and save", 54),
            ("plan, place, launch", 82),
            ("load 44: nothing done again", 110),
        )
    ):
        picture.text(282, y + where + 4, f"{index + 1}. {text}", size=12.5, fill=QUIET)


if __name__ == "__main__":
    grid()
    preemption()
