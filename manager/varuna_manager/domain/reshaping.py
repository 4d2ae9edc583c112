"""Whether a job goes on in place, where survivors of its last generation keep processes, stages and state.

A survivor is a worker that has left its generation and whose process waits with the state of a committed step. If every
stage has one, the next generation has the same stages with as many replicas as survivors make complete, and nothing is
loaded. With other cuts they give one another what they lack (`domain.other_stages`). All others restart (newcomers,
scripts that cannot be carried), with the state that survivors give them (`domain.holders`) or from a checkpoint.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from varuna_manager.domain.leaving_step import find_done_part, has_left_within_step
from varuna_manager.domain.observed import GenerationView, Vms, WorkerView
from varuna_manager.domain.states import EndCause, ExitCause, GenerationKind
from varuna_planner.schedule.batching import apportion, count_micro_batches
from varuna_planner.schedule.policies import most_in_flight, parse_policy
from varuna_proto.plan import Device, Plan

LOSES_RANKS = frozenset(
    {
        EndCause.VM_LOST,
        EndCause.MANAGER_AWAY,
        EndCause.AGENT_ENDED,
        EndCause.LAUNCH_REFUSED,
        EndCause.NOTICE,
        EndCause.SHRUNK,
    }
)
"""Ends that take ranks away and do not put those that are left in doubt."""
_GOES_ON_AFTER = LOSES_RANKS | {EndCause.WORKER_FAILED, EndCause.UNREACHABLE, EndCause.SLOW_VM}
"""Ends after which the job goes on with fewer devices, perhaps in place. After a hang the processes are not trusted.
After the others the job is over, waits, or starts new processes."""
_RESTARTS_FROM_MEMORY = frozenset(
    {EndCause.GROWTH, EndCause.HANDED_OVER, EndCause.SCRIPT_FAILED, EndCause.OUT_OF_MEMORY}
)
"""Ends after which the job has another shape, or its script runs from its beginning. The old processes are sound, but
for the rank that raised an error: they take other stages (`domain.other_stages`), or give their state to new ones."""
PLANNED_STOPS = frozenset({EndCause.GROWTH, EndCause.SLOW_VM})
"""Stops for another shape in which no process was lost."""
SURVIVABLE_EXITS = frozenset({ExitCause.GENERATION_ENDED, ExitCause.PEER_LOST})
"""Exits of workers whose processes may stay, with their state."""
HOLDING_EXITS = SURVIVABLE_EXITS | {ExitCause.SCRIPT_FAILED, ExitCause.OUT_OF_MEMORY, ExitCause.AGENT_ENDED}
"""Exits of workers that may have left their state, in a process or in the VM's memory."""
_LEAVES_NO_PROCESS = HOLDING_EXITS - SURVIVABLE_EXITS
_LONG_REST_S = 10.0
"""Of a step, beside which it is short to ask the planner and to move the state."""


@dataclass(frozen=True, kw_only=True)
class Reshape:
    plan: Plan
    placement: tuple[Device, ...]
    """The device of each rank; the index is the rank."""
    step: int
    """The committed step that all of them hold."""


def keeps_state(cause: EndCause | None) -> bool:
    """Whether workers of a generation that stops for this cause are to keep their state for the next one."""
    return cause in _GOES_ON_AFTER or cause in _RESTARTS_FROM_MEMORY


def may_reshape(generation: GenerationView) -> bool:
    """Whether survivors of the ended generation may go on, if there are enough.

    A generation in place that completed no step is followed by another only if it has lost ranks. Otherwise it would
    fail again in the same way, for ever.
    """
    if generation.kind is not GenerationKind.TRAINING or generation.end_cause not in _GOES_ON_AFTER:
        return False
    if is_unmoved(generation):
        return False
    is_vain = generation.in_place and generation.last_step is None
    return not is_vain or generation.end_cause in LOSES_RANKS


