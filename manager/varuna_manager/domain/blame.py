"""Which VM the end of a generation speaks against: workers keep dying there, or other VMs cannot reach it.

Such a VM is quarantined, like one that is slow or hangs, unless it is the only one.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from varuna_manager.domain.actions import Action, Decision, EndGeneration, RecordDeath
from varuna_manager.domain.causes import find_root_cause
from varuna_manager.domain.observed import GenerationView, Rules, Vms, VmView, WorkerView
from varuna_manager.domain.quarantine import make_quarantine
from varuna_manager.domain.states import EndCause, ExitCause

_DEATHS = frozenset({ExitCause.KILLED, ExitCause.LAUNCH_FAILED, ExitCause.LAUNCH_REFUSED, ExitCause.AGENT_ENDED, None})
_ENDS_BY_DEATH = frozenset({EndCause.WORKER_FAILED, EndCause.AGENT_ENDED, EndCause.LAUNCH_REFUSED})


def add_blame(now: float, generation: GenerationView | None, decision: Decision, vms: Vms, rules: Rules) -> Decision:
    """The decision, with actions against a VM where it ends the generation."""
    ends = [action for action in decision.actions if isinstance(action, EndGeneration)]
    if not ends or generation is None:
        return decision
    blamed = _blame(now, generation, ends[0].cause, vms, rules)
    return replace(decision, actions=(*decision.actions, *blamed)) if blamed else decision


def _blame(now: float, generation: GenerationView, cause: EndCause, vms: Vms, rules: Rules) -> list[Action]:
    if cause is EndCause.UNREACHABLE:
        vm_id, reason = find_unreachable_vm(generation, vms)
        return [make_quarantine(now, [vms[vm_id]], rules, reason=reason)] if vm_id else []
    root = find_root_cause(generation)
    if cause not in _ENDS_BY_DEATH or root is None or root.cause not in _DEATHS:
        return []
    vm = vms.get(root.device.vm_id)
    return [] if vm is None else _deaths(now, generation, root, vm, rules)


def _deaths(now: float, generation: GenerationView, root: WorkerView, vm: VmView, rules: Rules) -> list[Action]:
    recent = vm.last_death_at is not None and abs(now - vm.last_death_at) < rules.death_window_s
    deaths = vm.deaths + 1 if recent else 1
    found: list[Action] = [RecordDeath(vm_id=vm.id, deaths=deaths)]
    if deaths >= rules.quarantine_deaths and set(generation.vm_ids) > {vm.id}:
        reason = (
            f"{deaths} generations in a row ended because of workers there, each less than "
            f"{rules.death_window_s / 60:.0f} minutes after the one before, the last because of rank {root.rank}"
        )
        found.append(make_quarantine(now, [vm], rules, reason=reason))
    return found


# ---------------------------------------------------------------- VMs that do not reach each other


def find_unreachable_vm(generation: GenerationView, vms: Vms) -> tuple[str, str]:
    """The VM to plan without, and why, when ranks could not reach others whose VMs are connected; else ("", "").

    It is the VM that occurs in most of these pairs, so a VM that accuses all others accuses itself. Of a single pair
    it is the VM of the rank that reports it.
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
        "although the manager reaches both"
    )
    return chosen, reason


def _are_well(one: str, other: str, vms: Vms) -> bool:
    return one != other and all(vm_id in vms and vms[vm_id].connected for vm_id in (one, other))
