"""The kind `pools`: a fleet of several pools, each with a provider of its own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from varuna_manager.providers.base import Provider
from varuna_manager.providers.choice import check_choice, make_provider
from varuna_manager.providers.kind import AgentStart, ProviderContext, ProviderKind
from varuna_manager.providers.pools.provider import Pool, PoolsProvider
from varuna_manager.providers.pools.settings import FleetSettingsFile, PoolSettings
from varuna_manager.providers.settings_file import read_settings_file

__all__ = ["KIND", "read_fleet_settings"]


def read_fleet_settings(path: Path) -> FleetSettingsFile:
    """The pools, with their providers' files as paths from here. Raises ValueError with one line that names the file,
    the pool and what is wrong."""
    read = read_settings_file(path, FleetSettingsFile)
    pools: list[PoolSettings] = []
    user_of: dict[str, str] = {}
    for pool in read.pools:
        kind, _, file = pool.provider.partition(":")
        chosen = f"{kind}:{os.path.normpath(path.parent / file)}"
        other = user_of.setdefault(chosen, pool.name)
        if other != pool.name:
            text = f"pools {other} and {pool.name} have the same provider {pool.provider}"
            raise ValueError(
                f"{path}: {text}, which lists all its VMs for both: give each a file and a fleet of its own"
            )
        try:
            check_choice(chosen)
        except ValueError as error:
            raise ValueError(f"{path}: pool {pool.name}, provider {pool.provider}: {error}") from error
        pools.append(pool.model_copy(update={"provider": chosen}))
    return FleetSettingsFile(pools=tuple(pools))


def _list_choices(settings: FleetSettingsFile) -> Sequence[str]:
    """KIND:FILE of each pool."""
    return [pool.provider for pool in settings.pools]


def _make_pools_provider(settings: FleetSettingsFile, context: ProviderContext) -> Provider:
    """Raises ValueError."""
    return PoolsProvider([Pool(pool.make_terms(), make_provider(pool.provider, context)) for pool in settings.pools])


KIND = ProviderKind(
    read_settings=read_fleet_settings,
    make_provider=_make_pools_provider,
    agents=AgentStart.BY_OPERATOR,
    argument="FLEET.yaml",
    list_parts=_list_choices,
)
