"""What carries tensors between two ranks: one gloo connection, or several side by side.

Networks limit what a single TCP connection carries (clouds often to 5 or 10 Gb/s), and gloo copies what goes over one
connection on one core. So a link between VMs may have several connections, each a gloo group of its own: a large tensor
is cut into as many pieces, which go at the same time. Small tensors take the first connection, and their order on it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from datetime import timedelta
from queue import SimpleQueue
from typing import Protocol

import torch
from torch import Tensor

from varuna.distributed.gloo import GlooGroup, Work

__all__ = [
    "WHOLE_BYTES",
    "Connection",
    "GlooConnection",
    "ParallelConnections",
    "Transfer",
    "cut_tensor",
    "make_connection",
]

WHOLE_BYTES = 256 * 1024
"""Tensors up to this size are not cut: to hand a piece to another thread takes as long as to send some 50 KB."""


class Transfer(Protocol):
    """A tensor on its way."""

    def wait(self, timeout: timedelta, /) -> object:
        """Waits inside gloo. Raises RuntimeError when the peer is gone."""


class Connection(Protocol):
    """Carries tensors to and from one other rank. Both ends pass tensors of the same sizes with the same tags."""

    def start_sending(self, tensor: Tensor, tag: int) -> Transfer:
        """Sends a contiguous tensor in host memory, which must not change before the transfer ends.

        Raises RuntimeError when the peer is gone.
        """

    def start_receiving(self, tensor: Tensor, tag: int) -> Transfer:
        """Receives into a contiguous tensor in host memory. Raises RuntimeError when the peer is gone."""

    def end(self) -> None:
        """Ends the threads of the connection, which is broken or no longer used."""


class GlooConnection:
    """One connection: a gloo group of two ranks."""

    def __init__(self, group: GlooGroup, peer_in_group: int) -> None:
        self._group = group
        self._peer_in_group = peer_in_group

    def start_sending(self, tensor: Tensor, tag: int) -> Transfer:
        return self._group.send([tensor], self._peer_in_group, tag)

    def start_receiving(self, tensor: Tensor, tag: int) -> Transfer:
        return self._group.recv([tensor], self._peer_in_group, tag)

    def end(self) -> None:
        pass


class ParallelConnections:
    """Two connections or more: gloo groups of the same two ranks, in the same order on both."""

    def __init__(self, groups: Sequence[GlooGroup], peer_in_group: int) -> None:
        self._groups = groups
        self._peer_in_group = peer_in_group
        # gloo copies to the socket within the call, so each further connection has a thread that makes its calls. What
        # arrives is copied by the threads that gloo has for each group.
        self._callers = [_SendCaller(group, peer_in_group) for group in groups[1:]]

    def start_sending(self, tensor: Tensor, tag: int) -> Transfer:
        first, *others = self._cut(tensor)
        peer = self._peer_in_group
        # The others before the first, which this thread copies itself meanwhile.
        handed = [caller.start_sending(piece, tag) for caller, piece in zip(self._callers, others, strict=False)]
        return _PiecewiseTransfer([self._groups[0].send([first], peer, tag), *handed])

    def start_receiving(self, tensor: Tensor, tag: int) -> Transfer:
        pieces = zip(self._groups, self._cut(tensor), strict=False)
        return _PiecewiseTransfer([group.recv([piece], self._peer_in_group, tag) for group, piece in pieces])

    def end(self) -> None:
        for caller in self._callers:
            caller.end()

    def _cut(self, tensor: Tensor) -> Sequence[Tensor]:
        return [tensor] if tensor.nbytes <= WHOLE_BYTES else cut_tensor(tensor, len(self._groups))


def make_connection(groups: Sequence[GlooGroup], peer_in_group: int) -> Connection:
    """The connection over gloo groups of the same two ranks; `peer_in_group`: the other rank's index in them."""
    return ParallelConnections(groups, peer_in_group) if len(groups) > 1 else GlooConnection(groups[0], peer_in_group)


def cut_tensor(tensor: Tensor, count: int) -> Sequence[Tensor]:
    """The bytes of a contiguous tensor in `count` pieces, which share its memory and differ by at most one byte."""
    return torch.tensor_split(tensor.view(-1).view(torch.uint8), count)


class _SendCaller:
    """A thread that calls gloo. It is a daemon, as all that wait in gloo: no executor, whose threads the interpreter
    waits for at its end."""

    def __init__(self, group: GlooGroup, peer_in_group: int) -> None:
        self._group = group
        self._peer_in_group = peer_in_group
        self._calls: SimpleQueue[tuple[Tensor, int, Future[Work]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def start_sending(self, tensor: Tensor, tag: int) -> Transfer:
        if self._thread is None:  # a connection that only receives needs none
            self._thread = threading.Thread(target=self._call_all, name="varuna-connection", daemon=True)
            self._thread.start()
        started: Future[Work] = Future()
        self._calls.put((tensor, tag, started))
        return _HandedTransfer(started)

    def end(self) -> None:
        self._calls.put(None)

    def _call_all(self) -> None:
        while (call := self._calls.get()) is not None:
            tensor, tag, started = call
            try:
                started.set_result(self._group.send([tensor], self._peer_in_group, tag))
            except RuntimeError as error:
                started.set_exception(error)


class _HandedTransfer:
    """A piece that another thread sends."""

    def __init__(self, started: Future[Work]) -> None:
        self._started = started

    def wait(self, timeout: timedelta, /) -> None:
        self._started.result().wait(timeout)


class _PiecewiseTransfer:
    """All pieces of a tensor."""

    def __init__(self, pieces: Sequence[Transfer]) -> None:
        self._pieces = pieces

    def wait(self, timeout: timedelta, /) -> None:
        for piece in self._pieces:
            piece.wait(timeout)
