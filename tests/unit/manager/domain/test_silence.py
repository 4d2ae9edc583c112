"""Silence of most VMs at once, and decisions while the clock is set."""

from __future__ import annotations

from dataclasses import replace

import pytest

from decision_views import NOW, RULES, decide, generation, job, vm, worker
from varuna_manager.controllers.progress_clock import ProgressClock
from varuna_manager.domain.fleet_decision import FleetView, Refusal, RefusalKind, RefusalStreak, decide_fleet, decide_vm
from varuna_manager.domain.fleet_past import FleetPast
from varuna_manager.domain.observed import StackAnswers, VmView
from varuna_manager.domain.setbacks import Setbacks
from varuna_manager.domain.silence import find_silent_together
from varuna_manager.domain.states import ExitCause, GenerationState, VmState
from varuna_manager.world.attended_clock import AttendedClock
from varuna_manager.world.vm_registry import Health, VmRegistry

HOUR = 3600.0


def fleet_of(*silences: float) -> list[VmView]:
    return [vm(f"v{number}", silent_s=silent_s) for number, silent_s in enumerate(silences)]


def states_of(vms: list[VmView]) -> list[VmState | None]:
    together = find_silent_together(NOW, vms, RULES)
    verdicts = [decide_vm(NOW, one, RULES, together=one.id in together) for one in vms]
    return [None if verdict is None else verdict.state for verdict in verdicts]


# ---------------------------------------------------------------- most at once


@pytest.mark.parametrize(
    ("silences", "together"),
    [
        ((10.0, 10.5, 11.0), {0, 1, 2}),
        ((10.0, 10.5, 0.1), {0, 1}),
        ((10.0, 0.1, 0.1), set()),
        ((10.0, 10.0, 0.1, 0.1), set()),
        ((10.0,), set()),
        ((10.0, 10.0, 3000.0, 3000.0, 3000.0), {0, 1, 2, 3, 4}),
        ((10.0, 0.1, 3000.0), set()),
        ((10.0, 40.0, 70.0), set()),
    ],
)
def test_vms_that_fall_silent_at_about_one_moment_do_so_together(
    silences: tuple[float, ...], together: set[int]
) -> None:
    assert find_silent_together(NOW, fleet_of(*silences), RULES) == {f"v{number}" for number in together}


def test_a_vm_that_its_provider_does_not_have_is_gone_and_says_nothing_of_the_others() -> None:
    gone = [replace(one, listed=False) for one in fleet_of(10.0, 10.0)]
    assert find_silent_together(NOW, [*gone, *fleet_of(0.1, 0.1)], RULES) == frozenset()
    assert states_of([*gone, *fleet_of(0.1, 0.1)])[:2] == [VmState.GONE] * 2


def test_a_manager_that_is_cut_off_gives_no_vm_up_before_the_lease_is_over() -> None:
    assert states_of(fleet_of(10.0, 0.1, 0.1)) == [VmState.LOST, None, None]
    assert states_of(fleet_of(10.0, 10.5, 9.8)) == [VmState.SUSPECT] * 3
    assert states_of(fleet_of(59.0, 59.0, 59.0)) == [VmState.SUSPECT] * 3
    assert states_of(fleet_of(60.0, 60.0, 60.0)) == [VmState.LOST] * 3
    training = job(generation(*(worker(rank, f"v{rank}") for rank in range(3))))
    suspect = [replace(one, state=VmState.SUSPECT) for one in fleet_of(59.0, 59.0, 59.0)]
    assert not decide(training, *suspect).actions


def test_vms_that_fell_silent_together_are_neither_replaced_nor_given_back_for_a_while() -> None:
    def asked(silent_s: float, *others: VmView) -> tuple[int, int]:
        lost = [replace(one, state=VmState.LOST) for one in fleet_of(silent_s, silent_s, silent_s)]
        decision = decide_fleet(NOW, FleetView(target=3, vms=(*lost, *others)), RULES)
        return decision.create, len(decision.delete)

    assert asked(RULES.lease_s) == (0, 0)
    assert asked(RULES.common_silence_hold_s) == (3, 3)
    alone = FleetView(target=3, vms=(vm("a"), vm("b"), vm("c", state=VmState.LOST, silent_s=RULES.lease_s)))
    decision = decide_fleet(NOW, alone, RULES)
    assert (decision.create, decision.delete) == (1, ("c",))


def test_a_surplus_vm_that_fell_silent_with_most_others_is_not_drained() -> None:
    """Nobody could tell it to leave, and the manager would decide so again and again without a pause."""
    lost = [replace(one, state=VmState.LOST) for one in fleet_of(*[RULES.lease_s] * 3)]
    decision = decide_fleet(NOW, FleetView(target=1, vms=tuple(lost)), RULES)
    assert (decision.create, decision.drain, decision.delete) == (0, (), ())
    assert "3 VMs are there and 1 VM is wanted: 2 cannot go yet (silent, " in decision.reason
    reached = vm("a"), vm("b")
    assert decide_fleet(NOW, FleetView(target=1, vms=(*lost, *reached)), RULES).drain == ("a",)
    assert decide_fleet(NOW, FleetView(target=2, vms=(*lost, *reached)), RULES).drain == ()


# ---------------------------------------------------------------- the manager itself stands still


