"""The provider that the settings choose: `local`, `replay:TRACE`, `static:HOSTS` or `azure:SETTINGS`."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from varuna_manager.extras import check_extra
from varuna_manager.providers.azure_settings import AzureSize, read_azure_settings
from varuna_manager.providers.base import EmulatedProvider, Provider
from varuna_manager.providers.local import LocalProvider
from varuna_manager.providers.replay import ReplayProvider, ReplaySettings
from varuna_manager.providers.static import StaticProvider, read_hosts

if TYPE_CHECKING:
    from varuna_manager.providers.azure_boot import Origin
    from varuna_planner.liveput.spot_trace import SpotTrace

CHOICES = "local, replay:TRACE.csv, static:HOSTS.yaml or azure:SETTINGS.yaml"


@dataclass(frozen=True)
class ProviderChoice:
    provider: Provider
    emulated: EmulatedProvider | None = None
    """The same provider, if it emulates a market."""


@dataclass(frozen=True, kw_only=True)
class BootSettings:
    """What a cloud's provider needs for new VMs."""

    origin: Origin
    join_token: Callable[[str], Awaitable[str]]
    """Makes a single-use join token for the agent of the VM with this name."""
    needs_prices: bool
    """Whether the cost of the fleet is limited."""


def has_local_vms(chosen: str) -> bool:
    """Whether its VMs are processes of this machine."""
    return chosen.partition(":")[0] in ("local", "replay")


def is_cloud(chosen: str) -> bool:
    """Whether the provider makes VMs in a cloud."""
    return chosen.startswith("azure:")


def check_choice(chosen: str) -> str:
    """Raises ValueError that names what is wrong with the choice or with its file."""
    kind, separator, path = chosen.partition(":")
    if kind == "local" and not separator:
        return chosen
    if kind == "replay" and path:
        _read_trace(Path(path))
    elif kind == "static" and path:
        read_hosts(Path(path))
    elif kind == "azure" and path:
        check_extra("azure", "Azure's SDK", "azure.mgmt.compute")
        read_azure_settings(Path(path))
    else:
        raise ValueError(f"expected {CHOICES}")
    return chosen


def make_provider(chosen: str, local: LocalProvider, replay: ReplaySettings, memory_dir: Path) -> ProviderChoice:
    """The chosen provider, unless it is a cloud's. `local` has the VMs for local and replay. Raises ValueError."""
    kind, _, path = chosen.partition(":")
    if kind == "replay":
        played = ReplayProvider(local, _read_trace(Path(path)), replay, memory_dir / "replay.json")
        return ProviderChoice(played, played)
    if kind == "static":
        return ProviderChoice(StaticProvider(read_hosts(Path(path)), time.time()))
    return ProviderChoice(local, local)


def make_cloud_provider(chosen: str, boot: BootSettings) -> Provider:
    """The chosen provider of a cloud. Raises ValueError."""
    from varuna_manager.providers.azure import AzureProvider, make_azure_client  # loads the SDK only when it is needed
    from varuna_manager.providers.azure_boot import render_cloud_init

    settings = read_azure_settings(Path(chosen.partition(":")[2]))

    async def boot_script(vm_id: str, size: AzureSize) -> str:
        return render_cloud_init(boot.origin, settings, vm_id, size, await boot.join_token(vm_id))

    return AzureProvider(settings, make_azure_client(settings), boot_script, needs_prices=boot.needs_prices)


def _read_trace(path: Path) -> SpotTrace:
    from varuna_planner.liveput.spot_trace import parse_trace  # loads numpy only when it is needed

    try:
        return parse_trace(path.read_text(), name=str(path))
    except OSError as error:
        raise ValueError(f"trace {path} cannot be read ({error.strerror})") from error
