"""What the end of a generation says about one of its VMs: workers that keep dying there, a VM that others do not reach.

Such a VM is quarantined, like one that is slow or hangs, and never when it is the only one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from varuna_manager.domain.causes import root_cause
from varuna_manager.domain.observed import (
    Action,
    Decision,
    EndGeneration,
    GenerationView,
    NoteDeath,
    Quarantine,
    Rules,
    VmView,
    WorkerView,
)
from varuna_manager.domain.states import EndCause, ExitCause

Vms = Mapping[str, VmView]

_QUARANTINE_DOUBLINGS = 6
_DEATHS = frozenset({ExitCause.KILLED, ExitCause.LAUNCH_FAILED, ExitCause.LAUNCH_REFUSED, ExitCause.AGENT_ENDED, None})
_ENDS_BY_DEATH = frozenset({EndCause.WORKER_FAILED, EndCause.AGENT_ENDED, EndCause.LAUNCH_REFUSED})


def quarantine_until(now: float, vm: VmView, rules: Rules) -> float:
    """Each quarantine of the same VM lasts twice as long as the one before, up to a bound."""
    return now + rules.quarantine_s * 2.0 ** min(vm.quarantines, _QUARANTINE_DOUBLINGS)


def with_blame(now: float, generation: GenerationView | None, decision: Decision, vms: Vms, rules: Rules) -> Decision:
    """The decision; where it ends the generation, with what that says about a VM."""
    ends = [action for action in decision.actions if isinstance(action, EndGeneration)]
    if not ends or generation is None:
        return decision
    blamed = _blame(now, generation, ends[0].cause, vms, rules)
    return replace(decision, actions=(*decision.actions, *blamed)) if blamed else decision


def _blame(now: float, generation: GenerationView, cause: EndCause, vms: Vms, rules: Rules) -> list[Action]:
    if cause is EndCause.UNREACHABLE:
        vm_id, reason = unreachable_vm(generation, vms)
        return [_quarantine(now, vms[vm_id], reason, rules)] if vm_id else []
    root = root_cause(generation)
    if cause not in _ENDS_BY_DEATH or root is None or root.cause not in _DEATHS:
        return []
    vm = vms.get(root.device.vm_id)
    return [] if vm is None else _deaths(now, generation, root, vm, rules)


def _deaths(now: float, generation: GenerationView, root: WorkerView, vm: VmView, rules: Rules) -> list[Action]:
    recent = vm.last_death_at is not None and abs(now - vm.last_death_at) < rules.death_window_s
    deaths = vm.deaths + 1 if recent else 1
    found: list[Action] = [NoteDeath(vm_id=vm.id, deaths=deaths)]
    if deaths >= rules.quarantine_deaths and set(generation.vm_ids) > {vm.id}:
        reason = (
            f"{deaths} generations in a row ended because of workers there, each less than "
            f"{rules.death_window_s / 60:.0f} minutes after the one before, the last because of rank {root.rank}"
        )
        found.append(_quarantine(now, vm, reason, rules))
    return found


def _quarantine(now: float, vm: VmView, reason: str, rules: Rules) -> Quarantine:
    return Quarantine(vm_ids=(vm.id,), until=quarantine_until(now, vm, rules), reason=reason)


# ---------------------------------------------------------------- VMs that do not reach each other


def unreachable_vm(generation: GenerationView, vms: Vms) -> tuple[str, str]:
    """(the VM to plan without, why), where ranks could not reach others whose VMs are well; ("", "") where not.

    It is the VM that most of these pairs name, so a VM that accuses all others accuses itself. Of a single pair it is
    the one whose rank reports it.
    """
    by_rank = {worker.rank: worker for worker in generation.workers}
    pairs = [
        (worker, by_rank[worker.unreached])
        for worker in generation.workers
        if worker.cause is ExitCause.PEER_LOST and worker.unreached is not None and worker.unreached in by_rank
    ]
    pairs = [(one, other) for one, other in pairs if _are_well(one.device.vm_id, other.device.vm_id, vms)]
    if not pairs:
        return "", ""
    named = Counter(worker.device.vm_id for pair in pairs for worker in pair)
    reporters = {one.device.vm_id for one, _ in pairs}
    chosen = max(named, key=lambda vm_id: (named[vm_id], vm_id in reporters, vm_id))
    one, other = next(pair for pair in pairs if chosen in (pair[0].device.vm_id, pair[1].device.vm_id))
    reason = (
        f"rank {one.rank} on VM {one.device.vm_id} cannot reach rank {other.rank} on VM {other.device.vm_id}, "
        "and the manager hears both"
    )
    return chosen, reason


def _are_well(one: str, other: str, vms: Vms) -> bool:
    return one != other and all(vm_id in vms and vms[vm_id].connected for vm_id in (one, other))
