"""Point-to-point messages between neighbouring stages of a replica.

Each link and direction (activations down, gradients up) has a connection of its own (`link_connections`): a two-rank
gloo group, or several. One thread owns it, and waits inside gloo with the interpreter lock released, so that waiting
costs no processor time. The compute thread never waits inside gloo: it waits on the worker's condition variable, which
the threads notify. (Polling `is_completed` does not work here, because gloo's send and receive never report completion
before `wait`, measured with torch 2.13. A wait with a time limit is worse, because it destroys the group when the limit
passes.) A dead peer makes the wait fail, which is how its loss is noticed.

A message is the list of tensors of a boundary for one micro-batch. Both ends number the messages over the whole life of
a link, and each tensor has a tag of its own: (number * tensors + index).
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Generic, NotRequired, Required, TypedDict, TypeVar, Unpack

import torch
from torch import Tensor

from varuna.devices.accelerator import wait_for_event
from varuna.devices.copy_stream import CopyStream
from varuna.diagnostics.error_text import first_line
from varuna.diagnostics.timeline import Timeline
from varuna.distributed.departure import Departure, PeerLost
from varuna.distributed.gloo import NEVER
from varuna.distributed.link_connections import Connection, Transfer

__all__ = [
    "LinkOptions",
    "LinkReceiver",
    "LinkSender",
    "MessageReceiver",
    "MessageSender",
    "MessageTensor",
    "leave_without",
]

_SMALL_BYTES = 64 * 1024
"""Up to this size the compute thread sends a message itself. At 256 KiB that no longer pays: messages arrive no sooner,
and a stage with ops of 10 ms is 0.4 % slower (measured, P = 4, N = 32)."""

_TAGS = 1 << 30
"""Tags wrap around here; far fewer messages than this are ever in flight."""


@dataclass(frozen=True)
class MessageTensor:
    """The shape and type of one tensor of a message."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class LinkOptions(TypedDict):
    """What every end of a link takes."""

    peer: Required[int]
    """The neighbour's rank."""
    departure: Required[Departure]
    carries: NotRequired[str]
    """The timeline's name for the link's messages."""
    timeline: NotRequired[Timeline | None]


ArrivedT = TypeVar("ArrivedT")
"""What a receiver keeps of a message until it is taken."""


class MessageReceiver(ABC, Generic[ArrivedT]):
    """Receives from one neighbour, in message order, by a thread of its own."""

    def __init__(self, **options: Unpack[LinkOptions]) -> None:
        self._peer, self._departure = options["peer"], options["departure"]
        self._track = f"{options.get('carries', 'messages')} from rank {self._peer}"
        self._timeline = options.get("timeline") or Timeline()
        self._posted: SimpleQueue[Any] = SimpleQueue()
        """Posted receives; None: the link ends."""
        self._arrived: dict[int, ArrivedT] = {}
        self._arrived_count = 0
        self._last_arrival_ns = 0
        self._thread = _start_thread(self._receive_all, f"varuna-from-rank-{self._peer}", self._departure)

    @property
    def arrived(self) -> int:
        """Messages that have arrived over the life of the link, taken or not."""
        return self._arrived_count

    @property
    def last_arrival_ns(self) -> int:
        """When the newest message arrived, on `time.perf_counter_ns`; 0 before there is any."""
        return self._last_arrival_ns

    @abstractmethod
    def post_receive(self, specs: Sequence[MessageTensor], micro_batch: int = 0) -> None:
        """Makes room for the next message, so that it can arrive as soon as it is sent. Never blocks."""

    @abstractmethod
    def take_message(self, number: int, device: torch.device) -> list[Tensor]:
        """The tensors of a message that has arrived, on `device`. Each message can be taken once."""

    def end(self, within_s: float) -> bool:
        """Ends the link, whose connection is broken. Returns whether its thread has ended in time."""
        self._posted.put(None)
        self._thread.join(within_s)
        return not self._thread.is_alive()

    @abstractmethod
    def _receive_all(self) -> None:
        """Receives what is posted until the link ends or this worker leaves."""

    def _add_arrival(self, message: ArrivedT, micro_batch: int, posted_ns: int) -> None:
        # Messages arrive in order, so this one began to arrive after the one before it.
        begin_ns, now_ns = max(posted_ns, self._last_arrival_ns), time.perf_counter_ns()
        with self._departure.condition:
            self._arrived[self._arrived_count] = message
            self._arrived_count += 1
            self._last_arrival_ns = now_ns
            self._departure.condition.notify_all()
        if self._timeline.recording:
            self._timeline.add_span(self._track, f"receive {micro_batch}", begin_ns, now_ns, micro_batch=micro_batch)

    def _pop_arrived(self, number: int) -> ArrivedT:
        with self._departure.condition:
            return self._arrived.pop(number)


