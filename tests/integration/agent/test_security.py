"""The agent's side: joining by a pinned token, keeping its certificate, dialling several managers, clear messages."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path

import grpc
import grpc.aio
import pytest
import trustme
from structlog.testing import capture_logs

from agent_world import FakeManager, StandbyManager
from secure_world import SecureManager
from varuna_agent.errors import JoinError
from varuna_agent.folders.workdirs import WorkdirError
from varuna_agent.identity.certificate import AgentIdentity, JoinToken, VmCertificate, open_identity
from varuna_agent.link import manager_link
from varuna_agent.link.backoff import Backoff
from varuna_agent.link.manager_link import ManagerLink
from varuna_manager.access.authority import AgentSubject, open_authority
from varuna_proto.v1 import agent_pb2 as pb
from varuna_proto.v1 import agent_pb2_grpc
from waiting import DEADLINE_S, until

VM = "local-1"
pytestmark = pytest.mark.xdist_group("secure")  # one manager for all


@pytest.fixture
def manager(secure: SecureManager) -> SecureManager:
    return secure


def token_of(manager: SecureManager, vm_id: str = VM) -> JoinToken:
    return JoinToken.parse_text(manager.token(name="test", join=True, vm_id=vm_id))


async def join(folder: Path, token: JoinToken | None, url: str, vm_id: str = VM) -> AgentIdentity | None:
    return await open_identity(folder, vm_id, token, urls=[url], ca_file=None, chance=random.Random(1))


# ---------------------------------------------------------------- joining


async def test_a_vm_joins_once_and_keeps_its_certificate(manager: SecureManager, tmp_path: Path) -> None:
    token = token_of(manager)
    joined = await join(tmp_path, token, manager.url)
    assert joined is not None
    assert (tmp_path / "identity.json").stat().st_mode & 0o777 == 0o600
    assert manager.hello(VM, joined.certificate.channel_credentials()) == "welcome"
    for again in (token, None):  # a new agent process: the token is used up, and not needed
        kept = await join(tmp_path, again, "https://127.0.0.1:1")
        assert kept is not None
        assert kept.certificate == joined.certificate
    with pytest.raises(JoinError, match="is of VM 'local-1', not of 'vm-9'"):
        await join(tmp_path, None, manager.url, "vm-9")
    newer = await join(tmp_path, token_of(manager), manager.url)
    assert newer is not None
    assert newer.certificate != joined.certificate


async def test_a_vm_that_may_not_join_again_keeps_the_certificate_that_it_has(
    manager: SecureManager, tmp_path: Path
) -> None:
    """Its token's file is written anew at each start of a fleet (docker/compose.yaml), for VMs that have not joined."""
    many = [JoinToken.parse_text(manager.token(name=name, join=True, single_use=False)) for name in ("1st", "2nd")]
    joined = await join(tmp_path, many[0], manager.url, "vm-many")
    assert joined is not None
    expired = JoinToken.parse_text(manager.token(name="late", join=True, vm_id="vm-many", ttl_s=0.1))
    await asyncio.sleep(0.2)  # its life
    for token, reason in ((many[1], "has joined before"), (expired, "expired")):
        with capture_logs() as log:
            kept = await join(tmp_path, token, manager.url, "vm-many")
        assert kept is not None
        assert kept.certificate == joined.certificate
        assert reason in log[-1]["reason"]
    (tmp_path / "identity.json").unlink()
    with pytest.raises(JoinError, match="has joined before"):
        await join(tmp_path, many[1], manager.url, "vm-many")


async def test_a_token_is_not_shown_to_another_authority(manager: SecureManager, tmp_path: Path) -> None:
    good = token_of(manager)
    text = f"{good.text.rpartition('.')[0]}.{'0' * 64}"
    before = manager.admin().get("/audit").json()
    with pytest.raises(JoinError, match="the token was not sent"):
        await join(tmp_path, JoinToken.parse_text(text), manager.url)
    assert [e for e in manager.admin().get("/audit").json() if e not in before and "join" in e["action"]] == []
    assert await join(tmp_path, good, manager.url) is not None  # so it is still good


