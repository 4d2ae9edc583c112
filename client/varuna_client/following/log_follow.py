"""Follows workers' logs, each by long polls that start where the last response ended.

The manager's event stream announces new logs and when they are complete.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from varuna_client.errors import NotFoundError, RefusedError, UnreachableError
from varuna_client.following.follow import END_KINDS, find_failed_rank, is_event
from varuna_client.rest.calls import LogChunk
from varuna_client.rest.client import AsyncClient
from varuna_proto.rest import END_STATES, GenerationDocument

_POLL_S = 20.0
_PAUSE_S = 0.5
"""The pause while a log cannot be read: its worker has not begun, or its VM is unreachable."""
_AT_ONCE = 50
"""Requests: a manager takes a few hundred connections of one address. With more logs than that none of them waits for
what is not written yet."""
_ROUND_PAUSE_S = 2.0
"""The pause after an empty answer then."""
_HEAD_BYTES = 256 * 1024
"""How much of rank 0's log is kept, to leave out the lines with which the failed rank's log begins too."""
ALL = "all"
Ranks = int | str | None
"""One rank, ALL ranks, or None: rank 0 and, when the job fails, the rank whose script failed."""


@dataclass(frozen=True, kw_only=True)
class _Tail:
    """A followed log; it ends when `over` is set and all of it is delivered."""

    generation: int
    rank: int
    over: asyncio.Event = field(default_factory=asyncio.Event)


class LogFollower:
    """Follows the logs of a job's `ranks` in one generation, or in all from the current one on.

    `from_first`: without a generation, those before the current one come first.
    """

    def __init__(
        self, client: AsyncClient, job_id: str, ranks: Ranks, generation: int | None, *, from_first: bool = False
    ) -> None:
        self._client = client
        self._job_id = job_id
        self._ranks = ranks
        self._only = generation
        self._from_first = from_first
        self._chunks: asyncio.Queue[LogChunk | None] = asyncio.Queue(64)
        self._tails: dict[_Tail, asyncio.Task[None]] = {}
        self._gate = asyncio.Semaphore(_AT_ONCE)
        self._head: tuple[int, bytes] = (0, b"")
        """The last generation whose rank 0 was followed, and the beginning of that log."""

    async def follow_chunks(self) -> AsyncIterator[LogChunk]:
        """Yield parts of the logs, each rank's in order. Raises the client's errors."""
        leading = asyncio.create_task(self._run_tails())
        try:
            while (chunk := await self._chunks.get()) is not None:
                yield chunk
            await leading
        finally:
            for task in (leading, *self._tails.values()):
                task.cancel()
            await asyncio.gather(leading, *self._tails.values(), return_exceptions=True)

    async def _run_tails(self) -> None:
        try:
            await self._follow_generations()
            await self._end_tails()
            if self._ranks is None:
                await self._follow_failure()
        except Exception:
            await self._chunks.put(None)
            raise
        await self._chunks.put(None)

    async def _follow_generations(self) -> None:
        """Start a tail for each log, until no further log can appear."""
        newest = await self._client.newest_events(self._job_id, limit=1)
        job = await self._client.job(self._job_id)
        at = self._only or job["generation"]
        if self._from_first and self._only is None:
            for earlier in range(1, at or 1):
                await self._start(earlier)
                await self._end_tails()
        if at is not None:
            await self._start(at)
        if job["state"] in END_STATES or (self._only is not None and await self._is_over(self._only)):
            return
        async for item in self._client.stream(self._job_id, after=max((e["id"] for e in newest), default=0)):
            if not is_event(item):
                continue
            kind, number = item[1]["kind"], item[1]["generation"]
            if kind == "generation_started" and self._only is None and number is not None and number > (at or 0):
                await self._end_tails()
                await self._start(number)
                at = number
            is_last = kind == "generation_ended" and self._only is not None and number == self._only
            if is_last or (kind in END_KINDS and (await self._client.job(self._job_id))["state"] in END_STATES):
                return

    async def _is_over(self, number: int) -> bool:
        return (await self._client.generation(self._job_id, number))["state"] == "ended"

    async def _start(self, number: int) -> None:
        for rank in await self._ranks_of(number):
            tail = _Tail(generation=number, rank=rank)
            self._tails[tail] = asyncio.create_task(self._follow(tail))

    async def _ranks_of(self, number: int) -> list[int]:
        if self._ranks != ALL:
            return [self._ranks if isinstance(self._ranks, int) else 0]
        generation: GenerationDocument = await self._client.generation(self._job_id, number)
        return [place["rank"] for place in generation["placement"]]

    async def _end_tails(self) -> None:
        """End the tails after they have delivered the rest of their logs."""
        for tail in self._tails:
            tail.over.set()
        await asyncio.gather(*self._tails.values())
        self._tails.clear()

    async def _follow_failure(self) -> None:
        """Deliver the log of the rank that made a job fail, without the lines that rank 0's log began with.

        Ranks of one script write similar lines, and the manager may have stopped rank 0 just before the same failure.
        """
        job = await self._client.job(self._job_id)
        if job["state"] != "failed" or job["generation"] is None:
            return
        number = self._only or job["generation"]
        rank = find_failed_rank([await self._client.generation(self._job_id, number)], number)
        if rank:
            tail = _Tail(generation=number, rank=rank)
            tail.over.set()
            await self._follow(tail, await self._measure_common_lines(tail))

    async def _measure_common_lines(self, tail: _Tail) -> int:
        """The bytes of the whole lines with which both this log and rank 0's of the same generation begin."""
        generation, head = self._head
        log = b""
        while generation == tail.generation and len(log) < len(head):
            chunk = await self._next(tail, len(log), 0.0)
            if chunk is None or not chunk.data or chunk.offset != len(log):
                break
            log += chunk.data
        pairs = zip(head.splitlines(keepends=True), log.splitlines(keepends=True), strict=False)
        return sum(len(line) for line, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

    def _keep_head(self, chunk: LogChunk) -> None:
        generation, head = self._head
        if chunk.generation != generation:
            head = b""
        if chunk.offset == len(head) < _HEAD_BYTES:
            self._head = (chunk.generation, head + chunk.data[: _HEAD_BYTES - len(head)])

    async def _follow(self, tail: _Tail, offset: int = 0) -> None:
        while True:
            was_over, are_many = tail.over.is_set(), len(self._tails) > _AT_ONCE
            chunk = await self._next(tail, offset, 0.0 if was_over or are_many else _POLL_S)
            if chunk is not None and chunk.size < offset:
                offset = 0  # the log was too long, and was emptied
            elif chunk is not None and chunk.data:
                offset = chunk.next_offset
                if self._ranks is None and tail.rank == 0:
                    self._keep_head(chunk)
                await self._chunks.put(chunk)
            elif was_over:
                return
            elif chunk is None or are_many:
                await _until(tail.over, _PAUSE_S if chunk is None else _ROUND_PAUSE_S)

    async def _next(self, tail: _Tail, offset: int, wait_s: float) -> LogChunk | None:
        """Read the next part; None: it cannot be read now, or its tail is over."""
        reading = asyncio.create_task(self._read(tail, offset, wait_s))
        over = asyncio.create_task(tail.over.wait())
        try:
            await asyncio.wait({reading, over} if wait_s else {reading}, return_when=asyncio.FIRST_COMPLETED)
            return reading.result() if reading.done() else None
        except NotFoundError:
            tail.over.set()  # this generation has no such rank
            return None
        except (RefusedError, UnreachableError):
            return None
        finally:
            reading.cancel()
            over.cancel()

    async def _read(self, tail: _Tail, offset: int, wait_s: float) -> LogChunk:
        """Raises the client's errors."""
        async with self._gate:
            return await self._client.log_chunk(
                self._job_id, generation=tail.generation, rank=tail.rank, offset=offset, wait_s=wait_s
            )


async def _until(over: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(over.wait(), seconds)
