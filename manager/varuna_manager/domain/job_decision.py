"""What to do about one job: start, stop or end a generation, finish the job, or wait; and why.

A job has at most one live generation. Training is synchronous, so one rank that is confirmed stopped means that its
generation cannot complete another step: it may be ended, and the next one started, at once (DESIGN section 4). The
decision is made again after every change, so each step here is small: stop, then end, then start.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from varuna_manager.domain import hang
from varuna_manager.domain.better_shape import (
    Vms,
    claims,
    give_up_gpus,
    grow,
    leave_slow_vms,
    most_gpus,
    slow_vms,
    why_not,
)
from varuna_manager.domain.blame import unreachable_vm, with_blame
from varuna_manager.domain.causes import (
    CONSEQUENCE_OF,
    end_cause,
    exit_code,
    last_line,
    root_cause,
    was_taken,
    worker_line,
)
from varuna_manager.domain.clock import is_within
from varuna_manager.domain.devices import next_devices, worth_waiting_for
from varuna_manager.domain.ending import all_stopped
from varuna_manager.domain.limits import over_limit
from varuna_manager.domain.observed import (
    Action,
    AskStacks,
    Decision,
    Device,
    EndGeneration,
    FinishJob,
    GenerationView,
    JobView,
    LiftQuarantine,
    NoteHang,
    Plan,
    Proposal,
    RequeueJob,
    Rules,
    StartGeneration,
    VmView,
    WorkerView,
)
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

_DEADLINE_MARGIN_S = 1.0
"""Before a VM's deadline, by which its workers must have left."""
_SHORTEST_SAVE_S = 0.2


def decide_job(now: float, job: JobView, vms: Vms, rules: Rules) -> Decision:
    """The next thing to do for the job. `vms` holds every VM that the job's generation or devices name."""
    return with_blame(now, job.generation, _decide(now, job, vms, rules), vms, rules)


def _decide(now: float, job: JobView, vms: Vms, rules: Rules) -> Decision:
    if job.state in TERMINAL_JOB_STATES:
        return Decision(reason=f"the job is {job.state}")
    generation = job.generation
    if job.flaw and job.state is not JobState.CANCELLING:
        return _flawed(job, vms)
    if generation is None or not generation.live:
        return _between_generations(now, job, vms, rules)
    if all(worker.stopped for worker in generation.workers):
        return all_stopped(job, generation, vms)
    if generation.state is GenerationState.STOPPING:
        return _stopping(job, generation, vms)
    return _running(now, job, generation, vms, rules)


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
    return may_morph and bool(devices) and (len(devices) > len(generation.workers) or bool(slow_vms(generation, vms)))


def _flawed(job: JobView, vms: Vms) -> Decision:
    """Nothing can be done with the job but to end it."""
    generation = job.generation
    if generation is None or not generation.live:
        return _fail(job.flaw)
    if all(worker.stopped for worker in generation.workers):
        return all_stopped(job, generation, vms)
    if generation.state is GenerationState.STOPPING:
        text = f"{job.flaw}: waiting for its workers to stop"
        return Decision(reason=text, claims=generation.devices, notable=False)
    return Decision.stop(generation, StopMode.LEAVE_NOW, EndCause.WORKER_FAILED, job.flaw)


# ---------------------------------------------------------------- no generation is live


def _between_generations(now: float, job: JobView, vms: Vms, rules: Rules) -> Decision:
    if job.state is JobState.CANCELLING:
        return Decision(reason="cancelled by the user", actions=(FinishJob(state=JobState.CANCELLED),))
    if job.profile_only and job.profiled_at is not None:
        return Decision(reason="the profile is there", actions=(FinishJob(state=JobState.SUCCEEDED, exit_code=0),))
    reached = over_limit(now, job.state, job.limits)
    if reached:
        return _fail(f"over its limit: {reached}")
    setbacks = job.setbacks
    if len(setbacks.reasons) >= rules.breaker:
        return _fail(_breaker_error(job), None if job.generation is None else exit_code(job.generation))
    if is_within(now, setbacks.last_at, setbacks.backoff_s):
        return Decision(reason=_backing_off(job))
    if job.share == 0 and job.state is JobState.RUNNING:
        return Decision(reason=job.share_reason, actions=(RequeueJob(reason=job.share_reason),))
    if job.missing_secret:
        return Decision(reason=f"waiting for what its launch needs: {job.missing_secret}")
    devices = next_devices(job, vms, rules)
    failed = job.setups.own_fault(rules.setup_failures) if job.generation is None else ""
    if failed:
        return _fail(f"its workdir could not be made ready {failed}, the last: {job.setup_error}", job.setup_exit_code)
    waiting = _too_few(now, job, devices, vms, rules)
    if waiting and job.quarantined and job.share != 0:
        return _lift(job, waiting)
    if waiting:
        return Decision(reason=waiting)
    claims = frozenset(devices)
    if job.profiled_at is None:
        return _start_calibration(job, devices[: job.global_batch], vms)
    proposal = job.proposal
    if proposal is None:
        return Decision(reason="waiting for the planner", claims=claims)
    if proposal.plan is None:
        if not proposal.possible:
            return _fail(f"no plan can ever fit: {proposal.reason}")
        if job.quarantined:
            return _lift(job, f"no plan fits the other {len(devices)} GPUs")
        return Decision(reason=f"no plan fits {len(devices)} GPUs, waiting for more: {proposal.reason}")
    return _start_training(job, proposal.plan, proposal, vms)


