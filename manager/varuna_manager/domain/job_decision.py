"""What to do about one job: start, stop or end a generation, finish the job, or wait; and why.

A job has at most one live generation. Training is synchronous, so one rank that is confirmed stopped means that its
generation cannot complete another step: it may be ended, and the next one started, at once (DESIGN section 4). The
decision is made again after every change, so each step here is small: stop, then end, then start.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from varuna_manager.domain.better_shape import Vms, claims, grow, leave_slow_vms, slow_vms, why_not
from varuna_manager.domain.observed import (
    Action,
    Decision,
    Device,
    EndGeneration,
    FinishJob,
    GenerationView,
    JobView,
    LiftQuarantine,
    Plan,
    Proposal,
    Rules,
    StartGeneration,
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

_ROOT_CAUSES = frozenset({ExitCause.SCRIPT_FAILED, ExitCause.KILLED, ExitCause.LAUNCH_FAILED})
_FIRST_STEPS = 5.0
"""Predicted mini-batches that a first step may take: nothing is warm yet."""
_CONSEQUENCE_OF = frozenset({EndCause.VM_LOST, EndCause.HANG, EndCause.WORKER_FAILED})
"""Stops that make healthy scripts raise (their peers vanish): a script failure after one of these says nothing."""


def decide_job(now: float, job: JobView, vms: Vms, rules: Rules) -> Decision:
    """The next thing to do for the job. `vms` holds every VM that the job's generation or devices name."""
    if job.state in TERMINAL_JOB_STATES:
        return Decision(reason=f"the job is {job.state}")
    generation = job.generation
    if generation is None or not generation.live:
        return _between_generations(now, job, vms, rules)
    if all(worker.stopped for worker in generation.workers):
        return _all_stopped(job, generation)
    if generation.state is GenerationState.STOPPING:
        return _stopping(job, generation, vms)
    return _running(now, job, generation, vms, rules)


def next_devices(job: JobView, vms: Vms, rules: Rules) -> tuple[Device, ...]:
    """The devices that the job's next generation would be planned for, its present ones first.

    While a generation runs, new devices count once they have been there for `growth_settle_s`; while others are
    younger than that, growing waits for them, though not for ever.
    """
    live = job.generation is not None and job.generation.live
    own = job.generation.devices if job.generation is not None else frozenset()
    devices = sorted(job.devices, key=lambda device: (device not in own, device))
    if live:
        # What the job would do without its slow VMs; where they are all it has, there is nothing to ask.
        slow = slow_vms(job.generation, vms)
        devices = [device for device in devices if device.vm_id not in slow]
        ages = {device: vms[device.vm_id].ready_for_s for device in devices if device not in own}
        young = [age for age in ages.values() if age < rules.growth_settle_s]
        if young and max(ages.values()) < 3 * rules.growth_settle_s:
            devices = [device for device in devices if device in own]
        else:
            devices = [d for d in devices if d in own or ages[d] >= rules.growth_settle_s]
    return tuple(devices[: job.max_gpus])


def wants_plan(job: JobView, devices: tuple[Device, ...], vms: Vms) -> bool:
    """Whether the planner must be asked before `decide_job` can answer."""
    if job.profiled_at is None or len(devices) < job.min_gpus or job.state not in (JobState.QUEUED, JobState.RUNNING):
        return False
    if job.profile_only:
        return False
    generation = job.generation
    if generation is None or not generation.live:
        return bool(devices)
    may_morph = generation.kind is GenerationKind.TRAINING and generation.state is GenerationState.RUNNING
    return may_morph and bool(devices) and (len(devices) > len(generation.workers) or bool(slow_vms(generation, vms)))


# ---------------------------------------------------------------- no generation is live


def _between_generations(now: float, job: JobView, vms: Vms, rules: Rules) -> Decision:
    if job.state is JobState.CANCELLING:
        return Decision(reason="cancelled by the user", actions=(FinishJob(state=JobState.CANCELLED),))
    if job.profile_only and job.profiled_at is not None:
        return Decision(reason="the profile is there", actions=(FinishJob(state=JobState.SUCCEEDED),))
    failures = job.setbacks.reasons
    if len(failures) >= rules.breaker:
        return _fail(_breaker_error(job))
    if now < job.setbacks.last_at + _backoff_s(len(failures)):
        reason = f"{len(failures)} generations failed in a row: waiting {_backoff_s(len(failures)):.0f} s"
        return Decision(reason=f"{reason} before the next one (the last: {failures[-1]})")
    devices = next_devices(job, vms, rules)
    waiting = _too_few(now, job, devices, rules)
    if waiting and job.quarantined:
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


