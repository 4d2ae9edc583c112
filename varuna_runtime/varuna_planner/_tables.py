"""What the compiled search reads and fills in, as arrays.

Letters: K sections, S micro-batch sizes, P stages, D replicas, N micro-batches of a replica.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Ends = npt.NDArray[np.int16]
Cuts = npt.NDArray[np.int16]


class Sections(NamedTuple):
    """A profile at S micro-batch sizes. Sums have K + 1 places; the axis of 2 is (full, last) micro-batch."""

    forward_us: Floats
    """Sums [S, 2, K + 1]."""
    recompute_us: Floats
    backward_us: Floats
    output_bytes: Floats
    """[S, 2, K]."""
    forward_share: Floats
    """[S]: the largest part that forward is of any section's forward and backward."""
    work_us: Floats
    """Sums [S, K + 1] of forward and backward of a full micro-batch, on a grid so that equal runs have equal sums."""
    rework_us: Floats
    """The same of recompute."""
    state_bytes: Ints
    """Sums [K + 1]: parameters, gradients and optimizer."""
    gradient_bytes: Ints
    """Sums [K + 1]."""
    own_bytes: Floats
    """Sums [K + 1]: of gradients without those of tied weights, no more than what a stage's replicas sum alone."""
    reduce_rate: Floats
    """[S]: where reducing takes more µs per byte, it takes longer than the backward of any section but the last."""
    activation_bytes: Ints
    """Sums [S, K + 1]."""
    inputs: Ints
    """Bytes [S, K]."""
    outputs: Ints
    working: Ints
    least_input: Ints
    """[S]: of all sections but the first, in bytes."""
    least_output: Ints
    """[S]: of all sections but the last, in bytes, as the next."""
    least_message: Floats
    """[S]: of a full micro-batch."""


class Network(NamedTuple):
    """What messages cost."""

    same_vm: Floats
    """(latency in µs, bytes per µs)."""
    other_vm: Floats
    gpus_per_vm: int
    hop_us: float
    """Of a ring all-reduce: time per hop."""
    byte_us: float
    """Of a ring all-reduce: time per byte on one link."""
    overhead_us: float
    """Profile.stage_overhead_us."""
    optimizer_us: Floats
    """[K + 1]: of the sections before."""
    ties: Ints
    """[T, widest]: sections of each shared parameter, -1 where there are fewer."""
    tie_bytes: Ints
    """[T]."""
    ends_bytes: int
    """Of weights that the first and the last section share."""


class Whole(NamedTuple):
    """What bounds read of all sections together, at one micro-batch size."""

    forward_us: float
    backward_us: float
    own_bytes: float
    """Sections.own_bytes of all, and of the first."""
    first_own_bytes: float
    first_backward_us: float
    forward_share: float
    """Sections.forward_share, and the next likewise."""
    reduce_rate: float
    ends_bytes: int
    """Network.ends_bytes."""
    hop_us: float
    """The least that a message takes one way."""


class StageTimes(NamedTuple):
    """What the stages of a cut cost. A link stands in the column of its earlier stage."""

    forward: Floats
    """µs [2, P], row 0 for a full micro-batch, row 1 for the last; as the next four."""
    recompute: Floats
    backward: Floats
    activation_transfer: Floats
    gradient_transfer: Floats
    latency: Floats
    """µs [P]."""
    finish: Floats
    """µs [P]: what follows the last backward: all-reduce, tied weights, optimizer."""


class Limits(NamedTuple):
    """What holds for all shapes."""

    usable_bytes: int
    policy: int
    staged: bool
    """memory.input_sets."""
    runs_ahead: bool
    """Whether the policy knows run-ahead."""
    counts_stages: bool
    """Whether the policy has no more in flight than stages follow."""


class Tables(NamedTuple):
    """The cuts that would be best if memory limited nothing, of all P at once; see `_cuts`."""

    free_us: Floats
    """[S, P + 1]: work of the busiest stage."""
    free_end: Ends
    """[S, P + 1, K + 1]: where stages end."""
    least_us: Floats
    """[S, P + 1]: what memory leaves possible of free_us."""


class Problem(NamedTuple):
    """What is the same for all shapes."""

    sections: Sections
    net: Network
    limits: Limits
    tables: Tables


class Shape(NamedTuple):
    """P × D devices at one micro-batch size, with room for so much run-ahead."""

    a: int
    """Index of the micro-batch size."""
    P: int
    D: int
    N: int
    level: int
    """Of `LEVELS`."""


class Cut(NamedTuple):
    """Room for the stages of a cut; of P stages the first P places are used, of `starts` one more."""

    starts: Ints
    """First section of each stage, and K."""
    recompute: Flags


class Size(NamedTuple):
    """What cutting reads of the sections at one micro-batch size, and of the memory."""

    work: Floats
    """Sums [K + 1], as the next three."""
    rework: Floats
    state: Ints
    activation: Ints
    inputs: Ints
    """[K], as the next two."""
    outputs: Ints
    working: Ints
    usable: int
    least_input: int
    """Sections.least_input, and the next likewise."""
    least_output: int


class Shapes(NamedTuple):
    """One array each; what is not final when enumerated is filled in by `search`."""

    size: Ints
    """Index of the micro-batch size."""
    p: Ints
    d: Ints
    n: Ints
    state: Ints
    time_us: Floats
    """Of the mini-batch; a lower bound but for SIMULATED, infinite for those that do not fit."""


BOUNDED, DRAWN, SIMULATED, UNFIT = 0, 1, 2, 3
"""What is known of a shape: a bound for any cut, one for its own cut, its time, that it does not fit."""

UNLIMITED = 2**62
"""memory.usable_bytes of devices whose memory is not known: then cuts with more room are no others."""

LEVELS = 3
"""Cuts are made with room for a run-ahead of 0, P, and RUN_AHEAD_STAGES · P."""
RUN_AHEAD_STAGES = 2
"""Run-ahead asked for, in units of P, when memory is free: by it jitter costs least (ANCHORS, schedules)."""
