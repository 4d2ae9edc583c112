"""Loads what the job controller decides on: rows and live state, as the domain's frozen views."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

from varuna_manager.controllers.defects import Defects
from varuna_manager.controllers.gpu_types import GpuTypes
from varuna_manager.controllers.job_costs import JobCosts
from varuna_manager.controllers.progress_clock import ProgressClock
from varuna_manager.db.engine import Database
from varuna_manager.domain.commands import GenerationOnVm
from varuna_manager.domain.fitting import fits_job, is_choosy, pin_type, render_request
from varuna_manager.domain.fleet_past import FleetPast
from varuna_manager.domain.fleet_watch import FleetWatch
from varuna_manager.domain.gpu_types import OnlyType
from varuna_manager.domain.keepers import CopiesChoice, CopiesObstacles, find_kept
from varuna_manager.domain.limits import JobLimitsView
from varuna_manager.domain.memory_margin import MemoryMargin
from varuna_manager.domain.morphs import MorphEstimate, PastShape, estimate_fleet_morphs, estimate_morphs
from varuna_manager.domain.observed import GenerationView, JobView, Rules, VmView, WorkerViews
from varuna_manager.domain.preparing import JobPlaces, WorkdirReadiness
from varuna_manager.domain.setups import SetupFailure
from varuna_manager.domain.spec import JobSpec, Resources
from varuna_manager.domain.states import GenerationKind, VmState
from varuna_manager.world.facts import (
    GenerationFacts,
    GenerationProgress,
    HeldGeneration,
    JobFacts,
    StoredJob,
    WorkerFacts,
    WorkerGroup,
)
from varuna_manager.world.pasts import JOBS_LEARNED_FROM, read_fleet_shapes, read_lives_summary
from varuna_manager.world.vm_registry import VmRegistry
from varuna_manager.world.world import World, WorldView
from varuna_proto.plan import Device, Plan
from varuna_proto.state_use import OTHER_STAGES

_ANY = Resources()


@dataclass(frozen=True, kw_only=True)
class LoadedJob:
    """A job with its newest generation: the rows and the view for the decision."""

    row: JobFacts
    spec: JobSpec
    generation: GenerationFacts | None
    workers: tuple[WorkerFacts, ...]
    """Of that generation, by rank."""
    view: JobView
    """Without devices and proposal, which depend on earlier jobs' decisions."""
    setup_failures: Mapping[str, SetupFailure] = field(default_factory=dict)
    """By VM."""
    only_type: OnlyType | None = None
    """The type of all its GPUs, where the fleet has several and it may not mix them; None: it takes what its resources
    say."""

    @cached_property
    def resources(self) -> Resources:
        """What it asks of GPUs."""
        return pin_type(self.spec.resources, self.only_type)

    @property
    def asks_for_marks(self) -> bool:
        """Whether the ranks of its newest generation are to copy the sums of long steps."""
        return self.generation is not None and _asks_for_marks(self.generation, self.spec)

    @property
    def failed_on(self) -> frozenset[str]:
        """VMs on which its workdir could ever not be made ready."""
        return frozenset(self.setup_failures)


