"""A generation without progress: since when, and which rank everyone waits for.

A worker reports through its agent where it waits for other ranks. A rank that reports no wait is the one that the
others wait for. A rank whose stacks cannot be read either is stuck deeper than Python.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from varuna_manager.domain.actions import QuarantineVms
from varuna_manager.domain.observed import (
    GenerationView,
    JobView,
    RankStack,
    Rules,
    StackAnswers,
    Suspect,
    VmView,
    WorkerView,
)
from varuna_manager.domain.quarantine import make_quarantine
from varuna_manager.domain.states import ExitCause, GenerationKind, WaitKind

_FIRST_STEPS = 5.0
"""Predicted mini-batches that a first step may take: nothing is warm yet."""
_SECOND_STEP = 2.0
"""Times as long as all that came before its end may the first step's successor take."""
_STACK_CHARACTERS = 4000
_THREAD = re.compile(r"^(?=(?:Current thread|Thread) )", re.MULTILINE)
_FRAME = re.compile(r'^\s+File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>.+)$', re.MULTILINE)


def describe_hang(now: float, job: JobView, generation: GenerationView, rules: Rules) -> str:
    """What has not happened, and for how long, when that is too long; else empty."""
    if generation.kind is GenerationKind.CALIBRATION:
        limit, what = rules.calibration_timeout_s, "no profile"
    elif generation.last_step is None:
        limit, what = rules.first_step_timeout_s + _FIRST_STEPS * generation.step_s, "no first step"
    else:
        limit = max(
            rules.hang_minimum_s,
            rules.hang_steps * generation.step_s,
            _SECOND_STEP * generation.longest_step_s,
        )
        what = f"no step after {generation.last_step}"
    # Scripts may write results for a time that is not known in advance, so the limit grows after each hang.
    limit *= 2.0 ** min(job.setbacks.hangs, rules.hang_doublings)
    if any(worker.cause is ExitCause.FINISHED for worker in generation.workers):
        limit = max(limit, rules.finish_timeout_s)
    return f"hang: {what} for {limit:.0f} s" if now - generation.progress_at > limit else ""


def have_all_answered(generation: GenerationView, stacks: StackAnswers) -> bool:
    """Whether every rank that still runs has answered."""
    return all(worker.stopped or worker.rank in stacks.answers for worker in generation.workers)


def find_suspect(generation: GenerationView, stacks: StackAnswers) -> Suspect | None:
    """The rank that everyone waits for; None when none stands out: all wait for each other, or none has answered.

    A rank that does not answer while others do comes first, then one that does not wait for others, then one that
    waits in another call than the others. Among equals, the rank with the fewest completed steps comes first.
    """
    running = [worker for worker in generation.workers if not worker.stopped]
    answers = {worker.rank: stacks.answers.get(worker.rank, RankStack(error="no answer in time")) for worker in running}
    answering = [worker for worker in running if answers[worker.rank].text]
    if not answering:
        return None
    groups: Sequence[tuple[Sequence[WorkerView], str]] = (
        ([w for w in running if not answers[w.rank].text], "it does not report its stack"),
        ([w for w in answering if w.waiting_for is None], "it does not wait for other ranks"),
        _in_another_call(answering),
        (_list_behind(running), "it has completed fewer steps"),
    )
    for found, why in groups:
        if found and len(found) < max(len(running), 2):
            return _make_suspect(min(found, key=lambda w: (_step_of(w), w.rank)), found, why, running, answers)
    return None


def _make_suspect(
    worker: WorkerView,
    found: Sequence[WorkerView],
    why: str,
    running: Sequence[WorkerView],
    answers: Mapping[int, RankStack],
) -> Suspect:
    answer = answers[worker.rank]
    others = f", unlike the other {len(running) - len(found)}" if len(found) < len(running) else ""
    more = sorted(other.rank for other in found if other is not worker)
    also = f" (nor do ranks {', '.join(map(str, more[:8]))})" if more else ""
    text = _main_thread(answer.text)
    where = _find_place(text) if text else answer.error
    return Suspect(
        rank=worker.rank,
        vm_id=worker.device.vm_id,
        why=f"{why}{others}{also}{': ' + where if where else ''}",
        stack=text[:_STACK_CHARACTERS],
    )


def _in_another_call(answering: Sequence[WorkerView]) -> tuple[list[WorkerView], str]:
    """The ranks that wait in another call than most, such as `checkpoint` where the others `step`."""
    counts = Counter(worker.waiting_for for worker in answering if worker.waiting_for is not None)
    if len(counts) < 2 or counts.total() < len(answering):
        return [], ""
    usual = max(counts, key=lambda call: (counts[call], call is WaitKind.STEP))
    rare = min(counts, key=lambda call: (counts[call], call is WaitKind.STEP, call))
    found = [worker for worker in answering if worker.waiting_for is rare]
    return found, f"it is in {rare} and {counts[usual]} other{'s' if counts[usual] > 1 else ''} in {usual}"


def _list_behind(running: Sequence[WorkerView]) -> list[WorkerView]:
    steps = {worker.step for worker in running if worker.step is not None}
    return [worker for worker in running if len(steps) > 1 and worker.step == min(steps)]


def _step_of(worker: WorkerView) -> int:
    return -1 if worker.step is None else worker.step


def _main_thread(text: str) -> str:
    """The part of all threads' stacks that is the main thread's, which the signal has interrupted."""
    threads = [thread for thread in _THREAD.split(text) if _FRAME.search(thread)]
    current = [thread for thread in threads if thread.startswith("Current thread")]
    return (current or threads or [text])[-1].strip()


def _find_place(stack: str) -> str:
    """The innermost line that is not in Python's standard library."""
    frames = list(_FRAME.finditer(stack))
    own = [
        frame for frame in frames if not re.search(r"[/\\]lib[/\\]python3[^/\\]*[/\\](?!site-packages)", frame["file"])
    ]
    for frame in own or frames:
        return f"{frame['function'].strip()}, {frame['file']}:{frame['line']}"
    return ""


def find_quarantine(
    now: float, generation: GenerationView, vm: VmView | None, suspect: Suspect, rules: Rules
) -> QuarantineVms | None:
    """Quarantine a VM to which hangs are attributed repeatedly, like a slow one, unless it is the only one."""
    hangs_now = (vm.hangs if vm is not None else 0) + 1
    others = {worker.device.vm_id for worker in generation.workers} - {suspect.vm_id}
    if vm is None or hangs_now < rules.quarantine_hangs or not others:
        return None
    reason = f"{hangs_now} hangs were attributed to it, the last to rank {suspect.rank}: {suspect.why}"
    return make_quarantine(now, [vm], rules, reason=reason)
