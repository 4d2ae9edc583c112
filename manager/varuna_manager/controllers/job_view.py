"""Loads what the job controller decides on: rows and live state, as the domain's frozen views."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from sqlalchemy.ext.asyncio import AsyncSession

from varuna_manager.controllers.defects import Defects
from varuna_manager.controllers.job_costs import JobCosts
from varuna_manager.controllers.job_past import FleetWatch, JobPasts, fleet_history
from varuna_manager.controllers.progress_clock import ProgressClock
from varuna_manager.controllers.store_rows import (
    GenerationFacts,
    GenerationKey,
    Progress,
    StoredJob,
    StoreReader,
    StoreRows,
    WorkerFacts,
    Workers,
)
from varuna_manager.db.engine import Database
from varuna_manager.db.models import GenerationRow, JobRow
from varuna_manager.domain.commands import Presence
from varuna_manager.domain.fitting import asked_text, fits, is_choosy
from varuna_manager.domain.fleet_past import FleetPast
from varuna_manager.domain.limits import LimitsView
from varuna_manager.domain.morphs import Morphs
from varuna_manager.domain.observed import Device, GenerationView, JobView, Plan, Rules, StopView, VmView, WorkerView
from varuna_manager.domain.preparing import Places, Readiness
from varuna_manager.domain.setbacks import Setbacks
from varuna_manager.domain.setups import SetupFailure
from varuna_manager.domain.spec import JobSpec, Resources
from varuna_manager.domain.states import EndCause, GenerationKind, VmState
from varuna_manager.services.vm_registry import VmRegistry
from varuna_manager.services.vm_views import VmViews

_ANY = Resources()


@dataclass(frozen=True, kw_only=True)
class LoadedJob:
    """A job with its newest generation: the rows (detached, to read only) and the view for the decision."""

    row: JobRow
    version: int
    spec: JobSpec
    generation: GenerationRow | None
    workers: tuple[WorkerFacts, ...]
    """Of that generation, by rank."""
    view: JobView
    """Without devices and proposal: these depend on the older jobs' decisions."""
    setup_failures: Mapping[str, SetupFailure] = field(default_factory=dict)
    """By VM."""

    @property
    def failed_on(self) -> frozenset[str]:
        """VMs on which its workdir could not be made ready, ever."""
        return frozenset(self.setup_failures)


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    jobs: tuple[LoadedJob, ...]
    """All that are not over, oldest first."""
    vms: Mapping[str, VmView]
    """All that are not gone."""
    occupied: Mapping[Device, str]
    """Devices with a worker that has not stopped, and the id of its job."""
    presence: Mapping[str, tuple[Presence, ...]]
    """By VM: every generation with a worker there that has not stopped."""

    @cached_property
    def usable(self) -> tuple[VmView, ...]:
        """Those of the VMs that are; in quarantine or not."""
        return tuple(vm for vm in self.vms.values() if vm.usable)

    @cached_property
    def readiness(self) -> Readiness:
        """Where workdirs are ready, on all of the VMs."""
        return Readiness(self.vms.values())

    @cached_property
    def expected(self) -> frozenset[str]:
        """Those of the VMs that are here or on their way, and not about to leave."""
        states = (VmState.REQUESTED, VmState.READY, VmState.SUSPECT)
        return frozenset(vm.id for vm in self.vms.values() if vm.state in states)

    @property
    def gpus(self) -> int:
        """Devices that can be shared out: of usable VMs, and those that workers have, whatever becomes of their VM."""
        return self.gpus_for(_ANY)

    def gpus_for(self, wanted: Resources) -> int:
        """Those of them that are as a job asks."""
        usable = sum(vm.gpus for vm in self.fitting(wanted) if not vm.quarantined)
        elsewhere = (self.vms.get(device.vm_id) for device in self.occupied)
        return usable + sum(
            vm is not None and (not vm.usable or vm.quarantined) and is_fitting(vm, wanted) for vm in elsewhere
        )

    def fitting(self, wanted: Resources) -> tuple[VmView, ...]:
        """Usable VMs whose GPUs are as a job asks."""
        return self.usable if not is_choosy(wanted) else tuple(vm for vm in self.usable if is_fitting(vm, wanted))


