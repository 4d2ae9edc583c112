"""Which types of GPU each job may have, in a fleet with several."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from functools import cached_property

from varuna_manager.domain.fitting import fits_job
from varuna_manager.domain.gpu_types import OnlyType, choose_job_type, explain_one_type
from varuna_manager.domain.observed import VmView
from varuna_manager.domain.spec import Resources
from varuna_proto.plan import Device

__all__ = ["GpuTypes"]


class GpuTypes:
    """`vms`: all that are not gone. `occupied`: the job that has each device. `jobs`: those that are not over."""

    def __init__(self, vms: Mapping[str, VmView], occupied: Mapping[Device, str], jobs: int) -> None:
        self._jobs = jobs
        self._vms = vms
        self._occupied = occupied
        self._is_mixed = len({vm.gpu_type for vm in vms.values() if vm.gpu_type}) > 1

    def find_only_type(self, job_id: str, wanted: Resources, its_vms: Collection[str]) -> OnlyType | None:
        """The type of all the job's GPUs; None: it may mix types, or those that it could have are of one type, as far
        as that is known.

        `its_vms`: those of its newest generation.
        """
        if not self._is_mixed:
            return None
        usable: Counter[str] = Counter()
        for vm in self._vms.values():
            fits = vm.gpu_type and fits_job(wanted, gpu_type=vm.gpu_type, device_memory_bytes=vm.device_memory_bytes)
            if vm.usable and fits:
                usable[vm.gpu_type] += vm.gpus - self._taken[vm.id] + self._taken_by[job_id, vm.id]
        if sum(count > 0 for count in usable.values()) < 2:
            return None
        why = explain_one_type(wanted, usable, is_alone=self._jobs == 1)
        if not why:
            return None
        own = Counter(self._vms[vm_id].gpu_type for vm_id in its_vms if vm_id in self._vms)
        present = own.most_common(1)[0][0] if own else None
        memory_bytes = {vm.gpu_type: vm.device_memory_bytes for vm in self._vms.values() if vm.device_memory_bytes}
        chosen = choose_job_type(usable, present, max_gpus=wanted.max_gpus, memory_bytes=memory_bytes)
        return None if chosen is None else OnlyType(chosen, why)

    @cached_property
    def _taken(self) -> Counter[str]:
        return Counter(device.vm_id for device in self._occupied)

    @cached_property
    def _taken_by(self) -> Counter[tuple[str, str]]:
        return Counter((job_id, device.vm_id) for device, job_id in self._occupied.items())
