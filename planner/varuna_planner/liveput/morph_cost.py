"""What a morph costs, and which shape is worth one: the manager decides by it, and so does the replay of traces.

A shape is worth its rate times the time for which it is expected to last, less what it costs to get there. Imports
nothing, because the manager's loop calls it.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from varuna_proto.plan import Device

__all__ = [
    "MEMORY_BYTES_PER_S",
    "NO_MOVES",
    "PRIOR_FIXED_S",
    "SUMS_PART",
    "MorphCost",
    "MorphKind",
    "MovedBytes",
    "MovingTime",
    "ShapeOption",
    "StateMoves",
    "choose_shape",
    "count_moved_bytes",
    "expected_life_s",
    "predict_moving",
    "worthwhile_ratio",
]


class MorphKind(StrEnum):
    IN_PLACE = "in place"
    """The survivors keep processes, stages and state."""
    FROM_MEMORY = "from memory"
    """New processes take the state from the memories of the old ones."""
    FROM_STORE = "from the store"
    """New processes load the newest checkpoint."""


PRIOR_FIXED_S: Final = {MorphKind.IN_PLACE: 0.8, MorphKind.FROM_MEMORY: 1.7, MorphKind.FROM_STORE: 1.7}
"""What a morph takes besides moving the state, before any was measured: the survivors meet and connect (0.4 to 1.4 s),
or new workers start, trace and meet (1.0 to 1.8 s); docs/benchmarks.md."""
MEMORY_BYTES_PER_S: Final = 1.9e9
"""What a process takes from another one's memory on the same VM, with checksums; docs/benchmarks.md."""
KEPT_BYTES_PER_S: Final = 1e10
"""What a process that goes on in place copies of its own state from a GPU to pinned host memory, so that others can
have it. Assumed; on a CPU nothing is copied."""
MARKS_S: Final = 5.0
"""Between two marks of a replica's share of a step, at least. A loss costs half an interval."""
SUMS_PART: Final = 1 / 3
"""Of the state's bytes, those of the sums of gradients: Adam has two moments beside each parameter, and sums are like
one of the three."""
SHORTEST_LIFE_S: Final = 60.0
LONGEST_LIFE_S: Final = 24 * 3600.0


@dataclass(frozen=True, kw_only=True)
class MovedBytes:
    """The state that a morph moves; each figure is that of the VM (or the pair) with the most."""

    received: int
    """From other VMs."""
    given: int
    """To other VMs, if the holders of a section share its receivers."""
    local: int
    """From processes of the same VM, to new ones."""
    local_in_place: int
    """The same where processes go on in place, each with what it has already."""
    kept: int
    """What a process has already that goes on so."""

    def predict_s(self, link_bytes_per_s: float, *, in_place: bool = False) -> float:
        """The time that they take, each VM sending and receiving at once."""
        over_link_s = max(self.received, self.given) / link_bytes_per_s
        if in_place:
            return over_link_s + self.local_in_place / MEMORY_BYTES_PER_S + self.kept / KEPT_BYTES_PER_S
        return over_link_s + self.local / MEMORY_BYTES_PER_S


def count_moved_bytes(
    section_bytes: Sequence[int],
    *,
    stage_starts: Sequence[int],
    placement: Sequence[Device],
    held_starts: Sequence[int],
    holders: Sequence[Device],
) -> MovedBytes:
    """What the ranks of a new shape take from the memories of old ones.

    Args:
        section_bytes: parameters and optimizer state of each section.
        stage_starts: first section of each stage of the new shape.
        placement: the device of each new rank (rank = replica · P + stage).
        held_starts, holders: the same of the old shape.

    Raises:
        ValueError: a section has no holder.
    """
    count, held_p, p = len(section_bytes), len(held_starts), len(stage_starts)
    holding: defaultdict[int, list[Device]] = defaultdict(list)
    for rank, device in enumerate(holders):
        for section in _list_sections(held_starts, rank % held_p, count):
            holding[section].append(device)
    received: Counter[str] = Counter()
    local: Counter[str] = Counter()
    local_in_place: Counter[str] = Counter()
    kept: Counter[Device] = Counter()
    wanted: Counter[int] = Counter()
    for rank, device in enumerate(placement):
        vm = device.vm_id
        for section in _list_sections(stage_starts, rank % p, count):
            if not holding[section]:
                raise ValueError(f"section {section} has no holder")
            if all(vm != holder.vm_id for holder in holding[section]):
                received[vm] += section_bytes[section]
                wanted[section] += 1
                continue
            local[vm] += section_bytes[section]
            if device in holding[section]:
                kept[device] += section_bytes[section]
            else:
                local_in_place[vm] += section_bytes[section]
    given: defaultdict[str, float] = defaultdict(float)
    for section, times in wanted.items():
        for holder in holding[section]:
            given[holder.vm_id] += times * section_bytes[section] / len(holding[section])
    return MovedBytes(
        received=_most(received),
        given=round(max(given.values(), default=0.0)),
        local=_most(local),
        local_in_place=_most(local_in_place),
        kept=_most(kept),
    )


