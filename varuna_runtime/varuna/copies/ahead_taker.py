"""Takes sections of the state while the generation that has them still trains, for the rank that this process is
expected to have in the next one."""

from __future__ import annotations

import threading
from dataclasses import replace
from datetime import timedelta

import structlog
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from varuna.copies.keeper import CopyKeeper
from varuna.copies.memory import describe_shortage
from varuna.diagnostics.error_text import first_line
from varuna.distributed.gloo import let_go
from varuna.distributed.handshake import MeetingKey
from varuna.distributed.reach import address_towards
from varuna.distributed.rendezvous import store_prefix
from varuna.distributed.rendezvous_store import RendezvousStore
from varuna.holdings.inventory import HeldFiles, Inventory
from varuna.worker.agent_link import AgentLink, AheadCommand
from varuna_proto.environment import WorkerEnvironment

__all__ = ["LARGEST_PART", "AheadTaker", "address_key", "take_as_newcomer"]

_log = structlog.get_logger("varuna")

LARGEST_PART = 0.5
"""Of the memory that is available: what all processes of the job on this machine take for the next shape."""
_REACH = timedelta(seconds=20)
"""How long a newcomer looks for the store of the generation that trains."""


def address_key(request: str, rank: int) -> str:
    """Where in the present generation's store it stands who takes sections for a rank of the next one."""
    return f"ahead/{request}/{rank}"


class AheadTaker:
    """What this process has of the state of a generation that trains. Of no use after `close`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._keeper: _AheadKeeper | None = None
        self._is_closed = False

    def open_door(
        self, store: Store, environment: WorkerEnvironment, *, host: str, request: str, rank: int, processes: int
    ) -> None:
        """Publishes where the sections can be sent of `rank` of the next generation.

        Args:
            store: of the generation that trains.
            environment: of one of its ranks.
            host: this machine's address.
            processes: of the job on this machine.

        Raises OSError when there is no port for it, torch.distributed.DistError when the store is gone.
        """
        with self._lock:
            if self._is_closed:
                return
            if self._keeper is None or self._keeper.generation != environment.generation:
                if self._keeper is not None:
                    self._keeper.shut_down()
                self._keeper = _AheadKeeper(environment, host, processes)
            keeper = self._keeper
        store.set(address_key(request, rank), keeper.address)

    def list_states(self, generation: int, step: int, series: int) -> list[HeldFiles]:
        """The parts of ranks' states after so many steps that are there, of the series of that generation."""
        keeper = self._keeper
        if keeper is None or (keeper.generation, keeper.series) != (generation, series):
            return []
        return [held for held in keeper.list_copies() if held.inventory.step == step]

    def free_outdated(self, step: int) -> None:
        """Frees what is not of the state after `step` steps, with which the step under way has begun."""
        if (keeper := self._keeper) is not None:
            keeper.free_outdated(step)

    def free_all(self) -> None:
        """Ends the connections, and frees what is here, until a door is opened again. From any thread."""
        with self._lock:
            keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.shut_down()

    def close(self) -> None:
        """Frees what is here, for good. From any thread."""
        with self._lock:
            self._is_closed = True
        self.free_all()


class _AheadKeeper(CopyKeeper):
    """Keeps the newest part that each rank has sent."""

    def __init__(self, environment: WorkerEnvironment, host: str, processes: int) -> None:
        self.generation = environment.generation
        self._largest_part = LARGEST_PART / max(processes, 1)
        super().__init__(
            range(environment.world_size), environment.generation, MeetingKey.from_environment(environment), host
        )

    def _check_offer(self, inventory: Inventory, series: int) -> None:
        if series > self.series:  # all ranks have replaced the state by a checkpoint since
            self.forget_copies(series)
        super()._check_offer(inventory, series)
        size = sum(entry.bytes for entry in inventory.receipt.files)
        if shortage := describe_shortage(size, self._largest_part):
            raise ValueError(shortage)


def take_as_newcomer(taker: AheadTaker, link: AgentLink, expected: WorkerEnvironment) -> None:
    """Has a process that waits for its rank take sections, whenever its agent says so.

    `expected`: its environment until then.
    """

    def follow(command: AheadCommand) -> None:
        # In a thread of its own, because the link's is to receive the rank.
        threading.Thread(target=_open_newcomers_door, args=(taker, command, expected), daemon=True).start()

    link.follow_ahead(follow)


def _open_newcomers_door(taker: AheadTaker, command: AheadCommand, expected: WorkerEnvironment) -> None:
    if command.is_over:
        taker.free_all()
        return
    environment = replace(
        expected,
        generation=command.generation,
        world_size=command.world_size,
        rendezvous_host=command.rendezvous_host,
        rendezvous_port=command.rendezvous_port,
        secret=command.secret,
    )
    if command.rank is None:
        return
    try:
        host = address_towards(environment.rendezvous_host, environment.rendezvous_port or 9)
        served = RendezvousStore(environment.rendezvous_host, MeetingKey.from_environment(environment), _REACH)
        try:
            store: Store = PrefixStore(store_prefix(environment), served)
            taker.open_door(
                store,
                environment,
                host=host,
                request=command.request,
                rank=command.rank,
                processes=command.processes,
            )
        finally:
            served.close()
            let_go(served)
    except (OSError, dist.DistError) as error:  # the generation is over, say
        _log.info("this process takes no sections of the state ahead", reason=first_line(error))
