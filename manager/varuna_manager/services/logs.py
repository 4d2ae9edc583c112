"""Workers' logs, fetched from the agent of their VM; from the VM's folder when it is gone."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path

from sqlalchemy import select

from varuna_manager.db.engine import Database
from varuna_manager.db.models import GenerationRow, WorkerRow
from varuna_manager.providers.base import EmulatedProvider
from varuna_manager.services.errors import NotFoundError, UnavailableError
from varuna_manager.services.jobs import find
from varuna_manager.services.sessions import AgentSession, AgentSessions
from varuna_proto.v1 import agent_pb2 as pb

MAX_BYTES = 1024 * 1024
_TIMEOUT_S = 10.0
_MOST_SENT = 2 * MAX_BYTES
"""Of an agent that does not keep to what it was asked for."""
_CHUNKS_WAITING = 64
"""More than an agent needs for MAX_BYTES."""


class LogService:
    def __init__(self, database: Database, sessions: AgentSessions, provider: EmulatedProvider) -> None:
        self._database = database
        self._sessions = sessions
        self._provider = provider

    async def read(self, id_or_name: str, generation: int | None, rank: int, offset: int) -> bytes:
        """At most MAX_BYTES of a worker's log from `offset` on (negative: from the end). `generation` None: the newest.

        Raises NotFoundError, UnavailableError.
        """
        async with self._database.read() as session:
            job = await find(session, id_or_name)
            if generation is None:
                newest = select(GenerationRow.number).where(GenerationRow.job_id == job.id)
                generation = await session.scalar(newest.order_by(GenerationRow.number.desc()).limit(1))
            if generation is None:
                raise NotFoundError(f"job {id_or_name!r} has no generation yet, so it has no logs: it is {job.state}")
            worker = await session.get(WorkerRow, (job.id, generation, rank))
        if worker is None:
            raise NotFoundError(
                f"job {id_or_name!r} has no rank {rank} in generation {generation}: "
                f"see GET /api/v1/jobs/{job.id}/generations"
            )
        agent = self._sessions.get(worker.vm_id)
        if agent is None:
            return await self._read_folder(worker, offset)
        return await _fetch(agent, worker, offset)

    async def _read_folder(self, worker: WorkerRow, offset: int) -> bytes:
        path = self._provider.log_path(worker.vm_id, worker.job_id, worker.generation, worker.rank)
        try:
            return await asyncio.to_thread(_read_file, path, offset)
        except FileNotFoundError:
            raise UnavailableError(
                f"VM {worker.vm_id} of rank {worker.rank} is out of reach and left no log at {path}"
            ) from None


async def _fetch(agent: AgentSession, worker: WorkerRow, offset: int) -> bytes:
    request_id = str(uuid.uuid4())
    chunks: asyncio.Queue[pb.LogChunk] = asyncio.Queue(_CHUNKS_WAITING)
    agent.log_requests[request_id] = chunks
    request = pb.FetchLogs(
        request_id=request_id,
        job_id=worker.job_id,
        generation=worker.generation,
        rank=worker.rank,
        offset=offset,
        max_bytes=MAX_BYTES,
    )
    agent.send(pb.ManagerMessage(fetch_logs=request))
    data = bytearray()
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            while True:
                chunk = await chunks.get()
                if chunk.error:
                    raise UnavailableError(f"log of rank {worker.rank} on VM {worker.vm_id}: {chunk.error}")
                data += chunk.data
                if len(data) > _MOST_SENT:
                    raise UnavailableError(f"VM {worker.vm_id} sends more of a log than it was asked for")
                if len(data) > MAX_BYTES:
                    raise UnavailableError(
                        f"VM {worker.vm_id} sent more of the log of rank {worker.rank} than the {MAX_BYTES} bytes "
                        "that it was asked for: is its agent of another version?"
                    )
                if chunk.last:
                    return bytes(data)
    except TimeoutError:
        raise UnavailableError(
            f"VM {worker.vm_id} did not send the log of rank {worker.rank} within {_TIMEOUT_S:.0f} s: try again"
        ) from None
    finally:
        del agent.log_requests[request_id]


def _read_file(path: Path, offset: int) -> bytes:
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(size + offset, 0) if offset < 0 else offset)
        return file.read(MAX_BYTES)
