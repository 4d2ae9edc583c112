"""Saving: a copy in host memory while training waits, everything else behind its back in one thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import structlog

from varuna.checkpoint.checksum import Checksum
from varuna.checkpoint.errors import CheckpointError
from varuna.checkpoint.local import LocalCopies
from varuna.checkpoint.manifest import (
    MANIFEST,
    FileEntry,
    FileKind,
    Manifest,
    Per,
    RankState,
    Receipt,
    Retention,
    file_generation,
    merge,
    merge_groups,
    parse,
    receipt_name,
)
from varuna.checkpoint.pruning import KEPT_AUTOMATIC, Asked, Pruning
from varuna.checkpoint.references import EarlierFiles, require_present
from varuna.checkpoint.registered import Merged, digest_of, merge_registered
from varuna.checkpoint.snapshot import HostBuffers, HostFile, Snapshot, snapshot, state_file
from varuna.checkpoint.state import TrainingState
from varuna.checkpoint.store import CheckpointStore, folder_of
from varuna.checkpoint.tensor_file import pieces

__all__ = ["Checkpointer", "SaveOutcome"]

_PIECE_BYTES = 64 * 1024 * 1024
"""Handed to the store at a time: a kernel writes large pieces several times as fast as small ones."""
_FIRST_POLL_S = 0.01
_SLOWEST_POLL_S = 0.5


@dataclass(frozen=True, kw_only=True)
class SaveOutcome:
    """How a save ended on this rank."""

    step: int
    result: Literal["committed", "written", "dropped", "failed"]
    """committed: rank 0 made the manifest; written: this rank's files and receipt are in the store (other ranks);
    dropped: a checkpoint of this step was there already, and stands; failed: see `error`."""
    url: str
    bytes: int = 0
    """Of the whole checkpoint on rank 0, of this rank's files elsewhere."""
    write_s: float = 0.0
    error: str = ""


