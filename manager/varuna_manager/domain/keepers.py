"""What the VMs of a generation copy to each other, and which ranks keep the copies of others' states.

A copy of a stage's state goes to the VM that is least likely to be lost with those that have the stage: never to one of
them, to the same host or zone only where there is no other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum
from typing import NamedTuple

from varuna_manager.domain.fleet_past import FleetPast
from varuna_manager.domain.leaving_step import GIVING_S
from varuna_manager.domain.observed import GenerationView, Proposal
from varuna_manager.domain.states import GenerationKind
from varuna_manager.domain.store_stops import expect_store_stops
from varuna_planner.liveput.copies import CopiedParts, LossExposure
from varuna_planner.liveput.copies import choose_copies as choose_parts
from varuna_planner.liveput.hazard import bursts_per_hour, list_bursts, mean_hit_share
from varuna_planner.liveput.morph_cost import MARKS_S
from varuna_proto.plan import Plan
from varuna_proto.state_use import NEVER_IN_PLACE, OTHER_STAGES

_BLOCK = 64
"""Stages that are placed together: the search takes time with their third power."""
_SHORTEST_STEP_S = 1e-3
"""What counts for a step whose time is not known."""


class Copies(StrEnum):
    """A job's wish."""

    AUTO = "auto"
    """What is worth the time that it takes, by the fleet's losses."""
    ON = "on"
    """All that is possible."""
    OFF = "off"


class VmPlace(NamedTuple):
    """Where a VM is; empty: not known."""

    host: str = ""
    zone: str = ""


@dataclass(frozen=True, kw_only=True)
class SaveCost:
    """What a save of a generation is predicted to take."""

    stall_s: float = 0.0
    """For the copy of a stage's state in the host's memory."""
    write_s: float = 0.0
    """Until that is in the store, and as long for a copy of it that goes to another VM."""
    beside_passes: bool = False
    """Whether states are copied while passes run, as on an accelerator. If not, training stands still."""
    pinned_interval_s: float | None = None
    """Between saves, as the job file says; None: as often as pays."""


class UnsavedSteps(NamedTuple):
    """The steps of a job that its checkpoints have not."""

    most: int = 0
    """Of all that it has ever made."""
    now: int = 0
    """Of those that its state has at present."""


NOTHING_UNSAVED = UnsavedSteps()


def count_unsaved(best_step: int, before: GenerationView | None, saved_step: int) -> UnsavedSteps:
    """`best_step`: the newest of all ended generations; `before`: the last generation; `saved_step`: of the newest
    checkpoint; 0: there is none."""
    present = 0 if before is None else before.last_step or before.resumed_step or 0
    return UnsavedSteps(max(best_step, present, saved_step) - saved_step, max(present - saved_step, 0))


@dataclass(frozen=True, kw_only=True)
class CopiesFacts:
    """What the choice depends on, besides the generation's shape and the places of its VMs."""

    fleet: FleetPast = field(default_factory=FleetPast)
    step_s: float = 0.0
    """What a step is expected to take; 0: not known."""
    save: SaveCost = SaveCost()
    unsaved: UnsavedSteps = NOTHING_UNSAVED
    script_obstacles: tuple[str, ...] = ()
    """Why workers could not go on in place before, as they have said."""


@dataclass(frozen=True, kw_only=True)
class CopiesChoice:
    keepers: tuple[int, ...] = ()
    """By stage: the rank that keeps a copy of what the stage's first replica has. Empty: no copies of states."""
    marks: bool = False
    """Whether ranks copy the sums of long steps."""
    reason: str = ""
    """The figures; empty: the job file decides, or there is nothing to choose."""


class CopiesObstacles(NamedTuple):
    """Why a generation's workers keep no copies that were chosen for it, as they say; empty: they say nothing."""

    states: str = ""
    marks: str = ""

    @property
    def reason(self) -> str:
        """Both as text; empty: they say nothing."""
        found = {"copies of states": self.states, "marks": self.marks}
        return "; ".join(f"no {what} are kept: {why}" for what, why in found.items() if why)


class _Risk(IntEnum):
    """Of losing both. One of a kind is worse than any number of the kinds before: there are fewer stages than that."""

    APART = 0
    SAME_ZONE = 1
    SAME_HOST = 10_000
    SAME_VM = 100_000_000


