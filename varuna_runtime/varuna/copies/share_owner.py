"""Copies this rank's sums at marks, and sends them to the process that keeps them, while training goes on.

On an accelerator the copies run beside the next forwards, which do not change the sums. The next backward does, so it
waits for them there. On a CPU training waits for the copies.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from queue import SimpleQueue

import structlog
import torch
from torch import Tensor

from varuna.checkpoint.saving.snapshot import HostBuffers
from varuna.copies.replica_marks import ReplicaMarks
from varuna.copies.sending import PacedConnection
from varuna.copies.share_keeper import pack_sums_request
from varuna.copies.share_marks import MarkedSums, ShareMark
from varuna.devices.accelerator import is_accelerator, wait_for_event
from varuna.devices.copy_stream import CopyStream
from varuna.diagnostics.error_text import first_line
from varuna.holdings.transfer_protocol import SUMS

__all__ = ["ShareOwner"]

_log = structlog.get_logger("varuna")


@dataclass
class _Copy:
    """The sums of one mark, in one of the two sets of buffers."""

    marked: MarkedSums
    buffers: HostBuffers
    series: int
    copied: torch.Event | None
    """When the sums have come from the device; None: they are here."""
    copy_s: float
    """What training's thread waited for it: on an accelerator, until the copies were launched."""
    is_sent: bool = False

    def wait_until_copied(self) -> None:
        if self.copied is not None:
            wait_for_event(self.copied)


class ShareOwner:
    """The newest mark that all ranks of the replica have sent, and the one after it."""

    def __init__(self, keeper: PacedConnection, marks: ReplicaMarks) -> None:
        self._keeper, self._marks = keeper, marks
        self._common: _Copy | None = None
        self._current: _Copy | None = None
        self._free = [HostBuffers(), HostBuffers()]
        self._series = 0
        self._stream = CopyStream()
        self._under_way: torch.Event | None = None
        """The end of copies for which the computing stream does not wait yet."""
        self._copies: SimpleQueue[tuple[_Copy, int] | None] = SimpleQueue()
        threading.Thread(target=self._run, name="varuna-shares", daemon=True).start()

    @property
    def is_busy(self) -> bool:
        """Whether no mark can be made now."""
        return self._keeper.is_stopped or (self._current is not None and not self._current.is_sent)

    def copy_sums(self, mark: ShareMark, gradients: Mapping[str, Tensor]) -> None:
        """Copies the sums into host memory. They may change after `order_changes`.

        When the keeper has them, or cannot have them, the ranks of the replica are told.
        """
        began_s = time.monotonic()
        self._make_room(mark)
        buffers = self._free.pop()
        copied: torch.Event | None = None
        if any(is_accelerator(gradient.device) for gradient in gradients.values()):
            sums = {name: buffers.take_buffer(name, gradient) for name, gradient in gradients.items()}
            self._under_way = copied = self._stream.update_on_host([*sums.values()], [*gradients.values()])
        else:  # these copies are done when they return
            sums = {name: buffers.copy_tensor(name, gradient) for name, gradient in gradients.items()}
        copy_s = time.monotonic() - began_s
        self._current = _Copy(MarkedSums(mark, sums), buffers, self._series, copied, copy_s)
        kept_count = 0 if self._common is None else self._common.marked.mark.key.micro_batches
        self._copies.put((self._current, kept_count))

    def order_changes(self) -> None:
        """What is launched next may change the sums: on an accelerator it runs after their copies. The host does not
        wait for them."""
        if (copied := self._under_way) is not None:
            torch.accelerator.current_stream(copied.device).wait_event(copied)
            self._under_way = None

    def _make_room(self, mark: ShareMark) -> None:
        """Leaves at most one copy, that of the newest mark of this share that all ranks have."""
        common, current = self._common, self._current
        if (
            current is not None
            and self._is_of_share(current, mark)
            and self._marks.have_all_kept(current.series, current.marked.mark.key)
        ):
            common, current = current, common
        self._discard(current)
        if common is not None and not self._is_of_share(common, mark):
            self._discard(common)
            common = None
        self._common, self._current = common, None

    def list_sums(self, step: int) -> Iterator[MarkedSums]:
        """What this rank has of its own share of that step."""
        for copy in (self._common, self._current):
            if copy is not None and copy.marked.mark.step == step and copy.series == self._series:
                copy.wait_until_copied()
                yield copy.marked

    def forget_sums(self, series: int) -> None:
        """The pass does not count: no copy is of use."""
        self._series = series

    def _is_of_share(self, copy: _Copy, mark: ShareMark) -> bool:
        return copy.series == self._series and copy.marked.mark.step == mark.step

    def shut_down(self) -> None:
        """Ends what is under way. From any thread."""
        self._copies.put(None)
        self._keeper.shut_down()

    def _discard(self, copy: _Copy | None) -> None:
        if copy is not None:
            self._free.append(copy.buffers)

    def _run(self) -> None:
        while (given := self._copies.get()) is not None:
            copy, kept_count = given
            copy.wait_until_copied()
            is_kept = copy.series == self._series and self._try_to_send(copy, kept_count)
            self._marks.report(copy.series, copy.marked.mark.key, copy.copy_s if is_kept else None)
            copy.is_sent = True

    def _try_to_send(self, copy: _Copy, kept_count: int) -> bool:
        """Whether the keeper has the copy now. One that cannot be sent is given up: the next mark comes soon."""
        mark = copy.marked.mark
        try:
            words, file = pack_sums_request(copy.marked, series=copy.series, kept_count=kept_count)
            self._keeper.send_files(SUMS, words, [file])
        except (OSError, ValueError, KeyError, struct.error, RuntimeError) as error:
            self._keeper.drop()
            if not self._keeper.is_stopped:
                _log.warning(
                    "the sums of this rank's share were not kept",
                    step=mark.step,
                    keeper=self._keeper.address,
                    reason=first_line(error),
                )
            return False
        return True
