"""Bytes that are not our protocol, or too many, on the agents' port: their sender is dropped, the others go on."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import suppress

import grpc
import pytest

from scripted_manager import ScriptedAgent, ScriptedManager
from varuna_proto.v1 import agent_pb2 as pb
from varuna_proto.v1 import agent_pb2_grpc
from waiting import DEADLINE_S, until

HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
METHOD = "/varuna.v1.AgentService/Connect"
LIMITS_OFF = (("grpc.max_send_message_length", -1),)


@pytest.fixture
async def agent(manager: ScriptedManager) -> AsyncIterator[ScriptedAgent]:
    """The well-behaved agent of the manager's only VM. At the end it is still served on the same stream."""
    # However long this machine stands still, the VM is not lost, and so not replaced.
    await manager.start("--vms", "1", "--suspect-after-s", "3600", "--lost-after-s", "3600")
    (agent,) = await manager.connect_vms(1)
    yield agent
    seen = agent.beats_acked
    await until(lambda: agent.beats_acked > seen + 2, "heartbeats of the agent that behaves")
    assert not agent.is_over
    assert (await manager.rest.get("readyz")).status_code == 200
    log = (manager.data_dir.parent / "manager.log").read_text()
    assert '"exception":' not in log, "a defect that the manager itself has logged"


async def answer_to(address: str, *messages: bytes) -> tuple[list[pb.ManagerMessage], grpc.StatusCode]:
    """The manager's messages on a stream of these bytes, and the status with which it ends the stream."""

    async def requests() -> AsyncIterator[bytes]:
        for message in messages:
            yield message

    async with grpc.aio.insecure_channel(address, options=LIMITS_OFF) as channel:
        call = channel.stream_stream(
            METHOD, request_serializer=bytes, response_deserializer=pb.ManagerMessage.FromString
        )(requests())
        answers: list[pb.ManagerMessage] = []
        try:
            async with asyncio.timeout(DEADLINE_S):
                async for message in call:
                    answers.append(message)
                return answers, await call.code()
        except grpc.aio.AioRpcError as error:
            return answers, error.code()


def hello(vm_id: str, **more: object) -> bytes:
    return pb.AgentMessage(hello=pb.Hello(vm_id=vm_id, incarnation="other", gpus=1, **more)).SerializeToString()


async def test_nonsense_is_dropped(manager: ScriptedManager, agent: ScriptedAgent) -> None:
    await send_random_bytes(manager.grpc, b"")
    await send_random_bytes(manager.grpc, HTTP2_PREFACE)
    for message in (b"\xff" * 64, os.urandom(200) + b"\xff", b"\x0a\x7f\x01"):
        messages, code = await answer_to(manager.grpc, message)
        assert not messages
        assert code is not grpc.StatusCode.OK
    async with grpc.aio.insecure_channel(manager.grpc) as channel:
        for path in ("/varuna.v1.AgentService/Nothing", "/nobody.Service/Call", METHOD):
            call = channel.unary_unary(path, request_serializer=bytes, response_deserializer=bytes)
            with pytest.raises(grpc.aio.AioRpcError):
                await asyncio.wait_for(call(b"\xff\xff\xff"), DEADLINE_S)


async def send_random_bytes(address: str, preface: bytes) -> None:
    """Returns when the manager has hung up each time."""
    host, _, port = address.rpartition(":")
    for _ in range(10):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(preface + os.urandom(4096))
        async with asyncio.timeout(DEADLINE_S):
            with suppress(ConnectionError):
                while await reader.read(4096):
                    pass
        writer.close()


async def test_what_is_our_protocol_but_cannot_be_is_refused(manager: ScriptedManager, agent: ScriptedAgent) -> None:
    beat = pb.AgentMessage(heartbeat=pb.Heartbeat(sequence=1)).SerializeToString()
    for first in (beat, b""):
        messages, _ = await answer_to(manager.grpc, first, beat)
        assert [message.WhichOneof("body") for message in messages] == ["refused"]
        assert "must be Hello" in messages[0].refused.reason
    messages, code = await answer_to(manager.grpc, hello("x", host="h" * 20_000_000))
    assert not messages
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    messages, _ = await answer_to(manager.grpc, hello("x", host="h" * 2_000_000))
    assert [message.WhichOneof("body") for message in messages] == ["refused"]
    for vm_id in ("\x00", "../../etc", "v" * 5000, ""):
        messages, _ = await answer_to(manager.grpc, hello(vm_id, device_memory_bytes=2**64 - 1))
        assert [message.WhichOneof("body") for message in messages] == ["refused"]


async def test_who_says_or_reads_nothing_keeps_nobody_waiting(manager: ScriptedManager, agent: ScriptedAgent) -> None:
    host, _, port = manager.grpc.rpartition(":")
    silent = [await asyncio.open_connection(host, int(port)) for _ in range(100)]
    await manager.rest.put("fleet", json={"target": 2})
    (other,) = await manager.connect_vms(1)
    await other.close()
    async with grpc.aio.insecure_channel(manager.grpc) as channel:
        call = agent_pb2_grpc.AgentServiceStub(channel).Connect()  # type: ignore[call-arg] # the test writes to it
        words = pb.Hello(vm_id=other.vm_id, incarnation=other.incarnation, host="127.0.0.1", gpus=1)
        await call.write(pb.AgentMessage(hello=words))
        beat = pb.AgentMessage(heartbeat=pb.Heartbeat(rendezvous_port=1))
        for sequence in range(1, 5001):
            beat.heartbeat.sequence = sequence
            await call.write(beat)
        seen = agent.beats_acked
        await until(lambda: agent.beats_acked > seen + 5, "heartbeats beside those who are silent")
        call.cancel()
    for _, writer in silent:
        writer.close()