def _breaker_error(job: JobView) -> str:
    given = job.setbacks.reasons
    reasons = "; ".join(f"{number}. {reason}" for number, reason in enumerate(given, 1))
    if len(set(given)) == 1:
        reasons = f"each time since {given[0]}"
    best = job.setbacks.best_step
    short = f"before they got beyond step {best}" if best else "without a completed step"
    return f"{len(job.setbacks.reasons)} generations in a row ended {short}: {reasons}"


def _backing_off(job: JobView) -> str:
    setbacks = job.setbacks
    failures = len(setbacks.reasons) + setbacks.errors_in_a_row + setbacks.excused
    last = setbacks.reasons[-1] if setbacks.reasons else "the script failed"
    if (setbacks.errors_in_a_row or setbacks.excused) and job.generation is not None:
        last = job.generation.end_reason
    return (
        f"{failures} generations failed in a row: waiting {setbacks.backoff_s:.0f} s before the next one "
        f"(the last: {last})"
    )


def _too_few(now: float, job: JobView, devices: tuple[Device, ...], vms: Vms, rules: Rules) -> str:
    if job.share == 0:
        return job.share_reason
    most = most_gpus(job)
    if job.share_due and most is not None and len(devices) < most:
        return f"{len(devices)} of its {most} GPUs are free: waiting until other jobs have given up the others"
    if len(devices) < job.min_gpus:
        unfit = f" ({job.unfit} others are not as it asks: {job.asks})" if job.unfit else ""
        text = f"{len(devices)} GPUs are free for this job and it needs {job.min_gpus}: waiting for more"
        return text + _setups(job) + unfit
    enough = job.max_gpus is not None and len(devices) >= job.max_gpus
    missing = job.setups.missing_gpus
    if missing and job.generation is None and not enough and job.prepared_s < rules.growth_prepare_s:
        return f"waiting for {missing} GPUs of VMs where its workdir is being made ready"
    if job.returning_vms and not enough:
        return "waiting for agents that are about to come back after the manager's restart"
    still_early = is_within(now, job.created_at, rules.start_settle_s)
    if job.generation is None and job.coming_vms and not enough and still_early:
        return "waiting for VMs that were requested and are about to join"
    return "" if enough else worth_waiting_for(now, job, devices, vms, rules)


def _setups(job: JobView) -> str:
    """Without how many VMs are at it: a reason that changed with each of them would be an event for each."""
    setups, notes = job.setups, []
    if setups.missing_gpus or setups.under_way:
        notes.append("its workdir is being made ready on VMs where it will run")
    if setups.failed_on:
        notes.append(f"to make it ready failed on {len(setups.failed_on)} VMs, the last: {last_line(job.setup_error)}")
    return f" ({'; '.join(notes)})" if notes else ""


def _start_calibration(job: JobView, devices: tuple[Device, ...], vms: Vms) -> Decision:
    plan = Plan(p=1, d=len(devices), micro_batch=1, global_batch=job.global_batch)
    text = f"no profile yet: calibrating on {len(devices)} GPUs"
    if job.generation is not None:
        text += f" again, since {job.generation.end_reason}"
    return _start(job, GenerationKind.CALIBRATION, devices, plan, (), text, vms)


