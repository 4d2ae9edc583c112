"""What a provider's package writes for its tests: the provider over a fake of its service."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence

from varuna_manager.providers.base import Provider, RefusalKind

__all__ = ["FixedBench", "ProviderBench"]


class FixedBench(ABC):
    """A provider whose set of VMs is fixed."""

    provider: Provider

    @abstractmethod
    async def restart_provider(self) -> None:
        """Put a new provider in the place of `provider`, over the same fake service, as a manager does that starts
        again. Nothing of the old one's memory is passed on. The old one is not asked to end anything."""


class ProviderBench(FixedBench):
    """A provider that makes VMs. The methods below do to it what its service does."""

    refusals: frozenset[RefusalKind]
    """The kinds of refusal that `refuse_creations` can cause; at least one of capacity and quota."""
    gives_notices: bool = False
    """Whether `list_notices` reports what is announced. False: the agents on the VMs hear of it."""

    @abstractmethod
    async def list_real_vms(self) -> Collection[str]:
        """The ids of all VMs of this fleet that exist, without the provider's help. A VM that is being deleted exists
        until it is gone."""

    @abstractmethod
    async def lose_next_answer(self) -> None:
        """The next request for VMs takes effect, all of it or a part, and its answer does not arrive. From then on
        every call to the service fails, until `reconnect`."""

    @abstractmethod
    async def refuse_creations(self, kind: RefusalKind, granted: int) -> None:
        """The service makes this many more VMs and refuses all further ones, for this reason. For `THROTTLED`,
        `granted` is 0."""

    @abstractmethod
    async def end_refusals(self) -> None:
        """The service makes VMs again, and pauses after refusals have passed."""

    @abstractmethod
    async def take_vm(self, vm_id: str, notice_s: float) -> None:
        """The service takes the VM away, by itself: at once if `notice_s` is 0, otherwise after that notice."""

    @abstractmethod
    async def cut_off(self) -> None:
        """From now on, every call to the service fails."""

    @abstractmethod
    async def reconnect(self) -> None:
        """Calls to the service succeed again."""

    async def advance(self) -> None:
        """Let time pass in the service: operations under way come nearer to their end. Called while tests wait."""

    async def add_stranger(self) -> str | None:
        """A VM of somebody else in the same account, by its id; None: a service like this one has no others."""
        return None

    async def list_leftovers(self) -> Sequence[str]:
        """Names of all that costs money or uses quota and is no VM: disks, addresses, queued requests."""
        return ()
