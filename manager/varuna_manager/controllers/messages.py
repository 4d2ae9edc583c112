"""Commands for agents, built from the store's rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from varuna_manager.controllers.job_view import LoadedJob
from varuna_manager.domain.commands import StopKey
from varuna_manager.domain.newcomers import WantedNewcomers
from varuna_manager.domain.observed import Rules, VmView
from varuna_manager.domain.spec import VmLimits
from varuna_manager.domain.states import GenerationKind, StopMode
from varuna_manager.domain.store_stops import expect_store_stops
from varuna_manager.history.morph_spans import MorphSpans
from varuna_proto.environment import is_read_early
from varuna_proto.plan import Device, Plan
from varuna_proto.plan_message import make_plan_spec
from varuna_proto.state_use import StateUse
from varuna_proto.v1 import agent_pb2 as pb

_ON_NON_FINITE = {
    "skip": pb.ON_NON_FINITE_SKIP,
    "stop": pb.ON_NON_FINITE_STOP,
    "go_on": pb.ON_NON_FINITE_GO_ON,
}
UNSENDABLE = (ValueError, TypeError, OverflowError)
"""Protobuf's errors for values that no message can hold."""
_KINDS = {
    GenerationKind.CALIBRATION: pb.GENERATION_KIND_CALIBRATION,
    GenerationKind.TRAINING: pb.GENERATION_KIND_TRAINING,
}
_MODES = {
    StopMode.LEAVE_NOW: pb.STOP_MODE_LEAVE_NOW,
    StopMode.SAVE_FIRST: pb.STOP_MODE_SAVE_FIRST,
    StopMode.HOLD_FIRST: pb.STOP_MODE_HOLD_FIRST,
    StopMode.HOLD_WITHIN_STEP: pb.STOP_MODE_HOLD_FIRST,
}


def launch_message(
    job: LoadedJob,
    vm: VmView,
    *,
    secrets: Mapping[str, str],
    default_checkpoint_url: str,
    profile_cache_url: str,
    spans: MorphSpans,
) -> pb.ManagerMessage:
    """The part of the job's newest generation that runs on the VM. `secrets`: their values, by variable; no other
    message has them."""
    generation = job.generation
    assert generation is not None, f"job {job.row.id} has nothing to launch"
    view = job.view.generation
    holders = None if view is None else view.holders
    is_calibration = generation.generation_kind is GenerationKind.CALIBRATION  # it has no first step
    launch = _describe_launch(
        job,
        Plan.from_document(generation.plan),
        {worker.rank: Device(worker.vm_id, worker.local_rank) for worker in job.workers},
        vm,
        keepers=generation.keepers or (),
        secrets=secrets,
        default_checkpoint_url=default_checkpoint_url,
    )
    launch.MergeFrom(
        pb.Launch(
            generation=generation.number,
            kind=_KINDS[generation.generation_kind],
            rendezvous_host=generation.rendezvous_host,
            rendezvous_port=generation.rendezvous_port,
            profile_cache_url=profile_cache_url,
            secret=generation.secret or "",
            committed_step=0 if job.spec.checkpoint.may_start_over else generation.committed_step or 0,
            traceparent="" if is_calibration else spans.make_traceparent(job.row.id, generation.number),
            in_place=generation.in_place,
            holders_generation=0 if holders is None else holders.generation,
            holders=[] if holders is None else [holder.rank for holder in holders.members],
            keepers=generation.keepers or (),
        )
    )
    return pb.ManagerMessage(launch=launch)


def start_newcomers_message(
    job: LoadedJob,
    wanted: WantedNewcomers,
    vm: VmView,
    *,
    secrets: Mapping[str, str],
    default_checkpoint_url: str,
    profile_cache_url: str,
) -> pb.ManagerMessage:
    """The processes that the VM starts ahead: the Launch that is expected, as far as it is known."""
    launch = _describe_launch(
        job,
        wanted.plan,
        dict(enumerate(wanted.placement)),
        vm,
        keepers=(),
        secrets=secrets,
        default_checkpoint_url=default_checkpoint_url,
    )
    others = [worker for worker in launch.workers if Device(vm.id, worker.local_rank) not in wanted.devices]
    for worker in others:
        launch.workers.remove(worker)
    launch.generation, launch.kind = wanted.number, pb.GENERATION_KIND_TRAINING
    launch.profile_cache_url = profile_cache_url
    return pb.ManagerMessage(start_newcomers=pb.StartNewcomers(request=wanted.request, launch=launch))


def send_ahead_message(job: LoadedJob, wanted: WantedNewcomers, vm: VmView) -> pb.ManagerMessage | None:
    """What the VM's workers send or take of the state for the next generation. None: it has no part in that."""
    generation = job.generation
    if generation is None:
        return None
    ranks = {Device(worker.vm_id, worker.local_rank): worker.rank for worker in job.workers}
    if vm.id not in {device.vm_id for device in (*ranks, *wanted.devices)}:
        return None
    goes_on = [None if device in wanted.devices else ranks.get(device) for device in wanted.placement]
    message = pb.SendAhead(
        job_id=job.row.id,
        generation=generation.number,
        request=wanted.request,
        plan=make_plan_spec(wanted.plan),
        ranks_before=[0 if rank is None else rank + 1 for rank in goes_on],
        workers=[
            pb.WorkerAssignment(rank=rank, local_rank=device.local_rank)
            for rank, device in enumerate(wanted.placement)
            if device.vm_id == vm.id
        ],
        world_size=len(ranks),
        rendezvous_host=generation.rendezvous_host,
        rendezvous_port=generation.rendezvous_port,
        secret=generation.secret or "",
    )
    return pb.ManagerMessage(send_ahead=message)


