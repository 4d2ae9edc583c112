"""Which types of GPU run what: the mixtures that a search may try.

Letters: P stages, D replicas, G GPUs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, groupby, permutations

from varuna_planner.schedule.batching import micro_batches
from varuna_planner.search.pins import Pins
from varuna_proto.plan import Plan
from varuna_proto.wording import count_of

__all__ = ["Layout", "describe_gpu_types", "list_layouts"]


@dataclass(frozen=True)
class Layout:
    """Which types run what."""

    p: int
    replicas: tuple[tuple[str, int], ...]
    """Mixed by replica: (type, number of replicas), the fastest first. Empty: mixed by stage."""
    stages: tuple[tuple[str, int], ...] = ()
    """Mixed by stage: (type, number of neighbouring stages), in order."""
    alike: int = 1
    """Mixed by stage: D."""

    @property
    def d(self) -> int:
        return sum(count for _, count in self.replicas) if self.replicas else self.alike

    @cached_property
    def rows(self) -> tuple[tuple[tuple[str, ...], int], ...]:
        """(the type of each stage, the number of replicas that are so)."""
        if self.replicas:
            return tuple(((gpu_type,) * self.p, count) for gpu_type, count in self.replicas)
        return ((tuple(gpu_type for gpu_type, count in self.stages for _ in range(count)), self.alike),)

    @property
    def gpu_types(self) -> tuple[str, ...]:
        """By rank."""
        return tuple(gpu_type for row, count in self.rows for _ in range(count) for gpu_type in row)


def list_layouts(
    gpus: Mapping[str, int], speeds: Mapping[str, float], *, sections: int, pins: Pins
) -> Iterator[Layout]:
    """All mixtures of two types or more, in stages and replicas as the pins allow.

    Args:
        gpus: the number of GPUs, by type.
        speeds: the relative speed of each type; where not all GPUs are needed, the slowest are left out.
        sections: the most stages.
        pins: P and D that the user has fixed.
    """
    fastest_first = sorted(gpus, key=lambda name: (-speeds[name], name))
    for count in range(2, len(fastest_first) + 1):
        for chosen in combinations(fastest_first, count):
            yield from _list_by_replica(chosen, gpus, sections, pins)
            yield from _list_by_stage(chosen, gpus, sections, pins)


def _list_by_replica(
    fastest_first: Sequence[str], gpus: Mapping[str, int], sections: int, pins: Pins
) -> Iterator[Layout]:
    most = min(sections, *(gpus[name] for name in fastest_first))
    for p in (pins.p,) if pins.p else range(1, most + 1):
        if p > most:
            continue
        replicas = {name: gpus[name] // p for name in fastest_first}
        spare = 0 if pins.d is None else sum(replicas.values()) - pins.d
        for name in reversed(fastest_first):
            dropped = min(max(spare, 0), replicas[name] - 1)
            replicas[name] -= dropped
            spare -= dropped
        if spare == 0:
            yield Layout(p, tuple(replicas.items()))


def _list_by_stage(
    fastest_first: Sequence[str], gpus: Mapping[str, int], sections: int, pins: Pins
) -> Iterator[Layout]:
    most = min(gpus[name] for name in fastest_first)
    for d in (pins.d,) if pins.d else range(1, most + 1):
        if d > most:
            continue
        stages = {name: gpus[name] // d for name in fastest_first}
        for name in reversed(fastest_first):
            stages[name] = max(1, stages[name] - max(0, sum(stages.values()) - (pins.p or sections)))
        p = sum(stages.values())
        if p > sections or p != (pins.p or p):
            continue
        for order in permutations(fastest_first):
            yield Layout(p, (), tuple((name, stages[name]) for name in order), d)


def describe_gpu_types(plan: Plan) -> str:
    """Which types run what in a plan, in words; empty: all its GPUs are of one type."""
    if len(set(plan.gpu_types)) < 2:
        return ""
    rows = [plan.gpu_types[replica * plan.p : (replica + 1) * plan.p] for replica in range(plan.d)]
    if all(len(set(row)) == 1 for row in rows):
        runs = micro_batches(plan.global_batch, plan.micro_batch, plan.d, plan.shares)
        sizes: dict[str, list[int]] = {}
        for row, run in zip(rows, runs, strict=True):
            sizes.setdefault(row[0], []).append(len(run))
        return " and ".join(
            f"{count_of(len(each), 'replica')} of {gpu_type} ({_render_shares(each)})"
            for gpu_type, each in sizes.items()
        )
    if len(set(rows)) > 1:
        counts = Counter(plan.gpu_types)
        return " and ".join(f"{count_of(count, 'GPU')} of {gpu_type}" for gpu_type, count in counts.items())
    stages = [f"{count_of(len(list(run)), 'stage')} of {gpu_type}" for gpu_type, run in groupby(rows[0])]
    return f"{', then '.join(stages)} in each replica"


def _render_shares(sizes: Sequence[int]) -> str:
    least, most = min(sizes), max(sizes)
    one = f"{least} micro-batch{'' if least == 1 else 'es'}"
    shares = one if least == most else f"{least} to {most} micro-batches"
    return shares if len(sizes) == 1 else f"{shares} each"
