"""A job on the VMs of a trace, in simulated time: what it trains and what it loses, by cause.

Training is synchronous, in whole mini-batches. A generation trains once `morph_s` has passed. It saves every k
mini-batches: training stands still for the stall, and the save is complete when it is written. It stops at once when a
VM that it uses leaves; the policy notices that `detect_s` later. Every second from the trace's start to its end is
booked once.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from varuna_planner.liveput.liveput import StopCosts
from varuna_planner.liveput.spot_trace import SpotTrace
from varuna_proto.plan import Plan

Plans = Callable[[int], Plan | None]
"""The best plan for a number of GPUs, one GPU a VM; None: none fits."""

ROUNDING_S = 1e-6


@dataclass(frozen=True, kw_only=True)
class Start:
    plan: Plan
    vms: tuple[str, ...]
    every: int
    """Mini-batches between saves."""


@dataclass(frozen=True, kw_only=True)
class Stop:
    grace_s: float | None = None
    """End the mini-batch, save and leave, or be killed after this time; None: leave at once."""


class ReplayPolicy(Protocol):
    @property
    def settle_s(self) -> Sequence[float]:
        """How long after VMs have come `decide` is to be called again."""

    def decide(self, now: float, job: ReplayedJob) -> Start | Stop | None:
        """What to do now; called again until it returns None."""


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """The examples that count, and the use of time."""

    examples: float
    morphs: int
    """Generations after the first."""
    losses: int
    """Morphs that followed the loss of a VM."""
    growths: int
    kept_s: float
    """Training that no loss threw back."""
    redone_s: float
    """Training that was thrown back: since the newest complete checkpoint, the unfinished mini-batch included."""
    launching_s: float
    detecting_s: float
    """From a loss until it was noticed."""
    saving_s: float
    waiting_s: float
    """Without a generation."""
    idle_gpus_s: float
    """The part of kept_s that the best plan for the VMs of each moment would have saved."""
    mean_examples_per_s: float


@dataclass(kw_only=True)
class ReplayedGeneration:
    plan: Plan
    vms: frozenset[str]
    every: int
    started_s: float
    costs: StopCosts
    broken_s: float | None = None
    """When a VM that it uses left."""
    stop_asked_s: float | None = None
    stops_s: float | None = None
    saves_at_stop: bool = False

    @property
    def ready_s(self) -> float:
        return self.started_s + self.costs.morph_s

    def progress(self, at_s: float) -> tuple[float, float, int, int]:
        """(seconds trained, seconds saved, mini-batches completed, of these in complete checkpoints) by then."""
        run_s = max(0.0, at_s - self.ready_s) + ROUNDING_S
        minibatch_s, stall_s = self.plan.predicted_minibatch_s, self.costs.save_stall_s
        period_s = self.every * minibatch_s + stall_s
        periods, rest_s = divmod(run_s, period_s)
        trained_s = periods * self.every * minibatch_s + min(rest_s, self.every * minibatch_s)
        saving_s = periods * stall_s + max(0.0, rest_s - self.every * minibatch_s)
        completed = math.floor(trained_s / minibatch_s + 1e-9)
        written = max(0, math.floor((run_s - self.costs.save_write_s) / period_s))
        return trained_s, saving_s, completed, written * self.every

    def boundary_s(self, at_s: float) -> float:
        """When the mini-batch (or the stall) under way ends."""
        minibatch_s = self.plan.predicted_minibatch_s
        trained_s, _, completed, _ = self.progress(at_s)
        into_s = trained_s - completed * minibatch_s
        return at_s if into_s <= 2 * ROUNDING_S else at_s + minibatch_s - into_s


@dataclass
class ReplayedJob:
    trace: SpotTrace
    plans: Plans
    costs: StopCosts
    policy: ReplayPolicy
    vms: dict[str, float] = field(default_factory=dict)
    """The VMs that the policy knows of, and since when."""
    generation: ReplayedGeneration | None = None
    last: ReplayedGeneration | None = None
    """The newest generation that has stopped."""

    def replay(self) -> Replayed:
        """From the first event of the trace to its last."""
        self._there: set[str] = set()
        self._booked = dict.fromkeys(("kept", "redone", "launching", "detecting", "saving", "waiting", "idle"), 0.0)
        self._examples, self._free_since_s = 0.0, self.trace.starts_s
        self._started = self._losses = self._growths = 0
        bursts = dict(self.trace.iterate_bursts())
        self._wakes = sorted(bursts)
        while self._wakes[0] < self.trace.ends_s:
            now = heapq.heappop(self._wakes)
            if now in bursts:
                for event in bursts.pop(now):
                    self._happens(now, event.add, event.node)
            self._notice(now)
            self._consult(now)
        self._end(self.trace.ends_s)
        booked = {f"{name}_s": seconds for name, seconds in self._booked.items() if name != "idle"}
        return Replayed(
            examples=self._examples,
            morphs=self._started - 1,
            losses=self._losses,
            growths=self._growths,
            idle_gpus_s=self._booked["idle"],
            mean_examples_per_s=self._examples / (self.trace.ends_s - self.trace.starts_s),
            **booked,
        )

    def broken(self, now: float) -> bool:
        """Whether the generation is known to have lost a VM."""
        broken_s = self.generation.broken_s if self.generation else None
        return broken_s is not None and now >= broken_s + self.costs.detect_s - ROUNDING_S

    # ------------------------------------------------------------ what happens to it

    def _happens(self, now: float, add: bool, node: str) -> None:
        generation = self.generation
        if add:
            self._there.add(node)
            self.vms[node] = now
            for settle_s in self.policy.settle_s:
                self._wake(now + settle_s)
            return
        self._there.discard(node)
        if generation and node in generation.vms and generation.broken_s is None:
            generation.broken_s = now
        self._wake(now + self.costs.detect_s)

    def _notice(self, now: float) -> None:
        """What has become known, and a stop that is over."""
        gone_for_s = {
            event.node: now - event.at_s for event in self.trace.events if not event.add and event.at_s <= now
        }
        for node in set(self.vms) - self._there:
            if gone_for_s[node] >= self.costs.detect_s - ROUNDING_S:
                del self.vms[node]
        generation = self.generation
        stops_s = generation.stops_s if generation and generation.broken_s is None else None
        if stops_s is not None and now >= stops_s - ROUNDING_S:
            self._close(stops_s)

    def _wake(self, at_s: float) -> None:
        heapq.heappush(self._wakes, at_s)

    # ------------------------------------------------------------ what is decided

    def _consult(self, now: float) -> None:
        while (action := self.policy.decide(now, self)) is not None:
            if isinstance(action, Start):
                self._start(now, action)
            else:
                self._stop(now, action)

    def _start(self, now: float, start: Start) -> None:
        assert self.generation is None, "one generation at a time"
        self._book("waiting", now - self._free_since_s)
        self.generation = ReplayedGeneration(
            plan=start.plan, vms=frozenset(start.vms), every=start.every, started_s=now, costs=self.costs
        )
        if not self.generation.vms <= self._there:
            self.generation.broken_s = now
            self._wake(now + self.costs.detect_s)
        self._wake(self.generation.ready_s + start.plan.predicted_minibatch_s + 2 * ROUNDING_S)
        self._started += 1

    def _stop(self, now: float, stop: Stop) -> None:
        generation = self.generation
        assert generation is not None, "there is one to stop"
        if stop.grace_s is None:
            self._close(now)
            return
        saved_s = generation.boundary_s(now) + self.costs.save_s
        generation.stop_asked_s = now
        generation.saves_at_stop = saved_s <= now + stop.grace_s
        generation.stops_s = saved_s if generation.saves_at_stop else now + stop.grace_s
        self._wake(generation.stops_s)

    # ------------------------------------------------------------ what is booked

    def _book(self, what: str, seconds: float) -> None:
        assert seconds > -1e-3, (what, seconds)
        self._booked[what] += seconds

    def _close(self, now: float) -> None:
        """The generation has stopped."""
        generation = self.generation
        assert generation is not None
        lost = generation.broken_s is not None
        saved = generation.saves_at_stop and not lost
        ran_until_s = generation.broken_s if generation.broken_s is not None else now
        trained_until_s = ran_until_s - self.costs.save_s if saved else ran_until_s
        trained_s, saving_s, _, written = generation.progress(trained_until_s)
        kept_s = trained_s if saved else written * generation.plan.predicted_minibatch_s
        if saved:
            saving_s += self.costs.save_s
        self._book_generation(generation, until_s=ran_until_s, kept_s=kept_s, trained_s=trained_s, saving_s=saving_s)
        self._book("detecting", now - ran_until_s)
        self._losses += lost
        self._growths += not lost
        self.last, self.generation, self._free_since_s = generation, None, now

    def _end(self, now: float) -> None:
        """Books the generation that runs at the end of the trace."""
        generation = self.generation
        if generation is None:
            self._book("waiting", now - self._free_since_s)
            return
        until_s = generation.broken_s if generation.broken_s is not None else now
        trained_s, saving_s, _, written = generation.progress(until_s)
        lost = generation.broken_s is not None
        kept_s = written * generation.plan.predicted_minibatch_s if lost else trained_s
        self._book_generation(generation, until_s=until_s, kept_s=kept_s, trained_s=trained_s, saving_s=saving_s)
        self._book("detecting", now - until_s)

    def _book_generation(
        self, generation: ReplayedGeneration, *, until_s: float, kept_s: float, trained_s: float, saving_s: float
    ) -> None:
        self._book("launching", min(until_s, generation.ready_s) - generation.started_s)
        self._book("kept", kept_s)
        self._book("redone", trained_s - kept_s)
        self._book("saving", max(0.0, until_s - generation.ready_s) - trained_s)
        assert abs(max(0.0, until_s - generation.ready_s) - trained_s - saving_s) < 1e-3, "each second is booked once"
        self._examples += kept_s * generation.plan.examples_per_s
        running_s = until_s - generation.ready_s
        if kept_s > 0:
            self._book("idle", self._idle_share_s(generation, until_s) * kept_s / running_s)

    def _idle_share_s(self, generation: ReplayedGeneration, until_s: float) -> float:
        """Seconds of the generation's running time that the best plan of each moment would have saved."""
        fleets = [*self.trace.iterate_fleets()]
        total = 0.0
        for (from_s, vms), (to_s, _) in itertools.pairwise([*fleets, (math.inf, frozenset[str]())]):
            overlap_s = min(to_s, until_s) - max(from_s, generation.ready_s)
            best = self.plans(len(vms)) if vms and overlap_s > 0 else None
            if best is not None:
                total += overlap_s * max(0.0, 1 - generation.plan.examples_per_s / best.examples_per_s)
        return total
