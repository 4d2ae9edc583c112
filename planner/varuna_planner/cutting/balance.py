"""A profile as arrays, cut into stages: what the compiled search reads, and the pipeline that a cut makes.

Letters: K sections, S micro-batch sizes, P stages, D replicas, N micro-batches of a replica, m examples in a
micro-batch. Sums over sections are kept as prefix sums, so that any run of sections costs one subtraction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from varuna_planner.cutting import _kernels
from varuna_planner.cutting._tables import NetworkCosts, SectionTables
from varuna_planner.cutting.pipeline import Pipeline
from varuna_planner.profile.document import AllReduceMeasurement, Measurement, Profile

__all__ = [
    "NetworkCosts",
    "SectionTables",
    "fit_all_reduce",
    "make_network_costs",
    "make_pipeline",
    "section_tables",
]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_FIELDS = tuple(name for name in Measurement.model_fields if name != "micro_batch")
_BYTES = [index for index, name in enumerate(_FIELDS) if name.endswith("_bytes")]

_GRID = 1024.0
"""Work is rounded to this fraction of a microsecond, so that sums do not depend on where they begin."""


def section_tables(profile: Profile, sizes: Sequence[tuple[int, int]], *, sums_gradients: bool = True) -> SectionTables:
    """The profile at S sizes, each (examples of a micro-batch, of the last one, which may be smaller).

    `sums_gradients`: whether there may be several replicas, for whose sums all gradients are copied.
    """
    measured = _MeasuredSums(profile)
    pairs = np.stack(
        [np.stack([measured.measurements_at(m), measured.measurements_at(last)]) for m, last in sizes]
    )  # [S, 2, K, fields]
    column = {name: pairs[..., index] for index, name in enumerate(_FIELDS)}
    full = {name: values[:, 0].astype(np.int64) for name, values in column.items() if name.endswith("_bytes")}
    parts = [(s.parameter_bytes + s.gradient_bytes + s.optimizer_bytes, s.gradient_bytes) for s in profile.sections]
    state, gradient = np.array(parts, dtype=np.int64).T
    update = np.array([s.update_bytes for s in profile.sections], dtype=np.int64)
    forward = column["forward_us"][:, 0]
    work = forward + column["backward_us"][:, 0]
    own = _own_bytes(profile, gradient)
    return SectionTables(
        forward_us=_sums(column["forward_us"]),
        recompute_us=_sums(column["recompute_us"]),
        backward_us=_sums(column["backward_us"]),
        output_bytes=np.ascontiguousarray(column["output_bytes"]),
        forward_share=(forward / np.maximum(work, 1e-300)).max(axis=1),
        work_us=_sums(np.round(work * _GRID) / _GRID),
        rework_us=_sums(np.round(column["recompute_us"][:, 0] * _GRID) / _GRID),
        state_bytes=_sums(state),
        # One after the other: the copies are gone when the optimizer steps.
        update_bytes=_sums(np.maximum(update, gradient) if sums_gradients else update),
        gradient_bytes=_sums(gradient),
        own_bytes=_sums(own),
        reduce_rate=(column["backward_us"][:, 0] / np.maximum(own, 1e-300))[:, :-1].max(axis=1, initial=0.0),
        activation_bytes=_sums(full["activation_bytes"]),
        inputs=full["input_bytes"],
        outputs=full["output_bytes"],
        working=np.where(full["working_bytes"] > 0, full["working_bytes"], _guess_working(full)),
        least_input=_least(full["input_bytes"][:, 1:]),
        least_output=_least(full["output_bytes"][:, :-1]),
        least_message=_least(column["output_bytes"][:, 0, :-1]),
    )


def _guess_working(full: Mapping[str, Ints]) -> Ints:
    """What running one section takes for a while: its messages, and gradients the size of its activations."""
    return full["input_bytes"] + full["output_bytes"] + full["activation_bytes"]


def _least(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The least of each row; 0 when rows are empty."""
    return values.min(axis=1) if values.shape[1] else np.zeros(len(values), dtype=values.dtype)


def _own_bytes(profile: Profile, gradient: Ints) -> Floats:
    """Each section's gradients without tied weights; what these exceed a section's by comes off every section."""
    own = gradient.astype(np.float64)
    for shared in profile.shared_parameters:
        own[list(shared.sections)] -= shared.bytes
    own[:] = np.maximum(own + np.minimum(own, 0.0).sum(), 0.0)
    return own


