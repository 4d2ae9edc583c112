"""The queue of an agent that reads slowly or not at all stays small."""

from __future__ import annotations

import asyncio

from varuna_manager.agents.request_batcher import RequestBatcher
from varuna_manager.agents.sessions import AgentSession
from varuna_manager.db.engine import StoreAwayError
from varuna_proto.v1 import agent_pb2 as pb


def session() -> AgentSession:
    return AgentSession("vm-1", "first", ())


async def rest_of(session: AgentSession) -> list[pb.ManagerMessage]:
    """All messages that are still sent before the end."""
    session.close()
    messages = []
    while (message := await session.next_message()) is not None:
        messages.append(message)
    return messages


async def test_of_acknowledgements_only_the_newest_waits() -> None:
    slow = session()
    slow.send(pb.ManagerMessage(welcome=pb.Welcome(lease_s=60)))
    for number in range(1, 10_001):
        slow.acknowledge(heartbeat=number)
        if number % 10 == 0:
            slow.acknowledge(reports_through=number // 10)
    welcome, ack = await rest_of(slow)
    assert welcome.welcome.lease_s == 60
    assert (ack.ack.heartbeat_sequence, ack.ack.reports_through) == (10_000, 1_000)


async def test_an_acknowledgement_wakes_who_waits_and_is_said_once() -> None:
    prompt = session()
    waiting = asyncio.create_task(prompt.next_message())
    await asyncio.sleep(0)
    prompt.acknowledge(heartbeat=7)
    message = await waiting
    assert message is not None
    assert (message.ack.heartbeat_sequence, message.ack.reports_through) == (7, 0)
    assert await rest_of(prompt) == []


async def test_commands_come_in_their_order_before_acknowledgements() -> None:
    one = session()
    one.acknowledge(heartbeat=1)
    for generation in (1, 2):
        one.send(pb.ManagerMessage(stop=pb.Stop(generation=generation)))
    first, second, ack = await rest_of(one)
    assert (first.stop.generation, second.stop.generation, ack.ack.heartbeat_sequence) == (1, 2, 1)


async def test_an_agent_that_reads_no_commands_is_dropped() -> None:
    deaf = session()
    for generation in range(10_000):
        deaf.send(pb.ManagerMessage(stop=pb.Stop(generation=generation)))
    assert await deaf.next_message() is None


async def test_what_is_asked_meanwhile_is_answered_together() -> None:
    batches: list[list[int]] = []

    async def double(questions: object) -> list[int]:
        batch = list(questions)  # type: ignore[call-overload]
        batches.append(batch)
        await asyncio.sleep(0)
        if 13 in batch:
            raise ValueError("13")
        return [2 * question for question in batch]

    together: RequestBatcher[int, int] = RequestBatcher(double, most=50)
    answers = await asyncio.gather(*(together.add_request(number) for number in range(120)), return_exceptions=True)
    assert [answer for answer in answers if isinstance(answer, int)] == [2 * n for n in range(120) if n != 13]
    assert str(answers[13]) == "13", "one that is at fault fails alone"
    assert [len(batch) for batch in batches if len(batch) > 1] == [50, 50, 20]


async def test_a_store_that_is_away_is_tried_once_for_all_that_wait() -> None:
    """Not once for each: where a connection is refused after seconds only, thousands would wait for an hour."""
    batches: list[list[int]] = []

    async def fail(questions: object) -> list[int]:
        batches.append(list(questions))  # type: ignore[call-overload]
        raise StoreAwayError("the store cannot be reached")

    together: RequestBatcher[int, int] = RequestBatcher(fail, most=50)
    answers = await asyncio.gather(*(together.add_request(number) for number in range(120)), return_exceptions=True)
    assert all(isinstance(answer, StoreAwayError) for answer in answers)
    assert [len(batch) for batch in batches] == [50, 50, 20]
