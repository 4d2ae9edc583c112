"""Numbered reports, kept until the manager has stored them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import TypeVar

from varuna_proto.bounds import MOST_REPORT_BYTES
from varuna_proto.v1 import agent_pb2

_MOST_ITEMS_BYTES = MOST_REPORT_BYTES // 2
"""Of the steps or values in one report: the manager drops the contents of larger ones than it takes."""
_ITEM_OVERHEAD_BYTES = 8
"""At most: an item's tag and length."""

Item = TypeVar("Item", agent_pb2.StepResult, agent_pb2.LoggedValue)


class ReportOutbox:
    """Keeps reports in order, from number 1. Steps and logged values wait apart and go into as few reports as possible.

    A report that may have been sent never changes, because the manager ignores a number that it has stored; only a
    notice says how much time is left of it then. So steps are numbered late: when they can be sent, or when a later
    report must follow them. That bounds the outbox while the manager is away, whatever the rate of steps.

    Args:
        window: steps go into no new report while this many reports are unacknowledged.
        max_waiting_steps: beyond this, the outbox drops every second step of the older half (their losses are a curve).
        max_waiting_values: the same for the values that scripts have logged, of each name.
    """

    def __init__(self, *, window: int = 64, max_waiting_steps: int = 20_000, max_waiting_values: int = 5_000) -> None:
        self._window = window
        self._max_waiting_values = max_waiting_values
        self._values: dict[tuple[str, int], dict[tuple[str, int], agent_pb2.LoggedValue]] = {}
        """By generation, and there by name and step."""
        self._max_waiting_steps = max_waiting_steps
        self._unacknowledged: deque[agent_pb2.Report] = deque()
        self._next_number = 1
        self._steps: dict[tuple[str, int], list[agent_pb2.StepResult]] = {}

    @property
    def unacknowledged(self) -> tuple[agent_pb2.Report, ...]:
        return tuple(self._unacknowledged)

    @property
    def first_report(self) -> int:
        """The number of the oldest unacknowledged report, or of the next report when all are acknowledged."""
        return self._unacknowledged[0].number if self._unacknowledged else self._next_number

    @property
    def is_empty(self) -> bool:
        return not self._unacknowledged and not self._steps and not self._values

    @property
    def waiting_steps(self) -> int:
        return sum(map(len, self._steps.values()))

    def add_report(self, report: agent_pb2.Report) -> agent_pb2.Report:
        """Number the report and keep it until it is acknowledged."""
        report.number = self._next_number
        self._next_number += 1
        self._unacknowledged.append(report)
        return report

    def add_step(self, job_id: str, generation: int, step: agent_pb2.StepResult) -> None:
        steps = self._steps.setdefault((job_id, generation), [])
        steps.append(step)
        if len(steps) > self._max_waiting_steps:
            half = len(steps) // 2
            steps[:half] = steps[:half:2]

    def add_value(self, job_id: str, generation: int, value: agent_pb2.LoggedValue) -> None:
        """Of the values of a name at a step, that of the lowest rank stays, and of its own the last."""
        values = self._values.setdefault((job_id, generation), {})
        known = values.pop((value.name, value.step), None)
        values[value.name, value.step] = value if known is None or value.rank <= known.rank else known
        if len(values) > self._max_waiting_values:
            older = list(values)[: len(values) // 2]
            for dropped in _every_second_of_each_name(older) or older[1::2]:
                del values[dropped]

    def take_steps(self, *, even_if_full: bool = False) -> tuple[agent_pb2.Report, ...]:
        """Turn the waiting steps and values into new reports, as few as take them; into none while the window is full.

        A report has steps or values of one generation."""
        if len(self._unacknowledged) >= self._window and not even_if_full:
            return ()
        steps_of, self._steps = self._steps, {}
        values_of, self._values = self._values, {}
        reports = [
            agent_pb2.Report(
                steps_completed=agent_pb2.StepsCompleted(job_id=job_id, generation=generation, steps=steps)
            )
            for (job_id, generation), waiting in steps_of.items()
            for steps in _split(waiting)
        ]
        reports += [
            agent_pb2.Report(values_logged=agent_pb2.ValuesLogged(job_id=job_id, generation=generation, values=values))
            for (job_id, generation), by_name in values_of.items()
            for values in _split(by_name.values())
        ]
        return tuple(self.add_report(report) for report in reports)

    def discard_through(self, number: int) -> None:
        while self._unacknowledged and self._unacknowledged[0].number <= number:
            self._unacknowledged.popleft()


def _every_second_of_each_name(keys: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    """By name and step. A script logs its names in turn: every second of all keys would be all of some names."""
    by_name: dict[str, list[tuple[str, int]]] = {}
    for key in keys:
        by_name.setdefault(key[0], []).append(key)
    return [key for of_name in by_name.values() for key in of_name[1::2]]


def _split(items: Iterable[Item]) -> Iterator[list[Item]]:
    """The items in order, in parts that each fit into a report."""
    part: list[Item] = []
    part_bytes = 0
    for item in items:
        item_bytes = item.ByteSize() + _ITEM_OVERHEAD_BYTES
        if part and part_bytes + item_bytes > _MOST_ITEMS_BYTES:
            yield part
            part, part_bytes = [], 0
        part.append(item)
        part_bytes += item_bytes
    if part:
        yield part
