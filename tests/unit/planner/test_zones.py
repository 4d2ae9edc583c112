"""Plans for GPUs in several zones."""

from __future__ import annotations

import pytest

from planner_profiles import make_profile
from varuna_planner.profile.document import Link, Links, Profile
from varuna_planner.search.auto_config import Pins, PlanChoice, choose_plan
from varuna_planner.search.zones import choose_plan_in_zones, lies_in_zones
from varuna_proto.plan import Plan

FAST = Link(latency_us=10, bandwidth_bytes_per_s=1e9)


def zoned(between: Link | None, *, state_bytes: int = 1000) -> Profile:
    links = Links(same_vm=FAST, other_vm=FAST, other_zone=between)
    return make_profile([1] * 6, (1,), links=links, messages=[1000] * 6, state_bytes=state_bytes)


def choose(profile: Profile, zones: tuple[int, ...], memory: int | None = None, pins: Pins | None = None) -> PlanChoice:
    """`memory`: of each device; a section's state is 1000 bytes, so 4000 holds three sections with their messages."""
    return choose_plan_in_zones(profile, zones, global_batch=48, device_memory_bytes=memory, pins=pins or Pins(d=None))


def test_replicas_stay_in_their_zones_where_links_between_zones_are_slow() -> None:
    slow = Link(latency_us=5000, bandwidth_bytes_per_s=1e6)
    pins = Pins(p=3)
    choice = choose(zoned(slow), (4, 2), pins=pins)
    assert choice.best is not None
    assert (choice.best.p, choice.best.d) == (3, 1), "two of the six GPUs make no whole replica in their zone"
    assert "every replica lies in one zone, because links between zones are slow" in choice.reason


def test_replicas_cross_where_that_costs_little() -> None:
    near = Link(latency_us=20, bandwidth_bytes_per_s=5e8)
    choice = choose(zoned(near), (4, 2), pins=Pins(p=3))
    assert choice.best is not None
    assert (choice.best.p, choice.best.d) == (3, 2)
    assert "some replicas cross from one zone to another" in choice.reason
    there = choose(zoned(None), (4, 2), pins=Pins(p=3)).best
    assert there is not None
    assert choice.best.examples_per_s < there.examples_per_s, "the slower link counts"


def test_links_have_as_many_connections_as_where_they_go_needs() -> None:
    near = Link(latency_us=20, bandwidth_bytes_per_s=5e8, connections=4)
    for zones, connections in (((4, 2), 4), ((3, 3), 1)):
        best = choose(zoned(near), zones, pins=Pins(p=3)).best
        assert best is not None
        assert best.link_connections == connections


@pytest.mark.parametrize("zones", [(6,), (3, 3), (2, 2, 2)])
def test_a_plan_whose_replicas_lie_in_zones_anyway_is_that_of_one_zone(zones: tuple[int, ...]) -> None:
    slow = Link(latency_us=5000, bandwidth_bytes_per_s=1e6)
    alone = choose_plan(zoned(None), gpus=6, global_batch=48, device_memory_bytes=None).best
    found = choose(zoned(slow), zones).best
    assert alone is not None
    assert lies_in_zones(alone, zones)
    assert found == alone


def test_a_replica_that_no_zone_can_hold_crosses() -> None:
    slow = Link(latency_us=5000, bandwidth_bytes_per_s=1e6)
    choice = choose(zoned(slow), (2, 2), pins=Pins(p=3))
    assert choice.best is not None
    assert (choice.best.p, choice.best.d) == (3, 1)
    assert "some replicas cross" in choice.reason


def test_replicas_lie_in_zones_that_have_room_for_them() -> None:
    plan = Plan(p=2, d=3, micro_batch=1, global_batch=6)
    assert lies_in_zones(plan, (4, 2))
    assert not lies_in_zones(plan, (3, 3))