class MovingTime(NamedTuple):
    """The time in which the state moves to processes that go on in place, and sums of gradients with it."""

    whole_s: float = 0.0
    late_s: float = 0.0
    """The part of it for what no pass reads."""

    def with_sums(self, sums_s: float) -> MovingTime:
        """With the sums of a step, which move for so long and are late."""
        return MovingTime(self.whole_s + sums_s, self.late_s + sums_s)

    def predict_wait_s(self, rest_s: float) -> float:
        """How long processes that run the rest of a step for `rest_s` wait before it: what is late comes meanwhile."""
        return self.whole_s - min(self.late_s, rest_s)


class StateMoves(NamedTuple):
    """How long the state moves to a shape."""

    to_new_s: float
    """If all its processes are new."""
    in_place: MovingTime
    """If those that are there go on, each with what it has already."""


NO_MOVES: Final = StateMoves(0.0, MovingTime())


def predict_moving(
    section_bytes: Sequence[int],
    parameter_bytes: Sequence[int],
    link_bytes_per_s: float,
    *,
    stage_starts: Sequence[int],
    placement: Sequence[Device],
    held_starts: Sequence[int],
    holders: Sequence[Device],
) -> StateMoves:
    """`parameter_bytes`: the part of each section's that passes read. Otherwise as `count_moved_bytes`."""
    whole, for_passes = (
        count_moved_bytes(
            sizes, stage_starts=stage_starts, placement=placement, held_starts=held_starts, holders=holders
        )
        for sizes in (section_bytes, parameter_bytes)
    )
    whole_s = whole.predict_s(link_bytes_per_s, in_place=True)
    # What a process has is copied before the passes, also what these do not read.
    first_s = for_passes.predict_s(link_bytes_per_s, in_place=True) + (whole.kept - for_passes.kept) / KEPT_BYTES_PER_S
    return StateMoves(whole.predict_s(link_bytes_per_s), MovingTime(whole_s, max(0.0, whole_s - first_s)))


def _list_sections(starts: Sequence[int], stage: int, count: int) -> range:
    return range(starts[stage], starts[stage + 1] if stage + 1 < len(starts) else count)


def _most(counter: Counter[Any]) -> int:
    return max(counter.values(), default=0)


@dataclass(frozen=True, kw_only=True)
class MorphCost:
    """The seconds without training that a morph takes. What is run again is `ShapeOption.kept_examples`' to say."""

    kind: MorphKind
    fixed_s: float
    """To meet and connect and, where processes start, to start them."""
    moving_s: float = 0.0
    """To move the state."""

    @property
    def pause_s(self) -> float:
        return self.fixed_s + self.moving_s

    def __str__(self) -> str:
        moving = f": {self.fixed_s:.1f} s to start and meet, {self.moving_s:.1f} s for the state"
        return f"{self.pause_s:.1f} s" + (moving if self.moving_s >= 0.05 else "")


@dataclass(frozen=True, kw_only=True)
class ShapeOption:
    """A shape that a job could go on with."""

    name: str
    examples_per_s: float
    cost: MorphCost | None = None
    """Of the morph to it; None: it is running."""
    kept_examples: float = 0.0
    """Examples of the step under way that need not be run again."""
    step_left: float = 0.0
    """Examples until the end of the step under way, after which `then` may follow."""
    then: ShapeOption | None = None
    """The shape that it takes at the end of the step; None: it stays."""

    def expected_examples(self, life_s: float) -> float:
        """The examples that count, `life_s` from now."""
        pause_s = 0.0 if self.cost is None else self.cost.pause_s
        stays = self.kept_examples + self.examples_per_s * max(0.0, life_s - pause_s)
        if self.then is None or self.examples_per_s <= 0:
            return stays
        step_s = pause_s + self.step_left / self.examples_per_s
        if step_s >= life_s:
            return stays
        after = self.kept_examples + self.step_left + self.then.expected_examples(life_s - step_s)
        return max(stays, after)


def choose_shape(options: Sequence[ShapeOption], life_s: float) -> tuple[ShapeOption, str]:
    """The option with the most expected examples, the first of equals, and the figures of all, as text."""
    best = max(options, key=lambda option: option.expected_examples(life_s))
    others = [option for option in options if option is not best]
    text = f"over {life_s:.0f} s {best.name} gives {best.expected_examples(life_s):,.0f} examples"
    if others:
        text += ", " + ", ".join(f"{option.name} {option.expected_examples(life_s):,.0f}" for option in others)
    return best, text


def worthwhile_ratio(cost_s: float, life_s: float, least: float = 1.0) -> float:
    """The least rate of another shape, in units of the present rate, that is worth a morph of `cost_s`.

    It is where rate · (life - cost) of the other one reaches rate · life of the present one. Infinite when the shape is
    not expected to last longer than the morph takes.
    """
    return math.inf if cost_s >= life_s else max(least, life_s / (life_s - cost_s))


def expected_life_s(stops_per_hour: float, stable_s: float = 0.0) -> float:
    """How long a shape is expected to last, rounded down to powers of two of a minute, so that reasons are steady.

    A fleet that has been stable for longer than its hazard says is expected to stay so for as long again.
    """
    mean_s = 3600.0 / stops_per_hour if stops_per_hour > 0 else LONGEST_LIFE_S
    life_s = min(max(mean_s, stable_s, SHORTEST_LIFE_S), LONGEST_LIFE_S)
    return SHORTEST_LIFE_S * 2.0 ** math.floor(math.log2(life_s / SHORTEST_LIFE_S))
