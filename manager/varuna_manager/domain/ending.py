"""Every rank of a generation has stopped: why it ended, and what that means for the job."""

from __future__ import annotations

from dataclasses import replace

from varuna_manager.domain.blame import Vms, unreachable_vm
from varuna_manager.domain.causes import (
    CONSEQUENCE_OF,
    end_cause,
    exit_code,
    failed_script,
    last_line,
    root_cause,
    was_taken,
    worker_line,
)
from varuna_manager.domain.observed import Action, Decision, EndGeneration, FinishJob, GenerationView, JobView
from varuna_manager.domain.states import EndCause, ExitCause, GenerationKind, JobState


def all_stopped(job: JobView, generation: GenerationView, vms: Vms) -> Decision:
    end = _how_it_ended(job, generation, vms)
    actions: list[Action] = [end]
    if job.state is not JobState.CANCELLING:
        restarts, limit = job.setbacks.errors, job.max_restarts_on_errors
        if end.cause is EndCause.SCRIPT_FAILED and restarts < limit:
            again = f"{end.reason}: restart {restarts + 1} of {limit} (max_restarts_on_errors)"
            actions = [replace(end, reason=again)]
        elif end.cause is EndCause.SCRIPT_FAILED:
            error = _script_error(generation)
            actions.append(FinishJob(state=JobState.FAILED, error=error, exit_code=exit_code(generation)))
        elif end.cause is EndCause.FINISHED and generation.kind is GenerationKind.TRAINING:
            actions.append(FinishJob(state=JobState.SUCCEEDED, exit_code=0))
        elif end.cause is EndCause.FINISHED:
            error = job.profile_error or (
                "the script ended while calibrating without handing in a profile: "
                "it must call set_optimizer of its varuna.Varuna object"
            )
            actions.append(FinishJob(state=JobState.FAILED, error=error))
    return Decision(reason=end.reason, actions=tuple(actions))


def _how_it_ended(job: JobView, generation: GenerationView, vms: Vms) -> EndGeneration:
    def end(cause: EndCause, reason: str) -> EndGeneration:
        return EndGeneration(number=generation.number, cause=cause, reason=reason)

    stop = generation.stop
    if stop is not None and stop.cause is EndCause.CANCELLED:
        return end(EndCause.CANCELLED, stop.reason)
    causes = {worker.cause for worker in generation.workers}
    if causes == {ExitCause.FINISHED} and job.profiled_at is not None and generation.kind is GenerationKind.CALIBRATION:
        return end(EndCause.PROFILED, "the profile is measured")
    if causes == {ExitCause.FINISHED}:
        return end(EndCause.FINISHED, "every rank finished")
    root = root_cause(generation)
    # Where a VM was lost or a rank was killed, its peers' scripts may raise: that is the consequence, not the cause.
    excused = stop is not None and stop.cause in CONSEQUENCE_OF
    if root is not None and root.cause is ExitCause.SCRIPT_FAILED and not excused:
        return end(EndCause.SCRIPT_FAILED, f"the script failed on rank {root.rank}: {last_line(root.error)}")
    if generation.kind is GenerationKind.CALIBRATION and job.profiled_at is not None:
        return end(EndCause.PROFILED, "the profile is measured")
    blames_the_job = stop is not None and stop.cause in (EndCause.SCRIPT_FAILED, EndCause.WORKER_FAILED)
    if stop is not None and not (blames_the_job and root is not None and was_taken(root)):
        return end(stop.cause, stop.reason)
    if root is not None:
        return end(end_cause(root), worker_line(root))
    vm_id, reason = unreachable_vm(generation, vms)
    if vm_id:
        return end(EndCause.UNREACHABLE, reason)
    return end(EndCause.WORKER_FAILED, worker_line(generation.workers[0]))


def _script_error(generation: GenerationView) -> str:
    failed = failed_script(generation)
    assert failed is not None
    return failed.error or f"the script failed on rank {failed.rank} without a traceback: see its log"
