"""The plans of a fleet, ranked by their expected rate (`liveput`) instead of their peak rate."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final

from varuna_planner.liveput.checkpoint_interval import StopCosts
from varuna_planner.liveput.liveput import FleetModel, Hazard, PlanOption, fleet_sizes
from varuna_planner.profile.document import Profile
from varuna_planner.schedule.policies import Policy
from varuna_planner.search.auto_config import PlanChoice, choose_plan
from varuna_planner.search.pins import NO_PINS, Pins
from varuna_proto.plan import Plan

__all__ = ["LiveputChoice", "RankedPlan", "SpotMarket", "rank_by_liveput"]

USUAL_COSTS: Final = StopCosts()
HORIZON_S: Final = 3600.0
"""By then most of a spot fleet has changed."""


@dataclass(frozen=True, kw_only=True)
class SpotMarket:
    """How VMs leave and join, and what that costs."""

    hazard: Hazard
    costs: StopCosts = USUAL_COSTS
    horizon_s: float = HORIZON_S
    """How far ahead the consequences of a plan are weighed."""


@dataclass(frozen=True, kw_only=True)
class RankedPlan:
    """A plan and what to expect of it."""

    plan: Plan
    vms: int
    """VMs that it uses."""
    spare_vms: int
    """VMs that it leaves warm."""
    expected_examples_per_s: float
    """Over the horizon, with the best decision after each loss and growth. The plan's own rate is its peak."""
    stops_per_hour: float
    checkpoint_every: int
    """Mini-batches between saves."""
    checkpoint_interval_s: float
    redone_s: float
    """Training that a stop throws back, on average."""
    reason: str
    """Why it won or lost, in words."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class LiveputChoice:
    """The answer: plans by expectation, best first, beside the choice by peak alone."""

    ranked: tuple[RankedPlan, ...]
    """Empty when no plan fits the fleet."""
    peak: PlanChoice
    """For the whole fleet, with its table of candidates."""
    spare_reason: str
    """Whether VMs are better used or kept warm, with the numbers."""

    @property
    def best(self) -> RankedPlan | None:
        return self.ranked[0] if self.ranked else None


def rank_by_liveput(
    profile: Profile,
    *,
    gpus: int,
    global_batch: int,
    device_memory_bytes: int | None,
    gpus_per_vm: int = 1,
    pins: Pins = NO_PINS,
    policy: Policy = Policy.WORK_CONSERVING,
    market: SpotMarket,
) -> LiveputChoice:
    """The plans for a fleet of `gpus` that changes; the other arguments are those of `choose_plan`.

    Only the fastest plan of each number of VMs can win: on equal VMs the hazard is the same. The fleet is assumed to
    be full now: VMs that come replace those that were lost.

    Raises ValueError as `choose_plan` does.
    """

    def choose_for(count: int) -> PlanChoice:
        return choose_plan(
            profile,
            gpus=count,
            global_batch=global_batch,
            device_memory_bytes=device_memory_bytes,
            gpus_per_vm=gpus_per_vm,
            pins=pins,
            policy=policy,
        )

    peak = choose_for(gpus)
    if peak.best is None:
        return LiveputChoice(ranked=(), peak=peak, spare_reason=peak.reason)
    vms = -(-gpus // gpus_per_vm)
    smaller = [choose_for(size * gpus_per_vm).best for size in fleet_sizes(vms)[1:-1]]
    plans = _faster_and_larger([*smaller, peak.best])
    options = [
        PlanOption(
            vms=-(-plan.p * plan.d // gpus_per_vm),
            examples_per_s=plan.examples_per_s,
            minibatch_s=plan.predicted_minibatch_s,
        )
        for plan in plans
    ]
    fleet = FleetModel(options, market.hazard, market.costs, most_vms=vms, horizon_s=market.horizon_s)
    order = sorted(range(1, len(plans) + 1), key=lambda option: -fleet.expected_rate(vms, option))
    ranked = tuple(_ranked(fleet, vms, option, order[0], plans) for option in order)
    return LiveputChoice(ranked=ranked, peak=peak, spare_reason=_spare_reason(ranked, market.costs))


def _faster_and_larger(plans: list[Plan | None]) -> list[Plan]:
    """The plans that are faster than all those before. `plans`: by ascending number of GPUs."""
    kept: list[Plan] = []
    for plan in plans:
        if plan is not None and (not kept or plan.examples_per_s > kept[-1].examples_per_s):
            kept.append(plan)
    return kept


def _ranked(fleet: FleetModel, vms: int, option: int, best: int, plans: list[Plan]) -> RankedPlan:
    plan, used = plans[option - 1], fleet.options[option].vms
    checkpoints = fleet.plan_checkpoints(vms, option)
    expected, best_expected = fleet.expected_rate(vms, option), fleet.expected_rate(vms, best)
    stops_per_hour = fleet.stops_per_s(vms, option) * 3600
    if option == best:
        reason = "the most examples expected"
    else:
        than = plans[best - 1]
        faster = plan.examples_per_s / than.examples_per_s - 1
        reason = (
            f"{1 - expected / best_expected:.1%} less expected than from {than.p}×{than.d}: "
            f"{abs(faster):.1%} {'faster' if faster > 0 else 'slower'} at its peak, {stops_per_hour:.3g} stops an hour "
            f"instead of {fleet.stops_per_s(vms, best) * 3600:.3g}"
        )
    return RankedPlan(
        plan=plan,
        vms=used,
        spare_vms=vms - used,
        expected_examples_per_s=expected,
        stops_per_hour=stops_per_hour,
        checkpoint_every=checkpoints.every,
        checkpoint_interval_s=checkpoints.interval_s,
        redone_s=checkpoints.redone_s,
        reason=reason,
    )


def _spare_reason(ranked: tuple[RankedPlan, ...], costs: StopCosts) -> str:
    best, largest = ranked[0], max(ranked, key=lambda one: one.vms)
    total = best.vms + best.spare_vms
    if best is not largest:
        return (
            f"keep {_vms(best.spare_vms)} of {total} warm: {_expects(best)}, against {_expects(largest)}; "
            f"with a spare a stop costs {_stop_s(best, costs, spare=True):.0f} s, "
            f"without {_stop_s(largest, costs, spare=False):.0f} s"
        )
    with_spares = [one for one in ranked if one.spare_vms > best.spare_vms]
    against = f", against {_expects(with_spares[0])}" if with_spares else ", and no smaller plan fits"
    if best.spare_vms:
        left = "1 is left over and stays" if best.spare_vms == 1 else f"{best.spare_vms} are left over and stay"
        why = f"{left} warm, since no plan is faster with more"
        return f"use {best.vms} of {_vms(total)}: {why}; {_expects(best)}{against}"
    return f"use all {_vms(total)}: {_expects(best)}{against}"


def _expects(one: RankedPlan) -> str:
    plan = one.plan
    return (
        f"{one.expected_examples_per_s:.4g} examples/s are expected of {plan.p}×{plan.d} on {_vms(one.vms)} "
        f"(peak {plan.examples_per_s:.4g}, stopped {one.stops_per_hour:.3g} times an hour)"
    )


def _vms(count: int) -> str:
    return f"{count} VM" if count == 1 else f"{count} VMs"


def _stop_s(one: RankedPlan, costs: StopCosts, *, spare: bool) -> float:
    """The mean time of a stop: until it is noticed, until the next generation runs, and the redone work."""
    replace_s = costs.morph_s if costs.replace_s is None else costs.replace_s
    return costs.before_morph_s + (replace_s if spare else costs.morph_s) + one.redone_s
