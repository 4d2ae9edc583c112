"""Cutting a model's sections into stages, and what the stages then cost.

Letters: K sections, P stages, N micro-batches of a replica, m examples in a micro-batch. Sums over sections are kept as
prefix sums, so that any run of sections costs one subtraction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from varuna_planner import _kernels
from varuna_planner.profile import Measurement, Profile
from varuna_planner.schedule import Policy
from varuna_planner.simulator import Pipeline

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class SectionTable:
    """A profile at one micro-batch size. Sums have K + 1 places; a second row is the smaller last micro-batch."""

    micro_batch: int
    forward_us: Floats
    """Sums [2, K + 1]."""
    recompute_us: Floats
    backward_us: Floats
    output_bytes: Floats
    """[2, K]: what crosses the cut after each section."""
    input_bytes: Ints
    """[K]."""
    working_bytes: Ints
    """[K]."""
    activation_bytes: Ints
    """Sums [K + 1]."""
    state_bytes: Ints
    """Sums [K + 1]: parameters, gradients and optimizer."""
    gradient_bytes: Ints
    """Sums [K + 1]."""

    @property
    def sections(self) -> int:
        return int(self.input_bytes.shape[0])


def section_table(profile: Profile, micro_batch: int, last_micro_batch: int) -> SectionTable:
    """The profile at a micro-batch size, and at that of the last micro-batch where it is smaller."""
    full, last = profile.at(micro_batch), profile.at(last_micro_batch)
    return SectionTable(
        micro_batch=micro_batch,
        forward_us=np.stack([_sums([m.forward_us for m in row]) for row in (full, last)]),
        recompute_us=np.stack([_sums([m.recompute_us for m in row]) for row in (full, last)]),
        backward_us=np.stack([_sums([m.backward_us for m in row]) for row in (full, last)]),
        output_bytes=np.array([[m.output_bytes for m in row] for row in (full, last)], dtype=np.float64),
        input_bytes=np.array([m.input_bytes for m in full], dtype=np.int64),
        working_bytes=np.array([_working_bytes(m) for m in full], dtype=np.int64),
        activation_bytes=_sums([m.activation_bytes for m in full]).astype(np.int64),
        state_bytes=_sums([s.parameter_bytes + s.gradient_bytes + s.optimizer_bytes for s in profile.sections]).astype(
            np.int64
        ),
        gradient_bytes=_sums([s.gradient_bytes for s in profile.sections]).astype(np.int64),
    )


def _working_bytes(measurement: Measurement) -> int:
    """What running one section takes for a while: its messages, and gradients the size of its activations."""
    return measurement.input_bytes + measurement.output_bytes + measurement.activation_bytes


def _sums(values: Sequence[float]) -> Floats:
    return np.concatenate([np.zeros(1), np.cumsum(np.array(values, dtype=np.float64))])


@dataclass(frozen=True, eq=False)
class Cuts:
    """The best ways to cut a model, for every number of stages at once."""

    value: Floats
    """[r, i]: the least work, in microseconds per micro-batch, of the busiest of r stages over sections i and up."""
    cut: Ints
    """[r, i]: where the first of them ends."""

    def busiest_us(self, P: int) -> float:
        """The work per micro-batch of the busiest of P stages; infinite when no cut into P stages fits the memory."""
        return float(self.value[P, 0]) if self.value.shape[0] > P else float("inf")

    def bounds(self, P: int) -> Ints | None:
        """[P + 1]: the first section of each stage, and K; None when no cut into P stages fits the memory."""
        if self.busiest_us(P) == float("inf"):
            return None
        bounds: Ints = _kernels.starts(self.cut, P)
        return bounds


def balance(table: SectionTable, *, usable_bytes: int, policy: Policy, N: int, most_stages: int) -> Cuts:
    """Cuts sections into 1 … most_stages stages so that the busiest stage works least. Exact, by dynamic programming.

    Work is forward + backward, + recompute where the stage would not fit usable_bytes without it; the last stage never
    recomputes. Ties put the longer stages first. Stages are counted from the end, since a stage's stash depends only
    on how many follow it: one table then serves every P.
    """
    value, cut = _kernels.balance(
        table.forward_us[0] + table.backward_us[0],
        table.recompute_us[0],
        table.state_bytes,
        table.activation_bytes,
        table.input_bytes,
        table.working_bytes,
        usable_bytes,
        policy.code,
        N,
        min(most_stages, table.sections),
    )
    return Cuts(value, cut)


@dataclass(frozen=True, kw_only=True, eq=False)
class Network:
    """What messages cost, ready for the kernels."""

    same_vm: Floats
    """(latency in µs, bytes per µs)."""
    other_vm: Floats
    gpus_per_vm: int
    hop_us: float
    """Of a ring all-reduce: time per hop."""
    byte_us: float
    """Of a ring all-reduce: time per byte on one link."""
    ties: Ints
    """[T, widest]: sections of each shared parameter, -1 where there are fewer."""
    tie_bytes: Ints
    """[T]."""


def network(profile: Profile, *, gpus: int, gpus_per_vm: int) -> Network:
    """The profile's links, its all-reduce fitted, and its shared parameters."""
    links = [
        np.array([link.latency_us + link.jitter_us, link.bandwidth_bytes_per_s / 1e6])
        for link in (profile.links.same_vm, profile.links.other_vm)
    ]
    hop_us, byte_us = fit_all_reduce(profile, links[0] if gpus <= gpus_per_vm else links[1])
    widest = max((len(shared.sections) for shared in profile.shared_parameters), default=1)
    ties = np.full((len(profile.shared_parameters), widest), -1, dtype=np.int64)
    for row, shared in enumerate(profile.shared_parameters):
        ties[row, : len(shared.sections)] = shared.sections
    return Network(
        same_vm=links[0],
        other_vm=links[1],
        gpus_per_vm=gpus_per_vm,
        hop_us=hop_us,
        byte_us=byte_us,
        ties=ties,
        tie_bytes=np.array([shared.bytes for shared in profile.shared_parameters], dtype=np.int64),
    )


