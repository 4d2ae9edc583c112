"""The receipts of the ranks: how one is made, rank 0's wait for all, and the manifest that they make together."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from varuna.checkpoint.errors import CheckpointError
from varuna.checkpoint.format.manifest import (
    MANIFEST,
    CheckpointRetention,
    FileEntry,
    Manifest,
    RankState,
    Receipt,
    SampleCursor,
    merge_files,
    merge_groups,
    parse_sealed_document,
    receipt_name,
)
from varuna.checkpoint.saving.snapshot import RankSnapshot, state_file
from varuna.checkpoint.state.registered import digest_of, merge_registered
from varuna.checkpoint.storage.store import CheckpointStore, folder_of

__all__ = ["MergedReceipts", "ReceiptWait", "make_receipt", "merge_receipts"]

_FIRST_POLL_S = 0.01
_SLOWEST_POLL_S = 0.5


def make_receipt(
    copied: RankSnapshot, entries: Sequence[FileEntry], *, generation: int, rank: int, world_size: int
) -> Receipt:
    """The receipt for the files of a snapshot."""
    return Receipt(
        generation=generation,
        step=copied.step,
        rank=rank,
        world_size=world_size,
        tensors_of=copied.tensors_of,
        files=tuple(entries),
        groups=copied.groups,
        registered={
            name: RankState(
                per=state.per,
                ranks=(rank,),
                value=state.value,
                digest=digest_of(state.value, state.tensors),
                file=state.file,
            )
            for name, state in copied.registered.items()
        },
    )


class MergedReceipts(NamedTuple):
    """What the receipts of all ranks make together."""

    manifest: Manifest
    superfluous: tuple[str, ...]
    """Names of files that the manifest does not need."""


def merge_receipts(
    receipts: Sequence[Receipt],
    *,
    p: int,
    d: int,
    section_count: int,
    seed: int,
    cursor: SampleCursor | None,
    state_dict: Mapping[str, str],
    retention: CheckpointRetention | None = None,
) -> MergedReceipts:
    """The manifest of the files that `receipts`, in the order of their ranks, name.

    Raises CheckpointError unless every tensor is in exactly one file, and for ranks that contradict each other.
    """
    registered = merge_registered(receipts)
    generation = receipts[0].generation
    always = state_file(generation, receipts[0].rank)
    files, superfluous = registered.select_files(merge_files(receipts, section_count), always)
    groups = merge_groups(receipts)
    manifest = Manifest(
        generation=generation,
        step=receipts[0].step,
        p=p,
        d=d,
        section_count=section_count,
        seed=seed,
        cursor=cursor,
        optimizer=" and ".join(sorted({group.optimizer for group in groups})) or None,
        state={"user": registered.job},
        groups=groups,
        rank_states=registered.by_rank,
        files=files,
        total_bytes=sum(entry.bytes for entry in files),
        retention=retention,
        state_dict=dict(state_dict),
    )
    return MergedReceipts(manifest, superfluous)


class ReceiptWait:
    """Waits for the receipts of a generation's ranks, at most `deadline_s` for a checkpoint, until `closed` is set."""

    def __init__(
        self, store: CheckpointStore, *, generation: int, world_size: int, deadline_s: float, closed: threading.Event
    ) -> None:
        self._store = store
        self._generation = generation
        self._world_size = world_size
        self._deadline_s = deadline_s
        self._closed = closed

    def await_receipts(self, step: int) -> list[Receipt] | None:
        """The receipts of all ranks; None when a manifest appears first.

        Raises CheckpointError when one is missing at the deadline, or reports a failure.
        """
        expected = [receipt_name(self._generation, rank) for rank in range(self._world_size)]
        read: dict[str, Receipt] = {}
        deadline_s = time.monotonic() + self._deadline_s
        poll_s = _FIRST_POLL_S
        while True:
            present = self._store.list_sizes(step)
            if MANIFEST in present:
                return None
            read |= {name: self._read_receipt(step, name) for name in expected if name in present and name not in read}
            missing = [name for name in expected if name not in present]
            if not missing:
                return [read[name] for name in expected]
            if self._closed.is_set() or time.monotonic() > deadline_s:
                why = "closed" if self._closed.is_set() else f"after {self._deadline_s:g} s"
                raise CheckpointError(
                    f"step {step} stays incomplete: {len(missing)} of {len(expected)} receipts missing ({why}), "
                    f"first {missing[0]}"
                )
            self._closed.wait(poll_s)
            poll_s = min(2 * poll_s, _SLOWEST_POLL_S)

    def _read_receipt(self, step: int, name: str) -> Receipt:
        path = f"{folder_of(step)}/{name}"
        data = self._store.get(path)
        if data is None:
            raise CheckpointError(f"{self._store.url}/{path} vanished after it was listed")
        receipt = parse_sealed_document(Receipt, data, path)
        if receipt.error:
            raise CheckpointError(f"rank {receipt.rank} could not write its part: {receipt.error}")
        return receipt
