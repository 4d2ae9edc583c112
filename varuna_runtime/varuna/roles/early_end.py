"""Ending the passes of a step early, in order, so that the job takes another shape in the middle of a long step.

All replicas stop to begin micro-batches, and finish those that have begun. Then all stages of a replica have the same
micro-batches in their sums, nothing is run again, and the rest of the step is run in the next shape. Ranks that have no
part in it leave what they have to others (`varuna.copies.parting`).

The ranks agree on it over the store of their generation. Each votes, the first stage of a replica with the number of
micro-batches that it has begun; until the decision it begins no further one. When all have voted, rank 0 decides. Any
rank can refuse before that: one that has begun all, one whose sums do not count later, or one that has waited too long.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass

import structlog
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from varuna.diagnostics.error_text import first_line
from varuna.distributed.departure import GenerationEnded
from varuna.distributed.rendezvous_store import read_values
from varuna.worker.worker import WorkerProcess

__all__ = ["AgreedEnd", "EarlyEnd"]

_log = structlog.get_logger("varuna")

_PATIENCE_S = 5.0
"""How long a replica begins no micro-batch while others have not voted: a rank that is past its pass never does."""
_GIVING_PATIENCE_S = 25.0
"""How long ranks wait for what others send. A VM with notice has half a minute as a rule."""
_LOOK_S = 0.03
"""How often the store is asked for what others have said."""
_REFUSED = "no"


@dataclass(frozen=True, kw_only=True)
class _Vote:
    """Of one rank."""

    begun: int
    """Micro-batches."""
    unbegun: int
    """Examples in the others of the pass."""
    leaves: bool
    """Whether it has no part in the next generation."""
    host: str
    """Its machine's address."""


@dataclass(frozen=True, kw_only=True)
class AgreedEnd:
    """Where all ranks end their passes."""

    ends: Sequence[int]
    """By replica: after so many micro-batches."""
    unbegun: int
    """Examples that no replica runs then, of those in all passes."""
    leaving: Sequence[int]
    """Ranks that have no part in the next generation."""
    hosts: Sequence[str]
    """By rank: its machine's address."""


