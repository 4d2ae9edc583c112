"""Policies for a job on spot VMs: the manager's, always the best plan, or the most expected examples."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from _planner_replay_job import Plans, ReplayedGeneration, ReplayedJob, ReplayPolicy, Start, Stop

from varuna.checkpoint import Cadence
from varuna_manager.domain.actions import EndGeneration, StartGeneration, StopGeneration
from varuna_manager.domain.job_decision import choose_devices, decide_job, wants_plan
from varuna_manager.domain.morphs import RECENT, PastShape, estimate_morphs
from varuna_manager.domain.observed import GenerationView, JobView, Proposal, Rules, StopView, VmView, WorkerView
from varuna_manager.domain.states import (
    ExitCause,
    GenerationKind,
    GenerationState,
    JobState,
    StopMode,
    VmState,
    WorkerState,
)
from varuna_planner.liveput.liveput import FleetModel, PlanOption, StopCosts
from varuna_planner.liveput.spot_trace import SpotTrace, measure_hazard
from varuna_proto.plan import Device, Plan

__all__ = ["Every", "Greedy", "Liveput", "ManagersRules", "Plans", "ReplayPolicy", "automatic_saves"]


Every = Callable[[Plan, int], int]
"""(plan, VMs of the fleet) -> mini-batches between saves."""


def automatic_saves(costs: StopCosts, removals_per_vm_hour: float = 0.0) -> Every:
    """The interval of the runtime's automatic checkpoints; 0: it knows no hazard."""

    def every(plan: Plan, vms: int) -> int:
        minibatch_s = plan.predicted_minibatch_s
        cadence = Cadence(stops_per_hour=removals_per_vm_hour * plan.p * plan.d)
        interval_s = cadence.interval_s(costs.save_stall_s, costs.save_write_s, minibatch_s)
        return max(1, math.ceil(interval_s / minibatch_s))

    return every


class Greedy:
    """Always the best plan for the present VMs: a morph at every change that makes another plan faster."""

    settle_s: Sequence[float] = ()

    def __init__(self, plans: Plans, rules: Rules, every: Every) -> None:
        self._plans, self._rules, self._every = plans, rules, every

    def decide(self, now: float, job: ReplayedJob) -> Start | Stop | None:
        best = self._plans(len(job.vms)) if job.vms else None
        generation = job.generation
        if generation is None:
            if best is None:
                return None
            vms = tuple(job.vms)[: best.p * best.d]
            return Start(plan=best, vms=vms, every=self._every(best, len(job.vms)))
        if job.broken(now):
            return Stop()
        if generation.stops_s is not None or best is None:
            return None
        if best.examples_per_s <= generation.plan.examples_per_s * (1 + 1e-9):
            return None
        return _save_first(generation, now, self._rules)


def _save_first(generation: ReplayedGeneration, now: float, rules: Rules) -> Stop:
    """A stop that saves, unless the generation is still being launched and has nothing to save."""
    return Stop(grace_s=_grace_s(generation, rules) if now > generation.ready_s else None)


def _grace_s(generation: ReplayedGeneration, rules: Rules) -> float:
    """The grace that the manager gives in its stop command (`messages.stop_message`)."""
    return rules.save_grace_s + 2 * generation.plan.predicted_minibatch_s


class Liveput:
    """The most expected examples over the horizon, by the hazard of the whole trace."""

    settle_s: Sequence[float] = ()

    def __init__(self, plans: Plans, rules: Rules, trace: SpotTrace, costs: StopCosts, horizon_s: float) -> None:
        self._rules = rules
        most_vms = max(len(vms) for _, vms in trace.iterate_fleets())
        self._plans: list[Plan] = []
        for gpus in range(1, most_vms + 1):
            plan = plans(gpus)
            if plan and (not self._plans or plan.examples_per_s > self._plans[-1].examples_per_s):
                self._plans.append(plan)
        options = [
            PlanOption(vms=plan.p * plan.d, examples_per_s=plan.examples_per_s, minibatch_s=plan.predicted_minibatch_s)
            for plan in self._plans
        ]
        self._fleet = FleetModel(options, measure_hazard(trace), costs, most_vms=most_vms, horizon_s=horizon_s)

    def decide(self, now: float, job: ReplayedJob) -> Start | Stop | None:
        generation, vms = job.generation, len(job.vms)
        if generation is None:
            before = self._option(job.last)
            option = self._fleet.after_loss(vms, before) or self._fleet.after_growth(vms, 0)
            if not option:
                return None
            plan = self._plans[option - 1]
            return Start(plan=plan, vms=tuple(job.vms)[: plan.p * plan.d], every=self.every(plan, vms))
        if job.broken(now):
            return Stop()
        if generation.stops_s is not None:
            return None
        running = self._option(generation)
        if self._fleet.after_growth(vms, running) == running:
            return None
        return _save_first(generation, now, self._rules)

    def every(self, plan: Plan, vms: int) -> int:
        """Mini-batches between saves that keep the most work.

        A plan that was left out counts as the slowest kept one that is as fast. If there are for a moment more VMs than
        the trace ever holds, because some come as others leave, it counts as the fastest.
        """
        as_fast = [n for n, one in enumerate(self._plans, 1) if one.examples_per_s >= plan.examples_per_s]
        option = min(as_fast, default=len(self._plans))
        return self._fleet.plan_checkpoints(max(vms, plan.p * plan.d), option).every

    def _option(self, generation: ReplayedGeneration | None) -> int:
        return 0 if generation is None else self._plans.index(generation.plan) + 1