def _backoff_s(failures: int) -> float:
    """The first failure is tried again at once; then 1, 2, 4, ... up to 30 seconds."""
    return 0.0 if failures <= 1 else min(2.0 ** (failures - 2), 30.0)


def _too_few(now: float, job: JobView, devices: tuple[Device, ...], rules: Rules) -> str:
    if len(devices) < job.min_gpus:
        return f"{len(devices)} GPUs are free for this job and it needs {job.min_gpus}: waiting for more"
    enough = job.max_gpus is not None and len(devices) >= job.max_gpus
    if job.returning_vms and not enough:
        return "waiting for agents that are about to come back after the manager's restart"
    still_early = now - job.created_at < rules.start_settle_s
    if job.generation is None and job.coming_vms and not enough and still_early:
        return "waiting for VMs that were requested and are about to join"
    return ""


def _start_calibration(job: JobView, devices: tuple[Device, ...], vms: Vms) -> Decision:
    plan = Plan(p=1, d=len(devices), micro_batch=1, global_batch=job.global_batch)
    text = f"no profile yet: calibrating on {len(devices)} GPUs"
    if job.generation is not None:
        text += f" again, since {job.generation.end_reason}"
    return _start(job, GenerationKind.CALIBRATION, devices, plan, (), text, vms)


def _start_training(job: JobView, plan: Plan, proposal: Proposal, vms: Vms) -> Decision:
    before = job.generation
    reason = before.end_reason if before is not None else "the job was submitted"
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


def _fail(error: str) -> Decision:
    return Decision(reason=error.splitlines()[0], actions=(FinishJob(state=JobState.FAILED, error=error),))


# ---------------------------------------------------------------- every rank has stopped


def _all_stopped(job: JobView, generation: GenerationView) -> Decision:
    end = _how_it_ended(job, generation)
    actions: list[Action] = [end]
    if job.state is not JobState.CANCELLING:
        if end.cause is EndCause.SCRIPT_FAILED:
            actions.append(FinishJob(state=JobState.FAILED, error=_script_error(generation)))
        elif end.cause is EndCause.FINISHED and generation.kind is GenerationKind.TRAINING:
            actions.append(FinishJob(state=JobState.SUCCEEDED))
        elif end.cause is EndCause.FINISHED:
            error = job.profile_error or (
                "the script ended while calibrating without handing in a profile: "
                "it must call set_optimizer of its varuna.Varuna object"
            )
            actions.append(FinishJob(state=JobState.FAILED, error=error))
    return Decision(reason=end.reason, actions=tuple(actions))


def _how_it_ended(job: JobView, generation: GenerationView) -> EndGeneration:
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
    root = _root_cause(generation)
    # Where a VM was lost or a rank was killed, its peers' scripts may raise: that is the consequence, not the cause.
    excused = stop is not None and stop.cause in _CONSEQUENCE_OF
    if root is not None and root.cause is ExitCause.SCRIPT_FAILED and not excused:
        return end(EndCause.SCRIPT_FAILED, f"the script failed on rank {root.rank}: {_last_line(root.error)}")
    if generation.kind is GenerationKind.CALIBRATION and job.profiled_at is not None:
        return end(EndCause.PROFILED, "the profile is measured")
    if stop is not None and not (stop.cause is EndCause.SCRIPT_FAILED and root is not None and _is_gone(root)):
        return end(stop.cause, stop.reason)
    if root is not None:
        return end(_end_cause(root), _worker_line(root))
    return end(EndCause.WORKER_FAILED, _worker_line(generation.workers[0]))


def _root_cause(generation: GenerationView) -> WorkerView | None:
    """The rank whose stop explains the others': one that went with its VM, else the first that failed by itself."""
    for worker in generation.workers:
        if _is_gone(worker):
            return worker
    failed = [worker for worker in generation.workers if worker.cause in _ROOT_CAUSES]
    if not failed:
        return None
    return min(failed, key=lambda w: (w.stopped_at or 0.0, w.cause is not ExitCause.SCRIPT_FAILED, w.rank))