def choose_copies(
    wish: Copies, plan: Plan, vm_ids: Sequence[str], places: Mapping[str, VmPlace], facts: CopiesFacts
) -> CopiesChoice:
    """What a generation copies. Its processes hold their state when others are lost.

    Args:
        vm_ids: the VM of each rank; rank = replica * p + stage.
        places: by VM.
        facts: for `Copies.AUTO`; of these, `script_obstacles` for `Copies.ON`, too.
    """
    if wish is Copies.OFF:
        return CopiesChoice()
    keepers = choose_keepers(plan.p, vm_ids, places)
    useless = find_marks_obstacle(facts.script_obstacles, plan)
    without = f"no marks are kept, which would be of no use: {useless}" if useless else ""
    if wish is Copies.ON:
        return CopiesChoice(keepers=keepers, marks=not useless, reason=without)
    possible = [CopiedParts(states=True), CopiedParts(states=True, marks=True)] if keepers else []
    vms = len(set(vm_ids))
    if plan.d > 1 and vms > 1:  # one replica's marks go to the ranks that keep its state
        possible.append(CopiedParts(marks=True))
    if useless:
        possible = [one for one in possible if not one.marks]
    costly = _find_costly_share(facts)
    parts, reason = choose_parts(_expect_losses(plan, vm_ids, keepers, facts, costly), possible)
    if reason and (announced := round(100 * (1.0 - costly))):
        reason += f"; about {announced} % of the losses should come with a notice, in which nothing is lost"
    if facts.step_s > MARKS_S:
        reason = "; ".join(filter(None, (reason, without)))
    return CopiesChoice(keepers=keepers if parts.states else (), marks=parts.marks, reason=reason)


def _find_costly_share(facts: CopiesFacts) -> float:
    """The part of the losses that costs what was done: others have a notice, in which a job leaves all to other VMs."""
    has_time = facts.save.write_s <= GIVING_S  # for the state of a stage that one VM alone has
    return facts.fleet.unannounced_share if has_time and not facts.script_obstacles else 1.0


def _expect_losses(
    plan: Plan, vm_ids: Sequence[str], keepers: Sequence[int], facts: CopiesFacts, costly: float
) -> LossExposure:
    """`costly`: the part of the losses that counts."""
    fleet, save = facts.fleet, facts.save
    vms, bursts = len(set(vm_ids)), list_bursts(fleet.losses_at)
    losses = fleet.stops_per_hour(vms)
    replicas = [len(set(vm_ids[first : first + plan.p])) for first in range(0, len(vm_ids), plan.p)]
    store_stops, copied_store_stops = (
        costly * expect_store_stops(fleet, vm_ids, plan.p, keepers=kept, holds_state=True) for kept in ((), keepers)
    )
    exposure = LossExposure(
        losses_per_hour=losses,
        bursts_per_hour=costly * bursts_per_hour(losses, bursts, vms),
        hit_share=mean_hit_share(bursts, replicas, vms),
        store_stops_per_hour=store_stops,
        copied_store_stops_per_hour=copied_store_stops,
        step_s=max(facts.step_s, _SHORTEST_STEP_S),
        save_stall_s=save.stall_s,
        save_write_s=save.write_s,
        copies_beside_passes=save.beside_passes,
        save_interval_s=save.pinned_interval_s,
    )
    if not exposure.is_overdue(facts.unsaved.most * facts.step_s):
        return exposure
    return replace(exposure, unsaved_s=facts.unsaved.now * facts.step_s)


def find_marks_obstacle(script_obstacles: Sequence[str], plan: Plan) -> str:
    """Why no process can go on with what is done of a step, by what workers have said; empty: nothing is known.

    A script with a loader of its own lets survivors end the step, if it has two stages and two replicas or more. One
    that lets them take no other stages needs marks only where each stage has a survivor.
    """
    for reason in script_obstacles:
        if reason in NEVER_IN_PLACE:
            return reason
        is_enough = plan.d > 1 if reason.startswith(OTHER_STAGES) else min(plan.p, plan.d) > 1
        if not is_enough:
            return reason
    return ""


def find_kept(chosen: CopiesChoice, obstacles: CopiesObstacles, *, d: int) -> CopiesChoice:
    """What a generation of `d` replicas really keeps, by what its workers say. The reason names what it lacks; empty:
    it lacks nothing."""
    lacking = CopiesObstacles(obstacles.states if chosen.keepers else "", obstacles.marks if chosen.marks else "")
    keepers = () if lacking.states else chosen.keepers
    marks = chosen.marks and not lacking.marks
    # Marks of a stage that one VM has are of use only where its state outlives that VM.
    return CopiesChoice(keepers=keepers, marks=marks and (d > 1 or bool(keepers)), reason=lacking.reason)