def test_the_time_in_which_the_manager_does_not_listen_is_nobodys_silence() -> None:
    seconds = [50.0]
    clock = AttendedClock(lambda: seconds[0])
    registry = VmRegistry(clock.read_s)

    def attend(for_s: float) -> None:
        for _ in range(round(for_s / 0.1)):
            seconds[0] += 0.1
            clock.beat()

    registry.add_hello("a", rendezvous_port=1, workers=())
    attend(0.9)
    assert registry.silence_s("a") == pytest.approx(0.9)
    seconds[0] += 5.0  # it is stopped, or its machine is too busy
    assert registry.silence_s("a") == pytest.approx(1.2)
    clock.beat()
    attend(0.5)
    assert registry.silence_s("a") == pytest.approx(1.7)
    assert registry.silence_s("a") < RULES.overdue_s
    attend(1.0)
    assert registry.silence_s("a") > RULES.overdue_s, "from then on it is the agent that is silent"


def test_a_rank_without_an_answer_is_news_and_so_is_its_answer() -> None:
    registry = VmRegistry(lambda: 50.0)

    def beat(*quiet: int) -> bool:
        health = Health(job_id="j", generation=2, rank=0, step=5, quiet_ranks=frozenset(quiet))
        return registry.add_heartbeat("a", rendezvous_port=1, workers=[health])

    registry.add_hello("a", rendezvous_port=1, workers=())
    assert [beat(), beat(3), beat(3)] == [False, True, False]
    assert registry.has_witness("j", 2)
    assert not registry.has_witness("j", 1)
    assert beat()
    assert not registry.has_witness("j", 2)
    beat(3)
    registry.forget_vm("a")
    assert not registry.has_witness("j", 2)


# ---------------------------------------------------------------- the wall clock is set


class Clocks:
    """A wall clock that somebody sets, and one that nobody can."""

    def __init__(self) -> None:
        self.monotonic, self.wall = 50.0, NOW

    def pass_s(self, seconds: float) -> None:
        self.monotonic += seconds
        self.wall += seconds


@pytest.mark.parametrize("jump_s", [-HOUR, 0.0, HOUR])
def test_a_clock_that_is_set_makes_no_hang_and_hides_none(jump_s: float) -> None:
    clocks = Clocks()
    clock = ProgressClock(lambda: clocks.monotonic)

    def idle_s(step: int, stored_at: float) -> float:
        return clocks.wall - clock.progress_at("j", step, stored_at, clocks.wall)

    clocks.pass_s(10.0)
    assert idle_s(1, clocks.wall - 2.0) == pytest.approx(2.0)
    clocks.wall += jump_s
    clocks.pass_s(5.0)
    assert idle_s(1, NOW + 8.0) == pytest.approx(7.0)
    clocks.pass_s(1.0)
    assert idle_s(2, NOW + 14.0) == pytest.approx(0.0 if jump_s < 0 else 1.0, abs=1.0), "since the last look at most"
    clocks.pass_s(31.0)
    assert 31.0 <= idle_s(2, NOW + 14.0) <= 32.0


def test_what_a_manager_has_not_seen_does_not_count_as_no_progress() -> None:
    clocks = Clocks()
    clock = ProgressClock(lambda: clocks.monotonic)
    clocks.pass_s(1.0)
    assert clocks.wall - clock.progress_at("j", 1, NOW - HOUR, clocks.wall) == pytest.approx(1.0)
    clocks.pass_s(100.0)
    assert clock.begin_again("j", clocks.wall) == clocks.wall
    assert clock.progress_at("j", 1, NOW - HOUR, clocks.wall) == clocks.wall


@pytest.mark.parametrize("jump_s", [-HOUR, HOUR])
def test_a_quarantine_lasts_as_long_as_it_was_meant_to(jump_s: float) -> None:
    clocks = Clocks()
    registry = VmRegistry(lambda: clocks.monotonic)
    until = clocks.wall + 600.0
    assert registry.is_quarantined("a", until, clocks.wall)
    clocks.wall += jump_s
    clocks.pass_s(599.0)
    assert registry.is_quarantined("a", until, clocks.wall)
    clocks.pass_s(2.0)
    assert not registry.is_quarantined("a", until, clocks.wall)
    assert registry.is_quarantined("a", clocks.wall + 10.0, clocks.wall), "another one"
    assert not registry.is_quarantined("a", None, clocks.wall)


def test_no_short_wait_lasts_until_a_moment_that_is_yet_to_come_again() -> None:
    over = generation(worker(0, "a", ExitCause.KILLED), state=GenerationState.ENDED, end_reason="killed")
    failed = job(over, setbacks=Setbacks(reasons=("killed",) * 4, last_at=NOW + HOUR))
    assert "waiting 4 s" not in decide(failed, vm("a")).reason
    left = generation(worker(0, "a", ExitCause.PEER_LOST, stopped_at=NOW + HOUR), worker(1, "b"))
    assert decide(job(left), vm("a"), vm("b")).actions
    hung = generation(worker(0, "a"), worker(1, "b"), progress_at=NOW - 31)
    asked = StackAnswers(generation=2, asked_at=NOW + HOUR, answers={})
    assert decide(job(hung, stacks=asked), vm("a"), vm("b")).actions
    last = Refusal(kind=RefusalKind.CAPACITY, reason="none")
    refused = FleetView(target=1, vms=(), refusals=RefusalStreak(count=9, last=last, last_at=NOW + HOUR))
    assert decide_fleet(NOW, refused, RULES).create == 1
    losses = FleetPast(losses_at=(NOW + HOUR,) * 9)
    assert losses.describe_storm(NOW, losses=4, window_s=60.0, quiet_s=15.0, wait_s=180.0) == ""
