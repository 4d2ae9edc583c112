"""Keeps every job in the shape that `decide_job` wants, and every agent told.

Each look loads a snapshot, shares the GPUs out where there are several jobs, goes through the jobs by priority and age,
applies what was decided in one short transaction per job, and at last compares what each agent should have been told
with what it was told.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import structlog
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm.exc import StaleDataError

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
    with_steps,
)
from varuna_manager.controllers.preparations import Preparations, may_grow
from varuna_manager.controllers.shares import ShareOut, Shares
from varuna_manager.db.engine import Database, NotLeaderError, StoreAwayError
from varuna_manager.db.models import JobRow, VmRow
from varuna_manager.domain.better_shape import most_gpus
from varuna_manager.domain.commands import CommandKey, DrainKey, LaunchKey, Presence, StopKey, wanted_commands
from varuna_manager.domain.devices import next_devices
from varuna_manager.domain.job_decision import decide_job, wants_plan
from varuna_manager.domain.observed import (
    Action,
    AskStacks,
    Decision,
    JobView,
    Plan,
    Rules,
    StartGeneration,
)
from varuna_manager.domain.preparing import Places
from varuna_manager.domain.states import GenerationKind, JobState, VmState
from varuna_manager.services.events import EventLog
from varuna_manager.services.morph_spans import MorphSpans
from varuna_manager.services.planning import PlanningService, Question
from varuna_manager.services.rates import RateService
from varuna_manager.services.secrets import SecretError, Secrets
from varuna_manager.services.sessions import AgentSession, AgentSessions
from varuna_manager.services.stacks import StackService
from varuna_manager.services.vm_registry import VmRegistry
from varuna_proto.failpoints import failpoint

_SESSIONS_AT_ONCE = 500
_NAMED = 5
"""VMs in one message."""
_NEWS = 1.5
"""A hazard that is so many times as high or low is told."""


class JobController:
    name = "jobs"

    def __init__(
        self,
        database: Database,
        loader: SnapshotLoader,
        registry: VmRegistry,
        sessions: AgentSessions,
        planning: PlanningService,
        rates: RateService,
        stacks: StackService,
        events: EventLog,
        rules: Rules,
        data_dir: Path,
        profile_cache_url: str,
        period_s: float,
        now: Callable[[], float] = time.time,
        spans: MorphSpans | None = None,
        secrets: Secrets | None = None,
    ) -> None:
        self._database = database
        self._spans = spans or MorphSpans()
        self._secrets = secrets or Secrets({})
        self._loader = loader
        self._registry = registry
        self._sessions = sessions
        self._planning = planning
        self._shares = ShareOut(rates, rules, now)
        self._stacks = stacks
        self._actions = JobActions(registry, events, stacks, now)
        self._events = events
        self._rules = rules
        self._data_dir = data_dir
        self._profile_cache_url = profile_cache_url
        self._period_s = period_s
        self._now = now
        self._log = structlog.get_logger("varuna.controller").bind(controller=self.name)
        self._defects = Defects()
        self._flaws: dict[str, str] = {}
        """By job: why agents cannot be told of it."""
        self._told_stops: dict[str, float] = {}
        self._preparations = Preparations(rules, now, self._note_flaw)

    async def reconcile(self) -> float:
        snapshot = await self._loader.load()
        job_ids = {job.row.id for job in snapshot.jobs}
        self._stacks.keep_only(job_ids)
        self._preparations.keep_only(job_ids)
        self._told_stops = {
            job.row.id: self._told_stops[job.row.id] for job in snapshot.jobs if job.row.id in self._told_stops
        }
        self._flaws = {job.row.id: self._flaws[job.row.id] for job in snapshot.jobs if job.row.id in self._flaws}
        shares = await self._shares.of(snapshot)
        pool = DevicePool(snapshot, shares.places)
        changed = False
        for job in sorted(snapshot.jobs, key=lambda job: -job.spec.priority):
            try:
                view = await self._complete_view(job, snapshot, pool, shares)
                decision = decide_job(self._now(), view, snapshot.vms, self._rules)
                changed |= await self._apply(job, decision)
                pool.take(decision.claims)
            except StaleDataError:
                changed = True  # decided on what is no longer so: look again
            except (NotLeaderError, StoreAwayError):
                raise  # this is no job's matter
            except Exception as error:
                # A defect that one job brings to light must not keep the others waiting, or their agents untold.
                self._defects.log(job.row.id, "no decision about a job", error)
        if changed:
            return 0.0
        await self._tell_agents(snapshot, shares.places)
        return self._period_s

    async def _complete_view(self, job: LoadedJob, snapshot: Snapshot, pool: DevicePool, shares: Shares) -> JobView:
        """The view with the devices that the jobs before it left, and the planner's proposal for them."""
        view = shares.give(job.view)
        view = replace(view, flaw=view.flaw or self._flaws.get(view.id, ""))
        if view.flaw:
            return view
        makes_workdir = job.spec.needs_preparing
        resources = job.spec.resources
        devices, quarantined = pool.for_job(view.id, most_gpus(view), only_prepared=makes_workdir, resources=resources)
        if makes_workdir:
            setups = self._preparations.setups_of(job, snapshot, pool)
            view = replace(view, setups=setups, prepared_s=self._preparations.ready_s(view.id, devices))
        stacks = None if job.generation is None else self._stacks.of(view.id, job.generation.number)
        unfit = pool.unfit(resources)
        view = replace(view, devices=devices, quarantined=quarantined, unfit=unfit, stacks=stacks)
        if stacks is not None:
            view = with_steps(view, self._registry)
        self._secrets.prepare(job.spec.secrets)  # also of a job that runs: its next launch may be soon
        if job.spec.secrets and (view.generation is None or not view.generation.live):
            view = replace(view, missing_secret=self._secrets.why_not(job.spec.secrets))
        devices = next_devices(view, snapshot.vms, self._rules)
        if not wants_plan(view, devices, snapshot.vms):
            return view
        vms = [snapshot.vms[vm_id] for vm_id in {device.vm_id for device in devices}]
        memories = [vm.device_memory_bytes for vm in vms if vm.device_memory_bytes]
        previous, previous_p = previous_placement(job)
        question = Question(
            profile_json=job.row.profile_json or "",
            spec=job.spec,
            devices=devices,
            device_memory_bytes=min(memories, default=None),
            gpus_per_vm=min(vm.gpus for vm in vms),
            trained_micro_batch=trained_micro_batch(job),
            previous=previous,
            previous_p=previous_p,
            present=job.view.generation.plan if job.view.generation and job.view.generation.live else None,
        )
        return replace(view, proposal=await self._planning.propose(question))

    # ------------------------------------------------------------ apply

    async def _apply(self, job: LoadedJob, decision: Decision) -> bool:
        """Write what was decided; whether anything but the reason changed. A stale decision is dropped."""
        if not decision.actions and decision.reason == job.row.reason:
            return False
        if any(isinstance(action, StartGeneration) and not self._has_port(action) for action in decision.actions):
            return True  # another job of this look took it: look again
        for action in decision.actions:
            failpoint(f"manager.{type(action).__name__}.decided")
        async with self._database.write() as session:
            row = await session.get_one(JobRow, job.row.id)
            if row.version != job.version:
                return True  # decided on what is no longer so: look again
            if row.reason != decision.reason:
                row.reason = decision.reason
                if not decision.actions and decision.notable:
                    self._events.add(session, "decision", decision.reason, job_id=row.id, generation=_number(job))
            for action in decision.actions:
                await self._actions.apply(session, row, action)
                if isinstance(action, StartGeneration) and action.kind is GenerationKind.TRAINING:
                    self._note_hazard(session, job, action)
                if isinstance(action, StartGeneration) and job.spec.limits.max_cost is not None:
                    await self._note_unpriced(session, job, action)
        for action in decision.actions:
            failpoint(f"manager.{type(action).__name__}.committed")
            self._follow_up(job, action)
        return bool(decision.actions)

    async def _note_unpriced(self, session: AsyncSession, job: LoadedJob, action: StartGeneration) -> None:
        """An event with the VMs that the job's limit of cost does not count."""
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
            self._events.add(session, "cost_unknown", text, job_id=job.row.id, generation=action.number, data=data)

    def _has_port(self, action: StartGeneration) -> bool:
        return self._registry.rendezvous_port(action.placement[0].vm_id) is not None

    def _note_hazard(self, session: AsyncSession, job: LoadedJob, action: StartGeneration) -> None:
        """An event with what decides how often the generation saves, when it is much another than for the last one."""
        fleet, pinned_s = job.view.fleet, job.spec.checkpoint.interval_s
        expected = fleet.stops_per_hour(len({device.vm_id for device in action.placement}))
        told = self._told_stops.get(job.row.id)
        if pinned_s is not None or (told is not None and told / _NEWS < expected < told * _NEWS):
            return
        self._told_stops[job.row.id] = expected
        text = (
            f"lost VMs are expected to stop generation {action.number} {expected:.3g} times an hour (seen: "
            f"{fleet.removals:.3g} lost in {fleet.vm_hours:.3g} VM-hours): its workers save as often as that is worth"
        )
        data = {"stops_per_hour": expected, "removals": fleet.removals, "vm_hours": fleet.vm_hours}
        self._events.add(session, "hazard", text, job_id=job.row.id, generation=action.number, data=data)

    def _follow_up(self, job: LoadedJob, action: Action) -> None:
        """What is no matter of the store, once the decision is in it."""
        if isinstance(action, StartGeneration):
            first = action.placement[0].vm_id
            port = self._registry.rendezvous_port(first)
            if port is not None:
                self._registry.use_rendezvous_port(first, port)
        elif isinstance(action, AskStacks):
            running = {worker.rank: worker.vm_id for worker in job.workers if worker.is_alive}
            self._stacks.ask(job.row.id, action.number, running)

    # ------------------------------------------------------------ tell

    async def _tell_agents(self, snapshot: Snapshot, places: Places) -> None:
        """Send each agent what it should have been told and was not, on its present stream."""
        jobs = {job.row.id: job for job in snapshot.jobs}
        leaving = {vm.id: vm.leave_by for vm in snapshot.vms.values() if vm.leave_by is not None}
        growing = max(filter(may_grow, snapshot.jobs), key=lambda job: job.spec.priority, default=None)
        for number, session in enumerate(self._sessions.all()):
            if number % _SESSIONS_AT_ONCE == 0:
                await asyncio.sleep(0)  # heartbeats are answered by the same thread
            vm = snapshot.vms.get(session.vm_id)
            if vm is None:
                continue
            parts, running = snapshot.presence.get(session.vm_id, ()), self._registry.running(session.vm_id)
            draining = vm.state is VmState.DRAINING
            is_idle = not (parts or running or draining)
            planned = places.to_prepare.get(vm.id, ())
            if is_idle or planned or vm.prepared or vm.setting_up:
                runs = [*[part.job_id for part in parts], *[job_id for job_id, _ in running]]
                self._preparations.tell(
                    session, vm, jobs, planned=planned, running=runs, growing=growing, is_idle=is_idle
                )
            if is_idle:
                continue
            if session.compared == (parts, running, draining):
                continue  # and was told
            wanted = wanted_commands(parts, running, session.seen, draining=draining)
            for key in wanted:
                if key not in session.told and self._tell_safely(session, key, jobs, snapshot, leaving):
                    session.told.add(key)
                    failpoint(f"manager.{type(key).__name__}.told")
            if session.told.issuperset(wanted):
                session.compared = (parts, running, draining)

    def _tell_safely(
        self,
        session: AgentSession,
        key: CommandKey,
        jobs: Mapping[str, LoadedJob],
        snapshot: Snapshot,
        leaving: Mapping[str, float],
    ) -> bool:
        """Whether the agent was told: a job of which it cannot be is to fail, and the other jobs are to go on."""
        job_id = "" if isinstance(key, DrainKey) else key.job_id
        try:
            return self._tell(session, key, jobs, snapshot, leaving)
        except messages.UNSENDABLE as error:
            if isinstance(key, LaunchKey):
                self._note_flaw(job_id, error)
            else:
                self._defects.log(job_id, "an agent cannot be told", error)
            return False
        except Exception as error:
            self._defects.log(job_id, "an agent cannot be told", error)
            return False

    def _note_flaw(self, job_id: str, error: Exception) -> None:
        self._flaws[job_id] = f"its agents cannot be told of it: {' '.join(str(error).split())}"

    def _tell(
        self,
        session: AgentSession,
        key: CommandKey,
        jobs: Mapping[str, LoadedJob],
        snapshot: Snapshot,
        leaving: Mapping[str, float],
    ) -> bool:
        """`leaving`: by VM, when it will have left. False: the agent cannot be told now, so it is tried again."""
        if isinstance(key, LaunchKey):
            if jobs[key.job_id].view.flaw:
                return True  # it is about to end
            try:
                secrets = self._secrets.read(jobs[key.job_id].spec.secrets)
            except SecretError as error:
                self._defects.log(key.job_id, "an agent cannot be told", error)
                return False
            stored = jobs[key.job_id].row.checkpoint_url  # null in rows of an earlier version
            url = stored or f"file://{self._data_dir}/checkpoints/{key.job_id}"
            message = messages.launch_message(
                jobs[key.job_id],
                session.vm_id,
                secrets=secrets,
                default_checkpoint_url=url,
                profile_cache_url=self._profile_cache_url,
                spans=self._spans,
            )
            session.send(message)
        elif isinstance(key, StopKey):
            deadlines = [at for vm_id, at in leaving.items() if _takes_part(key, snapshot.presence.get(vm_id, ()))]
            job = jobs.get(key.job_id)
            minibatch_s = _minibatch_s(job, key.generation)
            goes_on = job is not None and job.row.job_state is not JobState.CANCELLING
            message = messages.stop_message(
                key,
                self._rules,
                now=self._now(),
                minibatch_s=minibatch_s,
                deadlines=deadlines,
                traceparent=self._spans.context(key.job_id, key.generation + 1) if goes_on else "",
            )
            session.send(message)
        else:
            session.send(messages.drain_message(snapshot.vms[session.vm_id].reason))
        return True


def _takes_part(key: StopKey, parts: Sequence[Presence]) -> bool:
    return any((part.job_id, part.generation) == (key.job_id, key.generation) for part in parts)


def _minibatch_s(job: LoadedJob | None, generation: int) -> float:
    """As predicted; 0 for a generation that is not the job's newest any more."""
    if job is None or job.generation is None or job.generation.number != generation:
        return 0.0
    return Plan.from_document(job.generation.plan).predicted_minibatch_s


def _number(job: LoadedJob) -> int | None:
    return None if job.generation is None else job.generation.number
