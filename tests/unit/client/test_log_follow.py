"""What a follower of logs emits: when a job ends, of many ranks, and of a log that is emptied."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, cast

import pytest

from varuna_client.following.log_follow import LogFollower
from varuna_client.rest.calls import LogChunk
from varuna_client.rest.client import AsyncClient
from waiting import DEADLINE_S

FAILED_ALIKE = {"cause": "script_failed", "exit_code": 7, "error": "last words"}
STOPPED = {"cause": "generation_ended", "exit_code": -9, "error": ""}


class EndedJob:
    """The manager's answers about a job that has failed, by what its ranks wrote and how they ended."""

    def __init__(self, logs: list[bytes], ends: list[dict[str, Any]]) -> None:
        self._logs, self._ends = logs, ends

    async def newest_events(self, job_id: str, limit: int) -> list[Any]:
        return []

    async def job(self, job_id: str) -> dict[str, Any]:
        return {"state": "failed", "generation": 1}

    async def generation(self, job_id: str, number: int) -> dict[str, Any]:
        return {
            "number": 1,
            "state": "ended",
            "workers": [{"rank": rank, **end} for rank, end in enumerate(self._ends)],
        }

    async def log_chunk(self, job_id: str, *, generation: int, rank: int, offset: int, wait_s: float) -> LogChunk:
        log = self._logs[rank]
        data = log[offset : offset + 16]  # several chunks
        end = offset + len(data)
        return LogChunk(data=data, generation=1, rank=rank, offset=offset, next_offset=end, size=len(log))

    async def stream(self, job_id: str, after: int) -> AsyncIterator[Any]:
        return
        yield


@pytest.mark.parametrize(
    ("logs", "expected"),
    [
        # The manager stopped rank 0 between its last words and its exit: the same failure is not printed again.
        ([b"last words\n", b"last words\n"], b"last words\n"),
        ([b"one\nlast wo", b"one\nlast words\n"], b"one\nlast wolast words\n"),
        ([b"a line of some length\nanother of rank 0\n", b"a line of some length\nfailed\n"],
         b"a line of some length\nanother of rank 0\nfailed\n"),
        ([b"", b"failed\n"], b"failed\n"),
    ],
)  # fmt: skip
async def test_the_failed_ranks_log_comes_without_what_rank_0s_began_with(logs: list[bytes], expected: bytes) -> None:
    client = cast("AsyncClient", EndedJob(logs, [STOPPED, FAILED_ALIKE]))
    chunks = [chunk.data async for chunk in LogFollower(client, "j", None, None).follow_chunks()]
    assert b"".join(chunks) == expected


class SecondGeneration(EndedJob):
    """A job that was cancelled in its second generation; `logs` has rank 0's of both."""

    async def job(self, job_id: str) -> dict[str, Any]:
        return {"state": "cancelled", "generation": 2}

    async def log_chunk(self, job_id: str, *, generation: int, rank: int, offset: int, wait_s: float) -> LogChunk:
        chunk = await super().log_chunk(job_id, generation=generation, rank=generation - 1, offset=offset, wait_s=0)
        return replace(chunk, generation=generation, rank=rank)


@pytest.mark.parametrize(("from_first", "expected"), [(False, [(2, b"two")]), (True, [(1, b"one"), (2, b"two")])])
async def test_a_follower_starts_at_the_newest_generation_or_at_the_first(
    from_first: bool, expected: list[tuple[int, bytes]]
) -> None:
    client = cast("AsyncClient", SecondGeneration([b"one", b"two"], []))
    follower = LogFollower(client, "j", 0, None, from_first=from_first)
    assert [(chunk.generation, chunk.data) async for chunk in follower.follow_chunks()] == expected


class ManyRanks:
    """A job with 300 ranks, each of which has written a line; it succeeds once all were read."""

    def __init__(self) -> None:
        self._ranks = range(300)
        self._read: set[int] = set()
        self._have_all = asyncio.Event()
        self._open = 0
        self.most_open = 0

    async def newest_events(self, job_id: str, limit: int) -> list[Any]:
        return []

    async def job(self, job_id: str) -> dict[str, Any]:
        return {"state": "succeeded" if self._have_all.is_set() else "running", "generation": 1}

    async def generation(self, job_id: str, number: int) -> dict[str, Any]:
        return {"placement": [{"rank": rank} for rank in self._ranks]}

    async def log_chunk(self, job_id: str, *, generation: int, rank: int, offset: int, wait_s: float) -> LogChunk:
        self._open += 1
        self.most_open = max(self.most_open, self._open)
        try:
            line = f"rank {rank}\n".encode()
            await asyncio.sleep(0.0 if offset < len(line) else wait_s)
            self._read.add(rank)
            if len(self._read) == len(self._ranks):
                self._have_all.set()
            data = line[offset:]
            return LogChunk(
                data=data, generation=1, rank=rank, offset=offset, next_offset=offset + len(data), size=len(line)
            )
        finally:
            self._open -= 1

    async def stream(self, job_id: str, after: int) -> AsyncIterator[Any]:
        await self._have_all.wait()
        yield "event", {"kind": "job_succeeded", "generation": 1}


async def test_of_many_ranks_each_is_followed_with_few_requests_at_a_time() -> None:
    job = ManyRanks()
    follower = LogFollower(cast("AsyncClient", job), "j", "all", None)
    async with asyncio.timeout(DEADLINE_S):
        lines = [chunk.data async for chunk in follower.follow_chunks()]
    assert sorted(lines) == sorted(f"rank {rank}\n".encode() for rank in range(300))
    assert job.most_open <= 50


class EmptiedLog(EndedJob):
    """A log that the agent emptied after it was read, because it had become too long."""

    async def log_chunk(self, job_id: str, *, generation: int, rank: int, offset: int, wait_s: float) -> LogChunk:
        if offset >= len(b"before it was emptied\n"):
            self._logs = [b"after it\n"]
        size = len(self._logs[0])
        offset = min(offset, size)
        data = self._logs[0][offset:]
        return LogChunk(data=data, generation=1, rank=0, offset=offset, next_offset=offset + len(data), size=size)


async def test_a_log_that_was_emptied_is_followed_from_its_beginning() -> None:
    client = cast("AsyncClient", EmptiedLog([b"before it was emptied\n"], []))
    chunks = [chunk.data async for chunk in LogFollower(client, "j", 0, None).follow_chunks()]
    assert b"".join(chunks) == b"before it was emptied\nafter it\n"
