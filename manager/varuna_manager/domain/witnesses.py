"""Whether a VM is given up for one job because two witnesses agree: the job's other ranks, and its agent's silence.

A silent agent alone may be cut off from the manager only, while its ranks train on. Ranks that wait alone may wait for
a slow one, or hang. But when all other ranks wait, one of them gets no answer from a rank, and the heartbeats of that
rank's VM are overdue, then the VM is not there for this job. Its state in the fleet follows the fleet's own rules
(`domain.fleet_decision`), and when it comes back its workers get the command to leave, as after any ended generation.
"""

from __future__ import annotations

from varuna_manager.domain.observed import GenerationView, Rules, Vms


def list_quiet_vms(now: float, generation: GenerationView, vms: Vms, rules: Rules) -> frozenset[str]:
    """The VMs where workers of the generation have not stopped and whose heartbeats are overdue."""
    return frozenset(vm_id for vm_id in generation.running_on if vm_id in vms and vms[vm_id].is_overdue(now, rules))


def find_witnessed_loss(now: float, generation: GenerationView, vms: Vms, rules: Rules) -> str:
    """Why the generation is to go on without a VM; empty: nothing of the kind is known."""
    silent = list_quiet_vms(now, generation, vms, rules)
    running = [worker for worker in generation.workers if not worker.stopped]
    others = [worker for worker in running if worker.device.vm_id not in silent]
    if not silent or any(worker.waiting_for is None for worker in others):
        return ""
    for worker in running:
        vm_id = worker.device.vm_id
        witness = next((other for other in others if worker.rank in other.quiet_ranks), None)
        if vm_id in silent and witness is not None:
            return (
                f"VM {vm_id} is given up for this job: rank {worker.rank} there does not answer rank {witness.rank}, "
                f"all others wait, and its agent has been silent for {vms[vm_id].silent_s(now):.1f} s"
            )
    return ""
