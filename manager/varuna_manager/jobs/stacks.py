"""Where the ranks of a generation that hangs are: requested from their agents, and stored."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from varuna_manager.agents.sessions import AgentSession, AgentSessions
from varuna_manager.db.engine import Database
from varuna_manager.db.models import StackRow
from varuna_manager.domain.observed import RankStack, StackAnswers
from varuna_manager.jobs.documents import make_stack_document
from varuna_manager.jobs.jobs import find_job_row
from varuna_manager.world.bell import Bell
from varuna_proto.bounds import ERROR_CHARS, clean_text
from varuna_proto.rest import StackDocument
from varuna_proto.v1 import agent_pb2 as pb

_TEXT_CHARACTERS = 64 * 1024


@dataclass(kw_only=True)
class _StackRequest:
    generation: int
    at: float
    vm_ids: Mapping[int, str]
    """By rank."""
    answers: dict[int, RankStack] = field(default_factory=dict)
    sent: list[tuple[AgentSession, str]] = field(default_factory=list)
    """To which agents, under which ids."""

    def drop_late_answers(self) -> None:
        for agent, request_id in self.sent:
            agent.stack_requests.pop(request_id, None)


class StackService:
    """Requests are in memory: a manager that restarts repeats them."""

    def __init__(
        self, database: Database, sessions: AgentSessions, bell: Bell, now: Callable[[], float] = time.time
    ) -> None:
        self._database = database
        self._sessions = sessions
        self._bell = bell
        self._now = now
        self._asked: dict[str, _StackRequest] = {}

    def request_stacks(self, job_id: str, generation: int, vm_ids: Mapping[int, str]) -> None:
        """Request the stacks of these ranks; the answers arrive later. Those of an earlier request are dropped.

        `vm_ids`: by rank.
        """
        if (earlier := self._asked.get(job_id)) is not None:
            earlier.drop_late_answers()
        asked = _StackRequest(generation=generation, at=self._now(), vm_ids=dict(vm_ids))
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
            asked.sent.append((agent, request_id))
            dump = pb.DumpStacks(job_id=job_id, generation=generation, request_id=request_id)
            agent.send(pb.ManagerMessage(dump_stacks=dump))

    def _taker(self, asked: _StackRequest, ranks: Collection[int]) -> Callable[[pb.StackDump], None]:
        """A receiver for one agent's answers, which accepts its own ranks only."""

        def take(dump: pb.StackDump) -> None:
            if dump.rank in ranks:
                error = clean_text(dump.error, ERROR_CHARS) or ("" if dump.text else "it is empty")
                text = clean_text(dump.text[:_TEXT_CHARACTERS], _TEXT_CHARACTERS)
                asked.answers[dump.rank] = RankStack(text=text, error=error)
                if len(asked.answers) == len(asked.vm_ids):
                    self._bell.notify_listeners()

        return take

    def collect_answers(self, job_id: str, generation: int) -> StackAnswers | None:
        """The answers about the generation; None: none were requested."""
        asked = self._asked.get(job_id)
        if asked is None or asked.generation != generation:
            return None
        return StackAnswers(generation=generation, asked_at=asked.at, answers=dict(asked.answers))

    def store_answers(self, session: AsyncSession, job_id: str, generation: int) -> None:
        """Write the answers, in the session's transaction."""
        asked = self._asked.get(job_id)
        if asked is None or asked.generation != generation:
            return
        for rank, vm_id in asked.vm_ids.items():
            answer = asked.answers.get(rank, RankStack(error="no answer in time"))
            key = {"job_id": job_id, "generation": generation, "rank": rank}
            session.add(StackRow(**key, vm_id=vm_id, at=asked.at, text=answer.text, error=answer.error))

    def keep_only(self, job_ids: Collection[str]) -> None:
        """Drop the requests for all other jobs, which are over."""
        for job_id in self._asked.keys() - set(job_ids):
            self._asked.pop(job_id).drop_late_answers()

    async def list_stacks(self, id_or_name: str, generation: int | None) -> list[StackDocument]:
        """The stored stacks of a job: of one generation, or of all that hung. Raises MissingError if unknown."""
        async with self._database.read() as session:
            job = await find_job_row(session, id_or_name)
            query = select(StackRow).where(StackRow.job_id == job.id)
            if generation is not None:
                query = query.where(StackRow.generation == generation)
            rows = await session.scalars(query.order_by(StackRow.generation, StackRow.rank))
            return [make_stack_document(row) for row in rows]
