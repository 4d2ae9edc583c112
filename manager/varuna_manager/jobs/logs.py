"""Logs of workers, fetched from the agent of their VM, or from the VM's folder when the VM is gone."""

from __future__ import annotations

import asyncio
import contextlib
import os
import uuid
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import select

from varuna_manager.agents.sessions import AgentSession, AgentSessions
from varuna_manager.answers.errors import MissingError, UnavailableError
from varuna_manager.db.engine import Database
from varuna_manager.db.models import GenerationRow, WorkerRow
from varuna_manager.jobs.jobs import find_job_row
from varuna_manager.jobs.line_search import LineSearch
from varuna_manager.providers.base import EmulatedProvider
from varuna_proto.rest import LogMatchesDocument
from varuna_proto.v1 import agent_pb2 as pb

MAX_BYTES = 1024 * 1024
_TIMEOUT_S = 10.0
MOST_SEARCHED = 64 * MAX_BYTES
MOST_WAIT_S = 30.0
_SEARCHES_AT_ONCE = 2
"""Searches that run at the same time. Others wait, so that the thread that answers heartbeats gets its share."""
_CHUNKS_WAITING = 64
"""More than an agent needs for MAX_BYTES."""


@dataclass(frozen=True, kw_only=True)
class LogPart:
    """A part of a worker's log."""

    generation: int
    rank: int
    data: bytes
    offset: int
    """The offset of the data in the log."""
    size: int
    """The size of the log when it was read."""

    @property
    def next_offset(self) -> int:
        return self.offset + len(self.data)


class LogService:
    def __init__(self, database: Database, sessions: AgentSessions, provider: EmulatedProvider | None) -> None:
        """`provider`: the provider whose VMs leave their logs on this machine; None: there is none."""
        self._database = database
        self._sessions = sessions
        self._provider = provider
        self._searching = asyncio.Semaphore(_SEARCHES_AT_ONCE)

    async def read_log(
        self,
        id_or_name: str,
        generation: int | None,
        rank: int,
        offset: int,
        *,
        limit: int = MAX_BYTES,
        wait_s: float = 0,
    ) -> LogPart:
        """At most `limit` bytes of a worker's log from `offset` on (negative: from the end).

        `generation` None: the newest. `wait_s`: how long to wait for data when there is none at `offset` yet.

        Raises MissingError, UnavailableError.
        """
        worker = await self._worker(id_or_name, generation, rank)
        return await self._read(worker, offset, limit, wait_s)

    async def search_log(
        self, id_or_name: str, generation: int | None, rank: int, text: str, *, limit: int, ignore_case: bool
    ) -> LogMatchesDocument:
        """The first `limit` lines that contain the text, in the log's first MOST_SEARCHED bytes.

        Raises MissingError, UnavailableError.
        """
        worker = await self._worker(id_or_name, generation, rank)
        search = LineSearch(text, limit, ignore_case=ignore_case)
        offset, is_whole = 0, False
        while offset < MOST_SEARCHED and not search.is_full:
            part = await self._read(worker, offset, MAX_BYTES, 0.0)
            if part.offset > offset:  # the VM no longer has what came before
                search.skip_to(part.offset)
            async with self._searching:
                await asyncio.to_thread(search.add_part, part.data)
            offset = part.next_offset
            if not part.data or offset >= part.size:
                search.end_last_line()
                is_whole = not search.is_full
                break
        return {
            "generation": worker.generation,
            "rank": worker.rank,
            "searched_bytes": offset,
            "complete": is_whole,
            "matches": search.matches,
        }

    async def _worker(self, id_or_name: str, generation: int | None, rank: int) -> WorkerRow:
        async with self._database.read() as session:
            job = await find_job_row(session, id_or_name)
            if generation is None:
                newest = select(GenerationRow.number).where(GenerationRow.job_id == job.id)
                generation = await session.scalar(newest.order_by(GenerationRow.number.desc()).limit(1))
            if generation is None:
                raise MissingError(f"job {id_or_name!r} has no generation yet, so it has no logs: it is {job.state}")
            worker = await session.get(WorkerRow, (job.id, generation, rank))
        if worker is None:
            raise MissingError(
                f"job {id_or_name!r} has no rank {rank} in generation {generation}: "
                f"varuna show {job.name} (GET /api/v1/jobs/{job.id}/generations) has those there are"
            )
        return worker

    async def _read(self, worker: WorkerRow, offset: int, limit: int, wait_s: float) -> LogPart:
        agent = self._sessions.get(worker.vm_id)
        if agent is not None:
            return await _fetch(agent, worker, offset, limit, wait_s)
        part = await self._read_folder(worker, offset, limit)
        if not part.data and wait_s:
            await asyncio.sleep(wait_s)  # no more data will come, but a client must not poll without a pause
        return part

    async def _read_folder(self, worker: WorkerRow, offset: int, limit: int) -> LogPart:
        if self._provider is None:
            raise UnavailableError(
                f"VM {worker.vm_id} of rank {worker.rank} is out of reach, so its log cannot be read"
            )
        path = self._provider.log_path(worker.vm_id, worker.job_id, worker.generation, worker.rank)
        try:
            at, data, size = await asyncio.to_thread(_read_file, path, offset, limit)
        except FileNotFoundError:
            raise UnavailableError(
                f"VM {worker.vm_id} of rank {worker.rank} is out of reach and left no log at {path}"
            ) from None
        return LogPart(generation=worker.generation, rank=worker.rank, data=data, offset=at, size=size)


async def _fetch(agent: AgentSession, worker: WorkerRow, offset: int, limit: int, wait_s: float) -> LogPart:
    request_id = str(uuid.uuid4())
    chunks: asyncio.Queue[pb.LogChunk] = asyncio.Queue(_CHUNKS_WAITING)
    agent.log_requests[request_id] = chunks
    request = pb.FetchLogs(
        request_id=request_id,
        job_id=worker.job_id,
        generation=worker.generation,
        rank=worker.rank,
        offset=offset,
        max_bytes=limit,
        wait_s=wait_s,
    )
    agent.send(pb.ManagerMessage(fetch_logs=request))
    data, first = bytearray(), None
    try:
        async with asyncio.timeout(_TIMEOUT_S + wait_s):
            while True:
                chunk = await chunks.get()
                if chunk.error:
                    raise UnavailableError(f"log of rank {worker.rank} on VM {worker.vm_id}: {chunk.error}")
                first = first or chunk
                data += chunk.data
                if len(data) > limit:
                    raise UnavailableError(
                        f"VM {worker.vm_id} sent more of the log of rank {worker.rank} than the {limit} bytes "
                        "that were requested: does its agent have another version?"
                    )
                if chunk.last:
                    break
    except TimeoutError:
        raise UnavailableError(
            f"VM {worker.vm_id} did not send the log of rank {worker.rank} within {_TIMEOUT_S + wait_s:.0f} s: "
            "try again"
        ) from None
    finally:
        del agent.log_requests[request_id]
    at = first.offset if first.size else max(offset, 0)
    size = max(first.size, at + len(data))
    return LogPart(generation=worker.generation, rank=worker.rank, data=bytes(data), offset=at, size=size)


def _read_file(path: Path, offset: int, limit: int) -> tuple[int, bytes, int]:
    """The offset of the data, the data, and the file's size."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        at = max(size + offset, 0) if offset < 0 else min(offset, size)
        with contextlib.suppress(OSError, AttributeError):  # skip the hole that the agent left when it cut a long log
            at = os.lseek(file.fileno(), at, os.SEEK_DATA)
        file.seek(at)
        return at, file.read(limit), size
