"""A process gives the inputs of the step under way to others, in pieces of one micro-batch.

All ranks of a replica have the same inputs. So where one of them is lost, the others can give them to the replicas that
run its micro-batches again. Nothing is copied and nothing is sent until somebody asks.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import NamedTuple

from torch import Tensor

from varuna.checkpoint.format import tensor_file
from varuna.checkpoint.storage.store import allocate_aligned
from varuna.diagnostics.error_text import first_line
from varuna.distributed.handshake import MeetingKey
from varuna.distributed.rendezvous_protocol import AnswerStatus, pack_message, receive_message
from varuna.holdings.giving import StateServer, send_chunk
from varuna.holdings.inventory import HeldFile
from varuna.holdings.taking import connect_to_server, receive_chunk
from varuna.holdings.transfer_protocol import CHUNK_BYTES, INPUTS, LARGEST_MESSAGE_BYTES, NUMBER

__all__ = ["InputsPlace", "InputsServer", "fetch_inputs"]

_LARGEST_BYTES = 1 << 36
"""Of the inputs of a micro-batch."""
_MOST_CONNECTING = 32


class InputsPlace(NamedTuple):
    """Where a process gives inputs."""

    address: str
    """`host:port`."""
    key: MeetingKey
    """Of the generation in which it began to give them."""
    numbers: frozenset[int]
    """The micro-batches, by their numbers in the global batch."""


class InputsServer(StateServer):
    """Gives the inputs of one step at a time."""

    def __init__(self, key: MeetingKey, host: str) -> None:
        """Listens on a free port of this machine's address `host`. Raises OSError when that is not possible."""
        self._holding = threading.Lock()
        self._step = 0
        self._held: Mapping[int, Sequence[Tensor]] = {}
        super().__init__(key, host)

    def hold_inputs(self, step: int, inputs: Mapping[int, Sequence[Tensor]]) -> None:
        """From now on gives these, by micro-batch, which stay as they are meanwhile."""
        with self._holding:
            self._step, self._held = step, inputs

    def _answer_request(self, connection: socket.socket, kind: int, words: Sequence[bytes]) -> None:
        if kind != INPUTS or len(words) != 2:
            raise ValueError("no request for inputs")
        step, number = (NUMBER.unpack(word)[0] for word in words)
        with self._holding:
            tensors = self._held.get(number) if step == self._step else None
        if tensors is None:
            fault = f"it has no inputs of micro-batch {number} of step {step}"
            connection.sendall(pack_message(AnswerStatus.REFUSED, [fault.encode()]))
            return
        named = {str(place): tensor.detach().cpu().contiguous() for place, tensor in enumerate(tensors)}
        pieces = tuple(tensor_file.iterate_pieces(named, {}))
        file = HeldFile(sum(map(len, pieces)), pieces)
        connection.sendall(pack_message(AnswerStatus.DONE, [NUMBER.pack(file.bytes)]))
        for chunk in file.iterate_chunks(0, CHUNK_BYTES):
            send_chunk(connection, chunk)


def fetch_inputs(places: Iterable[InputsPlace], step: int, numbers: Iterable[int]) -> dict[int, list[Tensor]]:
    """The inputs of these micro-batches of `step`, from whichever place has them.

    Raises ValueError with the first that nobody gives.
    """
    missing = set(numbers)
    found: dict[int, list[Tensor]] = {}
    faults: list[str] = []
    useful = [place for place in places if not missing.isdisjoint(place.numbers)]
    with ExitStack() as stack:
        # A VM that is gone does not answer at all, so nobody waits for one after the other.
        with ThreadPoolExecutor(min(max(len(useful), 1), _MOST_CONNECTING)) as connecting:
            connections = list(connecting.map(_try_to_connect, useful))
        for connection in connections:
            if isinstance(connection, socket.socket):
                stack.callback(connection.close)
        for place, connection in zip(useful, connections, strict=True):
            if isinstance(connection, str):
                faults.append(connection)
                continue
            try:
                for number in sorted(missing & place.numbers):
                    found[number] = _fetch_piece(connection, step, number)
                    missing.discard(number)
            except (OSError, ValueError, struct.error, MemoryError) as error:
                faults.append(f"{place.address}: {first_line(error) or type(error).__name__}")
    if missing:
        why = f" ({'; '.join(faults)})" if faults else ""
        raise ValueError(f"no process gives the inputs of micro-batch {min(missing)}{why}")
    return found


def _try_to_connect(place: InputsPlace) -> socket.socket | str:
    """The connection, or why there is none."""
    try:
        return connect_to_server(place.address, place.key)
    except (OSError, ValueError) as error:
        return f"{place.address}: {first_line(error) or type(error).__name__}"


def _fetch_piece(connection: socket.socket, step: int, number: int) -> list[Tensor]:
    connection.sendall(pack_message(INPUTS, [NUMBER.pack(step), NUMBER.pack(number)]))
    status, answer = receive_message(connection, LARGEST_MESSAGE_BYTES)
    if status != AnswerStatus.DONE or len(answer) != 1:
        raise ValueError(answer[0].decode(errors="replace") if answer else "it refused")
    (size,) = NUMBER.unpack(answer[0])
    if size > _LARGEST_BYTES:
        raise ValueError(f"inputs of {size} bytes")
    data = allocate_aligned(size)
    at = 0
    while at < size:
        at += receive_chunk(connection, data[at:])
    named, _ = tensor_file.read_tensors(data)
    if set(named) != {str(place) for place in range(len(named))}:
        raise ValueError("its tensors are no inputs")
    return [named[str(place)] for place in range(len(named))]
