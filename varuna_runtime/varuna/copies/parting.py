"""What ranks that do not go on leave to others, when a generation leaves in the middle of a step.

A VM that has notice leaves a long step with all others (`varuna.roles.early_end`). What its replica has of the step
would be gone with it. So when all passes have ended, each rank of such a replica copies its sums, and sends them to a
rank with its stage that stays. In the next generation they count as copies at marks do. Where no rank with a stage
stays, one of them sends its state, too, and the taker has it as a copy of a state.

Letters: P stages, D replicas; rank = replica * P + stage.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress

import structlog
import torch.distributed as dist
from torch import Tensor

from varuna.checkpoint.saving.snapshot import HostBuffers
from varuna.copies.keeper import CopyKeeper, pack_copy_request
from varuna.copies.memory import describe_shortage
from varuna.copies.sending import send_request
from varuna.copies.share_keeper import ShareKeeper, pack_sums_request
from varuna.copies.share_marks import MarkedSums, ShareMark
from varuna.diagnostics.error_text import first_line
from varuna.distributed.handshake import MeetingKey
from varuna.distributed.rendezvous_store import await_value
from varuna.holdings.giving import StateServer
from varuna.holdings.inventory import HeldFile, HeldFiles
from varuna.holdings.taking import connect_to_server
from varuna.holdings.transfer_protocol import CHUNK_BYTES, COPY, SUMS
from varuna.worker.worker import WorkerProcess

__all__ = ["Parting", "list_lonely", "plan_takers"]

_log = structlog.get_logger("varuna")

_COPIES = 2
"""In memory of a rank at most: of its own sums, and of those that it takes."""
_LARGEST_PART = 0.5
"""Of the memory that is available: the next shape may need more."""
_LOOK_S = 0.03
_LOST = "what this rank has is not left to others, and may be lost with the VM that leaves"


class Parting:
    """The part of one rank, in one step."""

    def __init__(self, worker: WorkerProcess, step: int, leaving: Collection[int], *, sharers: int) -> None:
        """All ranks of the generation make one when their passes have ended.

        `step`: the one under way. `leaving`: the ranks that have no part in the next generation. `sharers`: the ranks
        on this machine.
        """
        self._worker, self._key = worker, f"parting/{step}"
        self._meeting_key = MeetingKey.from_environment(worker.environment)
        self._sharers = sharers
        rank, p, d = worker.topology.rank, worker.topology.p, worker.topology.d
        self._takers = plan_takers(leaving, p, d)
        self._taker = self._takers.get(rank)
        self._lonely = list_lonely(leaving, p, d)
        self.loses_rank = worker.topology.replica in {one // p for one in leaving}
        """Whether this rank's replica does, so that its sums count as a copy only."""
        self.gives_state = rank in self._lonely
        """Whether no rank that stays has the state that this one has."""
        self._sums: MarkedSums | None = None
        self._state: HeldFiles | None = None
        self._share_keeper: ShareKeeper | None = None
        self._copy_keeper: CopyKeeper | None = None
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
        self._sums = MarkedSums(mark, sums)

    def offer_state(self, state: HeldFiles) -> None:
        """What this rank, which `gives_state`, holds. It does not change until this process ends."""
        needed = self._sharers * sum(entry.bytes for entry in state.inventory.receipt.files)
        if shortage := describe_shortage(needed, _LARGEST_PART):  # as for sums
            _log.warning(_LOST, reason=shortage)
            return
        self._state = state

    def exchange(self) -> None:
        """Sends what this rank leaves, while it takes what others send. Returns when its own is there, or cannot be."""
        try:
            self._open_doors()
            if self._taker is not None and self._state is not None:
                words, files = pack_copy_request(self._state, series=0, step_to_keep=0)
                self._send(self._address_key("state", self._taker), COPY, words, files)
            if self._taker is not None and self._sums is not None:
                words, file = pack_sums_request(self._sums, series=0, kept_count=0)
                self._send(self._address_key("sums", self._taker), SUMS, words, [file])
        except dist.DistError:  # rank 0 is gone, which this worker learns otherwise
            pass
        except (OSError, RuntimeError, ValueError, MemoryError, struct.error) as error:
            _log.warning(_LOST, reason=first_line(error))

    def list_sums(self, step: int) -> list[MarkedSums]:
        """What this process has of that step: its own sums, if its replica has lost ranks, and those of others."""
        kept = [] if self._share_keeper is None else self._share_keeper.list_sums()
        own = [] if self._sums is None else [self._sums]
        return [one for one in (*own, *kept) if one.mark.step == step]

    def list_copies(self) -> list[HeldFiles]:
        """The states of others that this process has."""
        return [] if self._copy_keeper is None else self._copy_keeper.list_copies()

    def shut_down(self) -> None:
        """Ends what this rank sends. From any thread."""
        self._stopped.set()
        if (connection := self._connection) is not None:
            with suppress(OSError):  # it has ended by itself
                connection.shutdown(socket.SHUT_RDWR)

    def _open_doors(self) -> None:
        """For what others send to this rank."""
        rank, host = self._worker.topology.rank, self._worker.rendezvous.own_address()
        givers = [one for one, to in self._takers.items() if to == rank]
        if givers:
            self._share_keeper = ShareKeeper(self._meeting_key, host)
            self._publish("sums", self._share_keeper)
        if owners := self._lonely.intersection(givers):
            self._copy_keeper = CopyKeeper(owners, self._worker.environment.generation, self._meeting_key, host)
            self._publish("state", self._copy_keeper)

    def _publish(self, what: str, keeper: StateServer) -> None:
        """Says where `keeper` listens. It closes when this worker leaves, or at once if it has left meanwhile."""
        self._worker.departure.add_breaker(lambda _: keeper.shut_down())
        self._worker.rendezvous.store.set(self._address_key(what, self._worker.topology.rank), keeper.address)

    def _send(self, address_key: str, kind: int, words: Sequence[bytes], files: Iterable[HeldFile]) -> None:
        """Sends these to whoever has said there where it listens."""
        address = await_value(self._worker.rendezvous.store, address_key, self._stopped, look_s=_LOOK_S)
        if not address:
            return
        with connect_to_server(address, self._meeting_key) as connection:
            self._connection = connection
            if not self._stopped.is_set():
                chunks = (chunk for file in files for chunk in file.iterate_chunks(0, CHUNK_BYTES))
                send_request(connection, kind, words, chunks)

    def _address_key(self, what: str, rank: int) -> str:
        return f"{self._key}/{what}/{rank}"


