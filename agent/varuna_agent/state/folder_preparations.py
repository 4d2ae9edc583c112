"""Makes the folders of jobs ready on this VM, one at a time, while the manager wants them."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from varuna_agent.state.instructions import CancelPreparation, Instruction, KeepFolders, PrepareJob
from varuna_proto.v1 import agent_pb2


class FolderPreparations:
    """Part of `AgentState`: its methods return the instructions to carry out, in order."""

    def __init__(self) -> None:
        self._waiting: dict[str, agent_pb2.Prepare] = {}
        self._current = ""
        self._is_cancelled = False
        self._ready: set[str] = set()

    @property
    def ready(self) -> frozenset[str]:
        """Ids of the jobs whose folder is ready."""
        return frozenset(self._ready)

    @property
    def unfinished(self) -> frozenset[str]:
        """Ids of the jobs whose folder is being made ready, or waits for its turn."""
        current = {self._current} if self._current and not self._is_cancelled else set()
        return frozenset(current | self._waiting.keys())

    def add_request(self, request: agent_pb2.Prepare) -> Iterator[Instruction]:
        """Prepare the job's folder; where that needs no work, ask only for a warmed process."""
        if not (request.archive or request.setup):
            yield PrepareJob(request)
        elif request.job_id not in self.unfinished:
            self._waiting[request.job_id] = request
            yield from self._start_next()

    def end_preparation(self, job_id: str, *, is_ready: bool) -> Iterator[Instruction]:
        """The preparation of the job has ended by itself or because it was cancelled."""
        if is_ready and not self._is_cancelled:
            self._ready.add(job_id)
        else:
            self._ready.discard(job_id)
        self._current, self._is_cancelled = "", False
        yield from self._start_next()

    def is_current(self, job_id: str) -> bool:
        """Whether the preparation of the job that is under way was not cancelled."""
        return job_id == self._current and not self._is_cancelled

    def keep_only(self, job_ids: Collection[str]) -> Iterator[Instruction]:
        """Forget the folders of other jobs, and cancel their unfinished preparations."""
        self._ready &= set(job_ids)
        self._waiting = {job_id: request for job_id, request in self._waiting.items() if job_id in job_ids}
        if self._current and self._current not in job_ids and not self._is_cancelled:
            self._is_cancelled = True
            yield CancelPreparation(self._current)
        yield KeepFolders(frozenset(job_ids))

    def _start_next(self) -> Iterator[Instruction]:
        if not self._current and self._waiting:
            self._current = next(iter(self._waiting))
            yield PrepareJob(self._waiting.pop(self._current))
