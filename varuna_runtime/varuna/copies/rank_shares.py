"""This rank's part in the copies of its replica's share of a step: when it copies its sums, and what it keeps.

A long step loses less with them. What a lost replica had done up to its newest mark counts, since another replica has
the sums; and the others can leave at once, with what they had at theirs, where to finish their shares would take longer
(`is_worth_finishing`). Marks are as many as cost training little (`varuna.copies.replica_marks` says how ranks agree on
them).

A rank's sums are kept by the rank with the same stage in another replica, so that they need not move again where stages
stay. With one replica, the rank that keeps the copy of its state keeps its sums, too (`varuna.copies.rank_copies`).
Letters: P stages, D replicas; rank = replica * P + stage.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import structlog
import torch
import torch.distributed as dist
from torch import Tensor, nn

from varuna.copies.memory import MemorySharers, describe_shortage
from varuna.copies.obstacles import CopiesObstacle
from varuna.copies.replica_marks import ReplicaMarks
from varuna.copies.sending import PacedConnection
from varuna.copies.share_keeper import ShareKeeper
from varuna.copies.share_marks import MarkedSums, MarkKey, ShareMark, micro_batches_between_marks
from varuna.copies.share_owner import ShareOwner
from varuna.distributed.handshake import MeetingKey
from varuna.pipeline.pass_state import PassResult, PassState
from varuna.worker.worker import WorkerProcess
from varuna_planner.liveput.copies import MARKS_SHARE
from varuna_proto.environment import WorkerEnvironment

__all__ = ["EarlierSums", "RankShares", "has_keepers"]

_log = structlog.get_logger("varuna")

_MARKS = 2
"""In memory of each rank whose sums are there, this rank and those for which it keeps some."""
_LARGEST_PART = 0.5
"""Of the memory that is available: the script may need more later."""


@dataclass(frozen=True)
class EarlierSums:
    """What the sums have before a pass."""

    numbers: Sequence[int]
    """Of the micro-batches in the global batch."""
    passed: PassResult
    have_all: Callable[[], bool] | None = None
    """Whether all ranks have theirs, which come in the pass; None: they have had them before."""


@dataclass
class _Share:
    """A pass that adds to a replica's share of a step."""

    step: int
    parameters: Mapping[str, nn.Parameter]
    sections: range
    """Of the rank's stage."""
    numbers: Sequence[int]
    """Of the pass's micro-batches in the global batch."""
    kept: EarlierSums | None
    """What the sums had before it; None: nothing."""
    micro_batch: int
    """Examples in each micro-batch."""
    interval: int
    """From one mark to the next, or a multiple of it; 0: there are no marks."""
    done: int = 0
    """Of the pass's micro-batches."""
    marked: int = 0
    """Of those, in the newest mark; negative while none has what is `kept`."""
    without_sums: Sequence[range] = ()
    """The sections of each of the replica's first stages that get no gradients."""

    @property
    def kept_numbers(self) -> Sequence[int]:
        return () if self.kept is None else self.kept.numbers

    @property
    def is_kept_there(self) -> bool:
        """Whether the sums of all ranks have what is kept."""
        return self.kept is None or self.kept.have_all is None or self.kept.have_all()


@dataclass(frozen=True)
class _NewestMark:
    """The newest that the replica is to make, as the rank knows it that decides which there are."""

    series: int
    key: MarkKey
    decided_s: float