def fit_all_reduce(profile: Profile, link: Floats) -> tuple[float, float]:
    """(µs per hop, µs per byte on a link) of ring all-reduces: us = 2(n-1)·hop + 2(n-1)/n·bytes·byte.

    Least squares on relative error over what was measured, both at least 0, so that any ring size and any number of
    bytes can be predicted; from the link when nothing was measured.
    """
    if not profile.all_reduce:
        return float(link[0]), float(1 / link[1])
    terms = np.array([[2 * (a.ranks - 1), 2 * (a.ranks - 1) / a.ranks * a.bytes] for a in profile.all_reduce])
    terms = terms / np.array([[a.us] for a in profile.all_reduce])
    ones = np.ones(len(terms))
    # Columns differ by many powers of ten; scaled, the solution is sound.
    scale = np.maximum(np.abs(terms).max(axis=0), 1e-300)
    solution = np.linalg.lstsq(terms / scale, ones, rcond=None)[0] / scale
    hop_us, byte_us = float(solution[0]), float(solution[1])
    if hop_us < 0:
        hop_us, byte_us = 0.0, float(terms[:, 1].sum() / (terms[:, 1] ** 2).sum())
    elif byte_us < 0:
        hop_us, byte_us = float(terms[:, 0].sum() / (terms[:, 0] ** 2).sum()), 0.0
    return hop_us, byte_us


@dataclass(frozen=True, kw_only=True, eq=False)
class Cost:
    """How many micro-batches, on how many replicas: what a cut needs besides to be timed."""

    N: int
    """Micro-batches of the busiest replica, the first."""
    d: int

    @property
    def short_last(self) -> bool:
        """Whether that replica has the global batch's last, smaller micro-batch: only when there is no other."""
        return self.d == 1


def bound_us(
    table: SectionTable,
    net: Network,
    bounds: Ints,
    recompute: npt.NDArray[np.bool_],
    cost: Cost,
    *,
    policy: Policy,
    run_ahead: int,
) -> float:
    """A lower bound of simulating the policy on the pipeline that `pipeline` gives, without building it.

    simulator.lower_bound, and besides the round trips that the policy's cap on micro-batches in flight makes.
    """
    return float(
        _kernels.candidate_bound(recompute, cost.N, policy.code, run_ahead, bounds, *_stage_arguments(table, net, cost))
    )


def pipeline(table: SectionTable, net: Network, bounds: Ints, recompute: npt.NDArray[np.bool_], cost: Cost) -> Pipeline:
    """The busiest replica's pipeline, with links, all-reduce and tied weights."""
    forward, recompute_time, backward, transfer, latency, finish = _kernels.stage_times(
        bounds, *_stage_arguments(table, net, cost)
    )
    return Pipeline(
        micro_batches=cost.N,
        forward_us=forward,
        recompute_us=recompute_time,
        backward_us=backward,
        activation_transfer_us=transfer,
        gradient_transfer_us=transfer,
        latency_us=latency,
        finish_us=finish,
        recompute=recompute,
    )


def _stage_arguments(
    table: SectionTable, net: Network, cost: Cost
) -> tuple[Floats, Floats, Floats, Floats, Ints, Ints, Ints, Floats, Floats, int, float, float, int, bool]:
    return (
        table.forward_us,
        table.recompute_us,
        table.backward_us,
        table.output_bytes,
        table.gradient_bytes,
        net.ties,
        net.tie_bytes,
        net.same_vm,
        net.other_vm,
        net.gpus_per_vm,
        net.hop_us,
        net.byte_us,
        cost.d,
        cost.short_last,
    )


def stage_memory(
    table: SectionTable,
    bounds: Ints,
    recompute: npt.NDArray[np.bool_],
    *,
    policy: Policy,
    N: int,
    run_ahead: int,
) -> tuple[int, ...]:
    """Peak bytes of each stage."""
    needed = _kernels.stage_memory(
        bounds,
        table.state_bytes,
        table.activation_bytes,
        table.input_bytes,
        table.working_bytes,
        0,
        policy.code,
        N,
        run_ahead,
        recompute,
        False,
    )
    return tuple(int(count) for count in needed)


def recompute_where_needed(
    table: SectionTable, bounds: Ints, *, usable_bytes: int, policy: Policy, N: int
) -> npt.NDArray[np.bool_]:
    """[P]: the stages that do not fit without recompute; never the last."""
    recompute = np.zeros(len(bounds) - 1, dtype=np.bool_)
    _kernels.stage_memory(
        bounds,
        table.state_bytes,
        table.activation_bytes,
        table.input_bytes,
        table.working_bytes,
        usable_bytes,
        policy.code,
        N,
        0,
        recompute,
        True,
    )
    return recompute


def largest_run_ahead(
    table: SectionTable,
    bounds: Ints,
    recompute: npt.NDArray[np.bool_],
    *,
    usable_bytes: int,
    policy: Policy,
    N: int,
    most: int,
) -> int:
    """The largest run-ahead up to `most` with which every stage still fits."""
    return int(
        _kernels.run_ahead(
            bounds,
            table.state_bytes,
            table.activation_bytes,
            table.input_bytes,
            table.working_bytes,
            usable_bytes,
            policy.code,
            N,
            most,
            recompute,
        )
    )