class FittingGpus(NamedTuple):
    """Devices that meet a job's request."""

    gpus: int
    """Those that can be allotted."""
    least_memory_bytes: int | None
    """Of a device of a usable VM, as far as it is known."""
    least_per_vm: int


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    jobs: tuple[LoadedJob, ...]
    """All jobs that are not over, oldest first."""
    vms: Mapping[str, VmView]
    """All VMs that are not gone."""
    occupied: Mapping[Device, str]
    """Devices of workers that have not stopped, and the job's id."""
    presence: Mapping[str, tuple[GenerationOnVm, ...]]
    """By VM: every generation with a worker there that has not stopped."""

    @cached_property
    def usable(self) -> tuple[VmView, ...]:
        """The usable VMs, in quarantine or not."""
        return tuple(vm for vm in self.vms.values() if vm.usable)

    @cached_property
    def readiness(self) -> WorkdirReadiness:
        """Where workdirs are ready, on all of the VMs."""
        return WorkdirReadiness(self.vms.values())

    @cached_property
    def expected(self) -> frozenset[str]:
        """The VMs that are here or on their way, and not about to leave."""
        states = (VmState.REQUESTED, VmState.READY, VmState.SUSPECT)
        return frozenset(vm.id for vm in self.vms.values() if vm.state in states)

    @property
    def gpus(self) -> int:
        """Devices that can be allotted: of usable VMs, and those of workers, whatever state their VM is in."""
        return self.find_gpus(_ANY).gpus

    def find_gpus(self, wanted: Resources) -> FittingGpus:
        """The devices that can be shared out and are as a job asks. Worked out once for all jobs that ask the same."""
        key = render_request(wanted)
        if key not in self._fitting:
            self._fitting[key] = self._find_gpus(wanted)
        return self._fitting[key]

    def _find_gpus(self, wanted: Resources) -> FittingGpus:
        choosy = is_choosy(wanted)
        usable = tuple(vm for vm in self.usable if is_fitting(vm, wanted)) if choosy else self.usable
        elsewhere = (self.vms.get(device.vm_id) for device in self.occupied)
        return FittingGpus(
            gpus=sum(vm.gpus for vm in usable if not vm.quarantined)
            + sum(vm is not None and not vm.trusted and is_fitting(vm, wanted) for vm in elsewhere),
            least_memory_bytes=min((vm.device_memory_bytes for vm in usable if vm.device_memory_bytes), default=None),
            least_per_vm=min((vm.gpus for vm in usable), default=1),
        )

    @cached_property
    def _fitting(self) -> dict[str, FittingGpus]:
        return {}


class DevicePool:
    """The devices that are free as one job after another takes some. Built once for a look at all jobs."""

    def __init__(
        self,
        snapshot: Snapshot,
        places: JobPlaces | None = None,
        waiting: Mapping[Device, str] = MappingProxyType({}),
    ) -> None:
        """`places`: where jobs are going to run. `waiting`: the job of the processes that wait on a device."""
        self._places = places or JobPlaces()
        self._free: dict[Device, None] = {}
        self._kept_out: dict[Device, None] = {}
        self._own: dict[str, list[Device]] = {}
        self._quarantined = {vm.id for vm in snapshot.usable if vm.quarantined}
        self._vms = snapshot.vms
        choosy = [job.resources for job in snapshot.jobs if is_choosy(job.resources)]
        # GPUs that fewer jobs ask for go first, so that the others stay free for the jobs that need them.
        for vm in sorted(snapshot.usable, key=lambda vm: (sum(is_fitting(vm, wanted) for wanted in choosy), vm.id)):
            for index in range(vm.gpus):
                device = Device(vm.id, index)
                job_id = snapshot.occupied.get(device) or waiting.get(device)
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
        if is_choosy(resources):
            own = [device for device in own if is_fitting(self._vms[device.vm_id], resources)]
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

    def keep_free(self, job_id: str, devices: Iterable[Device]) -> frozenset[Device]:
        """Those of the devices that are free or the job's own, on usable VMs that are not quarantined."""
        own = {device for device in self._own.get(job_id, ()) if device.vm_id not in self._quarantined}
        return frozenset(devices) & (own | self._free.keys())

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

    def count_unprepared(self, job_id: str, failed_on: Collection[str] = ()) -> int:
        """How many free devices are of VMs that are still to make the job's workdir ready.

        `failed_on`: VMs where that failed: they do not count before they try again.
        """
        count = 0
        for vm_id, gpus in self._places.by_job.get(job_id, {}).items():
            vm = self._vms[vm_id]
            if job_id in vm.setting_up or not (job_id in vm.prepared or vm_id in failed_on):
                count += min(len(self._free_of(vm_id)), gpus)
        return count

    def count_unfit(self, resources: Resources) -> int:
        """How many free devices do not meet the job's request."""
        if not is_choosy(resources):
            return 0
        return sum(not is_fitting(self._vms[device.vm_id], resources) for device in self._free)

    def take_devices(self, devices: Iterable[Device]) -> None:
        """Make these devices unavailable to later jobs."""
        for device in devices:
            self._free.pop(device, None)
            self._kept_out.pop(device, None)


