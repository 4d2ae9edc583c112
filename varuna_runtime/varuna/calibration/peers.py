"""The ranks of a calibration, and plain values that they exchange through the rendezvous store."""

from __future__ import annotations

import json
import socket
from typing import Any, TypeVar

from varuna.calibration.links import GroupConnector
from varuna.calibration.rank_types import RankTypes
from varuna.distributed.rendezvous import KeyValueStore

__all__ = ["CalibrationPeers"]

T = TypeVar("T")

_PREFIX = "varuna.calibrate"


class CalibrationPeers:
    """Gathers values to rank 0 and broadcasts from it. Every rank makes the same calls and uses a name once each."""

    def __init__(
        self,
        rank: int = 0,
        world_size: int = 1,
        store: KeyValueStore | None = None,
        *,
        connect: GroupConnector | None = None,
        host: str | None = None,
        gpu_type: str = "",
        zone: str = "",
    ) -> None:
        """
        Args:
            store: the rendezvous store; needed when there are other ranks.
            connect: makes gloo groups (`Rendezvous.connect_gloo`); without it links keep the planner's defaults.
            host: names this rank's VM; by default the host's name.
            gpu_type: of the VM; empty: not known.
            zone: of the VM; empty: not known.

        Raises:
            ValueError: there are other ranks and no store.
        """
        if world_size > 1 and store is None:
            raise ValueError(f"rank {rank} of {world_size} needs the rendezvous store to agree with the others")
        self.rank = rank
        self.world_size = world_size
        self.connect = connect
        self.host = host or socket.gethostname()
        self.gpu_type = gpu_type
        self.zone = zone
        self._store = store

    def gather_values(self, name: str, value: T) -> list[T] | None:
        """Every rank's value (of JSON types), by rank; None on ranks other than 0."""
        if self._store is None:
            return [value]
        self._store.set(f"{_PREFIX}/{name}/{self.rank}", json.dumps(value))
        if self.rank != 0:
            return None
        return [json.loads(self._store.get(f"{_PREFIX}/{name}/{rank}")) for rank in range(self.world_size)]

    def share_values(self, name: str, value: T) -> list[T]:
        """Every rank's value (of JSON types), by rank, on every rank."""
        return self.broadcast_value(f"{name}/all", self.gather_values(name, value))

    def broadcast_value(self, name: str, value: T | None) -> T:
        """Rank 0's value (of JSON types), on every rank."""
        if self._store is not None:
            if self.rank == 0:
                self._store.set(f"{_PREFIX}/{name}", json.dumps(value))
            broadcast: Any = json.loads(self._store.get(f"{_PREFIX}/{name}"))
            value = broadcast
        assert value is not None
        return value

    def share_types(self) -> RankTypes:
        """Every rank's type of GPU, on every rank."""
        return RankTypes(tuple(self.share_values("gpu_types", self.gpu_type)))

    def wait_for_all(self) -> None:
        """Rank 0, which serves the store, returns when every rank has received all values; it may end then."""
        self.gather_values("part", True)
