"""The agents' open streams, and the commands that were sent on each."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Set
from contextlib import suppress

from varuna_manager.domain.commands import CommandKey, GenerationOnVm
from varuna_proto.v1 import agent_pb2 as pb

_MAX_WAITING = 256
"""Commands that wait for an agent to read them. A slow reader is dropped; it reconnects and receives them again."""


class AgentSession:
    """One stream of one agent. A new stream is a new session, because what was sent on an old one may not have arrived.

    However slowly the agent reads, what waits for it stays small: of acknowledgements only the newest counts.
    """

    def __init__(self, vm_id: str, incarnation: str, seen: Iterable[tuple[str, int]]) -> None:
        self.vm_id = vm_id
        self.incarnation = incarnation
        self.seen = frozenset(seen)
        self.sent_commands: set[CommandKey] = set()
        self.last_comparison: tuple[tuple[GenerationOnVm, ...], Set[tuple[str, int]], bool] | None = None
        """What the World expected there, what its agent reported, and whether it drains, at the last comparison."""
        self.prepare_sent_at: dict[str, float] = {}
        """By job: when the VM was last sent a command to prepare for its workers."""
        self.entrusted: set[str] = set()
        """The jobs that it was sent to run or to prepare for. It may fetch their archives and report on them."""
        self.newcomers_sent: dict[str, str] = {}
        """By job: the request for newcomers that was sent last, or "" if their end was."""
        self.ahead_sent: dict[str, pb.SendAhead] = {}
        """By job: what its workers were last told to send ahead, as long as that is wanted."""
        self.stale_sent: frozenset[str] = frozenset()
        """Jobs for which it prepares or keeps something although KeepPrepared was sent without them."""
        self.certificate_ends_at: float | None = None
        """The end of its agent's newest certificate, in seconds since the epoch; None: it shows none."""
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
        elif kind == "start_newcomers":
            self.entrusted.add(message.start_newcomers.launch.job_id)
        if len(self._commands) > _MAX_WAITING:
            self._commands.clear()
            self.close()
        self._wake()

    def acknowledge(self, *, heartbeat: int = 0, reports_through: int = 0) -> None:
        """Acknowledge the newest handled heartbeat, or that reports are stored; 0: nothing of that kind."""
        if self._ack is None:
            self._ack = pb.Ack()
        # Only what is new is sent: 0 means to the agent that there is nothing of the kind.
        if heartbeat:
            self._ack.heartbeat_sequence = heartbeat
        if reports_through:
            self._ack.reports_through = reports_through
        self._wake()

    def close(self) -> None:
        """End the stream once everything sent before is out; requests for a log end with an error."""
        self._closed = True
        self._wake()
        for request_id, chunks in self.log_requests.items():
            _put(chunks, pb.LogChunk(request_id=request_id, last=True, error=f"VM {self.vm_id} went away"))

    async def next_message(self) -> pb.ManagerMessage | None:
        """The next message to send; None: the stream ends here. For one caller at a time."""
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

    def add_session(self, session: AgentSession) -> None:
        """Make the session its VM's; an older one of the same VM (half-open) is closed."""
        older = self._sessions.get(session.vm_id)
        self._sessions[session.vm_id] = session
        if older is not None:
            older.close()

    def remove_session(self, session: AgentSession) -> bool:
        """Forget the session; False if a newer one has replaced it."""
        session.close()
        if self._sessions.get(session.vm_id) is not session:
            return False
        del self._sessions[session.vm_id]
        return True

    def get(self, vm_id: str) -> AgentSession | None:
        return self._sessions.get(vm_id)

    def is_entrusted(self, vm_id: str, job_id: str) -> bool:
        """Whether the job was sent to the VM's agent, on its present stream, to run or to prepare for."""
        session = self._sessions.get(vm_id)
        return session is not None and job_id in session.entrusted

    def list_sessions(self) -> tuple[AgentSession, ...]:
        return tuple(self._sessions.values())

    def first_certificate_end(self) -> float | None:
        """When the first certificate of a connected agent ends, in seconds since the epoch; None: none does."""
        ends = (session.certificate_ends_at for session in self._sessions.values())
        return min((end for end in ends if end is not None), default=None)

    def close_all(self) -> None:
        for session in self.list_sessions():
            session.close()
