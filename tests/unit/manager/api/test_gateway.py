"""The agents' stream, where the manager itself is at fault."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from structlog.testing import capture_logs

from migrated_stores import migrated
from secure_world import Key
from varuna_manager.access.authority import open_authority
from varuna_manager.access.enrolments import EnrolmentService
from varuna_manager.access.tokens import TokenService
from varuna_manager.agents.sessions import AgentSession, AgentSessions
from varuna_manager.api.grpc.gateway import AgentGateway
from varuna_manager.api.grpc.peers import CertificatePeerCheck
from varuna_manager.db.engine import Database, StoreFullError
from varuna_manager.domain.observed import Rules
from varuna_manager.world.bell import Bell
from varuna_manager.world.events import EventLog
from varuna_manager.world.vm_registry import VmRegistry
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


async def test_an_agent_whose_vm_is_revoked_while_it_connects_gets_no_stream(tmp_path: Path) -> None:
    """The revocation comes when its certificate has been checked, and before there is a stream to end."""
    migrated(tmp_path / "manager.db")
    database = Database(f"sqlite:///{tmp_path / 'manager.db'}")
    authority, sessions, life = open_authority(tmp_path / "pki"), AgentSessions(), timedelta(hours=1)
    tokens = TokenService(database, authority.pin)
    enrolments = EnrolmentService(database, authority, tokens, EventLog(database), sessions, life)
    token = await tokens.create_join_token("test", 600.0, single_use=True, vm_id="vm-1", by="test")
    certificate = await enrolments.join_agent(token["token"], "vm-1", Key().request)

    async def admit_and_be_overtaken(hello: pb.Hello) -> None:
        await enrolments.revoke_vm(hello.vm_id)

    async def send_hello() -> AsyncIterator[pb.AgentMessage]:
        yield pb.AgentMessage(hello=pb.Hello(vm_id="vm-1", incarnation="1", gpus=1, host="h"))

    used: dict[str, Any] = {
        "peers": CertificatePeerCheck(enrolments),
        "fleet": SimpleNamespace(admit_agent=admit_and_be_overtaken),
        "sessions": sessions,
        "registry": VmRegistry(),
        "bell": Bell(),
        "rules": Rules(),
    }
    context: Any = SimpleNamespace(auth_context=lambda: {"x509_pem_cert": [certificate.encode()]})
    answers = [message async for message in make_gateway(used).Connect(send_hello(), context)]
    await database.close()
    assert [answer.WhichOneof("body") for answer in answers] == ["refused"]
    assert "were revoked" in answers[0].refused.reason
    assert sessions.get("vm-1") is None
