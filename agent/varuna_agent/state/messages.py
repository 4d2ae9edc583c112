"""The messages to the manager, made from the agent's state and from its workers' messages.

A worker is the job's own code: its texts are cleaned and cut here, so that every report can be sent and stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from varuna_agent.state.admission import Identity
from varuna_agent.state.hosted_worker import HostedWorker
from varuna_agent.state.worker_key import WorkerKey
from varuna_proto.bounds import ERROR_CHARS, NAME_CHARS, URL_CHARS, clean_text
from varuna_proto.v1 import agent_pb2, worker_pb2

_MOST_PHASES = 32
_STACK_CHARS = 70_000
_MOST_OPS = 20_000
_MOST_SUMS = 1_000
_SUM_CHARS = 64
"""Bounds on the traced gradient sums and on their names: with `_MOST_OPS` ops they fit into one message."""


def make_hello(
    identity: Identity,
    workers: Iterable[HostedWorker],
    seen: Mapping[str, int],
    *,
    rendezvous_port: int,
    first_report: int,
) -> agent_pb2.Hello:
    return agent_pb2.Hello(
        vm_id=identity.vm_id,
        incarnation=identity.incarnation,
        agent_version=identity.version,
        host=identity.host,
        gpus=identity.gpus,
        device_memory_bytes=identity.device_memory_bytes,
        rendezvous_port=rendezvous_port,
        workers=[
            agent_pb2.RunningWorker(
                job_id=worker.key.job_id,
                generation=worker.key.generation,
                rank=worker.key.rank,
                step=worker.health.step,
            )
            for worker in sorted(workers, key=lambda worker: worker.key)
        ],
        seen_generations=[
            agent_pb2.SeenGeneration(job_id=job_id, generation=generation) for job_id, generation in seen.items()
        ],
        first_report=first_report,
        gpu_type=identity.gpu_type,
    )


def make_worker_started(worker: HostedWorker, ready: worker_pb2.WorkerReady) -> agent_pb2.Report:
    loading = [
        agent_pb2.Phase(name=clean_text(phase.name, NAME_CHARS), seconds=phase.seconds) for phase in ready.phases
    ]
    own = [agent_pb2.Phase(name=name, seconds=seconds) for name, seconds in worker.start_phases.items()]
    fact = agent_pb2.WorkerStarted(
        job_id=worker.key.job_id,
        generation=worker.key.generation,
        rank=worker.key.rank,
        pid=worker.pid,
        resumed_step=ready.resumed_step,
        phases=[*own, *loading[:_MOST_PHASES]],
        kept_bytes=ready.kept_bytes,
        peer_bytes=ready.peer_bytes,
        late_bytes=ready.late_bytes,
        store_bytes=ready.store_bytes,
        micro_batches_redone=ready.micro_batches_redone,
        micro_batches_left=ready.micro_batches_left,
    )
    return agent_pb2.Report(worker_started=fact)


def make_checkpoint_committed(key: WorkerKey, done: worker_pb2.CheckpointDone) -> agent_pb2.Report:
    fact = agent_pb2.CheckpointCommitted(
        job_id=key.job_id,
        generation=key.generation,
        step=done.step,
        url=clean_text(done.url, URL_CHARS),
        total_bytes=done.total_bytes,
    )
    return agent_pb2.Report(checkpoint_committed=fact)


def make_step_traced(key: WorkerKey, done: agent_pb2.StepTraced) -> agent_pb2.Report:
    fact = agent_pb2.StepTraced(
        job_id=key.job_id,
        generation=key.generation,
        rank=key.rank,
        step=done.step,
        begin_us=done.begin_us,
        ops=done.ops[:_MOST_OPS],
        all_reduce=done.all_reduce[:_MOST_SUMS],
    )
    for gradient_sum in fact.all_reduce:
        gradient_sum.name = clean_text(gradient_sum.name, _SUM_CHARS)
    return agent_pb2.Report(step_traced=fact)


def make_profile_measured(key: WorkerKey, done: worker_pb2.ProfileDone) -> agent_pb2.Report:
    fact = agent_pb2.ProfileMeasured(
        job_id=key.job_id, generation=key.generation, profile_json=done.profile_json, from_cache=done.from_cache
    )
    return agent_pb2.Report(profile_measured=fact)


def make_setup_failed(job_id: str, exit_code: int, error: str) -> agent_pb2.Report:
    fact = agent_pb2.SetupFailed(job_id=job_id, exit_code=exit_code, error_text=clean_text(error, ERROR_CHARS))
    return agent_pb2.Report(setup_failed=fact)


def make_command_refused(job_id: str, generation: int, reason: str) -> agent_pb2.Report:
    """Reports a command that the agent does not follow."""
    fact = agent_pb2.CommandRefused(job_id=job_id, generation=generation, reason=clean_text(reason, ERROR_CHARS))
    return agent_pb2.Report(command_refused=fact)


def make_report_message(numbered: agent_pb2.Report) -> agent_pb2.AgentMessage:
    return agent_pb2.AgentMessage(report=numbered)


def make_stack_dump(request_id: str, key: WorkerKey, *, text: str = "", error: str = "") -> agent_pb2.AgentMessage:
    """The answer to DumpStacks for one worker."""
    dump = agent_pb2.StackDump(
        request_id=request_id,
        job_id=key.job_id,
        generation=key.generation,
        rank=key.rank,
        text=clean_text(text, _STACK_CHARS),
        error=clean_text(error, ERROR_CHARS),
    )
    return agent_pb2.AgentMessage(stack_dump=dump)
