"""Keeps every job in the shape that `decide_job` wants, and sends every agent its commands.

Each look loads a snapshot, shares the GPUs out where there are several jobs, goes through the jobs by priority and age,
applies what was decided in one short transaction per job, and at last sends each agent the commands that it needs and
that were not sent on its present stream.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import structlog
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm.exc import StaleDataError

from varuna_manager.agents.sessions import AgentSession, AgentSessions
from varuna_manager.controllers import messages
from varuna_manager.controllers.defects import Defects
from varuna_manager.controllers.job_actions import JobActions
from varuna_manager.controllers.job_view import (
    DevicePool,
    LoadedJob,
    Snapshot,
    SnapshotLoader,
    previous_placement,
    trained_micro_batch,
    with_health,
)
from varuna_manager.controllers.newcomers import NewcomerRequests
from varuna_manager.controllers.preparations import Preparations, may_grow
from varuna_manager.controllers.shares import ShareOut, Shares
from varuna_manager.db.engine import Database, NotLeaderError, StoreAwayError
from varuna_manager.db.models import GenerationRow, JobRow, VmRow
from varuna_manager.domain.actions import Action, Decision, RequestStacks, StartGeneration
from varuna_manager.domain.better_shape import gpu_limit
from varuna_manager.domain.commands import CommandKey, DrainKey, LaunchKey, StopKey, list_commands
from varuna_manager.domain.devices import choose_devices, keep_waiting_share, list_waiting_devices
from varuna_manager.domain.job_decision import decide_job, wants_plan
from varuna_manager.domain.keepers import Copies, CopiesFacts, count_unsaved, expect_step_s
from varuna_manager.domain.newcomers import WantedNewcomers
from varuna_manager.domain.observed import JobView, Proposal, Rules, Vms, VmView
from varuna_manager.domain.preparing import JobPlaces
from varuna_manager.domain.reshaping import keeps_state, may_gain_elsewhere, may_stay_in_place
from varuna_manager.domain.starting import decide_in_place
from varuna_manager.domain.states import HOLDING_STOPS, EndCause, GenerationKind, JobState, StopMode, VmState
from varuna_manager.domain.store_stops import expect_store_stops
from varuna_manager.history.morph_spans import MorphSpans
from varuna_manager.jobs.checkpoints import read_saved_step
from varuna_manager.jobs.secrets import SecretError, Secrets
from varuna_manager.jobs.stacks import StackService
from varuna_manager.planning.planning import GpuOfVm, PlanningService, PlanQuestion
from varuna_manager.planning.rates import RateService
from varuna_manager.world.events import EventLog
from varuna_proto.failpoints import failpoint
from varuna_proto.plan import Device
from varuna_proto.state_use import StateUse
from varuna_proto.v1 import agent_pb2 as pb
from varuna_proto.wording import render_interval

_SESSIONS_AT_ONCE = 500
_NAMED = 5
"""VMs listed in one message."""
_WITNESSED_LOOK_S = 0.1
"""Between looks while ranks of a job get no answer from another: its agent's next heartbeat may be overdue by then."""
_NEWS = 1.5
"""A hazard that has changed by this factor gets an event."""


@dataclass(frozen=True, kw_only=True)
class LaunchDefaults:
    """Values of a Launch that the job does not set."""

    checkpoint_root: str
    """URL of a folder with a subfolder for each job that names no checkpoint URL."""
    profile_cache_url: str


@dataclass(frozen=True, kw_only=True)
class JobControllerServices:
    """What the job controller reads from and writes through."""

    sessions: AgentSessions
    planning: PlanningService
    rates: RateService
    stacks: StackService
    events: EventLog
    spans: MorphSpans = field(default_factory=MorphSpans)
    secrets: Secrets = field(default_factory=lambda: Secrets({}))


