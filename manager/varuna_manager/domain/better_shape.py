"""Whether another shape is worth a morph while a generation runs: without its slow VMs, or with more devices."""

from __future__ import annotations

from collections.abc import Mapping

from varuna_manager.domain.blame import quarantine_until
from varuna_manager.domain.morphs import stable_step
from varuna_manager.domain.observed import (
    Decision,
    Device,
    GenerationView,
    JobView,
    Plan,
    Proposal,
    Quarantine,
    Rules,
    VmView,
)
from varuna_manager.domain.states import EndCause, GenerationKind, StopMode

Vms = Mapping[str, VmView]


def slow_vms(generation: GenerationView | None, vms: Vms) -> tuple[str, ...]:
    """The slow VMs of the generation."""
    if generation is None:
        return ()
    return tuple([vm_id for vm_id in generation.vm_ids if vm_id in vms and vms[vm_id].slow_ratio is not None])


def most_gpus(job: JobView) -> int | None:
    """What the job may have: by its own limit, and by its share among all jobs. None: any number."""
    limits = [limit for limit in (job.max_gpus, job.share) if limit is not None]
    return min(limits, default=None)


def give_up_gpus(job: JobView, generation: GenerationView) -> Decision | None:
    """It has more than its share: it saves, and goes on with fewer, or back to the queue."""
    if job.share is None or len(generation.workers) <= job.share:
        return None
    saves = generation.kind is GenerationKind.TRAINING and generation.last_step is not None
    mode = StopMode.SAVE_FIRST if saves else StopMode.LEAVE_NOW
    if job.share == 0:
        return Decision.stop(generation, mode, EndCause.PREEMPTED, f"preempted: {job.share_reason}")
    reason = f"{job.share} GPUs instead of {len(generation.workers)}: {job.share_reason}"
    return Decision.stop(generation, mode, EndCause.SHRUNK, reason)


def claims(now: float, job: JobView, generation: GenerationView, rules: Rules) -> frozenset[Device]:
    """Its own devices, and those that a better plan for it would use."""
    if job.proposal is None or not _gains(now, job, generation, rules):
        return generation.devices
    return generation.devices | frozenset(job.proposal.placement)


def leave_slow_vms(now: float, job: JobView, generation: GenerationView, vms: Vms, rules: Rules) -> Decision | None:
    """A plan without the slow VMs that is worth a morph: all others wait for them."""
    slow = slow_vms(generation, vms)
    if not slow or generation.last_step is None or generation.plan is None:
        return None
    proposal = job.proposal
    if proposal is None or proposal.plan is None:
        return None
    present = _slowed_rate(proposal, generation.plan, slow, vms)
    ratio = job.morphs.worthwhile_ratio(rules.slow_gain, job.fleet.stable_s(now))
    if proposal.plan.examples_per_s < ratio * present:
        return None
    told = "; ".join(f"VM {vm_id}: {vms[vm_id].slow_reason}" for vm_id in slow)
    before, after = generation.plan, proposal.plan
    reason = (
        f"{told}; without: {before.p}×{before.d} to {after.p}×{after.d}, {present:.1f} to {after.examples_per_s:.1f} "
        "examples/s predicted"
    )
    worst = max((vms[vm_id] for vm_id in slow), key=lambda vm: vm.quarantines)
    quarantine = Quarantine(vm_ids=slow, until=quarantine_until(now, worst, rules), reason=told)
    stop = Decision.stop(generation, StopMode.SAVE_FIRST, EndCause.SLOW_VM, reason)
    return Decision(reason=reason, actions=(quarantine, *stop.actions), claims=stop.claims)


def _slowed_rate(proposal: Proposal, plan: Plan, slow: tuple[str, ...], vms: Vms) -> float:
    """Examples/s of the present plan at the pace of its slowest VM."""
    return _present_rate(proposal, plan) / max(vms[vm_id].slow_ratio or 1.0 for vm_id in slow)


def why_not(now: float, job: JobView, generation: GenerationView, vms: Vms, rules: Rules) -> str:
    """Why the generation stays as it is although there is a slow VM or a free device; empty when there is neither."""
    return _why_not_leave(job, generation, vms) or _why_not_grow(now, job, generation, rules)


def _why_not_leave(job: JobView, generation: GenerationView, vms: Vms) -> str:
    slow = slow_vms(generation, vms)
    if not slow or generation.plan is None:
        return ""
    told = "; ".join(f"VM {vm_id}: {vms[vm_id].slow_reason}" for vm_id in slow)
    proposal = job.proposal
    if proposal is None or proposal.plan is None:
        return f"; {told}, but there is no plan without"
    plan, present = proposal.plan, _slowed_rate(proposal, generation.plan, slow, vms)
    return f"; {told}, but {plan.p}×{plan.d} without would give {plan.examples_per_s:.1f} examples/s, now {present:.1f}"


def grow(now: float, job: JobView, generation: GenerationView, gpus: int, rules: Rules) -> Decision | None:
    """More devices than are used, `gpus` in all, and a plan for them that is worth a morph.

    A generation is left to complete its first step before it grows: a stream of new VMs must not keep a job from
    ever making progress.
    """
    may_grow = generation.kind is GenerationKind.TRAINING and generation.last_step is not None
    if not may_grow or not _gains(now, job, generation, rules):
        return None
    assert job.proposal is not None
    assert job.proposal.plan is not None
    assert generation.plan is not None
    before, after = generation.plan, job.proposal.plan
    reason = (
        f"growth: {gpus} GPUs instead of {len(generation.workers)}, "
        f"{before.p}×{before.d} to {after.p}×{after.d}, "
        f"{_present_rate(job.proposal, before):.1f} to {after.examples_per_s:.1f} examples/s predicted "
        f"(a morph costs {job.morphs.cost_s:.1f} s)"
    )
    return Decision.stop(generation, StopMode.SAVE_FIRST, EndCause.GROWTH, reason)


def _why_not_grow(now: float, job: JobView, generation: GenerationView, rules: Rules) -> str:
    if job.proposal is None or generation.last_step is None or generation.plan is None:
        return ""
    after = job.proposal.plan
    if after is None:
        return f"; there are {len(job.devices)} GPUs for it, but no plan for them: {job.proposal.reason}"
    stable_s = job.fleet.stable_s(now)
    ratio = job.morphs.worthwhile_ratio(rules.growth_ratio, stable_s)
    stable = f", the fleet is stable for {stable_step(stable_s):.0f} s" if stable_step(stable_s) else ""
    return (
        f"; {after.p}×{after.d} on {len(job.devices)} GPUs would give {after.examples_per_s:.1f} examples/s instead of "
        f"{_present_rate(job.proposal, generation.plan):.1f}, less than "
        f"{ratio:.2f} times as much (a morph costs {job.morphs.cost_s:.1f} s{stable})"
    )


def _gains(now: float, job: JobView, generation: GenerationView, rules: Rules) -> bool:
    if job.proposal is None or job.proposal.plan is None or generation.plan is None:
        return False
    more = len(job.devices) > len(generation.workers)
    ratio = job.morphs.worthwhile_ratio(rules.growth_ratio, job.fleet.stable_s(now))
    return more and job.proposal.plan.examples_per_s >= ratio * _present_rate(job.proposal, generation.plan)


def _present_rate(proposal: Proposal, plan: Plan) -> float:
    """Examples/s of the plan that runs, by the profile of the proposal: its own prediction may be from an older one."""
    return plan.examples_per_s if proposal.present_examples_per_s is None else proposal.present_examples_per_s
