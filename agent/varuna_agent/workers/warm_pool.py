"""All warmed processes of a VM, one for each kind of worker.

The first worker of a kind is forked from its process, too, so that no process does imports beside a running worker.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from pathlib import Path

import structlog

from varuna_agent.state import WorkerKey
from varuna_agent.workers.warm_process import Recipe, WarmProcess

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


class WarmPool:
    """The warmed processes of a VM. One without workers ends after a while, or when another kind is needed.

    Args:
        keep_s: time for which a process without workers is kept.
        on_change: called with the jobs whose workers would have to wait for a process that is not ready, and with the
            jobs whose workers would start at once, when these change.
    """

    def __init__(self, keep_s: float, on_change: Callable[[frozenset[str], frozenset[str]], None]) -> None:
        self._keep_s = keep_s
        self._on_change = on_change
        self._reported: tuple[frozenset[str], frozenset[str]] = (frozenset(), frozenset())
        self._all: list[WarmProcess] = []
        self._failed: deque[Recipe] = deque(maxlen=16)
        """Recipes that cannot be warmed, because an import starts a thread, say. They are not tried again."""

    @property
    def job_ids(self) -> frozenset[str]:
        """The jobs whose workers would start at once."""
        return frozenset(job_id for warm in self._all if warm.is_ready for job_id in warm.job_ids)

    @property
    def all_job_ids(self) -> frozenset[str]:
        """The jobs for which a process is kept here, ready or not."""
        return frozenset(job_id for warm in self._all for job_id in warm.job_ids)

    def keep_process(self, job_id: str, recipe: Recipe, log: Path) -> WarmProcess | None:
        """The warmed process for such workers, started if there is none; None if it cannot be warmed.

        The pool keeps it for `keep_s` from now on, and while it has workers. Returns at once.
        """
        if recipe in self._failed:
            return None
        warm = next((warm for warm in self._all if warm.recipe == recipe and not warm.is_over), None)
        if warm is None:
            for other in self._all:
                if not other.workers:
                    other.close()  # two would hold twice the memory
            try:
                warm = WarmProcess(recipe)
            except OSError as error:
                _log.warning("no warmed process", job=job_id, reason=str(error))
                return None
            self._all.append(warm)
            warm.task = asyncio.create_task(self._run(warm, log), name="warmed process")
        self._restart_idle_timer(warm)
        warm.job_ids.add(job_id)
        self._report_change()
        return warm

    def release_worker(self, key: WorkerKey) -> None:
        """The worker has ended or was never forked."""
        for warm in self._all:
            if key in warm.workers:
                warm.workers.discard(key)
                self._restart_idle_timer(warm)

    def rename_worker(self, key: WorkerKey, successor: WorkerKey) -> None:
        """A worker's process is another worker from now on."""
        for warm in self._all:
            if key in warm.workers:
                warm.workers.discard(key)
                warm.workers.add(successor)

    def end_process_of(self, key: WorkerKey) -> None:
        """End the process that forked the worker, and with it all its descendants."""
        for warm in self._all:
            if key in warm.workers:
                warm.close()

    async def close(self) -> None:
        """End all processes and wait until they are gone."""
        for warm in self._all:
            warm.close()
        await asyncio.gather(*(warm.task for warm in self._all if warm.task is not None))

    async def _run(self, warm: WarmProcess, log: Path) -> None:
        try:
            await warm.run(log, self._report_change)
        finally:
            self._all.remove(warm)
            if warm.has_failed:
                _log.warning("workers cannot start from a warmed process", jobs=sorted(warm.job_ids), see=str(log))
                self._failed.append(warm.recipe)
            self._report_change()

    def _report_change(self) -> None:
        making = (warm for warm in self._all if not (warm.is_ready or warm.is_over))
        job_ids = frozenset(job_id for warm in making for job_id in warm.job_ids), self.job_ids
        if job_ids != self._reported:
            self._reported = job_ids
            self._on_change(*job_ids)

    def _restart_idle_timer(self, warm: WarmProcess) -> None:
        """Keep the process for another `keep_s`; after that without workers it ends, so that its memory is free."""
        if warm.idle_timer is not None:
            warm.idle_timer.cancel()
        warm.idle_timer = asyncio.get_running_loop().call_later(self._keep_s, self._end_if_idle, warm)

    def _end_if_idle(self, warm: WarmProcess) -> None:
        if warm.workers:
            return  # the end of the last worker restarts the timer
        if warm.is_ready or warm.is_over:
            warm.close()
        else:
            self._restart_idle_timer(warm)  # a slow disk: it is still starting
