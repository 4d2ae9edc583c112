"""The agents' stream, where the manager itself is at fault."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, NoReturn

from structlog.testing import capture_logs

from varuna_manager.agents.sessions import AgentSession
from varuna_manager.api.grpc.gateway import AgentGateway
from varuna_proto.v1 import agent_pb2 as pb


async def test_a_heartbeat_that_cannot_be_handled_is_logged_before_its_stream_ends() -> None:
    def fail(*_: object, **__: object) -> NoReturn:
        raise KeyError("a fault of the manager")

    session = AgentSession("vm-1", "first", ())
    unused: dict[str, Any] = dict.fromkeys(("fleet", "reports", "bell", "rules", "peers", "archives", "usage"))
    used: dict[str, Any] = {
        "registry": SimpleNamespace(add_heartbeat=fail),
        "sessions": SimpleNamespace(get=lambda vm_id: session),
        "times": SimpleNamespace(record_workers=lambda vm_id, workers: None),
        "instruments": SimpleNamespace(heartbeats=SimpleNamespace(inc=lambda: None)),
    }
    gateway = AgentGateway(**unused, **used)

    async def read_messages() -> AsyncIterator[pb.AgentMessage]:
        yield pb.AgentMessage(heartbeat=pb.Heartbeat(sequence=1))
        raise AssertionError("nothing is read after that")

    with capture_logs() as log:
        await gateway._read_messages(read_messages(), session)
    assert await session.next_message() is None
    assert [(line["event"], line["vm"], line["kind"], line["log_level"]) for line in log] == [
        ("an agent's message could not be handled: the stream ends", "vm-1", "heartbeat", "error")
    ]
