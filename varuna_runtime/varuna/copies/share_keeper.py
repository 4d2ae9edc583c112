"""Keeps the sums of other ranks in this process's memory, as they send them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from varuna.checkpoint.format import tensor_file
from varuna.copies.memory import SpareMemory
from varuna.copies.share_marks import MarkedSums, ShareMark
from varuna.distributed.handshake import MeetingKey
from varuna.distributed.rendezvous_protocol import AnswerStatus, pack_message
from varuna.holdings.giving import StateServer
from varuna.holdings.inventory import HeldFile
from varuna.holdings.taking import receive_chunk
from varuna.holdings.transfer_protocol import NUMBER, SUMS

__all__ = ["ShareKeeper", "pack_sums_request"]

_log = structlog.get_logger("varuna")

_VAIN = "they are of a pass that does not count"


def pack_sums_request(marked: MarkedSums, *, series: int, kept_count: int) -> tuple[list[bytes], HeldFile]:
    """The words of a request to keep the sums, and their file. `kept_count`: micro-batches of the mark that stays."""
    pieces = tuple(tensor_file.iterate_pieces(marked.sums, {}))
    file = HeldFile(sum(map(len, pieces)), pieces)
    return [*map(NUMBER.pack, (series, kept_count, file.bytes)), marked.mark.to_json().encode()], file


@dataclass(frozen=True)
class _KeptSums:
    mark: ShareMark
    memory: memoryview
    size: int


class ShareKeeper(StateServer):
    """Takes sums from its making until `shut_down`; what it has stays."""

    largest_request_bytes = 1 << 24

    def __init__(self, key: MeetingKey, host: str) -> None:
        """Listens on a free port of this machine's address `host`. Raises OSError when that is not possible."""
        self._keeping = threading.Lock()
        self._kept: list[_KeptSums] = []
        self._spare = SpareMemory()
        self._series = 0
        super().__init__(key, host)

    def list_sums(self) -> list[MarkedSums]:
        """Those that are whole."""
        with self._keeping:
            return [MarkedSums(kept.mark, tensor_file.read_tensors(kept.memory[: kept.size])[0]) for kept in self._kept]

    def forget_sums(self, series: int) -> None:
        """Drops all, and takes only those of that series from now on."""
        with self._keeping:
            self._series = series
            self._kept = []
            self._spare.clear()

    def _answer_request(self, connection: socket.socket, kind: int, words: Sequence[bytes]) -> None:
        if kind != SUMS or len(words) != 4:
            raise ValueError("no sums")
        series, count_to_keep, size = (NUMBER.unpack(word)[0] for word in words[:3])
        try:
            self._take_sums(connection, ShareMark.from_json(words[3]), series, count_to_keep, size)
        except (ValueError, MemoryError) as error:
            _log.warning("sums of another rank were refused", reason=str(error))
            connection.sendall(pack_message(AnswerStatus.REFUSED, [str(error).encode()]))
            raise ConnectionError("refused") from error
        connection.sendall(pack_message(AnswerStatus.DONE, []))

    def _take_sums(
        self, connection: socket.socket, mark: ShareMark, series: int, count_to_keep: int, size: int
    ) -> None:
        memory = self._reserve_memory(mark, series, count_to_keep, size)
        is_whole, at = False, 0
        try:
            while at < size:
                at += receive_chunk(connection, memory[at:size])
            with self._keeping:
                is_whole = series == self._series
                if is_whole:
                    self._kept.append(_KeptSums(mark, memory, size))
        finally:
            if not is_whole:
                with self._keeping:
                    self._spare.add(memory)
        if not is_whole:
            raise ValueError(_VAIN)

    def _reserve_memory(self, mark: ShareMark, series: int, count_to_keep: int, size: int) -> memoryview:
        """Drops what the owner does not need, and returns memory for the next sums.

        It needs the mark of so many micro-batches of this step: all ranks of its replica have that. Nothing is dropped
        once this process has left its generation, because it may use what it has.
        """
        with self._keeping:
            if self._is_closed:
                raise ValueError("this process has left its generation")
            if series != self._series:
                raise ValueError(_VAIN)
            dropped = [
                kept
                for kept in self._kept
                if kept.mark.owner == mark.owner and kept.mark.key != mark.key._replace(micro_batches=count_to_keep)
            ]
            self._kept = [kept for kept in self._kept if kept not in dropped]
            return self._spare.take(size, [kept.memory for kept in dropped])
