"""Loads what the job controller decides on: rows and live state, as the domain's frozen views."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from varuna_manager.controllers.job_past import FleetWatch, JobPasts
from varuna_manager.controllers.store_rows import StoreRows, WorkerFacts, read_rows
from varuna_manager.db.engine import Database
from varuna_manager.db.models import GenerationRow, JobRow
from varuna_manager.domain.commands import Presence
from varuna_manager.domain.fleet_past import FleetPast
from varuna_manager.domain.morphs import Morphs
from varuna_manager.domain.observed import Device, GenerationView, JobView, Plan, Rules, StopView, VmView, WorkerView
from varuna_manager.domain.setbacks import Setbacks
from varuna_manager.domain.spec import JobSpec
from varuna_manager.domain.states import EndCause, GenerationKind, VmState, WorkerState
from varuna_manager.services.vm_registry import VmRegistry


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

    @property
    def gpus(self) -> int:
        """Devices that can be shared out: of usable VMs, and those that workers have, whatever becomes of their VM."""
        usable = sum(vm.gpus for vm in self.vms.values() if vm.usable and not vm.quarantined)
        elsewhere = (self.vms.get(device.vm_id) for device in self.occupied)
        return usable + sum(vm is not None and (not vm.usable or vm.quarantined) for vm in elsewhere)


class DevicePool:
    """The devices that are free, as job after job takes some: built once for a look at all jobs."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._free: dict[Device, None] = {}
        self._kept_out: dict[Device, None] = {}
        self._own: dict[str, list[Device]] = {}
        self._quarantined = {vm.id for vm in snapshot.vms.values() if vm.quarantined}
        for vm_id in sorted(vm.id for vm in snapshot.vms.values() if vm.usable):
            for device in (Device(vm_id, index) for index in range(snapshot.vms[vm_id].gpus)):
                job_id = snapshot.occupied.get(device)
                if job_id is not None:
                    self._own.setdefault(job_id, []).append(device)
                elif vm_id in self._quarantined:
                    self._kept_out[device] = None
                else:
                    self._free[device] = None

    def for_job(self, job_id: str, most: int | None) -> tuple[tuple[Device, ...], tuple[Device, ...]]:
        """(the devices that the job may be launched on, those that it might be, were they not quarantined).

        Of usable VMs, not another job's or taken by one before; no more than `most` of the first, its own first.
        """
        own = self._own.get(job_id, [])
        may = [device for device in own if device.vm_id not in self._quarantined]
        spare = None if most is None else max(most - len(may), 0)
        may += itertools.islice(self._free, spare)
        kept_out = [device for device in own if device.vm_id in self._quarantined]
        return tuple(sorted(may)), (*kept_out, *self._kept_out)

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
        self._pasts = JobPasts()
        self._watch = FleetWatch(self._started_at)

    async def load(self) -> Snapshot:
        """What is so now, from one read of the store and the registry."""
        async with self._database.read() as session:
            rows = await read_rows(session)
            self._pasts.keep_only({row.id for row in rows.jobs})
            pasts = {row.id: await self._pasts.of(session, row, rows.ended.get(row.id)) for row in rows.jobs}
        busy = Counter(worker.vm_id for worker in rows.alive)
        now = self._now()
        vms = {row.id: self._registry.view(row, now=now, workers=busy[row.id]) for row in rows.vms}
        fleet, returning = self._watch.look(vms, now), self._returning(vms)
        jobs = []
        for row in rows.jobs:
            jobs.append(self._job(row, rows, vms, *pasts[row.id], fleet, returning))
            await asyncio.sleep(0)  # heartbeats are answered by the same thread
        return Snapshot(
            jobs=tuple(jobs),
            vms=vms,
            occupied={Device(worker.vm_id, worker.local_rank): worker.job_id for worker in rows.alive},
            presence=_presence(rows),
        )

    def _returning(self, vms: Mapping[str, VmView]) -> int:
        """Planning without them would give a small generation, and a morph as soon as they are back."""
        if self._now() - self._started_at >= self._rules.start_settle_s:
            return 0
        return sum(vm.state is VmState.READY and not vm.heard_since_start for vm in vms.values())

    def _job(
        self,
        row: JobRow,
        rows: StoreRows,
        vms: Mapping[str, VmView],
        setbacks: Setbacks,
        morphs: Morphs,
        fleet: FleetPast,
        returning: int,
    ) -> LoadedJob:
        spec = JobSpec.model_validate(row.spec)
        newest, workers = rows.newest.get(row.id), rows.workers.get(row.id, ())
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
            generation=None if newest is None else self._generation_view(newest, workers, vms),
            setbacks=setbacks,
            morphs=morphs,
            coming_vms=len(fleet.coming_ages_s),
            returning_vms=returning,
            fleet=fleet,
        )
        return LoadedJob(row=row, version=row.version, spec=spec, generation=newest, workers=workers, view=view)

    def _generation_view(
        self, row: GenerationRow, workers: Sequence[WorkerFacts], vms: Mapping[str, VmView]
    ) -> GenerationView:
        stop = None
        if row.stop_requested_at is not None:
            mode, cause = row.mode_of_stop, row.stop_cause
            assert mode is not None
            assert cause is not None
            stop = StopView(
                mode=mode, cause=EndCause(cause), reason=row.stop_reason or "", requested_at=row.stop_requested_at
            )
        steps = {
            health.rank: health.step
            for vm_id in {worker.vm_id for worker in workers}
            for health in self._registry.workers(vm_id)
            if (health.job_id, health.generation) == (row.job_id, row.number)
        }
        return GenerationView(
            number=row.number,
            kind=row.generation_kind,
            state=row.generation_state,
            workers=tuple(self._worker_view(worker, vms, steps.get(worker.rank)) for worker in workers),
            progress_at=self._progress_at(row),
            plan=Plan.from_document(row.plan),
            last_step=row.last_step,
            stop=stop,
            end_reason=row.end_reason or "",
        )

    def _progress_at(self, row: GenerationRow) -> float:
        # A manager that was away has missed the steps of that time: the clock starts with it.
        progress_at = max(row.last_step_at or row.created_at, self._started_at)
        evaluated_s = self._registry.evaluated_s(row.job_id, row.number)
        return progress_at if evaluated_s is None else max(progress_at, self._now() - evaluated_s)

    def _worker_view(self, row: WorkerFacts, vms: Mapping[str, VmView], step: int | None) -> WorkerView:
        vm = vms.get(row.vm_id)
        return WorkerView(
            rank=row.rank,
            device=Device(row.vm_id, row.local_rank),
            state=row.worker_state,
            cause=row.exit_cause,
            error=row.error_text or "",
            exit_code=row.exit_code,
            stopped_at=row.stopped_at,
            step=step,
            lease_over=vm is not None and vm.state is VmState.LOST and vm.silent_s >= self._rules.lease_s,
        )


def _presence(rows: StoreRows) -> dict[str, tuple[Presence, ...]]:
    parts: dict[tuple[str, str, int], list[WorkerState]] = {}
    for worker in rows.alive:
        parts.setdefault((worker.vm_id, worker.job_id, worker.generation), []).append(worker.worker_state)
    found: dict[str, tuple[Presence, ...]] = {}
    for (vm_id, job_id, number), states in parts.items():
        generation = rows.generations[job_id, number]
        part = Presence(
            job_id=job_id,
            generation=number,
            state=generation.state,
            stop_mode=generation.stop_mode,
            worker_states=tuple(states),
        )
        found[vm_id] = (*found.get(vm_id, ()), part)
    return found


def previous_placement(job: LoadedJob) -> tuple[tuple[Device, ...], int | None]:
    """Where the ranks of the newest generation are or were, and its P; ((), None) when it did not train."""
    if job.generation is None or job.generation.kind != GenerationKind.TRAINING:
        return (), None
    devices = tuple(Device(worker.vm_id, worker.local_rank) for worker in job.workers)
    return devices, Plan.from_document(job.generation.plan).p
