"""Cached views of VMs equal freshly made ones at any moment."""

from __future__ import annotations

from collections.abc import Mapping

import hypothesis.strategies as st
from hypothesis import given, settings

from varuna_manager.domain.observed import VmView
from varuna_manager.world.facts import VmFacts
from varuna_manager.world.vm_registry import Health, VmRegistry
from varuna_manager.world.vm_views import VmViews

IDS = ("a", "b", "c")
FIELDS = tuple(VmView.__dataclass_fields__)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def facts(name: str, version: int, state: str = "ready", quarantined_until: float | None = None) -> VmFacts:
    return VmFacts(
        id=name,
        version=version,
        state=state,
        gpus=1,
        device_memory_bytes=None,
        created_at=900.0,
        reason=None,
        notice_deadline=None,
        drain_deadline=None,
        slow_ratio=None,
        slow_reason=None,
        quarantined_until=quarantined_until,
        quarantines=0,
        hangs=0,
        deaths=0,
        last_death_at=None,
        cordoned_at=None,
        request=None,
        price_per_hour=None,
    )


def contents(views: Mapping[str, VmView]) -> dict[str, tuple[object, ...]]:
    return {vm_id: tuple(getattr(view, name) for name in FIELDS) for vm_id, view in views.items()}


STEPS = st.sampled_from(
    [
        *("hello", "beat", "leave", "expect", "list", "unlist", "use port", "prepare"),
        *("forget", "row", "quarantine", "gone", "busy"),
    ]
)


@given(st.lists(st.tuples(STEPS, st.sampled_from(IDS), st.sampled_from([0.0, 1.0, 40.0])), max_size=30))
@settings(max_examples=60, deadline=None)
async def test_views_that_are_kept_are_those_that_would_be_made_anew(steps: list[tuple[str, str, float]]) -> None:
    clock = Clock()
    registry = VmRegistry(clock)
    kept = VmViews(registry, clock)
    rows, busy, version = {name: facts(name, 1) for name in IDS}, dict[str, int](), 1
    for step, name, seconds in steps:
        version += 1
        match step:
            case "hello":
                registry.add_hello(name, rendezvous_port=5, workers=())
            case "beat":
                worker = Health(job_id="j", generation=1, rank=0, step=version)
                registry.add_heartbeat(name, rendezvous_port=version, workers=[worker])
            case "leave":
                registry.add_disconnect(name)
            case "expect":
                registry.expect_hello(name)
            case "list" | "unlist":
                registry.set_listed(name, step == "list")
            case "use port":
                registry.use_rendezvous_port(name, registry.rendezvous_port(name) or 0)
            case "prepare":
                registry.add_heartbeat(name, rendezvous_port=5, workers=(), preparing=["j"], prepared=["k"], warm=["l"])
            case "forget":
                registry.forget_vm(name)
                rows = {vm_id: row for vm_id, row in rows.items() if vm_id != name}
            case "row":
                rows = {**rows, name: facts(name, version, "suspect")}
            case "quarantine":
                rows = {**rows, name: facts(name, version, quarantined_until=clock.now + 30.0)}
            case "gone":
                rows = {vm_id: row for vm_id, row in rows.items() if vm_id != name}
            case "busy":
                busy = {**busy, name: version}
        clock.now += seconds
        assert contents(await kept.update_views(rows, busy)) == contents(
            await VmViews(registry, clock).update_views(rows, busy)
        )


async def test_time_alone_makes_no_new_views() -> None:
    clock = Clock()
    registry = VmRegistry(clock)
    views, rows = VmViews(registry, clock), {name: facts(name, 1) for name in IDS}
    registry.add_hello("a", rendezvous_port=5, workers=())
    first = await views.update_views(rows, {})
    for _ in range(7):
        clock.now += 1.0
        registry.add_heartbeat("a", rendezvous_port=5, workers=())
    clock.now += 1.0
    assert await views.update_views(rows, {}) is first
    clock.now += 1.0
    late, now = await views.update_views(rows, {}), clock.now
    assert await views.update_views(rows, {}) is late
    a, b = late["a"], late["b"]
    assert b is first["b"]
    assert (a.silent_s(now), a.ready_for_s(now), a.age_s(now), a.connected_since_start) == (2.0, 9.0, 109.0, True)
    assert (b.silent_s(now), b.ready_for_s(now), b.age_s(now), b.connected_since_start) == (9.0, 0.0, 109.0, False)
    registry.use_rendezvous_port("a", 5)
    assert not (await views.update_views(rows, {}))["a"].has_rendezvous_port(now)
    registry.add_disconnect("a")
    second = await views.update_views(rows, {})
    assert second is not first
    assert second["b"] is b
    assert not second["a"].connected
    assert first["a"].connected, "an old view stays as it was"


async def test_a_clock_that_is_set_makes_no_vm_older() -> None:
    monotonic, wall = Clock(), Clock()
    registry = VmRegistry(monotonic)
    views, rows = VmViews(registry, wall), {name: facts(name, 1) for name in IDS}
    registry.add_hello("a", rendezvous_port=5, workers=())
    for jump_s in (0.0, 3600.0, -7200.0):
        monotonic.now += 2.0
        wall.now += 2.0 + jump_s
        found = await views.update_views(rows, {})
        passed_s = monotonic.now - 1000.0
        assert (found["a"].silent_s(wall.now), found["a"].ready_for_s(wall.now)) == (passed_s, passed_s)
        assert found["b"].silent_s(wall.now) == passed_s


def test_a_vm_is_waited_for_from_when_it_was_found_or_could_not_be_admitted() -> None:
    clock = Clock()
    registry = VmRegistry(clock)

    def silent_s() -> float:
        return registry.make_view(facts("a", 1, "requested"), now=clock.now, workers=0).silent_s(clock.now)

    clock.now += 3600.0
    registry.expect_hello("a")
    assert silent_s() == 3600.0, "no VM of this fleet"
    registry.set_listed("a", True)
    assert silent_s() == 3600.0
    registry.expect_hello("a")
    clock.now += 5.0
    assert silent_s() == 5.0
    registry.add_hello("a", rendezvous_port=5, workers=())
    clock.now += 7.0
    registry.expect_hello("a")
    assert silent_s() == 7.0, "it has been heard"
