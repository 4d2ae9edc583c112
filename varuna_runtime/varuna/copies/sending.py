"""Sending copies to the process that keeps them; over a `PacedConnection`, as slowly as training needs."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress

from varuna.copies.pacing import LEAST_SHARE, CopyPace
from varuna.distributed.handshake import MeetingKey
from varuna.distributed.rendezvous_protocol import AnswerStatus, pack_message, receive_message
from varuna.holdings.giving import send_chunk
from varuna.holdings.inventory import HeldFile
from varuna.holdings.taking import connect_to_server
from varuna.holdings.transfer_protocol import LARGEST_MESSAGE_BYTES

__all__ = ["PacedConnection", "send_request"]

_CHUNK_BYTES = 256 << 10
"""Smaller than those of a transfer: messages of the pipeline wait for one at most."""
_UNSENT_BYTES = 128 << 10
"""In the kernel: what is in its queue stands before messages of the pipeline."""
_BULK_PRIORITY = 2
"""Linux's TC_PRIO_BULK: queues that know priorities send all else first."""


class PacedConnection:
    """Sends files to a keeper, one request after the other. It connects when there is something to send."""

    def __init__(
        self,
        address: str,
        key: MeetingKey,
        is_pipeline_sending: Callable[[], bool],
        *,
        least_share: float = LEAST_SHARE,
    ) -> None:
        """`address`: `host:port` of the keeper's `StateServer`. `least_share`: as for `CopyPace`."""
        self.address = address
        self._key = key
        self._stopped = threading.Event()
        self._pace = CopyPace(is_pipeline_sending, self._stopped, least_share=least_share)
        self._connection: socket.socket | None = None

    @property
    def is_stopped(self) -> bool:
        return self._stopped.is_set()

    def wait_until_stopped(self, limit_s: float) -> bool:
        """Waits for `shut_down`, at most so long. Returns whether it has been called."""
        return self._stopped.wait(limit_s)

    def send_files(self, kind: int, words: Sequence[bytes], files: Iterable[HeldFile]) -> None:
        """Sends a request and its files, and waits until the keeper has them.

        Raises OSError, ValueError or struct.error; the connection is of no use then (`drop`).
        """
        send_request(self._connect(), kind, words, self._iterate_paced(files))

    def _iterate_paced(self, files: Iterable[HeldFile]) -> Iterator[Sequence[memoryview]]:
        for file in files:
            for chunk in file.iterate_chunks(0, _CHUNK_BYTES):
                self._pace.begin_chunk()
                if self._stopped.is_set():
                    raise ConnectionError("stopped")
                yield chunk
                self._pace.end_chunk()

    def drop(self) -> None:
        """Closes the connection; the next request makes another one."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def shut_down(self) -> None:
        """Ends what is under way. From any thread."""
        self._stopped.set()
        connection = self._connection
        if connection is not None:
            with suppress(OSError):  # it has ended by itself
                connection.shutdown(socket.SHUT_RDWR)

    def _connect(self) -> socket.socket:
        if self._connection is not None:
            return self._connection
        connection = connect_to_server(self.address, self._key)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNSENT_BYTES)
        if hasattr(socket, "SO_PRIORITY"):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, _BULK_PRIORITY)
        self._connection = connection
        return connection


def send_request(
    connection: socket.socket, kind: int, words: Sequence[bytes], chunks: Iterable[Sequence[memoryview]]
) -> None:
    """Sends a request and its chunks, and waits until the keeper has them. Raises OSError, ValueError (it was refused)
    or struct.error."""
    connection.sendall(pack_message(kind, words))
    for chunk in chunks:
        send_chunk(connection, chunk)
    status, answer = receive_message(connection, LARGEST_MESSAGE_BYTES)
    if status != AnswerStatus.DONE:
        raise ValueError(answer[0].decode(errors="replace") if answer else "it was refused")
