"""A provider of simulated VMs: capacity, slow starts, notices, deadlines, a list that lags a little."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

from simulated_vm import SimulatedVm
from varuna_manager.domain.fleet_decision import Refusal, RefusalKind
from varuna_manager.providers.base import CreatedVms, ProviderNotice, ProviderVm, UnknownVmError, VmOffer
from virtual_time import VirtualTime


class SimulatedMarket:
    """`make_vm` makes a VM by its id. `interrupted` may raise where a real manager might die: after VMs were made."""

    name = "simulated"
    is_elastic = True

    def __init__(
        self,
        time: VirtualTime,
        chance: Random,
        make_vm: Callable[[str, int], SimulatedVm],
        interrupted: Callable[[], None],
        gpus: int = 1,
        prefix: str = "vm",
        boot_s: tuple[float, float] = (2.0, 30.0),
    ) -> None:
        self._time, self._chance, self._make_vm, self._interrupted = time, chance, make_vm, interrupted
        self._gpus = gpus
        self._prefix, self._boot_s = prefix, boot_s
        self._capacity: int | None = None
        self._notices: dict[str, ProviderNotice] = {}
        self._listed: dict[str, ProviderVm] = {}
        self.vms: dict[str, SimulatedVm] = {}
        self.made = 0

    async def list(self) -> Sequence[ProviderVm]:
        for vm_id in [vm_id for vm_id in self._listed if not self.vms[vm_id].alive]:
            if self._chance.random() < 0.8:  # the others are seen to be gone at the next look
                del self._listed[vm_id]
        return list(self._listed.values())

    async def create(self, count: int, request: str) -> CreatedVms:
        made = [vm for vm in self._listed.values() if vm.request == request]
        refusal = None
        while len(made) < count:
            alive = sum(vm.alive for vm in self.vms.values())
            if self._capacity is not None and alive >= self._capacity:
                refusal = Refusal(kind=RefusalKind.CAPACITY, reason=f"there are {self._capacity} VMs to be had")
                break
            made.append(self._make(request))
        self._interrupted()
        return CreatedVms(vms=tuple(made), refusal=refusal)

    def _make(self, request: str) -> ProviderVm:
        self.made += 1
        vm_id = f"{self._prefix}-{self.made}"
        vm = ProviderVm(
            id=vm_id,
            gpus=self._gpus,
            device_memory_bytes=16 * 2**30,
            host="127.0.0.1",
            created_at=self._time.now,
            request=request,
        )
        self._listed[vm_id] = vm
        self.vms[vm_id] = self._make_vm(vm_id, self._gpus)
        self._time.after(self._chance.uniform(*self._boot_s), self.vms[vm_id].boot)
        return vm

    async def delete(self, vm_ids: Sequence[str]) -> None:
        for vm_id in vm_ids:
            if vm_id in self.vms:
                self.vms[vm_id].end()

    async def list_notices(self) -> Sequence[ProviderNotice]:
        return [notice for vm_id, notice in self._notices.items() if self.vms[vm_id].alive]

    async def get_offer(self) -> VmOffer:
        return VmOffer(gpus=self._gpus)

    @property
    def capacity(self) -> int | None:
        return self._capacity

    async def set_capacity(self, capacity: int | None) -> None:
        self._capacity = capacity

    async def preempt_vm(self, vm_id: str, notice_s: float) -> None:
        vm = self.vms.get(vm_id)
        if vm is None or not vm.alive:
            raise UnknownVmError(f"there is no VM {vm_id}")
        if notice_s <= 0:
            vm.end()
            return
        self._notices[vm_id] = ProviderNotice(id=f"n-{vm_id}", vm_id=vm_id, deadline_unix_s=self._time.now + notice_s)
        self._time.after(self._chance.uniform(0.0, 1.0), lambda: vm.notice(f"n-{vm_id}", notice_s))
        self._time.after(notice_s, vm.end)

    def log_path(self, vm_id: str, job_id: str, generation: int, rank: int) -> Path:
        raise FileNotFoundError(vm_id)

    async def close(self, *, end_vms: bool) -> None:
        pass