class ManagersRules:
    """The manager's own decisions: `decide_job` over views of the simulated job."""

    def __init__(self, plans: Plans, rules: Rules, every: Every) -> None:
        self._plans, self._rules, self._every = plans, rules, every
        self.settle_s: Sequence[float] = (rules.growth_settle_s, 3 * rules.growth_settle_s)
        self._number = 0
        self._ended = 0
        self._stop: StopView | None = None
        self._shapes: list[PastShape] = []
        self._progress_at = 0.0

    def decide(self, now: float, job: ReplayedJob) -> Start | Stop | None:
        while True:
            vms = self._vms(now, job)
            view = self._view(now, job)
            devices = choose_devices(now, view, vms, self._rules)
            if wants_plan(view, devices, vms):
                view = self._view(now, job, self._propose(devices))
            decision = decide_job(now, view, vms, self._rules)
            if not decision.actions:
                return None
            for action in decision.actions:  # one at a time, in a replay
                if isinstance(action, StartGeneration):
                    return self._start(action, job)
                if isinstance(action, StopGeneration):
                    self._stop = StopView(mode=action.mode, cause=action.cause, reason=action.reason, requested_at=now)
                    saves = action.mode is not StopMode.LEAVE_NOW
                    assert job.generation is not None
                    return Stop(grace_s=_grace_s(job.generation, self._rules) if saves else None)
                assert isinstance(action, EndGeneration), f"no job ends in a replay: {action}"
                self._ended = action.number
                self._note_end(now, job.generation or job.last)

    def _note_end(self, now: float, generation: ReplayedGeneration | None) -> None:
        """Records what the manager's store has: the generation's lifetime and its time without progress."""
        assert generation is not None
        first_step_s = generation.ready_s + generation.plan.predicted_minibatch_s
        morph_s = generation.ready_s - self._progress_at if first_step_s <= now and self._shapes else None
        self._shapes.append(PastShape(lifetime_s=now - generation.started_s, morph_s=morph_s))
        self._progress_at = now

    def _start(self, action: StartGeneration, job: ReplayedJob) -> Start:
        plan = self._plans(action.plan.p * action.plan.d)
        assert plan is not None
        self._number, self._stop = action.number, None
        vms = tuple(device.vm_id for device in action.placement)
        return Start(plan=plan, vms=vms, every=self._every(plan, len(job.vms)))

    def _propose(self, devices: tuple[Device, ...]) -> Proposal:
        plan = self._plans(len(devices))
        if plan is None:
            return Proposal(plan=None, reason="no plan fits")
        return Proposal(plan=plan, placement=devices[: plan.p * plan.d])

    def _vms(self, now: float, job: ReplayedJob) -> Mapping[str, VmView]:
        views = {vm: VmView(id=vm, state=VmState.READY, ready_since=since - 1e-6) for vm, since in job.vms.items()}
        generation = job.generation or job.last
        for vm in generation.vms if generation else ():
            views.setdefault(vm, VmView(id=vm, state=VmState.GONE, reason="the provider does not have it any more"))
        return views

    def _view(self, now: float, job: ReplayedJob, proposal: Proposal | None = None) -> JobView:
        return JobView(
            id="replay",
            name="replay",
            state=JobState.RUNNING,
            created_at=0.0,
            global_batch=1,
            profiled_at=0.0,
            generation=self._generation(now, job),
            devices=tuple(Device(vm, 0) for vm in job.vms),
            proposal=proposal,
            morphs=estimate_morphs(self._shapes[-RECENT:]),
        )

    def _generation(self, now: float, job: ReplayedJob) -> GenerationView | None:
        generation = job.generation or job.last
        if generation is None:
            return None
        state = GenerationState.RUNNING if self._stop is None else GenerationState.STOPPING
        if self._ended == self._number:
            state = GenerationState.ENDED
        _, _, completed, _ = generation.progress(now if generation.broken_s is None else generation.broken_s)
        return GenerationView(
            number=self._number,
            kind=GenerationKind.TRAINING,
            state=state,
            workers=_workers(generation, job, now),
            progress_at=now,  # nothing hangs here
            plan=generation.plan,
            last_step=completed or None,
            stop=self._stop,
            end_reason=self._stop.reason if self._stop else "",
        )


def _workers(generation: ReplayedGeneration, job: ReplayedJob, now: float) -> tuple[WorkerView, ...]:
    workers = [
        WorkerView(rank=rank, device=Device(vm, 0), state=WorkerState.RUNNING)
        for rank, vm in enumerate(sorted(generation.vms))
    ]
    if job.generation is generation:
        return tuple(workers)
    return tuple(
        replace(worker, state=WorkerState.EXITED, cause=ExitCause.GENERATION_ENDED, stopped_at=now)
        if worker.device.vm_id in job.vms
        else replace(worker, state=WorkerState.LOST, cause=ExitCause.VM_GONE, stopped_at=now)
        for worker in workers
    )