def is_fitting(vm: VmView, wanted: Resources) -> bool:
    """Whether the VM's GPUs meet the job's request."""
    return fits_job(wanted, gpu_type=vm.gpu_type, device_memory_bytes=vm.device_memory_bytes)


class SnapshotLoader:
    """Makes the views of one look of the World, its registry and the clock."""

    def __init__(self, database: Database, world: World, rules: Rules, now: Callable[[], float] = time.time) -> None:
        self._database = database
        self.world = world
        self._registry = world.registry
        self._rules = rules
        self._now = now
        self._started_at = now()
        self._clock = ProgressClock(world.registry.monotonic_s)
        self._costs = JobCosts()
        self._watch = FleetWatch(self._started_at)
        self._has_looked_back = False
        self._shapes: Mapping[str, tuple[PastShape, ...]] = {}
        """By job: of those whose morphs were the last."""
        self._fleet_morphs = MorphEstimate()
        self._defects = Defects()

    async def load_snapshot(self) -> Snapshot:
        """The current state."""
        world = await self.world.load_view()
        if not self._has_looked_back:
            async with self._database.read() as session:
                self._watch.add_past(await read_lives_summary(session, self._now()))
                self._shapes = await read_fleet_shapes(session)
            self._has_looked_back = True
        self._clock.keep_only(world.jobs.keys())
        limits = await self._load_limits(world)
        fleet = self._watch.observe_vms(world.vm_views, self._now(), self._registry.market_hazard)
        self._learn_morphs(world)
        returning = self._count_returning(world.vm_views)
        types = GpuTypes(world.vm_views, world.generations.occupied, len(world.jobs))
        jobs = []
        for job in world.jobs.values():
            try:
                jobs.append(self._load_job(job, world, limits[job.row.id], fleet, returning, types))
            except Exception as error:  # an error in one job's rows must not delay the other jobs
                self._defects.log_once(job.row.id, "a job cannot be loaded", error)
            await asyncio.sleep(0)  # let the same thread answer heartbeats
        generations = world.generations
        return Snapshot(
            jobs=tuple(jobs), vms=world.vm_views, occupied=generations.occupied, presence=generations.presence
        )

    def _learn_morphs(self, world: WorldView) -> None:
        """What morphs cost, by those of all jobs. Jobs that are over count for a while."""
        before = self._shapes
        news = {job_id: past.shapes for job_id, past in world.pasts.items() if past.shapes != before.get(job_id, ())}
        rest = {job_id: shapes for job_id, shapes in before.items() if job_id not in news}
        newest = sorted({**rest, **news}.items(), key=lambda one: -max((shape.ended_at for shape in one[1]), default=0))
        self._shapes = dict(newest[:JOBS_LEARNED_FROM])
        self._fleet_morphs = estimate_fleet_morphs([shape for shapes in self._shapes.values() for shape in shapes])

    async def _load_limits(self, world: WorldView) -> Mapping[str, JobLimitsView]:
        now = self._now()
        costs: dict[str, float] = {}
        limited = [job.row for job in world.jobs.values() if job.spec.limits.max_cost is not None]
        self._costs.keep_only({row.id for row in limited})
        if limited:
            async with self._database.read() as session:
                for row in limited:
                    newest = world.generations.newest.get(row.id)
                    vms = [] if newest is None else [world.vms.get(vm_id) for vm_id in newest.group.vm_ids]
                    prices = {vm.id: vm.price_per_hour for vm in vms if vm is not None}
                    number = None if newest is None else newest.facts.number
                    depends_on = (world.find_past(row.id), number, prices)
                    costs[row.id] = await self._costs.read_cost(session, row, depends_on, now)
        return {
            job.row.id: JobLimitsView(
                max_duration_s=job.spec.limits.max_duration_s,
                max_cost=job.spec.limits.max_cost,
                queue_timeout_s=job.spec.limits.queue_timeout_s,
                waits_since=job.row.created_at if job.row.retried_at is None else job.row.retried_at,
                run_since=job.row.run_since,
                cost=costs.get(job.row.id, 0.0),
            )
            for job in world.jobs.values()
        }

    def _count_returning(self, vms: Mapping[str, VmView]) -> int:
        """VMs that have not connected since the start. A plan without them would be small, and a morph would follow."""
        if self._now() - self._started_at >= self._rules.start_settle_s:
            return 0
        return sum(vm.state is VmState.READY and not vm.connected_since_start for vm in vms.values())

    def _load_job(
        self,
        job: StoredJob,
        world: WorldView,
        limits: JobLimitsView,
        fleet: FleetPast,
        returning: int,
        types: GpuTypes,
    ) -> LoadedJob:
        row, spec = job.row, job.spec
        held, past = world.generations.newest.get(row.id), world.find_past(row.id)
        only_type = types.find_only_type(row.id, spec.resources, () if held is None else held.group.vm_ids)
        kept = CopiesChoice() if held is None else _find_kept(held, world.progress[held.facts.key], spec)
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
            generation=None if held is None else self._generation_view(held, kept.keepers, world),
            setbacks=past.setbacks,
            morphs=estimate_morphs(past.shapes, self._fleet_morphs),
            margin=MemoryMargin.from_document(row.memory_margin),
            coming_vms=len(fleet.coming_ages_s),
            returning_vms=returning,
            fleet=fleet,
            asks=render_request(pin_type(spec.resources, only_type)),
            flaw=job.flaw,
            limits=limits,
            has_fixed_stages=bool(row.script_obstacles) or not spec.holds_state,
            may_leave_steps=spec.holds_state
            and all(reason.startswith(OTHER_STAGES) for reason in row.script_obstacles or ()),
            copies_shares=kept.marks,
        )
        failures = {
            vm_id: SetupFailure(times=failure["times"], exit_code=failure["exit_code"])
            for vm_id, failure in (row.setup_failures or {}).items()
        }
        return LoadedJob(
            row=row,
            spec=spec,
            generation=None if held is None else held.facts,
            workers=() if held is None else held.group.all,
            view=view,
            setup_failures=failures,
            only_type=only_type,
        )

    def _generation_view(self, held: HeldGeneration, keepers: tuple[int, ...], world: WorldView) -> GenerationView:
        """`keepers`: those that keep copies, as far as its workers have said."""
        facts, progress = held.facts, world.progress[held.facts.key]
        return GenerationView(
            number=facts.number,
            kind=facts.generation_kind,
            state=facts.generation_state,
            workers=self._worker_views(held.group, world.vm_views),
            progress_at=self._progress_at(facts, progress, held.group, world.vm_views),
            plan=held.plan,
            last_step=progress.last_step,
            resumed_step=progress.resumed_step,
            mean_step_s=progress.mean_step_s,
            first_step_after_s=None if progress.started_at is None else progress.started_at - facts.created_at,
            stepped_at=progress.last_step_at or progress.running_at or facts.created_at,
            micro_batches_left=progress.micro_batches_left,
            not_finite_from=progress.not_finite_from,
            steps_skipped=progress.steps_skipped,
            in_place=facts.in_place,
            holders=held.holders,
            keepers=keepers,
            stop=held.stop,
            ended_at=facts.ended_at,
            end_cause=facts.cause_of_end,
            end_reason=facts.end_reason or "",
        )

    def _progress_at(
        self, facts: GenerationFacts, progress: GenerationProgress, group: WorkerGroup, vms: Mapping[str, VmView]
    ) -> float:
        now, mark = self._now(), (facts.number, progress.last_step)
        progress_at = self._clock.progress_at(facts.job_id, mark, progress.last_step_at or facts.created_at, now)
        if now - progress_at > self._rules.suspect_after_s and self._is_silent(now, group, vms):
            progress_at = self._clock.begin_again(facts.job_id, now)  # silence is judged separately
        evaluated_s = self._registry.evaluated_s(facts.job_id, facts.number, group.vm_ids)
        return progress_at if evaluated_s is None else max(progress_at, now - evaluated_s)

    def _is_silent(self, now: float, group: WorkerGroup, vms: Mapping[str, VmView]) -> bool:
        """Whether a VM is silent and not yet given up for that."""
        present = [vms[vm_id] for vm_id in group.vm_ids if vm_id in vms]
        return any(vm.state is not VmState.LOST and vm.silent_s(now) >= self._rules.suspect_after_s for vm in present)

    def _worker_views(self, group: WorkerGroup, vms: Mapping[str, VmView]) -> WorkerViews:
        lost = [vms[vm_id] for vm_id in group.vm_ids if vm_id in vms and vms[vm_id].state is VmState.LOST]
        # Agents that were silent for a whole lease have ended their workers.
        lapsed = {vm.id for vm in lost if vm.silent_s(self._now()) >= self._rules.lease_s}
        return group.views_without_lease(lapsed) if lapsed else group.views


