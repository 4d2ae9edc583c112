"""The manager's certificates: for agents (gRPC) always from the authority, for REST also the operator's."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import structlog

from varuna_manager.access.authority import Authority, AuthorityError, KeyPair, write_private_file

_LIFE = timedelta(days=90)
_MOST_WAIT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class OperatorFiles:
    """Files of the operator's certificate (with its chain) and key for REST, in PEM; read again when they change."""

    certificate: Path
    key: Path

    def read_stamp(self) -> tuple[int, int]:
        return self.certificate.stat().st_mtime_ns, self.key.stat().st_mtime_ns


class ServerTls:
    """Makes a certificate at each start, and a new one when a third of its lifetime is left, or it is not valid yet.

    Raises AuthorityError if the operator's files cannot be used.

    Args:
        names: host names and addresses of the manager.
        scratch: a folder for files that are deleted as soon as they are read.
    """

    def __init__(
        self,
        authority: Authority,
        names: Sequence[str],
        scratch: Path,
        operator: OperatorFiles | None = None,
        life: timedelta = _LIFE,
    ) -> None:
        self._authority = authority
        self._names = tuple(names)
        self._scratch = scratch
        self._operator = operator
        self._life = life
        self._log = structlog.get_logger("varuna.access")
        self._stamp = (0, 0)
        self._loaded: KeyPair | None = None
        """The pair of `find_pair` that `https` shows; None: it shows the operator's."""
        self.https = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._pair = authority.make_server_pair(self._names, life)
        self._load()

    def find_pair(self) -> KeyPair:
        """The present certificate from the authority. Thread-safe."""
        return self._pair

    async def run(self) -> None:
        """Renew the certificates for ever. Open connections go on."""
        while True:
            left_s = self._find_left_s()
            await asyncio.sleep(min(_MOST_WAIT_S, max(left_s, 0.1)))
            if left_s <= 0:
                self._pair = self._authority.make_server_pair(self._names, self._life)
                self._log.info("the manager's certificate was renewed", until=self._pair.not_after.isoformat())
            try:
                self._load()
            except (AuthorityError, OSError) as error:  # a full disk, say
                self._log.error("the certificate for REST was not replaced", error=str(error))

    def _find_left_s(self) -> float:
        """The time until it is due to be renewed. It is when a clock that was set back makes it valid only later."""
        now = datetime.now(UTC)
        return 0.0 if now < self._pair.not_before else (self._pair.not_after - now - self._life / 3).total_seconds()

    def _load(self) -> None:
        """Use the present certificate for new HTTPS connections. Raises AuthorityError, OSError."""
        if self._operator is None:
            if self._pair is not self._loaded:
                self._load_chain(self._pair.key_pem + self._pair.certificate_pem)
                self._loaded = self._pair
            return
        files = self._operator
        try:
            stamp = files.read_stamp()
            if stamp != self._stamp:
                self._load_chain(files.key.read_bytes() + b"\n" + files.certificate.read_bytes())
                self._stamp = stamp
        except OSError as error:  # ssl.SSLError among them
            raise AuthorityError(
                f"--tls-cert {files.certificate} and --tls-key {files.key} cannot be used ({error}): give a PEM "
                "certificate and its key without a passphrase"
            ) from error

    def _load_chain(self, content: bytes) -> None:
        """Raises OSError."""
        path = self._scratch / "server.pem"  # OpenSSL reads files only
        write_private_file(path, content)
        try:
            # First in another context: a failure halfway would leave a certificate with another one's key.
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(path, password=_no_passphrase)
            self.https.load_cert_chain(path, password=_no_passphrase)
        finally:
            path.unlink()


def _no_passphrase() -> str:
    """Without this, OpenSSL asks for the passphrase on the terminal."""
    raise ssl.SSLError("the key has a passphrase")
