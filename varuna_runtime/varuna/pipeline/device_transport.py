"""Messages between neighbouring stages that never leave the devices, over NCCL.

Each link and direction has a communicator of two ranks, a stream, and a thread. The thread starts an operation on the
device and then looks now and then whether it is done, so that it can leave when the peer is lost: NCCL would wait for
ever. It starts one operation at a time, because one that waits behind another on the device may hold up streams that
have nothing to do with it, the peer's answer among them.

Three rules keep streams in order, as in `varuna.devices.copy_stream`: the link's stream waits for the op that makes
what is sent; the computing stream waits for what has arrived; and memory that the link's stream allocates is recorded
for the computing stream. What has been sent is let go only when the host knows that the device has sent it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, Unpack

import torch
from torch import Tensor

from varuna.devices.accelerator import record_event, use_stream
from varuna.devices.copy_stream import StartedCopies
from varuna.devices.out_of_memory import is_memory_error
from varuna.distributed.departure import Departure
from varuna.distributed.gloo import NEVER
from varuna.distributed.nccl import POLL_S, DeviceWork
from varuna.pipeline.transport import LinkOptions, MessageReceiver, MessageSender, MessageTensor, leave_without

__all__ = ["DeviceLinkReceiver", "DeviceLinkSender", "DevicePair"]


class DevicePair(Protocol):
    """One way between two ranks (`varuna.distributed.nccl.NcclPair`)."""

    def start_sending(self, tensor: Tensor) -> DeviceWork: ...
    def start_receiving(self, tensor: Tensor) -> DeviceWork: ...


@dataclass(frozen=True)
class _PostedMessage:
    micro_batch: int
    posted_ns: int
    specs: Sequence[MessageTensor]


class DeviceLinkReceiver(MessageReceiver[StartedCopies]):
    """Receives into the device's memory, which it allocates when the message before has arrived."""

    def __init__(self, pair: DevicePair, device: torch.device, **options: Unpack[LinkOptions]) -> None:
        self._pair = pair
        self._device = device
        self._unfinished: list[Tensor] = []
        """Kept by a rank that leaves: until NCCL is aborted, the device may still write into them."""
        super().__init__(**options)

    def post_receive(self, specs: Sequence[MessageTensor], micro_batch: int = 0) -> None:
        self._departure.raise_if_leaving()
        self._posted.put(_PostedMessage(micro_batch, time.perf_counter_ns(), specs))

    def take_message(self, number: int, device: torch.device) -> list[Tensor]:
        return self._pop_arrived(number).take()

    def _receive_all(self) -> None:
        with use_stream(torch.Stream(self._device)):
            while (posted := self._posted.get()) is not None:
                message = self._receive_tensors(posted.specs)
                if message is None:
                    return
                self._add_arrival(message, posted.micro_batch, posted.posted_ns)
                del message  # it is in memory for as long as its taker needs it

    def _receive_tensors(self, specs: Sequence[MessageTensor]) -> StartedCopies | None:
        """None: the peer is lost, or this worker leaves."""
        tensors = [torch.empty(spec.shape, dtype=spec.dtype, device=self._device) for spec in specs]
        for tensor in tensors:
            if not _run_work(lambda t=tensor: self._pair.start_receiving(t), self._departure, self._peer):  # type: ignore[misc]
                self._unfinished = tensors
                return None
        return StartedCopies(tensors, record_event(self._device))


@dataclass(frozen=True)
class _QueuedTensors:
    micro_batch: int
    queued_ns: int
    tensors: list[Tensor]
    computed: torch.Event


class DeviceLinkSender(MessageSender):
    """Sends from the device's memory."""

    def __init__(self, pair: DevicePair, device: torch.device, **options: Unpack[LinkOptions]) -> None:
        self._pair = pair
        self._device = device
        super().__init__(**options)

    def send_message(self, tensors: Sequence[Tensor], micro_batch: int = 0) -> None:
        queued_ns = time.perf_counter_ns()
        kept = [tensor.detach().contiguous() for tensor in tensors]
        self._queue.put(_QueuedTensors(micro_batch, queued_ns, kept, record_event(self._device)))
        self._queued += 1

    def _send_all(self) -> None:
        stream = torch.Stream(self._device)
        with use_stream(stream):
            while (message := self._queue.get()) is not None:
                stream.wait_event(message.computed)
                if not self._send_tensors(message.tensors):
                    return
                micro_batch, queued_ns = message.micro_batch, message.queued_ns
                del message  # its memory is free from now on
                self._count_sent(micro_batch, queued_ns)

    def _send_tensors(self, tensors: Sequence[Tensor]) -> bool:
        """False: the peer is lost, or this worker leaves."""
        return all(
            _run_work(lambda t=tensor: self._pair.start_sending(t), self._departure, self._peer)  # type: ignore[misc]
            for tensor in tensors
        )


def _run_work(start: Callable[[], DeviceWork], departure: Departure, peer: int) -> bool:
    """Starts an operation, and waits until it is done or this worker leaves. Returns whether it is done.

    When it fails it makes the worker leave without the peer.
    """
    try:
        work = start()
        while not work.is_completed():
            if departure.exit_code is not None:
                return False
            time.sleep(POLL_S)
        work.wait(NEVER)
    except RuntimeError as error:
        if is_memory_error(error):
            raise
        leave_without(departure, peer, error)
        return False
    return True
