"""How two processes of a generation prove to each other that they know its secret, without showing it.

    client: greeting, nonce_c                server: nonce_s, MAC("server", nonce_c, nonce_s)
    client: MAC("client", nonce_c, nonce_s)

The MACs are HMAC-SHA-256 under a key that is derived from the secret for one job, generation and meeting place, so
messages recorded in one generation are of no use in another. The server proves itself first, so the client sends
nothing that a stranger could use. The rest of the connection is not encrypted; docs/security.md says what that leaves
open.
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

__all__ = ["GREETING_BYTES", "PROOF_BYTES", "MeetingKey", "ServerHandshake", "StrangerError", "greet_server"]

_MAGIC = b"varuna1\n"
_NONCE_BYTES = 32
PROOF_BYTES = hashlib.sha256().digest_size
GREETING_BYTES = len(_MAGIC) + _NONCE_BYTES
_PORTS = range(32768, 60999)
"""Linux's default range of ephemeral ports."""
_CANDIDATES = 8


class StrangerError(ConnectionError):
    """The other end does not know the generation's secret."""


@dataclass(frozen=True)
class MeetingKey:
    """A key that the ranks of one generation share with no other process."""

    _key: bytes = field(repr=False)

    @classmethod
    def derive_key(cls, secret: str, job_id: str, generation: int, *, host: str, port: int) -> MeetingKey:
        """`host`, `port`: the meeting place of the launcher. Without a secret any process can derive the key."""
        place = f"varuna generation key/{job_id}/{generation}/{host}/{port}"
        return cls(hmac.digest(secret.encode(), place.encode(), "sha256"))

    @classmethod
    def from_environment(cls, environment: WorkerEnvironment) -> MeetingKey:
        """The key of a worker's generation."""
        return cls.derive_key(
            environment.secret,
            environment.job_id,
            environment.generation,
            host=environment.rendezvous_host,
            port=environment.rendezvous_port,
        )

    def compute_mac(self, purpose: str, *words: bytes) -> bytes:
        text = b"".join(struct.pack("!I", len(word)) + word for word in (purpose.encode(), *words))
        return hmac.digest(self._key, text, "sha256")

    def candidate_ports(self) -> tuple[int, ...]:
        """The ports of the rendezvous store: rank 0 takes the first free one, and all ranks try them in this order."""
        drawn = self.compute_mac("ports")
        return tuple(_PORTS[n % len(_PORTS)] for n in struct.unpack(f"!{_CANDIDATES}I", drawn))


class ServerHandshake:
    """The server's side, for one connection: pure, so that one thread can serve many."""

    def __init__(self, key: MeetingKey, greeting: bytes) -> None:
        """`greeting`: the first GREETING_BYTES of the client. Raises StrangerError when they are no greeting."""
        self.check_beginning(greeting)
        theirs, ours = greeting[len(_MAGIC) :], secrets.token_bytes(_NONCE_BYTES)
        self.answer = ours + key.compute_mac("server", theirs, ours)
        """To be sent."""
        self._expected = key.compute_mac("client", theirs, ours)

    @staticmethod
    def check_beginning(received: bytes | bytearray) -> None:
        """Raises StrangerError when `received` is not the beginning of a greeting."""
        if received[: len(_MAGIC)] != _MAGIC[: len(received)]:
            raise StrangerError("it does not speak Varuna's protocol")

    def check_proof(self, proof: bytes) -> None:
        """`proof`: the client's next PROOF_BYTES. Raises StrangerError when they are wrong."""
        if not hmac.compare_digest(proof, self._expected):
            raise StrangerError("it does not know this generation's secret")


def greet_server(connection: socket.socket, key: MeetingKey, within_s: float) -> None:
    """The client's side. Raises StrangerError, or OSError when the server does not answer in time."""
    deadline_s = time.monotonic() + within_s
    ours = secrets.token_bytes(_NONCE_BYTES)
    connection.settimeout(within_s)
    connection.sendall(_MAGIC + ours)
    answer = b""
    while len(answer) < _NONCE_BYTES + PROOF_BYTES:
        connection.settimeout(max(deadline_s - time.monotonic(), 0.001))
        part = connection.recv(_NONCE_BYTES + PROOF_BYTES - len(answer))
        if not part:
            raise StrangerError("it turned this process away")
        answer += part
    theirs, proof = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
    if not hmac.compare_digest(proof, key.compute_mac("server", ours, theirs)):
        raise StrangerError("the process that listens there does not know this generation's secret")
    connection.sendall(key.compute_mac("client", ours, theirs))
    connection.settimeout(None)
