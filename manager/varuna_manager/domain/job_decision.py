"""What to do about one job: start, stop or end a generation, finish the job, or wait; and why.

A job has at most one live generation. Training is synchronous, so one rank that is confirmed stopped means that its
generation cannot complete another step: it may be ended, and the next one started, at once (DESIGN section 4). The
decision is made again after every change, so each step here is small: stop, then end, then start.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from varuna_manager.domain import hang
from varuna_manager.domain.actions import Action, Decision, EndGeneration, RecordHang, RequestStacks
from varuna_manager.domain.better_shape import (
    decide_growth,
    decide_leaving_slow_vms,
    decide_shrinking,
    explain_staying,
    gpu_limit,
    list_claims,
    list_slow_vms,
    may_improve,
)
from varuna_manager.domain.blame import add_blame, find_unreachable_vm
from varuna_manager.domain.causes import (
    CONSEQUENCE_OF,
    choose_end_cause,
    describe_handover,
    extract_last_line,
    find_root_cause,
    is_taken_away,
    render_worker_exit,
)
from varuna_manager.domain.clock import is_within
from varuna_manager.domain.devices import choose_devices
from varuna_manager.domain.ending import decide_end
from varuna_manager.domain.leaving_step import predict_parting_s, predict_rest_s
from varuna_manager.domain.limits import find_reached_limit
from varuna_manager.domain.observed import GenerationView, JobView, Rules, Vms, VmView, WorkerView
from varuna_manager.domain.other_stages import may_leave_state
from varuna_manager.domain.reshaping import may_stay_in_place
from varuna_manager.domain.starting import decide_start, fail_job
from varuna_manager.domain.states import (
    TERMINAL_JOB_STATES,
    EndCause,
    ExitCause,
    GenerationKind,
    GenerationState,
    JobState,
    StopMode,
    VmState,
)
from varuna_manager.domain.witnesses import find_witnessed_loss
from varuna_proto.plan import Device

_DEADLINE_MARGIN_S = 1.0
"""Before a VM's deadline, by which its workers must have left."""
LEFT_AHEAD_S = 30.0
"""A VM with notice is left at least that long before it goes, if the notice is as long: what is announced in minutes
may come sooner."""
_LONGER_STEP = 1.25
"""How much longer than the mean of its generation a step may take."""
_SHORTEST_SAVE_S = 0.2
_WORK_BEFORE_LEAVING = {
    StopMode.SAVE_FIRST: "saved",
    StopMode.HOLD_FIRST: "finished its step",
    StopMode.HOLD_WITHIN_STEP: "finished its micro-batches",
}
_REDIAL_S = 0.5
"""In which an agent whose stream has broken, and that lives, is back."""


def decide_job(now: float, job: JobView, vms: Vms, rules: Rules) -> Decision:
    """The next thing to do for the job. `vms` holds every VM that the job's generation or devices name."""
    return add_blame(now, job.generation, _decide(now, job, vms, rules), vms, rules)


def _decide(now: float, job: JobView, vms: Vms, rules: Rules) -> Decision:
    if job.state in TERMINAL_JOB_STATES:
        return Decision(reason=f"the job is {job.state}")
    generation = job.generation
    if job.flaw and job.state is not JobState.CANCELLING:
        return _decide_flawed(job, vms)
    if generation is None or not generation.live:
        return decide_start(now, job, vms, rules)
    if all(worker.stopped for worker in generation.workers):
        return decide_end(job, generation, vms)
    if generation.state is GenerationState.STOPPING:
        return _decide_while_stopping(now, job, generation, vms, rules)
    return _decide_while_running(now, job, generation, vms, rules)


def wants_plan(job: JobView, devices: tuple[Device, ...], vms: Vms) -> bool:
    """Whether the planner must be asked before `decide_job` can answer."""
    if job.profiled_at is None or len(devices) < job.min_gpus or job.state not in (JobState.QUEUED, JobState.RUNNING):
        return False
    if job.profile_only or job.missing_secret:
        return False
    generation = job.generation
    if generation is None or not generation.live:
        return bool(devices)
    may_morph = generation.kind is GenerationKind.TRAINING and generation.state is GenerationState.RUNNING
    return (
        may_morph and bool(devices) and (may_improve(generation, len(devices)) or bool(list_slow_vms(generation, vms)))
    )


