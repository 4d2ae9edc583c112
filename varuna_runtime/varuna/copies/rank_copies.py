"""This rank's part in the copies of a generation: what it sends, what it keeps, and when a round begins.

A round begins at the start of a step, on all ranks in the same one. The ranks agree on that in the reduction at the end
of the step before (`BoundaryRequests.copying`): none begins as long as the copy of one is not whole. Where a generation
begins with a state, its first round begins in its first step: the ranks agree on that when they have met.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import torch
import torch.distributed as dist

from varuna.checkpoint import TrainingState
from varuna.copies.keeper import CopyKeeper
from varuna.copies.memory import MemorySharers, describe_shortage
from varuna.copies.obstacles import CopiesObstacle
from varuna.copies.owner import CopyOwner
from varuna.distributed.handshake import MeetingKey
from varuna.holdings.inventory import HeldFiles
from varuna.worker.worker import WorkerProcess

__all__ = ["RankCopies"]

_STATES = 2
"""In memory for each state that is copied: of the newest round that is whole everywhere, and of the one under way."""
_LARGEST_PART = 0.7
"""Of the memory that is available: the script may need more later."""


class RankCopies:
    """The copies of one generation, from its making until `shut_down`."""

    def __init__(
        self,
        worker: WorkerProcess,
        device: torch.device,
        *,
        count_state_bytes: Callable[[], int],
        is_pipeline_sending: Callable[[], bool],
    ) -> None:
        """All ranks of a generation whose environment has keepers make one, in the same step, and wait for one another.

        `count_state_bytes`: of this rank; 0: not known yet. Raises GenerationEnded, PeerLost.
        """
        environment = worker.environment
        self._worker, self._device = worker, device
        self._count_state_bytes = count_state_bytes
        self._is_pipeline_sending = is_pipeline_sending
        self.rank = environment.rank
        """In this generation; the process may have another rank before the copies are of no use."""
        self._key = MeetingKey.from_environment(environment)
        self._owners = [rank for rank, keeper in enumerate(environment.keepers) if keeper == environment.rank]
        self._owner: CopyOwner | None = None
        self._can_keep: bool | None = None
        """Whether this rank can take part; None: not known yet."""
        self._obstacle = CopiesObstacle(worker, "copies", "copies of the ranks' states")
        self._keeper = self._make_keeper() if self._owners else None
        self._has_met = self._has_begun = False
        self._is_free = False
        self._round_step = 0
        self.whole_step = 0
        """The newest step whose copies are known to be whole on all ranks; 0: there is none."""
        self._series = 0
        worker.departure.add_breaker(lambda _: self.shut_down())
        self._sharers = MemorySharers(worker, "copies")
        """Once it is there, all ranks have said where they keep copies."""

    @property
    def is_busy(self) -> bool:
        """Whether no rank may begin a round, because of this one."""
        if self._can_keep is None and (state_bytes := self._count_state_bytes()):
            shortage = self._describe_shortage(state_bytes * self._sharers.count)
            self._can_keep = not shortage
            if shortage:
                self._obstacle.report(shortage)
        return not self._can_keep or (self._owner is not None and self._owner.is_busy)

    def find_obstacle(self) -> str:
        """Why the generation keeps no copies; empty: it keeps some, or nothing is known yet.

        The store is only asked where no round could begin when the ranks met.
        """
        return "" if self.whole_step or self._has_begun else self._obstacle.read()

    def record_agreement(self, *, is_any_busy: bool) -> None:
        """What all ranks have agreed on at the end of a step."""
        self._is_free = not is_any_busy
        if self._is_free:
            self.whole_step = self._round_step

    def begin_round(self, step: int, make_state: Callable[[], TrainingState]) -> None:
        """Begins to copy the state after `step` steps, if the round before is whole on all ranks.

        All ranks call it in the same steps. The first time they wait for one another, so that the first round does not
        have to wait for what they agree on at the end of the step. Raises GenerationEnded, PeerLost.
        """
        if not self._has_met:
            self._has_met = True
            self._meet()
        if not self._is_free:
            return
        self._is_free, self._has_begun = False, True
        self._round_step = step
        rank, keepers = self._worker.environment.rank, self._worker.environment.keepers
        if rank >= len(keepers):  # another replica of its stage sends the copy
            return
        if self._owner is None:
            try:
                address = self._worker.rendezvous.store.get(_address_key(keepers[rank])).decode()
            except dist.DistError:  # as in `_make_keeper`
                self._can_keep = False
                return
            self._owner = CopyOwner(
                address,
                self._key,
                generation=self._worker.environment.generation,
                rank=rank,
                device=self._device,
                series=self._series,
                is_pipeline_sending=self._is_pipeline_sending,
            )
            self._worker.departure.add_breaker(lambda _: self.shut_down())  # this worker may have left meanwhile
        self._owner.begin_round(step, make_state())

    def _meet(self) -> None:
        """Finds out whether all ranks have room for copies."""
        everyone = self._worker.topology.everyone
        are_busy = self._worker.rendezvous.exchange_values("copies/busy", everyone, str(self.is_busy))
        self._is_free = set(are_busy) == {str(False)}

    def finish_capture(self) -> None:
        """Waits until the state may change."""
        if self._owner is not None:
            self._owner.finish_capture()

    def list_copies(self) -> list[HeldFiles]:
        """All states in this process's memory but the live one."""
        kept = [] if self._keeper is None else self._keeper.list_copies()
        return kept if self._owner is None else [*kept, *self._owner.list_copies()]

    def forget_copies(self) -> None:
        """All ranks have loaded another state."""
        self._series += 1
        self._round_step = self.whole_step = 0
        if self._keeper is not None:
            self._keeper.forget_copies(self._series)
        if self._owner is not None:
            self._owner.forget_copies(self._series)

    def shut_down(self) -> None:
        """Ends all connections. What is held stays. From any thread."""
        if self._owner is not None:
            self._owner.shut_down()
        if self._keeper is not None:
            self._keeper.shut_down()

    def _make_keeper(self) -> CopyKeeper | None:
        environment, rendezvous = self._worker.environment, self._worker.rendezvous
        try:
            keeper = CopyKeeper(self._owners, environment.generation, self._key, rendezvous.own_address())
        except OSError as error:
            self._obstacle.report(f"there is no port for them: {error}")
            self._can_keep = False
            return None
        with suppress(dist.DistError):  # rank 0 is gone, which this worker learns otherwise
            rendezvous.store.set(_address_key(environment.rank), keeper.address)
        return keeper

    def _describe_shortage(self, state_bytes: int) -> str:
        """Why there is no room; empty: there is. `state_bytes`: of all ranks on this machine.

        Stages have about the same size, so a rank's stands for those that it keeps.
        """
        states = len(self._owners) + (self._worker.environment.rank < len(self._worker.environment.keepers))
        return describe_shortage(_STATES * states * state_bytes, _LARGEST_PART)


def _address_key(rank: int) -> str:
    return f"copies/{rank}"
