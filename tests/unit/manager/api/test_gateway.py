"""The agents' stream, where the manager itself is at fault."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from structlog.testing import capture_logs

from varuna_manager.agents.sessions import AgentSession
from varuna_manager.api.grpc.gateway import AgentGateway
from varuna_manager.db.engine import StoreFullError
from varuna_proto.v1 import agent_pb2 as pb


def make_gateway(used: Mapping[str, Any]) -> AgentGateway:
    """With only the parts that the test uses."""
    parts = ("fleet", "reports", "registry", "times", "sessions", "bell", "rules", "peers", "archives", "usage")
    instruments = SimpleNamespace(heartbeats=SimpleNamespace(inc=lambda: None))
    given: dict[str, Any] = {**dict.fromkeys(parts), "instruments": instruments, **used}
    return AgentGateway(**given)


async def test_a_heartbeat_that_cannot_be_handled_is_logged_before_its_stream_ends() -> None:
    def fail(*_: object, **__: object) -> NoReturn:
        raise KeyError("a fault of the manager")

    session = AgentSession("vm-1", "first", ())
    used: dict[str, Any] = {
        "registry": SimpleNamespace(add_heartbeat=fail),
        "sessions": SimpleNamespace(get=lambda vm_id: session),
        "times": SimpleNamespace(record_workers=lambda vm_id, workers: None),
    }
    gateway = make_gateway(used)

    async def read_messages() -> AsyncIterator[pb.AgentMessage]:
        yield pb.AgentMessage(heartbeat=pb.Heartbeat(sequence=1))
        raise AssertionError("nothing is read after that")

    with capture_logs() as log:
        await gateway._read_messages(read_messages(), session)
    assert await session.next_message() is None
    assert [(line["event"], line["vm"], line["kind"], line["log_level"]) for line in log] == [
        ("an agent's message could not be handled: the stream ends", "vm-1", "heartbeat", "error")
    ]


async def test_an_agent_that_cannot_be_admitted_now_is_no_vm_that_never_dialled() -> None:
    class AbortedError(Exception):
        pass

    async def find_no_refusal(*_: object) -> None:
        return None

    async def fail(*_: object) -> NoReturn:
        raise StoreFullError("the store cannot be written")

    async def abort(*_: object) -> NoReturn:
        raise AbortedError

    expected: list[str] = []
    gateway = make_gateway(
        {
            "peers": SimpleNamespace(find_refusal=find_no_refusal),
            "fleet": SimpleNamespace(admit_agent=fail),
            "registry": SimpleNamespace(expect_hello=expected.append),
        }
    )
    context: Any = SimpleNamespace(abort=abort)
    hello = pb.Hello(vm_id="vm-1", incarnation="1", gpus=1, host="h")
    with pytest.raises(AbortedError):
        await gateway._find_refusal(pb.AgentMessage(hello=hello), context)
    assert expected == ["vm-1"]
