"""No generation of a job is live: whether the next one starts, or why the job waits or ends."""

from __future__ import annotations

from dataclasses import replace

from varuna_manager.domain.actions import Decision, FinishJob, LiftQuarantine, RequeueJob, StartGeneration
from varuna_manager.domain.after_loss import Way, choose_way_on
from varuna_manager.domain.better_shape import gpu_limit, render_change
from varuna_manager.domain.causes import extract_last_line, find_exit_code
from varuna_manager.domain.clock import is_within
from varuna_manager.domain.devices import choose_devices, explain_waiting_for_vm
from varuna_manager.domain.holders import find_holders, may_find_holders
from varuna_manager.domain.limits import find_reached_limit
from varuna_manager.domain.observed import GenerationView, JobView, Proposal, Rules, Vms, WorkerView
from varuna_manager.domain.other_stages import find_movers
from varuna_manager.domain.reshaping import (
    PLANNED_STOPS,
    SURVIVABLE_EXITS,
    assume_held,
    may_reshape,
    plan_reshape,
)
from varuna_manager.domain.states import EndCause, ExitCause, GenerationKind, JobState, VmState
from varuna_proto.plan import Device, Plan
from varuna_proto.wording import count_are, count_of

_WAITING_FOR_WORKDIRS = "waiting for VMs that are preparing its workdir"
"""Without their number: a reason that changed with each of them would emit an event for each."""


def decide_start(now: float, job: JobView, vms: Vms, rules: Rules) -> Decision:
    settled = _decide_before_gpus(now, job, rules) or decide_in_place(now, job, vms, rules)
    if settled is not None:
        return settled
    awaited = _explain_wait_for_agent(now, job, vms, rules)
    if awaited:
        return Decision(reason=awaited, notable=False)
    devices = choose_devices(now, job, vms, rules)
    failed = job.setups.find_own_fault(rules.setup_failures) if job.generation is None else ""
    if failed:
        return fail_job(
            f"its workdir could not be prepared {failed}; the last error: {job.setup_error}", job.setup_exit_code
        )
    waiting = _explain_wait_for_gpus(now, job, devices, vms, rules)
    if waiting and job.quarantined and job.share != 0:
        return _lift_quarantine(job, waiting)
    if waiting:
        return Decision(reason=waiting)
    if job.profiled_at is None:
        return _start_calibration(now, job, devices[: job.global_batch], vms)
    return _decide_by_proposal(now, job, devices, vms, rules)


def _decide_before_gpus(now: float, job: JobView, rules: Rules) -> Decision | None:
    """What the job's own state, limits and past decide, whatever GPUs there are; None if they leave it open."""
    if job.state is JobState.CANCELLING:
        return Decision(reason="cancelled by the user", actions=(FinishJob(state=JobState.CANCELLED),))
    if job.profile_only and job.profiled_at is not None:
        return Decision(reason="the profile is measured", actions=(FinishJob(state=JobState.SUCCEEDED, exit_code=0),))
    reached = find_reached_limit(now, job.state, job.limits)
    if reached:
        return fail_job(f"over its limit: {reached}")
    setbacks = job.setbacks
    if len(setbacks.reasons) >= rules.breaker:
        return fail_job(_render_breaker_error(job), None if job.generation is None else find_exit_code(job.generation))
    if is_within(now, setbacks.last_at, setbacks.backoff_s):
        return Decision(reason=_render_backoff(job))
    if job.share == 0 and job.state is JobState.RUNNING:
        return Decision(reason=job.share_reason, actions=(RequeueJob(reason=job.share_reason),))
    if job.missing_secret:
        return Decision(reason=f"waiting for what its launch needs: {job.missing_secret}")
    return None


