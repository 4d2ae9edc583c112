"""A job on the VMs of a trace, in simulated time: what it trains, what it trains again, and where the time went.

A VM has one GPU. Training is synchronous; progress within a step counts by the example. When a generation loses VMs,
its complete replicas finish their share of the step (where the system has survivors), and then its policy decides. What
a morph costs comes from `varuna_planner.liveput.morph_cost`, at the model's own state and links. Every second from the
trace's start to its end is booked once.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from _goodput_generation import Holding, ReplayedGeneration
from _goodput_setting import Plans, Start, State, Stop, System

from varuna.copies.parting import list_lonely
from varuna_manager.domain.leaving_step import predict_fill_s
from varuna_manager.domain.moving_state import predict_pause_s, predict_sums_pause_s
from varuna_planner.liveput.copies import CopiedParts, predict_copying_share
from varuna_planner.liveput.morph_cost import SUMS_PART, MorphCost, MorphKind, StateMoves
from varuna_planner.liveput.spot_trace import SpotTrace
from varuna_planner.schedule.batching import shared_micro_batch
from varuna_proto.plan import Plan

ROUNDING_S = 1e-6


class Policy(Protocol):
    @property
    def looks_after_s(self) -> Sequence[float]:
        """How long after a VM has come or gone `decide` is to be called again."""

    def every(self, generation: ReplayedGeneration, system: System) -> float:
        """Seconds between saves."""

    def decide(self, now: float, job: ReplayedJob) -> Start | Stop | None:
        """What to do now; called again until it returns None."""


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """The examples that count, and the use of time."""

    examples: float
    morphs: Mapping[str, int]
    """Generations after the first, by kind."""
    losses: int
    """Losses of VMs that a generation used."""
    kept_s: float
    redone_s: float
    """Training that was thrown away, and had to be done again."""
    launching_s: float
    detecting_s: float
    saving_s: float
    waiting_s: float
    """Without a generation."""
    idle_vm_hours: float
    vm_hours: float
    dollars: float | None
    """For all VMs that were there; None: prices are not known."""
    copying_s: float
    """What copies and marks take of the time that is trained, by the shares that are measured and assumed
    (`varuna_planner.liveput.copies`). It is not taken off the examples."""
    progress: tuple[tuple[float, float], ...] = field(repr=False)
    """(seconds, examples that counted then)."""


class ReplayedJob:
    def __init__(
        self,
        trace: SpotTrace,
        plans: Plans,
        state: State,
        system: System,
        policy: Policy,
        price: float | None = None,
        notice_s: float = 0.0,
    ) -> None:
        """`price`: dollars per VM and hour, where the trace has none. `notice_s`: how long before it goes a VM has
        notice; 0: it has none."""
        self.trace, self.plans, self.state, self.system, self.policy = trace, plans, state, system, policy
        self._price = price
        self._notices = [(event.at_s - notice_s, event) for event in trace.events if not event.add and notice_s > 0]
        self.vms: dict[str, float] = {}
        """The VMs that the policy knows of, and since when."""
        self.there: set[str] = set()
        self.generation: ReplayedGeneration | None = None
        """The newest one, live or ended."""
        self.holding: Holding | None = None
        self.committed = self.done = self._stored = 0.0
        """Examples: of whole steps, of the step under way, in the newest complete checkpoint."""
        self._segments: list[tuple[float, float]] = []
        """(examples, seconds), oldest first: what `committed` and `done` are made of."""
        self._booked = dict.fromkeys(("trained", "launching", "detecting", "saving", "waiting"), 0.0)
        self._redone_s = self._idle_s = self._vm_s = self._dollars = self._copying_s = 0.0
        self._losses = self.removals = 0
        self._morphs = dict.fromkeys((kind.value for kind in MorphKind), 0)
        self._wakes: list[float] = []
        self._saved_s = self._stalled_until_s = trace.starts_s
        self._writing: tuple[float, float] | None = None
        """(when it is complete, examples that it has). A loss meanwhile does not undo it."""
        self._progress: list[tuple[float, float]] = []

    # ------------------------------------------------------------ time

    def replay(self) -> Replayed:
        now, end_s = self.trace.starts_s, self.trace.ends_s
        bursts = dict(self.trace.iterate_bursts())
        self._wakes = sorted({*bursts, *(max(at_s, now) for at_s, _ in self._notices)})
        heapq.heapify(self._wakes)
        while True:
            if now in bursts:
                self._see_burst(now, [(event.add, event.node) for event in bursts.pop(now)])
            self._settle(now)
            while (action := self.policy.decide(now, self)) is not None:
                self._act(now, action)
            self._progress.append((now, self.committed + self.done))
            if now >= end_s:
                break
            until = min(end_s, self._find_next(now))
            self._pass(now, until)
            now = until
        return Replayed(
            examples=self.committed + self.done,
            morphs=dict(self._morphs),
            losses=self._losses,
            kept_s=self._booked["trained"] - self._redone_s,
            redone_s=self._redone_s,
            launching_s=self._booked["launching"],
            detecting_s=self._booked["detecting"],
            saving_s=self._booked["saving"],
            waiting_s=self._booked["waiting"],
            copying_s=self._copying_s,
            idle_vm_hours=self._idle_s / 3600,
            vm_hours=self.vm_hours,
            dollars=self._dollars if self.trace.prices or self._price is not None else None,
            progress=tuple(self._progress),
        )

    @property
    def vm_hours(self) -> float:
        """So far, of all VMs that were there."""
        return self._vm_s / 3600

    def _find_next(self, now: float) -> float:
        """When something happens."""
        while self._wakes and self._wakes[0] <= now + ROUNDING_S:
            heapq.heappop(self._wakes)
        times = [self._wakes[0]] if self._wakes else []
        if self._writing is not None:
            times.append(self._writing[0])
        generation = self.generation
        if generation is not None and generation.live:
            if generation.first_loss_s is not None:
                times += [self._find_noticed_s(generation), generation.shares_end_s]
            else:
                waits = (at_s for at_s in (generation.ready_s, self._stalled_until_s) if at_s > now + ROUNDING_S)
                times.append(next(waits, now + self._find_rest_s(generation.plan)))
        return min((at_s for at_s in times if at_s > now + ROUNDING_S), default=math.inf)

    def _find_rest_s(self, plan: Plan) -> float:
        """What is left of the step under way, trained by this plan."""
        return (plan.global_batch - self.done) / plan.examples_per_s

    def find_leaving(self, now: float) -> dict[str, float]:
        """The VMs that have notice, and when they go."""
        return {
            event.node: event.at_s
            for at_s, event in self._notices
            if at_s <= now + ROUNDING_S and now < event.at_s and event.node in self.there
        }

    def have_their_state(self, now: float, generation: ReplayedGeneration) -> bool:
        """Whether the processes of a generation that has ended have the state. New ones that were not ready when the
        first was lost have none, and those that stayed have what they had before."""
        if now < generation.ready_s:
            return False
        if generation.first_loss_s is None or generation.first_loss_s >= generation.ready_s - ROUNDING_S:
            return True
        stayed = generation.kind is MorphKind.IN_PLACE
        return stayed and self.holding is not None and self.holding.find_holders(self.there)

    def look_again(self, at_s: float) -> None:
        """Settles what is over then, and calls the policy."""
        heapq.heappush(self._wakes, at_s)

    def _pass(self, now: float, until: float) -> None:
        """Time passes, in which nothing changes."""
        seconds, used = until - now, 0
        generation = self.generation
        what, rate = "waiting", 0.0
        if generation is not None and generation.live:
            plan = generation.plan
            used = len(generation.vms) - len(generation.lost)
            if generation.first_loss_s is not None:
                what, used = "detecting", generation.complete * plan.p
                if now < generation.shares_end_s - ROUNDING_S:
                    what, rate = "trained", self._share_rate(generation)
            elif now < generation.ready_s - ROUNDING_S:
                what = "launching"
            elif now < self._stalled_until_s - ROUNDING_S:
                what = "saving"
            else:
                what, rate = "trained", plan.examples_per_s
                self._copying_s += seconds * self._predict_copying_share(generation)
        self._booked[what] += seconds
        if rate:
            self.done += rate * seconds
            self._segments.append((rate * seconds, seconds))
        self._idle_s += (len(self.there) - min(used, len(self.there))) * seconds
        self._vm_s += len(self.there) * seconds
        price = self.trace.find_price(now)
        self._dollars += len(self.there) * seconds / 3600 * ((self._price or 0.0) if price is None else price)

    def _share_rate(self, generation: ReplayedGeneration) -> float:
        """Examples/s of its complete replicas. Never more than the best plan for their GPUs would give."""
        plan, complete = generation.plan, generation.complete
        best = self.plans.best(complete * plan.p)
        rate = plan.examples_per_s * complete / plan.d
        return rate if best is None else min(rate, best.examples_per_s)

    # ------------------------------------------------------------ what happens to it

    def _see_burst(self, now: float, changes: Sequence[tuple[bool, str]]) -> None:
        gone = set()
        for add, node in changes:
            if add:
                self.there.add(node)
                self.vms[node] = now
            else:
                self.there.discard(node)
                self.removals += 1
                gone.add(node)
                self.look_again(now + self.system.detect_s)
        for after_s in self.policy.looks_after_s:
            self.look_again(now + after_s)
        generation = self.generation
        if generation is not None and generation.live:
            hit = {rank for rank, vm in enumerate(generation.vms) if vm in gone} - generation.lost
            if hit:
                self._lose_ranks(now, generation, hit)

    def _lose_ranks(self, now: float, generation: ReplayedGeneration, hit: set[int]) -> None:
        self._losses += generation.first_loss_s is None
        before = generation.complete
        generation.lost |= hit
        trains = generation.ready_s <= now + ROUNDING_S
        if generation.first_loss_s is None:
            generation.first_loss_s = now
        # What complete replicas have of the step stays, if the system keeps it.
        hit_share = 1 - generation.complete / before if before else 0.0
        if self.system.sums_copied_s is not None:
            since_s = self.system.sums_copied_s / 2
            self._throw_away(min(self.done, generation.plan.examples_per_s * since_s) * hit_share)
            generation.shares_end_s = now
        elif self.system.survivors and trains and self._can_keep(generation):
            if before:  # else nothing has been done since all have left
                self._keep_shares(now, generation, hit_share)
        else:
            generation.shares_end_s = now

    def _keep_shares(self, now: float, generation: ReplayedGeneration, hit_share: float) -> None:
        """Complete replicas finish their shares, or leave with what they had at their marks."""
        plan = generation.plan
        since_mark = self._examples_since_mark(generation)
        idle = max(0.0, plan.global_batch - self.done) * (plan.p - 1)
        if since_mark < self.done and since_mark * (plan.d - 1) * plan.p < idle:  # as `RankShares.is_worth_finishing`
            self._throw_away(since_mark)
            generation.shares_end_s = now
            return
        self._throw_away(min(self.done, since_mark) * hit_share)
        left = plan.global_batch * generation.complete / plan.d - self.done
        rate = self._share_rate(generation) if generation.complete else 0.0
        generation.shares_end_s = now + max(0.0, left) / rate if rate else now

    def _examples_since_mark(self, generation: ReplayedGeneration) -> float:
        """Half of what is done from one mark to the next; all of a step without marks."""
        plan, marks_s = generation.plan, self.system.marks_s
        if marks_s is None or not self._find_copied(generation).marks:
            return float(plan.global_batch)
        return plan.examples_per_s * marks_s / 2

    def _find_copied(self, generation: ReplayedGeneration) -> CopiedParts:
        """What its VMs copy. There are no marks in short steps, nor with one replica that copies no states."""
        plan, copied, marks_s = generation.plan, generation.copied, self.system.marks_s
        is_marked = copied.marks and (plan.d > 1 or copied.states)
        is_long = marks_s is not None and plan.predicted_minibatch_s > marks_s
        return CopiedParts(states=copied.states and len(generation.vms) > 1, marks=is_marked and is_long)

    def _predict_copying_share(self, generation: ReplayedGeneration) -> float:
        """Of its training, what copies and marks take."""
        plan = generation.plan
        return predict_copying_share(
            self._find_copied(generation),
            step_s=plan.predicted_minibatch_s,
            send_s=self.state.read_store_s(plan),
            beside_passes=self.system.copies_beside_passes,
        )

    def _can_keep(self, generation: ReplayedGeneration) -> bool:
        """Whether each stage has a survivor, or one that has its copy."""
        p, alive = generation.plan.p, set(generation.list_alive())
        copied = {
            stage for stage, keeper in enumerate(generation.keepers) if generation.copied.states and keeper in alive
        }
        return len(copied | {rank % p for rank in alive}) == p

    def _settle(self, now: float) -> None:
        """What is over by now."""
        gone_at = {event.node: event.at_s for event in self.trace.events if not event.add and event.at_s <= now}
        for node in set(self.vms) - self.there:
            if now >= gone_at[node] + self.system.detect_s - ROUNDING_S:
                del self.vms[node]
        if self._writing is not None and now >= self._writing[0] - ROUNDING_S:
            self._stored, self._writing = self._writing[1], None
        generation = self.generation
        if generation is None or not generation.live:
            return
        if generation.first_loss_s is not None:
            if now >= self._find_noticed_s(generation) - ROUNDING_S:
                generation.ended_s = now
            return
        if now < generation.ready_s - ROUNDING_S:
            return
        self.holding = Holding(plan=generation.plan, vms=generation.vms, has_copies=generation.copied.states)
        if self._find_rest_s(generation.plan) <= 2 * ROUNDING_S:  # beyond that, `_find_next` sees its end
            self._end_step(now, generation)
        if generation.live and generation.stop is not None and generation.stop.within_step:
            self._leave_within_step(now, generation)

    def _find_noticed_s(self, generation: ReplayedGeneration) -> float:
        """When a generation that has lost VMs is over."""
        assert generation.first_loss_s is not None
        has_notice = generation.stop is not None and generation.stop.before_vms_leave
        detect_s = 0.0 if has_notice else self.system.detect_s
        return max(generation.first_loss_s + detect_s, generation.shares_end_s)

    def _end_step(self, now: float, generation: ReplayedGeneration) -> None:
        self.committed += generation.plan.global_batch
        self.done = max(0.0, self.done - generation.plan.global_batch)
        generation.steps += 1
        generation.stepped_s = now
        if generation.stop is not None:
            generation.ended_s = now
            if generation.stop.saves or not self.system.survivors:  # all wait for the save
                save_s = self.system.save_stall_s + self.state.read_store_s(generation.plan)
                self._stored, self._writing, self._stalled_until_s = self.committed, None, now + save_s
            return
        if self._writing is None and now - self._saved_s >= self.policy.every(generation, self.system):
            self._saved_s, self._stalled_until_s = now, now + self.system.find_stall_s(generation.plan)
            written_s = now + self.system.save_stall_s + self.state.read_store_s(generation.plan)
            self._writing = (written_s, self.committed)

    def _throw_away(self, examples: float) -> None:
        """The newest examples were in vain."""
        left = examples
        while left > 1e-9 and self._segments:
            count, seconds = self._segments.pop()
            taken = min(count, left)
            self._redone_s += seconds * taken / count
            if taken < count:
                self._segments.append((count - taken, seconds * (1 - taken / count)))
            left -= taken
        self.done -= examples
        if self.done < 0:
            self.committed += self.done
            self.done = 0.0

    # ------------------------------------------------------------ what is decided

    def _act(self, now: float, action: Start | Stop) -> None:
        generation = self.generation
        if isinstance(action, Stop):
            assert generation is not None
            assert generation.live
            generation.stop = action
            is_ready = now >= generation.ready_s - ROUNDING_S
            if action.within_step:
                self._settle(now)  # it leaves as soon as it is ready
            elif action.before_vms_leave and is_ready:
                self._lose_ranks(now, generation, self._list_leaving_ranks(now, generation))
                self._settle(now)
            elif (action.at_once and not is_ready) or self.system.sums_copied_s is not None:
                generation.ended_s = now
            return
        assert generation is None or not generation.live, "one generation at a time"
        kind = self._find_kind(action)
        if kind is MorphKind.FROM_STORE:
            self._throw_away(self.committed + self.done - self._stored)
            self._writing = None
        elif self.system.sums_copied_s is None and not self._keeps_step(action, kind):
            self._throw_away(self.done)
        moving_s = self._predict_moving_s(action, kind)
        cost = MorphCost(kind=kind, fixed_s=self.system.fixed_s[kind], moving_s=moving_s)
        begins_s = max(now, self._stalled_until_s)
        fill_s = 0.0
        if generation is not None and generation.has_left_within_step:
            fill_s = predict_fill_s(action.plan) + generation.parting_s
        self._booked_ahead(now, begins_s)
        self.generation = ReplayedGeneration(
            plan=action.plan,
            vms=action.vms,
            number=1 if generation is None else generation.number + 1,
            kind=kind,
            started_s=now,
            stepped_s=now,
            ready_s=begins_s + cost.pause_s + fill_s,
            pause_s=cost.pause_s,
            moving_s=moving_s,
            copied=self._find_wanted_copies(action),
        )
        self.generation.kept = self.done
        if generation is not None:
            self._morphs[kind.value] += 1
        hit = {rank for rank, vm in enumerate(action.vms) if vm not in self.there}
        if hit:
            self._lose_ranks(now, self.generation, hit)

    def _leave_within_step(self, now: float, generation: ReplayedGeneration) -> None:
        """In order, with all that is done of the step."""
        generation.has_left_within_step, generation.ended_s = True, now
        assert generation.stop is not None, "it was asked to"
        if not generation.stop.before_vms_leave:
            return
        generation.lost |= self._list_leaving_ranks(now, generation)
        alive = generation.list_alive()
        lonely = list_lonely(generation.lost, generation.plan.p, generation.plan.d)
        if alive:
            generation.takers = dict(zip(sorted(lonely), itertools.cycle(alive), strict=False))
        if self.holding is not None:
            self.holding = replace(self.holding, takers=generation.takers)
        part = SUMS_PART + (1.0 if lonely else 0.0)
        generation.parting_s = part * self.state.read_store_s(generation.plan)
        self._losses += 1

    def _list_leaving_ranks(self, now: float, generation: ReplayedGeneration) -> set[int]:
        """Those whose VMs have notice."""
        leaving = self.find_leaving(now)
        return {rank for rank, vm in enumerate(generation.vms) if vm in leaving}

    def _find_wanted_copies(self, start: Start) -> CopiedParts:
        return start.copied or CopiedParts(states=self.system.copies, marks=self.system.marks_s is not None)

    def _keeps_step(self, start: Start, kind: MorphKind) -> bool:
        """Whether what counts of the step goes on: in place, if the micro-batches before and after are made of whole
        ones of the smaller size."""
        before = self.generation
        if kind is not MorphKind.IN_PLACE or before is None:
            return False
        return shared_micro_batch(start.plan.micro_batch, before.plan.micro_batch) is not None

    def _booked_ahead(self, now: float, begins_s: float) -> None:
        """A save before a morph is launching time of the next generation here; it is booked as a save."""
        self._booked["saving"] += begins_s - now
        self._booked["launching"] -= begins_s - now

    def _find_kind(self, start: Start) -> MorphKind:
        if start.in_place:
            return MorphKind.IN_PLACE
        holding = self.holding
        holds = holding is not None and holding.find_holders(self.there)
        if self.system.survivors and (start.from_memory or (holding is not None and holding.has_copies)) and holds:
            return MorphKind.FROM_MEMORY
        return MorphKind.FROM_STORE

    def _predict_moving_s(self, start: Start, kind: MorphKind) -> float:
        if (kind is MorphKind.IN_PLACE and not start.from_memory) or (self.generation is None and self.committed == 0):
            return 0.0
        if kind is MorphKind.FROM_STORE or self.holding is None:
            return self.state.read_store_s(start.plan)
        before = self.generation
        if self.system.prepares and before is not None and before.first_loss_s is None:
            return 0.0
        alive = self.holding.list_holders(self.there)
        moves = _predict_from_alive(self.state, start, self.holding.plan, alive)
        if kind is not MorphKind.IN_PLACE or before is None:
            return moves.to_new_s
        rest_s = self._find_rest_s(start.plan)
        has_sums = self.done > 1e-9 * start.plan.global_batch
        if before.stop is not None and before.stop.has_state and before.first_loss_s is None:
            return predict_sums_pause_s(moves.in_place, rest_s) if has_sums else 0.0
        copies = self._find_wanted_copies(start).states
        return predict_pause_s(self.holding.plan, start.plan, moves.in_place, rest_s, copies=copies, with_sums=has_sums)


def _predict_from_alive(state: State, start: Start, before: Plan, alive: Sequence[str]) -> StateMoves:
    """`alive`: the VM that has each old rank's part; empty: none."""
    by_stage = {
        stage: [vm for rank, vm in enumerate(alive) if rank % before.p == stage and vm] for stage in range(before.p)
    }
    most = max(map(len, by_stage.values()))
    # Rows of one holder a stage; a stage with fewer repeats its own.
    rows = [[by_stage[stage][row % len(by_stage[stage])] for stage in range(before.p)] for row in range(most)]
    return state.predict_moving(start.plan, start.vms, before, [vm for row in rows for vm in row])
