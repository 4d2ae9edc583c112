"""A generation without progress: since when, and which rank everyone waits for.

Every wait of the runtime for another rank goes through one function (`Departure.wait_until`), so a stack tells at once
whether its rank waits for others, or the others for it. A rank that cannot even say where it stands is stuck deeper
than Python.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from varuna_manager.domain.blame import quarantine_until
from varuna_manager.domain.observed import (
    GenerationView,
    JobView,
    Quarantine,
    RankStack,
    Rules,
    Stacks,
    Suspect,
    VmView,
    WorkerView,
)
from varuna_manager.domain.states import ExitCause, GenerationKind

_FIRST_STEPS = 5.0
"""Predicted mini-batches that a first step may take: nothing is warm yet."""
_STACK_CHARACTERS = 4000
_THREAD = re.compile(r"^(?=(?:Current thread|Thread) )", re.MULTILINE)
_WAITS = re.compile(
    r"[/\\]varuna[/\\]departure\.py\", line \d+ in wait_until|[/\\]varuna[/\\]launch\.py\", line \d+ in "
)
_ENTRY = re.compile(r"[/\\]varuna[/\\]training\.py$")
"""Where what scripts call is."""
_FRAME = re.compile(r'^\s+File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>.+)$', re.MULTILINE)


def hangs(now: float, job: JobView, generation: GenerationView, rules: Rules) -> str:
    """What has not happened for how long, when it is too long; else empty."""
    predicted = generation.plan.predicted_minibatch_s if generation.plan is not None else 0.0
    if generation.kind is GenerationKind.CALIBRATION:
        limit, what = rules.calibration_timeout_s, "no profile"
    elif generation.last_step is None:
        limit, what = rules.first_step_timeout_s + _FIRST_STEPS * predicted, "no first step"
    else:
        limit, what = max(rules.hang_minimum_s, rules.hang_steps * predicted), f"no step after {generation.last_step}"
    # Scripts write results, and more, for longer than we can know: a limit that was too short once is stretched.
    limit *= 2.0 ** min(job.setbacks.hangs, rules.hang_doublings)
    if any(worker.cause is ExitCause.FINISHED for worker in generation.workers):
        limit = max(limit, rules.finish_timeout_s)
    return f"hang: {what} for {limit:.0f} s" if now - generation.progress_at > limit else ""


def all_told(generation: GenerationView, stacks: Stacks) -> bool:
    """Whether every rank that still runs has answered."""
    return all(worker.stopped or worker.rank in stacks.answers for worker in generation.workers)


def find_suspect(generation: GenerationView, stacks: Stacks) -> Suspect | None:
    """The rank that everyone waits for; None when none stands out: all wait for each other, or none told anything.

    Who does not answer while others do comes before who does something else than waiting, and that before who waits
    in another call than the others; among equals, who has completed the fewest steps.
    """
    running = [worker for worker in generation.workers if not worker.stopped]
    answers = {worker.rank: stacks.answers.get(worker.rank, RankStack(error="no answer in time")) for worker in running}
    told = [worker for worker in running if answers[worker.rank].text]
    if not told:
        return None
    groups: Sequence[tuple[Sequence[WorkerView], str]] = (
        ([w for w in running if not answers[w.rank].text], "it does not say where it stands"),
        ([w for w in told if not _waits(answers[w.rank].text)], "it does not wait for other ranks"),
        _elsewhere(told, answers),
        (_behind(running), "it has completed fewer steps"),
    )
    for found, why in groups:
        if found and len(found) < max(len(running), 2):
            return _suspect(min(found, key=lambda w: (_step(w), w.rank)), found, why, running, answers)
    return None


def _suspect(
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
    text = _telling_thread(answer.text)
    where = _where(text) if text else answer.error
    return Suspect(
        rank=worker.rank,
        vm_id=worker.device.vm_id,
        why=f"{why}{others}{also}{': ' + where if where else ''}",
        stack=text[:_STACK_CHARACTERS],
    )


def _elsewhere(told: Sequence[WorkerView], answers: Mapping[int, RankStack]) -> tuple[list[WorkerView], str]:
    """The ranks that are in another call of the library than most, such as `checkpoint` where the others `step`."""
    calls = {worker.rank: _call(answers[worker.rank].text) for worker in told}
    counted = Counter(calls.values())
    if len(counted) < 2 or "" in counted:
        return [], ""
    usual = max(counted, key=lambda call: (counted[call], call == "step"))
    rare = min(counted, key=lambda call: (counted[call], call == "step", call))
    found = [worker for worker in told if calls[worker.rank] == rare]
    return found, f"it is in {rare}() and {counted[usual]} other{'s' if counted[usual] > 1 else ''} in {usual}()"


def _call(text: str) -> str:
    """Which function of the library the script has called; empty: none, or one that cannot be told."""
    calls = [frame for frame in _FRAME.finditer(_telling_thread(text)) if _ENTRY.search(frame["file"])]
    return calls[-1]["function"].strip() if calls else ""


def _behind(running: Sequence[WorkerView]) -> list[WorkerView]:
    steps = {worker.step for worker in running if worker.step is not None}
    return [worker for worker in running if len(steps) > 1 and worker.step == min(steps)]


def _step(worker: WorkerView) -> int:
    return -1 if worker.step is None else worker.step


def _waits(text: str) -> bool:
    return _WAITS.search(text) is not None


def _telling_thread(text: str) -> str:
    """Of all threads' stacks, that of the one that trains: the one that waits for others, else the main one."""
    threads = [thread for thread in _THREAD.split(text) if _FRAME.search(thread)]
    for wanted in (_waits, lambda thread: thread.startswith("Current thread")):
        for thread in threads:
            if wanted(thread):
                return thread.strip()
    return threads[-1].strip() if threads else text.strip()


def _where(stack: str) -> str:
    """The innermost line that is not Python's own."""
    frames = list(_FRAME.finditer(stack))
    own = [
        frame for frame in frames if not re.search(r"[/\\]lib[/\\]python3[^/\\]*[/\\](?!site-packages)", frame["file"])
    ]
    for frame in own or frames:
        return f"{frame['function'].strip()}, {frame['file']}:{frame['line']}"
    return ""


def quarantine_for_hangs(
    now: float, generation: GenerationView, vm: VmView | None, suspect: Suspect, rules: Rules
) -> Quarantine | None:
    """A VM that hangs are put down to again is left alone for a while, like a slow one; not when it is the only one."""
    hangs_now = (vm.hangs if vm is not None else 0) + 1
    others = {worker.device.vm_id for worker in generation.workers} - {suspect.vm_id}
    if vm is None or hangs_now < rules.quarantine_hangs or not others:
        return None
    reason = f"{hangs_now} hangs were put down to it, the last to rank {suspect.rank}: {suspect.why}"
    return Quarantine(vm_ids=(vm.id,), until=quarantine_until(now, vm, rules), reason=reason)
