"""The kind `slurm`: VMs that are jobs of a Slurm cluster."""

from __future__ import annotations

import os
import shutil

from varuna_manager.providers.base import Provider
from varuna_manager.providers.kind import AgentStart, ProviderContext, ProviderKind
from varuna_manager.providers.slurm.commands import SlurmCommands, make_tool_environment
from varuna_manager.providers.slurm.job_script import render_script
from varuna_manager.providers.slurm.provider import SlurmProvider
from varuna_manager.providers.slurm.settings import SlurmSettings, read_slurm_settings

__all__ = ["KIND"]

_START_S = 600.0
"""A node may have to boot first, and its Python comes from a file system that all nodes share."""


def _make_slurm_provider(settings: SlurmSettings, context: ProviderContext) -> Provider:
    missing = [tool for tool in ("sbatch", "squeue", "scancel") if shutil.which(tool) is None]
    if missing:
        raise ValueError(f"{', '.join(missing)} not found: run the manager where Slurm's client tools are installed")
    if context.needs_prices and settings.price_per_hour is None:
        raise ValueError("--max-cost-per-hour needs prices: give price_per_hour in Slurm's settings")
    boot = context.boot

    async def make_script(vm_id: str) -> str:
        return render_script(boot.origin, settings, vm_id, await boot.join_token(vm_id))

    return SlurmProvider(settings, SlurmCommands(make_tool_environment(os.environ, settings.export)), make_script)


KIND = ProviderKind(
    read_settings=read_slurm_settings,
    make_provider=_make_slurm_provider,
    agents=AgentStart.INSTALLED,
    request_timeout_s=_START_S,
)