class MessageSender(ABC):
    """Sends to one neighbour, in message order, by a thread of its own."""

    def __init__(self, **options: Unpack[LinkOptions]) -> None:
        self._peer, self._departure = options["peer"], options["departure"]
        self._track = f"{options.get('carries', 'messages')} to rank {self._peer}"
        self._timeline = options.get("timeline") or Timeline()
        self._queue: SimpleQueue[Any] = SimpleQueue()
        """Messages; None: the link ends."""
        self._queued = 0
        self._sent = 0
        self._notify_below = 1
        """The compute thread waits until fewer messages than this are unsent."""
        self._thread = _start_thread(self._send_all, f"varuna-to-rank-{self._peer}", self._departure)

    @abstractmethod
    def send_message(self, tensors: Sequence[Tensor], micro_batch: int = 0) -> None:
        """Sends the next message. Never blocks. The tensors must not change before `wait_until_sent` returns."""

    @property
    def is_sending(self) -> bool:
        """Whether a message is on its way."""
        return self._sent < self._queued

    def end(self, within_s: float) -> bool:
        """Ends the link, whose connection is broken. Returns whether its thread has ended in time."""
        self._queue.put(None)
        self._thread.join(within_s)
        return not self._thread.is_alive()

    def wait_until_sent(self) -> None:
        """Waits until every message is sent. Raises what makes the worker leave."""
        self.wait_for_room(1)

    def wait_for_room(self, most: int) -> None:
        """Waits until fewer than `most` messages are unsent. Raises what makes the worker leave."""
        with self._departure.condition:
            self._notify_below = most
        self._departure.wait_until(lambda: self._queued - self._sent < most)

    @abstractmethod
    def _send_all(self) -> None:
        """Sends what is queued until the link ends or this worker leaves."""

    def _count_sent(self, micro_batch: int, queued_ns: int) -> None:
        if self._timeline.recording:
            now_ns = time.perf_counter_ns()
            self._timeline.add_span(self._track, f"send {micro_batch}", queued_ns, now_ns, micro_batch=micro_batch)
        with self._departure.condition:
            self._sent += 1
            if self._queued - self._sent < self._notify_below:  # else no thread waits for it
                self._departure.condition.notify_all()


@dataclass(frozen=True)
class _PostedReceive:
    micro_batch: int
    posted_ns: int
    buffers: list[Tensor]
    transfers: list[Transfer]


