"""Reports to the manager: kept until it has stored them, and sent while it listens."""

from __future__ import annotations

import math
from collections.abc import Iterator

from varuna_agent.state import messages
from varuna_agent.state.conversation import Conversation
from varuna_agent.state.events import NoticeReceived
from varuna_agent.state.instructions import Instruction, SendMessage
from varuna_agent.state.report_outbox import ReportOutbox
from varuna_agent.state.worker_key import WorkerKey
from varuna_proto.bounds import NAME_CHARS, clean_text, logged_name_flaw
from varuna_proto.v1 import agent_pb2, worker_pb2

_HASTENED_APART = 0.25
"""Heartbeats that workers cause are at least this part of the interval apart, however often they report."""
_EARLIER_S = 1.0
"""A notice that comes again with the same deadline differs by less."""


class Reporter:
    """Part of `AgentState`: fills the outbox, and sends from it while the conversation stands."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self.outbox = ReportOutbox()
        self._deadlines: dict[str, float] = {}
        """When the VM goes, by notice."""

    @property
    def can_send(self) -> bool:
        return self._conversation.is_welcome

    def hasten_heartbeat(self, now: float) -> None:
        """What a worker has reported cannot wait for the next heartbeat."""
        self._conversation.hasten_heartbeat(now, apart=_HASTENED_APART)

    def add_report(self, report: agent_pb2.Report) -> Iterator[Instruction]:
        self.outbox.add_report(report)
        if self.can_send:
            yield SendMessage(messages.make_report_message(report))

    def add_notice(self, notice: NoticeReceived, now: float) -> Iterator[Instruction]:
        """Report a notice, once, unless it comes again with an earlier deadline."""
        notice_id = clean_text(notice.notice_id, NAME_CHARS)
        deadline, known = now + notice.seconds_left, self._deadlines.get(notice_id)
        if known is not None and deadline >= known - _EARLIER_S:
            return
        self._deadlines[notice_id] = deadline
        fact = agent_pb2.PreemptionNotice(
            notice_id=notice_id, seconds_left=notice.seconds_left, source=clean_text(notice.source, NAME_CHARS)
        )
        yield from self.add_report(agent_pb2.Report(preemption_notice=fact))

    def add_step(self, key: WorkerKey, result: agent_pb2.StepResult) -> None:
        """Keep the step for the next `send_steps`."""
        self.outbox.add_step(key.job_id, key.generation, result)

    def add_values(self, key: WorkerKey, logged: worker_pb2.LogValues) -> None:
        """Keep what a script has logged for the next `send_steps`."""
        for name, value in logged.values.items():
            if logged_name_flaw(name) is None and math.isfinite(value):
                one = agent_pb2.LoggedValue(name=name, step=logged.step, value=value, rank=key.rank)
                self.outbox.add_value(key.job_id, key.generation, one)

    def send_steps(self, *, even_if_full: bool = False) -> Iterator[Instruction]:
        """Sends the values that scripts have logged, too."""
        for report in self.outbox.take_steps(even_if_full=even_if_full):
            if self.can_send:
                yield SendMessage(messages.make_report_message(report))

    def resend_all(self, now: float) -> Iterator[Instruction]:
        for report in self.outbox.unacknowledged:
            if report.HasField("preemption_notice"):
                notice = report.preemption_notice
                notice.seconds_left = max(self._deadlines[notice.notice_id] - now, 0.0)
            yield SendMessage(messages.make_report_message(report))
