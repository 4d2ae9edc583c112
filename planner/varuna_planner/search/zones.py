"""The choice of a plan for GPUs in several zones, where links between zones are slower than those within.

Stages exchange messages for each micro-batch, replicas only once in a step. So either every replica lies whole in a
zone, and GPUs that make no whole replica in theirs stay unused; or replicas cross from one zone to the next, and count
on the slower link. Whichever is predicted faster is chosen. All-reduces cost what was measured, over all zones.

Letters: P stages, D replicas, G GPUs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from varuna_planner.profile.document import Profile
from varuna_planner.search.auto_config import PlanChoice, choose_plan
from varuna_planner.search.pins import NO_PINS, Pins
from varuna_proto.plan import Plan
from varuna_proto.wording import render_rate

__all__ = ["choose_plan_in_zones", "lies_in_zones"]


def choose_plan_in_zones(profile: Profile, zones: Sequence[int], *, pins: Pins = NO_PINS, **options: Any) -> PlanChoice:
    """The fastest plan for GPUs of one type in several zones.

    Args:
        profile: with a link between zones; without one, all zones are one.
        zones: the number of GPUs of each.
        pins: what the user has fixed.
        options: further arguments of `choose_plan`.

    Raises:
        ValueError: as `choose_plan`.
    """
    gpus = sum(zones)
    free = choose_plan(profile, gpus=gpus, pins=pins, **options)
    if profile.links.other_zone is None or free.best is None or lies_in_zones(free.best, zones):
        return free
    links = profile.links.model_copy(update={"other_vm": profile.links.other_zone})
    crossing = choose_plan(profile.model_copy(update={"links": links}), gpus=gpus, pins=pins, **options)
    whole = _choose_whole(profile, zones, pins, options)
    if whole.examples_per_s > crossing.examples_per_s:
        reason = (
            f"{whole.reason}; every replica lies in one zone, because links between zones are slow: across them "
            f"{render_rate(crossing.examples_per_s)} examples/s"
        )
        return replace(whole, reason=reason)
    if crossing.best is None or lies_in_zones(crossing.best, zones):
        return crossing
    return replace(crossing, reason=f"{crossing.reason}; some replicas cross from one zone to another")


def lies_in_zones(plan: Plan, zones: Sequence[int]) -> bool:
    """Whether every replica of the plan can lie whole in one of the zones, by their numbers of GPUs."""
    return sum(count // plan.p for count in zones) >= plan.d


def _choose_whole(profile: Profile, zones: Sequence[int], pins: Pins, options: Mapping[str, Any]) -> PlanChoice:
    """The best plan whose replicas lie whole in zones."""
    best = PlanChoice(best=None, candidates=(), reason="no zone has the GPUs for a replica")
    for p in (pins.p,) if pins.p else range(1, min(len(profile.sections), max(zones)) + 1):
        replicas = sum(count // p for count in zones)
        if replicas < (pins.d or 1):
            continue
        found = choose_plan(profile, gpus=p * replicas, pins=replace(pins, p=p), **options)
        if found.examples_per_s > best.examples_per_s:
            best = found
    return best
