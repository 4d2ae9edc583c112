"""Which devices a job's next generation is planned for, and whether it waits for a VM that will arrive soon.

A worker on a VM whose agent has not done its imports yet keeps all others waiting for seconds. Where workers of the job
start from warmed processes, a VM without one therefore counts as not yet arrived.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from varuna_manager.domain.better_shape import count_vms, find_worthwhile_ratio, gpu_limit, list_slow_vms
from varuna_manager.domain.clock import is_within
from varuna_manager.domain.observed import JobView, Rules, Vms, VmView
from varuna_manager.domain.other_stages import find_newcomers, list_at_door
from varuna_manager.domain.reshaping import PLANNED_STOPS
from varuna_manager.domain.states import GenerationKind, GenerationState, JobState
from varuna_manager.domain.witnesses import list_quiet_vms
from varuna_proto.plan import Device


def choose_devices(now: float, job: JobView, vms: Vms, rules: Rules) -> tuple[Device, ...]:
    """The devices for which the job's next generation is planned, its present ones first.

    While a generation runs, new devices count when they are `growth_settle_s` old and their agents have prepared for
    the job. Growth waits for younger ones, but not for ever. Between two training generations, devices are left out
    whose agents need longer to prepare than a morph takes: the job grows into them later. Nor does a job grow into a VM
    whose heartbeat is overdue, or start again where workers of its last generation are silent.
    """
    live = job.generation is not None and job.generation.live
    own = job.generation.devices if job.generation is not None else frozenset()
    devices = sorted(job.devices, key=lambda device: (device not in own, device))
    if job.generation is not None:
        silent = list_quiet_vms(now, job.generation, vms, rules)
        devices = [
            device
            for device in devices
            if (device in own if live else device.vm_id not in silent) or not _is_overdue(now, device, vms, rules)
        ]
    if live:
        # What the job would do without its slow VMs; where they are all it has, there is nothing to ask.
        slow = list_slow_vms(job.generation, vms)
        devices = [device for device in devices if device.vm_id not in slow]
        ages = {device: vms[device.vm_id].ready_for_s(now) for device in devices if device not in own}
        warmed = _is_warmed(job, own, vms)
        young = {d for d, age in ages.items() if age < _settle_s(job, vms[d.vm_id], rules, warmed=warmed)}
        if young and max(ages.values()) < 3 * rules.growth_settle_s:
            devices = [device for device in devices if device in own]
        else:
            devices = [device for device in devices if device not in young]
    else:
        devices = _leave_out_unprepared(now, job, devices, vms, rules)
        if ready := _list_ready(now, job, rules):
            devices = [device for device in devices if device in ready]
    return tuple(devices[: gpu_limit(job)])


def list_waiting_devices(now: float, job: JobView, rules: Rules) -> frozenset[Device]:
    """Where processes of the job wait that have left for another shape, or give it their state. No other job takes
    these devices before it has begun: it would end the processes, and with them the state that only they have."""
    generation = job.generation
    if generation is None or job.state is not JobState.RUNNING:
        return frozenset()
    if generation.state is GenerationState.LAUNCHING and generation.holders is not None:
        return frozenset(
            Device(one.vm_id, one.local_rank) for one in generation.holders.members if one.local_rank is not None
        )
    stop_cause = None if generation.stop is None else generation.stop.cause
    is_over = not generation.live and not is_within(now, generation.ended_at or 0.0, rules.survivors_kept_s)
    if (generation.end_cause or stop_cause) not in PLANNED_STOPS or is_over:
        return frozenset()
    return frozenset(worker.device for worker in generation.workers if worker.held_step is not None)


def keep_waiting_share(now: float, job: JobView, rules: Rules) -> JobView:
    """The job with a share of at least the devices where its processes wait between two generations.

    They have saved nothing, so a smaller share would lose what they hold. The next generation takes it, and leaves
    again with a save (`decide_shrinking`).
    """
    if job.share is None or job.generation is None or job.generation.live:
        return job
    waiting = len(list_waiting_devices(now, job, rules).intersection(job.devices))
    return replace(job, share=waiting) if waiting > job.share and waiting >= job.min_gpus else job


def _leave_out_unprepared(now: float, job: JobView, devices: list[Device], vms: Vms, rules: Rules) -> list[Device]:
    """Without the devices whose agents need longer to prepare than a morph takes."""
    if not _has_trained(job):
        return devices
    soon = [device for device in devices if _warm_in_s(now, job, vms[device.vm_id], rules) <= job.morphs.cost_s]
    return soon if _is_warmed(job, soon, vms) and len(soon) >= job.min_gpus else devices


def _list_ready(now: float, job: JobView, rules: Rules) -> frozenset[Device]:
    """Just after a planned stop, where the processes are for which it was planned; empty: they are not all there.

    On other devices, new processes would start in the pause.
    """
    ended, starts_ahead = job.generation, job.starts_ahead and rules.newcomers_wait_s > 0
    if ended is None or ended.plan is None or ended.end_cause not in PLANNED_STOPS or job.has_fixed_stages:
        return frozenset()
    if not is_within(now, ended.ended_at or 0.0, rules.survivors_wait_s):
        return frozenset()
    newcomers = find_newcomers(job, ended)
    at_door = list_at_door(job, ended)
    is_without = newcomers is not None and not at_door.issuperset(newcomers.wanted.devices)
    if not starts_ahead or job.newcomers_obstacle or is_without:
        return frozenset()  # it stopped without them, so others may start in the pause, too
    staying = [worker for worker in ended.workers if not worker.gives_only and worker.device in job.devices]
    staying = [worker for worker in staying if worker.held_step is not None or not worker.stopped]
    ready = at_door | {worker.device for worker in staying}
    is_whole = len({worker.rank % ended.plan.p for worker in staying}) == ended.plan.p
    return ready if is_whole and len(ready) >= job.min_gpus else frozenset()


def _is_overdue(now: float, device: Device, vms: Vms, rules: Rules) -> bool:
    return device.vm_id in vms and vms[device.vm_id].is_overdue(now, rules)


def _is_warmed(job: JobView, devices: Iterable[Device], vms: Vms) -> bool:
    """Whether workers of the job start from warmed processes anywhere. Not every command allows that."""
    return any(device.vm_id in vms and job.id in vms[device.vm_id].warm for device in devices)


def _settle_s(job: JobView, vm: VmView, rules: Rules, *, warmed: bool) -> float:
    """The age that a new VM must have. `warmed`: the job's workers start from warmed processes on other VMs."""
    is_cold = job.id in vm.preparing or (warmed and job.id not in vm.warm)
    return rules.growth_prepare_s if is_cold else rules.growth_settle_s


