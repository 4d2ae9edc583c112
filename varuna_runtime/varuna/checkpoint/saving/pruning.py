"""Which checkpoints are deleted when another one is committed.

Of automatic ones the newest three stay. Requested ones stay, except where the script gave `keep=`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from varuna.checkpoint.errors import CheckpointError
from varuna.checkpoint.format.manifest import (
    MANIFEST,
    CheckpointRetention,
    Manifest,
    file_generation,
    parse_sealed_document,
    set_aside_name,
)
from varuna.checkpoint.saving.given_up import given_up_name
from varuna.checkpoint.saving.references import files_referred_to
from varuna.checkpoint.storage.store import CheckpointStore, folder_of

__all__ = ["KEPT_AUTOMATIC", "CheckpointPruner", "CheckpointRequest"]

KEPT_AUTOMATIC = 3
"""If the newest turns out to be torn, two older ones remain."""


@dataclass(frozen=True, kw_only=True)
class CheckpointRequest:
    """A script's request for a checkpoint: how long it stays. Raises ValueError for numbers without meaning."""

    keep: int | None = None
    """How many of the checkpoints saved with `keep` stay; None: this one stays for good."""
    keep_every: int | None = None
    """Checkpoints whose step is a multiple of this stay for good."""

    def __post_init__(self) -> None:
        for name in ("keep", "keep_every"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ValueError(f"{name}={value!r}: give a whole number from 1 on, or leave it out")
        if self.keep_every is not None and self.keep is None:
            raise ValueError(
                f"keep_every={self.keep_every} without keep: a checkpoint that is asked for stays for good; "
                "keep=n deletes all but the newest n, and keep_every says which of them stay all the same"
            )

    def choose_retention(self, step: int) -> CheckpointRetention:
        if self.keep is None or (self.keep_every is not None and step % self.keep_every == 0):
            return CheckpointRetention.KEPT
        return CheckpointRetention.ROLLING


class CheckpointPruner:
    """Deletes checkpoints of one store."""

    def __init__(self, store: CheckpointStore, generation: int, keep_automatic: int = KEPT_AUTOMATIC) -> None:
        if keep_automatic < 1:
            raise ValueError(f"keep {keep_automatic}: at least the newest checkpoint must stay")
        self._store = store
        self._generation = generation
        self._keep_automatic = keep_automatic
        self._known: dict[int, CheckpointRetention | None] = {}
        """Of checkpoints seen before, so that each manifest is read once."""

    def delete_outdated(self, committed_step: int, keep_rolling: int | None = None) -> list[int]:
        """Deletes the checkpoints that the one of `committed_step` makes superfluous, and returns their steps.

        Everything after that step stays. So do folders that a newer generation writes to, checkpoints that were set
        aside, those whose manifest has no retention, and files that other checkpoints refer to. Of those that were
        given up, the ones stay that a script had requested for good.
        `keep_rolling` None: all requested checkpoints stay.
        """
        limits = {CheckpointRetention.AUTOMATIC: self._keep_automatic}
        if keep_rolling is not None:
            limits[CheckpointRetention.ROLLING] = keep_rolling
        seen = dict.fromkeys(limits, 0)
        any_complete = False
        gone: list[int] = []
        steps = sorted(self._store.list_steps(), reverse=True)
        for step in (one for one in steps if one <= committed_step):
            names = self._store.list_sizes(step)
            if MANIFEST in names:
                any_complete = True
                retention = self._retention(step)
                if retention not in limits:
                    continue
                seen[retention] += 1
                if seen[retention] <= limits[retention]:
                    continue
            elif not any_complete:
                continue
            if set_aside_name(1) in names or any((file_generation(name) or 0) > self._generation for name in names):
                continue
            if self._has_given_up_kept(step, names):
                continue
            gone.append(step)
        referred = files_referred_to(self._store, (one for one in steps if one not in gone)) if gone else {}
        for step in gone:
            # The manifest goes first: a half-deleted checkpoint must not look like a complete one.
            self._store.delete_folder(step, first=MANIFEST, keep=referred.get(step, set()))
            self._known.pop(step, None)
        return gone

    def extend_retention(self, step: int, retention: CheckpointRetention) -> None:
        """Records in an existing checkpoint that a script has now requested it."""
        manifest = self._manifest(step)
        if manifest is None or _RANK[manifest.retention] >= _RANK[retention]:
            return
        changed = manifest.model_copy(update={"retention": retention})
        self._store.put(f"{folder_of(step)}/{MANIFEST}", changed.to_bytes())
        self._known[step] = retention

    def _has_given_up_kept(self, step: int, names: Collection[str]) -> bool:
        """Whether a checkpoint was given up in this folder that was not to be deleted, or may not have been."""
        number = 1
        while given_up_name(number) in names:
            try:
                manifest = self._read_manifest(step, given_up_name(number))
            except CheckpointError:  # as in `_retention`
                return True
            if manifest is None or _RANK[manifest.retention] == _RANK[CheckpointRetention.KEPT]:
                return True
            number += 1
        return False

    def _retention(self, step: int) -> CheckpointRetention | None:
        if step not in self._known:
            try:
                manifest = self._manifest(step)
            except CheckpointError:  # harmed, or of another version: its retention is unknown, and it stays
                manifest = None
            self._known[step] = None if manifest is None else manifest.retention
        return self._known[step]

    def _manifest(self, step: int) -> Manifest | None:
        return self._read_manifest(step, MANIFEST)

    def _read_manifest(self, step: int, name: str) -> Manifest | None:
        path = f"{folder_of(step)}/{name}"
        data = self._store.get(path)
        return None if data is None else parse_sealed_document(Manifest, data, path)


_RANK: Mapping[CheckpointRetention | None, int] = {
    CheckpointRetention.AUTOMATIC: 0,
    CheckpointRetention.ROLLING: 1,
    CheckpointRetention.KEPT: 2,
    None: 2,
}
"""A retention is only ever extended."""
