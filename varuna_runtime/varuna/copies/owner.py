"""Sends this rank's state to the process that keeps it, while training goes on."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from queue import SimpleQueue

import structlog
import torch

from varuna.checkpoint import CheckpointError, TrainingState
from varuna.checkpoint.saving.snapshot import HostBuffers
from varuna.copies.keeper import pack_copy_request
from varuna.copies.sending import PacedConnection
from varuna.devices.accelerator import is_accelerator, use_stream
from varuna.diagnostics.error_text import first_line
from varuna.distributed.handshake import MeetingKey
from varuna.holdings.inventory import HeldFiles, make_inventory
from varuna.holdings.transfer_protocol import COPY

__all__ = ["CopyOwner"]

_log = structlog.get_logger("varuna")

_RETRY_S = 1.0
_RECHECK_S = 0.5
_MOST_WAITING = 0.01
"""Of all time: what training may wait for copies. Where steps are shorter than that, rounds are rarer."""


class CopyOwner:
    """This rank's part in the rounds of copies. In each round all ranks copy the state of the same step.

    First the state is copied to this process's own memory, before the step under way changes it, and from there it is
    sent. The copy stays here, too, until the next round is whole everywhere: where another rank's copy of this round is
    lost, all have to give that of the round before.
    """

    def __init__(
        self,
        keeper_address: str,
        key: MeetingKey,
        *,
        generation: int,
        rank: int,
        device: torch.device,
        series: int,
        is_pipeline_sending: Callable[[], bool],
    ) -> None:
        """`keeper_address`: `host:port` of the `CopyKeeper`. `series`: as for `forget_copies`."""
        self._generation, self._rank = generation, rank
        self._stream = torch.Stream(device) if is_accelerator(device) else None
        self._keeper = PacedConnection(keeper_address, key, is_pipeline_sending)
        self._is_captured = threading.Event()
        self._is_captured.set()
        self._buffers = [HostBuffers(), HostBuffers()]
        self._whole: HeldFiles | None = None
        """Of the newest round that is whole everywhere."""
        self._current: HeldFiles | None = None
        self._series = series
        """Of rounds: each checkpoint that is loaded begins another one."""
        self._rounds: SimpleQueue[tuple[int, TrainingState] | None] = SimpleQueue()
        self.is_sending = False
        """Whether this rank's copy of the round is not whole."""
        self._rests_until_s = 0.0
        self._thread = threading.Thread(target=self._run, name="varuna-copies", daemon=True)
        self._thread.start()

    @property
    def is_busy(self) -> bool:
        """Whether this rank's copy of the round is not whole, or training has waited for it too recently."""
        return self.is_sending or time.monotonic() < self._rests_until_s

    def begin_round(self, step: int, state: TrainingState) -> None:
        """Copies the state after `step` steps, which must not change before `finish_capture`. The round before is whole
        everywhere."""
        self._whole, self._current = self._current, None
        self._buffers.reverse()
        self.is_sending = True
        self._is_captured.clear()
        if self._stream is not None:
            self._stream.wait_stream(torch.accelerator.current_stream(self._stream.device))
        self._rounds.put((step, state))

    def finish_capture(self) -> None:
        """Waits until the state may change."""
        if self._is_captured.is_set():
            return
        began_s = time.monotonic()
        while not self._is_captured.wait(_RECHECK_S) and self._thread.is_alive():
            pass
        now_s = time.monotonic()
        self._rests_until_s = now_s + (now_s - began_s) / _MOST_WAITING

    def forget_copies(self, series: int) -> None:
        """The state has been replaced: no copy is of use."""
        self._series = series
        self._whole = self._current = None

    def list_copies(self) -> Iterable[HeldFiles]:
        """What this rank has of its own state, apart from the live one."""
        return [held for held in (self._whole, self._current) if held is not None]

    def shut_down(self) -> None:
        """Ends what is under way. From any thread."""
        self._rounds.put(None)
        self._keeper.shut_down()

    def _run(self) -> None:
        while (given := self._rounds.get()) is not None:
            series, step = self._series, given[0]
            try:
                held = self._current = self._capture(*given)
            except (CheckpointError, RuntimeError, MemoryError) as error:
                _log.warning("no VM keeps a copy of this rank's state", step=step, reason=first_line(error))
                return  # still busy, so that no rank begins another round
            finally:
                del given
                self._is_captured.set()
            while not self._try_to_send(held, series):
                if self._keeper.wait_until_stopped(_RETRY_S):
                    return
            self.is_sending = False

    def _capture(self, step: int, state: TrainingState) -> HeldFiles:
        with nullcontext() if self._stream is None else use_stream(self._stream):
            return make_inventory(state, step, generation=self._generation, rank=self._rank, buffers=self._buffers[0])

    def _try_to_send(self, held: HeldFiles, series: int) -> bool:
        """Whether the copy is whole where it is kept, or no longer wanted."""
        if series != self._series:
            return True
        try:
            self._send_copy(held, series)
        except (OSError, ValueError, struct.error) as error:
            self._keeper.drop()
            if not self._keeper.is_stopped:
                _log.warning(
                    "a copy of this rank's state was not kept, and is sent again",
                    step=held.inventory.step,
                    keeper=self._keeper.address,
                    reason=first_line(error),
                )
            return False
        return True

    def _send_copy(self, held: HeldFiles, series: int) -> None:
        kept = 0 if self._whole is None else self._whole.inventory.step
        words, files = pack_copy_request(held, series=series, step_to_keep=kept)
        self._keeper.send_files(COPY, words, files)
