"""The REST client of the manager, and the `varuna` command built on it."""

from varuna_client.api import DEFAULT_URL, AsyncClient, Client
from varuna_client.errors import NotFoundError, RefusedError, UnreachableError, UserError, VarunaError

__all__ = [
    "DEFAULT_URL",
    "AsyncClient",
    "Client",
    "NotFoundError",
    "RefusedError",
    "UnreachableError",
    "UserError",
    "VarunaError",
]
