"""Where the ranks of a generation that hangs stand: asked of their agents, and kept."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from varuna_manager.db.engine import Database
from varuna_manager.db.models import StackRow
from varuna_manager.domain.observed import RankStack, Stacks
from varuna_manager.services import documents
from varuna_manager.services.bell import Bell
from varuna_manager.services.documents import Document
from varuna_manager.services.jobs import find
from varuna_manager.services.sessions import AgentSessions
from varuna_proto.bounds import ERROR_CHARS, clean_text
from varuna_proto.v1 import agent_pb2 as pb

_TEXT_CHARACTERS = 64 * 1024


@dataclass(kw_only=True)
class _Asked:
    generation: int
    at: float
    vm_ids: Mapping[int, str]
    """By rank."""
    answers: dict[int, RankStack] = field(default_factory=dict)


class StackService:
    """What is asked is in memory: a manager that starts anew asks again."""

    def __init__(
        self, database: Database, sessions: AgentSessions, bell: Bell, now: Callable[[], float] = time.time
    ) -> None:
        self._database = database
        self._sessions = sessions
        self._bell = bell
        self._now = now
        self._asked: dict[str, _Asked] = {}

    def ask(self, job_id: str, generation: int, vm_ids: Mapping[int, str]) -> None:
        """Ask the agents of these ranks; the answers come by and by. `vm_ids`: by rank."""
        asked = _Asked(generation=generation, at=self._now(), vm_ids=dict(vm_ids))
        self._asked[job_id] = asked
        for vm_id in set(vm_ids.values()):
            ranks = {rank for rank, other in vm_ids.items() if other == vm_id}
            agent = self._sessions.get(vm_id)
            if agent is None:
                text = f"the agent of VM {vm_id} is out of reach"
                asked.answers.update({rank: RankStack(error=text) for rank in ranks})
                continue
            request_id = str(uuid.uuid4())
            agent.stack_requests[request_id] = self._taker(asked, ranks)
            dump = pb.DumpStacks(job_id=job_id, generation=generation, request_id=request_id)
            agent.send(pb.ManagerMessage(dump_stacks=dump))

    def _taker(self, asked: _Asked, ranks: Collection[int]) -> Callable[[pb.StackDump], None]:
        """Of one agent's answers: it speaks for its own ranks only."""

        def take(dump: pb.StackDump) -> None:
            if dump.rank in ranks:
                error = clean_text(dump.error, ERROR_CHARS) or ("" if dump.text else "it is empty")
                text = clean_text(dump.text[:_TEXT_CHARACTERS], _TEXT_CHARACTERS)
                asked.answers[dump.rank] = RankStack(text=text, error=error)
                if len(asked.answers) == len(asked.vm_ids):
                    self._bell.ring()

        return take

    def of(self, job_id: str, generation: int) -> Stacks | None:
        """What has been answered about the generation; None: it was not asked about."""
        asked = self._asked.get(job_id)
        if asked is None or asked.generation != generation:
            return None
        return Stacks(generation=generation, asked_at=asked.at, answers=dict(asked.answers))

    def keep(self, session: AsyncSession, job_id: str, generation: int) -> None:
        """Write what was answered, with the session's transaction."""
        asked = self._asked.get(job_id)
        if asked is None or asked.generation != generation:
            return
        for rank, vm_id in asked.vm_ids.items():
            answer = asked.answers.get(rank, RankStack(error="no answer in time"))
            key = {"job_id": job_id, "generation": generation, "rank": rank}
            session.add(StackRow(**key, vm_id=vm_id, at=asked.at, text=answer.text, error=answer.error))

    def keep_only(self, job_ids: Collection[str]) -> None:
        """Drop what was asked of all other jobs: they are over."""
        self._asked = {job_id: asked for job_id, asked in self._asked.items() if job_id in job_ids}

    async def read(self, id_or_name: str, generation: int | None) -> list[Document]:
        """The kept stacks of a job: of one generation, or of all that hung. Raises NotFoundError for an unknown job."""
        async with self._database.read() as session:
            job = await find(session, id_or_name)
            query = select(StackRow).where(StackRow.job_id == job.id)
            if generation is not None:
                query = query.where(StackRow.generation == generation)
            rows = await session.scalars(query.order_by(StackRow.generation, StackRow.rank))
            return [documents.stack_document(row) for row in rows]
