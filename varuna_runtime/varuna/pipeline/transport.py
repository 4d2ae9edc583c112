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
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

import torch
from torch import Tensor

from varuna._gloo import NEVER, GlooGroup, Work
from varuna.departure import Departure, PeerLost
from varuna.error_text import first_line
from varuna.pipeline.copies import CopyStream
from varuna.pipeline.timeline import Timeline

__all__ = ["Inbox", "Outbox", "TensorSpec"]

_SMALL_BYTES = 64 * 1024
"""Up to this size a message is sent without a change of threads. At 256 KiB that no longer pays: messages come no
sooner, and a stage with ops of 10 ms is 0.4 % slower (measured, P = 4, N = 32)."""

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
    micro_batch: int
    posted_ns: int
    buffers: list[Tensor]
    works: list[Work]


class Inbox:
    """Receives from one neighbour, in message order."""

    def __init__(
        self,
        group: GlooGroup,
        peer: int,
        peer_in_group: int,
        pinned: bool,
        departure: Departure,
        *,
        carries: str = "messages",
        timeline: Timeline | None = None,
    ) -> None:
        """`carries`: what the timeline calls the link's messages."""
        self._group = group
        self._track = f"{carries} from rank {peer}"
        self._timeline = timeline or Timeline()
        self._peer = peer
        self._peer_in_group = peer_in_group
        self._pinned = pinned
        self._departure = departure
        self._posted: SimpleQueue[_Posted] = SimpleQueue()
        self._copies = CopyStream()
        self._arrived: dict[int, list[Tensor]] = {}
        self._arrived_count = 0
        self._last_arrival_ns = 0
        self._next = 0
        _start_thread(self._wait_for_all, f"varuna-from-rank-{peer}", departure)

    @property
    def arrived(self) -> int:
        """Messages that have arrived over the life of the link, taken or not."""
        return self._arrived_count

    @property
    def last_arrival_ns(self) -> int:
        """When the newest message arrived, on `time.perf_counter_ns`; 0 before there is any."""
        return self._last_arrival_ns

    def post(self, specs: Sequence[TensorSpec], micro_batch: int = 0) -> None:
        """Makes room for the next message, so that it can land as soon as it is sent. Never blocks."""
        buffers = [torch.empty(spec.shape, dtype=spec.dtype, pin_memory=self._pinned) for spec in specs]
        tag = self._next * len(specs)
        try:
            works = [self._group.recv([b], self._peer_in_group, (tag + i) % _TAGS) for i, b in enumerate(buffers)]
        except RuntimeError as error:
            _lost(self._departure, self._peer, error)
            self._departure.check()
            raise
        self._posted.put(_Posted(self._next, micro_batch, time.perf_counter_ns(), buffers, works))
        self._next += 1

    def take(self, number: int, device: torch.device) -> list[Tensor]:
        """The tensors of an arrived message, on `device`; each message can be taken once."""
        with self._departure.condition:
            tensors = self._arrived.pop(number)
        return self._copies.to_device(tensors, device)

    def _wait_for_all(self) -> None:
        while True:
            posted = self._posted.get()
            if not _wait(posted.works, self._departure, self._peer):
                return
            # Messages come in order, so this one came after the one before it.
            begin_ns, now_ns = max(posted.posted_ns, self._last_arrival_ns), time.perf_counter_ns()
            with self._departure.condition:
                self._arrived[posted.number] = posted.buffers
                self._arrived_count += 1
                self._last_arrival_ns = now_ns
                self._departure.condition.notify_all()
            if self._timeline.recording:
                name = f"receive {posted.micro_batch}"
                self._timeline.add(self._track, name, begin_ns, now_ns, micro_batch=posted.micro_batch)


@dataclass(frozen=True)
class _Outgoing:
    number: int
    micro_batch: int
    queued_ns: int
    tensors: list[Tensor]
    copied: torch.cuda.Event | None
    """Recorded after the copies from the device to `tensors`; None when there was nothing to copy."""
    works: list[Work] | None
    """Of a message that is already in gloo's hands."""


class Outbox:
    """Sends to one neighbour, in message order."""

    def __init__(
        self,
        group: GlooGroup,
        peer: int,
        peer_in_group: int,
        departure: Departure,
        *,
        carries: str = "messages",
        timeline: Timeline | None = None,
    ) -> None:
        """`carries`: what the timeline calls the link's messages."""
        self._group = group
        self._track = f"{carries} to rank {peer}"
        self._timeline = timeline or Timeline()
        self._peer = peer
        self._peer_in_group = peer_in_group
        self._departure = departure
        self._copies = CopyStream()
        self._queue: SimpleQueue[_Outgoing] = SimpleQueue()
        self._queued = 0
        self._sent = 0
        self._notify_below = 1
        """With fewer messages than this not out yet, there is somebody to wake."""
        _start_thread(self._send_all, f"varuna-to-rank-{peer}", departure)

    def send(self, tensors: Sequence[Tensor], micro_batch: int = 0) -> None:
        """Sends the next message. Never blocks; the tensors must not be changed before `drain`."""
        queued_ns = time.perf_counter_ns()
        host, copied = self._copies.to_host(tensors)
        # Handing over from here saves a change of threads on which the next stage may be waiting. But gloo copies to
        # the socket within the call: what is large is the thread's work.
        inline = copied is None and sum(t.nbytes for t in host) <= _SMALL_BYTES
        works = self._hand_over(self._queued, host) if inline else None
        self._queue.put(_Outgoing(self._queued, micro_batch, queued_ns, host, copied, works))
        self._queued += 1

    def drain(self) -> None:
        """Waits until every message is out. Raises what makes the worker leave."""
        self.wait_for_room(1)

    def wait_for_room(self, most: int) -> None:
        """Waits until fewer than `most` messages are not out yet. Raises what makes the worker leave."""
        with self._departure.condition:
            self._notify_below = most
        self._departure.wait_until(lambda: self._queued - self._sent < most)

    def _hand_over(self, number: int, tensors: Sequence[Tensor]) -> list[Work]:
        """Raises what makes this worker leave when the peer is lost."""
        tag = number * len(tensors)
        try:
            return [self._group.send([t], self._peer_in_group, (tag + i) % _TAGS) for i, t in enumerate(tensors)]
        except RuntimeError as error:
            _lost(self._departure, self._peer, error)
            self._departure.check()
            raise

    def _send_all(self) -> None:
        while True:
            message = self._queue.get()
            works = message.works
            if message.copied is not None:
                message.copied.synchronize()
            if works is None:
                try:
                    works = self._hand_over(message.number, message.tensors)
                except SystemExit:
                    return
            if not _wait(works, self._departure, self._peer):
                return
            if self._timeline.recording:
                name, now_ns = f"send {message.micro_batch}", time.perf_counter_ns()
                self._timeline.add(self._track, name, message.queued_ns, now_ns, micro_batch=message.micro_batch)
            with self._departure.condition:
                self._sent += 1
                if self._queued - self._sent < self._notify_below:  # else nobody waits for it
                    self._departure.condition.notify_all()


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
