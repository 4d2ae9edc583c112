"""Saving: a copy of the state in host memory, before training changes it, and the rest in a background thread.

A state on an accelerator can be copied in that thread, too, on a stream of its own, while passes run: these only read
it. On a CPU the passes would have to share the processors with the copy, so training waits for it. So it does where
states that the script has registered have tensors: the script's code may change them in a pass.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

import structlog
import torch

from varuna.checkpoint.errors import CheckpointError
from varuna.checkpoint.format.checksum import Checksum
from varuna.checkpoint.format.encoding import encode_state
from varuna.checkpoint.format.manifest import (
    MANIFEST,
    CheckpointRetention,
    FileEntry,
    FileKind,
    Manifest,
    Receipt,
    StateScope,
    file_generation,
    receipt_name,
)
from varuna.checkpoint.format.tensor_file import iterate_pieces
from varuna.checkpoint.loading.complete_checkpoints import read_complete_manifest
from varuna.checkpoint.saving.host_files import iterate_parts, make_entry, sum_file
from varuna.checkpoint.saving.pruning import KEPT_AUTOMATIC, CheckpointPruner, CheckpointRequest
from varuna.checkpoint.saving.receipts import ReceiptWait, make_receipt, merge_receipts
from varuna.checkpoint.saving.references import EarlierFiles, require_present
from varuna.checkpoint.saving.snapshot import HostBuffers, HostFile, RankSnapshot, make_snapshot
from varuna.checkpoint.state.rank_state import OPTIMIZER_ENTRIES, ShapePosition, TrainingState
from varuna.checkpoint.storage.local import LocalCopies
from varuna.checkpoint.storage.store import CheckpointStore, folder_of
from varuna.devices.accelerator import is_accelerator, use_stream
from varuna.diagnostics.error_text import first_line

__all__ = ["CheckpointWriter", "SaveOutcome"]


@dataclass(frozen=True, kw_only=True)
class SaveOutcome:
    """How a save ended on this rank."""

    step: int
    result: Literal["committed", "written", "dropped", "failed"]
    """committed: rank 0 created the manifest; written: another rank's files and receipt are in the store;
    dropped: the store already has a checkpoint of this step; failed: see `error`."""
    url: str
    bytes: int = 0
    """The size of the whole checkpoint on rank 0, of this rank's files on others."""
    write_s: float = 0.0
    error: str = ""