class DevicePool:
    """The devices that are free, as job after job takes some: built once for a look at all jobs."""

    def __init__(self, snapshot: Snapshot, places: Places | None = None) -> None:
        """`places`: where jobs are going to run."""
        self._places = places or Places()
        self._free: dict[Device, None] = {}
        self._kept_out: dict[Device, None] = {}
        self._own: dict[str, list[Device]] = {}
        self._quarantined = {vm.id for vm in snapshot.usable if vm.quarantined}
        self._vms = snapshot.vms
        choosy = [job.spec.resources for job in snapshot.jobs if is_choosy(job.spec.resources)]
        # GPUs that fewer jobs ask for go first: who takes any leaves the others to those who do not.
        for vm in sorted(snapshot.usable, key=lambda vm: (sum(is_fitting(vm, wanted) for wanted in choosy), vm.id)):
            for index in range(vm.gpus):
                device = Device(vm.id, index)
                job_id = snapshot.occupied.get(device)
                if job_id is not None:
                    self._own.setdefault(job_id, []).append(device)
                elif vm.quarantined:
                    self._kept_out[device] = None
                else:
                    self._free[device] = None

    def for_job(
        self, job_id: str, most: int | None, *, only_prepared: bool = False, resources: Resources = _ANY
    ) -> tuple[tuple[Device, ...], tuple[Device, ...]]:
        """(the devices that the job may be launched on, those that it might be, were they not quarantined).

        Of usable VMs, not another job's or taken by one before; no more than `most` of the first: its own first, then
        those of its places, last those where others are prepared. `only_prepared`: of the free ones those of VMs where
        its workdir is ready. `resources`: what it asks of GPUs.
        """
        own = self._own.get(job_id, [])
        may = [device for device in own if device.vm_id not in self._quarantined]
        spare = None if most is None else max(most - len(may), 0)
        free = self._nearest(job_id) if self._places.by_job else iter(self._free)
        if only_prepared:
            free = (device for device in free if job_id in self._vms[device.vm_id].prepared)
        if is_choosy(resources):
            free = (device for device in free if is_fitting(self._vms[device.vm_id], resources))
        may += itertools.islice(free, spare)
        kept_out = [device for device in own if device.vm_id in self._quarantined]
        kept_out += [device for device in self._kept_out if is_fitting(self._vms[device.vm_id], resources)]
        return tuple(sorted(may)), tuple(kept_out)

    def _nearest(self, job_id: str) -> Iterator[Device]:
        """The free devices, those of its places first, last those where others are prepared."""
        place = self._places.by_job.get(job_id, {})
        for vm_id in place:
            yield from self._free_of(vm_id)
        yield from (device for device in self._free if device.vm_id not in place and not self._is_awaited(device.vm_id))
        yield from (device for device in self._free if device.vm_id not in place and self._is_awaited(device.vm_id))

    def _is_awaited(self, vm_id: str) -> bool:
        return any(job_id in self._vms[vm_id].prepared for job_id in self._places.to_prepare.get(vm_id, ()))

    def _free_of(self, vm_id: str) -> list[Device]:
        devices = (Device(vm_id, index) for index in range(self._vms[vm_id].gpus))
        return [device for device in devices if device in self._free]

    def unprepared(self, job_id: str, failed_on: Collection[str] = ()) -> int:
        """How many free devices are of VMs that are still to make the job's workdir ready.

        `failed_on`: VMs where that failed: they do not count before they try again.
        """
        count = 0
        for vm_id, gpus in self._places.by_job.get(job_id, {}).items():
            vm = self._vms[vm_id]
            if job_id in vm.setting_up or not (job_id in vm.prepared or vm_id in failed_on):
                count += min(len(self._free_of(vm_id)), gpus)
        return count

    def unfit(self, resources: Resources) -> int:
        """How many free devices are not as the job asks."""
        if not is_choosy(resources):
            return 0
        return sum(not is_fitting(self._vms[device.vm_id], resources) for device in self._free)

    def take(self, devices: Iterable[Device]) -> None:
        """Those that come after must leave these alone."""
        for device in devices:
            self._free.pop(device, None)
            self._kept_out.pop(device, None)


def is_fitting(vm: VmView, wanted: Resources) -> bool:
    """Whether the VM's GPUs are as a job asks."""
    return fits(wanted, gpu_type=vm.gpu_type, device_memory_bytes=vm.device_memory_bytes)


class SnapshotLoader:
    def __init__(
        self, database: Database, registry: VmRegistry, rules: Rules, now: Callable[[], float] = time.time
    ) -> None:
        self._database = database
        self._registry = registry
        self._rules = rules
        self._now = now
        self._started_at = now()
        self._store = StoreReader()
        self._vms = VmViews(registry, now)
        self._clock = ProgressClock(registry.monotonic_s)
        self._pasts = JobPasts()
        self._costs = JobCosts()
        self._watch = FleetWatch(self._started_at)
        self._has_looked_back = False
        self._defects = Defects()
        self._parts: dict[GenerationKey, _Part] = {}
        self._of_workers: list[Workers] = []
        self._busy: Mapping[str, int] = {}
        self._occupied: Mapping[Device, str] = {}
        """Made of these workers, as is what is busy."""

    async def load(self) -> Snapshot:
        """What is so now, from one read of the store and the registry."""
        async with self._database.read() as session:
            rows = await self._store.read(session)
            if not self._has_looked_back:
                self._watch.recall(await fleet_history(session, self._now()))
                self._has_looked_back = True
            job_ids = {job.row.id for job in rows.jobs}
            self._pasts.keep_only(job_ids)
            self._clock.keep_only(job_ids)
            self._costs.keep_only(job_ids)
            pasts = {
                job.row.id: await self._pasts.of(session, job.row, rows.ended.get(job.row.id)) for job in rows.jobs
            }
            limits = {job.row.id: await self._limits(session, job, rows) for job in rows.jobs}
        busy, occupied = self._merged(rows)
        vms, now = await self._vms.look(rows.vms, busy), self._now()
        fleet, returning = self._watch.look(vms, now, self._registry.market_hazard), self._returning(vms)
        self._keep_parts(rows)
        jobs = []
        for job in rows.jobs:
            try:
                loaded = self._job(job, rows, vms, *pasts[job.row.id], fleet, returning)
                jobs.append(replace(loaded, view=replace(loaded.view, limits=limits[job.row.id])))
            except Exception as error:  # one job's rows must not keep the others waiting
                self._defects.log(job.row.id, "a job cannot be loaded", error)
            await asyncio.sleep(0)  # heartbeats are answered by the same thread
        return Snapshot(jobs=tuple(jobs), vms=vms, occupied=occupied, presence=_presence(self._parts.values()))

    async def _limits(self, session: AsyncSession, job: StoredJob, rows: StoreRows) -> LimitsView:
        row, limits, cost = job.row, job.spec.limits, 0.0
        if limits.max_cost is not None:
            newest = rows.newest.get(row.id)
            generations = (rows.ended.get(row.id), None if newest is None else newest.number)
            cost = await self._costs.read_cost(session, row, generations, self._now())
        return LimitsView(
            max_duration_s=limits.max_duration_s,
            max_cost=limits.max_cost,
            queue_timeout_s=limits.queue_timeout_s,
            waits_since=row.created_at if row.retried_at is None else row.retried_at,
            run_since=row.run_since,
            cost=cost,
        )

    def _merged(self, rows: StoreRows) -> tuple[Mapping[str, int], Mapping[Device, str]]:
        """(by VM how many workers have not stopped there, the jobs of their devices)."""
        generations = list(rows.workers.values())
        if generations != self._of_workers:
            busy: Counter[str] = Counter()
            occupied: dict[Device, str] = {}
            for workers in generations:
                busy.update({vm_id: len(states) for vm_id, states in workers.alive_on.items()})
                occupied.update(workers.occupied)
            self._of_workers, self._busy, self._occupied = generations, busy, occupied
        return self._busy, self._occupied

    def _keep_parts(self, rows: StoreRows) -> None:
        before, self._parts = self._parts, {}
        for key, workers in rows.workers.items():
            part, facts = before.get(key), rows.generations[key]
            if part is None or part.workers is not workers or part.facts != facts:
                part = _Part(workers, facts, *key)
            self._parts[key] = part

    def _returning(self, vms: Mapping[str, VmView]) -> int:
        """Planning without them would give a small generation, and a morph as soon as they are back."""
        if self._now() - self._started_at >= self._rules.start_settle_s:
            return 0
        return sum(vm.state is VmState.READY and not vm.heard_since_start for vm in vms.values())

    def _job(
        self,
        job: StoredJob,
        rows: StoreRows,
        vms: Mapping[str, VmView],
        setbacks: Setbacks,
        morphs: Morphs,
        fleet: FleetPast,
        returning: int,
    ) -> LoadedJob:
        row, spec = job.row, job.spec
        newest, generation, workers = rows.newest.get(row.id), None, tuple[WorkerFacts, ...]()
        if newest is not None:
            part = self._parts[row.id, newest.number]
            generation, workers = self._generation_view(newest, rows.progress[row.id], part, vms), part.workers.all
        view = JobView(
            id=row.id,
            name=row.name,
            state=row.job_state,
            created_at=row.created_at,
            global_batch=spec.global_batch,
            min_gpus=spec.resources.min_gpus,
            max_gpus=spec.resources.max_gpus,
            max_restarts_on_errors=spec.max_restarts_on_errors,
            cancel_saves=row.cancel_saves,
            profiled_at=row.profiled_at,
            profile_only=spec.profile_only,
            profile_error=row.profile_error or "",
            setup_error=row.setup_error or "",
            setup_exit_code=row.setup_exit_code,
            generation=generation,
            setbacks=setbacks,
            morphs=morphs,
            coming_vms=len(fleet.coming_ages_s),
            returning_vms=returning,
            fleet=fleet,
            asks=asked_text(spec.resources),
            flaw=job.flaw,
        )
        failures = {
            vm_id: SetupFailure(times=said["times"], exit_code=said["exit_code"])
            for vm_id, said in (row.setup_failures or {}).items()
        }
        return LoadedJob(
            row=row,
            version=row.version,
            spec=spec,
            generation=newest,
            workers=workers,
            view=view,
            setup_failures=failures,
        )

    def _generation_view(
        self, row: GenerationRow, progress: Progress, part: _Part, vms: Mapping[str, VmView]
    ) -> GenerationView:
        workers, progress_at = self._worker_views(part, vms), self._progress_at(row, progress, part, vms)
        if part.view is None or part.row is not row or part.view.workers is not workers:
            part.row, part.view = row, _generation_view(row, workers, progress_at)
        part.view = part.view.at(progress_at, progress.last_step)
        return part.view

    def _progress_at(self, row: GenerationRow, progress: Progress, part: _Part, vms: Mapping[str, VmView]) -> float:
        now, mark = self._now(), (row.number, progress.last_step)
        progress_at = self._clock.progress_at(row.job_id, mark, progress.last_step_at or row.created_at, now)
        if now - progress_at > self._rules.suspect_after_s and self._is_silent(part, vms):
            progress_at = self._clock.begin_again(row.job_id, now)  # silence is judged by itself
        evaluated_s = self._registry.evaluated_s(row.job_id, row.number, part.vm_ids)
        return progress_at if evaluated_s is None else max(progress_at, now - evaluated_s)

    def _is_silent(self, part: _Part, vms: Mapping[str, VmView]) -> bool:
        """Whether a VM is silent and not given up for that yet."""
        known = [vms[vm_id] for vm_id in part.vm_ids if vm_id in vms]
        return any(vm.state is not VmState.LOST and vm.silent_s >= self._rules.suspect_after_s for vm in known)

    def _worker_views(self, part: _Part, vms: Mapping[str, VmView]) -> tuple[WorkerView, ...]:
        """The same object as at the last look, where nothing has changed: to make ten thousand takes long."""
        lost = {vm_id: vms[vm_id] for vm_id in part.vm_ids if vm_id in vms and vms[vm_id].state is VmState.LOST}
        lapsed = {vm_id for vm_id, vm in lost.items() if vm.silent_s >= self._rules.lease_s}
        if lapsed != part.lapsed:
            part.lapsed = lapsed
            part.views = _worker_views(part.workers, lapsed)
        return part.views


def _generation_view(row: GenerationRow, workers: tuple[WorkerView, ...], progress_at: float) -> GenerationView:
    stop = None
    if row.stop_requested_at is not None:
        mode, cause = row.mode_of_stop, row.stop_cause
        assert mode is not None
        assert cause is not None
        stop = StopView(
            mode=mode, cause=EndCause(cause), reason=row.stop_reason or "", requested_at=row.stop_requested_at
        )
    return GenerationView(
        number=row.number,
        kind=row.generation_kind,
        state=row.generation_state,
        workers=workers,
        progress_at=progress_at,
        plan=Plan.from_document(row.plan),
        stop=stop,
        end_reason=row.end_reason or "",
    )


def _worker_views(workers: Workers, lapsed: Collection[str]) -> tuple[WorkerView, ...]:
    """`lapsed`: VMs whose agents have ended their workers, for they have not heard of us for a whole lease."""
    return tuple(
        WorkerView(
            rank=row.rank,
            device=Device(row.vm_id, row.local_rank),
            state=row.worker_state,
            cause=row.exit_cause,
            error=row.error_text or "",
            exit_code=row.exit_code,
            unreached=row.unreached,
            stopped_at=row.stopped_at,
            lease_over=row.vm_id in lapsed,
        )
        for row in workers.all
    )


