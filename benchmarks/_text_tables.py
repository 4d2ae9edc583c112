"""Tables of figures as text."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["render_table"]


def render_table(rows: Sequence[Sequence[str]], *, words: int) -> str:
    """Rows of equally many cells, below one another. `words`: the column that is flush left, not being figures."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if number == words else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
