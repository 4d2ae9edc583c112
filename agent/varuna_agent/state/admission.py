"""Whether a Launch makes sense on this VM, and the workers that it asks for."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from varuna_agent.state.limits import JobLimits
from varuna_agent.state.stimuli import StartWorker, WorkerKey
from varuna_agent.state.workdir import Workdir
from varuna_agent.state.worker import Phase, Worker
from varuna_proto.environment import Mode, WorkerEnvironment
from varuna_proto.trace_context import child
from varuna_proto.v1 import agent_pb2

_JOB_ID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
"""Job ids become names of folders."""

_MODES = {
    agent_pb2.GENERATION_KIND_CALIBRATION: Mode.CALIBRATE,
    agent_pb2.GENERATION_KIND_TRAINING: Mode.TRAIN,
}


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Who this agent is, as its Hello says."""

    vm_id: str
    incarnation: str
    """New for every start of the agent process: report numbers count within it."""
    version: str
    host: str
    gpus: int
    device_memory_bytes: int = 0
    device: str = "cpu"
    """`cpu` or `cuda`; a worker's device is `cuda:<local rank>`."""
    gpu_type: str = ""
    """What the devices are called; empty: not known."""


def flaw_of(launch: agent_pb2.Launch, identity: Identity) -> str | None:
    """What is wrong with a Launch for this VM, whatever runs there; None: nothing."""
    ranks = [assignment.rank for assignment in launch.workers]
    devices = [assignment.local_rank for assignment in launch.workers]
    if not _JOB_ID.fullmatch(launch.job_id):
        return f"job id {launch.job_id!r}: expected letters, digits, '.', '_' and '-'"
    if launch.kind not in _MODES:
        return f"generation kind {launch.kind} is unknown to agent {identity.version}"
    if launch.plan.p * launch.plan.d != launch.world_size:
        return f"plan {launch.plan.p}×{launch.plan.d} does not have the world size {launch.world_size}"
    if len(set(ranks)) < len(ranks) or len(set(devices)) < len(devices):
        return f"ranks {ranks} on devices {devices}: each rank and each device can be there only once"
    if any(rank >= launch.world_size for rank in ranks):
        return f"ranks {ranks} do not fit into a world of {launch.world_size}"
    if any(device >= identity.gpus for device in devices):
        return f"devices {devices}: VM {identity.vm_id} has {identity.gpus}, numbered from 0"
    return None


def device_in_use(launch: agent_pb2.Launch, workers: Iterable[Worker]) -> str | None:
    """Which device another job has and is not about to give up; None when all will be free."""
    devices = {assignment.local_rank for assignment in launch.workers}
    for worker in workers:
        ends = worker.phase in (Phase.LEAVING, Phase.KILLED) or worker.key.job_id == launch.job_id
        if worker.local_rank in devices and not ends:
            return f"device {worker.local_rank} is in use by {worker.key}"
    return None


def new_worker(
    launch: agent_pb2.Launch, assignment: agent_pb2.WorkerAssignment, device: str, *, reports_steps: bool
) -> Worker:
    key = WorkerKey(launch.job_id, launch.generation, assignment.rank)
    plan = launch.plan
    environment = WorkerEnvironment(
        job_id=launch.job_id,
        generation=launch.generation,
        mode=_MODES[launch.kind],
        rank=assignment.rank,
        local_rank=assignment.local_rank,
        world_size=launch.world_size,
        rendezvous_host=launch.rendezvous_host,
        rendezvous_port=launch.rendezvous_port,
        p=plan.p,
        d=plan.d,
        micro_batch=plan.micro_batch,
        global_batch=plan.global_batch,
        stage_starts=tuple(plan.stage_starts),
        policy=plan.policy or "work-conserving",
        run_ahead=plan.run_ahead,
        recompute=tuple(plan.recompute),
        checkpoint_url=launch.checkpoint_url,
        profile_cache_url=launch.profile_cache_url,
        checkpoint_interval_s=launch.checkpoint_interval_s,
        stops_per_hour=launch.stops_per_hour,
        device=f"cuda:{assignment.local_rank}" if device == "cuda" else device,
        secret=launch.secret,
        committed_step=launch.committed_step,
        traceparent=child(launch.traceparent, f"rank {assignment.rank}"),
    )
    start = StartWorker(
        key=key,
        environment=environment,
        extra_environment=dict(launch.environment),
        secrets=dict(launch.secrets),
        command=launch.command,
        workdir=Workdir(
            path=launch.workdir, archive=launch.archive, setup=launch.setup, timeout_s=launch.setup_timeout_s
        ),
        rendezvous_port=launch.rendezvous_port if assignment.rank == 0 else 0,
        limits=JobLimits.from_message(launch.limits),
    )
    return Worker(key=key, local_rank=assignment.local_rank, start=start, reports_steps=reports_steps)
