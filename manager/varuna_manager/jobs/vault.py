"""Secrets in an Azure Key Vault.

`read` answers from memory and never waits; requests to the vault run in the background. A value is requested again
after FRESH_S and is used for at most KEEP_S, so that launches go on while the vault is away for some minutes. It is
never written to a disk. When the vault refuses a secret, its value is no longer used.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

import structlog
from azure.core.credentials_async import AsyncTokenCredential
from azure.core.exceptions import ClientAuthenticationError, HttpResponseError
from azure.identity.aio import DefaultAzureCredential
from azure.keyvault.secrets.aio import SecretClient

from varuna_manager.jobs.secrets import SecretAwayError, SecretError

FRESH_S = 300.0
"""A value of this age is requested again when a job that has not ended names it."""
KEEP_S = 900.0
"""The longest time that a value is kept and used."""
PAUSE_S = 5.0
"""The pause before the next request after an answer without a value."""
_TIMEOUT_S = 10.0
"""For one secret, including its token."""
_LONGEST_PAUSE_S = 300.0
"""The longest Retry-After that is respected."""
_AT_ONCE = 8
"""Requests at the same time."""
_MOST_DETAIL = 2000
"""Characters of the message from Azure's SDK about the identity."""

_WAYS_OUT = {
    "SecretDisabled": "the secret is disabled: enable it there",
    "ForbiddenByFirewall": "let the manager's address through the vault's firewall",
    "ForbiddenByConnection": "let the manager reach the vault: it takes private connections only",
    "ForbiddenByPolicy": "allow its identity to get secrets in the vault's access policy",
}


class _Closeable(Protocol):
    async def close(self) -> None: ...


@dataclass(frozen=True)
class _Value:
    data: bytes
    at: float
    """When it was requested."""


@dataclass(frozen=True)
class _Refusal:
    """The vault's answer that it does not give a secret."""

    text: str
    at: float


@dataclass(frozen=True)
class _Outage:
    """The vault gives no valid answer about any secret."""

    text: str
    until: float
    """The time of the next request."""


def open_vault(url: str) -> VaultSecrets:
    """Opens the vault with the manager VM's identity, or another one that DefaultAzureCredential finds."""
    credential = DefaultAzureCredential()
    return VaultSecrets(vault_client(url, credential), credential)


def vault_client(url: str, credential: AsyncTokenCredential, **options: Any) -> SecretClient:
    """A client without retries of its own: VaultSecrets decides when the vault is asked again.

    It sends the identity's token only to a vault of the cloud that the vault's challenge names.
    """
    return SecretClient(url, credential, retry_total=0, **options)


