"""Which devices a job's next generation would be planned for, and which VM is so near that it waits for it.

A worker on a VM whose agent has its imports still to do keeps all others waiting, for seconds. So where workers of the
job start from warmed processes, a VM without one is as good as on its way.
"""

from __future__ import annotations

from collections.abc import Iterable

from varuna_manager.domain.better_shape import Vms, most_gpus, slow_vms
from varuna_manager.domain.observed import Device, JobView, Rules, VmView
from varuna_manager.domain.states import GenerationKind


def next_devices(job: JobView, vms: Vms, rules: Rules) -> tuple[Device, ...]:
    """The devices that the job's next generation would be planned for, its present ones first.

    While a generation runs, new devices count once they have been there for `growth_settle_s`, and their agents have
    prepared for the job; while others are younger than that, growing waits for them, though not for ever. Between two
    training generations those are left out whose agents will prepare for longer than a morph takes: the job grows into
    them later.
    """
    live = job.generation is not None and job.generation.live
    own = job.generation.devices if job.generation is not None else frozenset()
    devices = sorted(job.devices, key=lambda device: (device not in own, device))
    if live:
        # What the job would do without its slow VMs; where they are all it has, there is nothing to ask.
        slow = slow_vms(job.generation, vms)
        devices = [device for device in devices if device.vm_id not in slow]
        ages = {device: vms[device.vm_id].ready_for_s for device in devices if device not in own}
        warmed = _is_warmed(job, own, vms)
        young = {d for d, age in ages.items() if age < _settle_s(job, vms[d.vm_id], rules, warmed=warmed)}
        if young and max(ages.values()) < 3 * rules.growth_settle_s:
            devices = [device for device in devices if device in own]
        else:
            devices = [device for device in devices if device not in young]
    elif _has_trained(job):
        soon = [device for device in devices if _warm_in_s(job, vms[device.vm_id], rules) <= job.morphs.cost_s]
        if _is_warmed(job, soon, vms) and len(soon) >= job.min_gpus:
            devices = soon
    return tuple(devices[: most_gpus(job)])


def _is_warmed(job: JobView, devices: Iterable[Device], vms: Vms) -> bool:
    """Whether workers of the job start from warmed processes anywhere: not every command can."""
    return any(device.vm_id in vms and job.id in vms[device.vm_id].warm for device in devices)


def _settle_s(job: JobView, vm: VmView, rules: Rules, *, warmed: bool) -> float:
    """How long a new VM must have been there. `warmed`: the job's workers elsewhere start from warmed processes."""
    is_cold = job.id in vm.preparing or (warmed and job.id not in vm.warm)
    return rules.growth_prepare_s if is_cold else rules.growth_settle_s


def _warm_in_s(job: JobView, vm: VmView, rules: Rules) -> float:
    """When the job's workers will start there at once; 0 for a VM that is not expected to come to that any more."""
    warm_s = job.fleet.warm_s
    if warm_s is None or job.id in vm.warm or vm.ready_for_s >= rules.growth_prepare_s:
        return 0.0
    return max(warm_s - vm.ready_for_s, 0.0)


def _has_trained(job: JobView) -> bool:
    ended = job.generation
    return ended is not None and ended.kind is GenerationKind.TRAINING and job.morphs.measured


def worth_waiting_for(now: float, job: JobView, devices: tuple[Device, ...], vms: Vms, rules: Rules) -> str:
    """Which VM is so near that a start without it, and a morph when it is here, would cost more than the wait.

    Started now, the job would train on the VMs that are left from the end of this morph (`cost_s`) until the new one
    is here, prepared and settled, and then lose `cost_s` once more. So waiting pays while the VM is due before this
    morph would be over. It ends when the VM is overdue.
    """
    due_s = job.fleet.arrives_within_s()
    if due_s is None or not _has_trained(job) or job.share is not None:
        return ""
    prepares_s = (job.fleet.warm_s or 0.0) if _is_warmed(job, devices, vms) else 0.0
    if due_s + prepares_s > job.morphs.cost_s:
        return ""
    gain = (len(devices) + 1) / max(len(devices), 1)
    if gain < job.morphs.worthwhile_ratio(rules.growth_ratio, job.fleet.stable_s(now)):
        return ""
    return (
        f"waiting for a VM on its way: new ones take {job.fleet.join_s:.1f} s, and growing into it later would cost "
        f"another morph ({job.morphs.cost_s:.1f} s)"
    )
