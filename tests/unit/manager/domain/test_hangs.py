"""Generations without progress, and the rank for which all others wait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from decision_views import NOW, RULES, decide, generation, job, kinds, plan_for, vm, worker
from varuna_manager.domain.actions import QuarantineVms, RecordHang, RequestStacks, StopGeneration
from varuna_manager.domain.hang import find_suspect
from varuna_manager.domain.observed import GenerationView, JobView, RankStack, StackAnswers, Suspect
from varuna_manager.domain.setbacks import PastGeneration, Setbacks, count_setbacks
from varuna_manager.domain.states import EndCause, ExitCause, StopMode, WaitKind

STEP, CHECKPOINT = WaitKind.STEP, WaitKind.CHECKPOINT
LIB = "/usr/lib/python3.11"
WAITS = f'''Thread 0x00007f01 (most recent call first):
  File "/site-packages/varuna/pipeline/transport.py", line 221 in _wait
  File "{LIB}/threading.py", line 982 in run

Current thread 0x00007f02 (most recent call first):
  File "{LIB}/threading.py", line 331 in wait
  File "/site-packages/varuna/distributed/departure.py", line 118 in wait_until
  File "/site-packages/varuna/pipeline/engine.py", line 256 in _choose_or_wait
  File "/home/u/train.py", line 40 in <module>
'''
READS = f'''Thread 0x00007f01 (most recent call first):
  File "/site-packages/varuna/pipeline/transport.py", line 221 in _wait

Current thread 0x00007f02 (most recent call first):
  File "{LIB}/socket.py", line 706 in readinto
  File "/home/u/data.py", line 12 in read
  File "/home/u/train.py", line 40 in <module>
'''
RENDEZVOUS = """Current thread 0x00007f02 (most recent call first):
  File "/site-packages/torch/distributed/store.py", line 3 in get
  File "/site-packages/varuna/distributed/groups.py", line 220 in _connect
