"""The meters of one rank's sections, as many at once as the device has room for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import structlog

from varuna.calibration.clock import ComputeClock
from varuna.calibration.section_meter import SectionMeter, measure_in_turn, time_stage_overhead
from varuna.calibration.subject import CalibrationSubject
from varuna.devices.accelerator import free_memory_bytes, is_accelerator
from varuna.devices.out_of_memory import is_memory_error, tolerating_memory_errors
from varuna_planner.profile.document import Measurement

__all__ = ["SectionMeters"]

_log = structlog.get_logger(__name__)

_OVERHEAD_S = 0.5
"""How long the measurement of a stage's overhead takes."""


class SectionMeters:
    """Measures sections of the subject.

    Building a meter takes longer than measuring with it (0.1 s for a model of 1,300 modules). So each is built once if
    the device has room for it, and otherwise for each measurement.
    """

    def __init__(self, subject: CalibrationSubject, room_bytes: float | None = None) -> None:
        """`room_bytes`: the limit on parameters of sections that stay on the device; None: no limit on a CPU, a quarter
        of the free memory on a GPU."""
        self.subject = subject
        device = subject.device
        self.clock = ComputeClock(device)
        self._kept: dict[int, SectionMeter] = {}
        self.random_by_micro_batch: dict[str, None] = {}
        """The places where sections draw random numbers for the whole micro-batch, in order."""
        if room_bytes is None:
            room_bytes = free_memory_bytes(device) / 4 if is_accelerator(device) else math.inf
        self._room_bytes = room_bytes

    def build_meters(self, sections: Sequence[int]) -> None:
        """Builds the meters that may stay. A section that does not fit is logged when it is to be measured."""
        for section in sections:
            if self._bytes(section) <= self._room_bytes:
                with tolerating_memory_errors():
                    self._get_meter(section)

    def measure_sections(
        self, sections: Sequence[int], inputs: Mapping[str, Any], size: int, slice_s: float
    ) -> list[Measurement | None]:
        """Measures the sections, in ascending order; None if a section does not fit on the device at this size."""
        kept = [section for section in sections if section in self._kept]
        found: dict[int, Measurement | None] = {}
        if kept:
            with tolerating_memory_errors():
                in_turn = measure_in_turn([self._kept[section] for section in kept], inputs, size, slice_s)
                self._record_draws([self._kept[section] for section in kept])
                found.update(zip(kept, in_turn, strict=True))
        return [
            found[section] if section in found else self._measure_alone(section, inputs, size, slice_s)
            for section in sections
        ]

    def _measure_alone(self, section: int, inputs: Mapping[str, Any], size: int, slice_s: float) -> Measurement | None:
        try:
            meter = self._get_meter(section)
            [measured] = measure_in_turn([meter], inputs, size, slice_s)
            self._record_draws([meter])
            return measured
        except RuntimeError as error:
            if not is_memory_error(error):
                raise
            if not self._kept:
                _log.info("does not fit", section=section, micro_batch=size)
                return None
        # It may fit without the other sections. From now on no section stays.
        self._kept.clear()
        self._room_bytes = 0
        return self._measure_alone(section, inputs, size, slice_s)

    def _record_draws(self, meters: Sequence[SectionMeter]) -> None:
        for meter in meters:
            self.random_by_micro_batch.update(dict.fromkeys(meter.random.places_of_micro_batches))

    def _get_meter(self, section: int) -> SectionMeter:
        if section in self._kept:
            return self._kept[section]
        meter = self._make_meter(range(section, section + 1))
        if self._bytes(section) <= self._room_bytes:
            self._room_bytes -= self._bytes(section)
            self._kept[section] = meter
        return meter

    def _make_meter(self, sections: range) -> SectionMeter:
        return SectionMeter(self.subject, sections, self.clock)

    def measure_stage_overhead_us(self, sections: range, size: int) -> tuple[float, float] | None:
        """Microseconds that each (forward, backward) of a stage takes on top of its sections, measured on these.

        None if there are fewer than two sections, or the device has no room.
        """
        if len(sections) < 2:
            return None
        self._kept.clear()
        try:
            whole, *parts = (self._make_meter(each) for each in (sections, *(range(i, i + 1) for i in sections)))
            return time_stage_overhead(
                whole, parts, self.subject.get_batch(size), micro_batch=size, slice_s=_OVERHEAD_S
            )
        except RuntimeError as error:
            if not is_memory_error(error):
                raise
            _log.info("no room to measure what a stage takes on top of its sections", sections=len(sections))
            return None

    def _bytes(self, section: int) -> int:
        parameters = self.subject.model_map.sections[section].parameters
        return sum(self.subject.model_map.parameter_bytes[name] for name in parameters)
