"""The kind `ec2`: spot instances of AWS, which install their agents from the manager.

The cloud-init document with the join token is the instance's user data. Whatever runs on the instance can read that
later, but the token has been used by then.
"""

from __future__ import annotations

from varuna_manager.providers.base import Provider
from varuna_manager.providers.boot import AgentMachine, render_cloud_init
from varuna_manager.providers.ec2_settings import Ec2Settings, read_ec2_settings
from varuna_manager.providers.kind import (
    CLOUD_REQUEST_TIMEOUT_S,
    AgentStart,
    Extra,
    ProviderContext,
    ProviderKind,
)

__all__ = ["KIND", "describe_machine"]

_GIB = 1 << 30


def describe_machine(settings: Ec2Settings, vm_id: str) -> AgentMachine:
    """A new VM, for its agent."""
    memory_gib = settings.device_memory_gib
    return AgentMachine(
        vm_id=vm_id,
        gpus=settings.gpus,
        device=settings.device,
        device_memory_bytes=None if memory_gib is None else int(memory_gib * _GIB),
        notices="aws-rebalance" if settings.on_rebalance == "leave" else "aws",
        pip_options=settings.pip_options,
    )


def _make_ec2_provider(settings: Ec2Settings, context: ProviderContext) -> Provider:
    from varuna_manager.providers.ec2 import Ec2Provider, make_ec2_client  # loads the SDK only when it is needed

    boot = context.boot

    async def boot_script(vm_id: str) -> str:
        return render_cloud_init(boot.origin, describe_machine(settings, vm_id), await boot.join_token(vm_id))

    return Ec2Provider(settings, make_ec2_client(settings), boot_script, needs_prices=context.needs_prices)


KIND = ProviderKind(
    read_settings=read_ec2_settings,
    make_provider=_make_ec2_provider,
    agents=AgentStart.FROM_MANAGER,
    extra=Extra(name="ec2", what="AWS's SDK", modules=("boto3",)),
    request_timeout_s=CLOUD_REQUEST_TIMEOUT_S,
)