class Checkpointer:
    """Saves one rank's share of checkpoints into a store, at most one at a time.

    All ranks of a generation call `save` at the same steps. A save that fails is logged and told to `on_failed`; it
    never raises into training. One that a script has asked for is `take_failure`'s to give then. Both callbacks run in
    the background thread; `on_committed(step, url, bytes)` on rank 0 only. `local`: a folder of this VM for copies of
    the files; "": none. `keep`: so many automatic checkpoints stay.
    """

    def __init__(
        self,
        url: str,
        *,
        generation: int,
        rank: int,
        p: int,
        d: int,
        local: str = "",
        on_committed: Callable[[int, str, int], None] | None = None,
        on_failed: Callable[[int, str], None] | None = None,
        keep: int = KEPT_AUTOMATIC,
        receipt_deadline_s: float = 600.0,
    ) -> None:
        self._store = CheckpointStore(url)
        self._pruning = Pruning(self._store, generation, keep)
        self._keep = keep
        self._generation, self._rank, self._p, self._d = generation, rank, p, d
        self._local = local
        self._on_committed = on_committed
        self._on_failed = on_failed
        self._receipt_deadline_s = receipt_deadline_s
        self._buffers = HostBuffers()
        self._trusted: set[tuple[int, str]] = set()
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()
        self._outcome: SaveOutcome | None = None
        self._failure_of_asked: SaveOutcome | None = None
        self._said_by_rank: set[str] = set()
        self._log = structlog.get_logger(__name__).bind(generation=generation, rank=rank)
        self.last_stall_s: float | None = None
        """Seconds that the newest snapshot took."""
        self.last_write_s: float | None = None
        """Seconds that this rank's newest background write took, without waiting for others."""

    @property
    def in_flight(self) -> bool:
        """Whether a save is still being written by this rank."""
        return self._thread is not None and self._thread.is_alive()

    def save(self, step: int, state: TrainingState, *, local: str | None = None, asked: Asked | None = None) -> bool:
        """Copy `state`, the one after `step` steps, and write it in the background.

        `local`: a folder for copies of this checkpoint, in place of the usual one. `asked`: a script asks for it.

        False, with nothing done, while an earlier save is in flight: the next one comes soon enough.
        """
        if self.in_flight or self._closed.is_set():
            return False
        started_s = time.perf_counter()
        try:
            copied = snapshot(
                state,
                step,
                generation=self._generation,
                replica=self._rank // self._p,
                replicas=self._d,
                rank=self._rank,
                buffers=self._buffers,
            )
        except CheckpointError as error:
            self._start(step, self._refuse, step, str(error), asked)
            return True
        self.last_stall_s = time.perf_counter() - started_s
        folder = self._local if local is None else local
        self._start(step, self._run, copied, LocalCopies(folder, step) if folder else None, asked)
        return True

    def _start(self, step: int, write: Callable[..., None], *arguments: object) -> None:
        self._thread = threading.Thread(target=write, args=arguments, name=f"checkpoint-{step}", daemon=True)
        self._thread.start()

    def take_failure(self) -> SaveOutcome | None:
        """The newest failed save of those that a script has asked for, once; None when all went well."""
        failure, self._failure_of_asked = self._failure_of_asked, None
        return failure

    def wait(self, timeout_s: float | None = None) -> SaveOutcome | None:
        """The newest save's outcome, once it has one. None when there was no save or the time has run out."""
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                return None
        return self._outcome

    def close(self) -> None:
        """End the save in flight: what can be written at once is, what other ranks still owe is given up."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def _refuse(self, step: int, error: str, asked: Asked | None) -> None:
        """Ends a save whose state cannot be kept."""
        try:
            if self._rank != 0:  # which else would wait for this rank's receipt
                self._put_receipt(step, error=error)
        except CheckpointError as further:
            self._log.warning("after a failed checkpoint save", step=step, error=str(further))
        self._ended(self._failure(step, error), asked)

    def _run(self, copied: Snapshot, local: LocalCopies | None, asked: Asked | None) -> None:
        try:
            outcome = self._write(copied, local, asked)
            if outcome.result == "dropped" and self._rank == 0 and asked is not None:
                self._pruning.promote(copied.step, asked.retention(copied.step))
        except Exception as error:  # a failed save never stops training, whatever it failed by; it is logged and told
            outcome = self._failure(copied.step, str(error) or type(error).__name__)
            self._give_up(copied, local, outcome.error)
        self._ended(outcome, asked)
        if local is not None and outcome.result in ("committed", "written"):
            local.prune(self._store)

    def _give_up(self, copied: Snapshot, local: LocalCopies | None, error: str) -> None:
        """Frees what the failed save has taken, of which a full disk is in need, and lets rank 0 know."""
        mine = {file.name for file in copied.files}
        if local is not None:
            local.remove(mine)
        try:
            there = self._store.sizes(copied.step)
            if MANIFEST in there:  # a whole checkpoint, which another save has made
                return
            for name in there:
                if name in mine or (self._rank == 0 and file_generation(name) == self._generation):
                    self._store.remove(f"{folder_of(copied.step)}/{name}")
            if self._rank != 0:
                self._put_receipt(copied.step, error=error)
        except CheckpointError as further:  # rank 0 will miss the receipt, and the next commit deletes what is left
            self._log.warning("after a failed checkpoint save", step=copied.step, error=str(further))

    def _write(self, copied: Snapshot, local: LocalCopies | None, asked: Asked | None) -> SaveOutcome:
        started_s = time.perf_counter()
        folder, step = folder_of(copied.step), copied.step
        retention = Retention.AUTOMATIC if asked is None else asked.retention(step)
        if self._store.get(f"{folder}/{MANIFEST}") is not None:
            return SaveOutcome(step=step, result="dropped", url=self._store.url_of(step))
        referred = self._find_earlier(copied)
        files = [file for file in copied.files if file.name not in referred]
        copies = ""
        if local is not None:
            worth = {f.name: pieces(f.tensors, f.metadata) for f in files if self._is_worth_a_copy(f)}
            copies = local.write(worth)
        written = (self._put(folder, f, copies if self._is_worth_a_copy(f) else "") for f in files)
        entries = (*written, *referred.values())
        self._store.sync(step, (file.name for file in files))
        self._trusted |= {(step, file.name) for file in files if file.is_frozen}
        self._put_receipt(step, copied, entries)
        self.last_write_s = write_s = time.perf_counter() - started_s
        if self._rank != 0:
            size = sum(entry.bytes for entry in entries)
            return SaveOutcome(step=step, result="written", url=self._store.url_of(step), bytes=size, write_s=write_s)
        return self._commit(copied, write_s, retention)

    def _is_worth_a_copy(self, file: HostFile) -> bool:
        """All but states that, where they are rank 0's too, are not even in the checkpoint."""
        return self._rank == 0 or file.kind is not FileKind.STATE

    def _find_earlier(self, copied: Snapshot) -> dict[str, FileEntry]:
        """For files of what is frozen, by name: the same file of an earlier checkpoint, if there is one."""
        frozen = [file for file in copied.files if file.is_frozen]
        if not frozen:
            return {}
        earlier = EarlierFiles(self._store, copied.step, keep=self._keep, trusted=self._trusted)
        found = {file.name: earlier.find(_entry(file, *_summed(file))) for file in frozen}
        return {name: entry for name, entry in found.items() if entry is not None}

    def _put(self, folder: str, file: HostFile, copies: str) -> FileEntry:
        checksum = Checksum()
        size = 0

        def summed() -> Iterator[memoryview]:
            nonlocal size
            for part in _parts(file):
                checksum.update(part)
                size += len(part)
                yield part

        self._store.put(f"{folder}/{file.name}", summed())
        return _entry(file, checksum, size, copies)

    def _put_receipt(
        self, step: int, copied: Snapshot | None = None, entries: tuple[FileEntry, ...] = (), *, error: str = ""
    ) -> None:
        registered = {} if copied is None else copied.registered
        receipt = Receipt(
            generation=self._generation,
            step=step,
            rank=self._rank,
            world_size=self._p * self._d,
            tensors_of={} if copied is None else copied.tensors_of,
            files=entries,
            groups=() if copied is None or error else copied.groups,
            registered={
                name: RankState(
                    per=state.per,
                    ranks=(self._rank,),
                    value=state.value,
                    digest=digest_of(state.value, state.tensors),
                    file=state.file,
                )
                for name, state in registered.items()
            },
            error=error,
        )
        name = receipt_name(self._generation, self._rank)
        self._store.put(f"{folder_of(step)}/{name}", receipt.to_bytes())

    def _commit(self, copied: Snapshot, write_s: float, retention: Retention) -> SaveOutcome:
        step, url = copied.step, self._store.url_of(copied.step)
        dropped = SaveOutcome(step=step, result="dropped", url=url, write_s=write_s)
        receipts = self._await_receipts(step)
        if receipts is None:
            return dropped
        registered = merge_registered(receipts)
        always = state_file(self._generation, 0)
        files, needless = registered.keep(merge(receipts, copied.section_count), always)
        for name in needless:
            with suppress(CheckpointError):  # then it stays, and goes with the checkpoint
                self._store.remove(f"{folder_of(step)}/{name}")
        require_present(self._store, files)
        groups = merge_groups(receipts)
        manifest = Manifest(
            generation=self._generation,
            step=step,
            p=self._p,
            d=self._d,
            section_count=copied.section_count,
            seed=copied.seed,
            cursor=copied.cursor,
            optimizer=" and ".join(sorted({group.optimizer for group in groups})) or None,
            state={"user": registered.job},
            groups=groups,
            rank_states=registered.by_rank,
            files=files,
            total_bytes=sum(entry.bytes for entry in files),
            retention=retention,
            state_dict=copied.state_dict,
        )
        if not self._store.create(f"{folder_of(step)}/{MANIFEST}", manifest.to_bytes()):
            return dropped
        self._store.sync(step, [MANIFEST])
        self._report_by_rank(registered)
        return SaveOutcome(step=step, result="committed", url=url, bytes=manifest.total_bytes, write_s=write_s)

    def _report_by_rank(self, registered: Merged) -> None:
        """Logs, once, what no other shape can load: before a morph does."""
        for name, copies in registered.by_rank.items():
            if copies[0].per is Per.AUTO and name not in self._said_by_rank:
                self._said_by_rank.add(name)
                self._log.warning(
                    f"the registered state {name!r} differs between ranks and is not keyed by names of parameters: no "
                    "other shape can load it; key its entries by such names, or register it with per='job' or 'rank'",
                    first_ranks=[copy.ranks[0] for copy in copies[:2]],
                )

    def _await_receipts(self, step: int) -> list[Receipt] | None:
        """The receipts of all ranks; None when a manifest appears first. Raises CheckpointError when some
        stay away or tell of a failure.
        """
        expected = [receipt_name(self._generation, rank) for rank in range(self._p * self._d)]
        read: dict[str, Receipt] = {}
        deadline_s = time.monotonic() + self._receipt_deadline_s
        poll_s = _FIRST_POLL_S
        while True:
            present = self._store.sizes(step)
            if MANIFEST in present:
                return None
            read |= {name: self._receipt(step, name) for name in expected if name in present and name not in read}
            missing = [name for name in expected if name not in present]
            if not missing:
                return [read[name] for name in expected]
            if self._closed.is_set() or time.monotonic() > deadline_s:
                why = "closed" if self._closed.is_set() else f"after {self._receipt_deadline_s:g} s"
                raise CheckpointError(
                    f"step {step} stays incomplete: {len(missing)} of {len(expected)} receipts missing ({why}), "
                    f"first {missing[0]}"
                )
            self._closed.wait(poll_s)
            poll_s = min(2 * poll_s, _SLOWEST_POLL_S)

    def _receipt(self, step: int, name: str) -> Receipt:
        path = f"{folder_of(step)}/{name}"
        data = self._store.get(path)
        if data is None:
            raise CheckpointError(f"{self._store.url}/{path} vanished after it was listed")
        receipt = parse(Receipt, data, path)
        if receipt.error:
            raise CheckpointError(f"rank {receipt.rank} could not write its part: {receipt.error}")
        return receipt

    def _failure(self, step: int, error: str) -> SaveOutcome:
        return SaveOutcome(step=step, result="failed", url=self._store.url_of(step), error=error)

    def _ended(self, outcome: SaveOutcome, asked: Asked | None) -> None:
        """Log and tell; errors of the callbacks and of pruning are logged, for the outcome stands."""
        self._outcome = outcome
        if outcome.result == "failed":
            self._log.warning("checkpoint save failed, training goes on", step=outcome.step, error=outcome.error)
            if asked is not None:
                self._failure_of_asked = outcome
        elif outcome.result != "written":  # rank 0 speaks for the others
            self._log.info("checkpoint " + outcome.result, step=outcome.step, bytes=outcome.bytes)
        try:
            if outcome.result == "committed":
                if self._on_committed is not None:
                    self._on_committed(outcome.step, outcome.url, outcome.bytes)
                self._pruning.prune(outcome.step, None if asked is None else asked.keep)
            elif outcome.result == "failed" and self._on_failed is not None:
                self._on_failed(outcome.step, outcome.error)
        except Exception as error:  # neither a callback nor a store that refuses to delete may stop training
            self._log.warning("after a checkpoint save", step=outcome.step, error=str(error))


def _parts(file: HostFile) -> Iterator[memoryview]:
    for piece in pieces(file.tensors, file.metadata):
        for start in range(0, len(piece), _PIECE_BYTES):
            yield piece[start : start + _PIECE_BYTES]


def _summed(file: HostFile) -> tuple[Checksum, int]:
    """The checksum and the bytes of a file that is not written yet."""
    checksum, size = Checksum(), 0
    for part in _parts(file):
        checksum.update(part)
        size += len(part)
    return checksum, size


def _entry(file: HostFile, checksum: Checksum, size: int, copies: str = "") -> FileEntry:
    return FileEntry(
        name=file.name,
        kind=file.kind,
        section=file.section,
        holds=file.holds,
        bytes=size,
        checksum=str(checksum),
        local=copies,
    )