class RankShares:
    """The copies of one generation, from its making until `shut_down`."""

    def __init__(self, worker: WorkerProcess, *, is_pipeline_sending: Callable[[], bool]) -> None:
        """All ranks of a generation that `has_keepers` make one, in the same step, and wait for one another: who is
        ahead may have much to copy before its first micro-batch. Raises GenerationEnded, PeerLost."""
        self._worker = worker
        self._key = MeetingKey.from_environment(worker.environment)
        self._is_pipeline_sending = is_pipeline_sending
        self._owner: ShareOwner | None = None
        self._has_room: bool | None = None
        """Whether this rank can take part; None: not known yet."""
        self._obstacle = CopiesObstacle(worker, "shares", "copies of shares")
        self._has_long_steps = False
        """Whether there was a pass that is long enough for marks."""
        self._keeper = self._make_keeper()
        self._marks = ReplicaMarks(worker.rendezvous.store, worker.topology)
        self._newest: _NewestMark | None = None
        """None: what became of it is known."""
        self._rests_until_s = 0.0
        self._series = 0
        """Of passes: one that does not count ends it."""
        self._share: _Share | None = None
        worker.departure.add_breaker(lambda _: self.shut_down())
        self._sharers = MemorySharers(worker, "shares")
        """Once it is there, all ranks have said who keeps sums."""

    def begin_pass(
        self,
        step: int,
        numbers: Sequence[int],
        parameters: Mapping[str, nn.Parameter],
        *,
        sections: range,
        kept: EarlierSums | None,
        micro_batch: int,
        micro_batch_s: float,
        without_sums: Sequence[range] = (),
    ) -> None:
        """A pass over the micro-batches `numbers` begins that adds to what is `kept`.

        `parameters`, `sections`: of the rank's stage. `micro_batch`: examples in each micro-batch. `micro_batch_s`:
        what each takes, the same on all ranks; 0: not known. `without_sums`: the sections of each of the first stages
        that get no gradients.
        """
        interval = micro_batches_between_marks(micro_batch_s)
        is_long = 0 < interval < len(numbers) and sections not in without_sums
        interval = interval if is_long else 0
        self._has_long_steps |= is_long
        self._share = share = _Share(
            step,
            parameters,
            sections,
            numbers,
            kept,
            micro_batch,
            interval,
            marked=0 if kept is None else -len(kept.numbers),
            without_sums=without_sums,
        )
        if is_long and kept is not None and kept.have_all is None:  # all ranks know that without an announcement
            self._newest = _NewestMark(self._series, self._key_of(share, 0), time.monotonic())
            self._make_mark(share, kept.passed)
        self._consider_mark(share)

    def follow_backward(self, done: int, run: PassState) -> None:
        """The sums have `done` micro-batches of the pass."""
        share = self._share
        assert share is not None, "a pass has begun"
        share.done = done
        if not share.interval:
            return
        if done % share.interval == 0 and self._marks.is_announced(self._series, self._key_of(share, done)):
            result = run.sum_up(done)
            self._make_mark(share, result if share.kept is None else share.kept.passed.join(result))
        self._consider_mark(share)

    def order_changes(self) -> None:
        """The sums may change in what is launched next: a mark's copy comes before that."""
        if self._owner is not None:
            self._owner.order_changes()

    def end_pass(self) -> None:
        """The pass has ended, or has been left. The sums may change in what is launched next."""
        self._share = None
        self.order_changes()

    def is_worth_finishing(self) -> bool:
        """Whether this replica ends its share when another one is hit, rather than to leave with its newest mark.

        While it ends it, the other devices of the replica that was hit are idle, as if that had lost one. If it leaves,
        all replicas that are whole run again what they have done since their marks. From any thread.
        """
        share = self._share
        if share is None or not share.interval:
            return True
        p, d = self._worker.topology.p, self._worker.topology.d
        idle = (len(share.numbers) - share.done) * (p - 1)
        return (share.done - share.marked) * (d - 1) * p >= idle

    def find_obstacle(self) -> str:
        """Why the generation makes no marks; empty: it makes some, or nothing is known yet."""
        return self._obstacle.read() if self._has_long_steps else ""

    def list_sums(self, step: int) -> list[MarkedSums]:
        """All copies of that step's shares in this process's memory."""
        kept = [] if self._keeper is None else self._keeper.list_sums()
        own = [] if self._owner is None else self._owner.list_sums(step)
        return [*own, *(marked for marked in kept if marked.mark.step == step)]

    def forget_sums(self) -> None:
        """All ranks know that the pass does not count."""
        self._series += 1
        if self._owner is not None:
            self._owner.forget_sums(self._series)
        if self._keeper is not None:
            self._keeper.forget_sums(self._series)

    def shut_down(self) -> None:
        """Ends all connections. What is held stays. From any thread."""
        if self._owner is not None:
            self._owner.shut_down()
        if self._keeper is not None:
            self._keeper.shut_down()

    def _consider_mark(self, share: _Share) -> None:
        """Announces a mark after the next micro-batch, if this rank decides it and there is to be one."""
        coming = share.done + 1
        is_possible = share.interval and coming % share.interval == 0 and coming < len(share.numbers)
        if not (is_possible and self._marks.announces and self._has_room is not False and share.is_kept_there):
            return
        if self._is_settled(share) and time.monotonic() >= self._rests_until_s:
            key = self._key_of(share, coming)
            self._newest = _NewestMark(self._series, key, time.monotonic())
            self._marks.announce(self._series, key)

    def _is_settled(self, share: _Share) -> bool:
        """Whether all ranks have said what became of the newest mark, if that is of this share."""
        if (newest := self._newest) is None:
            return True
        reports = self._marks.read_reports(newest.series, newest.key)
        if reports is None:
            return (newest.series, newest.key.step) != (self._series, share.step)
        longest_s = max(copy_s or 0.0 for copy_s in reports)
        self._rests_until_s, self._newest = newest.decided_s + longest_s / MARKS_SHARE, None
        return True

    def _make_mark(self, share: _Share, result: PassResult) -> None:
        key = self._key_of(share, share.done)
        if self._marks.announces:
            self._marks.report_empty(self._series, key, len(share.without_sums))
        gradients = {name: one.grad for name, one in share.parameters.items() if one.grad is not None}
        owner = self._find_owner(gradients)
        if owner is None or owner.is_busy:
            self._marks.report(self._series, key, None)
            return
        numbers = (*share.kept_numbers, *share.numbers[: share.done])
        mark = ShareMark.of_pass(
            numbers,
            result,
            generation=key.generation,
            replica=key.replica,
            step=share.step,
            sections=share.sections,
            micro_batch=share.micro_batch,
            without_sums=share.without_sums,
        )
        owner.copy_sums(mark, gradients)
        share.marked = share.done

    def _key_of(self, share: _Share, done: int) -> MarkKey:
        generation, replica = self._worker.environment.generation, self._worker.topology.replica
        return MarkKey(generation, replica, share.step, len(share.kept_numbers) + done)

    def _find_owner(self, gradients: Mapping[str, Tensor]) -> ShareOwner | None:
        """None: these sums cannot be copied."""
        if self._has_room is None:
            owners = 1 + self._count_kept()
            obstacle = _describe_obstacle(gradients, _MARKS * owners * self._sharers.count)
            self._has_room = not obstacle
            if obstacle:
                self._obstacle.report(obstacle)
        if self._has_room and self._owner is None:
            self._owner = self._make_owner()
            self._worker.departure.add_breaker(lambda _: self.shut_down())  # this worker may have left meanwhile
        return self._owner

    def _make_keeper(self) -> ShareKeeper | None:
        rendezvous, rank = self._worker.rendezvous, self._worker.environment.rank
        keeper: ShareKeeper | None = None
        try:
            keeper = ShareKeeper(self._key, rendezvous.own_address())
        except OSError as error:
            _log.warning("this rank keeps no copies of others' shares: there is no port for them", reason=str(error))
        with suppress(dist.DistError):  # rank 0 is gone, which this worker learns otherwise
            rendezvous.store.set(_address_key(rank), "" if keeper is None else keeper.address)
        return keeper

    def _make_owner(self) -> ShareOwner | None:
        address = self._find_keeper()
        if not address:
            self._has_room = False
            return None
        return ShareOwner(PacedConnection(address, self._key, self._is_pipeline_sending), self._marks)

    def _count_kept(self) -> int:
        """The ranks whose sums this one keeps."""
        environment = self._worker.environment
        return environment.keepers.count(environment.rank) if self._worker.topology.d == 1 else 1

    def _find_keeper(self) -> str:
        """The address of the next replica's rank with this stage that is on another host; if all are on this one, of
        the next. With one replica, of the rank that keeps this one's state. Empty: none keeps sums."""
        p, d, rank = self._worker.topology.p, self._worker.topology.d, self._worker.topology.rank
        others = [(rank + ahead * p) % (p * d) for ahead in range(1, d)] or [self._worker.environment.keepers[rank]]
        try:
            texts = self._worker.rendezvous.store.multi_get([_address_key(other) for other in others])
        except dist.DistError:  # as in `_make_keeper`
            return ""
        addresses = [text.decode() for text in texts if text]
        if not addresses:
            self._obstacle.report("no other rank can keep its sums")
        own_host = self._worker.rendezvous.own_address()
        return min(addresses, key=lambda address: address.rpartition(":")[0] == own_host, default="")


def has_keepers(environment: WorkerEnvironment) -> bool:
    """Whether other ranks keep the sums of each rank of the generation: those of another replica, or those that keep
    copies of states."""
    return environment.copies_shares and (environment.plan.d > 1 or bool(environment.keepers))


def _describe_obstacle(gradients: Mapping[str, Tensor], copies: int) -> str:
    """Why these sums cannot be copied; empty: they can. `copies`: on this machine.

    Stages have about the same size, so this rank's sums stand for those that it keeps.
    """
    if any(gradient.layout is not torch.strided for gradient in gradients.values()):
        return "the model has sparse gradients"
    needed = copies * sum(gradient.nbytes for gradient in gradients.values())
    return describe_shortage(needed, _LARGEST_PART)


def _address_key(rank: int) -> str:
    return f"shares/address/{rank}"
