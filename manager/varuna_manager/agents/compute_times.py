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
    timed_steps: int = 0
    """Since the last look. A step has no times where the rank ran no whole micro-batch."""
    untimed_steps: int = 0
    """Since the last one with times."""
    micro_batch_us: deque[int] = field(default_factory=lambda: deque(maxlen=STEPS_KEPT))

    def record_step(self, step: int, micro_batch_us: int) -> None:
        """`micro_batch_us`: 0 where the step has no times."""
        self.step = step
        if micro_batch_us:
            self.untimed_steps = 0
            self.timed_steps += 1
            self.micro_batch_us.append(micro_batch_us)
        else:
            self.untimed_steps += 1
            if self.has_nothing_to_time:  # what it timed before was in another share
                self.timed_steps = 0
                self.micro_batch_us.clear()

    @property
    def has_enough(self) -> bool:
        return self.timed_steps >= STEPS_NEEDED

    @property
    def has_nothing_to_time(self) -> bool:
        return self.untimed_steps >= STEPS_NEEDED


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
                rank.record_step(worker.step, worker.forward_us + worker.backward_us if worker.forward_us else 0)
        if now:
            self._vms[vm_id] = now
        else:
            self._vms.pop(vm_id, None)

    def collect_times(
        self, job_id: str, generation: int, vm_ids: Sequence[str]
    ) -> Mapping[int, MicroBatchTimes] | None:
        """The times of each rank that has some; None until every rank has reported STEPS_NEEDED steps with times since
        the last call, or as many in a row without any.

        `vm_ids`: by rank.
        """
        timed: dict[int, _Rank] = {}
        for number, vm_id in enumerate(vm_ids):
            rank = self._vms.get(vm_id, {}).get((job_id, generation, number))
            if rank is None or not (rank.has_enough or rank.has_nothing_to_time):
                return None
            if rank.has_enough:
                timed[number] = rank
        if not timed:
            return None
        for rank in timed.values():
            rank.timed_steps = 0
        return {number: _make_times(rank.micro_batch_us) for number, rank in timed.items()}

    def forget_job(self, job_id: str) -> None:
        """Start the job over, because its recorded times have been used."""
        self._keep(lambda of: of != job_id)

    def keep_only(self, job_ids: Set[str]) -> None:
        """Drop all jobs but these, which still run."""
        self._keep(lambda of: of in job_ids)

    def _keep(self, is_kept: Callable[[str], bool]) -> None:
        kept = {vm_id: {key: rank for key, rank in of.items() if is_kept(key[0])} for vm_id, of in self._vms.items()}
        self._vms = {vm_id: of for vm_id, of in kept.items() if of}
