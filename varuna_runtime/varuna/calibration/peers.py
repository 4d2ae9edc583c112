"""The ranks of a calibration: plain values gathered and told through the rendezvous store."""

from __future__ import annotations

import json
from typing import Any, TypeVar

from varuna.launch import KeyValueStore

__all__ = ["Peers"]

T = TypeVar("T")

_PREFIX = "varuna.calibrate"


class Peers:
    """Gathers to rank 0 and tells from rank 0. Every rank makes the same calls, with a name used once each."""

    def __init__(self, rank: int, world_size: int, store: KeyValueStore | None) -> None:
        if world_size > 1 and store is None:
            raise ValueError(f"rank {rank} of {world_size} needs the rendezvous store to agree with the others")
        self.rank = rank
        self.world_size = world_size
        self._store = store

    def gather(self, name: str, value: T) -> list[T] | None:
        """Every rank's value (of JSON types), by rank; None on ranks other than 0."""
        if self._store is None:
            return [value]
        self._store.set(f"{_PREFIX}/{name}/{self.rank}", json.dumps(value))
        if self.rank != 0:
            return None
        return [json.loads(self._store.get(f"{_PREFIX}/{name}/{rank}")) for rank in range(self.world_size)]

    def share(self, name: str, value: T) -> list[T]:
        """Every rank's value (of JSON types), by rank, on every rank."""
        return self.tell(f"{name}/all", self.gather(name, value))

    def part(self) -> None:
        """After this rank 0, which serves the store, may end: every rank has what it was told."""
        self.gather("part", True)

    def tell(self, name: str, value: T | None) -> T:
        """Rank 0's value (of JSON types), on every rank."""
        if self._store is not None:
            if self.rank == 0:
                self._store.set(f"{_PREFIX}/{name}", json.dumps(value))
            told: Any = json.loads(self._store.get(f"{_PREFIX}/{name}"))
            value = told
        assert value is not None
        return value