def decide_in_place(now: float, job: JobView, vms: Vms, rules: Rules) -> Decision | None:
    """Go on with the survivors of the last generation, or wait until it is known who survives; None: neither.

    A job in place has fewer devices than it could have where some survivors are left over, or others are free. It grows
    into them later, with a checkpoint.
    """
    ended = job.generation
    if ended is None or ended.live or ended.plan is None or job.state is not JobState.RUNNING:
        return None
    share_s = rules.share_minibatches * ended.longest_step_s
    if not may_reshape(ended) or not is_within(now, ended.ended_at or 0.0, rules.survivors_kept_s + share_s):
        return None
    most = gpu_limit(job)
    reshape = plan_reshape(ended.plan, ended.workers, job.survivors, most)
    can_stay = not any(worker.gives_only and worker.cause in SURVIVABLE_EXITS for worker in ended.workers)
    missing = _list_missing_survivors(now, job, ended, vms, rules) if can_stay else []
    if missing and (job.returning_vms or is_within(now, ended.ended_at or 0.0, rules.survivors_wait_s + share_s)):
        workers = assume_held(ended.workers, missing, now)
        hoped = plan_reshape(ended.plan, workers, {*job.survivors, *(one.device for one in missing)}, most)
        # Replicas that lose no worker come first in it: they are finishing their share of the step.
        if hoped is not None and (reshape is None or hoped.placement != reshape.placement):
            text = f"{ended.end_reason}: waiting for workers that may go on in place"
            return Decision(reason=text, claims=ended.devices, notable=False)
    chosen = choose_way_on(now, job, vms, rules)
    if chosen.keeping is not None:
        moved = _make_move(now, job, ended, chosen.keeping, rules)
        if moved is None:
            return None
        if _may_get_movers(now, job, ended, moved, vms=vms, rules=rules):
            return _wait_for_movers(ended, moved)
        return _start(now, replace(moved, reason=f"{moved.reason}; {chosen.reason}"), vms)
    if chosen.way is Way.CHANGE or reshape is None or len(reshape.placement) < job.min_gpus:
        return None
    reason = f"{ended.end_reason}; {len(reshape.placement)} of its workers go on from step {reshape.step}"
    start = StartGeneration(
        number=_next_number(job),
        kind=GenerationKind.TRAINING,
        placement=reshape.placement,
        plan=reshape.plan,
        candidates=(),
        reason=reason,
        in_place=True,
    )
    return _start(now, start, vms)


def _make_move(
    now: float, job: JobView, ended: GenerationView, proposal: Proposal, rules: Rules
) -> StartGeneration | None:
    """The start of the planner's shape in place, in which processes take other stages; None: they cannot."""
    movers = find_movers(now, job, ended, proposal, rules)
    if movers is None or proposal.plan is None:
        return None
    before, after = ended.plan, proposal.plan
    assert before is not None
    shapes = f"{before.p}×{before.d} to {after.p}×{after.d}"
    stay, new = len(movers.members), len(proposal.placement) - len(movers.members)
    what = (
        f"go on, and {new} new {'ones join' if new > 1 else 'one joins'} them"
        if new
        else "take the stages of another shape"
    )
    return StartGeneration(
        number=_next_number(job),
        kind=GenerationKind.TRAINING,
        placement=proposal.placement,
        plan=after,
        candidates=proposal.candidates,
        reason=f"{ended.end_reason}; {stay} of its workers {what}, {shapes}",
        in_place=True,
        holders=movers,
    )


def _may_get_movers(
    now: float, job: JobView, ended: GenerationView, moved: StartGeneration, *, vms: Vms, rules: Rules
) -> bool:
    """Whether more processes may still say that they can move, while copies stand for their stages."""
    uses_copies = moved.holders is not None and any(member.stages for member in moved.holders.members)
    if not uses_copies or not is_within(now, ended.ended_at or 0.0, rules.survivors_wait_s):
        return False
    return any(one.device not in moved.placement for one in _list_missing_survivors(now, job, ended, vms, rules))


def _wait_for_movers(ended: GenerationView, moved: StartGeneration) -> Decision:
    text = f"{ended.end_reason}: waiting for workers that may take other stages"
    return Decision(reason=text, claims=ended.devices | {*moved.placement}, notable=False)


def _list_missing_survivors(
    now: float, job: JobView, ended: GenerationView, vms: Vms, rules: Rules
) -> list[WorkerView]:
    """Workers that may still report that they hold their state."""
    missing = []
    for worker in ended.workers:
        vm = vms.get(worker.device.vm_id)
        if vm is None or vm.state is not VmState.READY or vm.cordoned or vm.quarantined:
            continue
        if worker.held_step is None and worker.cause in SURVIVABLE_EXITS:
            return []  # the job's workers cannot hold it
        is_returning = bool(job.returning_vms) and not vm.connected_since_start
        if worker.stopped:
            may_come = is_returning and worker.held_step is not None
        else:
            may_come = is_returning or (vm.connected and not vm.is_overdue(now, rules))
        if may_come:
            missing.append(worker)
    return missing


def _decide_by_proposal(now: float, job: JobView, devices: tuple[Device, ...], vms: Vms, rules: Rules) -> Decision:
    proposal = job.proposal
    if proposal is None:
        return Decision(reason="waiting for the planner", claims=frozenset(devices))
    if proposal.plan is not None:
        return _start_training(now, job, proposal.plan, proposal, vms=vms, rules=rules)
    if not proposal.possible:
        ended = job.generation
        is_short = ended is not None and ended.end_cause is EndCause.OUT_OF_MEMORY
        figures = f" ({ended.end_reason})" if ended is not None and is_short else ""
        return fail_job(f"no plan can ever fit: {proposal.reason}{figures}")
    if job.quarantined:
        return _lift_quarantine(job, f"no plan fits the other {count_of(len(devices), 'GPU')}")
    return Decision(reason=f"no plan fits {count_of(len(devices), 'GPU')}, waiting for more: {proposal.reason}")


