"""Why and how a worker leaves."""

from __future__ import annotations

import threading

import pytest

from varuna.departure import Departure, GenerationEnded, PeerLost
from varuna_proto.environment import EXIT_GENERATION_ENDED, EXIT_PEER_LOST
from waiting import DEADLINE_S


class Ends:
    """Takes the place of ending the process."""

    def __init__(self) -> None:
        self.codes: list[int] = []
        self.called = threading.Event()

    def __call__(self, code: int) -> None:
        self.codes.append(code)
        self.called.set()


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


@pytest.mark.parametrize(
    ("exit_", "code"), [(GenerationEnded("told"), EXIT_GENERATION_ENDED), (PeerLost("rank 3"), EXIT_PEER_LOST)]
)
def test_leaving_ends_every_wait_and_then_the_process(exit_: GenerationEnded | PeerLost, code: int) -> None:
    ends = Ends()
    departure = Departure(ends, grace_s=0.01)
    thread = threading.Thread(target=departure.leave, args=(exit_,))
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
    departure.leave(PeerLost("rank 3 is gone"))

    def script() -> None:
        try:
            departure.check()
        except Exception:
            pytest.fail("an `except Exception` caught it")

    with pytest.raises(PeerLost):
        script()
    with pytest.raises(PeerLost, match="76"):
        departure.check()


def test_the_first_reason_stands() -> None:
    departure = Departure(Ends(), grace_s=60)
    departure.leave(GenerationEnded("told"))
    departure.leave(PeerLost("of course: they were told too"))
    with pytest.raises(GenerationEnded):
        departure.check()


def test_a_broken_thread_of_the_runtime_is_no_silent_hang() -> None:
    departure = Departure(Ends())
    departure.fail(KeyError("oops"))
    with pytest.raises(RuntimeError, match="oops"):
        departure.wait_until(lambda: False)