def _start_training(job: JobView, plan: Plan, proposal: Proposal, vms: Vms) -> Decision:
    before = job.generation
    reason = before.end_reason if before is not None else "the job was submitted"
    if before is not None and job.state is JobState.QUEUED:
        reason = f"its turn has come again (the last generation ended: {reason})"
    if before is None or before.kind is GenerationKind.CALIBRATION:
        reason += (
            f": {plan.p}×{plan.d} with micro-batch {plan.micro_batch} is predicted fastest, "
            f"{_seconds(plan.predicted_minibatch_s)} per mini-batch"
        )
    return _start(job, GenerationKind.TRAINING, proposal.placement, plan, proposal.candidates, reason, vms)


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{seconds * 1e3:.3g} ms"


def _start(
    job: JobView,
    kind: GenerationKind,
    placement: tuple[Device, ...],
    plan: Plan,
    candidates: tuple[Mapping[str, Any], ...],
    reason: str,
    vms: Vms,
) -> Decision:
    first = placement[0].vm_id
    if not vms[first].has_rendezvous_port:
        return Decision(reason=f"waiting for a rendezvous port of VM {first}", claims=frozenset(placement))
    number = job.generation.number + 1 if job.generation is not None else 1
    start = StartGeneration(
        number=number, kind=kind, placement=placement, plan=plan, candidates=candidates, reason=reason
    )
    return Decision(reason=reason, actions=(start,), claims=frozenset(placement))


def _lift(job: JobView, why: str) -> Decision:
    vm_ids = tuple(sorted({device.vm_id for device in job.quarantined}))
    return Decision(
        reason=f"{why}: the quarantined VMs are needed", actions=(LiftQuarantine(vm_ids=vm_ids, reason=why),)
    )


def _fail(error: str, exit_code: int | None = None) -> Decision:
    finish = FinishJob(state=JobState.FAILED, error=error, exit_code=exit_code)
    return Decision(reason=error.splitlines()[0], actions=(finish,))


# ---------------------------------------------------------------- stopping


def _stopping(job: JobView, generation: GenerationView, vms: Vms) -> Decision:
    stop = generation.stop
    assert stop is not None, f"generation {generation.number} of {job.id} is stopping and nobody asked it to"
    if job.state is JobState.CANCELLING:
        saves = job.cancel_saves and stop.mode is StopMode.SAVE_FIRST
        if stop.cause is not EndCause.CANCELLED or (stop.mode is StopMode.SAVE_FIRST and not saves):
            mode = StopMode.SAVE_FIRST if saves else StopMode.LEAVE_NOW
            return Decision.stop(generation, mode, EndCause.CANCELLED, "cancelled by the user")
    root = root_cause(generation)
    taken = root if root is not None and was_taken(root) else None
    lost = worker_line(taken) if taken is not None else _lost_vm(generation, vms)
    if lost and stop.cause in (EndCause.SCRIPT_FAILED, EndCause.WORKER_FAILED):
        # A script that raised, or a rank that left, a moment before a VM's or an agent's end was known: that is the
        # consequence.
        cause = EndCause.VM_LOST if taken is None else end_cause(taken)
        return Decision.stop(generation, StopMode.LEAVE_NOW, cause, lost)
    if lost and stop.mode is StopMode.SAVE_FIRST and taken is None:
        return Decision.stop(
            generation, StopMode.LEAVE_NOW, EndCause.VM_LOST, f"{lost}, while saving since {stop.reason}"
        )
    text = f"{stop.reason}: waiting for its workers to stop"
    waiting = Decision(reason=text, claims=generation.devices, notable=False)
    stopped = [worker for worker in generation.workers if worker.stopped]
    if stop.cause in (EndCause.CANCELLED, EndCause.SCRIPT_FAILED, EndCause.LIMIT) or not stopped:
        return waiting
    if any(worker.cause is ExitCause.FINISHED for worker in stopped):
        return waiting  # it was at its end anyway: the other ranks may be writing the result
    if stop.mode is StopMode.SAVE_FIRST and all(worker.cause is ExitCause.GENERATION_ENDED for worker in stopped):
        # Those have written their part: the others may be committing the checkpoint of it. One that hangs in there is
        # killed by its agent when the grace is over.
        return waiting
    if root is not None and root.cause is ExitCause.SCRIPT_FAILED and stop.cause not in CONSEQUENCE_OF:
        return waiting  # all ranks stopped, the job fails with this traceback
    end = EndGeneration(number=generation.number, cause=stop.cause, reason=stop.reason)
    return Decision(reason=stop.reason, actions=(end,), claims=generation.devices)


# ---------------------------------------------------------------- running


