"""Numbers with their units as people read them, for messages of every package."""

from __future__ import annotations


def count_of(number: int, noun: str) -> str:
    """`1 GPU`, `2 GPUs`, `0 GPUs`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def count_are(number: int, noun: str) -> str:
    """`1 GPU is`, `2 GPUs are`."""
    return f"{count_of(number, noun)} {'is' if number == 1 else 'are'}"


def render_bytes(count: int) -> str:
    """`512 B`, `1.9 KiB`, `48.0 MiB`."""
    if count < 1024:
        return f"{count} B"
    value, unit = float(count), ""
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.1f} {unit}"


def render_rate(per_s: float) -> str:
    """Three digits at least: `0.142`, `12.0`, `820.5`, `12595`."""
    if per_s >= 1000:
        return f"{per_s:.0f}"
    return f"{per_s:.1f}" if per_s >= 10 else f"{per_s:.3g}"


def render_interval(seconds: float) -> str:
    """About how long: `45 s`, `12 min`, `10 h`, `3 days`."""
    for unit_s, unit in ((86_400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit_s:
            return f"{seconds / unit_s:.0f} {unit}"
    return f"{seconds:.0f} s"