def _sums(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    sums = np.zeros((*values.shape[:-1], values.shape[-1] + 1), dtype=values.dtype)
    np.cumsum(values, axis=-1, out=sums[..., 1:])
    return sums


class _MeasuredSums:
    """`profile.at` for all sections at once."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._sizes = [m.micro_batch for m in profile.sections[0].measurements]
        # Sections that were measured at different sizes have to be interpolated one by one.
        self._alike = all([m.micro_batch for m in s.measurements] == self._sizes for s in profile.sections)
        self._values = np.zeros((0, 0, 0))
        if self._alike:
            rows = [[_values(m) for m in section.measurements] for section in profile.sections]
            self._values = np.array(rows, dtype=np.float64)  # [K, sizes, fields]

    def measurements_at(self, m: int) -> Floats:
        """[K, fields]."""
        if not self._alike:
            return np.array(
                [_values(measurement) for measurement in self._profile.measurements_at(m)], dtype=np.float64
            )
        if m in self._sizes:
            return self._values[:, self._sizes.index(m)]
        found = _line(self._sizes, self._values, m)
        found[:, _BYTES] = np.ceil(found[:, _BYTES])
        return found


def _values(m: Measurement) -> tuple[float, ...]:
    return tuple(getattr(m, name) for name in _FIELDS)


def _line(sizes: Sequence[int], values: Floats, m: int) -> Floats:
    """profile.interpolate, for an m that was not measured: [K, fields] from [K, sizes, fields]."""
    if len(sizes) == 1:
        return values[:, 0] * m / sizes[0]
    right = min(max(int(np.searchsorted(sizes, m)), 1), len(sizes) - 1)
    before, after = values[:, right - 1], values[:, right]
    slope = (after - before) / (sizes[right] - sizes[right - 1])
    if m > sizes[-1]:
        return np.maximum(after, after + slope * (m - sizes[-1]))
    line: Floats = before + slope * (m - sizes[right - 1])
    if m < sizes[0]:
        line = np.minimum(np.maximum(line, before * m / sizes[0]), before)
    return line


def make_network_costs(profile: Profile, *, gpus: int, gpus_per_vm: int) -> NetworkCosts:
    """The profile's links, its all-reduce fitted, and its shared parameters."""
    links = [
        np.array([link.latency_us + link.jitter_us, link.bandwidth_bytes_per_s / 1e6])
        for link in (profile.links.same_vm, profile.links.other_vm)
    ]
    # No ring leaves a lone VM. Over several, those of the stages on a VM share its network (`_kernels.ring_costs`).
    one_vm = gpus <= gpus_per_vm
    at_once = 1 if one_vm else gpus_per_vm
    hop_us, byte_us = fit_all_reduce(profile, links[0] if one_vm else links[1], at_once)
    ends = {0, len(profile.sections) - 1}
    widest = max((len(shared.sections) for shared in profile.shared_parameters), default=1)
    ties = np.full((len(profile.shared_parameters), widest), -1, dtype=np.int64)
    for row, shared in enumerate(profile.shared_parameters):
        ties[row, : len(shared.sections)] = shared.sections
    return NetworkCosts(
        same_vm=links[0],
        other_vm=links[1],
        gpus_per_vm=gpus_per_vm,
        hop_us=hop_us,
        byte_us=byte_us,
        overhead_us=profile.stage_overhead_us,
        optimizer_us=_sums(np.array([section.optimizer_us for section in profile.sections])),
        ties=ties,
        tie_bytes=np.array([shared.bytes for shared in profile.shared_parameters], dtype=np.int64),
        ends_bytes=sum(shared.bytes for shared in profile.shared_parameters if ends <= set(shared.sections)),
    )


def fit_all_reduce(profile: Profile, link: Floats, most: int) -> tuple[Floats, Floats]:
    """(µs per hop, µs per byte on a link), each [most], of 1, 2, ... `most` ring all-reduces at once:
    us = 2(n-1)·hop + 2(n-1)/n·bytes·byte.

    As measured, on the line between two measured numbers of rings, or as the nearest. Without measurements, from the
    link.
    """
    if not profile.all_reduce:
        return np.full(most, link[0]), np.full(most, 1 / link[1])
    measured = sorted({a.rings for a in profile.all_reduce})
    fits = np.array([_fit_rings([a for a in profile.all_reduce if a.rings == k]) for k in measured])
    rings = np.arange(1, most + 1)
    return np.interp(rings, measured, fits[:, 0]), np.interp(rings, measured, fits[:, 1])


def _fit_rings(all_reduce: Sequence[AllReduceMeasurement]) -> tuple[float, float]:
    """Least squares on relative error, both at least 0: any ring size and any number of bytes can be predicted."""
    terms = np.array([[2 * (a.ranks - 1), 2 * (a.ranks - 1) / a.ranks * a.bytes] for a in all_reduce])
    terms = terms / np.array([[a.us] for a in all_reduce])
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


def make_pipeline(
    sections: SectionTables,
    net: NetworkCosts,
    bounds: Ints,
    recompute: npt.NDArray[np.bool_],
    *,
    N: int,
    d: int,
    size: int = 0,
) -> Pipeline:
    """The busiest replica's pipeline, with links, all-reduce and tied weights.

    Args:
        sections: of `section_tables`, at whose size number `size` the pipeline runs.
        net: of `make_network_costs`.
        bounds: [P + 1] first section of each stage, and K.
        recompute: [P].
        N: micro-batches of the busiest replica, the first.
        d: replicas.
    """
    times = _kernels.stage_times(sections, net, size, bounds, d)
    return Pipeline(
        micro_batches=N,
        forward_us=times.forward,
        recompute_us=times.recompute,
        backward_us=times.backward,
        activation_transfer_us=times.activation_transfer,
        gradient_transfer_us=times.gradient_transfer,
        latency_us=times.latency,
        finish_us=times.finish,
        recompute=recompute,
    )