def _find_kept(held: HeldGeneration, progress: GenerationProgress, spec: JobSpec) -> CopiesChoice:
    """Which copies the generation really keeps."""
    chosen = CopiesChoice(keepers=tuple(held.facts.keepers or ()), marks=_asks_for_marks(held.facts, spec))
    obstacles = CopiesObstacles(progress.copies_obstacle or "", progress.marks_obstacle or "")
    return find_kept(chosen, obstacles, d=1 if held.plan is None else held.plan.d)


def _asks_for_marks(generation: GenerationFacts, spec: JobSpec) -> bool:
    """Whether its ranks are to copy the sums of long steps. In rows of an earlier version, which chose nothing, the job
    file says it."""
    chosen = generation.copies_shares
    return spec.copies != "off" if chosen is None else chosen


def with_health(view: JobView, registry: VmRegistry) -> JobView:
    """With each worker's completed and awaited work, which only the searches for a hang's suspect and for a silent rank
    need."""
    generation = view.generation
    if generation is None:
        return view
    places = {worker.rank: worker.device.vm_id for worker in generation.workers}
    healths = registry.list_healths(view.id, generation.number, places)
    workers = tuple(
        replace(
            worker,
            step=healths[worker.rank].step,
            waiting_for=healths[worker.rank].waiting_for,
            quiet_ranks=healths[worker.rank].quiet_ranks,
        )
        if worker.rank in healths
        else worker
        for worker in generation.workers
    )
    return replace(view, generation=replace(generation, workers=workers))


def previous_placement(job: LoadedJob) -> tuple[tuple[Device, ...], Plan | None]:
    """Where the ranks of the newest generation are or were, and its plan; ((), None) when it did not train."""
    if job.generation is None or job.generation.kind != GenerationKind.TRAINING:
        return (), None
    devices = tuple(Device(worker.vm_id, worker.local_rank) for worker in job.workers)
    return devices, Plan.from_document(job.generation.plan)


def trained_micro_batch(job: LoadedJob) -> int | None:
    """The size of the micro-batches in the newest generation; None when the job has not trained yet."""
    newest = job.view.generation
    if job.generation is None or newest is None or newest.kind is not GenerationKind.TRAINING:
        return None
    if not newest.live and not (newest.last_step or newest.resumed_step or job.view.setbacks.best_step):
        return None  # nothing depends on the size yet: a smaller one may fit where memory was short
    return Plan.from_document(job.generation.plan).micro_batch
