"""The folders of jobs that are being made ready on this VM: one at a time, for as long as the manager wants them."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from varuna_agent.state.stimuli import CancelPrepare, Instruction, KeepFolders, Prepare
from varuna_proto.v1 import agent_pb2


class Preparations:
    """Part of `AgentState`: every method returns what is to be done, in order."""

    def __init__(self) -> None:
        self._waiting: dict[str, agent_pb2.Prepare] = {}
        self._under_way = ""
        self._is_cancelled = False
        self._ready: set[str] = set()

    @property
    def ready(self) -> frozenset[str]:
        """Ids of the jobs whose folder is there."""
        return frozenset(self._ready)

    @property
    def unfinished(self) -> frozenset[str]:
        """Ids of the jobs whose folder is being made ready, or waits for its turn."""
        under_way = {self._under_way} if self._under_way and not self._is_cancelled else set()
        return frozenset(under_way | self._waiting.keys())

    def request(self, wish: agent_pb2.Prepare) -> Iterator[Instruction]:
        """The job's folder is wanted, or a process with its imports done where there is nothing to make ready."""
        if not (wish.archive or wish.setup):
            yield Prepare(wish)
        elif wish.job_id not in self.unfinished:
            self._waiting[wish.job_id] = wish
            yield from self._begin_next()

    def finish(self, job_id: str, *, is_ready: bool) -> Iterator[Instruction]:
        """The preparation of the job has ended, as was told to be done or because it was cancelled."""
        if is_ready and not self._is_cancelled:
            self._ready.add(job_id)
        else:
            self._ready.discard(job_id)
        self._under_way, self._is_cancelled = "", False
        yield from self._begin_next()

    def is_wanted(self, job_id: str) -> bool:
        """Whether the preparation of the job that is under way was not cancelled."""
        return job_id == self._under_way and not self._is_cancelled

    def keep_only(self, job_ids: Collection[str]) -> Iterator[Instruction]:
        """Forget what was prepared for other jobs, and cancel what is not done yet."""
        self._ready &= set(job_ids)
        self._waiting = {job_id: wish for job_id, wish in self._waiting.items() if job_id in job_ids}
        if self._under_way and self._under_way not in job_ids and not self._is_cancelled:
            self._is_cancelled = True
            yield CancelPrepare(self._under_way)
        yield KeepFolders(frozenset(job_ids))

    def _begin_next(self) -> Iterator[Instruction]:
        if not self._under_way and self._waiting:
            self._under_way = next(iter(self._waiting))
            yield Prepare(self._waiting.pop(self._under_way))