class EarlyEnd:
    """Whether one pass of this rank ends early."""

    def __init__(self, worker: WorkerProcess, step: int, sizes: Sequence[int], *, may_end: Callable[[], bool]) -> None:
        """`sizes`: examples in each micro-batch of the pass. `may_end`: whether what this rank has of them counts
        later."""
        self._worker, self._departure, self._topology = worker, worker.departure, worker.topology
        self._key = f"early end/{step}"
        self._sizes, self._may_end = sizes, may_end
        self._begun: int | None = None
        """As it was when this rank voted; None: it has not."""
        self._is_refused = False
        self._agreed: AgreedEnd | None = None
        self._give: Callable[[], None] = lambda: None
        self._has_ended = False
        self._have_all_ended = False

    @property
    def agreed(self) -> AgreedEnd | None:
        """None: that is not decided, or the passes do not end early."""
        return self._agreed

    @property
    def end(self) -> int | None:
        """After how many micro-batches this replica's passes end; None: as for `agreed`."""
        return None if self._agreed is None else self._agreed.ends[self._topology.replica]

    def limit_forwards(self, begun: int) -> int:
        """How many micro-batches may have begun now. `begun`: those that have. Under the condition of the departure."""
        if (end := self.end) is not None:
            return end
        if self._begun is None and self._departure.leaves_within_step:
            self._begun = begun
            threading.Thread(target=self._agree, name="varuna-early-end", daemon=True).start()
        if self._begun is None or self._is_refused or self._topology.stage > 0:
            return len(self._sizes)
        return self._begun

    def wait_for_others(self, give: Callable[[], None]) -> None:
        """After the pass: waits for those of the others, if they end early. Raises as a worker that leaves.

        `give`: sends what this rank leaves to others. In a thread of its own.
        """
        if self._agreed is None:
            return
        self._give, self._has_ended = give, True
        patience_s = _GIVING_PATIENCE_S if self._agreed.leaving else 0.0
        self._departure.wait_for_others(lambda: self._have_all_ended, patience_s)

    def _agree(self) -> None:
        assert self._begun is not None, "it votes with that"
        try:
            agreed = self._vote(self._begun)
        except dist.DistError:  # rank 0 is gone, which this worker learns otherwise
            agreed = None
        except Exception as error:  # without this thread, no further micro-batch would begin
            agreed = self._refuse(first_line(error) or type(error).__name__)
        with self._departure.condition:
            self._agreed, self._is_refused = agreed, agreed is None
            self._departure.condition.notify_all()
        if agreed is None:
            return
        # Put off until all have ended their passes (`Departure.finish_first`).
        self._departure.leave_generation(GenerationEnded("the job takes another shape in the middle of the step"))
        with self._departure.condition:
            self._departure.condition.wait_for(lambda: self._has_ended or self._departure.exit_code is not None)
        with suppress(dist.DistError):
            self._give()
            self._write("ended", "")
            while self._departure.exit_code is None and self._read_from_all("ended") is None:
                time.sleep(_LOOK_S)
        with self._departure.condition:
            self._have_all_ended = True
            self._departure.condition.notify_all()

    def _vote(self, begun: int) -> AgreedEnd | None:
        """What all ranks agree on; None: their passes do not end early."""
        has_begun_all = self._topology.stage == 0 and begun == len(self._sizes)
        if has_begun_all or not self._may_end():
            return self._decide(_REFUSED)
        vote = _Vote(
            begun=begun,
            unbegun=sum(self._sizes[begun:]),
            leaves=self._departure.is_spare,
            host=self._worker.rendezvous.own_address(),
        )
        self._write("vote", json.dumps(asdict(vote)))
        deadline_s = time.monotonic() + _PATIENCE_S
        while time.monotonic() < deadline_s and self._departure.exit_code is None:
            if (decided := read_values(self._store, [self._key])) is not None:
                return _unpack(decided[0])
            if self._topology.rank == 0 and (votes := self._read_from_all("vote")) is not None:
                return self._decide(json.dumps(asdict(self._count([_Vote(**json.loads(vote)) for vote in votes]))))
            time.sleep(_LOOK_S)
        return self._decide(_REFUSED)

    def _refuse(self, reason: str) -> AgreedEnd | None:
        """This rank cannot vote, and the others are not to wait for it."""
        _log.warning("the job takes its next shape at the end of the step, not in the middle", reason=reason)
        with suppress(dist.DistError):  # as above
            return self._decide(_REFUSED)
        return None

    def _count(self, votes: Sequence[_Vote]) -> AgreedEnd:
        """`votes`: by rank."""
        firsts = votes[:: self._topology.p]
        return AgreedEnd(
            ends=[vote.begun for vote in firsts],
            unbegun=sum(vote.unbegun for vote in firsts),
            leaving=[rank for rank, vote in enumerate(votes) if vote.leaves],
            hosts=[vote.host for vote in votes],
        )

    @property
    def _store(self) -> Store:
        return self._worker.rendezvous.store

    def _decide(self, wanted: str) -> AgreedEnd | None:
        """The first decision counts, whoever makes it."""
        return _unpack(self._store.compare_set(self._key, "", wanted).decode())

    def _write(self, name: str, value: str) -> None:
        self._store.set(f"{self._key}/{name}/{self._topology.rank}", value)

    def _read_from_all(self, name: str) -> list[str] | None:
        """By rank; None: not all have written it yet."""
        return read_values(self._store, [f"{self._key}/{name}/{rank}" for rank in self._topology.everyone])


def _unpack(decision: str) -> AgreedEnd | None:
    return None if decision == _REFUSED else AgreedEnd(**json.loads(decision))
