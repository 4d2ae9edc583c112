from __future__ import annotations

from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from varuna.checkpoint import TrainingState, decide_save
from varuna.checkpoint.saving.automatic import AutomaticCheckpoints
from varuna.distributed.departure import Departure
from varuna_planner.liveput.checkpoint_interval import Cadence
from varuna_proto.environment import Mode, OnNonFinite, WorkerEnvironment
from varuna_proto.plan import Plan

stalls = st.floats(min_value=0, max_value=5)


@settings(deadline=None)
@given(stalls, st.floats(min_value=0, max_value=60), st.floats(min_value=0.01, max_value=3))
def test_stalls_stay_within_their_share_of_the_time(stall_s: float, write_s: float, step_s: float) -> None:
    now_s, last_save_s, stalled_s, saves = 0.0, 0.0, 0.0, 0
    for _ in range(3000):
        now_s += step_s
        writing = saves > 0 and now_s < last_save_s + stall_s + write_s
        due, _reason = decide_save(
            now_s,
            last_save_s=last_save_s,
            last_stall_s=stall_s,
            last_write_s=write_s,
            in_flight=writing,
        )
        if due:
            assert not writing
            last_save_s, saves = now_s, saves + 1
            now_s += stall_s
            stalled_s += stall_s
    assert stalled_s <= 0.01 * now_s + stall_s


@given(st.floats(min_value=0, max_value=1e6))
def test_nothing_is_due_while_a_save_is_in_flight(since_s: float) -> None:
    due, reason = decide_save(since_s, last_save_s=0, last_stall_s=0.1, last_write_s=0.1, in_flight=True)
    assert not due
    assert "being written" in reason


def test_the_first_save_comes_after_the_shortest_interval() -> None:
    cadence = Cadence(min_interval_s=2.0)
    ask = {"last_save_s": 10.0, "last_stall_s": None, "last_write_s": None, "in_flight": False, "cadence": cadence}
    assert not decide_save(11.9, **ask)[0]  # type: ignore[arg-type]
    assert decide_save(12.0, **ask)[0]  # type: ignore[arg-type]


def test_the_users_own_interval_wins() -> None:
    pinned = Cadence(stops_per_hour=1000.0, pinned_interval_s=600.0)
    assert pinned.interval_s(0.5, 1.0, 2.0) == 600.0
    ask = {"last_save_s": 0.0, "last_stall_s": 0.1, "last_write_s": 0.1, "in_flight": False, "cadence": pinned}
    assert not decide_save(599.0, **ask)[0]  # type: ignore[arg-type]
    assert decide_save(600.0, **ask)[0]  # type: ignore[arg-type]


def test_the_hazard_and_the_users_interval_reach_the_worker() -> None:
    environment = WorkerEnvironment(
        job_id="j",
        generation=2,
        mode=Mode.TRAIN,
        rank=0,
        local_rank=0,
        world_size=1,
        rendezvous_host="127.0.0.1",
        rendezvous_port=1,
        plan=Plan(p=1, d=1, micro_batch=1, global_batch=1),
        checkpoint_interval_s=90.5,
        stops_per_hour=0.3,
        stops_without_copies_per_hour=2.5,
        on_non_finite=OnNonFinite.GO_ON,
    )
    environ = environment.to_environ()
    assert WorkerEnvironment.from_environ(environ) == environment
    with pytest.raises(ValueError, match="VARUNA_STOPS_PER_HOUR='many'"):
        WorkerEnvironment.from_environ({**environ, "VARUNA_STOPS_PER_HOUR": "many"})


class _SlowWriter:
    """Of a store to which a save takes ten seconds."""

    last_stall_s, last_write_s, in_flight = 1.0, 10.0, False


def test_saves_are_as_often_as_without_copies_until_others_have_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank without room for them keeps none, so losses need the checkpoint as if none had been chosen."""
    now_s = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now_s[0])
    cadence = Cadence(stops_per_hour=0.0, uncopied_stops_per_hour=100.0)

    def count_saves(*, are_whole: bool) -> int:
        writer: Any = _SlowWriter()
        automatic = AutomaticCheckpoints(writer, Departure(), decides=True, cadence=cadence)
        saves = 0
        for second in range(600):
            now_s[0] += 1.0
            automatic.record_copies(are_whole=are_whole)
            if automatic.choose_requests(second + 1).save:
                saves += 1
                automatic._note_save()
        return saves

    assert count_saves(are_whole=True) == 600 // 100, "a save may take a hundredth of the time"
    assert count_saves(are_whole=False) > 2 * 600 // 100


class _Generation:
    """One in which a step takes ten seconds, and the user wants a save every 600 s."""

    STEP_S = 10.0

    def __init__(self, clock_s: list[float], before: _Generation | None = None, **known: Any) -> None:
        writer: Any = _Writer()
        self._clock_s, self._step = clock_s, known.pop("first_step", 0)
        self.automatic: AutomaticCheckpoints = AutomaticCheckpoints(
            writer,
            Departure(),
            decides=True,
            cadence=Cadence(pinned_interval_s=600.0),
            before=None if before is None else before.automatic,
            **known,
        )

    def run_steps(self, count: int) -> int | None:
        """Returns how many steps were done when a save was due; None: none was due."""
        for number in range(1, count + 1):
            self._clock_s[0] += self.STEP_S
            self._step += 1
            self.automatic.record_agreement(self.automatic.choose_requests(self._step))
            saves = self.automatic.keeps_state
            self.automatic.apply_agreement(self._step, lambda: cast(TrainingState, None))
            if saves:
                return number
        return None


class _Writer:
    last_stall_s, last_write_s, in_flight = None, None, False

    def start_save(self, *_: Any, **__: Any) -> bool:
        return True


@pytest.fixture
def clock_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    clock_s = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: clock_s[0])
    return clock_s


def test_a_process_that_goes_on_in_place_counts_from_its_newest_save(clock_s: list[float]) -> None:
    """Morphs may come more often than saves."""
    first = _Generation(clock_s)
    assert first.run_steps(50) is None
    second = _Generation(clock_s, first)
    assert second.run_steps(60) == 10
    third = _Generation(clock_s, second)
    assert third.run_steps(59) is None
    assert _Generation(clock_s, third).run_steps(1) == 1


@pytest.mark.parametrize("has_saved", [False, True])
def test_what_was_saved_counts_and_not_what_was_begun(clock_s: list[float], has_saved: bool) -> None:
    """The save may have been under way when the processes left, and may have lacked a part."""
    first = _Generation(clock_s)
    assert first.run_steps(60) == 60
    second = _Generation(clock_s, first, first_step=60, committed_step=60 if has_saved else 5)
    assert second.run_steps(60) == (60 if has_saved else 5)


@pytest.mark.parametrize(
    ("committed", "due_after"),
    [(100, 60), (70, 30), (0, 2)],
    ids=["it begins with the checkpoint", "steps are not saved", "nothing is saved, and the time of a step not known"],
)
def test_new_processes_count_the_steps_since_the_newest_checkpoint(
    clock_s: list[float], committed: int, due_after: int
) -> None:
    """They have the state from memories, or from the checkpoint itself."""
    generation = _Generation(clock_s, first_step=100, committed_step=committed)
    assert generation.run_steps(100) == due_after
    assert generation.run_steps(100) == 60
