"""Policies for a job on spot VMs: the manager's own decisions, always the best plan, or the shapes in a trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from _goodput_generation import ReplayedGeneration
from _goodput_job import ReplayedJob
from _goodput_setting import Plans, Start, State, Stop, System

from varuna_manager.domain.actions import Decision, StartGeneration, StopGeneration
from varuna_manager.domain.devices import choose_devices
from varuna_manager.domain.fleet_past import FleetPast
from varuna_manager.domain.fleet_watch import FleetWatch
from varuna_manager.domain.job_decision import LEFT_AHEAD_S, decide_job, wants_plan
from varuna_manager.domain.keepers import Copies, CopiesFacts, SaveCost, choose_copies
from varuna_manager.domain.morphs import LOOKED_BACK, PastShape, estimate_morphs
from varuna_manager.domain.newcomers import NewcomersView
from varuna_manager.domain.observed import (
    GenerationView,
    Holder,
    Holders,
    JobView,
    KeptCopy,
    Proposal,
    Rules,
    StopView,
    VmView,
    WorkerView,
)
from varuna_manager.domain.sending_ahead import SENDING_SLOWDOWN, has_sent_ahead
from varuna_manager.domain.states import (
    EndCause,
    ExitCause,
    GenerationKind,
    GenerationState,
    JobState,
    StopMode,
    VmState,
    WorkerState,
)
from varuna_planner.liveput.checkpoint_interval import Cadence
from varuna_planner.liveput.copies import CopiedParts
from varuna_planner.liveput.hazard import holder_losses_per_hour, list_bursts, removals_per_vm_hour
from varuna_planner.liveput.morph_cost import NO_MOVES, MorphKind, expected_life_s, worthwhile_ratio
from varuna_planner.placement import place
from varuna_planner.schedule.batching import shared_micro_batch
from varuna_proto.plan import Device, Plan

_END_REASONS = {EndCause.VM_LOST: "VMs are lost", EndCause.NOTICE: "VMs have notice", EndCause.GROWTH: "growth"}


class Saves:
    """The interval of the runtime's automatic checkpoints."""

    def __init__(self, state: State, stall_s: float, removals_per_vm_hour: float, losses_at: Sequence[float]) -> None:
        """`removals_per_vm_hour`, `losses_at`: as the manager would know them at the end of the trace."""
        self._state, self._stall_s, self._hazard = state, stall_s, removals_per_vm_hour
        self._bursts = list_bursts(losses_at)

    def every(self, generation: ReplayedGeneration, system: System) -> float:
        plan = generation.plan
        vms = plan.p * plan.d
        stops = self._hazard * vms
        if system.survivors:
            holders = [min(plan.d + generation.copied.states, vms)] * plan.p
            stops = holder_losses_per_hour(stops, self._bursts, holders, vms)
        cadence = Cadence(stops_per_hour=stops)
        return cadence.interval_s(self._stall_s, self._state.read_store_s(plan), plan.predicted_minibatch_s)


class BestPlan:
    """Always the best plan for the present VMs: a morph at every change that makes another one faster."""

    looks_after_s: Sequence[float] = ()

    def __init__(self, plans: Plans, saves: Saves) -> None:
        self._plans, self._saves = plans, saves

    def every(self, generation: ReplayedGeneration, system: System) -> float:
        return self._saves.every(generation, system)

    def choose(self, now: float, vms: int) -> Plan | None:
        return self._plans.best(vms) if vms else None

    def is_better(self, job: ReplayedJob, plan: Plan, present: ReplayedGeneration) -> bool:
        return plan.examples_per_s > present.plan.examples_per_s * (1 + 1e-9)

    def decide(self, now: float, job: ReplayedJob) -> Start | Stop | None:
        best, generation = self.choose(now, len(job.vms)), job.generation
        if generation is None or not generation.live:
            return None if best is None else _start_best(job, best)
        is_busy = generation.stop is not None or generation.first_loss_s is not None
        if is_busy or best is None or generation.steps == 0 or not self.is_better(job, best, generation):
            return None
        return Stop()