def expect_step_s(before: GenerationView | None, plan: Plan, proposal: Proposal | None = None) -> float:
    """What a step of the plan will take: as predicted, but for the factor by which the last generation was slower or
    faster than the same profile predicts.

    The profile may have been corrected by that generation's times. The planner's plans (`proposal`) are predicted by
    the corrected one, and that of a shape in place by the one before.
    """
    predicted_s = plan.predicted_minibatch_s
    if before is None or before.kind is not GenerationKind.TRAINING or before.plan is None:
        return predicted_s
    before_s = before.plan.predicted_minibatch_s
    if proposal is not None and _is_proposed(plan, proposal):
        rate = proposal.present_examples_per_s
        before_s = before.plan.global_batch / rate if rate else 0.0
    if before.mean_step_s is None or before_s <= 0:
        return predicted_s
    return predicted_s * before.mean_step_s / before_s


def _is_proposed(plan: Plan, proposal: Proposal) -> bool:
    return plan == proposal.plan or (proposal.keeping is not None and plan == proposal.keeping.plan)


def choose_keepers(p: int, vm_ids: Sequence[str], places: Mapping[str, VmPlace] | None = None) -> tuple[int, ...]:
    """By stage: the rank that keeps a copy of what the stage's first replica has. Empty: no other VM could keep one.

    The fewest copies share a host with what they are for, then the fewest a zone; VMs keep about equally many.

    Args:
        p: stages.
        vm_ids: the VM of each rank; rank = replica * p + stage.
        places: by VM.
    """
    stages = [frozenset(vm_ids[stage::p]) for stage in range(p)]
    vms = sorted(set(vm_ids))
    if any(len(of_stage) == len(vms) for of_stage in stages):
        return ()
    ranks_on = {vm: [rank for rank, other in enumerate(vm_ids) if other == vm] for vm in vms}
    kept = [0] * len(vm_ids)
    chosen: list[int] = []
    for at in range(0, p, _BLOCK):
        risks = [[_rate(of_stage, vm, places or {}) for vm in vms] for of_stage in stages[at : at + _BLOCK]]
        for place in _assign_evenly(risks):
            keeper = min(ranks_on[vms[place]], key=lambda rank: (kept[rank], rank))
            kept[keeper] += 1
            chosen.append(keeper)
    return tuple(chosen)


def _rate(owners: frozenset[str], keeper: str, places: Mapping[str, VmPlace]) -> int:
    if keeper in owners:
        return _Risk.SAME_VM
    own, others = places.get(keeper, VmPlace()), [places.get(vm, VmPlace()) for vm in owners]
    if own.host and any(own.host == other.host for other in others):
        return _Risk.SAME_HOST
    is_near = own.zone and any(own.zone == other.zone for other in others)
    return _Risk.SAME_ZONE if is_near else _Risk.APART


def _assign_evenly(risks: Sequence[Sequence[int]]) -> list[int]:
    """The column of each row, with the least sum of risks. A column serves as few rows as avoid `SAME_VM`."""
    columns = len(risks[0])
    for most in range(-(-len(risks) // columns), len(risks) + 1):
        slots = [[risk for risk in row for _ in range(most)] for row in risks]
        assigned = [slot // most for slot in _assign(slots)]
        if all(row[column] < _Risk.SAME_VM for row, column in zip(risks, assigned, strict=True)):
            break
    return assigned


def _assign(costs: Sequence[Sequence[int]]) -> list[int]:
    """The column of each row, each column once at most, with the least sum of costs (the Hungarian method).

    There are at least as many columns as rows.
    """
    rows, columns = len(costs), len(costs[0])
    row_price, column_price = [0] * (rows + 1), [0] * (columns + 1)
    row_of, before = [0] * (columns + 1), [0] * (columns + 1)
    """By column, from 1: its row (0: none), and the column before it on the path."""
    for row in range(1, rows + 1):
        row_of[0], column = row, 0
        least, is_done = [1 << 62] * (columns + 1), [False] * (columns + 1)
        while row_of[column]:
            is_done[column] = True
            step, following, current = 1 << 62, 0, row_of[column]
            for other in range(1, columns + 1):
                if is_done[other]:
                    continue
                slack = costs[current - 1][other - 1] - row_price[current] - column_price[other]
                if slack < least[other]:
                    least[other], before[other] = slack, column
                if least[other] < step:
                    step, following = least[other], other
            for other in range(columns + 1):
                if is_done[other]:
                    row_price[row_of[other]] += step
                    column_price[other] -= step
                else:
                    least[other] -= step
            column = following
        while column:
            row_of[column], column = row_of[before[column]], before[column]
    assigned = [0] * rows
    for column, row in enumerate(row_of[1:]):
        if row:
            assigned[row - 1] = column
    return assigned