def _describe_launch(
    job: LoadedJob,
    plan: Plan,
    devices: Mapping[int, Device],
    vm: VmView,
    *,
    keepers: Sequence[int],
    secrets: Mapping[str, str],
    default_checkpoint_url: str,
) -> pb.Launch:
    """What a Launch says before its generation has begun. `devices`: by rank. `keepers`: as far as they are known."""
    vm_ids = [device.vm_id for _, device in sorted(devices.items())]
    copied, uncopied = (
        expect_store_stops(job.view.fleet, vm_ids, plan.p, keepers=kept, holds_state=job.spec.holds_state)
        for kept in (keepers, ())
    )
    return pb.Launch(
        job_id=job.row.id,
        workers=[
            pb.WorkerAssignment(rank=rank, local_rank=device.local_rank)
            for rank, device in sorted(devices.items())
            if device.vm_id == vm.id
        ],
        plan=make_plan_spec(plan),
        command=job.spec.run,
        workdir=job.spec.workdir,
        archive=job.spec.archive or "",
        setup=job.spec.setup or "",
        setup_timeout_s=job.spec.setup_timeout_s,
        environment=job.spec.env,
        secrets=secrets,
        checkpoint_url=job.spec.checkpoint.url or default_checkpoint_url,
        world_size=len(devices),
        checkpoint_interval_s=job.spec.checkpoint.interval_s or 0.0,
        stops_per_hour=copied,
        stops_without_copies_per_hour=uncopied,
        limits=_limits(job.spec.vm_limits),
        copies_shares=job.asks_for_marks,
        on_non_finite=_ON_NON_FINITE[job.spec.on_nonfinite],
        zone=vm.zone,
    )


def stop_message(
    key: StopKey,
    rules: Rules,
    *,
    now: float,
    step_s: float,
    leaves_at: float | None,
    traceparent: str,
    state_use: StateUse,
) -> pb.ManagerMessage:
    """`step_s`: how long a step takes. `leaves_at`: when the VM goes; None: it stays, and what its workers hold is not
    given up because another VM goes before they have left. `traceparent`: of the morph for which it stops, or empty."""
    grace_s = rules.stop_grace_s
    if state_use.keep and key.mode is StopMode.LEAVE_NOW:
        # Replicas that have lost no worker finish their share of the step.
        grace_s += rules.share_minibatches * step_s
    if key.mode is not StopMode.LEAVE_NOW:  # workers that cannot hold their state save
        left_s = math.inf if leaves_at is None else leaves_at - now - 1.0
        grace_s = max(min(rules.save_grace_s + 2 * step_s, left_s), 1.0)
    stop = pb.Stop(
        job_id=key.job_id,
        generation=key.generation,
        mode=_MODES[key.mode],
        grace_s=grace_s,
        traceparent=traceparent,
        keep_state=state_use.keep,
        in_place=state_use.in_place,
        within_step=key.mode is StopMode.HOLD_WITHIN_STEP,
        spare=state_use.spare,
        store_state=state_use.store,
    )
    return pb.ManagerMessage(stop=stop)


def prepare_message(job: LoadedJob, *, is_idle: bool) -> pb.ManagerMessage:
    """For a VM that the job may get. Beside workers only its workdir is made ready: imports would slow them down.

    The job's environment may have secrets in it: it goes with a Launch. Only a setup cannot do without it. Imports can,
    unless a variable is read while they are done: then they wait for the Launch, too.
    """
    spec = job.spec
    imports_ahead = is_idle and (spec.setup is not None or not any(map(is_read_early, spec.env)))
    prepare = pb.Prepare(
        job_id=job.row.id,
        command=spec.run if imports_ahead else "",
        workdir=spec.workdir,
        archive=spec.archive or "",
        setup=spec.setup or "",
        setup_timeout_s=spec.setup_timeout_s,
        environment=spec.env if spec.setup is not None else {},
        limits=_limits(spec.vm_limits),
    )
    return pb.ManagerMessage(prepare=prepare)


def _limits(limits: VmLimits) -> pb.JobLimits:
    return pb.JobLimits(
        memory_bytes=int((limits.memory_gib or 0) * 1024**3), cpus=limits.cpus or 0.0, processes=limits.processes or 0
    )


def keep_message(job_ids: Iterable[str]) -> pb.ManagerMessage:
    """Preparations for other jobs than these are no longer needed."""
    return pb.ManagerMessage(keep_prepared=pb.KeepPrepared(job_ids=sorted(job_ids)))


def drain_message(reason: str) -> pb.ManagerMessage:
    return pb.ManagerMessage(drain=pb.Drain(reason=reason))
