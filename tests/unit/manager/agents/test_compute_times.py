"""The compute times of running workers, as the manager remembers them."""

from __future__ import annotations

from varuna_manager.agents.compute_times import STEPS_NEEDED, ComputeTimes
from varuna_manager.world.vm_registry import Health


def health(rank: int, step: int, *, generation: int = 1, forward_us: int = 10, job: str = "job") -> Health:
    return Health(job_id=job, generation=generation, rank=rank, step=step, forward_us=forward_us, backward_us=20)


def test_a_look_waits_for_enough_steps_of_every_rank() -> None:
    times = ComputeTimes()
    for step in range(1, STEPS_NEEDED + 1):
        assert times.collect_times("job", 1, ["vm", "vm"]) is None
        times.record_workers(
            "vm", [health(0, step), health(0, step), health(1, step, forward_us=1000 if step == 1 else 30)]
        )
    assert times.collect_times("job", 1, ["vm", "vm", "silent"]) is None, "a rank is silent"
    found = times.collect_times("job", 1, ["vm", "vm"])
    assert found is not None
    assert {rank: took.median_us for rank, took in found.items()} == {0: 30, 1: 50}, "the slow first step is outvoted"
    assert found[1].mad_us == 0


def test_a_rank_that_times_nothing_is_left_out_and_keeps_no_look_waiting() -> None:
    """Its share is a short micro-batch, whose times are not compared."""
    times = ComputeTimes()
    for step in range(1, STEPS_NEEDED + 1):
        assert times.collect_times("job", 1, ["vm", "vm"]) is None
        times.record_workers("vm", [health(0, step), health(1, step, forward_us=0)])
    for step in range(STEPS_NEEDED + 1, 2 * STEPS_NEEDED + 1):
        found = times.collect_times("job", 1, ["vm", "vm"])
        assert (found is None) is (step > STEPS_NEEDED + 1), "each look is at new steps"
        assert found is None or list(found) == [0]
        times.record_workers("vm", [health(0, step), health(1, step, forward_us=0)])
    assert times.collect_times("job", 1, ["vm", "vm"]) is not None
    assert times.collect_times("job", 1, ["vm", "silent"]) is None


def test_a_rank_that_times_some_of_its_steps_is_waited_for() -> None:
    times = ComputeTimes()
    for step in range(1, 2 * STEPS_NEEDED):
        assert times.collect_times("job", 1, ["vm"]) is None
        times.record_workers("vm", [health(0, step, forward_us=10 if step % 2 else 0)])
    found = times.collect_times("job", 1, ["vm"])
    assert found is not None
    assert found[0].steps == STEPS_NEEDED


def test_a_rank_that_times_nothing_any_more_is_left_out_with_what_it_timed() -> None:
    """In the rest of a step it had a whole micro-batch, and since then only the short one."""
    times = ComputeTimes()
    for step in range(1, STEPS_NEEDED + 2):
        assert times.collect_times("job", 1, ["vm", "vm"]) is None
        times.record_workers("vm", [health(0, step), health(1, step, forward_us=10 if step == 1 else 0)])
    found = times.collect_times("job", 1, ["vm", "vm"])
    assert found is not None
    assert list(found) == [0]


def test_a_job_without_a_time_is_not_compared() -> None:
    times = ComputeTimes()
    for step in range(1, 2 * STEPS_NEEDED):
        times.record_workers("vm", [health(0, step, forward_us=0)])
    assert times.collect_times("job", 1, ["vm"]) is None


def test_every_look_is_at_new_steps() -> None:
    times = ComputeTimes()
    for step in range(1, STEPS_NEEDED + 1):
        times.record_workers("vm", [health(0, step)])
    assert times.collect_times("job", 1, ["vm"]) is not None
    for step in range(STEPS_NEEDED + 1, 2 * STEPS_NEEDED + 1):
        assert times.collect_times("job", 1, ["vm"]) is None
        times.record_workers("vm", [health(0, step)])
    assert times.collect_times("job", 1, ["vm"]) is not None


def test_the_same_step_told_again_is_one_step() -> None:
    times = ComputeTimes()
    for _ in range(100):
        times.record_workers("vm", [health(0, 3)])
    assert times.collect_times("job", 1, ["vm"]) is None


def test_a_new_generation_starts_anew_and_a_late_word_of_the_old_does_no_harm() -> None:
    times = ComputeTimes()
    for step in range(1, 20):
        times.record_workers("vm", [health(0, step)])
    times.record_workers("vm", [health(0, 20, generation=2)])
    times.record_workers("vm", [health(0, 21)])
    assert times.collect_times("job", 1, ["vm"]) is None
    assert times.collect_times("job", 2, ["vm"]) is None


def test_what_was_booked_and_jobs_that_are_over_are_forgotten() -> None:
    times = ComputeTimes()
    for step in range(1, 20):
        times.record_workers("vm", [health(0, step), health(0, step, job="other")])
    times.forget_job("job")
    assert times.collect_times("job", 1, ["vm"]) is None
    assert times.collect_times("other", 1, ["vm"]) is not None
    times.keep_only(set())
    assert times.collect_times("other", 1, ["vm"]) is None


def test_an_agent_speaks_for_the_workers_on_its_own_vm_only() -> None:
    times = ComputeTimes()
    for step in range(1, STEPS_NEEDED + 1):
        times.record_workers("good", [health(0, step)])
        times.record_workers(
            "liar", [health(0, step, forward_us=10**9), health(0, step, generation=10**6), health(1, step)]
        )
    found = times.collect_times("job", 1, ["good", "liar"])
    assert found is not None
    assert {rank: took.median_us for rank, took in found.items()} == {0: 30, 1: 30}