class LinkReceiver(MessageReceiver[list[Tensor]]):
    """Receives over gloo, into host memory."""

    def __init__(self, connection: Connection, *, pinned: bool, **options: Unpack[LinkOptions]) -> None:
        self._connection = connection
        self._pinned = pinned
        self._copies = CopyStream()
        self._next = 0
        super().__init__(**options)

    def post_receive(self, specs: Sequence[MessageTensor], micro_batch: int = 0) -> None:
        # gloo may never end a receive that is posted while its connection breaks.
        self._departure.raise_if_leaving()
        buffers = [torch.empty(spec.shape, dtype=spec.dtype, pin_memory=self._pinned) for spec in specs]
        tag = self._next * len(specs)
        try:
            transfers = [self._connection.start_receiving(b, (tag + i) % _TAGS) for i, b in enumerate(buffers)]
        except RuntimeError as error:
            leave_without(self._departure, self._peer, error)
            self._departure.raise_if_leaving()
            raise
        self._posted.put(_PostedReceive(micro_batch, time.perf_counter_ns(), buffers, transfers))
        self._next += 1

    def take_message(self, number: int, device: torch.device) -> list[Tensor]:
        return self._copies.to_device(self._pop_arrived(number), device)

    def _receive_all(self) -> None:
        while (posted := self._posted.get()) is not None:
            if not _wait(posted.transfers, self._departure, self._peer):
                return
            self._add_arrival(posted.buffers, posted.micro_batch, posted.posted_ns)


@dataclass(frozen=True)
class _QueuedMessage:
    number: int
    micro_batch: int
    queued_ns: int
    tensors: list[Tensor]
    copied: torch.Event | None
    """Recorded after the copies from the device to `tensors`; None where nothing had to be copied."""
    transfers: list[Transfer] | None
    """Set for a message that gloo is already sending."""


class LinkSender(MessageSender):
    """Sends over gloo, from host memory."""

    def __init__(self, connection: Connection, **options: Unpack[LinkOptions]) -> None:
        self._connection = connection
        self._copies = CopyStream()
        super().__init__(**options)

    def send_message(self, tensors: Sequence[Tensor], micro_batch: int = 0) -> None:
        queued_ns = time.perf_counter_ns()
        host, copied = self._copies.to_host(tensors)
        # Sending from this thread saves a change of threads, for which the next stage may be waiting. But gloo copies
        # to the socket within the call, so that large messages are left to the link's thread.
        inline = copied is None and sum(t.nbytes for t in host) <= _SMALL_BYTES
        transfers = self._start_sending(self._queued, host) if inline else None
        self._queue.put(_QueuedMessage(self._queued, micro_batch, queued_ns, host, copied, transfers))
        self._queued += 1

    def end(self, within_s: float) -> bool:
        has_ended = super().end(within_s)
        self._connection.end()
        return has_ended

    def _start_sending(self, number: int, tensors: Sequence[Tensor]) -> list[Transfer]:
        """Raises what makes the worker leave when the peer is lost."""
        tag = number * len(tensors)
        try:
            return [self._connection.start_sending(t, (tag + i) % _TAGS) for i, t in enumerate(tensors)]
        except RuntimeError as error:
            leave_without(self._departure, self._peer, error)
            self._departure.raise_if_leaving()
            raise

    def _send_all(self) -> None:
        while (message := self._queue.get()) is not None:
            transfers = message.transfers
            if message.copied is not None:
                wait_for_event(message.copied)
            if transfers is None:
                try:
                    transfers = self._start_sending(message.number, message.tensors)
                except SystemExit:
                    return
            if not _wait(transfers, self._departure, self._peer):
                return
            self._count_sent(message.micro_batch, message.queued_ns)


def _wait(transfers: Sequence[Transfer], departure: Departure, peer: int) -> bool:
    """Waits inside gloo. Returns False when the peer is lost, after it has made the worker leave."""
    try:
        for transfer in transfers:
            transfer.wait(NEVER)
    except RuntimeError as error:
        leave_without(departure, peer, error)
        return False
    return True


def leave_without(departure: Departure, peer: int, error: RuntimeError) -> None:
    """Makes the worker leave, because the peer of a link is lost."""
    departure.leave_generation(PeerLost(f"rank {peer} is gone: {first_line(error)}", suspects=(peer,)))


def _start_thread(target: Callable[[], None], name: str, departure: Departure) -> threading.Thread:
    def run() -> None:
        try:
            target()
        except BaseException as error:  # the compute thread would wait for ever if this thread ended silently
            departure.fail_waits(error)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread
