"""Loads what the job controller decides on: rows and live state, as the domain's frozen views."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from varuna_manager.controllers.job_past import FleetWatch, JobPasts, fleet_history
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
from varuna_manager.domain.fleet_past import FleetPast
from varuna_manager.domain.morphs import Morphs
from varuna_manager.domain.observed import Device, GenerationView, JobView, Plan, Rules, StopView, VmView, WorkerView
from varuna_manager.domain.setbacks import Setbacks
from varuna_manager.domain.spec import JobSpec
from varuna_manager.domain.states import EndCause, GenerationKind, VmState
from varuna_manager.services.vm_registry import VmRegistry
from varuna_manager.services.vm_views import VmViews


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

    @property
    def gpus(self) -> int:
        """Devices that can be shared out: of usable VMs, and those that workers have, whatever becomes of their VM."""
        usable = sum(vm.gpus for vm in self.usable if not vm.quarantined)
        elsewhere = (self.vms.get(device.vm_id) for device in self.occupied)
        return usable + sum(vm is not None and (not vm.usable or vm.quarantined) for vm in elsewhere)


class DevicePool:
    """The devices that are free, as job after job takes some: built once for a look at all jobs."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._free: dict[Device, None] = {}
        self._kept_out: dict[Device, None] = {}
        self._own: dict[str, list[Device]] = {}
        self._quarantined = {vm.id for vm in snapshot.usable if vm.quarantined}
        self._vms = snapshot.vms
        for vm in sorted(snapshot.usable, key=lambda vm: vm.id):
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
        self, job_id: str, most: int | None, *, only_prepared: bool = False
    ) -> tuple[tuple[Device, ...], tuple[Device, ...]]:
        """(the devices that the job may be launched on, those that it might be, were they not quarantined).

        Of usable VMs, not another job's or taken by one before; no more than `most` of the first, its own first.
        `only_prepared`: of the free ones those of VMs where its workdir is ready.
        """
        own = self._own.get(job_id, [])
        may = [device for device in own if device.vm_id not in self._quarantined]
        spare = None if most is None else max(most - len(may), 0)
        free = (device for device in self._free if not only_prepared or job_id in self._vms[device.vm_id].prepared)
        may += itertools.islice(free, spare)
        kept_out = [device for device in own if device.vm_id in self._quarantined]
        return tuple(sorted(may)), (*kept_out, *self._kept_out)

    def unprepared(self, job_id: str) -> int:
        """How many free devices are of VMs where the job's workdir is not ready."""
        return sum(job_id not in self._vms[device.vm_id].prepared for device in self._free)

    def take(self, devices: Iterable[Device]) -> None:
        """Those that come after must leave these alone."""
        for device in devices:
            self._free.pop(device, None)
            self._kept_out.pop(device, None)


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
        self._pasts = JobPasts()
        self._watch = FleetWatch(self._started_at)
        self._has_looked_back = False
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
            self._pasts.keep_only({job.row.id for job in rows.jobs})
            pasts = {
                job.row.id: await self._pasts.of(session, job.row, rows.ended.get(job.row.id)) for job in rows.jobs
            }
        busy, occupied = self._merged(rows)
        vms, now = await self._vms.look(rows.vms, busy), self._now()
        fleet, returning = self._watch.look(vms, now, self._registry.market_hazard), self._returning(vms)
        self._keep_parts(rows)
        jobs = []
        for job in rows.jobs:
            jobs.append(self._job(job, rows, vms, *pasts[job.row.id], fleet, returning))
            await asyncio.sleep(0)  # heartbeats are answered by the same thread
        return Snapshot(jobs=tuple(jobs), vms=vms, occupied=occupied, presence=_presence(self._parts.values()))

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
        )
        return LoadedJob(row=row, version=row.version, spec=spec, generation=newest, workers=workers, view=view)

    def _generation_view(
        self, row: GenerationRow, progress: Progress, part: _Part, vms: Mapping[str, VmView]
    ) -> GenerationView:
        workers, progress_at = self._worker_views(part, vms), self._progress_at(row, progress)
        if part.view is None or part.row is not row or part.view.workers is not workers:
            part.row, part.view = row, _generation_view(row, workers, progress_at)
        part.view = part.view.at(progress_at, progress.last_step)
        return part.view

    def _progress_at(self, row: GenerationRow, progress: Progress) -> float:
        # A manager that was away has missed the steps of that time: the clock starts with it.
        progress_at = max(progress.last_step_at or row.created_at, self._started_at)
        evaluated_s = self._registry.evaluated_s(row.job_id, row.number)
        return progress_at if evaluated_s is None else max(progress_at, self._now() - evaluated_s)

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
    steps = registry.steps(view.id, generation.number, generation.vm_ids)
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
