"""The kind `kubernetes`: pods from a template, whose image has the agent."""

from __future__ import annotations

from varuna_manager.providers.base import Provider
from varuna_manager.providers.kind import AgentStart, Extra, ProviderContext, ProviderKind
from varuna_manager.providers.kubernetes.settings import KubernetesSettings, read_kubernetes_settings

__all__ = ["KIND"]


def _make_kubernetes_provider(settings: KubernetesSettings, context: ProviderContext) -> Provider:
    from varuna_manager.providers.kubernetes.api import KubernetesApi, load_config  # load the client only when needed
    from varuna_manager.providers.kubernetes.provider import KubernetesProvider

    boot = context.boot
    api = KubernetesApi(load_config(settings), settings.namespace)
    return KubernetesProvider(settings, api, boot.origin, boot.join_token, needs_prices=context.needs_prices)


KIND = ProviderKind(
    read_settings=read_kubernetes_settings,
    make_provider=_make_kubernetes_provider,
    agents=AgentStart.INSTALLED,
    extra=Extra(name="kubernetes", what="the client for Kubernetes", modules=("lightkube",)),
    request_timeout_s=1800.0,
)
