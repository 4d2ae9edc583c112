"""The measurements of all sections, made by all ranks in parallel.

Rank r of the W ranks on one type of GPU measures sections r, r+W, …, so that each type's ranks measure all of them. All
ranks measure the same micro-batch sizes, doubling from 1. They stop together when larger ones save no more time per
example on any type, do not fit on one, or the time is up.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from varuna.calibration.measurements import scale_times, subtract_overhead
from varuna.calibration.peers import CalibrationPeers
from varuna.calibration.rank_types import RankTypes
from varuna.calibration.section_meters import SectionMeters
from varuna_planner.profile.document import Measurement

__all__ = ["SectionMeasurements", "is_worth_doubling", "list_doubled_sizes", "measure_sections"]

_OVERHEAD_SECTIONS = 3
"""The sections of a stage on which its overhead is measured."""

_SIZES_EXPECTED = 8
"""The number of micro-batch sizes that share the time at first: 1 to 128."""


_GAIN = 0.05
"""The share of the time per example that a larger micro-batch must save."""


def is_worth_doubling(per_example_us: Sequence[float]) -> bool:
    """Whether to measure twice the micro-batch, by the times per example of all sizes so far, ascending.

    False if neither of the last two sizes beats the best before them by 5 %; one of them alone may be noise.
    """
    if len(per_example_us) < 3:
        return True
    best = min(per_example_us[:-2])
    return min(per_example_us[-2:]) < (1 - _GAIN) * best


def list_doubled_sizes(global_batch: int) -> list[int]:
    """The micro-batch sizes to measure, as long as they pay."""
    return [1 << power for power in range(global_batch.bit_length())]


@dataclass
class SectionMeasurements:
    """What rank 0 has gathered about the sections, on one type of GPU."""

    by_section: dict[int, list[Measurement]]
    sharing: float
    """How many times as long work takes as on cores of its own. The measurements include it."""
    stage_overhead_us: float = 0.0
    """What each op of a stage takes on top of its sections. No measurement includes it."""
    random_by_micro_batch: tuple[str, ...] = ()
    """Places in the user's code that draw for the whole micro-batch, on whatever type."""


def measure_sections(
    meters: SectionMeters,
    peers: CalibrationPeers,
    types: RankTypes,
    *,
    sections: Sequence[int],
    sizes: Sequence[int],
    budget_s: float,
    decide: bool,
) -> dict[str, SectionMeasurements] | None:
    """Measures the sections on each type of GPU; returns the measurements by type on rank 0, None elsewhere.

    `decide`: stop early when larger sizes gain nothing or the time is up.
    Raises ValueError when not even the smallest size fits on the device.
    """
    mine = types.share_sections(sections, peers.rank)
    found = _measure_sizes(meters, peers, types, mine=mine, sizes=sizes, budget_s=budget_s, decide=decide)
    overhead_us = meters.measure_stage_overhead_us(
        _overhead_sections(*types.find_place(peers.rank), len(meters.subject.model_map.sections)), sizes[0]
    )
    overheads_us = peers.gather_values("overhead", overhead_us)
    sharing = peers.gather_values("sharing", meters.clock.sharing if mine else None)
    gathered = peers.gather_values(
        "sections", {str(i): [each.model_dump() for each in measured] for i, measured in found.items()}
    )
    places = peers.gather_values("random", list(meters.random_by_micro_batch))
    if gathered is None or sharing is None or overheads_us is None or places is None:
        return None
    drawn = tuple(dict.fromkeys(place for part in places for place in part))
    return {
        gpu_type: _combine_ranks(
            [gathered[rank] for rank in ranks],
            [sharing[rank] for rank in ranks],
            [overheads_us[rank] for rank in ranks],
            drawn,
        )
        for gpu_type in types.all
        for ranks in [types.list_ranks(gpu_type)]
    }


def _measure_sizes(
    meters: SectionMeters,
    peers: CalibrationPeers,
    types: RankTypes,
    *,
    mine: Sequence[int],
    sizes: Sequence[int],
    budget_s: float,
    decide: bool,
) -> dict[int, list[Measurement]]:
    """Measures the sections `mine` at the sizes that fit on every rank. Rank 0 decides after which one all stop."""
    get_batch = meters.subject.get_batch
    meters.build_meters(mine)
    started_s = time.monotonic()
    slice_s = budget_s / (_SIZES_EXPECTED * max(1, len(mine)))
    found: dict[int, list[Measurement]] = {section: [] for section in mine}
    per_example_us: dict[str, list[float]] = {gpu_type: [] for gpu_type in types.all}
    for size in sizes:
        size_started_s = time.monotonic()
        inputs = get_batch(size) if mine else {}
        results = meters.measure_sections(mine, inputs, size, slice_s)
        fits = None not in results
        total_us = sum(result.forward_us + result.backward_us for result in results if result is not None)
        parts = peers.gather_values(f"size{size}", total_us if fits else None)
        decided = None
        if parts is not None:
            for gpu_type, us in per_example_us.items():
                us.append(sum(parts[rank] or 0.0 for rank in types.list_ranks(gpu_type)) / size)
            all_fit = None not in parts
            now_s = time.monotonic()
            in_time = now_s - started_s + (now_s - size_started_s) <= budget_s
            pays = any(is_worth_doubling(us) for us in per_example_us.values())
            decided = {"fits": all_fit, "continue": all_fit and (not decide or (in_time and pays))}
        decision: dict[str, bool] = peers.broadcast_value(f"after{size}", decided)
        if decision["fits"]:
            for section, result in zip(mine, results, strict=True):
                assert result is not None
                found[section].append(result)
        elif size == sizes[0]:
            raise ValueError(
                f"a section of the model does not fit on its device with a micro-batch of {size}: "
                "put more cut-points into the model, or use devices with more memory"
            )
        if not decision["continue"]:
            break
    return found


def _combine_ranks(
    gathered: Sequence[dict[str, Any]],
    sharing: Sequence[float | None],
    overheads_us: Sequence[tuple[float, float] | None],
    random_by_micro_batch: tuple[str, ...],
) -> SectionMeasurements:
    """What the ranks on one type of GPU have measured, as each of them has sent it."""
    # One factor for all: in training every rank shares its cores, whatever the luck of each was in this calibration.
    factor = statistics.median(each for each in sharing if each is not None)
    known = [each for each in overheads_us if each is not None] or [(0.0, 0.0)]
    forward_us, backward_us = (statistics.median(times) for times in zip(*known, strict=True))
    return SectionMeasurements(
        {
            int(i): [
                scale_times(subtract_overhead(Measurement(**each), forward_us, backward_us), factor)
                for each in measured
            ]
            for part in gathered
            for i, measured in part.items()
        },
        factor,
        # The planner adds one figure to forwards, backwards and recomputes alike.
        stage_overhead_us=(forward_us + backward_us) / 2 * factor,
        random_by_micro_batch=random_by_micro_batch,
    )


def _overhead_sections(place: int, ranks: int, count: int) -> range:
    """Neighbours in the model, others on each rank, because the overhead depends on where in the model a stage is.

    `place`: of the rank among the `ranks` of its type.
    """
    length = min(count, _OVERHEAD_SECTIONS)
    first = (count - length) * (2 * place + 1) // (2 * ranks)
    return range(first, first + length)
