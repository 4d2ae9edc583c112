"""Whether the processes of an ended generation take the planner's shape in place, with other stages or beside new ones.

They give one another, and the new processes that were started ahead, the sections that these lack. Until they complete
a step, each keeps the state of the stage that it had. So if that comes to nothing, they are holders for a generation of
new processes (`find_unmoved`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from varuna_manager.domain.clock import is_within
from varuna_manager.domain.leaving_step import has_left_within_step
from varuna_manager.domain.newcomers import NewcomersView
from varuna_manager.domain.observed import GenerationView, Holder, Holders, JobView, Proposal, Rules, Vms, WorkerView
from varuna_manager.domain.reshaping import (
    LOSES_RANKS,
    has_stages_before,
    is_on_trusted_vm,
    is_unmoved,
    keeps_state,
)
from varuna_manager.domain.states import EndCause, GenerationKind
from varuna_proto.plan import Device


def may_take_other_stages(job: JobView, generation: GenerationView, proposal: Proposal) -> bool:
    """Whether the processes of a running generation could take ranks of the proposal's plan in place, when it has
    stopped. They know more of their script than the manager does."""
    if job.has_fixed_stages or generation.plan is None:
        return False
    placed, p = set(proposal.placement), generation.plan.p
    stages = {worker.rank % p for worker in generation.workers if worker.device in placed}
    return generation.kind is GenerationKind.TRAINING and len(stages) == p


def may_leave_state(job: JobView, generation: GenerationView, vms: Vms) -> bool:
    """Whether workers on VMs that leave could give their state to others, who go on with their stages in place."""
    staying = [worker for worker in generation.workers if is_on_trusted_vm(worker, vms)]
    is_enough = len(staying) >= max(job.min_gpus, 1)
    return generation.has_new_state and is_enough and not job.has_fixed_stages


def find_movers(now: float, job: JobView, ended: GenerationView, proposal: Proposal, rules: Rules) -> Holders | None:
    """The processes that take the ranks of the proposal's plan in place, by these ranks; None: they cannot.

    All hold the same step, and together they have all of it, with the copies that they keep of others' states. A device
    without one has a process that was started ahead.
    """
    if job.has_fixed_stages or ended.plan is None or proposal.plan is None or not _may_move(ended):
        return None
    by_device = {worker.device: worker for worker in ended.workers}
    at_door = list_at_door(job, ended)
    p, members, steps = ended.plan.p, list[Holder](), set[int]()
    for rank, device in enumerate(proposal.placement):
        worker = by_device.get(device)
        if worker is None and device in at_door:
            continue
        if worker is None or worker.held_step is None or worker.gives_only or worker.device not in job.survivors:
            return None
        held_at = worker.stopped_at or 0.0
        if not is_within(now, held_at, rules.survivors_kept_s):
            return None
        steps.add(worker.held_step)
        stages = list_held_stages(worker, p, worker.held_step)
        vm_id, local_rank = worker.device
        holder = Holder(rank=rank, stage=worker.rank % p, vm_id=vm_id, held_at=held_at, local_rank=local_rank)
        members.append(holder if len(stages) == 1 else replace(holder, stages=stages))
    if len(steps) != 1 or list_stages(members) != set(range(p)):
        return None
    return Holders(generation=ended.number + 1, members=tuple(members))


def find_newcomers(job: JobView, ended: GenerationView) -> NewcomersView | None:
    """The processes that were started ahead for the next generation; None: there are none."""
    view = job.newcomers
    return None if view is None or view.wanted.number != ended.number + 1 else view


def list_at_door(job: JobView, generation: GenerationView) -> frozenset[Device]:
    """Where a process waits that was started ahead for the generation after this one."""
    newcomers = find_newcomers(job, generation)
    return frozenset() if newcomers is None else newcomers.at_door


def _may_move(ended: GenerationView) -> bool:
    # Processes of a generation that ran out of memory hold memory that new ones have.
    unsound = (EndCause.SCRIPT_FAILED, EndCause.OUT_OF_MEMORY)
    is_sound = keeps_state(ended.end_cause) and ended.end_cause not in unsound
    has_no_step = ended.in_place and ended.last_step is None
    is_vain = has_no_step and ended.end_cause not in LOSES_RANKS and not has_left_within_step(ended)
    return ended.kind is GenerationKind.TRAINING and is_sound and not is_vain and not is_unmoved(ended)


def find_unmoved(ended: GenerationView, is_there: Callable[[Holder], bool]) -> Holders | None:
    """The holders after a generation with other stages that has completed no step: its own processes, which still have
    the stages that they had before; None: they lack some."""
    if not has_stages_before(ended) or ended.holders is None:
        return None
    held_at = {worker.rank: worker.stopped_at or 0.0 for worker in ended.workers if worker.held_step is not None}
    has_copies = is_unmoved(ended)  # they are dropped by a move
    own = (
        replace(member, held_at=held_at[member.rank], stages=member.stages if has_copies else ())
        for member in ended.holders.members
        if member.rank in held_at
    )
    left = tuple(filter(is_there, own))
    is_whole = list_stages(left) == list_stages(ended.holders.members)
    return Holders(generation=ended.number, members=left) if is_whole else None


def list_held_stages(worker: WorkerView, p: int, step: int) -> tuple[int, ...]:
    """The stages whose state after `step` steps a worker holds, its own and copies of others."""
    copies = {copy.rank % p for copy in worker.held_copies if copy.step == step}
    own = {worker.rank % p} if worker.held_step == step else set[int]()
    return tuple(sorted(own | copies))


def list_stages(members: Iterable[Holder]) -> frozenset[int]:
    """The stages that holders have among them."""
    return frozenset(stage for holder in members for stage in holder.held_stages)
