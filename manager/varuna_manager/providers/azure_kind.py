"""The kind `azure`: spot VMs of Azure, which install their agents from the manager.

The cloud-init document with the join token is Azure's custom data: neither Azure's API nor its metadata service returns
that, and only root can read it on the VM.
"""

from __future__ import annotations

from varuna_manager.providers.azure_settings import AzureSettings, AzureSize, read_azure_settings
from varuna_manager.providers.base import Provider
from varuna_manager.providers.boot import AgentMachine, render_cloud_init
from varuna_manager.providers.kind import (
    CLOUD_REQUEST_TIMEOUT_S,
    AgentStart,
    Extra,
    ProviderContext,
    ProviderKind,
)

__all__ = ["KIND", "describe_machine"]

_GIB = 1 << 30


def describe_machine(settings: AzureSettings, vm_id: str, size: AzureSize) -> AgentMachine:
    """A VM of this size, for its agent."""
    memory_gib = size.device_memory_gib
    return AgentMachine(
        vm_id=vm_id,
        gpus=size.gpus,
        device=settings.device,
        device_memory_bytes=None if memory_gib is None else int(memory_gib * _GIB),
        notices="azure",
        pip_options=settings.pip_options,
    )


def _make_azure_provider(settings: AzureSettings, context: ProviderContext) -> Provider:
    from varuna_manager.providers.azure import AzureProvider, make_azure_client  # loads the SDK only when it is needed

    boot = context.boot

    async def boot_script(vm_id: str, size: AzureSize) -> str:
        machine = describe_machine(settings, vm_id, size)
        return render_cloud_init(boot.origin, machine, await boot.join_token(vm_id))

    return AzureProvider(settings, make_azure_client(settings), boot_script, needs_prices=context.needs_prices)


KIND = ProviderKind(
    read_settings=read_azure_settings,
    make_provider=_make_azure_provider,
    agents=AgentStart.FROM_MANAGER,
    extra=Extra(name="azure", what="Azure's SDK", modules=("azure.mgmt.compute",)),
    request_timeout_s=CLOUD_REQUEST_TIMEOUT_S,
)
