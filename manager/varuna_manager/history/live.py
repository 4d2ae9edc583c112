"""Live events and progress of jobs, for many followers.

The log is read once for all followers. Each has a bounded queue. One that falls behind reads the log again from its
position, so that it costs no memory. A job's newer progress replaces the older.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, field

from varuna_manager.answers.documents import format_time
from varuna_manager.db.engine import StoreAwayError
from varuna_manager.db.models import EventRow
from varuna_manager.history.documents import make_event_document
from varuna_manager.history.event_list import EventList
from varuna_manager.jobs.step_rates import StepRate
from varuna_manager.world.bell import wait
from varuna_manager.world.events import EventLog
from varuna_proto.rest import ProgressDocument

_QUEUE = 1000
_PAGE = 500
_PROGRESS_EACH_S = 1.0
_AWAY_S = 1.0
KEEP_ALIVE_S = 15.0


class ProgressBoard:
    """The newest stored step of each job."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._news: dict[str, ProgressDocument] = {}
        self.is_watched = False

    def record_step(self, job_id: str, generation: int, step: int, *, loss: float | None, rate: StepRate) -> None:
        """`loss`: the step's; None if it is not a number. `rate`: the generation's."""
        if self.is_watched:
            self._news[job_id] = {
                "job_id": job_id,
                "generation": generation,
                "step": step,
                "loss": loss,
                "step_s": rate.step_s,
                "between_s": rate.between_s,
                "examples_per_s": rate.examples_per_s,
                "rate_steps": rate.steps,
                "at": format_time(self._now()),
            }

    def set_watched(self, watched: bool) -> None:
        """`watched`: whether there are followers."""
        self.is_watched = watched
        self._news = {}

    def pop_news(self) -> dict[str, ProgressDocument]:
        """The steps since the last call, by job."""
        news, self._news = self._news, {}
        return news


@dataclass(frozen=True)
class FeedMessage:
    """One message to a follower. `event` is part of the stream's protocol: a kind of event, or `progress`."""

    id: int | None
    event: str
    job_id: str | None
    data: str
    """JSON."""


@dataclass(eq=False)
class _Follower:
    job_id: str | None
    queue: deque[FeedMessage] = field(default_factory=deque)
    progress: dict[str, FeedMessage] = field(default_factory=dict)
    has_missed: bool = False
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def wants_job(self, job_id: str | None) -> bool:
        return self.job_id is None or job_id == self.job_id

    def queue_message(self, message: FeedMessage, bound: int) -> None:
        # Nothing is queued after a gap: the follower reads the log from before it.
        self.has_missed = self.has_missed or len(self.queue) >= bound
        if not self.has_missed:
            self.queue.append(message)
        self.news.set()


class LiveFeed:
    """`close` it at the end."""

    def __init__(self, events: EventLog, past: EventList, board: ProgressBoard, *, queue: int = _QUEUE) -> None:
        self._events = events
        self._past = past
        self._board = board
        self._pumps = asyncio.Event()
        """Whether new events arrive through the queues from now on."""
        self._queue = queue
        self._followers: set[_Follower] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._is_over = False

    async def stream_messages(
        self, after: int, job_id: str | None = None, *, keep_alive_s: float = KEEP_ALIVE_S
    ) -> AsyncGenerator[FeedMessage | None, None]:
        """Every event after number `after`, past and future, and progress; None after each `keep_alive_s` of silence.

        With `job_id`: only what concerns that job. Ends when the manager stops leading.
        """
        follower = _Follower(job_id)
        self._join(follower)
        try:
            follower.has_missed = True  # the events that are in the log already
            await self._pumps.wait()
            while not self._is_over:
                follower.news.clear()
                if follower.has_missed:
                    follower.has_missed = False
                    follower.queue.clear()
                    async for message in self._from_log(after, job_id):
                        after = message.id or after
                        yield message
                has_sent = False
                while follower.queue:
                    message = follower.queue.popleft()
                    if message.id is not None and message.id > after:
                        after, has_sent = message.id, True
                        yield message
                while follower.progress:
                    has_sent = True
                    yield follower.progress.pop(next(iter(follower.progress)))
                if not has_sent and not self._is_over and not await wait(follower.news, keep_alive_s):
                    yield None
        finally:
            self._leave(follower)

    def close(self) -> None:
        """End every follower."""
        self._is_over = True
        for follower in self._followers:
            follower.news.set()
        self._stop()

    async def _from_log(self, after: int, job_id: str | None) -> AsyncIterator[FeedMessage]:
        while rows := await self._events.list_events_after(after, job_id=job_id, limit=_PAGE):
            for row in rows:
                after = row.id
                yield await self._make_message(row)

    def _join(self, follower: _Follower) -> None:
        if not self._followers and not self._is_over:
            self._board.set_watched(True)
            self._tasks = [asyncio.create_task(self._pump()), asyncio.create_task(self._pump_progress())]
        self._followers.add(follower)

    def _leave(self, follower: _Follower) -> None:
        self._followers.discard(follower)
        if not self._followers:
            self._stop()

    def _stop(self) -> None:
        self._board.set_watched(False)
        if self._is_over:
            self._pumps.set()
        else:
            self._pumps.clear()
        for task in self._tasks:
            task.cancel()
        self._tasks = []

    async def _pump(self) -> None:
        """Pass on new events of the log; each follower reads older ones itself."""
        after: int | None = None
        while not self._is_over:
            try:
                if after is None:
                    after = await self._past.find_newest_id()
                self._pumps.set()
                async for row in self._events.follow_events(after):
                    if row is not None:
                        after = row.id
                        self._push(await self._make_message(row))
                self.close()  # the log has ended: the manager stops
            except StoreAwayError:
                await asyncio.sleep(_AWAY_S)

    def _push(self, message: FeedMessage) -> None:
        for follower in self._followers:
            if follower.wants_job(message.job_id):
                follower.queue_message(message, self._queue)

    async def _pump_progress(self) -> None:
        while True:
            await asyncio.sleep(_PROGRESS_EACH_S)
            for job_id, news in self._board.pop_news().items():
                message = FeedMessage(None, "progress", job_id, json.dumps(news))
                for follower in self._followers:
                    if follower.wants_job(job_id):
                        follower.progress[job_id] = message
                        follower.news.set()

    async def _make_message(self, row: EventRow) -> FeedMessage:
        document = make_event_document(row, await self._past.find_job_name(row.job_id))
        return FeedMessage(row.id, row.kind, row.job_id, json.dumps(document))
