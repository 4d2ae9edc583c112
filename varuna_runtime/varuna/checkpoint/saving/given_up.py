"""Checkpoints that are given up: of later steps than the one from which training goes on.

A script has gone back with `load_checkpoint`, or they are harmed and `resume` has passed over them. If they stayed
checkpoints, a save of the same step would be dropped because of them, and a restart would go on from them. So their
manifests get another name when the first step is trained. A script that loads an older one only to evaluate it, and
then the newest again, loses nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

import structlog

from varuna.checkpoint.errors import CheckpointError
from varuna.checkpoint.format.manifest import MANIFEST, file_generation, receipt_name
from varuna.checkpoint.storage.store import CheckpointStore, folder_of

__all__ = ["find_later_folders", "give_up_checkpoints", "given_up_name"]

_log = structlog.get_logger("varuna")


def given_up_name(number: int) -> str:
    """The name of the `number`th manifest (from 1) that was given up in a folder."""
    return f"manifest.given-up-{number}.json"


def find_later_folders(store: CheckpointStore, first: int, *, generation: int) -> list[int]:
    """The steps from `first` on that have a folder, ascending.

    Raises CheckpointError if one has files of a newer generation: then this process is of an old one, or of another
    run, and must not touch them.
    """
    found = [step for step in store.list_steps() if step >= first]
    for step in found:
        newest = max((file_generation(name) or 0 for name in store.list_sizes(step)), default=0)
        if newest > generation:
            raise CheckpointError(
                f"training goes on before step {step}, and {store.url_of(step)} was written by generation {newest}, "
                f"while this is generation {generation}: another run has written to this checkpoint store. Give this "
                "one a store of its own: it can load the older checkpoint from there"
            )
    return found


def give_up_checkpoints(store: CheckpointStore, steps: Iterable[int], *, generation: int) -> list[int]:
    """Gives other names to the manifests of these steps, and returns the steps that had one. Their files stay.

    The oldest is the first: if this ends half-way, the newest is still what training restarts from. Receipts of this
    generation are deleted, because the next save of that step must wait for new ones.
    """
    gone: list[int] = []
    own_receipts = receipt_name(generation, 0).rpartition("r0")[0]
    for step in sorted(steps):
        folder = folder_of(step)
        if (manifest := store.get(f"{folder}/{MANIFEST}")) is not None:
            number = 1
            while not store.create(f"{folder}/{given_up_name(number)}", manifest):
                number += 1
            store.sync_files(step, [given_up_name(number)])
            store.delete_file(f"{folder}/{MANIFEST}")
            store.sync_files(step, [given_up_name(number)])
            gone.append(step)
        for name in store.list_sizes(step):
            if name.startswith(own_receipts):
                store.delete_file(f"{folder}/{name}")
    if gone:
        _log.warning(
            "training goes on from an older step, so later checkpoints are given up",
            steps=gone,
            store=store.url,
            manifests=given_up_name(1),
        )
    return gone