class WorthwhilePlan(BestPlan):
    """The best plan, where its gain is worth another morph like the last (`worthwhile_ratio`)."""

    def is_better(self, job: ReplayedJob, plan: Plan, present: ReplayedGeneration) -> bool:
        hazard = removals_per_vm_hour(job.removals, job.vm_hours)
        ratio = worthwhile_ratio(present.pause_s, expected_life_s(hazard * plan.p * plan.d))
        return plan.examples_per_s >= present.plan.examples_per_s * ratio


class TraceDecisions(BestPlan):
    """The shapes that a trace names, such as Parcae's; the best plan where one does not fit."""

    def __init__(self, plans: Plans, saves: Saves, decisions: Sequence[tuple[float, int, int]]) -> None:
        super().__init__(plans, saves)
        self._decisions = decisions

    def choose(self, now: float, vms: int) -> Plan | None:
        shape = next(((p, d) for at_s, p, d in reversed(self._decisions) if at_s <= now), None)
        if shape is None or shape[0] * shape[1] > vms or not shape[0] * shape[1]:
            return super().choose(now, vms)
        best = self._plans.best(shape[0] * shape[1])
        sizes = (1, 2, 4) if best is None else (best.micro_batch, 1, 2, 4)
        plans = [self._plans.shaped(*shape, micro_batch) for micro_batch in sizes]
        return next((plan for plan in plans if plan is not None), None) or super().choose(now, vms)

    def is_better(self, job: ReplayedJob, plan: Plan, present: ReplayedGeneration) -> bool:
        return (plan.p, plan.d) != (present.plan.p, present.plan.d)


def _start_best(job: ReplayedJob, plan: Plan) -> Start:
    """Placed as the planner places it, with what each VM held before."""
    before = job.holding
    previous = {Device(vm, 0): rank for rank, vm in enumerate(before.vms)} if before is not None else {}
    devices = place(
        plan.p,
        plan.d,
        [Device(vm, 0) for vm in sorted(job.vms)],
        previous,
        previous_p=None if before is None else before.plan.p,
    )
    return Start(plan=plan, vms=tuple(device.vm_id for device in devices), from_memory=True)


