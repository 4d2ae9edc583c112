"""The REST client of the manager, and the `varuna` command built on it."""

from varuna_client.errors import NoAnswerError, NotFoundError, RefusedError, UnreachableError, UserError, VarunaError
from varuna_client.rest.client import DEFAULT_URL, AsyncClient, Client

__all__ = [
    "DEFAULT_URL",
    "AsyncClient",
    "Client",
    "NoAnswerError",
    "NotFoundError",
    "RefusedError",
    "UnreachableError",
    "UserError",
    "VarunaError",
]