class JobController:
    name = "jobs"

    def __init__(
        self,
        database: Database,
        loader: SnapshotLoader,
        services: JobControllerServices,
        rules: Rules,
        launch_defaults: LaunchDefaults,
        *,
        period_s: float,
        now: Callable[[], float] = time.time,
    ) -> None:
        """`period_s`: between looks when nothing wakes the controller."""
        self._database = database
        self._spans = services.spans
        self._secrets = services.secrets
        self._loader = loader
        self._registry = loader.world.registry
        self._sessions = services.sessions
        self._planning = services.planning
        self._shares = ShareOut(services.rates, rules, now)
        self._stacks = services.stacks
        self._actions = JobActions(self._registry, services.events, services.stacks, now)
        self._events = services.events
        self._rules = rules
        self._launch_defaults = launch_defaults
        self._period_s = period_s
        self._now = now
        self._log = structlog.get_logger("varuna.controller").bind(controller=self.name)
        self._defects = Defects()
        self._flaws: dict[str, str] = {}
        """Why a job's commands cannot be sent, by job."""
        self._emitted_stops: dict[str, float] = {}
        self._preparations = Preparations(rules, now, self._note_flaw)
        self._newcomers = NewcomerRequests(self._registry, rules, now)

    async def reconcile_once(self) -> float:
        sessions = self._sessions.list_sessions()  # before the rows, which the Hello of a later one may change
        snapshot = await self._loader.load_snapshot()
        job_ids = {job.row.id for job in snapshot.jobs}
        self._stacks.keep_only(job_ids)
        self._preparations.keep_only(job_ids)
        self._newcomers.keep_only(job_ids)
        self._emitted_stops = {
            job.row.id: self._emitted_stops[job.row.id] for job in snapshot.jobs if job.row.id in self._emitted_stops
        }
        self._flaws = {job.row.id: self._flaws[job.row.id] for job in snapshot.jobs if job.row.id in self._flaws}
        shares = await self._shares.compute_shares(snapshot)
        waiting = {
            device: job.view.id
            for job in snapshot.jobs
            for device in list_waiting_devices(self._now(), job.view, self._rules)
        }
        pool = DevicePool(snapshot, shares.places, waiting)
        changed = False
        for job in sorted(snapshot.jobs, key=lambda job: -job.spec.priority):
            try:
                view = await self._complete_view(job, snapshot, pool, shares)
                decision = decide_job(self._now(), view, snapshot.vms, self._rules)
                self._newcomers.follow_decision(view, decision)
                changed |= await self._apply(job, decision, view.proposal)
                pool.take_devices(decision.claims)
            except StaleDataError:
                changed = True  # the decision is stale: look again
            except (NotLeaderError, StoreAwayError):
                raise  # not this job's problem
            except Exception as error:
                # An error in the handling of one job must not delay the other jobs and their agents.
                self._defects.log_once(job.row.id, "no decision about a job", error)
        if changed:
            return 0.0
        await self._send_commands(snapshot, shares.places, sessions)
        # The silence of an agent is no event: where ranks already accuse one, it is looked for.
        has_witness = any(self._has_witness(job.view) for job in snapshot.jobs)
        return min(self._period_s, _WITNESSED_LOOK_S) if has_witness else self._period_s

    def _has_witness(self, view: JobView) -> bool:
        """Whether a rank of its live generation gets no answer from another."""
        generation = view.generation
        return generation is not None and generation.live and self._registry.has_witness(view.id, generation.number)

    async def _complete_view(self, job: LoadedJob, snapshot: Snapshot, pool: DevicePool, shares: Shares) -> JobView:
        """The view with the devices that earlier jobs left, and the planner's proposal for them."""
        view = shares.with_share(job.view)
        view = self._newcomers.complete_view(view, job.spec.env)
        view = replace(view, flaw=view.flaw or self._flaws.get(view.id, ""))
        if view.flaw:
            return view
        makes_workdir = job.spec.needs_preparing
        resources = job.resources
        devices, quarantined = pool.for_job(view.id, gpu_limit(view), only_prepared=makes_workdir, resources=resources)
        if makes_workdir:
            setups = self._preparations.setups_of(job, snapshot, pool)
            view = replace(view, setups=setups, prepared_s=self._preparations.ready_s(view.id, devices))
        stacks = None if job.generation is None else self._stacks.collect_answers(view.id, job.generation.number)
        unfit = pool.count_unfit(resources)
        view = replace(view, devices=devices, quarantined=quarantined, unfit=unfit, stacks=stacks)
        view = keep_waiting_share(self._now(), view, self._rules)
        if stacks is not None or self._has_witness(view):
            view = with_health(view, self._registry)
        self._secrets.prefetch_secrets(job.spec.secrets)  # also for a running job: its next launch may be soon
        if job.spec.secrets and (view.generation is None or not view.generation.live):
            view = replace(view, missing_secret=self._secrets.explain_missing(job.spec.secrets))
        survivors = [Device(one.vm_id, one.local_rank) for one in job.workers if one.held_step is not None]
        view = replace(view, survivors=pool.keep_free(view.id, survivors))
        in_place = decide_in_place(self._now(), view, snapshot.vms, self._rules)
        if in_place is not None and not (in_place.actions and may_gain_elsewhere(view.generation)):
            return view
        devices = choose_devices(self._now(), view, snapshot.vms, self._rules)
        if not wants_plan(view, devices, snapshot.vms):
            return view
        question = _make_question(job, view, devices, snapshot.vms)
        return replace(view, proposal=await self._planning.propose_plan(question))

    # ------------------------------------------------------------ apply

    async def _apply(self, job: LoadedJob, decision: Decision, proposal: Proposal | None) -> bool:
        """Write the decision. Returns whether more than the reason changed. A stale decision is dropped."""
        if not decision.actions and decision.reason == job.row.reason:
            return False
        if any(isinstance(action, StartGeneration) and not self._has_port(action) for action in decision.actions):
            return True  # another job of this look took a device: look again
        for action in decision.actions:
            failpoint(f"manager.{type(action).__name__}.decided")
        copies_facts = await self._find_copies_facts(job, decision, proposal)
        async with self._database.write() as session:
            row = await session.get_one(JobRow, job.row.id)
            if row.version != job.row.version:
                self._loader.world.check_version(job.row, row.version)
                return True  # the decision is stale: look again
            if row.reason != decision.reason:
                row.reason = decision.reason
                if not decision.actions and decision.notable:
                    self._events.emit_event(
                        session, "decision", decision.reason, job_id=row.id, generation=_number(job)
                    )
            for action in decision.actions:
                await self._actions.apply_action(session, row, action, copies_facts)
                if isinstance(action, StartGeneration) and action.kind is GenerationKind.TRAINING:
                    await self._note_hazard(session, job, action)
                if isinstance(action, StartGeneration) and job.spec.limits.max_cost is not None:
                    await self._note_unpriced(session, job, action)
        for action in decision.actions:
            failpoint(f"manager.{type(action).__name__}.committed")
            self._follow_up(job, action)
        return bool(decision.actions)

    async def _find_copies_facts(
        self, job: LoadedJob, decision: Decision, proposal: Proposal | None
    ) -> CopiesFacts | None:
        """What the copies of the generation that starts depend on; None: none starts."""
        plans = [
            action.plan
            for action in decision.actions
            if isinstance(action, StartGeneration) and action.kind is GenerationKind.TRAINING
        ]
        if not plans:
            return None
        obstacles = tuple(job.row.script_obstacles or ())
        if Copies(job.spec.copies) is not Copies.AUTO:
            return CopiesFacts(script_obstacles=obstacles)
        view, save = job.view, await self._planning.predict_save(job.row.profile_json or "", plans[0])
        async with self._database.read() as session:
            saved_step = await read_saved_step(session, view.id)
        return CopiesFacts(
            fleet=view.fleet,
            step_s=expect_step_s(view.generation, plans[0], proposal),
            save=replace(save, pinned_interval_s=job.spec.checkpoint.interval_s),
            unsaved=count_unsaved(view.setbacks.best_step, view.generation, saved_step),
            script_obstacles=obstacles,
        )

    async def _note_unpriced(self, session: AsyncSession, job: LoadedJob, action: StartGeneration) -> None:
        """Emit an event with the VMs that the job's cost limit does not count."""
        vm_ids = sorted({device.vm_id for device in action.placement})
        query = select(VmRow.id).where(VmRow.id.in_(vm_ids), VmRow.price_per_hour.is_(None)).order_by(VmRow.id)
        unpriced = list(await session.scalars(query))
        if unpriced:
            more = "" if len(unpriced) <= _NAMED else f" and {len(unpriced) - _NAMED} more"
            text = (
                f"limits.max_cost of job {job.row.name!r} does not count VMs whose price is not known: "
                f"{', '.join(unpriced[:_NAMED])}{more}"
            )
            data = {"vms": unpriced}
            self._events.emit_event(
                session, "cost_unknown", text, job_id=job.row.id, generation=action.number, data=data
            )

    def _has_port(self, action: StartGeneration) -> bool:
        return self._registry.rendezvous_port(action.placement[0].vm_id) is not None

    async def _note_hazard(self, session: AsyncSession, job: LoadedJob, action: StartGeneration) -> None:
        """Emit an event when the hazard, which sets how often the generation saves, differs from the last one's."""
        fleet, pinned_s = job.view.fleet, job.spec.checkpoint.interval_s
        of_generation = (GenerationRow.job_id == job.row.id, GenerationRow.number == action.number)
        keepers = await session.scalar(select(GenerationRow.keepers).where(*of_generation))
        vm_ids = [device.vm_id for device in action.placement]
        lost = fleet.stops_per_hour(len(set(vm_ids)))
        expected = expect_store_stops(
            fleet,
            vm_ids,
            action.plan.p,
            keepers=keepers or (),
            holds_state=job.spec.holds_state,
        )
        emitted = self._emitted_stops.get(job.row.id)
        if pinned_s is not None or (emitted is not None and emitted / _NEWS < expected < emitted * _NEWS):
            return
        self._emitted_stops[job.row.id] = expected
        text = (
            f"a lost VM is expected to stop generation {action.number} {_render_often(lost)} "
            f"({fleet.describe_losses()}). All VMs that hold one of its stages are expected to be lost together "
            f"{_render_often(expected)}: its workers save as often as pays"
        )
        data = {
            "stops_per_hour": lost,
            "store_stops_per_hour": expected,
            "removals": fleet.removals,
            "vm_hours": fleet.vm_hours,
        }
        self._events.emit_event(session, "hazard", text, job_id=job.row.id, generation=action.number, data=data)

    def _follow_up(self, job: LoadedJob, action: Action) -> None:
        """Do what the decision needs outside the store, after its commit."""
        if isinstance(action, StartGeneration):
            first = action.placement[0].vm_id
            port = self._registry.rendezvous_port(first)
            if port is not None:
                self._registry.use_rendezvous_port(first, port)
        elif isinstance(action, RequestStacks):
            running = {worker.rank: worker.vm_id for worker in job.workers if worker.is_alive}
            self._stacks.request_stacks(job.row.id, action.number, running)

    # ------------------------------------------------------------ send

    async def _send_commands(self, snapshot: Snapshot, places: JobPlaces, sessions: Sequence[AgentSession]) -> None:
        """Send each agent the commands that it needs and that were not sent on its present stream.

        `sessions`: those that were open when the snapshot was loaded.
        """
        jobs = {job.row.id: job for job in snapshot.jobs}
        growing = max(filter(may_grow, snapshot.jobs), key=lambda job: job.spec.priority, default=None)
        for number, session in enumerate(sessions):
            if number % _SESSIONS_AT_ONCE == 0:
                await asyncio.sleep(0)  # heartbeats are answered by the same thread
            vm = snapshot.vms.get(session.vm_id)
            if vm is None or self._sessions.get(session.vm_id) is not session:
                continue
            parts, running = snapshot.presence.get(session.vm_id, ()), self._registry.list_running(session.vm_id)
            draining = vm.state is VmState.DRAINING
            is_idle = not (parts or running or draining)
            planned = places.to_prepare.get(vm.id, ())
            if is_idle or planned or vm.prepared or vm.setting_up:
                runs = [*[part.job_id for part in parts], *[job_id for job_id, _ in running]]
                self._preparations.send_prepare(
                    session, vm, jobs, planned=planned, running=runs, growing=growing, is_idle=is_idle
                )
            # A comparison that has not changed was answered with commands already.
            if not is_idle and session.last_comparison != (parts, running, draining):
                wanted = list_commands(parts, running, session.seen, draining=draining)
                for key in wanted:
                    if key not in session.sent_commands and self._try_send(session, key, jobs, snapshot):
                        session.sent_commands.add(key)
                        failpoint(f"manager.{type(key).__name__}.sent")
                if session.sent_commands.issuperset(wanted):
                    session.last_comparison = (parts, running, draining)
            # After a Launch, because that takes newcomers which are not wanted any longer.
            self._newcomers.send_commands(
                session,
                vm,
                make_start=partial(self._make_start_newcomers, vm, jobs),
                make_send=partial(self._make_send_ahead, vm, jobs),
            )

    def _try_send(
        self,
        session: AgentSession,
        key: CommandKey,
        jobs: Mapping[str, LoadedJob],
        snapshot: Snapshot,
    ) -> bool:
        """Whether the command was sent. A job whose command cannot be built fails, and the others go on."""
        job_id = "" if isinstance(key, DrainKey) else key.job_id
        try:
            return self._send_command(session, key, jobs, snapshot)
        except messages.UNSENDABLE as error:
            if isinstance(key, LaunchKey):
                self._note_flaw(job_id, error)
            else:
                self._defects.log_once(job_id, "a command cannot be sent", error)
            return False
        except Exception as error:
            self._defects.log_once(job_id, "a command cannot be sent", error)
            return False

    def _make_start_newcomers(
        self, vm: VmView, jobs: Mapping[str, LoadedJob], job_id: str, wanted: WantedNewcomers
    ) -> pb.ManagerMessage | None:
        """None if the message cannot be made: then the generation starts without them."""
        job = jobs[job_id]
        try:
            return messages.start_newcomers_message(
                job,
                wanted,
                vm,
                secrets=self._secrets.read_values(job.spec.secrets),
                default_checkpoint_url=self._checkpoint_url(job),
                profile_cache_url=self._launch_defaults.profile_cache_url,
            )
        except (SecretError, *messages.UNSENDABLE) as error:
            self._defects.log_once(job_id, "processes cannot be started ahead", error)
            return None

    def _make_send_ahead(
        self, vm: VmView, jobs: Mapping[str, LoadedJob], job_id: str, wanted: WantedNewcomers
    ) -> pb.ManagerMessage | None:
        try:
            return messages.send_ahead_message(jobs[job_id], wanted, vm)
        except messages.UNSENDABLE as error:
            self._defects.log_once(job_id, "the state cannot be sent ahead", error)
            return None

    def _checkpoint_url(self, job: LoadedJob) -> str:
        # Null in rows of an earlier version.
        return job.row.checkpoint_url or f"{self._launch_defaults.checkpoint_root}/{job.row.id}"

    def _note_flaw(self, job_id: str, error: Exception) -> None:
        self._flaws[job_id] = f"its commands cannot be sent to its agents: {' '.join(str(error).split())}"

    def _send_command(
        self,
        session: AgentSession,
        key: CommandKey,
        jobs: Mapping[str, LoadedJob],
        snapshot: Snapshot,
    ) -> bool:
        """Returns False if it cannot be sent now and is tried again."""
        if isinstance(key, LaunchKey):
            if jobs[key.job_id].view.flaw:
                return True  # it is about to end
            try:
                secrets = self._secrets.read_values(jobs[key.job_id].spec.secrets)
            except SecretError as error:
                self._defects.log_once(key.job_id, "a command cannot be sent", error)
                return False
            message = messages.launch_message(
                jobs[key.job_id],
                snapshot.vms[session.vm_id],
                secrets=secrets,
                default_checkpoint_url=self._checkpoint_url(jobs[key.job_id]),
                profile_cache_url=self._launch_defaults.profile_cache_url,
                spans=self._spans,
            )
            session.send(message)
        elif isinstance(key, StopKey):
            job = jobs.get(key.job_id)
            step_s = _step_s(job, key.generation)
            goes_on = job is not None and job.row.job_state is not JobState.CANCELLING
            message = messages.stop_message(
                key,
                self._rules,
                now=self._now(),
                step_s=step_s,
                leaves_at=snapshot.vms[session.vm_id].leave_by,
                traceparent=self._spans.make_traceparent(key.job_id, key.generation + 1) if goes_on else "",
                state_use=_choose_state_use(job, key, snapshot.vms[session.vm_id], snapshot.vms),
            )
            session.send(message)
        else:
            session.send(messages.drain_message(snapshot.vms[session.vm_id].reason))
        return True


