"""The state that processes of the generation before hold, as the ranks of a new generation see it.

Rank 0 collects the holders' inventories from the rendezvous store, and proposes the newest state that they make
together. All ranks then exchange what they need, and each computes the same plan of who fetches what from whom.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

import structlog

from varuna.checkpoint.errors import CheckpointError
from varuna.checkpoint.format.manifest import FileEntry, FileKind, Manifest
from varuna.checkpoint.loading.loader import StagedCheckpoint, list_for_update, stage_state
from varuna.checkpoint.loading.resuming import HeldStateProposal
from varuna.checkpoint.loading.verification import files_holding
from varuna.checkpoint.state.rank_state import TrainingState
from varuna.diagnostics.error_text import first_line
from varuna.distributed.handshake import MeetingKey
from varuna.distributed.lone_store import LoneStore
from varuna.distributed.reach import address_towards
from varuna.holdings.giving import DONE_KEY, inventory_key
from varuna.holdings.inventory import Inventory, decode_inventories, encode_inventories
from varuna.holdings.memory_files import MemoryGivers, take_memory_files
from varuna.holdings.merging import find_newest_step, merge_inventories
from varuna.holdings.taking import HeldStateReader
from varuna.holdings.transfer_plan import RankNeeds, plan_transfers
from varuna_proto.environment import WorkerEnvironment

__all__ = ["HeldState", "list_needed_files"]

_log = structlog.get_logger("varuna")

_INVENTORY_WAIT_S = 5.0
"""How long rank 0 waits for inventories after its first look."""
_WHOLE_WAIT_S = 1.0
"""The same once what has come makes a whole state: more holders only spread the load."""
_LOOK_AGAIN_S = 0.02


class InventoryStore(Protocol):
    """The part of the rendezvous store that holders and takers use."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def check(self, keys: list[str], /) -> bool: ...


class _Taken(NamedTuple):
    """What all ranks together fetch."""

    step: int
    bytes: int
    holders: int