def _render_breaker_error(job: JobView) -> str:
    given = job.setbacks.reasons
    reasons = "; ".join(f"{number}. {reason}" for number, reason in enumerate(given, 1))
    if len(set(given)) == 1:
        reasons = f"each time because {given[0]}"
    best = job.setbacks.best_step
    short = f"before they got beyond step {best}" if best else "without a completed step"
    return f"{count_of(len(job.setbacks.reasons), 'generation')} in a row ended {short}: {reasons}"


def _render_backoff(job: JobView) -> str:
    setbacks = job.setbacks
    failures = len(setbacks.reasons) + setbacks.errors_in_a_row + setbacks.excused
    last = setbacks.reasons[-1] if setbacks.reasons else "the script failed"
    if (setbacks.errors_in_a_row or setbacks.excused) and job.generation is not None:
        last = job.generation.end_reason
    return (
        f"{failures} generations failed in a row: waiting {setbacks.backoff_s:.0f} s before the next one "
        f"(the last: {last})"
    )


def _explain_wait_for_agent(now: float, job: JobView, vms: Vms, rules: Rules) -> str:
    """Why the job waits for an agent that has ended and may start again; empty: it does not.

    Its VM's memory has the state of a stage, and no other worker of the last generation holds that. Where an agent has
    ended that generation, the next agents may end before it is back, as at an upgrade of host after host.
    """
    ended = job.generation
    if ended is None or ended.live or ended.plan is None or job.state is not JobState.RUNNING:
        return ""
    if not is_within(now, ended.ended_at or 0.0, rules.agent_returns_s):
        return ""
    p = ended.plan.p
    held = [worker for worker in ended.workers if worker.held_step is not None]
    there = {worker.rank % p for worker in held if _is_usable(vms, worker)}
    for worker in held:
        vm_id = worker.device.vm_id
        has_left = worker.cause is ExitCause.AGENT_ENDED and not _is_usable(vms, worker)
        is_next = ended.end_cause is EndCause.AGENT_ENDED and vm_id in vms and not vms[vm_id].connected
        if (has_left or is_next) and worker.rank % p not in there:
            return f"{ended.end_reason}: waiting for the agent of VM {vm_id} to start again, whose memory has its state"
    return ""


def _is_usable(vms: Vms, worker: WorkerView) -> bool:
    vm = vms.get(worker.device.vm_id)
    return vm is not None and vm.usable


def _explain_wait_for_gpus(now: float, job: JobView, devices: tuple[Device, ...], vms: Vms, rules: Rules) -> str:
    if job.share == 0:
        return job.share_reason
    most = gpu_limit(job)
    if job.share_due and most is not None and len(devices) < most:
        are = "is" if len(devices) == 1 else "are"
        return f"{len(devices)} of its {most} GPUs {are} free: waiting for other jobs to release the rest"
    missing = job.setups.missing_gpus
    if len(devices) < job.min_gpus:
        if len(devices) + missing >= job.min_gpus:
            return _WAITING_FOR_WORKDIRS + _render_failed_setups(job)
        others = "1 other does" if job.unfit == 1 else f"{job.unfit} others do"
        unfit = f" ({others} not match its resources: {job.asks})" if job.unfit else ""
        text = f"{count_are(len(devices), 'GPU')} free for this job and it needs {job.min_gpus}: waiting for more"
        return text + _render_failed_setups(job) + unfit
    enough = job.max_gpus is not None and len(devices) >= job.max_gpus
    if missing and job.generation is None and not enough and job.prepared_s < rules.growth_prepare_s:
        return _WAITING_FOR_WORKDIRS
    if job.returning_vms and not enough:
        return "waiting for agents to reconnect after the manager's restart"
    still_early = is_within(now, job.created_at, rules.start_settle_s)
    if job.generation is None and job.coming_vms and not enough and still_early:
        return "waiting for requested VMs that are about to join"
    return "" if enough else explain_waiting_for_vm(now, job, devices, vms, rules)


def _render_failed_setups(job: JobView) -> str:
    failed = len(job.setups.failed_on)
    last = extract_last_line(job.setup_error)
    return f" (preparing its workdir failed on {count_of(failed, 'VM')}; the last error: {last})" if failed else ""


