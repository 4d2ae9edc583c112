"""Checks a Launch against this VM, and makes its workers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from varuna_agent.state.hosted_worker import HostedWorker, WorkerPhase
from varuna_agent.state.instructions import StartWorker
from varuna_agent.state.process_limits import ProcessLimits
from varuna_agent.state.workdir import Workdir
from varuna_agent.state.worker_key import WorkerKey
from varuna_proto.environment import Mode, OnNonFinite, WorkerEnvironment
from varuna_proto.plan_message import parse_plan_spec
from varuna_proto.trace_context import child
from varuna_proto.v1 import agent_pb2

_JOB_ID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
"""Job ids become names of folders."""

_MODES = {
    agent_pb2.GENERATION_KIND_CALIBRATION: Mode.CALIBRATE,
    agent_pb2.GENERATION_KIND_TRAINING: Mode.TRAIN,
}
_ON_NON_FINITE = {
    agent_pb2.ON_NON_FINITE_UNSPECIFIED: OnNonFinite.SKIP,
    agent_pb2.ON_NON_FINITE_SKIP: OnNonFinite.SKIP,
    agent_pb2.ON_NON_FINITE_STOP: OnNonFinite.STOP,
    agent_pb2.ON_NON_FINITE_GO_ON: OnNonFinite.GO_ON,
}


@dataclass(frozen=True, kw_only=True)
class Identity:
    """The agent and its VM, as the Hello presents them."""

    vm_id: str
    incarnation: str
    """New for every start of the agent process; report numbers count within one incarnation."""
    version: str
    host: str
    gpus: int
    device_memory_bytes: int = 0
    device: str = "cpu"
    """`cpu` or `cuda`; a worker's device is `cuda:<local rank>`."""
    gpu_type: str = ""
    """The model name of the devices; empty: not known."""


def describe_flaw(launch: agent_pb2.Launch, identity: Identity) -> str | None:
    """Describe the first error in a Launch, whatever runs on this VM; None: it is valid."""
    ranks = [assignment.rank for assignment in launch.workers]
    devices = [assignment.local_rank for assignment in launch.workers]
    if not _JOB_ID.fullmatch(launch.job_id):
        return f"job id {launch.job_id!r}: expected letters, digits, '.', '_' and '-'"
    if launch.kind not in _MODES:
        return f"generation kind {launch.kind} is unknown to agent {identity.version}"
    if launch.on_non_finite not in _ON_NON_FINITE:
        return f"on_nonfinite {launch.on_non_finite} is unknown to agent {identity.version}"
    if launch.plan.p * launch.plan.d != launch.world_size:
        return f"plan {launch.plan.p}×{launch.plan.d} does not have the world size {launch.world_size}"
    if len(set(ranks)) < len(ranks) or len(set(devices)) < len(devices):
        return f"ranks {ranks} on devices {devices}: each rank and each device can be there only once"
    if any(rank >= launch.world_size for rank in ranks):
        return f"ranks {ranks} do not fit into a world of {launch.world_size}"
    if any(device >= identity.gpus for device in devices):
        return f"devices {devices}: VM {identity.vm_id} has {identity.gpus}, numbered from 0"
    return None


def describe_device_conflict(launch: agent_pb2.Launch, workers: Iterable[HostedWorker]) -> str | None:
    """Describe the first device that a worker of another job keeps; None: all devices will be free."""
    devices = {assignment.local_rank for assignment in launch.workers}
    for worker in workers:
        ends = worker.phase in (WorkerPhase.LEAVING, WorkerPhase.KILLED) or worker.key.job_id == launch.job_id
        if worker.local_rank in devices and not ends:
            return f"device {worker.local_rank} is in use by {worker.key}"
    return None


def is_holder(launch: agent_pb2.Launch, key: WorkerKey) -> bool:
    """Whether the process that was this worker gives its state to the generation, if it has survived."""
    is_of_generation = key.generation_key == (launch.job_id, launch.holders_generation)
    return is_of_generation and key.rank in launch.holders and not launch.in_place


def takes_survivor(launch: agent_pb2.Launch, rank: int) -> bool:
    """Whether the rank's process is one of the generation before."""
    return launch.in_place and (not launch.holders or rank in launch.holders)


def make_environment(launch: agent_pb2.Launch, rank: int, local_rank: int, *, device: str) -> WorkerEnvironment:
    """What a process knows of the generation. The rank may be that of a holder, in the generation that it has left."""
    return WorkerEnvironment(
        job_id=launch.job_id,
        generation=launch.generation,
        mode=_MODES[launch.kind],
        rank=rank,
        local_rank=local_rank,
        world_size=launch.world_size,
        rendezvous_host=launch.rendezvous_host,
        rendezvous_port=launch.rendezvous_port,
        plan=parse_plan_spec(launch.plan),
        checkpoint_url=launch.checkpoint_url,
        profile_cache_url=launch.profile_cache_url,
        checkpoint_interval_s=launch.checkpoint_interval_s,
        stops_per_hour=launch.stops_per_hour,
        stops_without_copies_per_hour=launch.stops_without_copies_per_hour,
        device=f"cuda:{local_rank}" if device == "cuda" else device,
        secret=launch.secret,
        committed_step=launch.committed_step,
        holders=() if launch.in_place else tuple(launch.holders),
        survivors=tuple(launch.holders) if launch.in_place and len(launch.holders) < launch.world_size else (),
        keepers=tuple(launch.keepers),
        copies_shares=launch.copies_shares,
        on_non_finite=_ON_NON_FINITE[launch.on_non_finite],
        traceparent=child(launch.traceparent, f"rank {rank}"),
        zone=launch.zone,
    )


def make_worker(
    launch: agent_pb2.Launch, assignment: agent_pb2.WorkerAssignment, device: str, *, reports_steps: bool
) -> HostedWorker:
    key = WorkerKey(launch.job_id, launch.generation, assignment.rank)
    start = StartWorker(
        key=key,
        environment=make_environment(launch, assignment.rank, assignment.local_rank, device=device),
        extra_environment=dict(launch.environment),
        secrets=dict(launch.secrets),
        command=launch.command,
        workdir=Workdir(
            path=launch.workdir, archive=launch.archive, setup=launch.setup, timeout_s=launch.setup_timeout_s
        ),
        rendezvous_port=launch.rendezvous_port if assignment.rank == 0 else 0,
        limits=ProcessLimits.from_message(launch.limits),
    )
    return HostedWorker(
        key=key,
        local_rank=assignment.local_rank,
        start=start,
        reports_steps=reports_steps,
        is_in_place=takes_survivor(launch, assignment.rank),
    )
