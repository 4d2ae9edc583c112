"""New VMs prepare for a job before it grows into them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from decision_views import NOW, RULES, decide, devices, generation, job, kinds, proposal, vm, worker
from varuna_manager.db.models import VmRow
from varuna_manager.domain.actions import StartGeneration
from varuna_manager.domain.devices import choose_devices
from varuna_manager.domain.fleet_past import FleetPast
from varuna_manager.domain.fleet_watch import FleetWatch
from varuna_manager.domain.morphs import MorphEstimate
from varuna_manager.domain.observed import GenerationView
from varuna_manager.domain.states import ExitCause, GenerationState, VmState
from varuna_manager.world.vm_registry import VmRegistry


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
    assert choose_devices(NOW, view, vms, RULES) == (devices("a", "b") if counts else devices("a"))


def test_a_vm_that_prepares_does_not_keep_others_out_for_ever() -> None:
    vms = {"a": vm("a"), "b": vm("b"), "c": vm("c", ready_for_s=5.0, preparing=frozenset({"j"}))}
    view = job(generation(worker(0, "a")), devices=devices("a", "b", "c"))
    assert choose_devices(NOW, view, vms, RULES) == devices("a", "b")


def test_between_generations_nobody_waits_for_preparations() -> None:
    vms = {"a": vm("a", preparing=frozenset({"j"}))}
    assert choose_devices(NOW, job(devices=devices("a")), vms, RULES) == devices("a")


def test_the_end_of_preparations_is_news() -> None:
    registry = VmRegistry(lambda: NOW)
    row = VmRow(id="a", state=VmState.READY.value, gpus=1, created_at=NOW, quarantines=0, hangs=0)
    registry.add_hello("a", rendezvous_port=1, workers=())
    assert registry.add_heartbeat("a", rendezvous_port=1, workers=(), preparing=["j"])
    assert registry.make_view(row, now=NOW, workers=0).preparing == {"j"}
    assert not registry.add_heartbeat("a", rendezvous_port=1, workers=(), preparing=["j"])
    assert registry.add_heartbeat("a", rendezvous_port=1, workers=())
    assert registry.make_view(row, now=NOW, workers=0).preparing == frozenset()


# Workers of the job start from warmed processes on "a": a VM where they would not would keep them waiting.


WARM = {"warm": frozenset({"j"})}
KNOWN = {"morphs": MorphEstimate(cost_s=1.5, measured=True), "fleet": FleetPast(warm_s=3.0)}


@pytest.mark.parametrize(
    ("changes", "counts"),
    [
        ({"ready_for_s": RULES.growth_settle_s}, False),
        ({"ready_for_s": RULES.growth_settle_s} | WARM, True),
        ({"ready_for_s": RULES.growth_prepare_s}, True),
    ],
    ids=["not told to prepare yet", "prepared", "is not going to"],
)
def test_where_workers_are_warmed_a_vm_counts_for_growing_when_it_has_one_too(
    changes: dict[str, Any], counts: bool
) -> None:
    vms = {"a": vm("a", **WARM), "b": vm("b", **changes)}
    view = job(generation(worker(0, "a")), devices=devices("a", "b"))
    assert choose_devices(NOW, view, vms, RULES) == (devices("a", "b") if counts else devices("a"))


@pytest.mark.parametrize(
    ("changes", "counts"),
    [
        ({"ready_for_s": 0.1}, False),
        ({"ready_for_s": 1.2, "preparing": frozenset({"j"})}, False),
        ({"ready_for_s": 2.0, "preparing": frozenset({"j"})}, True),
        ({"ready_for_s": 0.1} | WARM, True),
    ],
    ids=["new", "preparing", "nearly prepared", "prepared"],
)
def test_a_morph_does_not_wait_for_a_vm_that_prepares_for_longer_than_another_morph_takes(
    changes: dict[str, Any], counts: bool
) -> None:
    vms = {"a": vm("a", **WARM), "b": vm("b", **changes)}
    view = job(ended(), devices=devices("a", "b"), **KNOWN)
    assert choose_devices(NOW, view, vms, RULES) == (devices("a", "b") if counts else devices("a"))


def test_a_morph_takes_what_is_there_when_it_needs_that_or_nothing_is_prepared_anywhere() -> None:
    vms = {"a": vm("a", **WARM), "b": vm("b", ready_for_s=0.1)}
    view = job(ended(), devices=devices("a", "b"), **KNOWN)
    assert choose_devices(NOW, replace(view, min_gpus=2), vms, RULES) == devices("a", "b")
    assert choose_devices(NOW, view, vms | {"a": vm("a")}, RULES) == devices("a", "b")


@pytest.mark.parametrize(("warm_s", "waits"), [(None, True), (0.5, True), (3.0, False)])
def test_a_vm_on_its_way_is_as_far_as_its_preparations(warm_s: float | None, waits: bool) -> None:
    fleet = FleetPast(join_s=1.0, coming_ages_s=(0.2,), warm_s=warm_s)
    view = job(ended(), devices=devices("a"), proposal=proposal(devices("a")), **KNOWN | {"fleet": fleet})
    assert kinds(decide(view, vm("a", **WARM))) == ([] if waits else [StartGeneration])


def test_how_long_preparations_take_is_seen() -> None:
    watch = FleetWatch(NOW)
    wanted, done = frozenset({"j"}), frozenset[str]()
    assert watch.observe_vms({"a": vm("a", preparing=wanted), "b": vm("b", preparing=wanted)}, NOW + 1).warm_s is None
    seen = {"a": vm("a", warm=wanted), "b": vm("b", preparing=done)}
    assert watch.observe_vms(seen, NOW + 4).warm_s == 3.0, "b gave it up"


def ended() -> GenerationView:
    lost = worker(1, "b", ExitCause.VM_GONE)
    return generation(worker(0, "a", ExitCause.PEER_LOST), lost, state=GenerationState.ENDED)
