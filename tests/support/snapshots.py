"""What the job controller loads, made by hand."""

from __future__ import annotations

from dataclasses import replace

from decision_views import generation, job, worker
from varuna_manager.controllers.job_view import LoadedJob, Snapshot
from varuna_manager.db.models import JobRow
from varuna_manager.domain.observed import JobView, VmView
from varuna_manager.domain.spec import JobSpec, Resources
from varuna_manager.domain.states import JobState
from varuna_manager.world.facts import WorkerFacts
from varuna_planner.profile.document import Measurement, Profile, SectionProfile
from varuna_proto.plan import Device

__all__ = ["MEASURED", "ONE", "PROFILE", "loaded", "snapshot"]


MEASURED = Measurement(
    micro_batch=1,
    forward_us=1000,
    backward_us=2000,
    recompute_us=1000,
    output_bytes=1,
    input_bytes=1,
    activation_bytes=1,
)


ONE = {"parameter_bytes": 8, "optimizer_bytes": 8, "gradient_bytes": 8, "measurements": (MEASURED,)}


PROFILE = Profile(sections=tuple(SectionProfile(index=index, name=str(index), **ONE) for index in range(2))).to_json()


def loaded(name: str, *, has: tuple[str, ...] = (), priority: int = 0, min_gpus: int = 1) -> LoadedJob:
    """A job with a profile; `has`: the VMs of its generation."""
    resources = Resources(min_gpus=min_gpus)
    spec = JobSpec(name=name, workdir="/", run="true", global_batch=8, priority=priority, resources=resources)
    row = JobRow(id=name, name=name, spec=spec.model_dump(), state="running" if has else "queued", profile_json=PROFILE)
    workers = tuple(WorkerFacts(name, 1, rank, vm_id, 0, "running", *[None] * 5) for rank, vm_id in enumerate(has))
    live = generation(*(worker(rank, vm_id) for rank, vm_id in enumerate(has))) if has else None
    view: JobView = replace(job(live), id=name, name=name, min_gpus=min_gpus, created_at=float(ord(name)))
    assert view.state is (JobState.RUNNING if has else JobState.QUEUED)
    return LoadedJob(row=row, spec=spec, generation=None, workers=workers, view=view)


def snapshot(vms: list[VmView], *jobs: LoadedJob) -> Snapshot:
    occupied = {Device(one.vm_id, one.local_rank): job.row.id for job in jobs for one in job.workers}
    return Snapshot(jobs=jobs, vms={one.id: one for one in vms}, occupied=occupied, presence={})
