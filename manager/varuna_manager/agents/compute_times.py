"""What running workers took per micro-batch over their last steps: in memory, from the heartbeats."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from statistics import median

from varuna_manager.world.vm_registry import Health

STEPS_KEPT = 32
STEPS_NEEDED = 8
"""A median over fewer steps would reflect the moment, not the machine."""


@dataclass(kw_only=True)
class _Rank:
    step: int = 0
    """The newest that was recorded, because heartbeats repeat steps."""
    steps: int = 0
    """Since the last look."""
    timed_steps: int = 0
    """Those of them with times: a step has none where the rank ran no whole micro-batch."""
    micro_batch_us: deque[int] = field(default_factory=lambda: deque(maxlen=STEPS_KEPT))

    @property
    def is_known(self) -> bool:
        """Whether it is known what its micro-batches take, or that it has nothing to time."""
        return self.timed_steps >= STEPS_NEEDED or (self.steps >= STEPS_NEEDED and not self.timed_steps)


@dataclass(frozen=True, kw_only=True)
class MicroBatchTimes:
    """Forward and backward of a micro-batch, over the last STEPS_KEPT steps."""

    steps: int
    """At most STEPS_KEPT."""
    median_us: float
    mad_us: float
    """Median absolute deviation."""


def _make_times(micro_batch_us: Sequence[int]) -> MicroBatchTimes:
    usual = median(micro_batch_us)
    return MicroBatchTimes(
        steps=len(micro_batch_us), median_us=usual, mad_us=median(abs(us - usual) for us in micro_batch_us)
    )


class ComputeTimes:
    """By VM, because an agent's reports of workers on other VMs do not count."""

    def __init__(self) -> None:
        self._vms: dict[str, dict[tuple[str, int, int], _Rank]] = {}

    def record_workers(self, vm_id: str, workers: Iterable[Health]) -> None:
        """Record the workers of a VM's heartbeat, and drop what is known of its other workers."""
        before, now = self._vms.get(vm_id, {}), {}
        for worker in workers:
            rank = before.get(worker.key)
            if not worker.step and rank is None:
                continue  # nothing trained yet
            now[worker.key] = rank = rank or _Rank()
            if worker.step > rank.step:
                rank.step = worker.step
                rank.steps += 1
                if worker.forward_us:
                    rank.timed_steps += 1
                    rank.micro_batch_us.append(worker.forward_us + worker.backward_us)
        if now:
            self._vms[vm_id] = now
        else:
            self._vms.pop(vm_id, None)

    def collect_times(
        self, job_id: str, generation: int, vm_ids: Sequence[str]
    ) -> Mapping[int, MicroBatchTimes] | None:
        """The times of each rank that has some; None until every rank has reported STEPS_NEEDED steps since the last
        call.

        `vm_ids`: by rank.
        """
        known: dict[int, _Rank] = {}
        for number, vm_id in enumerate(vm_ids):
            rank = self._vms.get(vm_id, {}).get((job_id, generation, number))
            if rank is None or not rank.is_known:
                return None
            known[number] = rank
        timed = {number: _make_times(rank.micro_batch_us) for number, rank in known.items() if rank.timed_steps}
        if not timed:
            return None
        for rank in known.values():
            rank.steps = rank.timed_steps = 0
        return timed

    def forget_job(self, job_id: str) -> None:
        """Start the job over, because its recorded times have been used."""
        self._keep(lambda of: of != job_id)

    def keep_only(self, job_ids: Set[str]) -> None:
        """Drop all jobs but these, which still run."""
        self._keep(lambda of: of in job_ids)

    def _keep(self, is_kept: Callable[[str], bool]) -> None:
        kept = {vm_id: {key: rank for key, rank in of.items() if is_kept(key[0])} for vm_id, of in self._vms.items()}
        self._vms = {vm_id: of for vm_id, of in kept.items() if of}