"""


def hanging(
    *steps: int | None, last_step: int | None = 5, waits: Sequence[WaitKind | None] | None = None
) -> GenerationView:
    """A generation of a VM for each rank, without progress for long. `waits`: of each rank; None: all in a step."""
    of_ranks = [WaitKind.STEP] * len(steps) if waits is None else waits
    workers = [worker(rank, "abcd"[rank], step=step, waiting_for=of_ranks[rank]) for rank, step in enumerate(steps)]
    return generation(*workers, progress_at=NOW - 31, last_step=last_step)


def make_answers(*answers: RankStack | None, asked_at: float = NOW) -> StackAnswers:
    found = {rank: answer for rank, answer in enumerate(answers) if answer is not None}
    return StackAnswers(generation=2, asked_at=asked_at, answers=found)


def looks_like_a_hang(view: JobView, names: str = "a", now: float = NOW) -> bool:
    decision = decide(view, *map(vm, names), now=now)
    assert kinds(decision) in ([], [RequestStacks])
    return bool(decision.actions)


# ---------------------------------------------------------------- when


def test_no_progress_is_a_hang() -> None:
    quick = generation(worker(0, "a"), progress_at=NOW - 31)
    assert looks_like_a_hang(job(quick))
    assert not looks_like_a_hang(job(replace(quick, progress_at=NOW - 29)))
    slow = replace(quick, plan=replace(plan_for(1), predicted_minibatch_s=10.0))
    assert not looks_like_a_hang(job(slow))
    starting = generation(worker(0, "a"), progress_at=NOW - 31, last_step=None)
    assert not looks_like_a_hang(job(starting))


def test_a_limit_that_was_too_short_for_an_evaluation_is_stretched() -> None:
    quick = job(generation(worker(0, "a"), progress_at=NOW - 31))
    assert looks_like_a_hang(quick)
    hang = PastGeneration(cause=EndCause.HANG, reason="hang", last_step=5, ended_at=NOW)
    assert count_setbacks([hang]).hangs == 1
    again = replace(quick, setbacks=Setbacks(hangs=1))
    assert not looks_like_a_hang(again)
    assert looks_like_a_hang(again, now=NOW + 30)


def test_who_writes_the_result_while_others_have_finished_is_not_hanging() -> None:
    writing = generation(worker(0, "a"), worker(1, "b", ExitCause.FINISHED), progress_at=NOW - 60)
    assert not looks_like_a_hang(job(writing), "ab")
    assert looks_like_a_hang(job(writing), "ab", now=NOW + RULES.finish_timeout_s)


def test_a_first_step_may_take_some_mini_batches_more() -> None:
    plan = replace(plan_for(1), predicted_minibatch_s=150.0)
    fresh = generation(worker(0, "a"), plan=plan, last_step=None, progress_at=NOW - 700)
    assert not looks_like_a_hang(job(fresh))
    assert looks_like_a_hang(job(replace(fresh, progress_at=NOW - 900)))


# ---------------------------------------------------------------- who


def test_the_ranks_are_asked_first_and_waited_for_a_moment() -> None:
    view = job(hanging(5, 5, waits=[STEP, None]))
    (ask,) = decide(view, vm("a"), vm("b")).actions
    assert ask == RequestStacks(number=2)
    half = replace(view, stacks=make_answers(RankStack(text=WAITS), None))
    waiting = decide(half, vm("a"), vm("b"))
    assert not waiting.actions
    assert "waiting for the stacks of its ranks" in waiting.reason
    assert kinds(decide(half, vm("a"), vm("b"), now=NOW + RULES.stacks_wait_s)) == [RecordHang, StopGeneration]
    whole = replace(view, stacks=make_answers(RankStack(text=WAITS), RankStack(text=READS)))
    assert kinds(decide(whole, vm("a"), vm("b"))) == [RecordHang, StopGeneration]
    of_another = replace(view, stacks=replace(make_answers(RankStack(text=WAITS)), generation=1))
    assert kinds(decide(of_another, vm("a"), vm("b"))) == [RequestStacks]


@pytest.mark.parametrize("asked_at", [NOW - 5000, NOW - 32])
def test_stacks_of_an_earlier_suspicion_blame_nobody(asked_at: float) -> None:
    """A step has completed since they were requested."""
    texts = (RankStack(text=WAITS), RankStack(text=READS))
    view = job(hanging(6, 6, waits=[STEP, STEP]), stacks=make_answers(*texts, asked_at=asked_at))
    asked = decide(view, vm("a"), vm("b", hangs=1))
    assert asked.actions == (RequestStacks(number=2),)
    assert asked.reason.endswith("asking its ranks for their stacks")
    fresh = replace(view, stacks=make_answers(*texts, asked_at=NOW - 0.5))
    assert RecordHang in kinds(decide(fresh, vm("a"), vm("b")))


def test_a_second_step_may_take_as_long_as_the_first_whatever_was_predicted() -> None:
    """Calibration does not see a slow loader, so the step may have been predicted far too short."""
    silent = hanging(5, 5, waits=[STEP, None])
    assert decide(job(silent), vm("a"), vm("b")).actions
    slow = replace(silent, first_step_after_s=(NOW - silent.progress_at) / 2)
    assert not decide(job(slow), vm("a"), vm("b")).actions
    assert decide(job(slow), vm("a"), vm("b"), now=NOW + 0.1).actions
    known = replace(slow, mean_step_s=0.1)
    assert decide(job(known), vm("a"), vm("b")).actions, "its steps have been measured"


def test_a_hang_names_the_rank_that_the_others_wait_for() -> None:
    stacks = make_answers(*(RankStack(text=text) for text in (WAITS, READS, WAITS)))
    view = job(hanging(5, 5, 5, waits=[STEP, None, STEP]), stacks=stacks)
    note, stop = decide(view, *map(vm, "abc")).actions
    assert isinstance(note, RecordHang)
    assert note.suspect is not None
    assert (note.suspect.rank, note.suspect.vm_id) == (1, "b")
    assert note.suspect.why == "it does not wait for other ranks, unlike the other 2: read, /home/u/data.py:12"
    assert note.suspect.stack.startswith("Current thread 0x00007f02")
    assert "transport.py" not in note.suspect.stack
    assert isinstance(stop, StopGeneration)
    assert (stop.mode, stop.cause) == (StopMode.LEAVE_NOW, EndCause.HANG)
    assert stop.reason.startswith(
        "hang: no step after 5 for 30 s; the others wait for rank 1 on VM b: it does not wait"
    )


@pytest.mark.parametrize(
    ("answers", "suspect", "why"),
    [
        ((WAITS, "", WAITS), 1, "it does not report its stack, unlike the other 2: no signal was handled"),
        ((WAITS, None, WAITS), 1, "it does not report its stack, unlike the other 2: no answer in time"),
        ((RENDEZVOUS, READS, RENDEZVOUS), 1, "it does not wait for other ranks"),
        ((READS, READS, WAITS), 0, "unlike the other 1 (nor do ranks 1)"),
    ],
)
def test_who_is_silent_or_busy_is_suspected(answers: tuple[str | None, ...], suspect: int, why: str) -> None:
    stacks = [
        None if text is None else RankStack(text=text, error="" if text else "no signal was handled")
        for text in answers
    ]
    waits = [{WAITS: STEP, RENDEZVOUS: WaitKind.RENDEZVOUS}.get(text or "") for text in answers]
    found = find_suspect(hanging(5, 5, 5, waits=waits), make_answers(*stacks))
    assert found is not None
    assert found.rank == suspect
    assert why in found.why


@pytest.mark.parametrize(
    ("calls", "suspect", "why"),
    [
        ((STEP, CHECKPOINT, STEP), 1, "it is in checkpoint() and 2 others in step(), unlike the other 2"),
        ((CHECKPOINT, STEP), 0, "it is in checkpoint() and 1 other in step(), unlike the other 1"),
        ((CHECKPOINT, CHECKPOINT, STEP), 2, "it is in step() and 2 others in checkpoint(), unlike the other 2"),
    ],
)
def test_where_all_wait_the_one_in_another_call_is_suspected(
    calls: tuple[WaitKind, ...], suspect: int, why: str
) -> None:
    found = find_suspect(
        hanging(*(5 for _ in calls), waits=calls), make_answers(*(RankStack(text=WAITS) for _ in calls))
    )
    assert found is not None
    assert found.rank == suspect
    assert found.why.startswith(why)


def test_where_all_wait_in_one_call_it_says_nothing() -> None:
    everyone = make_answers(RankStack(text=WAITS), RankStack(text=WAITS))
    assert find_suspect(hanging(5, 5, waits=[STEP, STEP]), everyone) is None
    assert find_suspect(hanging(5, 5, waits=[None, None]), everyone) is None, "agents of an earlier version"


def test_where_all_wait_the_one_behind_is_suspected_and_else_nobody() -> None:
    everyone = make_answers(*(RankStack(text=WAITS) for _ in range(3)))
    found = find_suspect(hanging(6, 6, 5), everyone)
    assert found is not None
    assert (found.rank, found.why.split(",")[0]) == (2, "it has completed fewer steps")
    assert find_suspect(hanging(5, 5, 5), everyone) is None
    assert find_suspect(hanging(5, 5, 5), make_answers(None, None, None)) is None
    note, stop = decide(job(hanging(5, 5), stacks=make_answers(*everyone.answers.values())), vm("a"), vm("b")).actions
    assert isinstance(note, RecordHang)
    assert note.suspect is None
    assert isinstance(stop, StopGeneration)
    assert stop.reason.endswith("no rank stands out")


def test_a_rank_alone_is_named_when_it_does_not_wait() -> None:
    found = find_suspect(hanging(5, waits=[None]), make_answers(RankStack(text=READS)))
    assert isinstance(found, Suspect)
    assert found.rank == 0
    assert found.why == "it does not wait for other ranks: read, /home/u/data.py:12"


def test_a_vm_that_hangs_are_put_down_to_again_is_quarantined_for_longer_each_time() -> None:
    view = job(hanging(5, 5, waits=[STEP, None]), stacks=make_answers(RankStack(text=WAITS), RankStack(text=READS)))
    assert kinds(decide(view, vm("a"), vm("b", hangs=0))) == [RecordHang, StopGeneration]
    _, quarantine, _ = decide(view, vm("a"), vm("b", hangs=1)).actions
    assert isinstance(quarantine, QuarantineVms)
    assert (quarantine.vm_ids, quarantine.until) == (("b",), NOW + RULES.quarantine_s)
    assert quarantine.reason.startswith("2 hangs were attributed to it, the last to rank 1")
    _, quarantine, _ = decide(view, vm("a"), vm("b", hangs=2, quarantines=1)).actions
    assert isinstance(quarantine, QuarantineVms)
    assert quarantine.until == NOW + 2 * RULES.quarantine_s
    alone = job(hanging(5, waits=[None]), stacks=make_answers(RankStack(text=READS)))
    assert kinds(decide(alone, vm("a", hangs=5))) == [RecordHang, StopGeneration], "there is no other"