def _decide_flawed(job: JobView, vms: Vms) -> Decision:
    """End the job: it cannot go on."""
    generation = job.generation
    if generation is None or not generation.live:
        return fail_job(job.flaw)
    if all(worker.stopped for worker in generation.workers):
        return decide_end(job, generation, vms)
    if generation.state is GenerationState.STOPPING:
        text = f"{job.flaw}: waiting for its workers to stop"
        return Decision(reason=text, claims=generation.devices, notable=False)
    return Decision.stop_generation(generation, StopMode.LEAVE_NOW, EndCause.WORKER_FAILED, job.flaw)


# ---------------------------------------------------------------- stopping


def _decide_while_stopping(now: float, job: JobView, generation: GenerationView, vms: Vms, rules: Rules) -> Decision:
    stop = generation.stop
    assert stop is not None, f"generation {generation.number} of {job.id} is stopping, but no stop was requested"
    if job.state is JobState.CANCELLING:
        saves = job.cancel_saves and stop.mode is not StopMode.LEAVE_NOW
        if stop.cause is not EndCause.CANCELLED or (stop.mode is StopMode.SAVE_FIRST and not saves):
            mode = StopMode.SAVE_FIRST if saves else StopMode.LEAVE_NOW
            return Decision.stop_generation(generation, mode, EndCause.CANCELLED, "cancelled by the user")
    root = find_root_cause(generation)
    taken = root if root is not None and is_taken_away(root) else None
    lost = render_worker_exit(taken) if taken is not None else _describe_lost_vm(now, generation, vms, rules)
    if lost and stop.cause in (EndCause.SCRIPT_FAILED, EndCause.WORKER_FAILED):
        # A script raised, or a rank left, just before the end of a VM or an agent was known: that end is the cause.
        cause = EndCause.VM_LOST if taken is None else choose_end_cause(taken)
        return Decision.stop_generation(generation, StopMode.LEAVE_NOW, cause, lost)
    if lost and stop.mode is not StopMode.LEAVE_NOW and taken is None:
        work = _WORK_BEFORE_LEAVING[stop.mode]
        return Decision.stop_generation(
            generation, StopMode.LEAVE_NOW, EndCause.VM_LOST, f"{lost}, while it {work} because {stop.reason}"
        )
    text = f"{stop.reason}: waiting for its workers to stop"
    waiting = Decision(reason=text, claims=generation.devices, notable=False)
    stopped = [worker for worker in generation.workers if worker.stopped]
    whole = (EndCause.CANCELLED, EndCause.SCRIPT_FAILED, EndCause.OUT_OF_MEMORY, EndCause.LIMIT)
    if stop.cause in whole or not stopped:
        return waiting
    if any(worker.cause is ExitCause.FINISHED for worker in stopped):
        return waiting  # it was finishing anyway: the other ranks may be writing the result
    is_in_order = all(worker.cause is ExitCause.GENERATION_ENDED for worker in stopped)
    if stop.mode is not StopMode.LEAVE_NOW and is_in_order:
        # These ranks have written their parts or hold their state, and the others may be committing the checkpoint. A
        # rank that hangs there is killed by its agent when the grace is over.
        return waiting
    if root is not None and root.cause is ExitCause.SCRIPT_FAILED and stop.cause not in CONSEQUENCE_OF:
        return waiting  # all ranks stopped, the job fails with this traceback
    end = EndGeneration(number=generation.number, cause=stop.cause, reason=stop.reason)
    return Decision(reason=stop.reason, actions=(end,), claims=generation.devices)


# ---------------------------------------------------------------- running


