"""Why and how a worker leaves."""

from __future__ import annotations

import threading
import weakref

import pytest

from process_ends import Ends
from varuna.distributed.departure import Departure, GenerationEnded, PeerLost
from varuna_proto.environment import EXIT_GENERATION_ENDED, EXIT_PEER_LOST
from waiting import DEADLINE_S


def test_a_wait_ends_when_what_it_waits_for_is_there() -> None:
    departure, arrived = Departure(Ends()), []

    def arrive() -> None:
        with departure.condition:
            arrived.append(1)
            departure.condition.notify_all()

    thread = threading.Thread(target=arrive)
    thread.start()
    departure.wait_until(lambda: bool(arrived))
    thread.join()


def test_only_long_waits_are_reported_and_waits_within_a_wait_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("varuna.distributed.departure._LONG_WAIT_S", 0.01)
    departure, reports = Departure(Ends()), list[bool]()
    departure.report_waiting_to(reports.append)
    departure.wait_until(lambda: True)
    assert reports == []
    departure.wait_until(lambda: bool(reports))
    assert reports == [True, False]
    with departure.report_wait():
        departure.wait_until(lambda: True)
        with departure.report_wait():
            assert reports[2:] == [True]
    assert reports[2:] == [True, False]


@pytest.mark.parametrize(
    ("exit_", "code"),
    [(GenerationEnded("asked to leave"), EXIT_GENERATION_ENDED), (PeerLost("rank 3"), EXIT_PEER_LOST)],
)
def test_leaving_ends_every_wait_and_then_the_process(exit_: GenerationEnded | PeerLost, code: int) -> None:
    ends = Ends()
    departure = Departure(ends, grace_s=0.01)
    thread = threading.Thread(target=departure.leave_generation, args=(exit_,))
    thread.start()
    with pytest.raises(type(exit_)) as raised:
        departure.wait_until(lambda: False)
    thread.join()

    assert raised.value.code == code
    assert departure.exit_code == code
    assert ends.called.wait(DEADLINE_S)
    assert ends.codes == [code]


def test_a_script_cannot_swallow_the_exit_and_go_on() -> None:
    departure = Departure(Ends(), grace_s=60)
    departure.leave_generation(PeerLost("rank 3 is gone"))

    def script() -> None:
        try:
            departure.raise_if_leaving()
        except Exception:
            pytest.fail("an `except Exception` caught it")

    with pytest.raises(PeerLost):
        script()
    with pytest.raises(PeerLost, match="76"):
        departure.raise_if_leaving()


def test_the_first_reason_stands() -> None:
    departure = Departure(Ends(), grace_s=60)
    departure.leave_generation(GenerationEnded("asked to leave"))
    departure.leave_generation(PeerLost("of course: they were asked too"))
    with pytest.raises(GenerationEnded):
        departure.raise_if_leaving()


def test_a_process_that_cannot_say_what_it_holds_leaves_all_the_same() -> None:
    ends = Ends()
    departure = Departure(ends, grace_s=0.01)

    def fail(exit_: object) -> bool:
        raise RuntimeError("deque mutated during iteration")

    departure.offer_to_stay(fail, str)
    departure.leave_generation(GenerationEnded("asked to leave"))
    with pytest.raises(GenerationEnded):
        departure.raise_if_leaving()
    assert ends.called.wait(DEADLINE_S)
    assert (ends.codes, departure.stays) == ([EXIT_GENERATION_ENDED], False)


def test_a_broken_thread_of_the_runtime_is_no_silent_hang() -> None:
    departure = Departure(Ends())
    departure.fail_waits(KeyError("oops"))
    with pytest.raises(RuntimeError, match="oops"):
        departure.wait_until(lambda: False)


def departure_that_stays() -> tuple[Departure, Ends]:
    ends = Ends()
    departure = Departure(ends, grace_s=0.01)
    departure.offer_to_stay(lambda exit_: True, str)
    return departure, ends


@pytest.mark.parametrize(
    "exit_",
    [
        GenerationEnded("asked to leave"),
        PeerLost("rank 4 is gone", suspects=(4,)),
        PeerLost("rank 1 has left", suspects=()),
        PeerLost("a collective failed", suspects=(0, 4)),
    ],
    ids=lambda exit_: exit_.reason,
)
def test_a_reason_that_does_not_concern_the_replica_waits_for_its_work(exit_: GenerationEnded | PeerLost) -> None:
    departure, ends = departure_that_stays()
    broken: list[GenerationEnded | PeerLost] = []
    finished: list[bool] = []
    departure.add_breaker(broken.append)

    def work() -> None:
        with departure.finish_first({1, 2}, 60):
            departure.leave_generation(exit_)
            departure.leave_generation(PeerLost("rank 5 is gone", suspects=(5,)))
            departure.raise_if_leaving()
            departure.wait_until(lambda: True)
            assert departure.is_deferred
            assert departure.exit_code is None
            assert broken == []
            finished.append(True)

    with pytest.raises(type(exit_)) as raised:
        work()
    assert finished
    assert raised.value.code == departure.exit_code == exit_.code
    assert broken == [exit_]
    assert departure.stays
    assert ends.codes == []