def _running(now: float, job: JobView, generation: GenerationView, vms: Vms, rules: Rules) -> Decision:
    if job.state is JobState.CANCELLING:
        saves = job.cancel_saves and generation.kind is GenerationKind.TRAINING and generation.last_step is not None
        mode = StopMode.SAVE_FIRST if saves else StopMode.LEAVE_NOW
        return Decision.stop(generation, mode, EndCause.CANCELLED, "cancelled by the user")
    decision = (
        _broken(now, generation, vms, rules)
        or _calibrated(now, job, generation, rules)
        or _leaving_vm(now, job, generation, vms)
        or _over_limit(now, job, generation)
        or _hang(now, job, generation, vms, rules)
        or give_up_gpus(job, generation)
    )
    storm = _storm(now, job, rules)
    if decision is None and not storm:
        decision = leave_slow_vms(now, job, generation, vms, rules) or grow(
            now, job, generation, len(next_devices(job, vms, rules)), rules
        )
    if decision is not None:
        return decision
    # The step is left out: a reason that changed with every step would be an event with every step.
    stays = why_not(now, job, generation, vms, rules)
    if stays and storm:
        stays = f"; {storm}"
    reason = f"generation {generation.number} is under way{stays}"
    return Decision(reason=reason, claims=claims(now, job, generation, rules), notable=bool(stays))


def _storm(now: float, job: JobView, rules: Rules) -> str:
    """A job that runs waits with what it may do until the fleet is quiet; one that does not run has nothing to lose."""
    return job.fleet.storm(
        now,
        losses=rules.storm_losses,
        window_s=rules.storm_window_s,
        quiet_s=rules.storm_quiet_s,
        wait_s=rules.storm_wait_s,
    )


def _broken(now: float, generation: GenerationView, vms: Vms, rules: Rules) -> Decision | None:
    """A rank has stopped, or its VM is lost: this generation cannot complete another step."""
    root = root_cause(generation)
    if root is not None:
        reason = worker_line(root)
        if root.cause is ExitCause.SCRIPT_FAILED:
            reason = f"the script failed on rank {root.rank}: {last_line(root.error)}"
        return Decision.stop(generation, StopMode.LEAVE_NOW, end_cause(root), reason)
    lost = _lost_vm(generation, vms)
    if lost:
        return Decision.stop(generation, StopMode.LEAVE_NOW, EndCause.VM_LOST, lost)
    normal_exit = ExitCause.FINISHED
    odd = [worker for worker in generation.workers if worker.stopped and worker.cause is not normal_exit]
    if not odd:
        return None
    if all(worker.cause is ExitCause.PEER_LOST for worker in odd):
        return _peer_lost(now, generation, odd, vms, rules)
    return Decision.stop(generation, StopMode.LEAVE_NOW, EndCause.WORKER_FAILED, worker_line(odd[0]))


def _peer_lost(now: float, generation: GenerationView, left: Sequence[WorkerView], vms: Vms, rules: Rules) -> Decision:
    """Ranks have left because of another, which did not say that it has stopped: its VM or the network may be why."""
    first = min(worker.stopped_at or 0.0 for worker in left)
    running = [vms[vm_id] for vm_id in generation.running_on if vm_id in vms]
    # An agent that has just come back is about to report what became of its workers meanwhile.
    back_s = min((vm.ready_for_s for vm in running if vm.connected), default=math.inf)
    line = worker_line(left[0])
    if is_within(now, first, rules.root_cause_wait_s) or back_s < rules.root_cause_wait_s:
        return Decision(reason=f"{line}: waiting to hear what happened to it", claims=generation.devices)
    silent = [vm for vm in running if not vm.connected or vm.silent_s > 2 * rules.heartbeat_interval_s]
    if silent:
        # Two witnesses that are independent of each other: a peer, and the VM's own silence.
        reason = f"{line}, and nothing is heard from VM {silent[0].id}"
        return Decision.stop(generation, StopMode.LEAVE_NOW, EndCause.VM_LOST, reason)
    vm_id, reason = unreachable_vm(generation, vms)
    if vm_id:
        return Decision.stop(generation, StopMode.LEAVE_NOW, EndCause.UNREACHABLE, reason)
    return Decision.stop(generation, StopMode.LEAVE_NOW, EndCause.WORKER_FAILED, line)


def _lost_vm(generation: GenerationView, vms: Vms) -> str:
    """Which VM is lost while workers of the generation may still run there; empty: none."""
    for vm_id in generation.running_on:
        vm = vms.get(vm_id)
        if vm is None or vm.state in (VmState.LOST, VmState.GONE):
            reason = vm.reason if vm is not None and vm.reason else "it is not known any more"
            return f"VM {vm_id} is lost: {reason}"
    return ""


