"""Which provider the settings ask for: `local`, `replay:TRACE`, `static:HOSTS` or `azure:SETTINGS`."""

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
    from varuna_planner.spot_trace import SpotTrace

CHOICES = "local, replay:TRACE.csv, static:HOSTS.yaml or azure:SETTINGS.yaml"


@dataclass(frozen=True)
class Chosen:
    provider: Provider
    emulated: EmulatedProvider | None = None
    """The same one, where its market is ours and its VMs have their folders here."""


@dataclass(frozen=True, kw_only=True)
class Boot:
    """What a cloud's new VMs start with."""

    origin: Origin
    join_token: Callable[[str], Awaitable[str]]
    """With which the agent of a VM of this name joins, once."""
    needs_prices: bool
    """Whether the fleet has a limit of cost."""


def is_cloud(chosen: str) -> bool:
    """Whether its VMs are other machines, which are made when they are asked for."""
    return chosen.startswith("azure:")


def check_choice(chosen: str) -> str:
    """Raises ValueError, naming what is wrong with it or with its file."""
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


def chosen_provider(chosen: str, local: LocalProvider, replay: ReplaySettings, memory_dir: Path) -> Chosen:
    """The provider. `local`: has the VMs where there are no others. Raises ValueError."""
    kind, _, path = chosen.partition(":")
    if kind == "replay":
        played = ReplayProvider(local, _read_trace(Path(path)), replay, memory_dir / "replay.json")
        return Chosen(played, played)
    if kind == "static":
        return Chosen(StaticProvider(read_hosts(Path(path)), time.time()))
    return Chosen(local, local)


def cloud_provider(chosen: str, boot: Boot) -> Provider:
    """The provider of a choice that `is_cloud`. Raises ValueError."""
    from varuna_manager.providers.azure import AzureProvider, azure_client  # brings the SDK: only where it is wanted
    from varuna_manager.providers.azure_boot import cloud_init

    settings = read_azure_settings(Path(chosen.partition(":")[2]))

    async def boot_script(vm_id: str, size: AzureSize) -> str:
        return cloud_init(boot.origin, settings, vm_id, size, await boot.join_token(vm_id))

    return AzureProvider(settings, azure_client(settings), boot_script, needs_prices=boot.needs_prices)


def _read_trace(path: Path) -> SpotTrace:
    from varuna_planner.spot_trace import parse_trace  # brings numpy: only where it is wanted

    try:
        return parse_trace(path.read_text(), name=str(path))
    except OSError as error:
        raise ValueError(f"trace {path} cannot be read ({error.strerror})") from error