def _keeps_state(job: LoadedJob | None, number: int) -> bool:
    """Whether workers of the generation are to keep their state when they leave."""
    if job is None or job.generation is None or job.row.job_state is not JobState.RUNNING:
        return False
    newest = job.generation
    if newest.number > number:
        # The processes of that generation may be this one's now, or give it their state.
        return newest.in_place or newest.holders_generation is not None
    cause = newest.cause_of_end or newest.cause_of_stop
    return cause is None or keeps_state(cause)


def _is_failing(job: LoadedJob | None, number: int) -> bool:
    """Whether the job ends with the generation, because of an error in its script."""
    newest = None if job is None else job.generation
    if job is None or newest is None or newest.number != number or newest.cause_of_end is not None:
        return False
    is_running = job.row.job_state is JobState.RUNNING
    return is_running and newest.cause_of_stop is EndCause.SCRIPT_FAILED and not job.view.may_restart


def _choose_state_use(job: LoadedJob | None, key: StopKey, vm: VmView, vms: Vms) -> StateUse:
    """What becomes of the state of the generation's workers on the VM."""
    if _is_failing(job, key.generation):
        return StateUse(keep=True, store=True)  # for `varuna retry`: its processes must not keep devices
    keep = _keeps_state(job, key.generation)
    running = None if job is None else job.view.generation
    if job is None or running is None or running.number != key.generation or key.mode not in HOLDING_STOPS:
        return StateUse(keep=keep)
    in_place = running.stop is not None and running.stop.cause is EndCause.NOTICE
    if not in_place or vm.state is not VmState.DRAINING:
        return StateUse(keep=keep, in_place=in_place)
    # In the middle of a step it gives to others what only it has.
    gives = key.mode is StopMode.HOLD_WITHIN_STEP
    spare = gives or may_stay_in_place(running, vms, job.view.min_gpus, gpu_limit(job.view))
    return StateUse(keep=keep, in_place=in_place, spare=spare)


