"""Bytes that a stage needs, from what its sections were measured to need.

A stage holds its state (parameters, gradients, optimizer), the inputs of every micro-batch in flight, the activations
of every one of them (or, when it recomputes, of the one that was recomputed), a working set (what running a single
section takes on top, in either direction), and the receives that the engine posts ahead (varuna.pipeline.engine): one
activation more than may be in flight, and a gradient for each that may be. Where devices have memory of their own,
receives wait in the host's. On the device are those of two ops then: the engine launches one while another runs.
"""

from __future__ import annotations

from typing import Final

USABLE_FRACTION: Final = 0.9
"""Of a device's memory. The rest is the driver's context, communication buffers and fragmentation."""


def pass_bytes(
    input_bytes: int,
    output_bytes: int,
    activation_bytes: int,
    working_bytes: int,
    input_sets: int,
    gradient_sets: int,
    activation_sets: int,
) -> int:
    """Peak bytes that a stage's passes take beside its state. Plain whole numbers, as in `stage_bytes`.

    Args:
        input_bytes: inputs of the stage's first section for one micro-batch.
        output_bytes: outputs of the stage's last section for one micro-batch, whose gradients are as large.
        activation_bytes: kept for backward by all its sections for one micro-batch.
        working_bytes: the largest over its sections of input, output and activations of one micro-batch.
        input_sets, gradient_sets: of `input_sets` and `gradient_sets`.
        activation_sets: micro-batches between their F and their B (schedule.most_in_flight); 1 with recompute.
    """
    return input_sets * input_bytes + gradient_sets * output_bytes + activation_sets * activation_bytes + working_bytes


def stage_bytes(state_bytes: int, pass_bytes: int, update_bytes: int) -> int:
    """Peak bytes of a stage, compiled for the search over cuts as it stands.

    Args:
        state_bytes: parameters, gradients and optimizer state of its sections.
        pass_bytes: of `pass_bytes`.
        update_bytes: taken between the last backward and the next step, when nothing of the passes is there: copies of
            gradients for their sums over replicas, and what the optimizer's step needs for a while.
    """
    return state_bytes + max(pass_bytes, update_bytes)


def input_sets(first: bool, in_flight: int, cap: int, N: int, staged: bool) -> int:
    """For how many micro-batches a stage's device has room for inputs.

    Args:
        first: whether it is the first stage, which receives nothing.
        in_flight: schedule.most_in_flight.
        cap: schedule.stash_cap.
        N: micro-batches.
        staged: whether receives wait in host memory, which is not the device's.
    """
    if staged:
        return min(N, in_flight + 1)
    return in_flight if first else min(N, cap + 1)


def gradient_sets(last: bool, cap: int, N: int, staged: bool) -> int:
    """For how many micro-batches a stage's device has room for gradients received; arguments as of `input_sets`."""
    if last:
        return 0
    return min(N, 2 if staged else cap)


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
