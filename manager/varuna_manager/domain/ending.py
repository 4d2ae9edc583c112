"""Every rank of a generation has stopped: why it ended, and whether the job ends with it."""

from __future__ import annotations

from dataclasses import replace

from varuna_manager.domain.actions import Action, Decision, EndGeneration, FinishJob, RaiseMargin
from varuna_manager.domain.blame import find_unreachable_vm
from varuna_manager.domain.causes import (
    CONSEQUENCE_OF,
    choose_end_cause,
    describe_handover,
    extract_last_line,
    find_exit_code,
    find_failed_script,
    find_root_cause,
    is_taken_away,
    render_worker_exit,
)
from varuna_manager.domain.memory_margin import MOST_LESSONS, learn_margin
from varuna_manager.domain.observed import GenerationView, JobView, Vms
from varuna_manager.domain.states import EndCause, ExitCause, GenerationKind, JobState


def decide_end(job: JobView, generation: GenerationView, vms: Vms) -> Decision:
    end = _how_it_ended(job, generation, vms)
    reason = end.reason
    actions: list[Action] = [end]
    if job.state is not JobState.CANCELLING:
        if end.cause is EndCause.OUT_OF_MEMORY:
            actions = _answer_shortage(job, generation, end)
        elif end.cause is EndCause.SCRIPT_FAILED and job.may_restart:
            number, limit = job.setbacks.errors + 1, job.max_restarts_on_errors
            again = f"{end.reason}: restart {number} of {limit} (max_restarts_on_errors)"
            actions = [replace(end, reason=again)]
        elif end.cause is EndCause.SCRIPT_FAILED:
            error = _script_error(generation)
            actions.append(FinishJob(state=JobState.FAILED, error=error, exit_code=find_exit_code(generation)))
        elif end.cause is EndCause.FINISHED and generation.kind is GenerationKind.TRAINING:
            note = _describe_success(generation)
            reason = f"succeeded, {note}" if note else reason
            actions.append(FinishJob(state=JobState.SUCCEEDED, exit_code=0, note=note))
        elif end.cause is EndCause.FINISHED:
            error = job.profile_error or (
                "the script ended while calibrating without handing in a profile: "
                "it must call set_optimizer of its varuna.Varuna object"
            )
            reason = extract_last_line(error)
            actions.append(FinishJob(state=JobState.FAILED, error=error))
    return Decision(reason=reason, actions=tuple(actions))


def _answer_shortage(job: JobView, generation: GenerationView, end: EndGeneration) -> list[Action]:
    """When memory was short, the job gets a new plan, with more room; it fails if there is no plan to change, or if
    plans have been changed too often."""
    if generation.kind is GenerationKind.CALIBRATION and job.profiled_at is None:
        ways = "give it GPUs with more memory, more cut-points, or an optimizer that takes less (fused=True)"
        return [end, _fail_for_memory(generation, f"{end.reason}, while it calibrated: {ways}")]
    lesson = learn_margin(generation, job.margin)
    if lesson is None or generation.plan is None:
        return [replace(end, reason=f"{end.reason}; new processes have the memory that it held")]
    reason = f"{end.reason}; {lesson.render(generation.plan.p)}"
    if lesson.margin.lessons > MOST_LESSONS:
        again = f"{end.reason}, after {MOST_LESSONS} plans that each allowed for more"
        ways = "make micro-batches smaller (plan.micro_batch), or give it GPUs with more memory"
        return [end, _fail_for_memory(generation, f"{again}: {ways}")]
    return [replace(end, reason=reason), RaiseMargin(number=generation.number, reason=reason, lesson=lesson)]


def _fail_for_memory(generation: GenerationView, line: str) -> FinishJob:
    root = find_root_cause(generation)
    error = f"{root.error}\n{line}" if root is not None and root.error else line
    return FinishJob(state=JobState.FAILED, error=error, exit_code=find_exit_code(generation))


def _describe_success(generation: GenerationView) -> str:
    """What a person has to know of it, as the rest of "succeeded, "; empty: nothing."""
    last_step, since, skipped = generation.last_step, generation.not_finite_from, generation.steps_skipped
    notes = []
    if since is not None:
        count = 1 if last_step is None else max(1, last_step - since + 1)
        last = "its last step" if count == 1 else f"its last {count} steps"
        total = f" ({skipped} skipped in all)" if skipped else ""
        notes.append(f"but the loss or gradient of {last} was not finite{total}")
    elif skipped:
        steps = "1 of its steps was" if skipped == 1 else f"{skipped} of its steps were"
        notes.append(f"but {steps} skipped for a loss or gradient that was not finite")
    if last_step is None:
        at = f" began at step {generation.resumed_step} and" if generation.resumed_step else ""
        notes.append(f"{'and' if notes else 'but'} generation {generation.number}{at} ran no step")
    return ", ".join(notes)


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
        without = "" if generation.kind is GenerationKind.TRAINING else " without handing in a profile"
        return end(EndCause.FINISHED, f"every rank finished{without}")
    root = find_root_cause(generation)
    # Where a VM was lost or a rank was killed, its peers' scripts may raise: that is the consequence, not the cause.
    excused = stop is not None and stop.cause in CONSEQUENCE_OF
    if root is not None and root.cause is ExitCause.SCRIPT_FAILED and not excused:
        return end(EndCause.SCRIPT_FAILED, f"the script failed on rank {root.rank}: {extract_last_line(root.error)}")
    if generation.kind is GenerationKind.CALIBRATION and job.profiled_at is not None:
        return end(EndCause.PROFILED, "the profile is measured")
    blames_the_job = stop is not None and stop.cause in (EndCause.SCRIPT_FAILED, EndCause.WORKER_FAILED)
    if stop is not None and not (blames_the_job and root is not None and is_taken_away(root)):
        return end(stop.cause, stop.reason)
    if root is not None:
        return end(choose_end_cause(root), render_worker_exit(root))
    if handover := describe_handover(generation):
        return end(EndCause.HANDED_OVER, handover)
    vm_id, reason = find_unreachable_vm(generation, vms)
    if vm_id:
        return end(EndCause.UNREACHABLE, reason)
    return end(EndCause.WORKER_FAILED, render_worker_exit(generation.workers[0]))


def _script_error(generation: GenerationView) -> str:
    failed = find_failed_script(generation)
    assert failed is not None
    return failed.error or f"the script failed on rank {failed.rank} without a traceback: see its log"
