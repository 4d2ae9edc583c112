"""Which processes of an ended generation give their state to the next one, memory to memory.

Where a job does not go on in place, new processes start. As long as the old ones hold every stage of one step among
them, the new ones take the state from them: no committed step is lost, and nothing is read from the checkpoint store.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

from varuna_manager.domain.clock import is_within
from varuna_manager.domain.observed import GenerationView, Holder, Holders, Rules, Vms, WorkerView
from varuna_manager.domain.other_stages import find_unmoved
from varuna_manager.domain.reshaping import LOSES_RANKS, assume_held, is_unmoved, keeps_state, list_held_steps
from varuna_manager.domain.states import GenerationKind, StopMode, VmState
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
    if ended.kind is not GenerationKind.TRAINING or ended.plan is None or not keeps_state(ended.end_cause):
        return None
    usable = {device.vm_id for device in placement if vms[device.vm_id].state is VmState.READY}

    kept_s = rules.memory_kept_s if are_in_memory else rules.survivors_kept_s

    def is_there(holder: Holder) -> bool:
        return holder.vm_id in usable and is_within(now, holder.held_at, kept_s)

    if is_unmoved(ended):
        return find_unmoved(ended, is_there)
    is_fault = ended.last_step is None and ended.end_cause not in LOSES_RANKS
    if any(worker.held_step is not None for worker in ended.workers):
        is_in_vain = is_fault and (ended.in_place or ended.holders is not None)
        return None if is_in_vain else _find_members(ended, ended.plan.p, is_there)
    earlier = ended.holders
    # Holders serve a second time after any end, because a rank may just have been killed. If they do not help then, the
    # checkpoint must, or the job would fail again in the same way.
    if earlier is None or ended.last_step is not None or (is_fault and earlier.generation < ended.number - 1):
        return None
    left = tuple(filter(is_there, earlier.members))
    is_whole = _list_stages(left) == _list_stages(earlier.members)
    return replace(earlier, members=left) if is_whole else None


def may_find_holders(
    now: float,
    ended: GenerationView,
    missing: Collection[WorkerView],
    placement: Iterable[Device],
    vms: Vms,
    rules: Rules,
) -> bool:
    """Whether there are holders if the `missing` workers report that they hold the newest state."""
    workers = assume_held(ended.workers, missing, now)
    return find_holders(now, replace(ended, workers=workers), placement, vms, rules) is not None


def _find_members(ended: GenerationView, p: int, is_there: Callable[[Holder], bool]) -> Holders | None:
    """The ended generation's workers that hold the newest step for which all stages have one, or a copy."""
    there = [
        worker
        for worker in sorted(ended.workers, key=lambda worker: worker.rank)
        if worker.held_step is not None and is_there(_make_holder(worker, p, ()))
    ]
    of_copies = {copy.step for worker in there for copy in worker.held_copies}
    for step in sorted({*list_held_steps(ended.workers), *of_copies}, reverse=True):
        members = tuple(
            _make_holder(worker, p, stages) for worker in there if (stages := _list_held_stages(worker, p, step))
        )
        if len(_list_stages(members)) == p:
            return Holders(generation=ended.number, members=members)
    return None


def _list_held_stages(worker: WorkerView, p: int, step: int) -> tuple[int, ...]:
    copies = {copy.rank % p for copy in worker.held_copies if copy.step == step}
    own = {worker.rank % p} if worker.held_step == step else set[int]()
    return tuple(sorted(own | copies))


def _make_holder(worker: WorkerView, p: int, stages: tuple[int, ...]) -> Holder:
    own = worker.rank % p
    return Holder(
        rank=worker.rank,
        stage=own,
        vm_id=worker.device.vm_id,
        held_at=worker.stopped_at or 0.0,
        stages=() if stages == (own,) else stages,
    )


def _list_stages(members: Iterable[Holder]) -> frozenset[int]:
    return frozenset(stage for holder in members for stage in holder.held_stages)
