"""Saving: a copy in host memory while training waits, everything else behind its back in one thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import structlog

from varuna.checkpoint.checksum import Checksum
from varuna.checkpoint.errors import CheckpointError
from varuna.checkpoint.local import LocalCopies
from varuna.checkpoint.manifest import (
    MANIFEST,
    FileEntry,
    Manifest,
    Receipt,
    file_generation,
    merge,
    parse,
    receipt_name,
    set_aside_name,
)
from varuna.checkpoint.references import EarlierFiles, files_referred_to, require_present
from varuna.checkpoint.snapshot import HostBuffers, HostFile, Snapshot, snapshot
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
    never raises into training. Both callbacks run in the background thread;
    `on_committed(step, url, bytes)` on rank 0 only. `local`: a folder of this VM for copies of the files; "": none.
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
        keep: int = 2,
        receipt_deadline_s: float = 600.0,
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep {keep}: at least the newest checkpoint must stay")
        self._store = CheckpointStore(url)
        self._generation, self._rank, self._p, self._d = generation, rank, p, d
        self._local = local
        self._on_committed = on_committed
        self._on_failed = on_failed
        self._keep = keep
        self._receipt_deadline_s = receipt_deadline_s
        self._buffers = HostBuffers()
        self._trusted: set[tuple[int, str]] = set()
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()
        self._outcome: SaveOutcome | None = None
        self._log = structlog.get_logger(__name__).bind(generation=generation, rank=rank)
        self.last_stall_s: float | None = None
        """Seconds that the newest snapshot took."""
        self.last_write_s: float | None = None
        """Seconds that this rank's newest background write took, without waiting for others."""

    @property
    def in_flight(self) -> bool:
        """Whether a save is still being written by this rank."""
        return self._thread is not None and self._thread.is_alive()

    def save(self, step: int, state: TrainingState, *, local: str | None = None) -> bool:
        """Copy `state`, the one after `step` steps, and write it in the background.

        `local`: a folder for copies of this checkpoint, in place of the usual one.

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
            self._ended(self._failure(step, str(error)))
            return True
        self.last_stall_s = time.perf_counter() - started_s
        folder = self._local if local is None else local
        copies = LocalCopies(folder, step) if folder else None
        self._thread = threading.Thread(target=self._run, args=(copied, copies), name=f"checkpoint-{step}", daemon=True)
        self._thread.start()
        return True

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

    def _run(self, copied: Snapshot, local: LocalCopies | None) -> None:
        try:
            outcome = self._write(copied, local)
        except Exception as error:  # a failed save never stops training, whatever it failed by; it is logged and told
            outcome = self._failure(copied.step, str(error) or type(error).__name__)
            self._give_up(copied, local, outcome.error)
        self._ended(outcome)
        if local is not None and outcome.result in ("committed", "written"):
            local.prune(self._store)

    def _give_up(self, copied: Snapshot, local: LocalCopies | None, error: str) -> None:
        """Frees what the failed save has taken, of which a full disk is in need, and lets rank 0 know."""
        mine = {file.name for file in copied.files}
        if local is not None:
            local.remove(mine)
        try:
            for name in self._store.sizes(copied.step):
                if name in mine or (self._rank == 0 and file_generation(name) == self._generation):
                    self._store.remove(f"{folder_of(copied.step)}/{name}")
            if self._rank != 0:
                self._put_receipt(copied, (), error)
        except CheckpointError as further:  # rank 0 will miss the receipt, and the next commit deletes what is left
            self._log.warning("after a failed checkpoint save", step=copied.step, error=str(further))

    def _write(self, copied: Snapshot, local: LocalCopies | None) -> SaveOutcome:
        started_s = time.perf_counter()
        folder, step = folder_of(copied.step), copied.step
        if self._store.get(f"{folder}/{MANIFEST}") is not None:
            return SaveOutcome(step=step, result="dropped", url=self._store.url_of(step))
        referred = self._find_earlier(copied)
        files = [file for file in copied.files if file.name not in referred]
        copies = ""
        if local is not None:
            copies = local.write({file.name: pieces(file.tensors, file.metadata) for file in files})
        entries = (*(self._put(folder, file, copies) for file in files), *referred.values())
        self._store.sync(step, (file.name for file in files))
        self._trusted |= {(step, file.name) for file in files if file.is_frozen}
        self._put_receipt(copied, entries)
        self.last_write_s = write_s = time.perf_counter() - started_s
        if self._rank != 0:
            size = sum(entry.bytes for entry in entries)
            return SaveOutcome(step=step, result="written", url=self._store.url_of(step), bytes=size, write_s=write_s)
        return self._commit(copied, write_s)

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

    def _put_receipt(self, copied: Snapshot, entries: tuple[FileEntry, ...], error: str = "") -> None:
        receipt = Receipt(
            generation=self._generation,
            step=copied.step,
            rank=self._rank,
            world_size=self._p * self._d,
            tensors_of=copied.tensors_of,
            files=entries,
            error=error,
        )
        name = receipt_name(self._generation, self._rank)
        self._store.put(f"{folder_of(copied.step)}/{name}", receipt.to_bytes())

    def _commit(self, copied: Snapshot, write_s: float) -> SaveOutcome:
        step, url = copied.step, self._store.url_of(copied.step)
        dropped = SaveOutcome(step=step, result="dropped", url=url, write_s=write_s)
        receipts = self._await_receipts(step)
        if receipts is None:
            return dropped
        files = merge(receipts, copied.section_count)
        require_present(self._store, files)
        manifest = Manifest(
            generation=self._generation,
            step=step,
            p=self._p,
            d=self._d,
            section_count=copied.section_count,
            seed=copied.seed,
            cursor=copied.cursor,
            optimizer=copied.optimizer,
            state=copied.state,
            files=files,
            total_bytes=sum(entry.bytes for entry in files),
            state_dict=copied.state_dict,
        )
        if not self._store.create(f"{folder_of(step)}/{MANIFEST}", manifest.to_bytes()):
            return dropped
        self._store.sync(step, [MANIFEST])
        return SaveOutcome(step=step, result="committed", url=url, bytes=manifest.total_bytes, write_s=write_s)

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

    def _ended(self, outcome: SaveOutcome) -> None:
        """Log and tell; errors of the callbacks and of pruning are logged, for the outcome stands."""
        self._outcome = outcome
        if outcome.result == "failed":
            self._log.warning("checkpoint save failed, training goes on", step=outcome.step, error=outcome.error)
        elif outcome.result != "written":  # rank 0 speaks for the others
            self._log.info("checkpoint " + outcome.result, step=outcome.step, bytes=outcome.bytes)
        try:
            if outcome.result == "committed":
                if self._on_committed is not None:
                    self._on_committed(outcome.step, outcome.url, outcome.bytes)
                prune(self._store, outcome.step, self._generation, self._keep)
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


def prune(store: CheckpointStore, committed_step: int, generation: int, keep: int) -> list[int]:
    """Delete what the checkpoint of `committed_step` makes needless; the steps that went.

    Kept: the newest `keep` complete ones up to it, everything after it, folders that a newer generation writes to,
    checkpoints that were set aside, and the files of others that those kept refer to.
    """
    kept: list[int] = []
    needless: list[int] = []
    steps = sorted(store.steps(), reverse=True)
    for step in (one for one in steps if one <= committed_step):
        names = store.sizes(step)
        if MANIFEST in names and len(kept) < keep:
            kept.append(step)
        elif not kept or set_aside_name(1) in names or any((file_generation(name) or 0) > generation for name in names):
            continue
        else:
            needless.append(step)
    if needless:
        referred = files_referred_to(store, (step for step in steps if step not in needless))
        for step in needless:
            # The manifest goes first: a half-deleted checkpoint must not look like a complete one.
            store.delete(step, first=MANIFEST, keep=referred.get(step, set()))
    return needless
