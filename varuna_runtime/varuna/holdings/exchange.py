"""The ranks of a generation give one another the sections of a state: each serves what it has, and takes what it lacks.

Nothing is dropped here: every rank keeps what it gives until all have what they need.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from varuna.checkpoint.errors import CheckpointError, HolderError
from varuna.checkpoint.format.manifest import FileEntry, FileKind
from varuna.checkpoint.loading.loader import StagedCheckpoint, stage_state
from varuna.checkpoint.state.rank_state import OPTIMIZER_ENTRIES, TrainingState
from varuna.checkpoint.storage.windows import map_ahead
from varuna.diagnostics.error_text import first_line
from varuna.distributed.handshake import MeetingKey
from varuna.holdings.giving import HolderServer
from varuna.holdings.held_state import list_needed_files
from varuna.holdings.inventory import HeldFile, HeldFiles, Inventory, decode_inventories, encode_inventories
from varuna.holdings.merging import MergedInventories, merge_inventories
from varuna.holdings.taking import HeldStateReader
from varuna.holdings.transfer_plan import RankNeeds, plan_transfers

__all__ = ["MoveObstacle", "StateExchange", "describe_fault"]

_MOST_GIVERS = 4
"""That give to one rank at once."""


class MoveObstacle(NamedTuple):
    """Why the ranks cannot take their stages."""

    reason: str
    is_passing: bool = False
    """Whether another move may succeed: one rank has not got what another one holds, say. Otherwise the script, the
    model or a lack of memory would prevent that, too."""


def describe_fault(error: Exception) -> MoveObstacle:
    """What `error` means for a move."""
    return MoveObstacle(first_line(error) or type(error).__name__, isinstance(error, HolderError | OSError))


class StateExchange:
    """One rank's part. All ranks make one, and call its methods in the same order, whatever happens to them.

    What keeps one rank from going on keeps all: the methods return it on every rank; None if there is nothing.
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
        obstacle: MoveObstacle | None,
        beside: Mapping[int, HeldFile] | None = None,
        copies: Sequence[HeldFiles] = (),
    ) -> MoveObstacle | None:
        """Tells the others what this rank has, and serves it until `close`. `held`: None: nothing.

        `beside`: by rank, a file that this one alone gives to that rank alone, besides its state. `copies`: of others'
        states after the same step.
        """
        text, beside = "", beside or {}
        if held is not None and obstacle is None:
            served = replace(held, files=held.files | {_name_beside(rank): file for rank, file in beside.items()})
            try:
                self._server = HolderServer(served, self._key, self._host, copies)
            except OSError as error:
                obstacle = MoveObstacle(f"no port to give the state from: {error}", is_passing=True)
            else:
                address = {"address": self._server.address}
                text = encode_inventories([one.inventory.model_copy(update=address) for one in (held, *copies)])
        sizes = {rank: file.bytes for rank, file in beside.items()}
        shared = self._gather_values(
            "inventory", {"obstacle": obstacle, "inventory": text, "beside": sizes, "series": self._series}
        )
        if found := _choose_obstacle(shared):
            return found
        try:
            inventories = [
                (decode_inventories(one["inventory"], f"the inventory of rank {rank}"), one["beside"])
                for rank, one in enumerate(shared)
                if one["inventory"]
            ]
            self._merged = merge_inventories(inventory for of_rank, _ in inventories for inventory in of_rank)
        except CheckpointError as error:
            return MoveObstacle(str(error), is_passing=True)
        self._ahead = self._find_ahead({one["series"] for one in shared if one["inventory"]})
        # A rank's own inventory is the first of those that it gives.
        sizes_to_own = [(of_rank[0], beside.get(str(self._rank), 0)) for of_rank, beside in inventories]
        self._beside = [(inventory, size) for inventory, size in sizes_to_own if size]
        registered = _describe_registered(self._merged)
        return MoveObstacle(registered) if registered else None

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

    def stage_state(
        self, state: TrainingState | None, obstacle: MoveObstacle | None
    ) -> tuple[StagedCheckpoint | None, MoveObstacle | None]:
        """Makes what this rank lacks ready to be loaded into `state`; None: it lacks nothing, or has an `obstacle`."""
        assert self._merged is not None, "inventories are shared first"
        manifest = self._merged.manifest
        needed = [] if state is None else [entry.name for entry in list_needed_files(manifest, state)]
        files = [name for name in needed if name not in self._ahead]
        shared = self._gather_values("needs", {"obstacle": obstacle, "host": self._host, "files": files})
        if found := _choose_obstacle(shared):
            return None, found
        if state is None:
            return None, None
        needs = {rank: RankNeeds(str(one["host"]), tuple(one["files"])) for rank, one in enumerate(shared)}
        try:
            plan = plan_transfers(self._merged.sources, needs)
            own = {file: holder for (rank, file), holder in plan.items() if rank == self._rank}
            self._reader = HeldStateReader(self._merged, own, self._key, self._host, self._ahead)
            return stage_state(manifest, self._reader, state), None
        except CheckpointError as error:  # the others learn it in `agree`
            return None, describe_fault(error)

    def take_beside(self) -> Iterator[dict[str, Tensor]]:
        """The tensors of each file that another rank gives to this one, after `stage_state`. Raises HolderError when
        one does not give it."""
        reader, name = self._reader, _name_beside(self._rank)
        if self._beside:
            assert reader is not None, "what this rank lacks is staged first"
            givers = min(len(self._beside), _MOST_GIVERS)
            yield from map_ahead(lambda one: reader.read_beside(one[0], name, one[1]), self._beside, ahead=givers)

    def agree(self, obstacle: MoveObstacle | None) -> MoveObstacle | None:
        """Waits until every rank has what it needs."""
        return _choose_obstacle(self._gather_values("prepared", {"obstacle": obstacle}))

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


def _choose_obstacle(shared: Iterable[Mapping[str, Any]]) -> MoveObstacle | None:
    """That of the first rank that has one; one that stays goes before those that pass."""
    obstacles = [MoveObstacle(*one["obstacle"]) for one in shared if one["obstacle"] is not None]
    return min(obstacles, key=lambda obstacle: obstacle.is_passing, default=None)


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