def list_lonely(leaving: Collection[int], p: int, d: int) -> frozenset[int]:
    """The first rank of each stage whose ranks all leave."""
    return frozenset(stage for stage in range(p) if all(replica * p + stage in leaving for replica in range(d)))


def plan_takers(leaving: Collection[int], p: int, d: int) -> dict[int, int]:
    """By rank of each replica that loses one: the rank that takes what it has.

    That is one with its stage in a replica that stays whole, where there is one, else one with its stage; where all of
    them leave, any other. One that stays and has no such other keeps what it has. Each takes from as few ranks as can
    be. `leaving`: the ranks that leave.
    """
    hit = {rank // p for rank in leaving}
    lonely = {rank % p for rank in list_lonely(leaving, p, d)}
    everyone = range(p * d)
    taken: Counter[int] = Counter()
    takers: dict[int, int] = {}
    for giver in (replica * p + stage for replica in sorted(hit) for stage in range(p)):
        ahead = [(giver + one * p) % (p * d) for one in range(1, d)]
        others = everyone if giver % p in lonely else ahead
        staying = [rank for rank in others if rank not in leaving]
        if staying:
            takers[giver] = taker = min(staying, key=lambda rank: (rank // p in hit, taken[rank]))
            taken[taker] += 1
    return takers