def _decide_while_running(now: float, job: JobView, generation: GenerationView, vms: Vms, rules: Rules) -> Decision:
    if job.state is JobState.CANCELLING and not (job.cancel_saves and generation.is_taking_state):
        mode = generation.stop_mode if job.cancel_saves else StopMode.LEAVE_NOW
        return Decision.stop_generation(generation, mode, EndCause.CANCELLED, "cancelled by the user")
    decision = (
        _stop_broken(now, generation, vms, rules)
        or _stop_calibrated(now, job, generation, rules)
        or _stop_before_vm_leaves(now, job, generation, vms)
        or _stop_over_limit(now, job, generation)
        or _stop_hanging(now, job, generation, vms, rules)
        or decide_shrinking(job, generation)
    )
    storm = _describe_storm(now, job, rules)
    if decision is None and not storm:
        decision = decide_leaving_slow_vms(now, job, generation, vms, rules) or decide_growth(
            now, job, generation, len(choose_devices(now, job, vms, rules)), rules
        )
    if decision is not None:
        return decision
    # The step is left out: a reason that changed with every step would be an event with every step.
    stays = _explain_training_on(now, job, generation, vms) or explain_staying(now, job, generation, vms, rules)
    if stays and storm:
        stays = f"; {storm}"
    reason = f"generation {generation.number} is under way{stays}"
    return Decision(reason=reason, claims=list_claims(now, job, generation, rules), notable=bool(stays))


def _describe_storm(now: float, job: JobView, rules: Rules) -> str:
    """A running job changes its shape by choice only when the fleet is quiet. One that does not run has nothing to
    lose."""
    return job.fleet.describe_storm(
        now,
        losses=rules.storm_losses,
        window_s=rules.storm_window_s,
        quiet_s=rules.storm_quiet_s,
        wait_s=rules.storm_wait_s,
    )


def _stop_broken(now: float, generation: GenerationView, vms: Vms, rules: Rules) -> Decision | None:
    """A rank has stopped, or its VM is lost: this generation cannot complete another step."""
    root = find_root_cause(generation)
    if root is not None:
        reason = render_worker_exit(root)
        if root.cause is ExitCause.SCRIPT_FAILED:
            reason = f"the script failed on rank {root.rank}: {extract_last_line(root.error)}"
        return Decision.stop_generation(generation, StopMode.LEAVE_NOW, choose_end_cause(root), reason)
    lost = _describe_lost_vm(now, generation, vms, rules)
    if lost:
        return Decision.stop_generation(generation, StopMode.LEAVE_NOW, EndCause.VM_LOST, lost)
    normal_exit = ExitCause.FINISHED
    odd = [worker for worker in generation.workers if worker.stopped and worker.cause is not normal_exit]
    if not odd:
        return None
    if handover := describe_handover(generation):
        return Decision.stop_generation(generation, StopMode.LEAVE_NOW, EndCause.HANDED_OVER, handover)
    if all(worker.cause is ExitCause.PEER_LOST for worker in odd):
        return _stop_after_lost_peer(now, generation, odd, vms, rules)
    return Decision.stop_generation(generation, StopMode.LEAVE_NOW, EndCause.WORKER_FAILED, render_worker_exit(odd[0]))


def _stop_after_lost_peer(
    now: float, generation: GenerationView, left: Sequence[WorkerView], vms: Vms, rules: Rules
) -> Decision:
    """Ranks have left because of a peer whose stop was not reported: its VM or the network may be the cause."""
    first = min(worker.stopped_at or 0.0 for worker in left)
    running = [vms[vm_id] for vm_id in generation.running_on if vm_id in vms]
    # An agent that has just reconnected is about to report the exits of its workers.
    back_s = min((vm.ready_for_s(now) for vm in running if vm.connected), default=math.inf)
    line = render_worker_exit(left[0])
    # A broken stream is a second witness at once. An agent that lives redials within a moment.
    has_broken = any(not vm.connected and vm.connected_since_start for vm in running)
    wait_s = min(_REDIAL_S, rules.root_cause_wait_s) if has_broken else rules.root_cause_wait_s
    if is_within(now, first, wait_s) or back_s < rules.root_cause_wait_s:
        return Decision(reason=f"{line}: waiting for a report of what happened to it", claims=generation.devices)
    silent = [vm for vm in running if not vm.connected or vm.silent_s(now) > 2 * rules.heartbeat_interval_s]
    if silent:
        # Two independent witnesses: a peer, and the VM's own silence.
        reason = f"{line}, and VM {silent[0].id} is silent"
        return Decision.stop_generation(generation, StopMode.LEAVE_NOW, EndCause.VM_LOST, reason)
    vm_id, reason = find_unreachable_vm(generation, vms)
    if vm_id:
        return Decision.stop_generation(generation, StopMode.LEAVE_NOW, EndCause.UNREACHABLE, reason)
    return Decision.stop_generation(generation, StopMode.LEAVE_NOW, EndCause.WORKER_FAILED, line)


