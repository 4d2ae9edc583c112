"""How the ranks of a generation meet: the store that they share, and the groups that they form through it.

The groups are made directly over gloo and keyed by job and generation, apart from `torch.distributed`'s default group,
so that the script may or may not call `init_process_group`, and two generations can never meet in one group. Only
processes that know the generation's secret take part: they alone reach the store, and each proves itself to the others
in every group before anything else goes over it.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from datetime import timedelta
from typing import Protocol

import structlog
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from varuna.diagnostics.error_text import first_line
from varuna.distributed.departure import Departure, PeerLost
from varuna.distributed.gloo import GlooGroup, connect_group, let_go
from varuna.distributed.group_sockets import Sockets, list_sockets, shut_down_sockets
from varuna.distributed.groups import RankGroup
from varuna.distributed.handshake import MeetingKey
from varuna.distributed.nccl import abort_group
from varuna.distributed.peer_proof import prove_peers
from varuna.distributed.reach import (
    ReachablePort,
    UnreachedError,
    address_towards,
    is_loopback,
    is_out_of_reach,
    try_connect,
)
from varuna.distributed.rendezvous_server import RendezvousServer
from varuna.distributed.rendezvous_store import RendezvousStore
from varuna_proto.environment import WorkerEnvironment

__all__ = ["RENDEZVOUS_TIMEOUT", "KeyValueStore", "Rendezvous", "store_prefix", "warn_without_secret"]

_log = structlog.get_logger("varuna")

RENDEZVOUS_TIMEOUT = timedelta(seconds=120)
"""How long the ranks of a generation wait for each other to come up."""
LOADING_PATIENCE = timedelta(days=7)
"""How long ranks that have all come up wait for each other in the store. One of them may load a large model, and its
presence shows when it ends. (A socket's time limit is at most 24 days.)"""
STORE_REACH_S = 60.0
"""How long rank 0's machine may be silent. It is below the timeout, so that the reason is reported before the other
ranks give up."""
_RETRY_S = 0.5
_IDLE_S = 2.0
"""How long `end` waits for the collectives to fail whose connections it has broken: they take milliseconds."""
_ABORT_S = 10.0
_IDLE_CHECK_S = 0.002


class KeyValueStore(Protocol):
    """The part of `torch.distributed.Store` that the runtime uses: `get` waits until the key exists."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def add(self, key: str, amount: int, /) -> int: ...


class _GenerationStore(PrefixStore):
    """The store under the generation's prefix. It keeps the connection alive, which C++ does not: a thread that asks it
    when the generation has ended gets a DistError."""

    def __init__(self, prefix: str, served: Store) -> None:
        super().__init__(prefix, served)
        self._served = served


class Rendezvous:
    """This rank's connection to the store of its generation, and the groups that it forms with other ranks."""

    def __init__(self, environment: WorkerEnvironment, departure: Departure) -> None:
        """Connects to the store, which rank 0 serves. Raises PeerLost when it cannot be reached in time."""
        self._environment = environment
        self._departure = departure
        self._key = MeetingKey.from_environment(environment)
        self.store: Store = HashStore()
        self._address = ""
        self._port: ReachablePort | None = None
        self._server: RendezvousServer | None = None
        self._served: RendezvousStore | None = None
        self._connected: list[GlooGroup] = []
        self._groups: list[RankGroup] = []
        self._device_groups: list[object] = []
        self._sockets: Sockets = frozenset()
        departure.add_breaker(lambda _: self._shut_down())
        if environment.world_size > 1:
            try:
                with departure.report_wait():
                    self._reach_store()
                    self.store = _GenerationStore(store_prefix(environment), self._connect())
                self._port = self._open_port()
            except BaseException:
                self.end(links_ended=True)
                raise

    def _reach_store(self) -> None:
        """Leaves when rank 0's machine does not answer at all. Until rank 0 is up, the machine refuses connections."""
        environment = self._environment
        if environment.rank == 0:
            return
        deadline_s = time.monotonic() + STORE_REACH_S
        while True:
            self._departure.raise_if_leaving()
            left_s = deadline_s - time.monotonic()
            try:
                try_connect(environment.rendezvous_host, environment.rendezvous_port, max(left_s, 0.1))
            except OSError as error:
                if not is_out_of_reach(error):
                    return  # rank 0 may come up later, and the store waits for it
                if left_s <= 0:
                    self._leave_unreached(UnreachedError(0, f"{environment.rendezvous_host}: {first_line(error)}"))
                    raise
                time.sleep(_RETRY_S)  # some errors are immediate
            else:
                return

    def _connect(self) -> Store:
        host = self._environment.rendezvous_host
        try:
            if self._environment.rank == 0:
                warn_without_secret(self._environment)
                self._server = RendezvousServer(host, self._key)
            self._served = RendezvousStore(host, self._key, RENDEZVOUS_TIMEOUT, self._departure.raise_if_leaving)
            return self._served
        except (OSError, RuntimeError) as error:
            self._unreachable(error)
            raise

    def _open_port(self) -> ReachablePort:
        environment = self._environment
        try:
            return ReachablePort(self.store, environment.rank, environment.world_size, self.own_address())
        except OSError as error:
            self._unreachable(error)
            raise

    def make_group(self, name: str, ranks: Sequence[int]) -> RankGroup:
        """The group of `ranks`, which must include this one. All of them call this in the same order of names."""
        group = RankGroup(self.connect_gloo(name, ranks) if len(ranks) > 1 else None, ranks, self._departure)
        self._groups.append(group)
        return group

    def connect_gloo(self, name: str, ranks: Sequence[int]) -> GlooGroup:
        """Like `make_group`, but returns gloo's own object; the caller must not block in its operations."""
        own = list(ranks).index(self._environment.rank)
        self._departure.raise_if_leaving()
        try:
            with self._departure.report_wait():
                if self._port is not None:
                    self._port.check_reachable(rank for rank in ranks if rank != self._environment.rank)
                store, before = PrefixStore(name, self.store), list_sockets()
                group = connect_group(store, own, len(ranks), address=self.own_address(), timeout=RENDEZVOUS_TIMEOUT)
                # A socket that another thread opens meanwhile would be among them. That does harm only if a script's
                # thread opens a connection within these few milliseconds and the generation breaks later.
                self._sockets = self._sockets | (list_sockets() - before)
                self._connected.append(group)
                prove_peers(group, self._key, name, ranks=ranks, own=own)
                return group
        except UnreachedError as error:
            self._leave_unreached(error)
            raise
        except RuntimeError as error:
            self._unreachable(error)
            raise

    def exchange_values(self, name: str, ranks: Sequence[int], own: str) -> list[str]:
        """The values that `ranks` pass as `own` under `name`, in their order. All of them call this."""
        self._departure.raise_if_leaving()
        try:
            self.store.set(f"{name}/{self._environment.rank}", own)
            with self._departure.report_wait():
                return [self.store.get(f"{name}/{rank}").decode() for rank in ranks]
        except RuntimeError as error:
            self._unreachable(error)
            raise

    def wait_for_loading(self, ranks: Collection[int]) -> None:
        """Waits until all of `ranks` have called this: until each of them has loaded its part of the model.

        A rank that does not come up in time is waited for no longer, one that has come up may take its time. All later
        waits in the store have this patience.
        """
        if self._port is None:
            return
        self._departure.raise_if_leaving()
        try:
            with self._departure.report_wait():
                self._port.wait_for_ranks(ranks)
                self.be_patient()
                if self.store.add("loaded", 1) == len(ranks):
                    self.store.set("all loaded", "")
                self.store.get("all loaded")
        except RuntimeError as error:
            self._unreachable(error)
            raise

    def be_patient(self) -> None:
        """From now on a wait in the store ends only with what it waits for, or when this rank leaves."""
        if self._served is not None:
            self._served.set_timeout(LOADING_PATIENCE)

    def own_address(self) -> str:
        """The address of this machine on the network that leads to rank 0.

        It is found when this rank joins its generation, and stays: a name that no longer resolves ends nothing. Raises
        OSError when it cannot be found.
        """
        if not self._address:
            self._address = address_towards(self._environment.rendezvous_host, self._environment.rendezvous_port)
        return self._address

    def abort_at_end(self, group: object) -> None:
        """`group`: of NCCL, which has connections of its own."""
        self._device_groups.append(group)

    def _shut_down(self) -> None:
        """Breaks all connections, so that every wait for another rank fails, here and there. From any thread."""
        served = self._served
        if served is not None:
            served.shut_down()
        shut_down_sockets(self._sockets)

    def end(self, *, links_ended: bool) -> bool:
        """Ends this rank's part for a process that goes on. `links_ended`: no thread waits in a group any longer.

        Returns whether nothing of it is left in this process.

        Raises TimeoutError when a device still runs a collective of the generation.
        """
        self._shut_down()
        if not all(abort_group(group, _ABORT_S) for group in self._device_groups):
            raise TimeoutError(f"NCCL did not abort its collectives within {_ABORT_S:g} s")
        if self._server is not None:
            self._server.stop()
        if self._port is not None:
            self._port.close()
        deadline_s = time.monotonic() + _IDLE_S
        while not all(group.is_idle for group in self._groups) and time.monotonic() < deadline_s:
            time.sleep(_IDLE_CHECK_S)
        busy = [group.ranks for group in self._groups if not group.is_idle]
        is_clean = links_ended and not busy
        if is_clean:
            for group in self._connected:
                let_go(group)
        else:  # destroying a group joins its threads: one that is busy stays, with a few threads and descriptors
            _log.warning("connections of the ended generation are still in use", busy=busy, links_ended=links_ended)
        if self._served is not None:
            self._served.close()
            let_go(self._served)
        self._connected, self._groups, self._device_groups = [], [], []
        self._server = self._served = None
        return is_clean

    def _leave_unreached(self, error: UnreachedError) -> None:
        self._departure.leave_generation(PeerLost(str(error), unreached=error.rank))
        self._departure.raise_if_leaving()

    def _unreachable(self, error: OSError | RuntimeError) -> None:
        where = f"{self._environment.rendezvous_host}:{self._environment.rendezvous_port}"
        self._departure.leave_generation(
            PeerLost(f"the ranks did not find each other through {where}: {first_line(error)}")
        )
        self._departure.raise_if_leaving()


def store_prefix(environment: WorkerEnvironment) -> str:
    """Before all keys of a generation in its store."""
    return f"varuna/{environment.job_id}/{environment.generation}"


def warn_without_secret(environment: WorkerEnvironment) -> None:
    """Logs a warning when processes of other machines could take part in the run."""
    if not environment.secret and not is_loopback(environment.rendezvous_host):
        _log.warning(
            "this run has no secret: any process that reaches its ports can take part in it; start all launchers with "
            "the same VARUNA_SECRET in their environments, or through run_varuna"
        )
