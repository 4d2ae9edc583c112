"""New VMs prepare for a job before it grows into them."""

from __future__ import annotations

from typing import Any

import pytest
from decision_views import NOW, RULES, devices, generation, job, vm, worker

from varuna_manager.db.models import VmRow
from varuna_manager.domain.job_decision import next_devices
from varuna_manager.domain.states import VmState
from varuna_manager.services.vm_registry import VmRegistry


@pytest.mark.parametrize(
    ("changes", "counts"),
    [
        ({"ready_for_s": RULES.growth_settle_s}, True),
        ({"ready_for_s": RULES.growth_settle_s, "preparing": frozenset({"another"})}, True),
        ({"ready_for_s": RULES.growth_settle_s, "preparing": frozenset({"j"})}, False),
        ({"ready_for_s": RULES.growth_prepare_s, "preparing": frozenset({"j"})}, True),
    ],
    ids=["not preparing", "preparing for another job", "preparing for this one", "preparing for too long"],
)
def test_a_vm_counts_for_growing_when_it_has_prepared(changes: dict[str, Any], counts: bool) -> None:
    vms = {"a": vm("a"), "b": vm("b", **changes)}
    view = job(generation(worker(0, "a")), devices=devices("a", "b"))
    assert next_devices(view, vms, RULES) == (devices("a", "b") if counts else devices("a"))


def test_a_vm_that_prepares_does_not_keep_others_out_for_ever() -> None:
    vms = {"a": vm("a"), "b": vm("b"), "c": vm("c", ready_for_s=5.0, preparing=frozenset({"j"}))}
    view = job(generation(worker(0, "a")), devices=devices("a", "b", "c"))
    assert next_devices(view, vms, RULES) == devices("a", "b")


def test_between_generations_nobody_waits_for_preparations() -> None:
    vms = {"a": vm("a", preparing=frozenset({"j"}))}
    assert next_devices(job(devices=devices("a")), vms, RULES) == devices("a")


def test_the_end_of_preparations_is_news() -> None:
    registry = VmRegistry(lambda: NOW)
    row = VmRow(id="a", state=VmState.READY.value, gpus=1, created_at=NOW, quarantines=0, hangs=0)
    registry.hello("a", rendezvous_port=1, workers=())
    assert registry.heartbeat("a", rendezvous_port=1, workers=(), preparing=["j"])
    assert registry.view(row, now=NOW, workers=0).preparing == {"j"}
    assert not registry.heartbeat("a", rendezvous_port=1, workers=(), preparing=["j"])
    assert registry.heartbeat("a", rendezvous_port=1, workers=())
    assert registry.view(row, now=NOW, workers=0).preparing == frozenset()