class ManagersRules:
    """The manager's own decisions: `decide_job` over views of the simulated job and its fleet."""

    def __init__(self, plans: Plans, rules: Rules, saves: Saves, state: State) -> None:
        self._plans, self._rules, self._saves, self._state = plans, rules, saves, state
        settle_s = rules.growth_settle_s
        self.looks_after_s: Sequence[float] = (settle_s, 3 * settle_s, rules.storm_quiet_s, 60.0, 120.0, 240.0)
        self._watch = FleetWatch(0.0)
        self._fleet = FleetPast()
        self._shapes: list[PastShape] = []
        self._counted = 0
        self._holders: Holders | None = None
        self._newcomers: NewcomersView | None = None
        self._asked_s = 0.0
        """When these newcomers were asked for."""
        self._sending_s = 0.0
        """What it takes to send the state to them."""
        self.reasons: list[tuple[float, str]] = []

    def every(self, generation: ReplayedGeneration, system: System) -> float:
        return self._saves.every(generation, system)

    def decide(self, now: float, job: ReplayedJob) -> Start | Stop | None:
        generation = job.generation
        if generation is not None and generation.live:
            if generation.first_loss_s is not None or generation.stop is not None:
                return None
            if generation.steps and generation.number > max(1, self._counted):
                self._note_morph(generation)
        vms = self._view_vms(now, job)
        self._fleet = self._watch.observe_vms(vms, now)
        view = self._view(now, job)
        devices = choose_devices(now, view, vms, self._rules)
        if wants_plan(view, devices, vms):
            view = self._view(now, job, self._propose(job, devices))
        decision = decide_job(now, view, vms, self._rules)
        self._start_ahead(now, job, decision, view)
        for action in decision.actions:
            if isinstance(action, StartGeneration):
                self.reasons.append((now, action.reason))
                return self._start(action, job.system)
            assert isinstance(action, StopGeneration), f"nothing else happens in a replay: {action}"
            self.reasons.append((now, action.reason))
            is_within = action.mode is StopMode.HOLD_WITHIN_STEP
            return Stop(
                at_once=action.mode is StopMode.LEAVE_NOW,
                within_step=is_within,
                has_state=is_within and self._has_sent(view),
                before_vms_leave=action.cause is EndCause.NOTICE
                and action.mode in (StopMode.LEAVE_NOW, StopMode.HOLD_WITHIN_STEP),
                saves=action.mode is StopMode.SAVE_FIRST,
            )
        return None

    def _has_sent(self, view: JobView) -> bool:
        """Whether the next shape has the state that the step under way began with."""
        generation, newcomers = view.generation, view.newcomers
        return (
            generation is not None and newcomers is not None and has_sent_ahead(generation, newcomers.wanted, newcomers)
        )

    def _start_ahead(self, now: float, job: ReplayedJob, decision: Decision, view: JobView) -> None:
        """Starts the processes that the decision wants, and sends them the state; those for another plan end."""
        wanted, before, takes_s = decision.newcomers, self._newcomers, job.system.starts_ahead_s
        if wanted is None or takes_s is None:
            if job.generation is not None and job.generation.live and not decision.actions:
                self._newcomers = None
            return
        if before is None or before.wanted.request != wanted.request:
            is_same = before is not None and before.wanted.number == wanted.number
            self._newcomers = NewcomersView(wanted=wanted, since=before.since if before and is_same else now)
            self._asked_s = now
            job.look_again(now + takes_s)
        assert self._newcomers is not None
        if wanted.sends_state:
            since = self._newcomers.sending_since
            self._newcomers = replace(self._newcomers, wanted=wanted, sending_since=now if since is None else since)
            assert view.proposal is not None
            self._sending_s = SENDING_SLOWDOWN * view.proposal.moves.in_place.whole_s
            job.look_again(self._find_sent_s(job))

    def _find_sent_s(self, job: ReplayedJob) -> float:
        """When the state of the step under way has been sent."""
        assert self._newcomers is not None
        assert job.generation is not None
        return max(self._newcomers.sending_since or 0.0, job.generation.stepped_s) + self._sending_s

    def _view_newcomers(self, now: float, job: ReplayedJob) -> NewcomersView | None:
        takes_s, newcomers = job.system.starts_ahead_s, self._newcomers
        if newcomers is None or takes_s is None or now < self._asked_s + takes_s - 1e-6:
            return newcomers
        there = frozenset(device for device in newcomers.wanted.devices if device.vm_id in job.there)
        sent_steps: dict[int, int] = {}
        if newcomers.sending_since is not None and job.generation is not None:
            step = round(job.committed / job.generation.plan.global_batch)
            is_sent = now >= self._find_sent_s(job) - 1e-6
            sent_steps = dict.fromkeys(range(len(job.generation.vms)), step) if is_sent else {}
        return replace(newcomers, at_door=there, sent_steps=sent_steps)

    def _note_morph(self, generation: ReplayedGeneration) -> None:
        """What the manager's store would have of it."""
        self._counted = generation.number
        self._shapes.insert(
            0,
            PastShape(
                ended_at=generation.ready_s,
                morph_s=generation.pause_s,
                moving_s=generation.moving_s,
                in_place=generation.kind is MorphKind.IN_PLACE,
            ),
        )
        del self._shapes[LOOKED_BACK:]

    def _start(self, action: StartGeneration, system: System) -> Start:
        plan = action.plan
        if action.in_place:
            plan = self._plans.shaped(plan.p, plan.d, plan.micro_batch) or plan
        self._holders = action.holders
        vms = tuple(device.vm_id for device in action.placement)
        return Start(
            plan=plan,
            vms=vms,
            in_place=action.in_place,
            from_memory=action.holders is not None,
            copied=self._choose_copies(plan, vms, system) if system.weighs_copies else None,
        )

    def _choose_copies(self, plan: Plan, vms: Sequence[str], system: System) -> CopiedParts:
        save = SaveCost(
            stall_s=system.save_stall_s,
            write_s=self._state.read_store_s(plan),
            beside_passes=system.copies_beside_passes,
        )
        facts = CopiesFacts(fleet=self._fleet, step_s=plan.predicted_minibatch_s, save=save)
        choice = choose_copies(Copies.AUTO, plan, vms, {}, facts)
        return CopiedParts(states=bool(choice.keepers), marks=choice.marks)

    def _propose(self, job: ReplayedJob, devices: tuple[Device, ...]) -> Proposal:
        plan, generation = self._plans.best(len(devices)), job.generation
        if plan is None:
            return Proposal(plan=None, reason="no plan fits")
        proposal = self._place(job, plan, devices)
        if generation is None or generation.live:
            return proposal
        alive = {Device(generation.vms[rank], 0) for rank in generation.list_alive()}
        survivors = tuple(device for device in devices if device in alive)
        keeping = self._choose_keeping(len(survivors), generation.plan.micro_batch) if survivors else None
        return proposal if keeping is None else replace(proposal, keeping=self._place(job, keeping, survivors))

    def _choose_keeping(self, gpus: int, micro_batch: int) -> Plan | None:
        """The best plan with which a step of this micro-batch can go on, as the manager asks for it."""
        best = self._plans.best(gpus)
        if best is not None and shared_micro_batch(best.micro_batch, micro_batch) is not None:
            return best
        return self._plans.best_keeping(gpus, micro_batch)

    def _place(self, job: ReplayedJob, plan: Plan, devices: tuple[Device, ...]) -> Proposal:
        before = job.holding
        previous = {} if before is None else {Device(vm, 0): rank for rank, vm in enumerate(before.vms)}
        previous_p = None if before is None else before.plan.p
        placement = place(plan.p, plan.d, devices, previous, previous_p=previous_p)
        moves = NO_MOVES
        if before is not None:
            vms = [device.vm_id for device in placement]
            moves = self._state.predict_moving(plan, vms, before.plan, before.vms)
        return Proposal(plan=plan, placement=placement, moves=moves)

    def _view_vms(self, now: float, job: ReplayedJob) -> Mapping[str, VmView]:
        views = {vm: VmView(id=vm, state=VmState.READY, ready_since=since - 1e-6) for vm, since in job.vms.items()}
        for vm, at_s in job.find_leaving(now).items():
            views[vm] = replace(views[vm], state=VmState.DRAINING, reason="it has notice", notice_deadline=at_s)
            job.look_again(at_s - LEFT_AHEAD_S)
        for vm in job.generation.vms if job.generation is not None else ():
            views.setdefault(vm, VmView(id=vm, state=VmState.GONE, reason="the provider no longer has it"))
        return views

    def _view(self, now: float, job: ReplayedJob, proposal: Proposal | None = None) -> JobView:
        generation, leaving = job.generation, job.find_leaving(now)
        ended = generation is not None and not generation.live
        survivors: frozenset[Device] = frozenset()
        if generation is not None and ended and job.system.survivors and job.have_their_state(now, generation):
            alive = {generation.vms[rank] for rank in generation.list_alive()} & job.there - leaving.keys()
            survivors = frozenset(Device(vm, 0) for vm in alive)
        batch = 1 if generation is None else generation.plan.global_batch
        return JobView(
            id="replay",
            name="replay",
            state=JobState.RUNNING,
            created_at=0.0,
            global_batch=batch,
            profiled_at=0.0,
            generation=self._view_generation(now, job, survivors),
            devices=tuple(Device(vm, 0) for vm in sorted(job.vms.keys() - leaving.keys())),
            survivors=survivors,
            proposal=proposal,
            fleet=self._fleet,
            morphs=estimate_morphs(self._shapes),
            copies_shares=generation is not None and generation.copied.marks,
            starts_ahead=job.system.starts_ahead_s is not None,
            newcomers=self._view_newcomers(now, job),
            has_fixed_stages=not job.system.moves,
        )

    def _view_generation(self, now: float, job: ReplayedJob, survivors: frozenset[Device]) -> GenerationView | None:
        generation = job.generation
        if generation is None:
            return None
        step = round(job.committed / generation.plan.global_batch)
        if generation.live:
            state = GenerationState.RUNNING if generation.ready_s <= now else GenerationState.LAUNCHING
        else:
            state = GenerationState.ENDED
        end_cause, stop = _find_end_cause(generation), None
        if end_cause is not None and generation.has_left_within_step:
            mode = StopMode.HOLD_WITHIN_STEP
            stop = StopView(mode=mode, cause=end_cause, reason=_END_REASONS[end_cause], requested_at=0.0)
        return GenerationView(
            number=generation.number,
            kind=GenerationKind.TRAINING,
            state=state,
            workers=tuple(
                _view_worker(now, generation, rank, survivors, step=step, copies=generation.copied.states)
                for rank in range(len(generation.vms))
            ),
            keepers=tuple(generation.keepers) if generation.copied.states else (),
            progress_at=generation.stepped_s,
            stepped_at=generation.stepped_s if generation.steps or now < generation.ready_s else generation.ready_s,
            micro_batches_left=round((generation.plan.global_batch - generation.kept) / generation.plan.micro_batch),
            plan=generation.plan,
            last_step=step if generation.steps else None,
            resumed_step=step if generation.ready_s <= now else None,
            in_place=generation.kind is MorphKind.IN_PLACE,
            holders=self._renew_holders(now),
            ended_at=None if generation.live else now,
            stop=stop,
            end_cause=end_cause,
            end_reason="" if end_cause is None else _END_REASONS[end_cause],
        )

    def _renew_holders(self, now: float) -> Holders | None:
        """Simulated launches take minutes in some systems; holders wait."""
        if self._holders is None:
            return None
        members = tuple(
            Holder(rank=one.rank, stage=one.stage, vm_id=one.vm_id, held_at=now) for one in self._holders.members
        )
        return Holders(generation=self._holders.generation, members=members)


