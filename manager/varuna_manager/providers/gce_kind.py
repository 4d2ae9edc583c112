"""The kind `gce`: spot VMs of Google Cloud, which install their agents from the manager.

The cloud-init document with the join token is the VM's metadata `user-data`. Whatever runs on the VM can read that
later, but the token has been used by then.
"""

from __future__ import annotations

from varuna_manager.providers.base import Provider
from varuna_manager.providers.boot import AgentMachine, render_cloud_init
from varuna_manager.providers.gce_settings import GceSettings, read_gce_settings
from varuna_manager.providers.kind import (
    CLOUD_REQUEST_TIMEOUT_S,
    AgentStart,
    Extra,
    ProviderContext,
    ProviderKind,
)

__all__ = ["KIND", "describe_machine"]

_GIB = 1 << 30


def describe_machine(settings: GceSettings, vm_id: str) -> AgentMachine:
    """A new VM, for its agent."""
    memory_gib = settings.device_memory_gib
    return AgentMachine(
        vm_id=vm_id,
        gpus=settings.gpus,
        device=settings.device,
        device_memory_bytes=None if memory_gib is None else int(memory_gib * _GIB),
        notices="gcp",
        pip_options=settings.pip_options,
    )


def _make_gce_provider(settings: GceSettings, context: ProviderContext) -> Provider:
    from varuna_manager.providers.gce import GceProvider, make_gce_clients  # loads the SDK only when it is needed

    boot = context.boot

    async def boot_script(vm_id: str) -> str:
        return render_cloud_init(boot.origin, describe_machine(settings, vm_id), await boot.join_token(vm_id))

    return GceProvider(settings, make_gce_clients(), boot_script, needs_prices=context.needs_prices)


KIND = ProviderKind(
    read_settings=read_gce_settings,
    make_provider=_make_gce_provider,
    agents=AgentStart.FROM_MANAGER,
    extra=Extra(name="gce", what="Google Cloud's client", modules=("google.cloud.compute_v1",)),
    request_timeout_s=CLOUD_REQUEST_TIMEOUT_S,
)
