"""What running workers took per micro-batch over their last steps: in memory, from the heartbeats."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Set
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
    micro_batch_us: deque[int] = field(default_factory=lambda: deque(maxlen=STEPS_KEPT))


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
                rank.micro_batch_us.append(worker.forward_us + worker.backward_us)

    def medians_us(self, job_id: str, generation: int, ranks: int) -> Mapping[int, float] | None:
        """Forward and backward of a micro-batch by rank; None until every rank has told of STEPS_NEEDED steps."""
        known = self._ranks.get((job_id, generation), {})
        if len(known) < ranks or any(len(rank.micro_batch_us) < STEPS_NEEDED for rank in known.values()):
            return None
        return {number: median(rank.micro_batch_us) for number, rank in known.items()}

    def forget(self, job_id: str) -> None:
        """Starts again with a job: what was noted is booked."""
        self.keep_only({key[0] for key in self._ranks} - {job_id})

    def keep_only(self, job_ids: Set[str]) -> None:
        """Drops all but these jobs, those that still run."""
        self._ranks = {key: ranks for key, ranks in self._ranks.items() if key[0] in job_ids}