def _describe_lost_vm(now: float, generation: GenerationView, vms: Vms, rules: Rules) -> str:
    """The VM that is lost, or given up for this job, while workers of the generation may still run there, and why;
    empty: none."""
    for vm_id in generation.running_on:
        vm = vms.get(vm_id)
        if vm is None or vm.state in (VmState.LOST, VmState.GONE):
            reason = vm.reason if vm is not None and vm.reason else "it is no longer known"
            return f"VM {vm_id} is lost: {reason}"
    return find_witnessed_loss(now, generation, vms, rules)


def _stop_calibrated(now: float, job: JobView, generation: GenerationView, rules: Rules) -> Decision | None:
    if generation.kind is not GenerationKind.CALIBRATION or job.profiled_at is None:
        return None
    reason = "the profile is measured"
    if any(worker.stopped for worker in generation.workers):
        end = EndGeneration(number=generation.number, cause=EndCause.PROFILED, reason=reason)
        return Decision(reason=reason, actions=(end,), claims=generation.devices)
    if not is_within(now, job.profiled_at, rules.profile_exit_wait_s):
        return Decision.stop_generation(generation, StopMode.LEAVE_NOW, EndCause.PROFILED, reason)
    text = f"{reason}: waiting for the calibrating workers to leave"
    return Decision(reason=text, claims=generation.devices, notable=False)


def _stop_before_vm_leaves(now: float, job: JobView, generation: GenerationView, vms: Vms) -> Decision | None:
    """Stop before its VMs leave. The first deadline counts for all, because they finish the step together."""
    leaving = _list_leaving(generation, vms)
    if not leaving or _explain_training_on(now, job, generation, vms):
        return None
    reason = "; ".join(f"VM {vm.id} is leaving: {vm.reason or 'it is draining'}" for vm in leaving)
    left_s = _leaves_at(leaving[0]) - now - _DEADLINE_MARGIN_S
    rest_s = predict_rest_s(now, generation, since=generation.progress_at)
    mode, haste = _choose_mode_before_deadline(job, generation, vms, left_s=left_s, rest_s=rest_s)
    return Decision.stop_generation(generation, mode, EndCause.NOTICE, reason + haste)


def _list_leaving(generation: GenerationView, vms: Vms) -> list[VmView]:
    """Its VMs that are about to leave, the first one first."""
    there = [vms[vm_id] for vm_id in generation.running_on]
    return sorted((vm for vm in there if vm.state is VmState.DRAINING), key=_leaves_at)


def _explain_training_on(now: float, job: JobView, generation: GenerationView, vms: Vms) -> str:
    """Why it does not leave yet, although VMs of it are about to go; empty: it leaves, or there are none.

    A VM that the provider will take is there, and paid for, until then. One that is drained, and so cordoned, is
    wanted elsewhere.
    """
    leaving = _list_leaving(generation, vms)
    if not leaving or any(vm.notice_deadline is None or vm.cordoned for vm in leaving):
        return ""
    left_s = _leaves_at(leaving[0]) - now
    step_ends_s = predict_rest_s(now, generation, since=generation.progress_at)
    needed_s = LEFT_AHEAD_S
    if step_ends_s <= left_s - _DEADLINE_MARGIN_S:  # it leaves between steps
        needed_s += step_ends_s + _LONGER_STEP * generation.step_s
    if left_s <= needed_s or not may_stay_in_place(generation, vms, job.min_gpus, gpu_limit(job)):
        return ""  # what only they hold must be saved, or moves while nobody trains: the sooner, the safer
    return f"; VM {leaving[0].id} has notice, but there is time to train on"


