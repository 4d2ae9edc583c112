"""The worker's end of the socket to its agent."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from agent_end import AgentEnd
from varuna.distributed.departure import Departure
from varuna.worker.agent_link import AgentLink
from varuna_proto.environment import EXIT_GENERATION_ENDED, EXIT_PEER_LOST, Mode, WorkerEnvironment
from varuna_proto.plan import Plan
from varuna_proto.v1 import agent_pb2
from waiting import DEADLINE_S


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], threading.Event]:
    """The codes with which the process would have ended."""
    codes, ended = list[int](), threading.Event()

    def end(code: int) -> None:
        codes.append(code)
        ended.set()

    monkeypatch.setattr("varuna.worker.agent_link.end_process", end)
    return codes, ended


ENVIRONMENT = WorkerEnvironment(
    job_id="job",
    mode=Mode.TRAIN,
    generation=1,
    rank=0,
    world_size=1,
    local_rank=0,
    plan=Plan(p=1, d=1, micro_batch=1, global_batch=1),
    rendezvous_host="127.0.0.1",
    rendezvous_port=1,
)


class BrokenDeparture(Departure):
    def leave_generation(self, exit_: object, **more: object) -> None:
        raise RuntimeError("it cannot leave")


@pytest.mark.parametrize(
    ("departure", "code"), [(Departure(), EXIT_GENERATION_ENDED), (BrokenDeparture(), EXIT_PEER_LOST)]
)
def test_a_process_ends_when_its_agent_can_command_it_no_longer(
    departure: Departure, code: int, ends: tuple[list[int], threading.Event]
) -> None:
    """Because the agent has gone, or because the thread has failed that is to obey."""
    codes, ended = ends
    with AgentEnd() as agent:
        AgentLink(replace(ENVIRONMENT, agent_socket=agent.path), departure)
        agent.wait_for(lambda message: message.HasField("hello"))
        if code == EXIT_PEER_LOST:
            agent.send_leave(agent_pb2.STOP_MODE_LEAVE_NOW)
        else:
            agent.hang_up()
        assert ended.wait(DEADLINE_S)
    assert codes == [code]
