"""Secrets of jobs: a job names them, and the manager reads them when it launches a worker, never before.

What is read goes into the one message that launches the worker, and into no store, log or answer. Only what the
operator has laid out for jobs can be named: files of one folder, variables of one prefix, the secrets of one vault.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

MOST_BYTES = 32 * 1024
"""Of one secret: those of a job go into one message."""
SUBMISSION_WAIT_S = 10.0
"""For what a source fetches. The `varuna` command waits 15 s for its answer."""
VARIABLE_PREFIX = "VARUNA_MANAGER_SECRET_"


class SecretError(Exception):
    """A secret cannot be read. `str()` says which and what helps, and nothing of its value."""


class SecretAwayError(SecretError):
    """Whether there is such a secret cannot be told now: a launch waits, and a submission is not refused for it."""


class SecretSource(Protocol):
    """A place with secrets."""

    def read(self, name: str) -> bytes:
        """`name` is plain: no path. Never waits for a network. Raises SecretError."""

    def prepare(self, name: str) -> asyncio.Task[None] | None:
        """Fetch what `read` may soon be asked for, in the background. What is under way; None: nothing has to be."""

    async def close(self) -> None: ...


class _AtHand:
    """What a source does that has its secrets at hand."""

    def prepare(self, name: str) -> None:
        return None

    async def close(self) -> None:
        return


class SecretFiles(_AtHand):
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, name: str) -> bytes:
        """The file's contents, without the line's end that editors write."""
        path = self._folder / name
        try:
            with path.open("rb") as file:
                return file.read(MOST_BYTES + 2).removesuffix(b"\n").removesuffix(b"\r")
        except OSError as error:
            raise SecretError(f"{path} of the manager cannot be read ({error.strerror}): ask its operator") from None


class SecretVariables(_AtHand):
    def __init__(self, environ: Mapping[str, str]) -> None:
        self._values = {name: value for name, value in environ.items() if name.startswith(VARIABLE_PREFIX)}

    def read(self, name: str) -> bytes:
        variable = VARIABLE_PREFIX + name
        if variable not in self._values:
            raise SecretError(f"the manager has no variable {variable}: ask its operator")
        return self._values[variable].encode(errors="surrogateescape")


class NoVault(_AtHand):
    """In the vault's place, where the manager has none."""

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

    def read(self, references: Mapping[str, str]) -> dict[str, str]:
        """The values of a job's secrets, by its variables. Raises SecretError for the first that is not to be had."""
        return {variable: self._read(reference) for variable, reference in references.items()}

    def why_not(self, references: Mapping[str, str]) -> str:
        """Why a job could not be launched now; empty: it could be."""
        try:
            self.read(references)
        except SecretError as error:
            return str(error)
        return ""

    def prepare(self, references: Mapping[str, str]) -> list[asyncio.Task[None]]:
        """Have at hand what a launch may soon need. What is under way for that, in the background."""
        parts = [reference.partition(":") for reference in references.values()]
        begun = [self._sources[kind].prepare(name) for kind, _, name in parts if kind in self._sources]
        return [task for task in begun if task is not None]

    async def why_never(self, references: Mapping[str, str]) -> str:
        """Why a new job is to be refused; empty: it is not. A source that is away now is no reason."""
        if under_way := self.prepare(references):
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
            raise SecretError(f"secret {reference!r} is larger than {MOST_BYTES} bytes: lay it on the VMs as a file")
        try:
            text = value.decode()
        except UnicodeDecodeError:
            text = "\0"
        if "\0" in text:
            raise SecretError(f"secret {reference!r} is no text, as environment variables are: encode it (base64)")
        return text


def _vault(url: str) -> SecretSource:
    if not url:
        return NoVault()
    from varuna_manager.services.vault import open_vault  # brings the SDK: only where it is wanted

    return open_vault(url)
