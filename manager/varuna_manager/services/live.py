"""What happens, as it happens, to many followers: the events, and how far each job is.

The log is read once for all followers. Each has a queue of its own with a bound: one that falls behind reads the log
again from where it is, so that it costs no memory. How far a job is replaces what was said before.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, field

from varuna_manager.db.engine import StoreAwayError
from varuna_manager.db.models import EventRow
from varuna_manager.services import documents
from varuna_manager.services.bell import wait
from varuna_manager.services.documents import Document
from varuna_manager.services.event_list import EventList
from varuna_manager.services.events import EventLog
from varuna_proto.v1 import agent_pb2 as pb

_QUEUE = 1000
_PAGE = 500
_PROGRESS_EACH_S = 1.0
_AWAY_S = 1.0
KEEP_ALIVE_S = 15.0


class ProgressBoard:
    """How far each job is: the newest step that was stored."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._news: dict[str, Document] = {}
        self._is_watched = False

    def note(self, job_id: str, generation: int, step: pb.StepResult, loss: float | None) -> None:
        """`loss`: the step's, None where it is no number."""
        if self._is_watched:
            self._news[job_id] = {
                "job_id": job_id,
                "generation": generation,
                "step": step.step,
                "loss": loss,
                "step_s": step.step_us / 1e6,
                "examples_per_s": step.examples / step.step_us * 1e6 if step.step_us else None,
                "at": documents.iso(self._now()),
            }

    def watch(self, watched: bool) -> None:
        """Whether anybody wants to know."""
        self._is_watched = watched
        self._news = {}

    def take(self) -> dict[str, Document]:
        """What came since it was last asked, by job."""
        news, self._news = self._news, {}
        return news


@dataclass(frozen=True)
class Told:
    """One thing for a follower. `event` is of the stream's protocol: a kind of event, or `progress`."""

    id: int | None
    event: str
    job_id: str | None
    data: str
    """JSON."""


@dataclass(eq=False)
class _Follower:
    job_id: str | None
    queue: deque[Told] = field(default_factory=deque)
    progress: dict[str, Told] = field(default_factory=dict)
    has_missed: bool = False
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def wants(self, job_id: str | None) -> bool:
        return self.job_id is None or job_id == self.job_id

    def push(self, told: Told, bound: int) -> None:
        # Nothing is put behind a gap: whoever has one reads the log from before it.
        self.has_missed = self.has_missed or len(self.queue) >= bound
        if not self.has_missed:
            self.queue.append(told)
        self.news.set()


class LiveFeed:
    """`close` it at the end."""

    def __init__(self, events: EventLog, past: EventList, board: ProgressBoard, *, queue: int = _QUEUE) -> None:
        self._events = events
        self._past = past
        self._board = board
        self._pumps = asyncio.Event()
        """Whether what is written from now on comes by the queues."""
        self._queue = queue
        self._followers: set[_Follower] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._is_over = False

    async def follow(
        self, after: int, job_id: str | None = None, *, keep_alive_s: float = KEEP_ALIVE_S
    ) -> AsyncGenerator[Told | None, None]:
        """Every event after number `after`, past and to come, and progress; None each `keep_alive_s` of silence.

        With `job_id`: what is about that job. Ends when the manager stops leading.
        """
        follower = _Follower(job_id)
        self._join(follower)
        try:
            follower.has_missed = True  # what is in the log already
            await self._pumps.wait()
            while not self._is_over:
                follower.news.clear()
                if follower.has_missed:
                    follower.has_missed = False
                    follower.queue.clear()
                    async for told in self._from_log(after, job_id):
                        after = told.id or after
                        yield told
                told_any = False
                while follower.queue:
                    told = follower.queue.popleft()
                    if told.id is not None and told.id > after:
                        after, told_any = told.id, True
                        yield told
                while follower.progress:
                    told_any = True
                    yield follower.progress.pop(next(iter(follower.progress)))
                if not told_any and not self._is_over and not await wait(follower.news, keep_alive_s):
                    yield None
        finally:
            self._leave(follower)

    def close(self) -> None:
        """End every follower."""
        self._is_over = True
        for follower in self._followers:
            follower.news.set()
        self._stop()

    async def _from_log(self, after: int, job_id: str | None) -> AsyncIterator[Told]:
        while rows := await self._events.after(after, job_id=job_id, limit=_PAGE):
            for row in rows:
                after = row.id
                yield _told(row)

    def _join(self, follower: _Follower) -> None:
        if not self._followers and not self._is_over:
            self._board.watch(True)
            self._tasks = [asyncio.create_task(self._pump()), asyncio.create_task(self._pump_progress())]
        self._followers.add(follower)

    def _leave(self, follower: _Follower) -> None:
        self._followers.discard(follower)
        if not self._followers:
            self._stop()

    def _stop(self) -> None:
        self._board.watch(False)
        if self._is_over:
            self._pumps.set()
        else:
            self._pumps.clear()
        for task in self._tasks:
            task.cancel()
        self._tasks = []

    async def _pump(self) -> None:
        """Pass on what is written to the log from now on; what came before, each follower reads itself."""
        after: int | None = None
        while not self._is_over:
            try:
                if after is None:
                    after = await self._past.newest()
                self._pumps.set()
                async for row in self._events.follow(after):
                    if row is not None:
                        after = row.id
                        self._push(_told(row))
                self.close()  # the log is: the manager is going away
            except StoreAwayError:
                await asyncio.sleep(_AWAY_S)

    def _push(self, told: Told) -> None:
        for follower in self._followers:
            if follower.wants(told.job_id):
                follower.push(told, self._queue)

    async def _pump_progress(self) -> None:
        while True:
            await asyncio.sleep(_PROGRESS_EACH_S)
            for job_id, news in self._board.take().items():
                told = Told(None, "progress", job_id, json.dumps(news))
                for follower in self._followers:
                    if follower.wants(job_id):
                        follower.progress[job_id] = told
                        follower.news.set()


def _told(row: EventRow) -> Told:
    return Told(row.id, row.kind, row.job_id, json.dumps(documents.event_document(row)))
