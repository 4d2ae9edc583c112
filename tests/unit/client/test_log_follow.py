"""What a follower of logs emits at the end of a job that failed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, cast

import pytest

from varuna_client.following.log_follow import LogFollower
from varuna_client.rest.calls import LogChunk
from varuna_client.rest.client import AsyncClient

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
