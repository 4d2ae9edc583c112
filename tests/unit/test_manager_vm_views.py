"""Views of VMs that are kept from look to look are those that would be made anew, at any moment."""

from __future__ import annotations

from collections.abc import Mapping

import hypothesis.strategies as st
from hypothesis import given, settings

from varuna_manager.domain.observed import VmView
from varuna_manager.services.vm_registry import Health, VmRegistry
from varuna_manager.services.vm_rows import VmFacts
from varuna_manager.services.vm_views import VmViews

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


def told(views: Mapping[str, VmView]) -> dict[str, tuple[object, ...]]:
    return {vm_id: tuple(getattr(view, name) for name in FIELDS) for vm_id, view in views.items()}


STEPS = st.sampled_from(
    ["hello", "beat", "leave", "list", "unlist", "use port", "prepare", "forget", "row", "quarantine", "gone", "busy"]
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
                registry.hello(name, rendezvous_port=5, workers=())
            case "beat":
                worker = Health(job_id="j", generation=1, rank=0, step=version)
                registry.heartbeat(name, rendezvous_port=version, workers=[worker])
            case "leave":
                registry.disconnected(name)
            case "list" | "unlist":
                registry.set_listed(name, step == "list")
            case "use port":
                registry.use_rendezvous_port(name, registry.rendezvous_port(name) or 0)
            case "prepare":
                registry.heartbeat(name, rendezvous_port=5, workers=(), preparing=["j"], prepared=["k"], warm=["l"])
            case "forget":
                registry.forget(name)
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
        assert told(await kept.look(rows, busy)) == told(await VmViews(registry, clock).look(rows, busy))


async def test_time_alone_makes_no_new_views() -> None:
    clock = Clock()
    registry = VmRegistry(clock)
    views, rows = VmViews(registry, clock), {name: facts(name, 1) for name in IDS}
    registry.hello("a", rendezvous_port=5, workers=())
    first = await views.look(rows, {})
    clock.now += 7.0
    registry.heartbeat("a", rendezvous_port=5, workers=())
    clock.now += 2.0
    assert await views.look(rows, {}) is first
    a, b = first["a"], first["b"]
    assert (a.silent_s, a.ready_for_s, a.age_s, a.heard_since_start) == (2.0, 9.0, 109.0, True)
    assert (b.silent_s, b.ready_for_s, b.age_s, b.heard_since_start) == (9.0, 0.0, 109.0, False)
    registry.use_rendezvous_port("a", 5)
    assert not a.has_rendezvous_port
    registry.disconnected("a")
    second = await views.look(rows, {})
    assert second is not first
    assert second["b"] is b
    assert not second["a"].connected
    assert first["a"].connected, "what was told of it stays as it was"
