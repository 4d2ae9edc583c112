"""What the registry keeps of a VM that is gone: nothing, in whatever order its end is noticed."""

from __future__ import annotations

import pytest

from varuna_manager.world.vm_registry import Health, VmRegistry


@pytest.fixture
def registry() -> VmRegistry:
    """Of a VM whose agent was connected when the provider had it no longer."""
    registry = VmRegistry(lambda: 1000.0)
    registry.add_hello("a", rendezvous_port=5, workers=())
    registry.set_listed("a", False)
    registry.forget_vm("a")
    return registry


def assert_keeps_nothing(registry: VmRegistry) -> None:
    kept = (registry._live, registry._away, registry._evaluating, registry._witnesses, registry._quarantines)
    assert not any(kept), kept
    assert registry.changed_since(0)[1] == set()
    assert not registry.just_disconnected(60.0)


def test_a_stream_that_breaks_after_its_vm_is_gone_leaves_nothing(registry: VmRegistry) -> None:
    registry.add_disconnect("a")
    assert_keeps_nothing(registry)


def test_what_was_under_way_when_the_vm_was_gone_leaves_nothing(registry: VmRegistry) -> None:
    late = Health(job_id="j", generation=1, rank=0, step=7, evaluated=3, quiet_ranks=frozenset({1}))
    assert not registry.add_heartbeat("a", rendezvous_port=6, workers=[late])
    registry.record_held_bytes("a", 1)
    registry.use_rendezvous_port("a", 5)
    registry.add_disconnect("a")
    assert_keeps_nothing(registry)


def test_a_vm_that_comes_back_is_known_by_its_hello(registry: VmRegistry) -> None:
    registry.add_disconnect("a")
    registry.add_hello("a", rendezvous_port=7, workers=())
    assert registry.add_heartbeat("a", rendezvous_port=8, workers=()), "a new port is news"
    assert registry.rendezvous_port("a") == 8
    registry.add_disconnect("a")
    assert registry.just_disconnected(60.0)
