"""What running workers took per micro-batch over their last steps: in memory, from the heartbeats."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from statistics import median

from varuna_manager.services.vm_registry import Health

STEPS_KEPT = 32
STEPS_NEEDED = 8
"""A median over fewer tells of the moment, not of the machine."""


@dataclass(kw_only=True)
class _Rank:
    step: int = 0
    """The newest that was noted: heartbeats tell the same step again and again."""
    since_look: int = 0
    """Steps."""
    micro_batch_us: deque[int] = field(default_factory=lambda: deque(maxlen=STEPS_KEPT))


@dataclass(frozen=True, kw_only=True)
class Took:
    """Forward and backward of a micro-batch, over the last STEPS_KEPT steps."""

    steps: int
    """Fewer, while there are no more."""
    median_us: float
    mad_us: float
    """Median absolute deviation."""


def _took(micro_batch_us: Sequence[int]) -> Took:
    usual = median(micro_batch_us)
    return Took(steps=len(micro_batch_us), median_us=usual, mad_us=median(abs(us - usual) for us in micro_batch_us))


class ComputeTimes:
    def __init__(self) -> None:
        self._ranks: dict[tuple[str, int], dict[int, _Rank]] = {}

    def note(self, workers: Iterable[Health]) -> None:
        """Takes the workers of a heartbeat; what is known of older generations of their jobs is dropped."""
        for worker in workers:
            if not worker.forward_us:
                continue  # nothing trained yet
            key = (worker.job_id, worker.generation)
            if key not in self._ranks:
                for other in [k for k in self._ranks if k[0] == worker.job_id and k[1] < worker.generation]:
                    del self._ranks[other]
            rank = self._ranks.setdefault(key, {}).setdefault(worker.rank, _Rank())
            if worker.step > rank.step:
                rank.step = worker.step
                rank.since_look += 1
                rank.micro_batch_us.append(worker.forward_us + worker.backward_us)

    def look(self, job_id: str, generation: int, ranks: int) -> Mapping[int, Took] | None:
        """What each rank took; None until every one has told of STEPS_NEEDED steps since the last look."""
        known = self._ranks.get((job_id, generation), {})
        if len(known) < ranks or any(rank.since_look < STEPS_NEEDED for rank in known.values()):
            return None
        for rank in known.values():
            rank.since_look = 0
        return {number: _took(rank.micro_batch_us) for number, rank in known.items()}

    def forget(self, job_id: str) -> None:
        """Starts again with a job: what was noted is booked."""
        self.keep_only({key[0] for key in self._ranks} - {job_id})

    def keep_only(self, job_ids: Set[str]) -> None:
        """Drops all but these jobs, those that still run."""
        self._ranks = {key: ranks for key, ranks in self._ranks.items() if key[0] in job_ids}
