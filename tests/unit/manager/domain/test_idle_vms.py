"""Which VMs are idle, and how many are enough for the jobs."""

from __future__ import annotations

import pytest

from decision_views import vm
from varuna_manager.domain.idle_vms import continue_clocks, count_enough_vms, is_idle
from varuna_manager.domain.observed import VmView
from varuna_manager.domain.states import VmState

JOBS = {"job": frozenset({"failed"}), "other": frozenset[str]()}
TRAINS = tuple(vm(f"t{number}", workers=1) for number in range(4))


@pytest.mark.parametrize(
    ("view", "newcomers", "idle"),
    [
        (vm("a"), (), True),
        (vm("a", prepared=frozenset({"job"}), warm=frozenset({"job"})), (), True),
        (vm("a", workers=1), (), False),
        (vm("a", state=VmState.SUSPECT), (), False),
        (vm("a", setting_up=frozenset({"job"})), (), False),
        (vm("a", preparing=frozenset({"job"})), (), False),
        (vm("a"), ("job",), False),
        (vm("a", setting_up=frozenset({"over"}), preparing=frozenset({"over"})), ("over",), True),
        (vm("failed", setting_up=frozenset({"job"})), (), True),
        (vm("failed", setting_up=frozenset({"job", "other"})), (), False),
    ],
    ids=[
        "nothing to do",
        "ready for a job",
        "works",
        "silent",
        "sets up",
        "imports",
        "newcomers",
        "for a job that is over",
        "another attempt where the setup has failed",
        "the setup of another job",
    ],
)
def test_a_vm_is_idle_while_nothing_there_gets_ready_for_workers(
    view: VmView, newcomers: tuple[str, ...], idle: bool
) -> None:
    assert is_idle(view, JOBS, newcomers) is idle


def test_a_vm_that_was_busy_in_between_begins_again() -> None:
    since = continue_clocks({"a": 1.0, "b": 2.0}, ["a", "c"], 5.0)
    assert since == {"a": 1.0, "c": 5.0}
    assert continue_clocks(since, ["a", "b"], 6.0) == {"a": 1.0, "b": 6.0}


def test_what_jobs_have_left_over_for_long_is_not_needed() -> None:
    vms = (*TRAINS, vm("a"), vm("b"))
    assert count_enough_vms(vms, {}, 300.0) is None
    assert count_enough_vms(vms, {"a": 299.0, "b": 299.0}, 300.0) is None
    assert count_enough_vms(vms, {"a": 300.0, "b": 400.0}, 300.0) == 4


def test_the_first_vm_that_is_left_over_waits_for_the_others_but_not_for_ever() -> None:
    vms = (*TRAINS, vm("a"), vm("b", setting_up=frozenset({"job"})))
    assert count_enough_vms(vms, {"a": 400.0}, 300.0) is None
    assert count_enough_vms((*TRAINS, vm("a"), vm("b")), {"a": 400.0, "b": 100.0}, 300.0) is None
    assert count_enough_vms(vms, {"a": 1200.0}, 300.0) == 5
    assert count_enough_vms(vms, {"a": 0.0}, 0.0) == 5


def test_a_vm_in_quarantine_is_needed_and_a_cordoned_one_while_it_works() -> None:
    vms = (*TRAINS, vm("a"), vm("b", quarantined=True), vm("c", cordoned=True), vm("d", cordoned=True, workers=1))
    assert count_enough_vms(vms, {"a": 300.0}, 300.0) == len(TRAINS) + 2
