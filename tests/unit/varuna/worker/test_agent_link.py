"""The worker's end of the socket to its agent."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agent_end import AgentEnd
from process_ends import Ends
from varuna.distributed.departure import Departure
from varuna.worker.agent_link import AgentLink
from varuna_proto.environment import EXIT_GENERATION_ENDED, EXIT_PEER_LOST, WorkerEnvironment
from varuna_proto.v1 import agent_pb2
from waiting import DEADLINE_S


class BrokenDeparture(Departure):
    def leave_generation(self, exit_: object, **more: object) -> None:
        raise RuntimeError("it cannot leave")


@pytest.mark.parametrize(
    ("departure", "code"), [(Departure(), EXIT_GENERATION_ENDED), (BrokenDeparture(), EXIT_PEER_LOST)]
)
def test_a_process_ends_when_its_agent_can_command_it_no_longer(
    departure: Departure, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Because the agent has gone, or because the thread has failed that is to obey."""
    ends = Ends()
    monkeypatch.setattr("varuna.worker.agent_link.end_process", ends)
    with AgentEnd() as agent:
        environment = WorkerEnvironment.alone("job", micro_batch=1, global_batch=1)
        AgentLink(replace(environment, agent_socket=agent.path), departure)
        agent.wait_for(lambda message: message.HasField("hello"))
        if code == EXIT_PEER_LOST:
            agent.send_leave(agent_pb2.STOP_MODE_LEAVE_NOW)
        else:
            agent.hang_up()
        assert ends.called.wait(DEADLINE_S)
    assert ends.codes == [code]