def _warm_in_s(now: float, job: JobView, vm: VmView, rules: Rules) -> float:
    """The time until the job's workers can start there at once; 0: now, or it is no longer expected."""
    warm_s = job.fleet.warm_s
    if warm_s is None or job.id in vm.warm or vm.ready_for_s(now) >= rules.growth_prepare_s:
        return 0.0
    return max(warm_s - vm.ready_for_s(now), 0.0)


def _has_trained(job: JobView) -> bool:
    ended = job.generation
    return ended is not None and ended.kind is GenerationKind.TRAINING and job.morphs.measured


def explain_waiting_for_vm(now: float, job: JobView, devices: tuple[Device, ...], vms: Vms, rules: Rules) -> str:
    """Why the start waits for a VM that will arrive soon; empty: it does not.

    If the job started now, it would train from the end of this morph (`cost_s`) until the new VM is prepared, and then
    lose `cost_s` again. So waiting pays while the VM is due before this morph would end. It ends when the VM is
    overdue.
    """
    due_s = job.fleet.next_arrival_s()
    if due_s is None or not _has_trained(job) or job.share is not None or _list_ready(now, job, rules):
        return ""
    prepares_s = (job.fleet.warm_s or 0.0) if _is_warmed(job, devices, vms) else 0.0
    if due_s + prepares_s > job.morphs.cost_s:
        return ""
    gain = (len(devices) + 1) / max(len(devices), 1)
    if gain < find_worthwhile_ratio(now, job, count_vms(devices) + 1, rules.growth_ratio):
        return ""
    return (
        f"waiting for a requested VM: new ones take {job.fleet.join_s:.1f} s, and growing into it later would cost "
        f"another morph ({job.morphs.cost_s:.1f} s)"
    )
