"""How two processes of a generation prove to each other that they know its secret, without showing it.

    client: greeting, nonce_c                server: nonce_s, MAC("server", nonce_c, nonce_s)
    client: MAC("client", nonce_c, nonce_s)

The MACs are HMAC-SHA-256 under a key that is derived from the secret for one job, generation and meeting place, so
nothing that is heard in one generation is of use in another. The client learns first who serves: it sends nothing that
a stranger could use. What follows on the connection is not encrypted; docs/security.md says what that leaves open.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import struct
import time
from dataclasses import dataclass, field

from varuna_proto.environment import WorkerEnvironment

__all__ = ["GREETING_BYTES", "PROOF_BYTES", "Greeting", "MeetingKey", "StrangerError", "greet"]

_MAGIC = b"varuna1\n"
_NONCE_BYTES = 32
PROOF_BYTES = hashlib.sha256().digest_size
GREETING_BYTES = len(_MAGIC) + _NONCE_BYTES
_PORTS = range(32768, 60999)
"""Linux's own range for ports that are nobody's."""
_CANDIDATES = 8


class StrangerError(ConnectionError):
    """The other end does not know the generation's secret."""


@dataclass(frozen=True)
class MeetingKey:
    """What the ranks of one generation have in common, and nobody else."""

    _key: bytes = field(repr=False)

    @classmethod
    def derive(cls, secret: str, job_id: str, generation: int, host: str, port: int) -> MeetingKey:
        """`host`, `port`: where the launcher says that the generation meets. Without a secret anybody can derive it."""
        place = f"varuna generation key/{job_id}/{generation}/{host}/{port}"
        return cls(hmac.digest(secret.encode(), place.encode(), "sha256"))

    @classmethod
    def of(cls, environment: WorkerEnvironment) -> MeetingKey:
        """That of a worker's generation."""
        return cls.derive(
            environment.secret,
            environment.job_id,
            environment.generation,
            environment.rendezvous_host,
            environment.rendezvous_port,
        )

    def mac(self, purpose: str, *words: bytes) -> bytes:
        text = b"".join(struct.pack("!I", len(word)) + word for word in (purpose.encode(), *words))
        return hmac.digest(self._key, text, "sha256")

    def ports(self) -> tuple[int, ...]:
        """Where rank 0 may serve the rendezvous store: the first that is free. All ranks look there, in this order."""
        drawn = self.mac("ports")
        return tuple(_PORTS[n % len(_PORTS)] for n in struct.unpack(f"!{_CANDIDATES}I", drawn))


class Greeting:
    """The server's side, for one connection: pure, so that one thread can serve many."""

    def __init__(self, key: MeetingKey, greeting: bytes) -> None:
        """`greeting`: the first GREETING_BYTES of the client. Raises StrangerError when they are none."""
        self.check_beginning(greeting)
        theirs, ours = greeting[len(_MAGIC) :], secrets.token_bytes(_NONCE_BYTES)
        self.answer = ours + key.mac("server", theirs, ours)
        """To be sent."""
        self._expected = key.mac("client", theirs, ours)

    @staticmethod
    def check_beginning(received: bytes | bytearray) -> None:
        """Raises StrangerError when what has come so far cannot become a greeting."""
        if received[: len(_MAGIC)] != _MAGIC[: len(received)]:
            raise StrangerError("it does not speak Varuna's protocol")

    def check(self, proof: bytes) -> None:
        """`proof`: the client's next PROOF_BYTES. Raises StrangerError when they are not right."""
        if not hmac.compare_digest(proof, self._expected):
            raise StrangerError("it does not know this generation's secret")


def greet(connection: socket.socket, key: MeetingKey, within_s: float) -> None:
    """The client's side. Raises StrangerError, or OSError when the other end says nothing in time."""
    deadline_s = time.monotonic() + within_s
    ours = secrets.token_bytes(_NONCE_BYTES)
    connection.settimeout(within_s)
    connection.sendall(_MAGIC + ours)
    answer = b""
    while len(answer) < _NONCE_BYTES + PROOF_BYTES:
        connection.settimeout(max(deadline_s - time.monotonic(), 0.001))
        part = connection.recv(_NONCE_BYTES + PROOF_BYTES - len(answer))
        if not part:
            raise StrangerError("it has turned this process away")
        answer += part
    theirs, proof = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
    if not hmac.compare_digest(proof, key.mac("server", ours, theirs)):
        raise StrangerError("who listens there does not know this generation's secret")
    connection.sendall(key.mac("client", ours, theirs))
    connection.settimeout(None)