class CheckpointWriter:
    """Saves one rank's share of checkpoints into a store, at most one at a time.

    All ranks of a generation call `start_save` at the same steps. A failed save is logged and passed to `on_failed`; it
    never raises into training. `pop_failure` returns a failed save that the script requested. Both callbacks run in the
    background thread; `on_committed(step, url, bytes)` on rank 0 only. `local`: a folder of this VM for copies of the
    files; "": none. `keep`: how many automatic checkpoints stay.
    """

    def __init__(
        self,
        url: str,
        *,
        generation: int,
        position: ShapePosition,
        local: str = "",
        on_committed: Callable[[int, str, int], None] | None = None,
        on_failed: Callable[[int, str], None] | None = None,
        keep: int = KEPT_AUTOMATIC,
        receipt_deadline_s: float = 600.0,
    ) -> None:
        self._store = CheckpointStore(url)
        self._pruning = CheckpointPruner(self._store, generation, keep)
        self._keep = keep
        self._generation, self._rank, self._p, self._d = generation, position.rank, position.p, position.d
        self._local = local
        self._on_committed = on_committed
        self._on_failed = on_failed
        self._buffers = HostBuffers()
        self._trusted: set[tuple[int, str]] = set()
        self._thread: threading.Thread | None = None
        self._is_copied = threading.Event()
        self._is_copied.set()
        self._stream: torch.Stream | None = None
        """For copies from an accelerator beside its computing."""
        self._closed = threading.Event()
        self._receipts = ReceiptWait(
            self._store,
            generation=generation,
            world_size=self._p * self._d,
            deadline_s=receipt_deadline_s,
            closed=self._closed,
        )
        self._outcome: SaveOutcome | None = None
        self._requested_failure: SaveOutcome | None = None
        self._logged_states: set[str] = set()
        self._log = structlog.get_logger(__name__).bind(generation=generation, rank=position.rank)
        self.last_stall_s: float | None = None
        """Seconds that the newest snapshot took, in which training stood still or passes ran."""
        self.last_write_s: float | None = None
        """Seconds that this rank's newest background write took, without waiting for others."""

    @property
    def in_flight(self) -> bool:
        """Whether a save is still being written by this rank."""
        return self._thread is not None and self._thread.is_alive()

    def start_save(
        self,
        step: int,
        state: TrainingState,
        *,
        local: str | None = None,
        request: CheckpointRequest | None = None,
        beside_passes: bool = False,
    ) -> bool:
        """Copies `state`, the one after `step` steps, and starts to write it in the background.

        `local`: a folder for copies of this checkpoint, in place of the usual one. `request`: the script's, if any.
        `beside_passes`: the state must not change before `finish_copy`, because it may be copied in the background.

        Returns False and does nothing while an earlier save is in flight, because the next one comes soon enough.
        """
        if self.in_flight or self._closed.is_set():
            return False
        folder = self._local if local is None else local
        copies = LocalCopies(folder, step) if folder else None
        device = _find_accelerator(state) if beside_passes else None
        if device is not None and (lasting := _with_lasting_states(state)) is not None:
            self._is_copied.clear()
            self._start(step, self._copy_and_run, step, [lasting], self._order_stream(device), copies, request)
            return True
        try:
            copied = self._copy(step, state)
        except CheckpointError as error:
            self._start(step, self._refuse_state, step, str(error), request)
            return True
        self._start(step, self._run, copied, copies, request)
        return True

    def finish_copy(self) -> None:
        """Waits until the state of the newest save may change."""
        self._is_copied.wait()

    def _order_stream(self, device: torch.device) -> torch.Stream:
        """The stream for copies, behind all that has been launched on the device."""
        if self._stream is None:
            self._stream = torch.Stream(device)
        self._stream.wait_stream(torch.accelerator.current_stream(device))
        return self._stream

    def _copy(self, step: int, state: TrainingState) -> RankSnapshot:
        started_s = time.perf_counter()
        copied = make_snapshot(
            state,
            step,
            generation=self._generation,
            replica=self._rank // self._p,
            replicas=self._d,
            rank=self._rank,
            buffers=self._buffers,
        )
        self.last_stall_s = time.perf_counter() - started_s
        return copied

    def _copy_and_run(
        self,
        step: int,
        states: list[TrainingState],
        stream: torch.Stream,
        local: LocalCopies | None,
        request: CheckpointRequest | None,
    ) -> None:
        """`states`: the one, which is taken out. Its stage may be no more before the files are written, and nothing may
        keep its parameters then."""
        try:
            with use_stream(stream):
                copied = self._copy(step, states.pop())
        except Exception as error:  # it holds what a checkpoint cannot, or memory is short: training goes on
            self._refuse_state(step, first_line(error) or type(error).__name__, request)
            return
        finally:
            self._is_copied.set()
        self._run(copied, local, request)

    def _start(self, step: int, write: Callable[..., None], *arguments: object) -> None:
        self._thread = threading.Thread(target=write, args=arguments, name=f"checkpoint-{step}", daemon=True)
        self._thread.start()

    def pop_failure(self) -> SaveOutcome | None:
        """The newest failed save among requested ones, returned once; None when none failed."""
        failure, self._requested_failure = self._requested_failure, None
        return failure

    def wait(self, timeout_s: float | None = None) -> SaveOutcome | None:
        """The newest save's outcome, once it has one. None when there was no save or the time has run out."""
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                return None
        return self._outcome

    def close(self) -> None:
        """Ends the save in flight: this rank's part is still written, and the wait for other ranks ends."""
        self.abandon()
        if self._thread is not None:
            self._thread.join()

    def abandon(self) -> None:
        """Ends the wait for other ranks' parts of the save in flight, which goes on in the background."""
        self._closed.set()

    def _refuse_state(self, step: int, error: str, request: CheckpointRequest | None) -> None:
        """Ends a save whose state a checkpoint cannot hold."""
        try:
            if self._rank != 0:  # rank 0 would wait for this rank's receipt
                self._report_failure(step, error)
        except CheckpointError as further:
            self._log.warning("after a failed checkpoint save", step=step, error=str(further))
        self._finish_save(self._failure(step, error), request)

    def _run(self, copied: RankSnapshot, local: LocalCopies | None, request: CheckpointRequest | None) -> None:
        try:
            outcome = self._write(copied, local, request)
            if outcome.result == "dropped" and request is not None:
                self._require_same(copied)
                if self._rank == 0:
                    self._pruning.extend_retention(copied.step, request.choose_retention(copied.step))
        except Exception as error:  # a failed save never stops training, whatever the reason; it is logged and reported
            outcome = self._failure(copied.step, str(error) or type(error).__name__)
            self._clean_up(copied, local, outcome.error)
        self._finish_save(outcome, request)
        if local is not None and outcome.result in ("committed", "written"):
            local.delete_outdated(self._store)

    def _clean_up(self, copied: RankSnapshot, local: LocalCopies | None, error: str) -> None:
        """Deletes the files of the failed save, since the disk may be full, and reports the failure to rank 0."""
        mine = {file.name for file in copied.files}
        if local is not None:
            local.delete_files(mine)
        try:
            there = self._store.list_sizes(copied.step)
            if MANIFEST in there:  # a complete checkpoint of another save
                return
            for name in there:
                if name in mine or (self._rank == 0 and file_generation(name) == self._generation):
                    self._store.delete_file(f"{folder_of(copied.step)}/{name}")
            if self._rank != 0:
                self._report_failure(copied.step, error)
        except CheckpointError as further:  # rank 0 will miss the receipt, and the next commit deletes the rest
            self._log.warning("after a failed checkpoint save", step=copied.step, error=str(further))

    def _write(self, copied: RankSnapshot, local: LocalCopies | None, request: CheckpointRequest | None) -> SaveOutcome:
        started_s = time.perf_counter()
        folder, step = folder_of(copied.step), copied.step
        retention = CheckpointRetention.AUTOMATIC if request is None else request.choose_retention(step)
        if self._store.get(f"{folder}/{MANIFEST}") is not None:
            return SaveOutcome(step=step, result="dropped", url=self._store.url_of(step))
        referred = self._find_earlier(copied)
        files = [file for file in copied.files if file.name not in referred]
        copies = ""
        if local is not None:
            worth = {f.name: iterate_pieces(f.tensors, f.metadata) for f in files if self._is_worth_a_copy(f)}
            copies = local.write_files(worth)
        written = (self._put_file(folder, f, copies if self._is_worth_a_copy(f) else "") for f in files)
        entries = (*written, *referred.values())
        self._store.sync_files(step, (file.name for file in files))
        self._trusted |= {(step, file.name) for file in files if file.is_frozen}
        self._put_receipt(
            make_receipt(copied, entries, generation=self._generation, rank=self._rank, world_size=self._p * self._d)
        )
        self.last_write_s = write_s = time.perf_counter() - started_s
        if self._rank != 0:
            size = sum(entry.bytes for entry in entries)
            return SaveOutcome(step=step, result="written", url=self._store.url_of(step), bytes=size, write_s=write_s)
        return self._commit(copied, write_s, retention)

    def _require_same(self, copied: RankSnapshot) -> None:
        """Raises CheckpointError if the store's checkpoint of this step is harmed, or has other parameters. Where it
        was written in another shape, that is not known."""
        there = read_complete_manifest(self._store, copied.step)
        is_current = there.schema_ == Manifest.model_fields["schema_"].default  # others may have other bytes
        parameters = {entry.holds: entry for entry in there.files if entry.kind is FileKind.PARAMETERS}
        for file in copied.files:
            entry = parameters.get(file.holds) if file.kind is FileKind.PARAMETERS and is_current else None
            if entry is not None and entry.checksum != str(sum_file(file)[0]):
                raise CheckpointError(
                    f"a checkpoint of this step is there with other parameters ({entry.name}), of another run or of "
                    "steps that were given up: save into another folder, or move that one away"
                )

    def _is_worth_a_copy(self, file: HostFile) -> bool:
        """Whether to copy a file: states of other ranks are not, because equal ones are not even in the checkpoint."""
        return self._rank == 0 or file.kind is not FileKind.STATE

    def _find_earlier(self, copied: RankSnapshot) -> dict[str, FileEntry]:
        """For files of frozen parameters, by name: the same file of an earlier checkpoint, if there is one."""
        frozen = [file for file in copied.files if file.is_frozen]
        if not frozen:
            return {}
        earlier = EarlierFiles(self._store, copied.step, keep=self._keep, trusted=self._trusted)
        found = {file.name: earlier.match_file(make_entry(file, *sum_file(file))) for file in frozen}
        return {name: entry for name, entry in found.items() if entry is not None}

    def _put_file(self, folder: str, file: HostFile, copies: str) -> FileEntry:
        checksum = Checksum()
        size = 0

        def summed() -> Iterator[memoryview]:
            nonlocal size
            for part in iterate_parts(file):
                checksum.update(part)
                size += len(part)
                yield part

        self._store.put(f"{folder}/{file.name}", summed())
        return make_entry(file, checksum, size, copies)

    def _put_receipt(self, receipt: Receipt) -> None:
        name = receipt_name(self._generation, self._rank)
        self._store.put(f"{folder_of(receipt.step)}/{name}", receipt.to_bytes())

    def _report_failure(self, step: int, error: str) -> None:
        """Makes rank 0 give up this step's checkpoint, which would otherwise wait for this rank's receipt."""
        self._put_receipt(
            Receipt(
                generation=self._generation,
                step=step,
                rank=self._rank,
                world_size=self._p * self._d,
                tensors_of={},
                files=(),
                error=error,
            )
        )

    def _commit(self, copied: RankSnapshot, write_s: float, retention: CheckpointRetention) -> SaveOutcome:
        step, url = copied.step, self._store.url_of(copied.step)
        dropped = SaveOutcome(step=step, result="dropped", url=url, write_s=write_s)
        receipts = self._receipts.await_receipts(step)
        if receipts is None:
            return dropped
        manifest, superfluous = merge_receipts(
            receipts,
            p=self._p,
            d=self._d,
            section_count=copied.section_count,
            seed=copied.seed,
            cursor=copied.cursor,
            state_dict=copied.state_dict,
            retention=retention,
        )
        for name in superfluous:
            with suppress(CheckpointError):  # then it stays until the checkpoint is deleted
                self._store.delete_file(f"{folder_of(step)}/{name}")
        require_present(self._store, manifest.files)
        if not self._store.create(f"{folder_of(step)}/{MANIFEST}", manifest.to_bytes()):
            return dropped
        self._store.sync_files(step, [MANIFEST])
        self._warn_unportable_states(manifest)
        return SaveOutcome(step=step, result="committed", url=url, bytes=manifest.total_bytes, write_s=write_s)

    def _warn_unportable_states(self, manifest: Manifest) -> None:
        """Logs once, before a morph fails by it, each state that no other shape can load."""
        for name, copies in manifest.rank_states.items():
            if copies[0].per is StateScope.AUTO and name not in self._logged_states:
                self._logged_states.add(name)
                self._log.warning(
                    f"what {manifest.optimizer} keeps beside its parameters' state differs between ranks: no other "
                    "shape can load it; keep it by parameter"
                    if name == OPTIMIZER_ENTRIES
                    else f"the registered state {name!r} differs between ranks and is not keyed by names of "
                    "parameters: no other shape can load it; key its entries by such names, or register it with "
                    "per='job' or 'rank'",
                    first_ranks=[copy.ranks[0] for copy in copies[:2]],
                )

    def _failure(self, step: int, error: str) -> SaveOutcome:
        return SaveOutcome(step=step, result="failed", url=self._store.url_of(step), error=error)

    def _finish_save(self, outcome: SaveOutcome, request: CheckpointRequest | None) -> None:
        """Logs and reports the outcome; errors of callbacks and of pruning are only logged, because it stands."""
        self._outcome = outcome
        if outcome.result == "failed":
            self._log.warning("checkpoint save failed, training goes on", step=outcome.step, error=outcome.error)
            if request is not None:
                self._requested_failure = outcome
        elif outcome.result != "written":  # rank 0 logs for all
            self._log.info("checkpoint " + outcome.result, step=outcome.step, bytes=outcome.bytes)
        try:
            if outcome.result == "committed":
                if self._on_committed is not None:
                    self._on_committed(outcome.step, outcome.url, outcome.bytes)
                self._pruning.delete_outdated(outcome.step, None if request is None else request.keep)
            elif outcome.result == "failed" and self._on_failed is not None:
                self._on_failed(outcome.step, outcome.error)
        except Exception as error:  # neither a callback nor a store that refuses to delete may stop training
            self._log.warning("after a checkpoint save", step=outcome.step, error=str(error))


def _with_lasting_states(state: TrainingState) -> TrainingState | None:
    """With copies of the script's own states, which its code may change in a pass; None: these have tensors, or a
    checkpoint cannot hold them."""
    try:
        if any(encode_state(value, name)[1] for name, value in state.user.items()):
            return None
    except CheckpointError:
        return None
    return replace(state, user=copy.deepcopy(dict(state.user)))


def _find_accelerator(state: TrainingState) -> torch.device | None:
    """The device that has the state; None: it is in host memory."""
    devices = (tensor.device for tensor in state.tensors.values())
    return next((device for device in devices if is_accelerator(device)), None)
