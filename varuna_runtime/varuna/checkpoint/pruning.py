"""Which checkpoints go when another one is committed.

Automatic ones: all but the newest three. Those that a script asked for stay, except where it gave `keep=`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from varuna.checkpoint.errors import CheckpointError
from varuna.checkpoint.manifest import MANIFEST, Manifest, Retention, file_generation, parse, set_aside_name
from varuna.checkpoint.references import files_referred_to
from varuna.checkpoint.store import CheckpointStore, folder_of

__all__ = ["KEPT_AUTOMATIC", "Asked", "Pruning"]

KEPT_AUTOMATIC = 3
"""Where the newest turns out to be torn, there are two older ones still."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a script says of a checkpoint that it asks for. Raises ValueError for numbers that mean nothing."""

    keep: int | None = None
    """So many of those saved with `keep` stay; None: this one stays for good."""
    keep_every: int | None = None
    """Of those, the ones whose step is a multiple of this stay for good."""

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

    def retention(self, step: int) -> Retention:
        if self.keep is None or (self.keep_every is not None and step % self.keep_every == 0):
            return Retention.KEPT
        return Retention.ROLLING


class Pruning:
    """Deletes checkpoints of one store."""

    def __init__(self, store: CheckpointStore, generation: int, keep_automatic: int = KEPT_AUTOMATIC) -> None:
        if keep_automatic < 1:
            raise ValueError(f"keep {keep_automatic}: at least the newest checkpoint must stay")
        self._store = store
        self._generation = generation
        self._keep_automatic = keep_automatic
        self._known: dict[int, Retention | None] = {}
        """Of checkpoints seen before, so that each manifest is read once."""

    def prune(self, committed_step: int, keep_rolling: int | None = None) -> list[int]:
        """Deletes what the checkpoint of `committed_step` makes needless; the steps that went.

        Everything after that step stays, and so do folders that a newer generation writes to, checkpoints that were set
        aside, those whose manifest does not say who asked for them, and files that others refer to.
        `keep_rolling` None: all that a script asked for stay.
        """
        limits = {Retention.AUTOMATIC: self._keep_automatic}
        if keep_rolling is not None:
            limits[Retention.ROLLING] = keep_rolling
        seen = dict.fromkeys(limits, 0)
        any_complete = False
        gone: list[int] = []
        steps = sorted(self._store.steps(), reverse=True)
        for step in (one for one in steps if one <= committed_step):
            names = self._store.sizes(step)
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
            gone.append(step)
        referred = files_referred_to(self._store, (one for one in steps if one not in gone)) if gone else {}
        for step in gone:
            # The manifest goes first: a half-deleted checkpoint must not look like a complete one.
            self._store.delete(step, first=MANIFEST, keep=referred.get(step, set()))
            self._known.pop(step, None)
        return gone

    def promote(self, step: int, retention: Retention) -> None:
        """Notes in a checkpoint that is there already that a script has asked for it now."""
        manifest = self._manifest(step)
        if manifest is None or _RANK[manifest.retention] >= _RANK[retention]:
            return
        changed = manifest.model_copy(update={"retention": retention})
        self._store.put(f"{folder_of(step)}/{MANIFEST}", changed.to_bytes())
        self._known[step] = retention

    def _retention(self, step: int) -> Retention | None:
        if step not in self._known:
            try:
                manifest = self._manifest(step)
            except CheckpointError:  # harmed, or of another version: then it is not known, and it stays
                manifest = None
            self._known[step] = None if manifest is None else manifest.retention
        return self._known[step]

    def _manifest(self, step: int) -> Manifest | None:
        path = f"{folder_of(step)}/{MANIFEST}"
        data = self._store.get(path)
        return None if data is None else parse(Manifest, data, path)


_RANK: Mapping[Retention | None, int] = {
    Retention.AUTOMATIC: 0,
    Retention.ROLLING: 1,
    Retention.KEPT: 2,
    None: 2,
}
"""A checkpoint only ever stays longer than it was to."""