@pytest.mark.parametrize("exit_", [PeerLost("rank 2 is gone", suspects=(2,)), PeerLost("a rank is gone")])
@pytest.mark.parametrize("deferred", [False, True])
def test_a_lost_rank_of_the_own_replica_ends_its_work_at_once(exit_: PeerLost, deferred: bool) -> None:
    departure, ends = departure_that_stays()
    reason = "asked to leave" if deferred else exit_.reason  # the first reason stands

    def work() -> None:
        with departure.finish_first({1, 2}, 60):
            if deferred:
                departure.leave_generation(GenerationEnded("asked to leave"))
            departure.leave_generation(exit_)
            departure.wait_until(lambda: True)
            pytest.fail("the work went on")

    with pytest.raises(GenerationEnded if deferred else PeerLost) as raised:
        work()
    assert vars(raised.value)["reason"] == reason
    assert departure.stays
    assert ends.codes == []


def test_a_process_that_may_not_stay_leaves_its_work_at_once() -> None:
    departure, ends = departure_that_stays()

    def work() -> None:
        with departure.finish_first({1}, 60):
            departure.leave_generation(GenerationEnded("asked to leave"))
            departure.leave_generation(GenerationEnded("asked again"), may_stay=False)
            departure.raise_if_leaving()
            pytest.fail("the work went on")

    with pytest.raises(GenerationEnded):
        work()
    assert not departure.stays
    assert ends.called.wait(DEADLINE_S)


def test_a_replica_that_waits_in_vain_leaves_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank whose machine has vanished closes no connection."""
    monkeypatch.setattr("varuna.distributed.departure._LONG_WAIT_S", 0.01)
    departure, _ = departure_that_stays()

    def work() -> None:
        with departure.finish_first({1}, 0.01):
            departure.leave_generation(PeerLost("rank 2 is gone", suspects=(2,)))
            departure.wait_until(lambda: False)

    with pytest.raises(PeerLost, match="76") as raised:
        work()
    assert raised.value.reason == "rank 2 is gone"
    assert departure.stays


@pytest.mark.parametrize("second", [PeerLost("rank 5 is gone", suspects=(5,)), GenerationEnded("leave now")])
def test_a_replica_that_only_waits_for_others_leaves_when_one_is_gone(second: GenerationEnded | PeerLost) -> None:
    """It would wait for what a lost rank never does."""
    departure, _ = departure_that_stays()

    def work() -> None:
        with departure.finish_first({1}, 60):
            departure.leave_generation(GenerationEnded("together"))
            assert departure.is_deferred
            threading.Timer(0.05, departure.leave_generation, (second,)).start()
            departure.wait_for_others(lambda: False, 600.0)

    with pytest.raises(GenerationEnded) as raised:
        work()
    assert raised.value.reason == "together"
    assert departure.stays


def test_an_error_in_the_work_is_raised_although_the_worker_leaves() -> None:
    departure, _ = departure_that_stays()

    def work() -> None:
        with departure.finish_first({1}, 60):
            departure.leave_generation(GenerationEnded("asked to leave"))
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        work()
    assert departure.stays


def test_after_the_work_every_reason_counts_at_once() -> None:
    departure, _ = departure_that_stays()
    with departure.finish_first({1}, 60):
        pass
    departure.leave_generation(GenerationEnded("asked to leave"))
    with pytest.raises(GenerationEnded):
        departure.raise_if_leaving()


class Copies:
    """Stands for what may be gigabytes, and ends its connections when the worker leaves."""

    def __init__(self) -> None:
        self.ends: list[GenerationEnded | PeerLost] = []

    def shut_down(self, exit_: GenerationEnded | PeerLost) -> None:
        self.ends.append(exit_)


def test_what_a_worker_has_of_its_generation_is_not_kept_when_it_has_left() -> None:
    """A process that goes on leaves one generation after another."""
    departure, _ = departure_that_stays()
    copies, exit_ = [Copies(), Copies()], GenerationEnded("asked to leave")
    departure.add_breaker(copies[0].shut_down)
    departure.leave_generation(exit_)
    departure.add_breaker(copies[1].shut_down)
    assert [one.ends for one in copies] == [[exit_], [exit_]]
    kept = [weakref.ref(one) for one in copies]
    copies.clear()
    assert [one() for one in kept] == [None, None]
