"""What the manager needs of whatever rents out VMs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from varuna_manager.domain.fleet_decision import Refusal


class UnknownVmError(Exception):
    """The provider has no such VM."""


class NotThatProviderError(Exception):
    """The provider's VMs are not like that. `str()` says what to do instead."""


class ProviderRefusedError(Exception):
    """The provider did not do it, or cannot be reached. `str()` is what it says."""


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
    """The request that it was made for: its tag."""
    price_per_hour: float | None = None
    """In the provider's currency; None: not known, or nothing."""
    state_of_affairs: str = "its agent is starting"
    """What to say of it until its agent has said Hello."""
    going: bool = False
    """It is being deleted: nothing runs there any more, and it may still have to be paid for."""


@dataclass(frozen=True, kw_only=True)
class Created:
    """What became of a request."""

    vms: tuple[ProviderVm, ...] = ()
    """All VMs of the request that exist now."""
    refusal: Refusal | None = None
    """Why there are fewer than were asked for; None: there are as many."""


@dataclass(frozen=True, kw_only=True)
class Offer:
    """One more VM, as the provider would make it now."""

    gpus: int
    price_per_hour: float | None = None
    hazard_per_hour: float | None = None
    """Preemptions to expect of a VM; None: not known."""
    device_memory_bytes: int | None = None
    """Of each GPU; None: not known."""
    gpu_type: str = ""
    """What its GPUs are called; empty: not known."""


@dataclass(frozen=True, kw_only=True)
class Notice:
    """The provider will take the VM at the deadline."""

    id: str
    vm_id: str
    deadline_unix_s: float


class Provider(Protocol):
    """All calls may take long: never make one inside a transaction. Any call may raise, and is then made again."""

    @property
    def name(self) -> str:
        """Of the provider; VMs in the store carry it."""

    @property
    def grows(self) -> bool:
        """Whether VMs can be asked for and given back; else there are those that there are."""

    async def list(self) -> Sequence[ProviderVm]:
        """The VMs that exist now. A VM that is not among them is gone, with all that ran on it."""

    async def create(self, count: int, request: str) -> Created:
        """Make VMs until `count` of them carry the tag `request`.

        So a request may be made again by whoever does not know what became of it: it makes no VM twice. VMs that
        come before a refusal stay.
        """

    async def delete(self, vm_ids: Sequence[str]) -> None:
        """Give these back; nothing happens for those that are gone already."""

    async def notices(self) -> Sequence[Notice]:
        """The notices that are pending."""

    async def offer(self) -> Offer:
        """What one more VM would be."""

    async def preempt(self, vm_id: str, notice_s: float) -> None:
        """Have the VM taken as the market would take it: at once when `notice_s` is 0, else after a notice.

        Raises UnknownVmError, NotThatProviderError, ProviderRefusedError.
        """

    async def close(self, *, end_vms: bool) -> None:
        """Let go of it all. `end_vms`: of the VMs too, if they are processes of this machine."""


class EmulatedProvider(Provider, Protocol):
    """A provider whose market is ours to play with, and whose VMs have their disks on this machine."""

    @property
    def capacity(self) -> int | None:
        """VMs that it grants at once; None: any number."""

    async def set_capacity(self, capacity: int | None) -> None:
        """Grant so many from now on."""

    def log_path(self, vm_id: str, job_id: str, generation: int, rank: int) -> Path:
        """Where a worker's log of a VM lies that is gone."""

    async def left_behind(self) -> Mapping[str, float]:
        """VMs that have ended and left files on this machine, and when they last wrote some."""

    async def forget(self, vm_id: str) -> None:
        """Remove what a VM that has ended left on this machine. Raises OSError."""
