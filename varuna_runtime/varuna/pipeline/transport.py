"""Point-to-point messages between neighbouring stages of a replica.

One two-rank gloo group per link and direction (activations down, gradients up), owned by one thread. The thread waits
inside gloo with the interpreter lock released, so waiting costs no processor time; the compute thread never waits
there but on the worker's condition variable, which the threads notify. (Polling `is_completed` does not work here:
gloo's send and receive never report completion before `wait`, measured with torch 2.13. A wait with a time limit is
worse, for when it runs out it destroys the group.) A dead peer makes the wait fail, which is how its loss is noticed.

A message is the list of tensors of a boundary for one micro-batch. Messages are numbered over the whole life of a
link, both ends count alike, and each tensor has a tag of its own: (number * tensors + index).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

import torch
from torch import Tensor

from varuna._gloo import NEVER, GlooGroup, Work, first_line, record_event
from varuna.departure import Departure, PeerLost

__all__ = ["Inbox", "Outbox", "TensorSpec"]

_TAGS = 1 << 30
"""Tags wrap around here; far fewer messages than this are ever in flight."""


@dataclass(frozen=True)
class TensorSpec:
    """What one tensor of a message looks like."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class _Posted:
    number: int
    buffers: list[Tensor]
    works: list[Work]


class Inbox:
    """Receives from one neighbour, in message order."""

    def __init__(self, group: GlooGroup, peer: int, peer_in_group: int, pinned: bool, departure: Departure) -> None:
        self._group = group
        self._peer = peer
        self._peer_in_group = peer_in_group
        self._pinned = pinned
        self._departure = departure
        self._posted: SimpleQueue[_Posted] = SimpleQueue()
        self._arrived: dict[int, list[Tensor]] = {}
        self._arrived_count = 0
        self._next = 0
        _start_thread(self._wait_for_all, f"varuna-from-rank-{peer}", departure)

    @property
    def arrived(self) -> int:
        """Messages that have arrived over the life of the link, taken or not."""
        return self._arrived_count

    def post(self, specs: Sequence[TensorSpec]) -> None:
        """Makes room for the next message, so that it can land as soon as it is sent. Never blocks."""
        buffers = [torch.empty(spec.shape, dtype=spec.dtype, pin_memory=self._pinned) for spec in specs]
        tag = self._next * len(specs)
        try:
            works = [self._group.recv([b], self._peer_in_group, (tag + i) % _TAGS) for i, b in enumerate(buffers)]
        except RuntimeError as error:
            _lost(self._departure, self._peer, error)
            self._departure.check()
            raise
        self._posted.put(_Posted(self._next, buffers, works))
        self._next += 1

    def take(self, number: int) -> list[Tensor]:
        """The tensors of an arrived message, in host memory; each message can be taken once."""
        with self._departure.condition:
            return self._arrived.pop(number)

    def _wait_for_all(self) -> None:
        while True:
            posted = self._posted.get()
            if not _wait(posted.works, self._departure, self._peer):
                return
            with self._departure.condition:
                self._arrived[posted.number] = posted.buffers
                self._arrived_count += 1
                self._departure.condition.notify_all()


@dataclass(frozen=True)
class _Outgoing:
    number: int
    tensors: list[Tensor]
    copied: torch.cuda.Event | None
    """Recorded after the copies from the device to `tensors`; None when there was nothing to copy."""


class Outbox:
    """Sends to one neighbour, in message order."""

    def __init__(self, group: GlooGroup, peer: int, peer_in_group: int, departure: Departure) -> None:
        self._group = group
        self._peer = peer
        self._peer_in_group = peer_in_group
        self._departure = departure
        self._queue: SimpleQueue[_Outgoing] = SimpleQueue()
        self._queued = 0
        self._sent = 0
        _start_thread(self._send_all, f"varuna-to-rank-{peer}", departure)

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Queues the next message. Never blocks; the tensors must not be changed before `drain`."""
        host, copied = _to_host(tensors)
        self._queue.put(_Outgoing(self._queued, host, copied))
        self._queued += 1

    def drain(self) -> None:
        """Waits until every message is out. Raises what makes the worker leave."""
        self._departure.wait_until(lambda: self._sent == self._queued)

    def _send_all(self) -> None:
        while True:
            message = self._queue.get()
            if message.copied is not None:
                message.copied.synchronize()
            tag = message.number * len(message.tensors)
            try:
                works = [
                    self._group.send([t], self._peer_in_group, (tag + i) % _TAGS) for i, t in enumerate(message.tensors)
                ]
            except RuntimeError as error:
                return _lost(self._departure, self._peer, error)
            if not _wait(works, self._departure, self._peer):
                return None
            with self._departure.condition:
                self._sent += 1
                self._departure.condition.notify_all()


def _to_host(tensors: Sequence[Tensor]) -> tuple[list[Tensor], torch.cuda.Event | None]:
    """Contiguous copies in host memory (the tensors themselves where they are that already)."""
    if not any(t.is_cuda for t in tensors):
        return [t.detach().contiguous() for t in tensors], None
    host = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
    for to, tensor in zip(host, tensors, strict=True):
        to.copy_(tensor.detach(), non_blocking=True)
    return host, record_event()


def _wait(works: Sequence[Work], departure: Departure, peer: int) -> bool:
    """Waits inside gloo; False when the peer is lost, which the departure then knows."""
    try:
        for work in works:
            work.wait(NEVER)
    except RuntimeError as error:
        _lost(departure, peer, error)
        return False
    return True


def _lost(departure: Departure, peer: int, error: RuntimeError) -> None:
    departure.leave(PeerLost(f"rank {peer} is gone: {first_line(error)}"))


def _start_thread(target: Callable[[], None], name: str, departure: Departure) -> None:
    def run() -> None:
        try:
            target()
        except BaseException as error:  # nothing may end this thread silently: the compute thread would wait for ever
            departure.fail(error)

    threading.Thread(target=run, name=name, daemon=True).start()
