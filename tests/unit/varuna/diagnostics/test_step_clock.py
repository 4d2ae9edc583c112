"""A step lasts from the end of the one before, and each part of what lies between two steps has its name."""

from __future__ import annotations

import threading

from varuna.diagnostics.step_clock import Activity, StepClock, StepTimes


class Hands:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns

    def spend(self, ns: int) -> None:
        self.now_ns += ns


def test_a_step_lasts_from_the_end_of_the_one_before() -> None:
    hands = Hands()
    clock = StepClock(hands)
    hands.spend(900)  # the start of the script is no part of a step
    clock.begin_step()
    hands.spend(7)
    assert clock.end_step() == StepTimes(7)

    with clock.measure(Activity.DATA):
        hands.spend(10)
    with clock.measure(Activity.EVALUATION):
        hands.spend(20)
    hands.spend(300)  # the script's own
    with clock.measure(Activity.CHECKPOINT):
        hands.spend(40)
    with clock.measure(Activity.DATA):
        hands.spend(5)
    clock.begin_step()
    hands.spend(7)
    times = clock.end_step()
    assert times == StepTimes(382, data_ns=15, evaluation_ns=20, checkpoint_ns=40, script_ns=300)
    assert (times.between_ns, times.call_ns) == (375, 7)

    clock.begin_step()
    hands.spend(8)
    assert clock.end_step() == StepTimes(8), "each step has its own times"


def test_what_happens_within_a_step_or_beside_it_is_not_between_steps() -> None:
    hands = Hands()
    clock = StepClock(hands)
    with clock.measure(Activity.DATA):  # before the first step
        hands.spend(50)
    clock.begin_step()
    clock.end_step()

    def prefetch() -> None:
        with clock.measure(Activity.DATA):
            hands.spend(30)

    thread = threading.Thread(target=prefetch)
    thread.start()
    thread.join()
    clock.begin_step()
    with clock.measure(Activity.DATA):  # the batch is made again for another shape
        hands.spend(4)
    clock.begin_step()  # the step goes on in the next generation
    hands.spend(3)
    assert clock.end_step() == StepTimes(37, script_ns=30)


def test_a_measurement_within_another_belongs_to_the_outer_one() -> None:
    hands = Hands()
    clock = StepClock(hands)
    clock.begin_step()
    clock.end_step()
    with clock.measure(Activity.EVALUATION):
        with clock.measure(Activity.DATA):
            hands.spend(2)
        hands.spend(3)
    clock.begin_step()
    assert clock.end_step() == StepTimes(5, evaluation_ns=5)


def test_another_training_in_the_process_begins_without_a_step_before() -> None:
    hands = Hands()
    clock = StepClock(hands)
    clock.begin_step()
    clock.end_step()
    hands.spend(1000)
    clock.restart()
    clock.begin_step()
    hands.spend(6)
    assert clock.end_step() == StepTimes(6)
