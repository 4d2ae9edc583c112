"""The door for providers: what an entry point of the group `varuna_manager.providers` names.

`varuna manager --provider KIND:FILE` finds the entry point KIND, reads FILE, and makes the provider. A package of
anybody's may have such entry points; docs/writing-a-provider.md shows one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Generic, TypeVar

from varuna_manager.providers.base import Provider

__all__ = [
    "CLOUD_REQUEST_TIMEOUT_S",
    "PROVIDER_GROUP",
    "AgentStart",
    "BootSettings",
    "Extra",
    "Origin",
    "ProviderContext",
    "ProviderKind",
]

PROVIDER_GROUP = "varuna_manager.providers"
CLOUD_REQUEST_TIMEOUT_S = 1200.0
"""A cloud makes a VM, which then installs its agent."""

SettingsT = TypeVar("SettingsT")


class AgentStart(StrEnum):
    """How the agent of a VM is started."""

    BY_OPERATOR = "by operator"
    """A person starts it. The provider gets no `BootSettings`."""
    INSTALLED = "installed"
    """The provider starts it where Varuna is installed: in an image, or on a file system that the VMs share."""
    FROM_MANAGER = "from manager"
    """The VM installs Varuna from the manager, which therefore needs a wheel (`--agent-wheel`), and then starts it."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where new VMs get their agent, and which managers it dials."""

    managers: str
    """host:port of each manager's agent port, separated by commas."""
    urls: tuple[str, ...]
    """URL of each manager's REST API."""
    ca_pem: str | None
    """The authority of the certificate at `urls`; None: one that the image trusts."""


@dataclass(frozen=True, kw_only=True)
class BootSettings:
    """What a provider needs to start agents that become VMs of this manager."""

    origin: Origin
    join_token: Callable[[str], Awaitable[str]]
    """Makes a join token for the agent of the VM with this name. It is valid for an hour and for a single use."""


@dataclass(frozen=True, kw_only=True)
class ProviderContext:
    """What a manager gives to the provider that it makes."""

    needs_prices: bool = False
    """The cost of the fleet is limited, so the provider makes no VM whose price it does not know."""
    boot_settings: BootSettings | None = None
    """None only where an operator starts the agents."""

    @property
    def boot(self) -> BootSettings:
        """For kinds that start agents."""
        assert self.boot_settings is not None, "a kind whose agents an operator starts has no BootSettings"
        return self.boot_settings


@dataclass(frozen=True, kw_only=True)
class Extra:
    """An extra of varuna-spot, without which the provider cannot be made."""

    name: str
    """pip install 'varuna-spot[NAME]'."""
    what: str
    """What the extra installs, for messages: "Azure's SDK"."""
    modules: tuple[str, ...]
    """Modules that can be found where it is installed."""


@dataclass(frozen=True, kw_only=True)
class ProviderKind(Generic[SettingsT]):
    """A kind of provider. The module that has it must not import what only its extra installs."""

    read_settings: Callable[[Path], SettingsT]
    """Reads the file and nothing else. Raises ValueError with one line: the file, the place in it, the value, the way
    out. The manager also calls it to check its settings before it starts."""
    make_provider: Callable[[SettingsT, ProviderContext], Provider]
    """Makes no call to the provider's service. Raises ValueError."""
    agents: AgentStart
    argument: str = "SETTINGS.yaml"
    """How messages show the file after the colon."""
    extra: Extra | None = None
    request_timeout_s: float | None = None
    """Longest time from a VM's request to its agent's first message, unless `--request-timeout-s` is given; None: the
    manager's default."""
    list_parts: Callable[[SettingsT], Sequence[str]] | None = None
    """For a kind that is made of other providers: their choices (KIND:FILE). What they need, it needs."""