def _is_gone(worker: WorkerView) -> bool:
    """Whether it went with its VM."""
    return worker.cause is ExitCause.VM_GONE or (worker.lease_over and worker.cause is None)


def _end_cause(worker: WorkerView) -> EndCause:
    if _is_gone(worker):
        return EndCause.VM_LOST
    return EndCause.SCRIPT_FAILED if worker.cause is ExitCause.SCRIPT_FAILED else EndCause.WORKER_FAILED


def _script_error(generation: GenerationView) -> str:
    root = _root_cause(generation)
    assert root is not None
    return root.error or f"the script failed on rank {root.rank} without a traceback: see its log"


def _worker_line(worker: WorkerView) -> str:
    where = f"rank {worker.rank} on VM {worker.device.vm_id}"
    if worker.cause is ExitCause.VM_GONE:
        return worker.error or f"VM {worker.device.vm_id} is gone"
    if worker.lease_over and worker.cause is None:
        return f"VM {worker.device.vm_id} was out of reach for a whole lease"
    texts = {
        ExitCause.KILLED: "was killed",
        ExitCause.LAUNCH_FAILED: "never came up",
        ExitCause.PEER_LOST: "lost a peer",
        ExitCause.GENERATION_ENDED: "left before its time",
        ExitCause.SCRIPT_FAILED: "failed",
        ExitCause.FINISHED: "finished before the others",
    }
    text = texts[worker.cause] if worker.cause is not None else "stopped"
    detail = _last_line(worker.error)
    return f"{where} {text}" + (f": {detail}" if detail else "")


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else ""


# ---------------------------------------------------------------- stopping


def _stopping(job: JobView, generation: GenerationView, vms: Vms) -> Decision:
    stop = generation.stop
    assert stop is not None, f"generation {generation.number} of {job.id} is stopping and nobody asked it to"
    if job.state is JobState.CANCELLING and stop.cause is not EndCause.CANCELLED:
        return Decision.stop(generation, StopMode.LEAVE_NOW, EndCause.CANCELLED, "cancelled by the user")
    root = _root_cause(generation)
    lost = _worker_line(root) if root is not None and _is_gone(root) else _lost_vm(generation, vms)
    if lost and stop.cause is EndCause.SCRIPT_FAILED:
        # A script that raised a moment before its VM's or a peer's VM's end was known: that is the consequence.
        return Decision.stop(generation, StopMode.LEAVE_NOW, EndCause.VM_LOST, lost)
    if lost and stop.mode is StopMode.SAVE_FIRST and not (root is not None and _is_gone(root)):
        return Decision.stop(
            generation, StopMode.LEAVE_NOW, EndCause.VM_LOST, f"{lost}, while saving since {stop.reason}"
        )
    text = f"{stop.reason}: waiting for its workers to stop"
    waiting = Decision(reason=text, claims=generation.devices, notable=False)
    stopped = [worker for worker in generation.workers if worker.stopped]
    if stop.cause in (EndCause.CANCELLED, EndCause.SCRIPT_FAILED) or not stopped:
        return waiting
    if any(worker.cause is ExitCause.FINISHED for worker in stopped):
        return waiting  # it was at its end anyway: the other ranks may be writing the result
    if stop.mode is StopMode.SAVE_FIRST and all(worker.cause is ExitCause.GENERATION_ENDED for worker in stopped):
        # Those have written their part: the others may be committing the checkpoint of it. One that hangs in there is
        # killed by its agent when the grace is over.
        return waiting
    if root is not None and root.cause is ExitCause.SCRIPT_FAILED and stop.cause not in _CONSEQUENCE_OF:
        return waiting  # all ranks stopped, the job fails with this traceback
    end = EndGeneration(number=generation.number, cause=stop.cause, reason=stop.reason)
    return Decision(reason=stop.reason, actions=(end,), claims=generation.devices)


# ---------------------------------------------------------------- running


