"""The sums of replicas that lose ranks as they leave their generation, in the memory of ranks that stay.

A VM that has notice leaves in the middle of a long step, with all others (`varuna.roles.early_end`). What its replica
has of the step would be gone with it. So when all passes have ended, each rank of such a replica copies its sums, and
sends them to a rank with its stage that stays. In the next generation they count as copies at marks do.

Letters: P stages, D replicas; rank = replica * P + stage.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import suppress

import structlog
import torch.distributed as dist
from torch import Tensor

from varuna.checkpoint.format.tensor_file import iterate_pieces
from varuna.checkpoint.saving.snapshot import HostBuffers
from varuna.copies.memory import describe_shortage
from varuna.copies.sending import send_request
from varuna.copies.share_keeper import ShareKeeper
from varuna.copies.share_marks import MarkedSums, ShareMark
from varuna.diagnostics.error_text import first_line
from varuna.distributed.handshake import MeetingKey
from varuna.distributed.rendezvous_store import read_values
from varuna.holdings.inventory import HeldFile
from varuna.holdings.taking import connect_to_server
from varuna.holdings.transfer_protocol import CHUNK_BYTES, NUMBER, SUMS
from varuna.worker.worker import WorkerProcess

__all__ = ["PartingSums", "plan_takers"]

_log = structlog.get_logger("varuna")

_COPIES = 2
"""In memory of a rank at most: of its own sums, and of those that it takes."""
_LARGEST_PART = 0.5
"""Of the memory that is available: the next shape may need more."""
_LOOK_S = 0.03
_LOST = "what this replica has of the step is lost with the VM that leaves"


class PartingSums:
    """The part of one rank, in one step."""

    def __init__(self, worker: WorkerProcess, step: int, leaving: Collection[int], *, sharers: int) -> None:
        """All ranks of the generation make one when their passes have ended.

        `step`: the one under way. `leaving`: the ranks that have no part in the next generation. `sharers`: the ranks
        on this machine.
        """
        self._worker, self._key = worker, f"parting/{step}"
        self._meeting_key = MeetingKey.from_environment(worker.environment)
        self._rank = worker.topology.rank
        self._takers = plan_takers(leaving, worker.topology.p, worker.topology.d)
        self.is_of_use = worker.topology.replica in {rank // worker.topology.p for rank in leaving}
        """Whether this rank's replica loses ranks, so that its sums count as a copy only."""
        self._sharers = sharers
        self._own: MarkedSums | None = None
        self._keeper: ShareKeeper | None = None
        self._connection: socket.socket | None = None
        self._stopped = threading.Event()
        worker.departure.add_breaker(lambda _: self.shut_down())

    def copy_sums(self, mark: ShareMark, gradients: Mapping[str, Tensor]) -> None:
        """Copies the sums of this rank into host memory, if there is room. `mark`: what they have."""
        # Stages have about the same size, so this rank's sums stand for those of the taker's machine.
        needed = _COPIES * self._sharers * sum(gradient.nbytes for gradient in gradients.values())
        if shortage := describe_shortage(needed, _LARGEST_PART):
            _log.warning(_LOST, reason=shortage)
            return
        buffers = HostBuffers()
        sums = {name: buffers.copy_tensor(name, gradient) for name, gradient in gradients.items()}
        buffers.wait_for_copies()
        self._own = MarkedSums(mark, sums)

    def exchange(self) -> None:
        """Sends what this rank has copied, while it takes what others send. Returns when its own are there, or cannot
        be."""
        try:
            if self._rank in self._takers.values():
                self._keeper = ShareKeeper(self._meeting_key, self._worker.rendezvous.own_address())
                self._worker.rendezvous.store.set(self._address_key(self._rank), self._keeper.address)
            taker = self._takers.get(self._rank)
            if self._own is not None and taker is not None and (address := self._find_address(taker)):
                self._send(self._own, address)
        except dist.DistError:  # rank 0 is gone, which this worker learns otherwise
            pass
        except (OSError, RuntimeError, ValueError, MemoryError, struct.error) as error:
            _log.warning(_LOST, reason=first_line(error))

    def list_sums(self, step: int) -> list[MarkedSums]:
        """What this process has of that step: its own sums, if its replica has lost ranks, and those of others."""
        kept = [] if self._keeper is None else self._keeper.list_sums()
        own = [] if self._own is None else [self._own]
        return [one for one in (*own, *kept) if one.mark.step == step]

    def shut_down(self) -> None:
        """Ends all connections. What is held stays. From any thread."""
        self._stopped.set()
        if self._keeper is not None:
            self._keeper.shut_down()
        if (connection := self._connection) is not None:
            with suppress(OSError):  # it has ended by itself
                connection.shutdown(socket.SHUT_RDWR)

    def _find_address(self, taker: int) -> str:
        """Where the taker listens; empty: this worker has left."""
        while not self._stopped.is_set():
            found = read_values(self._worker.rendezvous.store, [self._address_key(taker)])
            if found is not None:
                return found[0]
            self._stopped.wait(_LOOK_S)
        return ""

    def _send(self, own: MarkedSums, address: str) -> None:
        pieces = tuple(iterate_pieces(own.sums, {}))
        file = HeldFile(sum(map(len, pieces)), pieces)
        words = [*map(NUMBER.pack, (0, 0, file.bytes)), own.mark.to_json().encode()]
        with connect_to_server(address, self._meeting_key) as connection:
            self._connection = connection
            if not self._stopped.is_set():
                send_request(connection, SUMS, words, file.iterate_chunks(0, CHUNK_BYTES))

    def _address_key(self, rank: int) -> str:
        return f"{self._key}/address/{rank}"


def plan_takers(leaving: Collection[int], p: int, d: int) -> dict[int, int]:
    """By rank of each replica that loses one: the rank with its stage that takes its sums.

    That is one of a replica that stays whole, where there is one, and else of any; none, where all ranks with the
    stage leave. Each takes those of as few ranks as can be. `leaving`: the ranks that leave.
    """
    hit = {rank // p for rank in leaving}
    taken: Counter[int] = Counter()
    takers: dict[int, int] = {}
    for giver in (replica * p + stage for replica in sorted(hit) for stage in range(p)):
        others = [(giver + ahead * p) % (p * d) for ahead in range(1, d)]
        staying = [rank for rank in others if rank not in leaving]
        if staying:
            takers[giver] = taker = min(staying, key=lambda rank: (rank // p in hit, taken[rank]))
            taken[taker] += 1
    return takers
