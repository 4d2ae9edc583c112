"""A VM that is silent, and whose rank all others wait for: a job goes on without it, before the fleet gives it up."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from decision_views import NOW, RULES, decide, generation, job, kinds, stopping, vm, worker
from varuna_manager.domain.actions import StartGeneration, StopGeneration
from varuna_manager.domain.devices import choose_devices
from varuna_manager.domain.fleet_decision import decide_vm
from varuna_manager.domain.observed import GenerationView, VmView
from varuna_manager.domain.states import EndCause, ExitCause, GenerationState, StopMode, WaitKind
from varuna_manager.domain.witnesses import find_witnessed_loss, list_quiet_vms
from varuna_proto.plan import Device

OVERDUE_S = RULES.overdue_s


def ranks(
    names: str = "abcd", *, waiting: Collection[int] = range(4), quiet: dict[int, tuple[int, ...]] | None = None
) -> GenerationView:
    """A generation with a rank on each VM. `quiet`: by rank, the ranks that do not answer it."""
    found = quiet or {}
    return generation(
        *(
            worker(
                rank,
                name,
                step=5,
                waiting_for=WaitKind.STEP if rank in waiting else None,
                quiet_ranks=frozenset(found.get(rank, ())),
            )
            for rank, name in enumerate(names)
        )
    )


def fleet(silences: dict[str, float], names: str = "abcd") -> dict[str, VmView]:
    return {name: vm(name, silent_s=silences.get(name)) for name in names}


def test_a_heartbeat_that_is_overdue_by_a_second_and_ranks_that_all_wait_are_enough() -> None:
    present = ranks(waiting=(0, 1, 2), quiet={0: (3,)})
    decision = decide(job(present), *fleet({"d": 2.1}).values())
    (stop,) = decision.actions
    assert isinstance(stop, StopGeneration)
    assert (stop.mode, stop.cause) == (StopMode.LEAVE_NOW, EndCause.VM_LOST)
    assert stop.reason == (
        "VM d is given up for this job: rank 3 there does not answer rank 0, all others wait, "
        "and its agent has been silent for 2.1 s"
    )
    assert decide_vm(NOW, fleet({"d": 2.1})["d"], RULES) is None, "the fleet's own rules are as they were"


def test_the_others_say_so_of_rank_0() -> None:
    present = ranks(waiting=(1, 2, 3), quiet={1: (0,), 2: (0,)})
    assert "rank 0 there does not answer rank 1" in decide(job(present), *fleet({"a": 2.5}).values()).reason


def test_silence_without_waiting_is_not_enough() -> None:
    """The manager is cut off from one agent while the ranks go on stepping; or one replica still computes."""
    assert not decide(job(ranks(waiting=())), *fleet({"d": 4.9}).values()).actions
    computes = ranks(waiting=(0, 2), quiet={0: (3,)})
    assert not decide(job(computes), *fleet({"d": 4.9}).values()).actions


def test_waiting_for_a_rank_whose_agent_sends_heartbeats_is_not_enough() -> None:
    """That is a hang, or a slow rank."""
    present = ranks(waiting=(0, 1, 2), quiet={0: (3,)})
    assert not decide(job(present), *fleet({}).values()).actions
    assert not decide(job(present), *fleet({"d": OVERDUE_S - 0.1}).values()).actions


def test_waiting_for_a_rank_that_answers_is_not_enough() -> None:
    """It computes a long micro-batch, and only its agent and the manager are apart."""
    assert not decide(job(ranks(waiting=(0, 1, 2))), *fleet({"d": 4.9}).values()).actions


def test_a_witness_whose_own_agent_is_silent_does_not_count() -> None:
    present = ranks(quiet={0: (3,)})
    assert not decide(job(present), *fleet({"a": 3.0, "d": 3.0}).values()).actions


def test_two_vms_that_fall_silent_at_once_are_both_given_up() -> None:
    present = ranks(waiting=(0, 2), quiet={0: (1, 3)})
    silences = fleet({"b": 2.5, "d": 2.2})
    decision = decide(job(present), *silences.values())
    assert kinds(decision) == [StopGeneration]
    assert "VM b is given up" in decision.reason
    # Rank 0 gets no answer from rank 1 only; rank 3 is silent, and nobody asks it.
    unasked = ranks(waiting=(1, 2), quiet={1: (0,)})
    assert kinds(decide(job(unasked), *fleet({"a": 2.5, "d": 2.2}).values())) == [StopGeneration]


def test_a_vm_whose_agent_has_not_come_back_to_a_new_manager_is_not_silent() -> None:
    present = ranks(waiting=(0, 1, 2), quiet={0: (3,)})
    silent = fleet({"d": 8.0})
    silent["d"] = replace(silent["d"], connected=False, connected_since_start=False)
    assert not decide(job(present), *silent.values()).actions


def test_ranks_that_have_stopped_need_not_wait() -> None:
    """But a stopped rank alone ends the generation, as before, without two witnesses."""
    left = generation(*ranks(waiting=(0, 1), quiet={0: (3,)}).workers[:2], worker(2, "c", ExitCause.GENERATION_ENDED))
    silent = worker(3, "d")
    everyone = replace(left, workers=(*left.workers, silent))
    assert find_witnessed_loss(NOW, everyone, fleet({"d": 2.5}), RULES)


def over(*held: int, names: str = "abcd") -> GenerationView:
    """It has ended because VM d was given up; its workers on other VMs that are `held` wait with their state."""
    workers = [
        worker(rank, name, ExitCause.GENERATION_ENDED, held_step=5, stopped_at=NOW - 0.1)
        if rank in held
        else worker(rank, name)
        for rank, name in enumerate(names)
    ]
    ended = {"ended_at": NOW - 0.1, "end_cause": EndCause.VM_LOST, "end_reason": "VM d is given up"}
    return generation(*workers, state=GenerationState.ENDED, **ended)


def test_the_survivors_go_on_in_place_without_waiting_for_the_silent_vm() -> None:
    survivors = frozenset(Device(name, 0) for name in "abc")
    view = job(over(0, 1, 2), survivors=survivors, devices=tuple(sorted({*survivors, Device("d", 0)})))
    (start,) = decide(view, *fleet({"d": 2.5}).values()).actions
    assert isinstance(start, StartGeneration)
    assert start.in_place
    assert {device.vm_id for device in start.placement} == set("abc")
    assert not decide(replace(view, generation=over(0, 1)), *fleet({"d": 2.5}).values()).actions, "c may yet come"


def test_a_silent_vm_gets_no_part_in_the_next_generation_until_its_heartbeats_arrive() -> None:
    everywhere = tuple(Device(name, 0) for name in "abcd")
    ended = job(over(), devices=everywhere)
    assert choose_devices(NOW, ended, fleet({"d": 2.5}), RULES) == everywhere[:3]
    assert choose_devices(NOW, ended, fleet({}), RULES) == everywhere
    trains = job(ranks("abc"), devices=everywhere)
    assert choose_devices(NOW, trains, fleet({"d": 2.5}), RULES) == everywhere[:3], "nor is it grown into"
    assert choose_devices(NOW, trains, fleet({"c": 2.5}), RULES) == everywhere, "what is its own stays"


def test_a_generation_that_stops_anyway_is_left_to_stop() -> None:
    leaving = stopping(StopMode.SAVE_FIRST, EndCause.GROWTH, *ranks(waiting=(0, 1, 2), quiet={0: (3,)}).workers)
    (stop,) = decide(job(leaving), *fleet({"d": 2.5}).values()).actions
    assert isinstance(stop, StopGeneration)
    assert (stop.mode, stop.cause) == (StopMode.LEAVE_NOW, EndCause.VM_LOST), "its save cannot end"
    hurried = stopping(StopMode.LEAVE_NOW, EndCause.GROWTH, *leaving.workers)
    assert not decide(job(hurried), *fleet({"d": 2.5}).values()).actions


@given(
    silences=st.tuples(*[st.sampled_from([None, 1.6, 2.5, 9.0])] * 4),
    waiting=st.frozensets(st.integers(0, 3)),
    quiet=st.dictionaries(st.integers(0, 3), st.tuples(st.integers(0, 3)), max_size=4),
)
def test_a_job_is_stopped_only_on_the_word_of_two(
    silences: tuple[float | None, ...], waiting: frozenset[int], quiet: dict[int, tuple[int, ...]]
) -> None:
    vms = {name: vm(name, silent_s=silent_s) for name, silent_s in zip("abcd", silences, strict=True)}
    present = ranks(waiting=waiting, quiet=quiet)
    silent = {rank for rank, silent_s in enumerate(silences) if (silent_s or 0.0) >= OVERDUE_S}
    assert list_quiet_vms(NOW, present, vms, RULES) == {"abcd"[rank] for rank in silent}
    heard = set(range(4)) - silent
    expected = heard <= waiting and any(set(quiet.get(rank, ())) & silent for rank in heard)
    assert bool(find_witnessed_loss(NOW, present, vms, RULES)) is expected
