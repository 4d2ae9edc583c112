"""What the manager needs of whatever rents out VMs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


class ProviderRefusedError(Exception):
    """No VM now (no capacity, no quota): ask again later. `str()` says why."""


class UnknownVmError(Exception):
    """The provider has no such VM."""


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


@dataclass(frozen=True, kw_only=True)
class Notice:
    """The provider will take the VM at the deadline."""

    id: str
    vm_id: str
    deadline_unix_s: float


class Provider(Protocol):
    """All calls may take long: never make one inside a transaction."""

    name: str

    async def list(self) -> Sequence[ProviderVm]:
        """The VMs that exist now. A VM that is not among them is gone, with all that ran on it."""

    async def create(self) -> ProviderVm:
        """Ask for one more. Raises ProviderRefusedError."""

    async def delete(self, vm_id: str) -> None:
        """Give one back; nothing happens when it is gone already."""

    async def notices(self) -> Sequence[Notice]:
        """The notices that are pending."""


class EmulatedProvider(Provider, Protocol):
    """A provider whose market is ours to play with."""

    @property
    def capacity(self) -> int | None:
        """VMs that it grants at once; None: any number."""

    async def set_capacity(self, capacity: int | None) -> None: ...

    async def preempt(self, vm_id: str, notice_s: float) -> None:
        """Take the VM: at once when `notice_s` is 0, else after a notice. Raises UnknownVmError."""

    def log_path(self, vm_id: str, job_id: str, generation: int, rank: int) -> Path:
        """Where a worker's log of a VM lies that is gone."""

    async def close(self, *, end_vms: bool) -> None: ...