def _calibrated(now: float, job: JobView, generation: GenerationView, rules: Rules) -> Decision | None:
    if generation.kind is not GenerationKind.CALIBRATION or job.profiled_at is None:
        return None
    reason = "the profile is measured"
    if any(worker.stopped for worker in generation.workers):
        end = EndGeneration(number=generation.number, cause=EndCause.PROFILED, reason=reason)
        return Decision(reason=reason, actions=(end,), claims=generation.devices)
    if not is_within(now, job.profiled_at, rules.profile_exit_wait_s):
        return Decision.stop(generation, StopMode.LEAVE_NOW, EndCause.PROFILED, reason)
    text = f"{reason}: waiting for the calibrating workers to leave"
    return Decision(reason=text, claims=generation.devices, notable=False)


def _leaving_vm(now: float, job: JobView, generation: GenerationView, vms: Vms) -> Decision | None:
    """Its VMs that are about to leave: the first deadline is that of all, for they finish the step together."""
    there = [vms[vm_id] for vm_id in generation.running_on]
    leaving = sorted((vm for vm in there if vm.state is VmState.DRAINING), key=_leaves_at)
    if not leaving:
        return None
    reason = "; ".join(f"VM {vm.id} is leaving: {vm.reason or 'it is draining'}" for vm in leaving)
    saves = generation.kind is GenerationKind.TRAINING and generation.last_step is not None
    predicted = generation.plan.predicted_minibatch_s if generation.plan is not None else 0.0
    left_s = _leaves_at(leaving[0]) - now - _DEADLINE_MARGIN_S
    rest_s = max(0.0, predicted - (now - generation.progress_at))
    needed_s = max(rest_s + _SHORTEST_SAVE_S, job.morphs.save_s)
    if saves and left_s < needed_s:
        reason += (
            f"; too soon to save: {max(left_s, 0.0):.1f} s are left, and the rest of the step ({rest_s:.1f} s) and a "
            f"save take {needed_s:.1f} s: what was done since the last checkpoint is done again"
        )
        saves = False
    mode = StopMode.SAVE_FIRST if saves else StopMode.LEAVE_NOW
    return Decision.stop(generation, mode, EndCause.NOTICE, reason)


def _over_limit(now: float, job: JobView, generation: GenerationView) -> Decision | None:
    """It saves what it has; with the next look, when all its workers have stopped, the job fails."""
    reached = over_limit(now, job.state, job.limits)
    if not reached:
        return None
    saves = generation.kind is GenerationKind.TRAINING and generation.last_step is not None
    mode = StopMode.SAVE_FIRST if saves else StopMode.LEAVE_NOW
    return Decision.stop(generation, mode, EndCause.LIMIT, f"over its limit: {reached}")


def _leaves_at(vm: VmView) -> float:
    return math.inf if vm.leave_by is None else vm.leave_by


def _hang(now: float, job: JobView, generation: GenerationView, vms: Vms, rules: Rules) -> Decision | None:
    """First the ranks are asked where they stand; when they have told, or not in time, the generation ends."""
    reason = hang.hangs(now, job, generation, rules)
    if not reason:
        return None
    stacks, claims = job.stacks, generation.devices
    if stacks is None or stacks.generation != generation.number:
        text = f"{reason}: asking its ranks where they stand"
        return Decision(reason=text, actions=(AskStacks(number=generation.number),), claims=claims)
    if not hang.all_told(generation, stacks) and is_within(now, stacks.asked_at, rules.stacks_wait_s):
        text = f"{reason}: waiting for its ranks to tell where they stand"
        return Decision(reason=text, claims=claims, notable=False)
    suspect = hang.find_suspect(generation, stacks)
    actions: list[Action] = []
    if suspect is not None:
        reason += f"; rank {suspect.rank} on VM {suspect.vm_id} is waited for: {suspect.why}"
        quarantine = hang.quarantine_for_hangs(now, generation, vms.get(suspect.vm_id), suspect, rules)
        actions += [] if quarantine is None else [quarantine]
    else:
        reason += "; no rank stands out"
    silent_s = now - generation.progress_at
    note = NoteHang(number=generation.number, reason=reason, suspect=suspect, silent_s=silent_s)
    stop = Decision.stop(generation, StopMode.LEAVE_NOW, EndCause.HANG, reason)
    return Decision(reason=reason, actions=(note, *actions, *stop.actions), claims=claims)
