"""Keeps other ranks' states in this process's memory, as they send them.

A copy counts once all of it has come. The one before stays until its owner begins the next one, which it does only when
the copies of all ranks are whole: so at any time one step is whole everywhere.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import structlog

from varuna.checkpoint.errors import CheckpointError
from varuna.checkpoint.format.tensor_file import ALIGNMENT
from varuna.copies.memory import SpareMemory
from varuna.distributed.handshake import MeetingKey
from varuna.distributed.rendezvous_protocol import AnswerStatus, pack_message
from varuna.holdings.giving import StateServer
from varuna.holdings.inventory import HeldFile, HeldFiles, Inventory, decode_inventory, encode_inventory
from varuna.holdings.taking import receive_chunk
from varuna.holdings.transfer_protocol import COPY, NUMBER

__all__ = ["CopyKeeper", "pack_copy_request"]

_log = structlog.get_logger("varuna")


def pack_copy_request(held: HeldFiles, *, series: int, step_to_keep: int) -> tuple[list[bytes], list[HeldFile]]:
    """The words of a request to keep the state, and its files. `step_to_keep`: of the copy that stays; 0: none does."""
    words = [NUMBER.pack(series), NUMBER.pack(step_to_keep), encode_inventory(held.inventory)]
    return words, [held.files[entry.name] for entry in held.inventory.receipt.files]


@dataclass(frozen=True)
class _KeptCopy:
    held: HeldFiles
    memory: memoryview


class CopyKeeper(StateServer):
    """Takes the copies of the ranks `owners` of this generation, from its making until `shut_down`."""

    largest_request_bytes = 1 << 28

    def __init__(self, owners: Collection[int], generation: int, key: MeetingKey, host: str) -> None:
        """Listens on a free port of this machine's address `host`. Raises OSError when that is not possible."""
        self._owners = frozenset(owners)
        self._generation = generation
        self._keeping = threading.Lock()
        self._kept: list[_KeptCopy] = []
        self._spare = SpareMemory()
        self._round_series = 0
        super().__init__(key, host)

    @property
    def series(self) -> int:
        """Of the states that are kept: each checkpoint that all ranks load begins another one."""
        return self._round_series

    def list_copies(self) -> list[HeldFiles]:
        """Those that are whole."""
        with self._keeping:
            return [copy.held for copy in self._kept]

    def forget_copies(self, series: int) -> None:
        """Drops all copies, and takes only those of that series from now on."""
        with self._keeping:
            self._round_series = series
            self._kept = []
            self._spare.clear()

    def free_outdated(self, step: int) -> None:
        """Frees all but what is of the state after `step` steps. What comes now stays."""
        with self._keeping:
            self._kept = [copy for copy in self._kept if copy.held.inventory.step == step]
            self._spare.clear()

    def _answer_request(self, connection: socket.socket, kind: int, words: Sequence[bytes]) -> None:
        if kind != COPY or len(words) != 3:
            raise ValueError("no copy")
        series, step_to_keep = (NUMBER.unpack(word)[0] for word in words[:2])
        try:
            inventory = decode_inventory(words[2], "what a rank sends")
            self._check_offer(inventory, series)
            self._take_copy(connection, inventory, series, step_to_keep)
        except (CheckpointError, ValueError, MemoryError) as error:
            _log.warning("a copy of another rank's state was refused", reason=str(error))
            connection.sendall(pack_message(AnswerStatus.REFUSED, [str(error).encode()]))
            raise ConnectionError("refused") from error
        connection.sendall(pack_message(AnswerStatus.DONE, []))

    def _check_offer(self, inventory: Inventory, series: int) -> None:
        if inventory.rank not in self._owners or inventory.receipt.generation != self._generation:
            raise ValueError(
                f"this process keeps nothing of rank {inventory.rank} of generation {inventory.receipt.generation}"
            )
        if series != self._round_series:
            raise ValueError("it is of a state that all ranks have replaced by a checkpoint")

    def _take_copy(self, connection: socket.socket, inventory: Inventory, series: int, step_to_keep: int) -> None:
        entries = inventory.receipt.files
        total = sum(_room_of(entry.bytes) for entry in entries)
        memory = self._reserve_memory(inventory.rank, step_to_keep, total)
        is_whole = False
        try:
            files: dict[str, HeldFile] = {}
            end = 0
            for entry in entries:
                at, until = end, end + entry.bytes
                files[entry.name] = HeldFile(entry.bytes, (memory[at:until],))
                while at < until:
                    at += receive_chunk(connection, memory[at:until])
                end += _room_of(entry.bytes)
            with self._keeping:
                is_whole = series == self._round_series and not self._is_closed
                if is_whole:
                    self._kept.append(_KeptCopy(HeldFiles(inventory, files), memory))
        finally:
            if not is_whole:
                with self._keeping:
                    self._spare.add(memory)

    def _reserve_memory(self, owner: int, step_to_keep: int, size: int) -> memoryview:
        """Drops the owner's copies but that of `step_to_keep`, and returns memory for the next one.

        A copy that comes while another one of its owner still does, over a connection that has broken unseen, gets
        memory of its own.
        """
        with self._keeping:
            dropped = [
                copy
                for copy in self._kept
                if copy.held.inventory.rank == owner and copy.held.inventory.step != step_to_keep
            ]
            self._kept = [copy for copy in self._kept if copy not in dropped]
            return self._spare.take(size, [copy.memory for copy in dropped])


def _room_of(size: int) -> int:
    """So that the next file's tensors are aligned in memory, as they are in the file."""
    return -(-size // ALIGNMENT) * ALIGNMENT
