"""Which processes of an ended generation give their state to the next one, memory to memory.

Where a job does not go on in place, new processes start. As long as the old ones hold every stage of one step among
them, the new ones take the state from them: no committed step is lost, and nothing is read from the checkpoint store.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from varuna_manager.domain.clock import is_within
from varuna_manager.domain.observed import GenerationView, Holder, Holders, KeptCopy, Rules, Vms, WorkerView
from varuna_manager.domain.other_stages import find_unmoved, list_held_stages, list_stages
from varuna_manager.domain.reshaping import LOSES_RANKS, assume_held, is_unmoved, keeps_state, list_held_steps
from varuna_manager.domain.states import EndCause, GenerationKind, StopMode, VmState
from varuna_proto.plan import Device


def choose_planned_stop(generation: GenerationView, placement: Iterable[Device]) -> StopMode:
    """How a generation leaves for another shape on the devices of `placement`.

    Its workers save only if a stage of it has no process on those VMs: what is held elsewhere is not counted on.
    """
    vm_ids = {device.vm_id for device in placement}
    p = 0 if generation.plan is None else generation.plan.p
    stages = {worker.rank % p for worker in generation.workers if worker.device.vm_id in vm_ids} if p else set()
    return StopMode.HOLD_FIRST if p and len(stages) == p else generation.stop_mode


def find_holders(
    now: float,
    ended: GenerationView,
    placement: Iterable[Device],
    vms: Vms,
    rules: Rules,
    *,
    are_in_memory: bool = False,
) -> Holders | None:
    """The processes that give their state to a training generation on the devices of `placement`; None: none do.

    They are workers of the ended generation or, if that came to nothing, the holders that it had itself.

    `are_in_memory`: the workers have ended, and what they held is in their VMs' memory (a job that failed).
    """
    found = _find_held(now, ended, placement, vms, rules, are_in_memory=are_in_memory)
    return None if found is None else found.holders


def may_find_holders(
    now: float,
    ended: GenerationView,
    missing: Collection[WorkerView],
    placement: Iterable[Device],
    vms: Vms,
    rules: Rules,
) -> bool:
    """Whether there are holders, of a newer step than without them, if the `missing` workers report what they may hold:
    the newest state of all, and copies of the steps that others report."""
    assumed = replace(ended, workers=_assume_copies(ended, assume_held(ended.workers, missing, now), missing))
    hoped = _find_held(now, assumed, placement, vms, rules)
    found = _find_held(now, ended, placement, vms, rules)
    return hoped is not None and (found is None or hoped.step > found.step)


class _Held(NamedTuple):
    step: int
    """Where it is not known, more than any."""
    holders: Holders


def _find_held(
    now: float,
    ended: GenerationView,
    placement: Iterable[Device],
    vms: Vms,
    rules: Rules,
    *,
    are_in_memory: bool = False,
) -> _Held | None:
    """As `find_holders`."""
    if ended.kind is not GenerationKind.TRAINING or ended.plan is None or not keeps_state(ended.end_cause):
        return None
    usable = {device.vm_id for device in placement if vms[device.vm_id].state is VmState.READY}

    kept_s = rules.memory_kept_s if are_in_memory else rules.survivors_kept_s

    def is_there(holder: Holder) -> bool:
        return holder.vm_id in usable and is_within(now, holder.held_at, kept_s)

    if is_unmoved(ended):
        unmoved = find_unmoved(ended, is_there)
        return None if unmoved is None else _Held(sys.maxsize, unmoved)
    # A want of memory is no fault of the state: the next plan leaves it more room. Neither is a script that cannot
    # follow the shape.
    blameless = LOSES_RANKS | {EndCause.HANDED_OVER, EndCause.OUT_OF_MEMORY}
    is_fault = ended.last_step is None and ended.end_cause not in blameless
    if any(worker.held_step is not None for worker in ended.workers):
        is_in_vain = is_fault and (ended.in_place or ended.holders is not None)
        if is_in_vain:
            return None
        found = _find_members(ended, ended.plan.p, is_there)
        if found is None and (before := find_unmoved(ended, is_there)) is not None:
            return _Held(sys.maxsize, before)
        return found
    earlier = ended.holders
    # Holders serve a second time after any end, because a rank may just have been killed. If they do not help then, the
    # checkpoint must, or the job would fail again in the same way.
    if earlier is None or ended.last_step is not None or (is_fault and earlier.generation < ended.number - 1):
        return None
    left = tuple(filter(is_there, earlier.members))
    is_whole = list_stages(left) == list_stages(earlier.members)
    return _Held(sys.maxsize, replace(earlier, members=left)) if is_whole else None


def _assume_copies(
    ended: GenerationView, workers: Sequence[WorkerView], missing: Collection[WorkerView]
) -> tuple[WorkerView, ...]:
    """The workers as they will be if the missing ones, which they stand for by their ranks, hold all copies that they
    may have: of their own state, if another rank keeps one, and of those that they keep."""
    ranks = {worker.rank for worker in missing}
    steps = _list_steps(workers)

    def assume(worker: WorkerView) -> WorkerView:
        copied = [of for of, keeper in enumerate(ended.keepers) if worker.rank in (of, keeper)]
        return replace(worker, held_copies=tuple(KeptCopy(of, step) for of in copied for step in steps))

    return tuple(assume(worker) if worker.rank in ranks else worker for worker in workers)


def _list_steps(workers: Iterable[WorkerView]) -> list[int]:
    """The steps that they hold any state of, the newest first."""
    workers = list(workers)
    of_copies = {copy.step for worker in workers for copy in worker.held_copies}
    return sorted({*list_held_steps(workers), *of_copies}, reverse=True)


def _find_members(ended: GenerationView, p: int, is_there: Callable[[Holder], bool]) -> _Held | None:
    """The ended generation's workers that hold the newest step for which all stages have one, or a copy."""
    there = [
        worker
        for worker in sorted(ended.workers, key=lambda worker: worker.rank)
        if worker.held_step is not None and is_there(_make_holder(worker, p, ()))
    ]
    for step in _list_steps(there):
        members = tuple(
            _make_holder(worker, p, stages) for worker in there if (stages := list_held_stages(worker, p, step))
        )
        if len(list_stages(members)) == p:
            return _Held(step, Holders(generation=ended.number, members=members))
    return None


def _make_holder(worker: WorkerView, p: int, stages: tuple[int, ...]) -> Holder:
    own = worker.rank % p
    return Holder(
        rank=worker.rank,
        stage=own,
        vm_id=worker.device.vm_id,
        held_at=worker.stopped_at or 0.0,
        stages=() if stages == (own,) else stages,
        local_rank=worker.device.local_rank,
    )
