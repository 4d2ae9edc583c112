"""The measurements of all sections, made by all ranks in parallel.

Rank r of W measures sections r, r+W, …. All ranks measure the same micro-batch sizes, doubling from 1. They stop
together when larger ones save no more time per example, do not fit, or the time is up.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from varuna.calibration.measurements import scale_times, subtract_overhead
from varuna.calibration.peers import CalibrationPeers
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
    """What rank 0 has gathered about the sections."""

    by_section: dict[int, list[Measurement]]
    sharing: float
    """How many times as long work takes as on cores of its own. The measurements include it."""
    stage_overhead_us: float = 0.0
    """What each op of a stage takes on top of its sections. No measurement includes it."""
    random_by_micro_batch: tuple[str, ...] = ()
    """Places in the user's code that draw for the whole micro-batch."""


def measure_sections(
    meters: SectionMeters,
    peers: CalibrationPeers,
    *,
    mine: Sequence[int],
    sizes: Sequence[int],
    budget_s: float,
    decide: bool,
) -> SectionMeasurements | None:
    """Measures the sections `mine` on each rank; returns the measurements of all sections on rank 0, None elsewhere.

    `decide`: stop early when larger sizes gain nothing or the time is up.
    Raises ValueError when not even the smallest size fits on the device.
    """
    get_batch = meters.subject.get_batch
    meters.build_meters(mine)
    started_s = time.monotonic()
    slice_s = budget_s / (_SIZES_EXPECTED * max(1, len(mine)))
    found: dict[int, list[Measurement]] = {section: [] for section in mine}
    per_example_us: list[float] = []
    for size in sizes:
        size_started_s = time.monotonic()
        inputs = get_batch(size) if mine else {}
        results = meters.measure_sections(mine, inputs, size, slice_s)
        fits = None not in results
        total_us = sum(result.forward_us + result.backward_us for result in results if result is not None)
        parts = peers.gather_values(f"size{size}", total_us if fits else None)
        decided = None
        if parts is not None:
            known_us = [part for part in parts if part is not None]
            all_fit = len(known_us) == len(parts)
            per_example_us.append(sum(known_us) / size)
            now_s = time.monotonic()
            in_time = now_s - started_s + (now_s - size_started_s) <= budget_s
            decided = {
                "fits": all_fit,
                "continue": all_fit and (not decide or (in_time and is_worth_doubling(per_example_us))),
            }
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
    overhead_us = meters.measure_stage_overhead_us(
        _overhead_sections(peers, len(meters.subject.model_map.sections)), sizes[0]
    )
    overheads_us = peers.gather_values("overhead", overhead_us)
    sharing = peers.gather_values("sharing", meters.clock.sharing if mine else None)
    gathered = peers.gather_values(
        "sections", {str(i): [each.model_dump() for each in measured] for i, measured in found.items()}
    )
    places = peers.gather_values("random", list(meters.random_by_micro_batch))
    if gathered is None or sharing is None or overheads_us is None or places is None:
        return None
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
        random_by_micro_batch=tuple(dict.fromkeys(place for part in places for place in part)),
    )


def _overhead_sections(peers: CalibrationPeers, count: int) -> range:
    """Neighbours in the model, others on each rank, because the overhead depends on where in the model a stage is."""
    length = min(count, _OVERHEAD_SECTIONS)
    first = (count - length) * (2 * peers.rank + 1) // (2 * peers.world_size)
    return range(first, first + length)