async def test_what_keeps_a_vm_from_joining_is_said_in_one_line(manager: SecureManager, tmp_path: Path) -> None:
    cases = [
        (token_of(manager, "vm-7"), "is for VM 'vm-7', not for 'local-1'"),
        (JoinToken.parse_text(f"vj1.a.not-a-secret.{token_of(manager).pin}"), "does not know the join token"),
    ]
    for number, (token, words) in enumerate(cases):
        with pytest.raises(JoinError, match=words) as raised:
            await join(tmp_path / str(number), token, manager.url)
        assert len(str(raised.value).splitlines()) == 1
        assert token.text.split(".")[2] not in str(raised.value)
    for wrong in ("", "vt1.a.b", "vj1.a.b.c", "vj1.a.b." + "0" * 63):
        with pytest.raises(JoinError, match="malformed"):
            JoinToken.parse_text(wrong)


async def test_a_server_without_tls_is_none_to_join(tmp_path: Path) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(JoinError, match="speaks no TLS"):
            await join(tmp_path, JoinToken.parse_text(f"vj1.a.b.{'0' * 64}"), f"https://127.0.0.1:{port}")


async def test_a_vm_whose_clock_is_slow_waits_until_the_managers_certificate_is_valid(tmp_path: Path) -> None:
    authority = trustme.CA()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    later = datetime.now(UTC) + timedelta(hours=1)
    authority.issue_cert("127.0.0.1", not_before=later, not_after=later + timedelta(days=1)).configure_cert(context)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        status, body = (b"200 OK", authority.cert_pem.bytes()) if request.startswith(b"GET") else (b"403 No", b"")
        writer.write(b"HTTP/1.1 %b\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body))
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
    pin = hashlib.sha256(ssl.PEM_cert_to_DER_cert(authority.cert_pem.bytes().decode())).hexdigest()
    async with server:
        url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with capture_logs() as log:
            joining = asyncio.create_task(join(tmp_path, JoinToken.parse_text(f"vj1.a.b.{pin}"), url))
            await until(lambda: log, "an attempt", beside=joining)
            authority.issue_cert("127.0.0.1").configure_cert(context)
            with pytest.raises(JoinError, match="does not take VM"):
                await joining
    assert log[0]["event"] == "not joined yet"
    assert "compare the clocks of this VM and of the manager" in log[0]["reason"]


async def test_a_vm_waits_for_a_manager_that_is_not_there_yet(manager: SecureManager, tmp_path: Path) -> None:
    with socket.socket() as nobody:  # bound, and does not listen
        nobody.bind(("127.0.0.1", 0))
        away = f"https://127.0.0.1:{nobody.getsockname()[1]}"
        urls = [away, manager.url]
        assert (
            await open_identity(tmp_path, VM, token_of(manager), urls=urls, ca_file=None, chance=random.Random(1))
            is not None
        )


def test_the_agent_says_in_one_line_that_it_is_not_taken(manager: SecureManager, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(f"vj1.a.b.{token_of(manager).pin}\n")
    command = [sys.executable, "-m", "varuna_agent.main", "--manager", manager.grpc, "--vm-id", VM]
    command += ["--vm-dir", str(tmp_path / "vm"), "--join-url", manager.url]
    ended = subprocess.run(
        [*command, "--join-token-file", str(tmp_path / "token")],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert ended.returncode == 1
    assert ended.stderr.startswith("varuna agent: the manager at https://127.0.0.1")
    assert len(ended.stderr.splitlines()) == 1


# ---------------------------------------------------------------- dialling


class ManagerLinkListener:
    """Sends Hello when a stream opens, counts welcomes, and keeps the reasons for which streams closed."""

    def __init__(self) -> None:
        self.link: ManagerLink | None = None
        self.welcomes = 0
        self.reasons: list[str] = []
        self.news = asyncio.Event()

    def handle_stream_open(self) -> None:
        assert self.link is not None
        self.link.send_message(pb.AgentMessage(hello=pb.Hello(vm_id=VM, incarnation="1", gpus=1, host="127.0.0.1")))

    def receive_manager_message(self, message: pb.ManagerMessage) -> None:
        self.welcomes += message.HasField("welcome")
        self.news.set()

    def handle_stream_close(self, reason: str) -> None:
        self.reasons.append(reason)
        self.news.set()


@contextlib.asynccontextmanager
async def linked(
    addresses: str, identity: AgentIdentity | None = None, wait_s: float = 0.01
) -> AsyncIterator[ManagerLinkListener]:
    listener = ManagerLinkListener()
    link = listener.link = ManagerLink(addresses, Backoff(wait_s, wait_s, random.Random(1)), listener, identity)
    running = asyncio.create_task(link.run())
    try:
        yield listener
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def wait_for_news(listener: ManagerLinkListener, reasons: int = 0, welcomes: int = 0) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while len(listener.reasons) < reasons or listener.welcomes < welcomes:
            listener.news.clear()
            await listener.news.wait()


@contextlib.asynccontextmanager
async def serving(servicer: agent_pb2_grpc.AgentServiceServicer) -> AsyncIterator[str]:
    server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
    agent_pb2_grpc.add_AgentServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def test_a_standby_and_a_dead_manager_are_passed_over_at_once() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        dead = f"127.0.0.1:{nobody.getsockname()[1]}"
        async with (
            serving(StandbyManager()) as standby,
            serving(FakeManager()) as leader,
            linked(f"{standby},{dead},{leader}", wait_s=600) as listener,  # one wait would be longer than the test
        ):
            await wait_for_news(listener, welcomes=1)
    assert len(listener.reasons) >= 2
    assert "not the leader" in listener.reasons[0]


async def test_a_link_ends_though_its_stream_swallows_the_cancellation(monkeypatch: pytest.MonkeyPatch) -> None:
    """grpc.aio raises AioRpcError in place of it where a connection fails just then: at 3 of 300 moments, measured."""

    async def read(self: ManagerLink, call: object) -> str:
        if self is listener.link and not listener.reasons:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
        return "UNAVAILABLE"

    monkeypatch.setattr(ManagerLink, "_read", read)
    listener = ManagerLinkListener()
    listener.link = ManagerLink("127.0.0.1:1", Backoff(0.01, 0.01, random.Random(1)), listener)
    running = asyncio.create_task(listener.link.run())
    await asyncio.sleep(0)
    running.cancel()
    _, pending = await asyncio.wait([running], timeout=DEADLINE_S)
    assert not pending
    assert running.cancelled()


class SilentManager(FakeManager):
    """Sends one chunk of an archive."""

    async def FetchArchive(self, request: pb.ArchiveRequest, context: object) -> AsyncIterator[pb.ArchiveChunk]:  # noqa: N802
        yield pb.ArchiveChunk(data=b"first")
        await asyncio.Event().wait()


async def test_an_archive_that_does_not_come_further_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager_link, "_CHUNK_LIMIT_S", 0.5)
    async with serving(SilentManager()) as silent:
        link = ManagerLink(silent, Backoff(1, 1, random.Random(1)), ManagerLinkListener())
        chunks = link.fetch_archive(VM, "0" * 64)
        assert await anext(chunks) == b"first"
        with pytest.raises(WorkdirError, match="nothing came for"):
            async with asyncio.timeout(DEADLINE_S):
                await anext(chunks)


async def test_a_round_without_a_leader_ends_with_a_wait() -> None:
    standbys = StandbyManager(), StandbyManager()
    async with (
        serving(standbys[0]) as first,
        serving(standbys[1]) as second,
        linked(f"{first},{second}", wait_s=600) as listener,
    ):
        await wait_for_news(listener, reasons=2)
        await asyncio.sleep(0.3)
    assert [standby.connections for standby in standbys] == [1, 1]


async def test_an_agent_that_does_not_fit_its_manager_says_so(manager: SecureManager, tmp_path: Path) -> None:
    joined = manager.joined(VM)
    certificate = VmCertificate(
        key_pem=joined.key.pem.decode(),
        certificate_pem=joined.certificate.decode(),
        ca_pem=joined.ca.decode(),
        token_id="x",
    )
    identity = AgentIdentity(certificate, tmp_path / "identity.json", random.Random(1))
    async with linked(manager.grpc) as listener:
        await wait_for_news(listener, reasons=1)
    assert "give this agent a --join-token-file" in listener.reasons[0]
    async with serving(FakeManager()) as plain, linked(plain, identity) as listener:
        await wait_for_news(listener, reasons=1)
    assert "speaks no TLS" in listener.reasons[0]
    other = open_authority(tmp_path / "pki")
    stranger = VmCertificate(
        key_pem=certificate.key_pem,
        certificate_pem=other.sign_agent_certificate(
            joined.key.public, AgentSubject(VM, "1"), timedelta(hours=1)
        ).decode(),
        ca_pem=other.ca_pem.decode(),
        token_id="x",
    )
    async with linked(manager.grpc, AgentIdentity(stranger, tmp_path / "other.json", random.Random(1))) as listener:
        await wait_for_news(listener, reasons=1)
    assert "not from the authority that this VM joined" in listener.reasons[0]
    async with linked(manager.grpc, identity) as listener:
        await wait_for_news(listener, welcomes=1)


# ---------------------------------------------------------------- renewing


class ThreeQuartersOfAnHourAgo(datetime):
    """Stands for `datetime` where certificates are signed."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override] # a plain one
        return datetime.now(tz) - timedelta(minutes=45)


def nearly_over(manager: SecureManager, path: Path) -> AgentIdentity:
    """With a certificate that its agent renews at once, and that is good for a quarter of an hour all the same."""
    joined = manager.joined(VM)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("varuna_manager.access.authority.datetime", ThreeQuartersOfAnHourAgo)
        joined = manager.same_with_life(joined, timedelta(hours=1))
    certificate = VmCertificate(
        key_pem=joined.key.pem.decode(),
        certificate_pem=joined.certificate.decode(),
        ca_pem=joined.ca.decode(),
        token_id="x",
    )
    return AgentIdentity(certificate, path, random.Random(1))


@contextlib.asynccontextmanager
async def renewing(identity: AgentIdentity, manager: SecureManager) -> AsyncIterator[None]:
    keeping = asyncio.create_task(identity.keep_renewed([manager.grpc]))
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield
    finally:
        keeping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await keeping


async def is_true(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - the condition lies on the disk
        await asyncio.sleep(0.02)


async def test_renewal_passes_by_the_proxy_as_the_stream_does(
    manager: SecureManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
            monkeypatch.delenv(name, raising=False)
        for name in ("grpc_proxy", "https_proxy", "http_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{nobody.getsockname()[1]}")
        identity = nearly_over(manager, tmp_path / "identity.json")
        until = identity.certificate.not_after
        async with renewing(identity, manager):
            await is_true((tmp_path / "identity.json").exists)
    assert identity.certificate.not_after > until


async def test_a_renewed_certificate_that_cannot_be_kept_counts_and_is_tried_again(
    manager: SecureManager, tmp_path: Path
) -> None:
    path = tmp_path / "identity" / "identity.json"  # no such folder: no disk takes it
    identity = nearly_over(manager, path)
    until = identity.certificate.not_after
    async with renewing(identity, manager):
        await is_true(lambda: identity.certificate.not_after > until)
        path.parent.mkdir()
        await is_true(path.exists)
    assert VmCertificate.load_file(path) == identity.certificate
    assert manager.hello(VM, identity.certificate.channel_credentials()) == "welcome"