class HeldState:
    """A `HeldStateSource`. Every rank of the new generation makes one if the environment names holders."""

    def __init__(self, store: InventoryStore, holders: Iterable[int], *, key: MeetingKey, rank: int, host: str) -> None:
        """`holders`: the ranks that the processes had. `rank`, `host`: of this process, in the new generation."""
        self._store = store
        self._holders = sorted(set(holders))
        self._key = key
        self._rank = rank
        self._host = host
        self._lone_store: LoneStore | None = None
        self._memory: MemoryGivers | None = None
        """Gives what ended workers have left on this VM."""
        self._inventories: dict[int, list[Inventory]] = {}
        """By holder: its own, and those of the copies that it keeps."""
        self._givers: dict[int, int] = {}
        """By the rank of a proposed inventory: the holder that has it."""
        self._excluded: set[int] = set()
        self._first_look_s: float | None = None
        self._began_s = time.monotonic()
        self._taken: _Taken | None = None
        self._reader: HeldStateReader | None = None

    @classmethod
    def from_environment(cls, environment: WorkerEnvironment, store: InventoryStore) -> HeldState | None:
        """None if there are no holders. `store`: the generation's rendezvous store.

        A generation of one rank has none that others can reach, so one is served here until `announce_end`. What ended
        workers have left in this VM's memory is given from here, to this rank as to the others.
        """
        if not environment.holders:
            return None
        key = MeetingKey.from_environment(environment)
        lone_store: LoneStore | None = None
        try:
            host = address_towards(environment.rendezvous_host, environment.rendezvous_port or 9)
            if environment.world_size == 1:
                lone_store = LoneStore(environment, key)
                store = lone_store.store
        except (OSError, RuntimeError) as error:
            _log.warning("the state that processes hold cannot be reached", reason=first_line(error))
            return None
        held = cls(store, environment.holders, key=key, rank=environment.rank, host=host)
        held._lone_store = lone_store
        if environment.agent_socket and (taken := take_memory_files(environment)):
            held._memory = MemoryGivers(taken, environment)
        return held

    def propose_state(self) -> HeldStateProposal | None:
        """Rank 0: the newest state that the holders make together; None: there is none."""
        self._wait_for_inventories()
        able = self._list_able()
        step = find_newest_step(able.values())
        if step is None:
            if self._holders:
                _log.warning(
                    "the processes of the generation before do not hold the whole state",
                    expected=self._holders,
                    found=sorted({holder for holder, _ in able}),
                )
            return None
        chosen: dict[int, Inventory] = {}
        for (holder, _), inventory in sorted(able.items(), key=lambda one: (one[0][0] != one[1].rank, one[0])):
            if inventory.step == step and chosen.setdefault(inventory.rank, inventory) is inventory:
                self._givers[inventory.rank] = holder
        try:
            merge_inventories(chosen.values())
        except CheckpointError as error:
            _log.warning("the state that processes hold is of no use", step=step, reason=str(error))
            return None
        return HeldStateProposal(step, encode_inventories(chosen.values()))

    def stage_state(
        self, document: str, state: TrainingState, exchange: Callable[[str], list[str]]
    ) -> StagedCheckpoint:
        """Every rank: makes the proposed state ready to be loaded. `exchange` gathers a text from each rank.

        Raises CheckpointError: HolderError when holders do not give what is needed at once.
        """
        self._close_reader()
        try:
            merged = merge_inventories(decode_inventories(document, "an inventory from rank 0"))
        except CheckpointError as error:
            exchange(json.dumps(None))
            raise CheckpointError(f"the state that processes hold is of no use: {error}") from error
        files = [entry.name for entry in list_needed_files(merged.manifest, state)]
        needs: dict[int, RankNeeds] = {}
        for rank, text in enumerate(exchange(json.dumps({"host": self._host, "files": files}))):
            if (need := json.loads(text)) is None:
                raise CheckpointError(f"rank {rank} cannot read what the processes hold")
            needs[rank] = RankNeeds(str(need["host"]), tuple(need["files"]))
        sources = merged.sources
        plan = plan_transfers(sources, needs)
        total = sum(sources[file].bytes for _, file in plan)
        address_of = {one.rank: one.address for able in merged.holders.values() for one in able}
        self._taken = _Taken(merged.manifest.step, total, len({address_of[holder] for holder in plan.values()}))
        own = {file: holder for (rank, file), holder in plan.items() if rank == self._rank}
        self._reader = HeldStateReader(merged, own, self._key, self._host)
        return stage_state(merged.manifest, self._reader, state)

    def exclude_holders(self, ranks: Iterable[int]) -> None:
        """Rank 0: the processes that were to give these ranks' states are not asked again."""
        self._excluded |= {self._givers[rank] for rank in ranks}

    def announce_end(self, *, is_loaded: bool) -> None:
        """Rank 0: all ranks have their state, so the holders may end. `is_loaded`: it is theirs."""
        if is_loaded and self._taken is not None:
            _log.info(
                f"the state of step {self._taken.step} came from the memory of {self._taken.holders} "
                + ("process" if self._taken.holders == 1 else "processes"),
                bytes=self._taken.bytes,
                seconds=round(time.monotonic() - self._began_s, 3),
            )
        self._store.set(DONE_KEY, "")
        self._holders = []
        self._inventories = {}

    def close(self) -> None:
        """Ends this rank's connections to the holders, and what was served for them."""
        self._close_reader()
        if self._memory is not None:
            self._memory.close()
            self._memory = None
        if self._lone_store is not None:
            self._lone_store.close()
            self._lone_store = None

    def _close_reader(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _list_able(self) -> dict[tuple[int, int], Inventory]:
        """The inventories of one generation, of holders that have not failed: of the newest whose inventories make a
        whole state, or else of the newest. Holders may have what they had in two.

        By holder, which is its rank, and the place among its inventories.
        """
        able = {
            (holder, place): inventory
            for holder, inventories in self._inventories.items()
            if holder not in self._excluded
            for place, inventory in enumerate(inventories)
        }
        by_generation: dict[int, dict[tuple[int, int], Inventory]] = {}
        for key, inventory in able.items():
            by_generation.setdefault(inventory.receipt.generation, {})[key] = inventory
        alike = [by_generation[generation] for generation in sorted(by_generation, reverse=True)]
        return next(
            (those for those in alike if find_newest_step(those.values()) is not None), alike[0] if alike else {}
        )

    def _wait_for_inventories(self) -> None:
        if self._first_look_s is None:
            self._first_look_s = self._began_s = time.monotonic()
        whole_since_s: float | None = None
        while True:
            self._look_for_inventories()
            now_s = time.monotonic()
            if len(self._inventories.keys() | self._excluded) >= len(self._holders):
                return
            if whole_since_s is None and self._is_newest_whole():
                whole_since_s = now_s
            if whole_since_s is not None and now_s > whole_since_s + _WHOLE_WAIT_S:
                return
            if now_s > self._first_look_s + _INVENTORY_WAIT_S:
                return
            time.sleep(_LOOK_AGAIN_S)

    def _is_newest_whole(self) -> bool:
        """Whether the newest step of those inventories is held whole; copies of an older one may be whole before."""
        able = self._list_able().values()
        return bool(able) and find_newest_step(able) == max(inventory.step for inventory in able)

    def _look_for_inventories(self) -> None:
        for rank in self._holders:
            key = inventory_key(rank)
            if rank in self._inventories or rank in self._excluded or not self._store.check([key]):
                continue
            try:
                inventories = decode_inventories(self._store.get(key), f"the inventory of rank {rank}")
                if rank not in (ranks := [inventory.rank for inventory in inventories]):
                    raise CheckpointError(f"the inventory of rank {rank} claims to be of rank {ranks}")
                self._inventories[rank] = inventories
            except CheckpointError as error:
                _log.warning("a process that holds state is left out", rank=rank, reason=str(error))
                self._excluded.add(rank)


def list_needed_files(manifest: Manifest, state: TrainingState) -> list[FileEntry]:
    """What `stage_state` and `StagedCheckpoint.fill_state` will read."""
    rank = state.position.rank
    own = {copy.file for copies in manifest.rank_states.values() for copy in copies if rank in copy.ranks}
    return [
        *files_holding(manifest, FileKind.PARAMETERS, state.tensors),
        *list_for_update(manifest, state),
        *files_holding(manifest, FileKind.REGISTERED, state.tensors),
        *(entry for entry in manifest.files if entry.kind in (FileKind.STATE, FileKind.OPTIONS) or entry.name in own),
    ]
