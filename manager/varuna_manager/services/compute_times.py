"""What running workers took per micro-batch over their last steps: in memory, from the heartbeats."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
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
    """By VM: what one agent says of workers that are not on its VM counts for nobody."""

    def __init__(self) -> None:
        self._vms: dict[str, dict[tuple[str, int, int], _Rank]] = {}

    def note(self, vm_id: str, workers: Iterable[Health]) -> None:
        """Takes the workers of a VM's heartbeat; what is known of its other workers is dropped."""
        before, now = self._vms.get(vm_id, {}), {}
        for worker in workers:
            rank = before.get(worker.key)
            if not worker.forward_us and rank is None:
                continue  # nothing trained yet
            now[worker.key] = rank = rank or _Rank()
            if worker.forward_us and worker.step > rank.step:
                rank.step = worker.step
                rank.since_look += 1
                rank.micro_batch_us.append(worker.forward_us + worker.backward_us)
        if now:
            self._vms[vm_id] = now
        else:
            self._vms.pop(vm_id, None)

    def look(self, job_id: str, generation: int, vm_ids: Sequence[str]) -> Mapping[int, Took] | None:
        """What each rank took; None until every one has told of STEPS_NEEDED steps since the last look.

        `vm_ids`: by rank.
        """
        known: dict[int, _Rank] = {}
        for number, vm_id in enumerate(vm_ids):
            rank = self._vms.get(vm_id, {}).get((job_id, generation, number))
            if rank is None or rank.since_look < STEPS_NEEDED:
                return None
            known[number] = rank
        for rank in known.values():
            rank.since_look = 0
        return {number: _took(rank.micro_batch_us) for number, rank in known.items()}

    def forget(self, job_id: str) -> None:
        """Starts again with a job: what was noted is booked."""
        self._keep(lambda of: of != job_id)

    def keep_only(self, job_ids: Set[str]) -> None:
        """Drops all but these jobs, those that still run."""
        self._keep(lambda of: of in job_ids)

    def _keep(self, is_kept: Callable[[str], bool]) -> None:
        kept = {vm_id: {key: rank for key, rank in of.items() if is_kept(key[0])} for vm_id, of in self._vms.items()}
        self._vms = {vm_id: of for vm_id, of in kept.items() if of}