def list_kept_replicas(plan: Plan, workers: Sequence[WorkerView]) -> list[int]:
    """Replicas that have lost no worker, and so have finished their share of the step under way."""
    left = [worker for worker in workers if worker.held_step is not None and worker.cause not in _LEAVES_NO_PROCESS]
    whole = Counter(worker.rank // plan.p for worker in left)
    return sorted(replica for replica, count in whole.items() if count == plan.p)


def count_kept_replicas(plan: Plan, workers: Sequence[WorkerView]) -> int:
    return len(list_kept_replicas(plan, workers))


def may_gain_elsewhere(generation: GenerationView | None) -> bool:
    """Whether it may be worth more to take another shape at once than at the end of the step under way: the ended
    generation keeps less than half of the step, or the rest of it takes long."""
    if generation is None or generation.plan is None or generation.live:
        return False
    plan = generation.plan
    if has_left_within_step(generation):
        return generation.step_s * (1.0 - find_done_part(generation)) > _LONG_REST_S
    kept = count_kept_replicas(plan, generation.workers)
    rest_s = generation.step_s * (plan.d - kept) / max(kept, 1)
    return 2 * kept < plan.d or rest_s > _LONG_REST_S


def is_unmoved(generation: GenerationView) -> bool:
    """Whether its processes were to take other stages in place, and it is not known that all have.

    They have once it has begun, unless one that is left says that it had not taken its own.
    """
    if not has_stages_before(generation):
        return False
    return generation.resumed_step is None or any(worker.gives_only for worker in generation.workers)


def has_stages_before(generation: GenerationView) -> bool:
    """Whether its processes were to take other stages in place, and still have those before: no step is agreed on."""
    return generation.in_place and generation.holders is not None and generation.last_step is None


def list_held_steps(workers: Iterable[WorkerView]) -> list[int]:
    """The steps whose state their processes hold, the newest first."""
    return sorted({worker.held_step for worker in workers if worker.held_step is not None}, reverse=True)


def assume_held(workers: Sequence[WorkerView], missing: Collection[WorkerView], now: float) -> tuple[WorkerView, ...]:
    """The workers as they will be if the missing ones report now that they hold the newest state of all."""
    step = next(iter(list_held_steps(workers)), 0)
    return tuple(replace(one, held_step=step, stopped_at=now) if one in missing else one for one in workers)


def plan_reshape(
    plan: Plan, workers: Sequence[WorkerView], usable: Collection[Device], most: int | None
) -> Reshape | None:
    """The largest generation in place, or None if a stage has no survivor, or would need more memory than planned.

    Survivors that hold the newest step for which all stages have one go on, so that no committed step is lost. One that
    holds the step before has missed the agreement on the newest: all ranks had summed their gradients by then, so it
    completes that step with the totals of those that have not. Complete replicas stay together, and the others are made
    up from what is left.

    Args:
        plan: of the generation that has ended.
        workers: its workers. Those with a `held_step` on a `usable` device are the survivors, unless they only give it.
        most: devices that the job may have; None: any number.
    """
    survivors = [
        worker
        for worker in workers
        if worker.held_step is not None and not worker.gives_only and worker.device in usable
    ]
    for step in list_held_steps(survivors):
        able = [worker for worker in survivors if worker.held_step in (step, step - 1)]
        stages = _by_stage(plan.p, able)
        d = min(plan.d, *map(len, stages), plan.d if most is None else most // plan.p)
        if d < 1:
            continue
        knowing = {worker.rank // plan.p for worker in able if worker.held_step == step}
        placement = tuple(device for replica in _make_replicas(stages, d, knowing) for device in replica)
        ranks = {worker.device: worker.rank for worker in workers}
        made = _with_replicas(plan, [ranks[device] for device in placement])
        return None if made is None else Reshape(plan=made, placement=placement, step=step)
    return None


def may_stay_in_place(generation: GenerationView, vms: Vms, min_gpus: int, max_gpus: int | None) -> bool:
    """Whether a running generation could go on in place without its VMs that leave or are in doubt.

    Only its workers know whether their script allows that.
    """
    if not generation.has_new_state or generation.plan is None:
        return False
    workers = tuple(replace(worker, held_step=generation.last_step or 0) for worker in generation.workers)
    usable = [worker.device for worker in workers if is_on_trusted_vm(worker, vms)]
    reshape = plan_reshape(generation.plan, workers, usable, max_gpus)
    return reshape is not None and len(reshape.placement) >= min_gpus


def is_on_trusted_vm(worker: WorkerView, vms: Vms) -> bool:
    vm = vms.get(worker.device.vm_id)
    return vm is not None and vm.trusted


def _by_stage(p: int, survivors: Sequence[WorkerView]) -> list[dict[int, Device]]:
    """Of each stage, the devices by their old replica."""
    stages: list[dict[int, Device]] = [{} for _ in range(p)]
    for worker in sorted(survivors, key=lambda worker: worker.rank):
        stages[worker.rank % p][worker.rank // p] = worker.device
    return stages


def _make_replicas(stages: Sequence[Mapping[int, Device]], d: int, knowing: Collection[int]) -> list[list[Device]]:
    """The devices of `d` replicas by stage: the old replicas that are most complete, with their gaps filled.

    `knowing`: replicas in which a rank has the newest step. They come first: the others get its totals from them.
    """
    count = {replica: sum(replica in stage for stage in stages) for stage in stages for replica in stage}
    order = sorted(count, key=lambda replica: (replica not in knowing, -count[replica], replica))
    made, fillers = order[:d], order[d:][::-1]  # the pieces of the least complete fill gaps first
    filled = []
    for stage in stages:
        spare = iter([stage[replica] for replica in fillers if replica in stage])
        filled.append([stage[replica] if replica in stage else next(spare) for replica in made])
    return [list(replica) for replica in zip(*filled, strict=True)]


def _with_replicas(plan: Plan, ranks: Sequence[int]) -> Plan | None:
    """The plan with the replicas that these ranks of it make; None: they would need more memory than planned. Its times
    are scaled by the micro-batches that pass a stage, with the pipeline's filling; no profile is asked."""
    d = len(ranks) // plan.p
    shares: tuple[int, ...] = ()
    if plan.shares:
        # A replica is as slow as its slowest rank was.
        weights = [
            min(plan.shares[rank // plan.p] for rank in ranks[replica * plan.p : (replica + 1) * plan.p])
            for replica in range(d)
        ]
        shares = apportion(sum(plan.shares), weights)
    before, after = (
        max(each, default=count_micro_batches(plan.global_batch, plan.micro_batch * replicas))
        for each, replicas in ((plan.shares, plan.d), (shares, d))
    )
    run_ahead = _find_run_ahead(plan, before, after)
    if run_ahead is None:
        return None
    scale = (after + plan.p - 1) / (before + plan.p - 1)
    return replace(
        plan,
        d=d,
        run_ahead=run_ahead,
        shares=shares,
        gpu_types=tuple(plan.gpu_types[rank] for rank in ranks) if plan.gpu_types else (),
        predicted_minibatch_s=plan.predicted_minibatch_s * scale,
        examples_per_s=plan.examples_per_s / scale,
    )


def _find_run_ahead(plan: Plan, before: int, after: int) -> int | None:
    """The largest run-ahead, up to the plan's, that no stage lacks memory for; None: even without any, one would.

    A stage has memory for as many micro-batches as the plan has in flight with `before` of them in the largest share,
    and the share may have been the bound. Now the largest share is `after`.
    """
    code = parse_policy(plan.policy).code

    def list_in_flight(count: int, run_ahead: int) -> list[int]:
        return [most_in_flight(code, stage, plan.p, count, run_ahead) for stage in range(plan.p)]

    planned = list_in_flight(before, plan.run_ahead)
    # With the second one, the first stage has as many in flight as its share had, and so no later stage has more.
    for run_ahead in (plan.run_ahead, before - plan.p):
        needed = list_in_flight(after, run_ahead)
        if run_ahead >= 0 and all(now <= then for now, then in zip(needed, planned, strict=True)):
            return run_ahead
    return None