def with_steps(view: JobView, registry: VmRegistry) -> JobView:
    """With the step that each worker of the newest generation has completed: only a hang's suspect needs them."""
    generation = view.generation
    if generation is None:
        return view
    places = {worker.rank: worker.device.vm_id for worker in generation.workers}
    steps = registry.steps(view.id, generation.number, places)
    workers = tuple(replace(worker, step=steps.get(worker.rank)) for worker in generation.workers)
    return replace(view, generation=replace(generation, workers=workers))


class _Part:
    """What was made of a generation's workers, for as long as these and its state are what they were."""

    def __init__(self, workers: Workers, facts: GenerationFacts, job_id: str, number: int) -> None:
        self.workers, self.facts, self.key = workers, facts, (job_id, number)
        self.vm_ids = {worker.vm_id for worker in workers.all}
        self.presence = {
            vm_id: (
                Presence(
                    job_id=job_id, generation=number, state=facts.state, stop_mode=facts.stop_mode, worker_states=states
                ),
            )
            for vm_id, states in workers.alive_on.items()
        }
        self.lapsed: set[str] = set()
        self.views = _worker_views(workers, self.lapsed)
        self.row: GenerationRow | None = None
        self.view: GenerationView | None = None
        """Of the last look, made from this row."""


def _presence(parts: Iterable[_Part]) -> dict[str, tuple[Presence, ...]]:
    found: dict[str, tuple[Presence, ...]] = {}
    for part in parts:
        twice = {vm_id: (*found[vm_id], *part.presence[vm_id]) for vm_id in found.keys() & part.presence.keys()}
        found.update(part.presence)
        found.update(twice)
    return found


def previous_placement(job: LoadedJob) -> tuple[tuple[Device, ...], int | None]:
    """Where the ranks of the newest generation are or were, and its P; ((), None) when it did not train."""
    if job.generation is None or job.generation.kind != GenerationKind.TRAINING:
        return (), None
    devices = tuple(Device(worker.vm_id, worker.local_rank) for worker in job.workers)
    return devices, Plan.from_document(job.generation.plan).p


def trained_micro_batch(job: LoadedJob) -> int | None:
    """The size of the micro-batches in the newest generation; None when that did not train."""
    if job.generation is None or job.generation.kind != GenerationKind.TRAINING:
        return None
    return Plan.from_document(job.generation.plan).micro_batch
