"""What a loss costs by how much of the step was done: micro-batches that are run again, and the pause."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

__all__ = ["name_state", "render_kill_points", "size_name", "summarize_kill_points"]

Trial = dict[str, Any]
_SEPARATOR = "@"


def name_state(size: str, kill_at: float, kill_points: int) -> str:
    """How a report names a model's size, and the kill point if it has several."""
    return size if kill_points == 1 else f"{size}{_SEPARATOR}{kill_at:g}"


def size_name(state: str) -> str:
    """The size in a state's name."""
    return state.partition(_SEPARATOR)[0]


def summarize_kill_points(trials: Sequence[Trial]) -> list[dict[str, Any]]:
    """Medians by size, row and kill point. The lost replica's share is in micro-batches; `excess_s` is by how much the
    gap is longer than a step before it.
    """
    groups: dict[tuple[str, str, float], list[Trial]] = {}
    for trial in trials:
        groups.setdefault((size_name(trial["state"]), trial["row"], trial["kill_at"]), []).append(trial)
    return [
        {
            "state": state,
            "row": row,
            "kill_at": kill_at,
            "trials": len(group),
            "step_before_s": statistics.median(trial["step_before_s"] for trial in group),
            "pause_s": statistics.median(trial["pause_s"] for trial in group),
            "excess_s": statistics.median(trial["gap_s"] - trial["step_before_s"] for trial in group),
            "idle_s": statistics.median(trial["idle_s"] for trial in group),
            "micro_batches": group[0]["micro_batches"],
            "lost_share": group[0]["micro_batches"] / int(group[0]["shape_before"].partition("×")[2]),
            "micro_batches_redone": [trial["micro_batches_redone"] for trial in group],
        }
        for (state, row, kill_at), group in sorted(groups.items())
    ]


def render_kill_points(points: Sequence[dict[str, Any]]) -> str:
    lines = [
        f"{'state':<10}{'row':<10}{'kill at':<9}{'step, s':<9}{'excess, s':<11}{'pause, s':<10}{'idle, s':<9}"
        "micro-batches redone; the lost share; all"
    ]
    for point in points:
        redone = ", ".join("unknown" if one is None else str(one) for one in point["micro_batches_redone"])
        lines.append(
            f"{point['state']:<10}{point['row']:<10}{point['kill_at']:<9.0%}{point['step_before_s']:<9.2f}"
            f"{point['excess_s']:<11.2f}{point['pause_s']:<10.2f}{point['idle_s']:<9.2f}"
            f"{redone}; {point['lost_share']:.1f}; {point['micro_batches']}"
        )
    return "\n".join(lines)
