"""What the agent reports: kept until the manager has stored it, and sent while somebody listens."""

from __future__ import annotations

from collections.abc import Iterator

from varuna_agent.state import messages
from varuna_agent.state.conversation import Conversation
from varuna_agent.state.outbox import Outbox
from varuna_agent.state.stimuli import Instruction, Send, WorkerKey
from varuna_proto.v1 import agent_pb2


class Reports:
    """Part of `AgentState`: the outbox, as far as the conversation lets it be emptied."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self.outbox = Outbox()

    @property
    def are_heard(self) -> bool:
        return self._conversation.is_welcome

    def report(self, report: agent_pb2.Report) -> Iterator[Instruction]:
        self.outbox.add(report)
        if self.are_heard:
            yield Send(messages.report(report))

    def add_step(self, key: WorkerKey, result: agent_pb2.StepResult) -> None:
        """Goes out with the next `steps`."""
        self.outbox.add_step(key.job_id, key.generation, result)

    def steps(self, *, even_if_full: bool = False) -> Iterator[Instruction]:
        for report in self.outbox.take_steps(even_if_full=even_if_full):
            if self.are_heard:
                yield Send(messages.report(report))

    def everything_again(self) -> Iterator[Instruction]:
        for report in self.outbox.unacknowledged:
            yield Send(messages.report(report))
