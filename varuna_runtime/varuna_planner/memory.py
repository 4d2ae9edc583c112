"""Bytes that a stage needs, from what its sections were measured to need.

A stage holds its state (parameters, gradients, optimizer), the inputs of every micro-batch in flight, the activations
of every one of them (or, when it recomputes, of the one that was recomputed), and a working set: what running a single
section takes on top, in either direction.
"""

from __future__ import annotations

from typing import Final

USABLE_FRACTION: Final = 0.9
"""Of a device's memory. The rest is the driver's context, communication buffers and fragmentation."""


def stage_bytes(
    state_bytes: int, input_bytes: int, activation_bytes: int, working_bytes: int, in_flight: int, recompute: bool
) -> int:
    """Peak bytes of a stage. Plain whole numbers, compiled for the search over cuts as it stands.

    Args:
        state_bytes: parameters, gradients and optimizer state of its sections.
        input_bytes: inputs of the stage's first section for one micro-batch.
        activation_bytes: kept for backward by all its sections for one micro-batch.
        working_bytes: the largest over its sections of input, output and activations of one micro-batch.
        in_flight: micro-batches between their F and their B: schedule.most_in_flight.
        recompute: whether only inputs are stashed.
    """
    activation_sets = 1 if recompute else in_flight
    return state_bytes + in_flight * input_bytes + activation_sets * activation_bytes + working_bytes


def usable_bytes(device_memory_bytes: int | None) -> int:
    """What a plan may use of a device; a number beyond any device when its memory is not known."""
    if device_memory_bytes is None:
        return 2**62
    return int(device_memory_bytes * USABLE_FRACTION)


def human(count: int) -> str:
    """Bytes for people: 1.5 GiB."""
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"
