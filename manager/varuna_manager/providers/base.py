"""The interface to a provider of VMs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from varuna_manager.domain.fleet_decision import Refusal, RefusalKind
from varuna_manager.domain.pools import PoolTerms

__all__ = [
    "CreatedVms",
    "EmulatedProvider",
    "PooledProvider",
    "Provider",
    "ProviderNotice",
    "ProviderPartlyAwayError",
    "ProviderRefusedError",
    "ProviderVm",
    "Refusal",
    "RefusalKind",
    "UnknownVmError",
    "UnsupportedByProviderError",
    "VmOffer",
]


class UnknownVmError(Exception):
    """The provider has no such VM."""


class UnsupportedByProviderError(Exception):
    """The provider cannot do that with its VMs. `str()` says what to do instead."""


class ProviderRefusedError(Exception):
    """The provider refused, or cannot be reached. `str()` is its message."""


@dataclass(frozen=True, kw_only=True)
class ProviderVm:
    """A VM that the provider has."""

    id: str
    gpus: int
    device_memory_bytes: int | None
    host: str
    created_at: float
    ref: dict[str, Any] = field(default_factory=dict)
    """The provider's own handle; for the local provider {"pid": ..}."""
    request: str | None = None
    """Tag of the request that it was made for."""
    price_per_hour: float | None = None
    """In the provider's currency; None: not known, or free."""
    reason_before_hello: str = "its agent is starting"
    """The reason of its state until its agent has sent Hello."""
    going: bool = False
    """It is being deleted: nothing runs there, but it may still cost money."""
    ended: str | None = None
    """Why it has ended, if the provider did not delete it: nothing runs there, and it costs nothing. The list may leave
    such VMs out; then nobody learns the reason. None: it has not ended."""
    pool: str = ""
    """The pool of the fleet's settings that it belongs to; empty: the fleet has no pools."""
    zone: str = ""
    """The zone, or any other place within which the network is fast; empty: not known."""
    machine_type: str = ""
    """The provider's name for machines like it; empty: not known."""


class ProviderPartlyAwayError(Exception):
    """Some pools do not answer. `vms` are those of the others. `pools` do not answer, each with its error."""

    def __init__(self, vms: Sequence[ProviderVm], pools: Mapping[str, str]) -> None:
        super().__init__("; ".join(f"pool {name} does not answer ({error})" for name, error in sorted(pools.items())))
        self.vms = tuple(vms)
        self.pools = dict(pools)


@dataclass(frozen=True, kw_only=True)
class CreatedVms:
    """The result of a request for VMs."""

    vms: tuple[ProviderVm, ...] = ()
    """All VMs of the request that exist now."""
    refusal: Refusal | None = None
    """Why there are fewer than requested; None: there are as many."""


@dataclass(frozen=True, kw_only=True)
class VmOffer:
    """What one more VM would be, if it were requested now."""

    gpus: int
    price_per_hour: float | None = None
    hazard_per_hour: float | None = None
    """Expected preemptions per VM-hour; None: not known."""
    device_memory_bytes: int | None = None
    """Memory of each GPU; None: not known."""
    gpu_type: str = ""
    """Name of its GPUs; empty: not known."""


@dataclass(frozen=True, kw_only=True)
class ProviderNotice:
    """The provider takes the VM at the deadline."""

    id: str
    vm_id: str
    deadline_unix_s: float


class Provider(Protocol):
    """Calls may take long, so never call inside a transaction. Any call may raise; it is then repeated."""

    @property
    def name(self) -> str:
        """Name of the provider, which its VMs have in the store."""

    @property
    def is_elastic(self) -> bool:
        """Whether VMs can be requested and given back; if not, the set of VMs is fixed."""

    async def list(self) -> Sequence[ProviderVm]:
        """The VMs that exist now. Any other VM is gone, with everything that ran on it."""

    async def create(self, count: int, request: str) -> CreatedVms:
        """Make VMs until `count` of them carry the tag `request`.

        A caller that does not know the result may therefore repeat the request: no VM is made twice. VMs that were made
        before a refusal stay.
        """

    async def delete(self, vm_ids: Sequence[str]) -> None:
        """Give these VMs back; ignores VMs that are gone."""

    async def list_notices(self) -> Sequence[ProviderNotice]:
        """The pending notices."""

    async def get_offer(self) -> VmOffer:
        """What one more VM would be now."""

    async def preempt_vm(self, vm_id: str, notice_s: float) -> None:
        """Take the VM as the market does: at once if `notice_s` is 0, otherwise after a notice.

        Raises UnknownVmError, UnsupportedByProviderError, ProviderRefusedError.
        """

    async def close(self, *, end_vms: bool) -> None:
        """Release all resources. `end_vms`: end VMs too that are processes of this machine."""


@runtime_checkable
class PooledProvider(Provider, Protocol):
    """A provider whose VMs come from several pools. Each pool is a market of its own."""

    @property
    def pools(self) -> Mapping[str, PoolTerms]:
        """The pools, by name, in the order of the settings."""

    async def create_in(self, pool: str, count: int, request: str) -> CreatedVms:
        """As `create`, with the VMs of this pool only."""

    async def list_pool_offers(self) -> Mapping[str, VmOffer]:
        """What one more VM of each pool would be now. A pool that does not answer is left out."""


class EmulatedProvider(Provider, Protocol):
    """A provider with an emulated market, whose VMs have their disks on this machine."""

    @property
    def capacity(self) -> int | None:
        """Most VMs that the market grants; None: any number."""

    async def set_capacity(self, capacity: int | None) -> None:
        """Set how many VMs the market grants from now on."""

    def log_path(self, vm_id: str, job_id: str, generation: int, rank: int) -> Path:
        """The file of a worker's log, also after its VM is gone."""

    async def list_ended_vms(self) -> Mapping[str, float]:
        """VMs that ended and left files on this machine, and when they last wrote."""

    async def forget_vm(self, vm_id: str) -> None:
        """Remove the files of a VM that has ended. Raises OSError."""