def _step_s(job: LoadedJob | None, generation: int) -> float:
    """How long its next step may take; 0 for a generation that is no longer the job's newest."""
    view = None if job is None else job.view.generation
    return 0.0 if view is None or view.number != generation else view.longest_step_s


def _render_often(per_hour: float) -> str:
    return f"about every {render_interval(3600 / per_hour)}" if per_hour else "never"


def _number(job: LoadedJob) -> int | None:
    return None if job.generation is None else job.generation.number


def _make_question(
    job: LoadedJob, view: JobView, devices: tuple[Device, ...], vms: Mapping[str, VmView]
) -> PlanQuestion:
    there = [vms[vm_id] for vm_id in {device.vm_id for device in devices}]
    memories = [vm.device_memory_bytes for vm in there if vm.device_memory_bytes]
    previous, plan = previous_placement(job)
    were_there = [vms[vm_id] for vm_id in {device.vm_id for device in previous} if vm_id in vms]
    may_keep = plan is not None and may_gain_elsewhere(view.generation)
    return PlanQuestion(
        profile_json=job.row.profile_json or "",
        spec=job.spec,
        devices=devices,
        zones=_list_zones([*there, *were_there]),
        gpu_types=_list_gpu_types(there),
        device_memory_bytes=min(memories, default=None),
        gpus_per_vm=min(vm.gpus for vm in there),
        trained_micro_batch=trained_micro_batch(job),
        margin=view.margin,
        previous=previous,
        previous_p=None if plan is None else plan.p,
        has_fitted=plan is not None and not _has_run_out_of_memory(view),
        previous_starts=() if plan is None else plan.stage_starts,
        present=plan,
        survivors=tuple(sorted(view.survivors & {*devices})) if may_keep else (),
        kept_micro_batch=0 if plan is None else plan.micro_batch,
    )


def _has_run_out_of_memory(view: JobView) -> bool:
    return view.generation is not None and view.generation.end_cause is EndCause.OUT_OF_MEMORY


def _list_gpu_types(vms: Iterable[VmView]) -> tuple[GpuOfVm, ...]:
    """The GPUs of each VM, where they are known by name."""
    return tuple(sorted(GpuOfVm(vm.id, vm.gpu_type, vm.device_memory_bytes) for vm in vms if vm.gpu_type))


def _list_zones(vms: Iterable[VmView]) -> tuple[tuple[str, str], ...]:
    """Each VM with its zone, if these are in several."""
    zones = tuple(sorted({(vm.id, vm.zone) for vm in vms}))
    return zones if len({zone for _, zone in zones}) > 1 else ()