class VaultSecrets:
    """A SecretSource. `close` closes both `client` and its `credential`; `client` makes no retries of its own."""

    def __init__(
        self,
        client: SecretClient,
        credential: _Closeable,
        *,
        timeout_s: float = _TIMEOUT_S,
        keep_s: float = KEEP_S,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._credential = credential
        self._timeout_s = timeout_s
        self._keep_s = keep_s
        self._now = now
        self._host = urlsplit(client.vault_url).netloc
        self._values: dict[str, _Value] = {}
        self._refusals: dict[str, _Refusal] = {}
        self._outage: _Outage | None = None
        self._requests: dict[str, asyncio.Task[None]] = {}
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._log = structlog.get_logger("varuna.secrets").bind(vault=self._host)

    def read(self, name: str) -> bytes:
        """The vault's last answer. Raises SecretAwayError when there is none yet, or none for too long."""
        self.prefetch_secret(name)
        if name in self._values:
            return self._values[name].data
        if name in self._refusals:
            raise SecretError(self._refusals[name].text)
        raise SecretAwayError(self._outage.text if self._outage else f"{self._host} is being asked for it")

    def prefetch_secret(self, name: str) -> asyncio.Task[None] | None:
        """Request the secret if that is due. The running request; None: there is none."""
        self._forget_old()
        if name not in self._requests and self._is_due(name):
            self._requests[name] = asyncio.create_task(self._request(name))
            self._requests[name].add_done_callback(lambda _: self._requests.pop(name, None))
        return self._requests.get(name)

    async def close(self) -> None:
        under_way = list(self._requests.values())
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
        self._values.clear()
        await self._client.close()
        await self._credential.close()

    def _is_due(self, name: str) -> bool:
        now, value, refusal = self._now(), self._values.get(name), self._refusals.get(name)
        if self._is_paused() or (value is not None and now - value.at < FRESH_S):
            return False
        return refusal is None or now - refusal.at >= PAUSE_S

    def _is_paused(self) -> bool:
        return self._outage is not None and self._now() < self._outage.until

    def _forget_old(self) -> None:
        oldest = self._now() - self._keep_s
        self._values = {name: value for name, value in self._values.items() if value.at > oldest}
        self._refusals = {name: refusal for name, refusal in self._refusals.items() if refusal.at > oldest}

    # ------------------------------------------------------------ a request

    async def _request(self, name: str) -> None:
        async with self._slots:
            if self._is_paused():
                return  # the vault went away while this request waited for its turn
            asked_at = self._now()
            try:
                async with asyncio.timeout(self._timeout_s):
                    secret = await self._client.get_secret(name)
            except HttpResponseError as error:
                if error.status_code in (403, 404):
                    self._record_refusal(name, _refusal_text(self._host, error))
                else:
                    self._record_outage(error)
            except Exception as error:  # errors of the network and the identity, and invalid answers
                self._record_outage(error)
            else:
                self._record_value(name, secret.value, asked_at)

    def _record_value(self, name: str, value: str | None, asked_at: float) -> None:
        if value is None:
            self._record_refusal(name, f"{self._host} has no value for it")
            return
        self._record_answer()
        self._refusals.pop(name, None)
        self._values[name] = _Value(value.encode(), asked_at)
        asyncio.get_running_loop().call_later(self._keep_s, self._forget_old)

    def _record_refusal(self, name: str, text: str) -> None:
        self._record_answer()
        self._values.pop(name, None)
        before = self._refusals.get(name)
        self._refusals[name] = _Refusal(text, self._now())
        if before is None or before.text != text:
            self._log.warning("the vault does not give a secret", secret=name, reason=text)

    def _record_answer(self) -> None:
        if self._outage is not None:
            self._log.info("the vault answers again")
        self._outage = None

    def _record_outage(self, error: Exception) -> None:
        text = _outage_text(self._host, error, self._timeout_s)
        if self._outage is None or self._outage.text != text:
            detail = error.message if isinstance(error, ClientAuthenticationError) else ""
            self._log.warning("the vault is away", reason=text, detail=" ".join(detail.split())[:_MOST_DETAIL])
        self._outage = _Outage(text, self._now() + _pause_s(error))
        self._refusals.clear()  # what held before the outage may no longer hold


# ---------------------------------------------------------------- what an answer means


def _refusal_text(host: str, error: HttpResponseError) -> str:
    if error.status_code == 404:
        return f"{host} has no secret of this name: ask the manager's operator"
    code = _inner_code(error)
    way_out = _WAYS_OUT.get(code, "give its identity the role Key Vault Secrets User there")
    return f"{host} refuses it to the manager ({', '.join(filter(None, ('403', code)))}): {way_out}"


def _inner_code(error: HttpResponseError) -> str:
    """The vault's code for the refusal; empty: it gives none. The rest of its text names identities."""
    try:
        code = error.response.json()["error"]["innererror"]["code"]  # type: ignore[union-attr]
    except (AttributeError, KeyError, TypeError, ValueError):
        return ""
    return code if isinstance(code, str) and re.fullmatch("[A-Za-z]{1,40}", code) else ""


def _outage_text(host: str, error: Exception, timeout_s: float) -> str:
    """One line, without any part of an answer's body."""
    if isinstance(error, TimeoutError):
        return f"{host} does not answer within {timeout_s:g} s"
    if isinstance(error, ClientAuthenticationError):
        return f"the manager has no identity that {host} accepts: its log has the details"
    if isinstance(error, HttpResponseError) and error.status_code is not None:
        return f"{host} answers with status {error.status_code} and no secret"
    return f"{host} cannot be asked ({type(error).__name__})"


def _pause_s(error: Exception) -> float:
    """The pause before the next request: as long as the vault asks for, within bounds."""
    asked_s = getattr(getattr(error, "response", None), "headers", {}).get("Retry-After", "")
    return min(max(PAUSE_S, float(asked_s)), _LONGEST_PAUSE_S) if asked_s.isdecimal() else PAUSE_S