def _start_calibration(now: float, job: JobView, devices: tuple[Device, ...], vms: Vms) -> Decision:
    plan = Plan(p=1, d=len(devices), micro_batch=1, global_batch=job.global_batch)
    text = f"no profile yet: calibrating on {count_of(len(devices), 'GPU')}"
    if job.generation is not None:
        text += f" again, because {job.generation.end_reason}"
    start = StartGeneration(
        number=_next_number(job),
        kind=GenerationKind.CALIBRATION,
        placement=devices,
        plan=plan,
        candidates=(),
        reason=text,
    )
    return _start(now, start, vms)


def _explain_changed_plan(before: GenerationView | None, plan: Plan) -> str:
    """That the job takes another shape than the one for which its last generation stopped; empty: it does not."""
    if before is None or before.plan is None or before.end_cause not in PLANNED_STOPS:
        return ""
    change = render_change(before.plan, plan)
    return "" if change in before.end_reason else f"its GPUs are {plan.p * plan.d} by now: {change}"


def _start_training(now: float, job: JobView, plan: Plan, proposal: Proposal, *, vms: Vms, rules: Rules) -> Decision:
    before, holders = job.generation, None
    if before is not None and job.state is JobState.QUEUED and before.end_cause is EndCause.SCRIPT_FAILED:
        holders = find_holders(now, before, proposal.placement, vms, rules, are_in_memory=True)  # it is retried
    if before is not None and job.state is JobState.RUNNING:
        moved = _make_move(now, job, before, proposal, rules)
        if moved is not None:
            is_early = _may_get_movers(now, job, before, moved, vms=vms, rules=rules)
            return _wait_for_movers(before, moved) if is_early else _start(now, moved, vms)
        holders = find_holders(now, before, proposal.placement, vms, rules)
        awaited = _explain_wait_for_holders(now, job, before, proposal, vms=vms, rules=rules)
        if awaited:
            return Decision(reason=awaited, claims=frozenset(proposal.placement), notable=False)
    reason = before.end_reason if before is not None else "the job was submitted"
    chosen = choose_way_on(now, job, vms, rules)
    better = chosen.reason if chosen.way is Way.CHANGE else _explain_changed_plan(before, plan)
    if better:
        reason += f"; {better}"
    if before is not None and job.state is JobState.QUEUED:
        reason = f"its turn has come again (the last generation ended: {reason})"
    if before is None or before.kind is GenerationKind.CALIBRATION:
        reason += (
            f": {plan.p}×{plan.d} with micro-batch {plan.micro_batch} is predicted fastest, "
            f"{_render_seconds(plan.predicted_minibatch_s)} per mini-batch"
        )
    start = StartGeneration(
        number=_next_number(job),
        kind=GenerationKind.TRAINING,
        placement=proposal.placement,
        plan=plan,
        candidates=proposal.candidates,
        reason=reason,
        holders=holders,
    )
    return _start(now, start, vms)


def _explain_wait_for_holders(
    now: float, job: JobView, ended: GenerationView, proposal: Proposal, *, vms: Vms, rules: Rules
) -> str:
    """Why the job waits for workers that have not said yet what they hold; empty: it does not."""
    if not is_within(now, ended.ended_at or 0.0, rules.survivors_wait_s):
        return ""
    missing = _list_missing_survivors(now, job, ended, vms, rules)
    if not missing:
        return ""
    if may_find_holders(now, ended, missing, proposal.placement, vms, rules):
        return f"{ended.end_reason}: waiting for workers that may hold its state"
    # The others have the whole state, but new processes take longer than one that is still on its way to say that.
    hoped = replace(ended, workers=assume_held(ended.workers, missing, now))
    there = replace(job, survivors=job.survivors | {worker.device for worker in missing})
    if find_movers(now, there, hoped, proposal, rules) is not None:
        return f"{ended.end_reason}: waiting for workers that may take other stages"
    return ""


def _render_seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{seconds * 1e3:.3g} ms"


def _start(now: float, start: StartGeneration, vms: Vms) -> Decision:
    first, claims = start.placement[0].vm_id, frozenset(start.placement)
    if not vms[first].has_rendezvous_port(now):
        return Decision(reason=f"waiting for a rendezvous port of VM {first}", claims=claims)
    return Decision(reason=start.reason, actions=(start,), claims=claims)


def _next_number(job: JobView) -> int:
    return 1 if job.generation is None else job.generation.number + 1


def _lift_quarantine(job: JobView, why: str) -> Decision:
    vm_ids = tuple(sorted({device.vm_id for device in job.quarantined}))
    return Decision(
        reason=f"{why}: the quarantined VMs are needed", actions=(LiftQuarantine(vm_ids=vm_ids, reason=why),)
    )


def fail_job(error: str, exit_code: int | None = None) -> Decision:
    finish = FinishJob(state=JobState.FAILED, error=error, exit_code=exit_code)
    return Decision(reason=error.splitlines()[0], actions=(finish,))
