"""The agents' open streams: what goes out on each, and what each was told."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from varuna_manager.domain.commands import CommandKey
from varuna_proto.v1 import agent_pb2 as pb


class AgentSession:
    """One stream of one agent. A new stream is a new session: what was told on an old one may not have arrived."""

    def __init__(self, vm_id: str, incarnation: str, seen: Iterable[tuple[str, int]]) -> None:
        self.vm_id = vm_id
        self.incarnation = incarnation
        self.seen = frozenset(seen)
        self.told: set[CommandKey] = set()
        self.log_requests: dict[str, asyncio.Queue[pb.LogChunk]] = {}
        self._outgoing: asyncio.Queue[pb.ManagerMessage | None] = asyncio.Queue()

    def send(self, message: pb.ManagerMessage) -> None:
        self._outgoing.put_nowait(message)

    def close(self) -> None:
        """End the stream once all that was sent before is out; whoever waits for a log is told."""
        self._outgoing.put_nowait(None)
        for request_id, chunks in self.log_requests.items():
            chunks.put_nowait(pb.LogChunk(request_id=request_id, last=True, error=f"VM {self.vm_id} went away"))

    async def next_message(self) -> pb.ManagerMessage | None:
        """What to send next; None: the stream ends here."""
        return await self._outgoing.get()

    def deliver_log(self, chunk: pb.LogChunk) -> None:
        chunks = self.log_requests.get(chunk.request_id)
        if chunks is not None:
            chunks.put_nowait(chunk)


class AgentSessions:
    def __init__(self) -> None:
        self._sessions: dict[str, AgentSession] = {}

    def open(self, session: AgentSession) -> None:
        """Take the session as its VM's; an older one of the same VM (half-open) is closed."""
        older = self._sessions.get(session.vm_id)
        self._sessions[session.vm_id] = session
        if older is not None:
            older.close()

    def end(self, session: AgentSession) -> bool:
        """Forget the session; False when a newer one has taken its place."""
        session.close()
        if self._sessions.get(session.vm_id) is not session:
            return False
        del self._sessions[session.vm_id]
        return True

    def get(self, vm_id: str) -> AgentSession | None:
        return self._sessions.get(vm_id)

    def all(self) -> tuple[AgentSession, ...]:
        return tuple(self._sessions.values())

    def close_all(self) -> None:
        for session in self.all():
            session.close()
