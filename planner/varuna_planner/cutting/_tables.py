"""The arrays that the compiled search reads and fills in.

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


class SectionTables(NamedTuple):
    """A profile at S micro-batch sizes. Sums have K + 1 places; the axis of 2 is (full, last) micro-batch."""

    forward_us: Floats
    """Sums [S, 2, K + 1]."""
    recompute_us: Floats
    backward_us: Floats
    output_bytes: Floats
    """[S, 2, K]."""
    forward_share: Floats
    """[S]: the largest share that forward has in any section's forward and backward."""
    work_us: Floats
    """Sums [S, K + 1] of forward and backward of a full micro-batch, rounded so that equal runs have equal sums."""
    rework_us: Floats
    """The same of recompute."""
    state_bytes: Ints
    """Sums [K + 1]: parameters, gradients and optimizer."""
    update_bytes: Ints
    """Sums [K + 1]: what the sums over replicas and the optimizer's step take for a while."""
    gradient_bytes: Ints
    """Sums [K + 1]."""
    own_bytes: Floats
    """Sums [K + 1]: gradients without tied weights; never more than a stage's replicas sum alone."""
    reduce_rate: Floats
    """[S]: at more µs per byte than this, reducing takes longer than the backward of any section but the last."""
    activation_bytes: Ints
    """Sums [S, K + 1]."""
    inputs: Ints
    """Bytes [S, K]."""
    outputs: Ints
    working: Ints
    least_input: Ints
    """[S]: the least of all sections but the first, in bytes."""
    least_output: Ints
    """[S]: the least of all sections but the last, in bytes."""
    least_message: Floats
    """[S]: the least of all sections but the last, in bytes of a full micro-batch."""


class NetworkCosts(NamedTuple):
    """The costs of messages."""

    same_vm: Floats
    """(latency in µs, bytes per µs)."""
    other_vm: Floats
    gpus_per_vm: int
    hop_us: Floats
    """[R]: of a ring all-reduce, time per hop where 1, 2, ... R rings run at once over the same VMs' network."""
    byte_us: Floats
    """[R]: likewise, time per byte on one link."""
    overhead_us: float
    """Profile.stage_overhead_us."""
    optimizer_us: Floats
    """Sums [K + 1]."""
    ties: Ints
    """[T, widest]: sections of each shared parameter, -1 where there are fewer."""
    tie_bytes: Ints
    """[T]."""
    ends_bytes: int
    """Bytes of weights that the first and the last section share."""


class ModelTotals(NamedTuple):
    """Totals over all sections at one micro-batch size, for bounds."""

    forward_us: float
    backward_us: float
    own_bytes: float
    """SectionTables.own_bytes of all sections."""
    first_own_bytes: float
    """Those of the first section."""
    first_backward_us: float
    forward_share: float
    """SectionTables.forward_share at this size, like the next."""
    reduce_rate: float
    ends_bytes: int
    """NetworkCosts.ends_bytes."""
    hop_us: float
    """The least that a message takes one way."""


class StageTimes(NamedTuple):
    """The times of a cut's stages. A link is in the column of its earlier stage."""

    forward: Floats
    """µs [2, P], row 0 for a full micro-batch, row 1 for the last, like the next four."""
    recompute: Floats
    backward: Floats
    activation_transfer: Floats
    gradient_transfer: Floats
    latency: Floats
    """µs [P]."""
    finish: Floats
    """µs [P]: what follows the last backward: all-reduce, tied weights, optimizer."""


class SearchLimits(NamedTuple):
    """Limits and settings of all shapes."""

    usable_bytes: int
    policy: int
    staged: bool
    """Whether receives wait in host memory (`memory.input_sets`)."""
    runs_ahead: bool
    """Whether the policy uses run-ahead."""
    counts_stages: bool
    """Whether the policy limits what is in flight by the stages that follow."""


class FreeCuts(NamedTuple):
    """The best cuts without a memory limit, for all P at once; see `_cuts`."""

    free_us: Floats
    """[S, P + 1]: work of the busiest stage."""
    free_end: Ends
    """[S, P + 1, K + 1]: where stages end."""
    least_us: Floats
    """[S, P + 1]: a lower bound of the busiest stage's work with the memory limit."""


class SearchProblem(NamedTuple):
    """Everything that all shapes share."""

    sections: SectionTables
    net: NetworkCosts
    limits: SearchLimits
    tables: FreeCuts


class CutShape(NamedTuple):
    """P × D devices at one micro-batch size and one level of run-ahead."""

    a: int
    """Index of the micro-batch size."""
    P: int
    D: int
    N: int
    level: int
    """Of `LEVELS`."""


class StageCut(NamedTuple):
    """Buffers for the stages of a cut: P stages use the first P places, and one more of `starts`."""

    starts: Ints
    """First section of each stage, and K."""
    recompute: Flags


class CutInputs(NamedTuple):
    """The sections at one micro-batch size, and the memory, as cutting reads them."""

    work: Floats
    """Sums [K + 1], like the next four."""
    rework: Floats
    state: Ints
    update: Ints
    activation: Ints
    inputs: Ints
    """[K], like the next two."""
    outputs: Ints
    working: Ints
    usable: int
    least_input: int
    """SectionTables.least_input at this size, like the next."""
    least_output: int


class ShapeTable(NamedTuple):
    """All shapes, one array per column; `search_shapes` fills in the state and the time."""

    size: Ints
    """Index of the micro-batch size."""
    p: Ints
    d: Ints
    n: Ints
    state: Ints
    time_us: Floats
    """Of the mini-batch: exact if SIMULATED, infinite if UNFIT, else a lower bound."""


BOUNDED, DRAWN, SIMULATED, UNFIT = 0, 1, 2, 3
"""State of a shape: bounded for any cut, bounded for its own cut, simulated, or too big for memory."""

UNLIMITED = 2**62
"""memory.usable_bytes of devices whose memory is not known; then all levels have the same cut."""

LEVELS = 3
"""Cuts are made with room for a run-ahead of 0, P, and RUN_AHEAD_STAGES · P."""
RUN_AHEAD_STAGES = 2
"""Run-ahead in units of P when memory is free: with it jitter costs least (measured)."""