def _find_end_cause(generation: ReplayedGeneration) -> EndCause | None:
    """None: it is live."""
    if generation.live:
        return None
    if generation.first_loss_s is not None:
        return EndCause.VM_LOST
    return EndCause.NOTICE if generation.stop is not None and generation.stop.before_vms_leave else EndCause.GROWTH


def _view_worker(
    now: float, generation: ReplayedGeneration, rank: int, survivors: frozenset[Device], *, step: int, copies: bool
) -> WorkerView:
    device = Device(generation.vms[rank], 0)
    if generation.live:
        return WorkerView(rank=rank, device=device, state=WorkerState.RUNNING)
    if rank in generation.lost and not generation.has_left_within_step:
        return WorkerView(
            rank=rank,
            device=device,
            state=WorkerState.LOST,
            cause=ExitCause.VM_GONE,
            stopped_at=generation.first_loss_s,
        )
    return WorkerView(
        rank=rank,
        device=device,
        state=WorkerState.EXITED,
        cause=ExitCause.GENERATION_ENDED,
        stopped_at=now,
        held_step=step if device in survivors or rank in generation.lost else None,
        held_copies=tuple(
            KeptCopy(owner, step)
            for owner, keeper in [*(enumerate(generation.keepers) if copies else ()), *generation.takers.items()]
            if keeper == rank and device in survivors
        ),
    )
