"""The agents' open streams: what goes out on each, and what each was told."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Set
from contextlib import suppress

from varuna_manager.domain.commands import CommandKey, Presence
from varuna_proto.v1 import agent_pb2 as pb

_MAX_WAITING = 256
"""Commands that wait for an agent to read them. One that does not read is dropped: it dials again, and is told anew."""


class AgentSession:
    """One stream of one agent. A new stream is a new session: what was told on an old one may not have arrived.

    However slowly the agent reads, what waits for it stays small: of acknowledgements only the newest counts.
    """

    def __init__(self, vm_id: str, incarnation: str, seen: Iterable[tuple[str, int]]) -> None:
        self.vm_id = vm_id
        self.incarnation = incarnation
        self.seen = frozenset(seen)
        self.told: set[CommandKey] = set()
        self.compared: tuple[tuple[Presence, ...], Set[tuple[str, int]], bool] | None = None
        """What the store expected there, what its agent said runs there, and whether it drains, when last told."""
        self.told_to_prepare: dict[str, float] = {}
        """For the workers of which job, and when."""
        self.entrusted: set[str] = set()
        """The jobs that it was told to run or to prepare for: their archives are for it, and it may speak of them."""
        self.told_stale: frozenset[str] = frozenset()
        """Jobs for which it prepares or keeps something, and was told that it need not."""
        self.certificate_ends_at: float | None = None
        """Of its agent's newest certificate, in seconds since the epoch; None: it shows none."""
        self.log_requests: dict[str, asyncio.Queue[pb.LogChunk]] = {}
        self.stack_requests: dict[str, Callable[[pb.StackDump], None]] = {}
        self._commands: deque[pb.ManagerMessage] = deque()
        self._ack: pb.Ack | None = None
        self._closed = False
        self._waiting: asyncio.Future[None] | None = None

    def send(self, message: pb.ManagerMessage) -> None:
        if self._closed:
            return
        self._commands.append(message)
        kind = message.WhichOneof("body")
        if kind == "launch" or kind == "prepare":
            self.entrusted.add(message.launch.job_id if kind == "launch" else message.prepare.job_id)
        if len(self._commands) > _MAX_WAITING:
            self._commands.clear()
            self.close()
        self._wake()

    def acknowledge(self, *, heartbeat: int = 0, reports_through: int = 0) -> None:
        """Tell the agent of the newest heartbeat that was handled, or that reports are stored; 0: nothing of it."""
        if self._ack is None:
            self._ack = pb.Ack()
        # Only what is new is said: 0 means to the agent that there is nothing of the kind.
        if heartbeat:
            self._ack.heartbeat_sequence = heartbeat
        if reports_through:
            self._ack.reports_through = reports_through
        self._wake()

    def close(self) -> None:
        """End the stream once all that was sent before is out; whoever waits for a log is told."""
        self._closed = True
        self._wake()
        for request_id, chunks in self.log_requests.items():
            _put(chunks, pb.LogChunk(request_id=request_id, last=True, error=f"VM {self.vm_id} went away"))

    async def next_message(self) -> pb.ManagerMessage | None:
        """What to send next; None: the stream ends here. For one caller at a time."""
        while True:
            if self._commands:
                return self._commands.popleft()
            if self._ack is not None:
                ack, self._ack = self._ack, None
                return pb.ManagerMessage(ack=ack)
            if self._closed:
                return None
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def deliver_log(self, chunk: pb.LogChunk) -> None:
        chunks = self.log_requests.get(chunk.request_id)
        if chunks is not None:
            _put(chunks, chunk)

    def deliver_stack(self, dump: pb.StackDump) -> None:
        take = self.stack_requests.get(dump.request_id)
        if take is not None:
            take(dump)


def _put(chunks: asyncio.Queue[pb.LogChunk], chunk: pb.LogChunk) -> None:
    """What is more than was asked for is dropped: whoever asked does not wait for ever."""
    with suppress(asyncio.QueueFull):
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

    def is_entrusted(self, vm_id: str, job_id: str) -> bool:
        """Whether the VM's agent was told, on its present stream, to run the job or to prepare for it."""
        session = self._sessions.get(vm_id)
        return session is not None and job_id in session.entrusted

    def all(self) -> tuple[AgentSession, ...]:
        return tuple(self._sessions.values())

    def first_certificate_end(self) -> float | None:
        """When the first certificate of a connected agent ends, in seconds since the epoch; None: they show none."""
        ends = (session.certificate_ends_at for session in self._sessions.values())
        return min((end for end in ends if end is not None), default=None)

    def close_all(self) -> None:
        for session in self.all():
            session.close()
