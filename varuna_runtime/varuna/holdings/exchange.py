"""The ranks of a generation give one another the sections of a state: each serves what it has, and takes what it lacks.

Nothing is dropped here: every rank keeps what it gives until all have what they need.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from varuna.checkpoint.errors import CheckpointError
from varuna.checkpoint.format.manifest import FileEntry, FileKind
from varuna.checkpoint.loading.loader import StagedCheckpoint, stage_state
from varuna.checkpoint.state.rank_state import OPTIMIZER_ENTRIES, TrainingState
from varuna.checkpoint.storage.windows import map_ahead
from varuna.distributed.handshake import MeetingKey
from varuna.holdings.giving import HolderServer
from varuna.holdings.held_state import list_needed_files
from varuna.holdings.inventory import HeldFile, HeldFiles, Inventory, decode_inventories, encode_inventories
from varuna.holdings.merging import MergedInventories, merge_inventories
from varuna.holdings.taking import HeldStateReader
from varuna.holdings.transfer_plan import RankNeeds, plan_transfers

__all__ = ["StateExchange"]

_MOST_GIVERS = 4
"""That give to one rank at once."""


class StateExchange:
    """One rank's part. All ranks make one, and call its methods in the same order, whatever happens to them.

    What keeps one rank from going on keeps all: the methods return its reason on every rank; "" if there is none.
    """

    def __init__(
        self,
        exchange: Callable[[str, str], list[str]],
        *,
        key: MeetingKey,
        rank: int,
        host: str,
        series: int | None = None,
        list_ahead: Callable[[int, int, int], Sequence[HeldFiles]] = lambda generation, step, series: (),
    ) -> None:
        """What one rank needs to take part.

        Args:
            exchange: gathers a text of each rank under a name.
            key: of the generation that begins.
            rank, host: of this process.
            series: of the state that it holds, among those of its generation; None: it holds none.
            list_ahead: returns what came ahead of the states after so many steps (the second argument) of a series (the
                third) of a generation (the first).
        """
        self._exchange = exchange
        self._key = key
        self._rank = rank
        self._host = host
        self._series = series
        self._list_ahead = list_ahead
        self._ahead: dict[str, HeldFile] = {}
        """The files of the state that came ahead."""
        self._server: HolderServer | None = None
        self._merged: MergedInventories | None = None
        self._reader: HeldStateReader | None = None
        self._beside: list[tuple[Inventory, int]] = []
        """Who gives this rank a file beside the state, and its bytes."""

    @property
    def peer_bytes(self) -> int:
        """What has come from other ranks."""
        return 0 if self._reader is None else self._reader.peer_bytes

    def count_peer_bytes(self, files: Iterable[FileEntry]) -> int:
        """The bytes of the files that come from other ranks: those that did not come ahead."""
        return sum(entry.bytes for entry in files if entry.name not in self._ahead)

    def share_inventories(
        self,
        held: HeldFiles | None,
        obstacle: str,
        beside: Mapping[int, HeldFile] | None = None,
        copies: Sequence[HeldFiles] = (),
    ) -> str:
        """Tells the others what this rank has, and serves it until `close`. `held`: None: nothing.

        `beside`: by rank, a file that this one alone gives to that rank alone, besides its state. `copies`: of others'
        states after the same step.
        """
        text, beside = "", beside or {}
        if held is not None and not obstacle:
            served = replace(held, files=held.files | {_name_beside(rank): file for rank, file in beside.items()})
            try:
                self._server = HolderServer(served, self._key, self._host, copies)
            except OSError as error:
                obstacle = f"no port to give the state from: {error}"
            else:
                address = {"address": self._server.address}
                text = encode_inventories([one.inventory.model_copy(update=address) for one in (held, *copies)])
        sizes = {rank: file.bytes for rank, file in beside.items()}
        shared = self._gather_values(
            "inventory", {"obstacle": obstacle, "inventory": text, "beside": sizes, "series": self._series}
        )
        if reason := _first_reason([one["obstacle"] for one in shared]):
            return reason
        try:
            inventories = [
                (decode_inventories(one["inventory"], f"the inventory of rank {rank}"), one["beside"])
                for rank, one in enumerate(shared)
                if one["inventory"]
            ]
            self._merged = merge_inventories(inventory for of_rank, _ in inventories for inventory in of_rank)
        except CheckpointError as error:
            return str(error)
        self._ahead = self._find_ahead({one["series"] for one in shared if one["inventory"]})
        # A rank's own inventory is the first of those that it gives.
        sizes_to_own = [(of_rank[0], beside.get(str(self._rank), 0)) for of_rank, beside in inventories]
        self._beside = [(inventory, size) for inventory, size in sizes_to_own if size]
        return _describe_registered(self._merged)

    def _find_ahead(self, series: set[int | None]) -> dict[str, HeldFile]:
        """The files of the merged state that are here already. `series`: of those who hold it."""
        assert self._merged is not None, "inventories are merged first"
        if len(series) != 1 or (number := next(iter(series))) is None:
            return {}
        first = next(iter(self._merged.holders.values()))[0]
        return {
            entry.name: part.files[entry.name]
            for part in self._list_ahead(first.receipt.generation, first.step, number)
            for entry in self._merged.manifest.files
            if part.inventory.has_same_file(entry, self._merged.holders[entry.name][0])
        }

    def stage_state(self, state: TrainingState | None, obstacle: str) -> tuple[StagedCheckpoint | None, str]:
        """Makes what this rank lacks ready to be loaded into `state`; None: it lacks nothing, or has an `obstacle`."""
        assert self._merged is not None, "inventories are shared first"
        manifest = self._merged.manifest
        needed = [] if state is None else [entry.name for entry in list_needed_files(manifest, state)]
        files = [name for name in needed if name not in self._ahead]
        shared = self._gather_values("needs", {"obstacle": obstacle, "host": self._host, "files": files})
        if reason := _first_reason([one["obstacle"] for one in shared]):
            return None, reason
        if state is None:
            return None, ""
        needs = {rank: RankNeeds(str(one["host"]), tuple(one["files"])) for rank, one in enumerate(shared)}
        try:
            plan = plan_transfers(self._merged.sources, needs)
            own = {file: holder for (rank, file), holder in plan.items() if rank == self._rank}
            self._reader = HeldStateReader(self._merged, own, self._key, self._host, self._ahead)
            return stage_state(manifest, self._reader, state), ""
        except CheckpointError as error:  # the others learn it in `agree`
            return None, str(error)

    def take_beside(self) -> Iterator[dict[str, Tensor]]:
        """The tensors of each file that another rank gives to this one, after `stage_state`. Raises OSError, ValueError
        when one does not give it."""
        reader, name = self._reader, _name_beside(self._rank)
        if self._beside:
            assert reader is not None, "what this rank lacks is staged first"
            givers = min(len(self._beside), _MOST_GIVERS)
            yield from map_ahead(lambda one: reader.read_beside(one[0], name, one[1]), self._beside, ahead=givers)

    def agree(self, obstacle: str) -> str:
        """Waits until every rank has what it needs."""
        return _first_reason([one["obstacle"] for one in self._gather_values("prepared", {"obstacle": obstacle})])

    def close(self) -> None:
        """Ends the connections."""
        if self._reader is not None:
            self._reader.close()
        if self._server is not None:
            self._server.close()

    def _gather_values(self, name: str, own: dict[str, Any]) -> list[dict[str, Any]]:
        return [json.loads(text) for text in self._exchange(f"exchange/{name}", json.dumps(own))]


def _name_beside(rank: int) -> str:
    return f"beside/{rank}"


def _first_reason(reasons: Sequence[str]) -> str:
    return next((reason for reason in reasons if reason), "")


def _describe_registered(merged: MergedInventories) -> str:
    """What the script has registered that belongs to a rank or a section, and stays in another process."""
    if names := sorted(merged.manifest.rank_states):
        is_optimizers = names[0] == OPTIMIZER_ENTRIES
        what = (
            "what an optimizer keeps beside its parameters' state"
            if is_optimizers
            else f"the registered state {names[0]!r}"
        )
        return f"{what} differs between ranks"
    if merged.manifest.files_by_name(FileKind.REGISTERED):
        return "a registered state is keyed by names of parameters"
    return ""
