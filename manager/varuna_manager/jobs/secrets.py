"""Secrets of jobs: a job names them, and the manager reads them when it launches a worker, never before.

Their values go into the message that launches the worker, and into no store, log or answer. A job can name only what
the operator provides for jobs: files of one folder, variables with one prefix, the secrets of one vault.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

MOST_BYTES = 32 * 1024
"""The limit of one secret: all secrets of a job go into one message."""
SUBMISSION_WAIT_S = 10.0
"""The wait for a source to fetch secrets. The `varuna` command waits 15 s for its answer."""
VARIABLE_PREFIX = "VARUNA_MANAGER_SECRET_"


class SecretError(Exception):
    """A secret cannot be read. `str()` names it and the way out, and never its value."""


class SecretAwayError(SecretError):
    """The source is away, so it is not known whether the secret exists: a launch waits, a submission is accepted."""


class SecretSource(Protocol):
    """A place with secrets."""

    def read(self, name: str) -> bytes:
        """The value of the secret `name`, which is no path. Never waits for a network. Raises SecretError."""

    def prefetch_secret(self, name: str) -> asyncio.Task[None] | None:
        """Fetch a secret that may soon be read, in the background. The running task; None: none is needed."""

    async def close(self) -> None: ...


class _LocalSource:
    """A source whose secrets are on this machine."""

    def prefetch_secret(self, name: str) -> None:
        return None

    async def close(self) -> None:
        return


class SecretFiles(_LocalSource):
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, name: str) -> bytes:
        """The file's contents, without the final line break that editors write."""
        path = self._folder / name
        try:
            with path.open("rb") as file:
                return file.read(MOST_BYTES + 2).removesuffix(b"\n").removesuffix(b"\r")
        except OSError as error:
            raise SecretError(f"{path} of the manager cannot be read ({error.strerror}): ask its operator") from None


class SecretVariables(_LocalSource):
    def __init__(self, environ: Mapping[str, str]) -> None:
        self._values = {name: value for name, value in environ.items() if name.startswith(VARIABLE_PREFIX)}

    def read(self, name: str) -> bytes:
        variable = VARIABLE_PREFIX + name
        if variable not in self._values:
            raise SecretError(f"the manager has no variable {variable}: ask its operator")
        return self._values[variable].encode(errors="surrogateescape")


class NoVault(_LocalSource):
    """Takes the place of the vault when the manager has none."""

    def read(self, name: str) -> bytes:
        raise SecretError("this manager reads no vault: its operator starts it with --secrets-vault")


class Secrets:
    """The sources by the word before the colon of a reference: `file:NAME`, `env:NAME`, `vault:NAME`."""

    def __init__(self, sources: Mapping[str, SecretSource]) -> None:
        self._sources = sources

    @classmethod
    def of_manager(cls, folder: Path, environ: Mapping[str, str], vault_url: str = "") -> Secrets:
        """`vault_url`: of an Azure Key Vault; empty: none. `close` it at the end."""
        return cls({"file": SecretFiles(folder), "env": SecretVariables(environ), "vault": _vault(vault_url)})

    def read_values(self, references: Mapping[str, str]) -> dict[str, str]:
        """The values of a job's secrets by variable. Raises SecretError for the first that cannot be read."""
        return {variable: self._read(reference) for variable, reference in references.items()}

    def explain_missing(self, references: Mapping[str, str]) -> str:
        """Why a job cannot be launched now; empty: it can."""
        try:
            self.read_values(references)
        except SecretError as error:
            return str(error)
        return ""

    def prefetch_secrets(self, references: Mapping[str, str]) -> list[asyncio.Task[None]]:
        """Fetch in the background what a launch may soon need. The tasks that do it."""
        parts = [reference.partition(":") for reference in references.values()]
        begun = [self._sources[kind].prefetch_secret(name) for kind, _, name in parts if kind in self._sources]
        return [task for task in begun if task is not None]

    async def explain_refusal(self, references: Mapping[str, str]) -> str:
        """Why a new job is refused; empty: it is not. A source that is away now is no reason."""
        if under_way := self.prefetch_secrets(references):
            await asyncio.wait(under_way, timeout=SUBMISSION_WAIT_S)
        for reference in references.values():
            try:
                self._read(reference)
            except SecretAwayError:
                continue
            except SecretError as error:
                return str(error)
        return ""

    async def close(self) -> None:
        for source in self._sources.values():
            await source.close()

    def _read(self, reference: str) -> str:
        kind, _, name = reference.partition(":")
        source = self._sources.get(kind)
        if source is None:
            raise SecretError(f"secret {reference!r}: this manager knows {', '.join(self._sources) or 'none'}")
        try:
            value = source.read(name)
        except SecretError as error:
            raise type(error)(f"secret {reference!r}: {error}") from None
        if len(value) > MOST_BYTES:
            raise SecretError(f"secret {reference!r} is larger than {MOST_BYTES} bytes: put it on the VMs as a file")
        try:
            text = value.decode()
        except UnicodeDecodeError:
            text = "\0"
        if "\0" in text:
            raise SecretError(
                f"secret {reference!r} is not text, so it cannot be an environment variable: encode it (base64)"
            )
        return text


def _vault(url: str) -> SecretSource:
    if not url:
        return NoVault()
    from varuna_manager.jobs.vault import open_vault  # imports the SDK only when it is needed

    return open_vault(url)