def _choose_mode_before_deadline(
    job: JobView, generation: GenerationView, vms: Vms, *, left_s: float, rest_s: float
) -> tuple[StopMode, str]:
    """How the workers leave before the deadline; and why in haste, if they do.

    Args:
        left_s: time until the deadline.
        rest_s: predicted time until the end of the step.
    """
    if not generation.has_new_state:
        return StopMode.LEAVE_NOW, ""  # the next one begins with what this one was to begin with
    within = f"; in the middle of its step ({rest_s:.0f} s are left)"
    if may_stay_in_place(generation, vms, job.min_gpus, gpu_limit(job)):
        if left_s >= rest_s:
            return StopMode.HOLD_FIRST, ""
        if job.may_leave_steps and left_s >= predict_parting_s(generation):
            return StopMode.HOLD_WITHIN_STEP, within
        return StopMode.LEAVE_NOW, (
            f"; too soon to finish the step: {max(left_s, 0.0):.1f} s are left, but it takes another {rest_s:.1f} s"
        )
    needed_s = max(rest_s + _SHORTEST_SAVE_S, job.morphs.save_s)
    if left_s >= needed_s:
        return StopMode.SAVE_FIRST, ""
    if left_s >= predict_parting_s(generation) and may_leave_state(job, generation, vms):
        return StopMode.HOLD_WITHIN_STEP, f"{within}: others get what only its VMs have"
    return StopMode.LEAVE_NOW, (
        f"; too soon to save: {max(left_s, 0.0):.1f} s are left, but the rest of the step ({rest_s:.1f} s) and a "
        f"save take {needed_s:.1f} s, so the steps since the last checkpoint are done again"
    )


def _stop_over_limit(now: float, job: JobView, generation: GenerationView) -> Decision | None:
    """Stop a job that has reached a limit. It saves, and fails when all its workers have stopped."""
    reached = find_reached_limit(now, job.state, job.limits)
    if not reached or generation.is_taking_state:
        return None
    return Decision.stop_generation(generation, generation.stop_mode, EndCause.LIMIT, f"over its limit: {reached}")


def _leaves_at(vm: VmView) -> float:
    return math.inf if vm.leave_by is None else vm.leave_by


def _stop_hanging(now: float, job: JobView, generation: GenerationView, vms: Vms, rules: Rules) -> Decision | None:
    """End a hanging generation, after its ranks have reported their stacks or the time for that is over."""
    reason = hang.describe_hang(now, job, generation, rules)
    if not reason:
        return None
    stacks, claims = job.stacks, generation.devices
    # Older ones are of an earlier suspicion, after which it has trained on.
    is_asked = stacks is not None and stacks.generation == generation.number
    if stacks is None or not is_asked or stacks.asked_at < generation.progress_at:
        text = f"{reason}: asking its ranks for their stacks"
        return Decision(reason=text, actions=(RequestStacks(number=generation.number),), claims=claims)
    if not hang.have_all_answered(generation, stacks) and is_within(now, stacks.asked_at, rules.stacks_wait_s):
        text = f"{reason}: waiting for the stacks of its ranks"
        return Decision(reason=text, claims=claims, notable=False)
    suspect = hang.find_suspect(generation, stacks)
    actions: list[Action] = []
    if suspect is not None:
        reason += f"; the others wait for rank {suspect.rank} on VM {suspect.vm_id}: {suspect.why}"
        quarantine = hang.find_quarantine(now, generation, vms.get(suspect.vm_id), suspect, rules)
        actions += [] if quarantine is None else [quarantine]
    else:
        reason += "; no rank stands out"
    silent_s = now - generation.progress_at
    note = RecordHang(number=generation.number, reason=reason, suspect=suspect, silent_s=silent_s)
    stop = Decision.stop_generation(generation, StopMode.LEAVE_NOW, EndCause.HANG, reason)
    return Decision(reason=reason, actions=(note, *actions, *stop.actions), claims=claims)