def _running(now: float, job: JobView, generation: GenerationView, vms: Vms, rules: Rules) -> Decision:
    if job.state is JobState.CANCELLING:
        return Decision.stop(generation, StopMode.LEAVE_NOW, EndCause.CANCELLED, "cancelled by the user")
    decision = (
        _broken(now, generation, vms, rules)
        or _calibrated(now, job, generation, rules)
        or _leaving_vm(generation, vms)
        or _hang(now, job, generation, rules)
        or leave_slow_vms(now, job, generation, vms, rules)
        or grow(job, generation, len(next_devices(job, vms, rules)), rules)
    )
    if decision is not None:
        return decision
    # The step is left out: a reason that changed with every step would be an event with every step.
    stays = why_not(job, generation, vms, rules)
    reason = f"generation {generation.number} is under way{stays}"
    return Decision(reason=reason, claims=claims(job, generation, rules), notable=bool(stays))


def _broken(now: float, generation: GenerationView, vms: Vms, rules: Rules) -> Decision | None:
    """A rank has stopped, or its VM is lost: this generation cannot complete another step."""
    root = _root_cause(generation)
    if root is not None:
        reason = _worker_line(root)
        if root.cause is ExitCause.SCRIPT_FAILED:
            reason = f"the script failed on rank {root.rank}: {_last_line(root.error)}"
        return Decision.stop(generation, StopMode.LEAVE_NOW, _end_cause(root), reason)
    lost = _lost_vm(generation, vms)
    if lost:
        return Decision.stop(generation, StopMode.LEAVE_NOW, EndCause.VM_LOST, lost)
    normal_exit = ExitCause.FINISHED
    odd = [worker for worker in generation.workers if worker.stopped and worker.cause is not normal_exit]
    if not odd:
        return None
    first = min(worker.stopped_at or 0.0 for worker in odd)
    if all(worker.cause is ExitCause.PEER_LOST for worker in odd) and now - first < rules.root_cause_wait_s:
        return Decision(
            reason=f"{_worker_line(odd[0])}: waiting to hear what happened to it", claims=generation.devices
        )
    return Decision.stop(generation, StopMode.LEAVE_NOW, EndCause.WORKER_FAILED, _worker_line(odd[0]))


def _lost_vm(generation: GenerationView, vms: Vms) -> str:
    """Which VM is lost while workers of the generation may still run there; empty: none."""
    for vm_id in sorted({worker.device.vm_id for worker in generation.workers if not worker.stopped}):
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
    if now - job.profiled_at > rules.profile_exit_wait_s:
        return Decision.stop(generation, StopMode.LEAVE_NOW, EndCause.PROFILED, reason)
    text = f"{reason}: waiting for the calibrating workers to leave"
    return Decision(reason=text, claims=generation.devices, notable=False)


def _leaving_vm(generation: GenerationView, vms: Vms) -> Decision | None:
    for vm_id in sorted({worker.device.vm_id for worker in generation.workers if not worker.stopped}):
        if vms[vm_id].state is VmState.DRAINING:
            saves = generation.kind is GenerationKind.TRAINING and generation.last_step is not None
            mode = StopMode.SAVE_FIRST if saves else StopMode.LEAVE_NOW
            reason = f"VM {vm_id} is leaving: {vms[vm_id].reason or 'it is draining'}"
            return Decision.stop(generation, mode, EndCause.NOTICE, reason)
    return None


def _hang(now: float, job: JobView, generation: GenerationView, rules: Rules) -> Decision | None:
    predicted = generation.plan.predicted_minibatch_s if generation.plan is not None else 0.0
    if generation.kind is GenerationKind.CALIBRATION:
        limit, what = rules.calibration_timeout_s, "no profile"
    elif generation.last_step is None:
        limit, what = rules.first_step_timeout_s + _FIRST_STEPS * predicted, "no first step"
    else:
        limit, what = max(rules.hang_minimum_s, rules.hang_steps * predicted), f"no step after {generation.last_step}"
    # Scripts write results, and more, for longer than we can know: a limit that was too short once is stretched.
    limit *= 2.0 ** min(job.setbacks.hangs, rules.hang_doublings)
    if any(worker.cause is ExitCause.FINISHED for worker in generation.workers):
        limit = max(limit, rules.finish_timeout_s)
    if now - generation.progress_at <= limit:
        return None
    return Decision.stop(generation, StopMode.LEAVE_NOW, EndCause.HANG, f"hang: {what} for {limit:.0f} s")
