"""Whether another shape is worth a morph while a generation runs: without its slow VMs, or with more devices."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from varuna_manager.domain.actions import Decision
from varuna_manager.domain.holders import choose_planned_stop
from varuna_manager.domain.leaving_step import may_leave_within_step, render_gain_within_step
from varuna_manager.domain.moving_state import predict_growth_pause_s
from varuna_manager.domain.newcomers import WantedNewcomers, judge_newcomers
from varuna_manager.domain.observed import GenerationView, JobView, Proposal, Rules, Vms
from varuna_manager.domain.other_stages import list_at_door, may_take_other_stages
from varuna_manager.domain.quarantine import make_quarantine
from varuna_manager.domain.sending_ahead import has_sent_ahead, is_sending_awaited
from varuna_manager.domain.states import EndCause, GenerationKind, StopMode
from varuna_planner.liveput.morph_cost import (
    MorphCost,
    MorphKind,
    ShapeOption,
    choose_shape,
    expected_life_s,
    worthwhile_ratio,
)
from varuna_planner.search.layouts import describe_gpu_types
from varuna_proto.plan import Device, Plan
from varuna_proto.wording import count_are, count_of, render_rate


def list_slow_vms(generation: GenerationView | None, vms: Vms) -> tuple[str, ...]:
    """The slow VMs of the generation."""
    if generation is None:
        return ()
    return tuple([vm_id for vm_id in generation.vm_ids if vm_id in vms and vms[vm_id].slow_ratio is not None])


def gpu_limit(job: JobView) -> int | None:
    """The most GPUs that the job may have, by its own limit and by its share among all jobs. None: any number."""
    limits = [limit for limit in (job.max_gpus, job.share) if limit is not None]
    return min(limits, default=None)


def predict_restart(job: JobView) -> MorphCost:
    """What the morph to the proposed shape costs, with the state from memories."""
    moving_s = 0.0 if job.proposal is None else job.proposal.moves.to_new_s
    return MorphCost(kind=MorphKind.FROM_MEMORY, fixed_s=job.morphs.cost_s, moving_s=moving_s)


def predict_morph(job: JobView) -> MorphCost:
    """What it costs the generation that trains to take the proposed shape."""
    generation, proposal = job.generation, job.proposal
    if generation is None or proposal is None or not _may_go_on_in(job, generation, proposal):
        return predict_restart(job)
    moving_s = predict_growth_pause_s(generation, proposal)
    return MorphCost(kind=MorphKind.IN_PLACE, fixed_s=job.morphs.in_place_s, moving_s=moving_s)


def _may_go_on_in(job: JobView, generation: GenerationView, proposal: Proposal) -> bool:
    """Whether its processes may take the proposed shape in place, with new ones that are started ahead."""
    if proposal.plan is None or generation.plan is None or not may_take_other_stages(job, generation, proposal):
        return False
    starts_ahead = job.starts_ahead and not job.newcomers_obstacle
    return starts_ahead or generation.devices.issuperset(proposal.placement)


def predict_life_s(now: float, job: JobView, vms: int) -> float:
    """How long a shape on so many VMs is expected to last."""
    return expected_life_s(job.fleet.stops_per_hour(vms), job.fleet.stable_s(now))


def find_worthwhile_ratio(now: float, job: JobView, vms: int, least: float) -> float:
    """The least rate of a shape on so many VMs, in units of the present rate, that is worth a morph."""
    return worthwhile_ratio(predict_morph(job).pause_s, predict_life_s(now, job, vms), least)


def count_vms(devices: Iterable[Device]) -> int:
    return len({device.vm_id for device in devices})


def decide_shrinking(job: JobView, generation: GenerationView) -> Decision | None:
    """A job that has more than its share saves, and goes on with fewer GPUs or returns to the queue."""
    if job.share is None or len(generation.workers) <= job.share or generation.is_taking_state:
        return None
    mode = generation.stop_mode
    if job.share == 0:
        return Decision.stop_generation(generation, mode, EndCause.PREEMPTED, f"preempted: {job.share_reason}")
    reason = f"{count_of(job.share, 'GPU')} instead of {len(generation.workers)}: {job.share_reason}"
    return Decision.stop_generation(generation, mode, EndCause.SHRUNK, reason)


def list_claims(now: float, job: JobView, generation: GenerationView, rules: Rules) -> frozenset[Device]:
    """Its own devices, and those that a better plan for it would use."""
    if job.proposal is None or not _is_worth_growing(now, job, generation, rules):
        return generation.devices
    return generation.devices | frozenset(job.proposal.placement)


def decide_leaving_slow_vms(
    now: float, job: JobView, generation: GenerationView, vms: Vms, rules: Rules
) -> Decision | None:
    """Leave the slow VMs, for which all others wait, when the plan without them is worth a morph."""
    slow = list_slow_vms(generation, vms)
    if not slow or generation.last_step is None or generation.plan is None:
        return None
    proposal = job.proposal
    if proposal is None or proposal.plan is None:
        return None
    present = _slowed_rate(proposal, generation.plan, slow, vms)
    ratio = find_worthwhile_ratio(now, job, count_vms(proposal.placement), rules.slow_gain)
    if proposal.plan.examples_per_s < ratio * present:
        return None
    slowness = "; ".join(f"VM {vm_id}: {vms[vm_id].slow_reason}" for vm_id in slow)
    before, after = generation.plan, proposal.plan
    reason = (
        f"{slowness}; without the slow VMs: {render_change(before, after)}, "
        f"{render_rate(present)} to {render_rate(after.examples_per_s)} examples/s predicted"
    )
    wanted = _want_next(job, generation, proposal)
    awaited, note = _await_newcomers(now, job, generation, wanted, rules, reason)
    if awaited is not None:
        return awaited
    reason += note
    quarantine = make_quarantine(now, [vms[vm_id] for vm_id in slow], rules, reason=slowness)
    mode = choose_planned_stop(generation, proposal.placement)
    stop = Decision.stop_generation(generation, mode, EndCause.SLOW_VM, reason)
    return Decision(reason=reason, actions=(quarantine, *stop.actions), claims=stop.claims)


def _want_next(job: JobView, generation: GenerationView, proposal: Proposal) -> WantedNewcomers:
    """The proposal as the next generation. No process is started where those that there are may go on."""
    assert proposal.plan is not None
    devices = frozenset(proposal.placement)
    if may_take_other_stages(job, generation, proposal):
        devices -= generation.devices
    return WantedNewcomers(
        number=generation.number + 1, plan=proposal.plan, placement=proposal.placement, devices=devices
    )


def _await_newcomers(
    now: float, job: JobView, generation: GenerationView, wanted: WantedNewcomers, rules: Rules, reason: str
) -> tuple[Decision | None, str]:
    """(the decision to train on until the wanted processes are started ahead; None: the generation may stop; and
    what to add to the reason of its stop)."""
    if not wanted.devices:
        return None, ""
    wait_s = rules.newcomers_wait_s if job.starts_ahead else 0.0
    stand = judge_newcomers(now, wanted, job.newcomers, job.newcomers_obstacle, wait_s)
    if not stand.is_awaited:
        return None, f"; its processes start after the stop: {stand.obstacle}" if stand.obstacle else ""
    text = f"generation {generation.number} is under way while the processes of the next one start: {reason}"
    return _train_on(generation, wanted, text), ""


def _train_on(generation: GenerationView, wanted: WantedNewcomers, text: str) -> Decision:
    return Decision(reason=text, claims=generation.devices | frozenset(wanted.placement), newcomers=wanted)


def _slowed_rate(proposal: Proposal, plan: Plan, slow: tuple[str, ...], vms: Vms) -> float:
    """Examples/s of the present plan at the pace of its slowest VM."""
    return _present_rate(proposal, plan) / max(vms[vm_id].slow_ratio or 1.0 for vm_id in slow)


def explain_staying(now: float, job: JobView, generation: GenerationView, vms: Vms, rules: Rules) -> str:
    """Why the generation stays as it is although there is a slow VM or a free device; empty: there is neither."""
    return _explain_not_leaving(job, generation, vms) or _explain_not_growing(now, job, generation, rules)


def _explain_not_leaving(job: JobView, generation: GenerationView, vms: Vms) -> str:
    slow = list_slow_vms(generation, vms)
    if not slow or generation.plan is None:
        return ""
    slowness = "; ".join(f"VM {vm_id}: {vms[vm_id].slow_reason}" for vm_id in slow)
    proposal = job.proposal
    if proposal is None or proposal.plan is None:
        return f"; {slowness}, but no plan fits the other VMs"
    plan, present = proposal.plan, _slowed_rate(proposal, generation.plan, slow, vms)
    return (
        f"; {slowness}, but {plan.p}×{plan.d} without the slow VMs would give "
        f"{_compare_with_present(plan.examples_per_s, present)}"
    )


def may_improve(generation: GenerationView, gpus: int) -> bool:
    """Whether `gpus` GPUs may have a better shape than the running generation: more of them, or as many where it has
    kept the stages of a larger one, or where their types differ, whose speeds become known as it trains."""
    if gpus != len(generation.workers):
        return gpus > len(generation.workers)
    return generation.in_place or (generation.plan is not None and len(set(generation.plan.gpu_types)) > 1)


def decide_growth(now: float, job: JobView, generation: GenerationView, gpus: int, rules: Rules) -> Decision | None:
    """Grow to `gpus` GPUs in all, when the plan for them is worth a morph.

    A generation completes its first step before it grows, so that a stream of new VMs cannot keep a job from making
    progress. One in place is asked to leave during its first step; it finishes that, or loses nothing of it
    (`domain.leaving_step`).
    """
    may_grow = generation.kind is GenerationKind.TRAINING and generation.has_new_state
    if not may_grow or not _is_worth_growing(now, job, generation, rules):
        return None
    assert job.proposal is not None
    assert job.proposal.plan is not None
    assert generation.plan is not None
    before, after = generation.plan, job.proposal.plan
    is_larger = gpus > len(generation.workers)
    growth = f"growth: {count_of(gpus, 'GPU')} instead of {len(generation.workers)}"
    present = render_rate(_present_rate(job.proposal, before))
    reason = (
        f"{growth if is_larger else 'a better shape'}, {render_change(before, after)}, "
        f"{present} to {render_rate(after.examples_per_s)} examples/s predicted "
        f"(a morph costs {predict_morph(job)}; {_compare_rates(now, job, before, after)})"
    )
    mode = choose_planned_stop(generation, job.proposal.placement)
    if generation.last_step is None and mode is not StopMode.HOLD_FIRST:
        return None
    wanted = _want_next(job, generation, job.proposal)
    awaited, note = _await_newcomers(now, job, generation, wanted, rules, reason)
    if awaited is not None:
        return awaited
    if mode is StopMode.HOLD_FIRST and _may_all_go_on(job, generation, job.proposal):
        present_rate = _present_rate(job.proposal, before)
        if _awaits_state(now, job, generation, wanted, present_rate, rules):
            text = f"generation {generation.number} sends its state to the VMs of the next one: {reason}"
            return _train_on(generation, replace(wanted, sends_state=True), text)
        has_state = has_sent_ahead(generation, wanted, job.newcomers)
        if gain := render_gain_within_step(now, generation, job.proposal, present_rate, has_state=has_state):
            mode, note = StopMode.HOLD_WITHIN_STEP, gain
    return Decision.stop_generation(generation, mode, EndCause.GROWTH, reason + note)


def _awaits_state(
    now: float, job: JobView, generation: GenerationView, wanted: WantedNewcomers, present_rate: float, rules: Rules
) -> bool:
    """Whether the generation sends its state ahead before it leaves."""
    proposal = job.proposal
    may_send = job.starts_ahead and not job.newcomers_obstacle
    if proposal is None or not may_send or not may_leave_within_step(generation, proposal):
        return False
    return is_sending_awaited(
        now,
        generation,
        proposal,
        wanted,
        job.newcomers,
        present_rate=present_rate,
        wait_s=rules.newcomers_wait_s,
    )


def _may_all_go_on(job: JobView, generation: GenerationView, proposal: Proposal) -> bool:
    """Whether a process waits on each device of the proposal: one that trains now, or one that was started ahead."""
    are_there = generation.devices | list_at_door(job, generation)
    return are_there.issuperset(proposal.placement) and may_take_other_stages(job, generation, proposal)


def render_change(before: Plan, after: Plan) -> str:
    """From which shape to which."""
    change = f"{before.p}×{before.d} to {after.p}×{after.d}"
    if (before.shares, before.gpu_types) == (after.shares, after.gpu_types) or not describe_gpu_types(after):
        return change
    return f"{change} with {describe_gpu_types(after)}"


def _explain_not_growing(now: float, job: JobView, generation: GenerationView, rules: Rules) -> str:
    if job.proposal is None or generation.last_step is None or generation.plan is None:
        return ""
    after = job.proposal.plan
    if after is None:
        return f"; {count_are(len(job.devices), 'GPU')} available, but no plan fits them: {job.proposal.reason}"
    if (after.p, after.d) == (generation.plan.p, generation.plan.d):
        return ""
    ratio = find_worthwhile_ratio(now, job, count_vms(job.proposal.placement), rules.growth_ratio)
    life_s = predict_life_s(now, job, count_vms(job.proposal.placement))
    return (
        f"; {after.p}×{after.d} on {count_of(len(job.devices), 'GPU')} would give "
        f"{_compare_with_present(after.examples_per_s, _present_rate(job.proposal, generation.plan))}, less than "
        f"{ratio:.2f} times as much (a morph costs {predict_morph(job)}, and the shape should last {life_s:.0f} s)"
    )


def _compare_with_present(rate: float, present: float) -> str:
    """Examples/s of another shape beside those of the present one."""
    if render_rate(rate) == render_rate(present):
        return f"{render_rate(rate)} examples/s, as many as now"
    return f"{render_rate(rate)} examples/s instead of {render_rate(present)}"


def _is_worth_growing(now: float, job: JobView, generation: GenerationView, rules: Rules) -> bool:
    if job.proposal is None or job.proposal.plan is None or generation.plan is None:
        return False
    more, after = may_improve(generation, len(job.devices)), job.proposal.plan
    ratio = find_worthwhile_ratio(now, job, count_vms(job.proposal.placement), rules.growth_ratio)
    return more and after.examples_per_s >= ratio * _present_rate(job.proposal, generation.plan)


def _compare_rates(now: float, job: JobView, before: Plan, after: Plan) -> str:
    """What the present and the proposed shape should give until the next loss."""
    assert job.proposal is not None
    present = ShapeOption(name=f"{before.p}×{before.d}", examples_per_s=_present_rate(job.proposal, before))
    proposed = ShapeOption(name=f"{after.p}×{after.d}", examples_per_s=after.examples_per_s, cost=predict_morph(job))
    _, text = choose_shape((present, proposed), predict_life_s(now, job, count_vms(job.proposal.placement)))
    return text


def _present_rate(proposal: Proposal, plan: Plan) -> float:
    """Examples/s of the running plan by the proposal's profile. Its own prediction may come from an older profile."""
    return plan.examples_per_s if proposal.present_examples_per_s is None else proposal.present_examples_per_s
