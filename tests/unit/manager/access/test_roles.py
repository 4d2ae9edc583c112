"""The policy of who may call what, its limits, an open manager's guard against web pages, and names in paths."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from migrated_stores import migrated
from varuna_agent.link.manager_link import _find_unsafe_job_id
from varuna_client.commands.access import _seconds
from varuna_client.errors import UserError
from varuna_manager.access.audit import AuditLog
from varuna_manager.access.rate_limiter import RateLimiter
from varuna_manager.access.tokens import TokenService
from varuna_manager.api.grpc.limits import MAX_MESSAGE_BYTES, find_excess
from varuna_manager.api.http.access import AccessMiddleware, AccessServices, RequestLimits, required_role
from varuna_manager.api.http.roles import CutOffApp
from varuna_manager.db.engine import Database
from varuna_manager.domain.access import Role
from varuna_manager.providers.base import UnknownVmError
from varuna_manager.providers.local import LocalMachine, LocalProvider
from varuna_manager.server.process import _make_http_server
from varuna_manager.settings import ManagerSettings
from varuna_proto.hosts import caller_of
from varuna_proto.names import is_plain, plain
from varuna_proto.v1 import agent_pb2 as pb

# ---------------------------------------------------------------- names that become paths

odd_names = st.one_of(st.text(max_size=80), st.text(alphabet="./\\~a\0-\n", max_size=12), st.sampled_from(["..", "."]))


@given(name=odd_names)
def test_a_plain_name_is_one_segment_of_a_path(name: str) -> None:
    if is_plain(name):
        assert (Path("/base") / name).resolve() == Path(f"/base/{name}")
        assert os.path.normpath(f"/base/{name}") == f"/base/{name}"
    else:
        with pytest.raises(ValueError, match="no plain name"):
            plain(name, "VM")


@given(job=odd_names)
def test_a_manager_that_names_an_odd_job_is_not_followed(job: str) -> None:
    messages = [
        pb.ManagerMessage(launch=pb.Launch(job_id=job)),
        pb.ManagerMessage(stop=pb.Stop(job_id=job)),
        pb.ManagerMessage(fetch_logs=pb.FetchLogs(job_id=job)),
    ]
    assert [_find_unsafe_job_id(message) for message in messages] == [None if is_plain(job) else job] * 3
    assert _find_unsafe_job_id(pb.ManagerMessage(ack=pb.Ack())) is None


@given(vm=odd_names.filter(lambda name: not is_plain(name)))
async def test_the_local_provider_touches_no_path_but_its_vms(tmp_path_factory: Any, vm: str) -> None:
    folder: Path = tmp_path_factory.getbasetemp() / "provider"
    (folder / "vms").mkdir(parents=True, exist_ok=True)
    (folder / "vm.json").write_text('{"pid": 1, "process_created_at": 0}')  # what `..` would find
    provider = LocalProvider(folder, "127.0.0.1:1", LocalMachine(), None)
    with pytest.raises(UnknownVmError):
        await provider.preempt_vm(vm, 0.0)
    await provider.delete([vm])
    with pytest.raises(ValueError, match="no plain name"):
        provider.log_path(vm, "job-1", 1, 0)
    with pytest.raises(ValueError, match="no plain name"):
        provider.log_path("local-1", vm, 1, 0)


# ---------------------------------------------------------------- policy

SAFE, CHANGING = ("GET", "HEAD", "OPTIONS"), ("POST", "PUT", "PATCH", "DELETE")


@given(
    method=st.sampled_from(CHANGING),
    path=st.text(alphabet="abc/._-%", max_size=20).map(lambda rest: f"/api/v1/{rest}"),
)
def test_what_nobody_thought_of_is_for_admins_to_change(method: str, path: str) -> None:
    assert required_role(method, path) is Role.ADMIN


@pytest.mark.parametrize(
    ("method", "path", "role"),
    [
        ("GET", "/api/v1/jobs", Role.VIEWER),
        ("GET", "/api/v1/whatever/comes", Role.VIEWER),
        ("GET", "/metrics", Role.VIEWER),
        ("POST", "/api/v1/jobs", Role.USER),
        ("POST", "/api/v1/jobs/job-1/cancel", Role.USER),
        ("POST", "/api/v1/jobsx", Role.ADMIN),
        ("POST", "/api/v1/vms/local-1/preempt", Role.ADMIN),
        ("PUT", "/api/v1/fleet", Role.ADMIN),
        ("GET", "/api/v1/tokens", Role.ADMIN),
        ("GET", "/api/v1/audit", Role.ADMIN),
        ("POST", "/api/v1/join", None),
        ("GET", "/healthz", None),
        ("GET", "/", None),
    ],
)
def test_the_policy(method: str, path: str, role: Role | None) -> None:
    assert required_role(method, path) is role


def test_a_role_covers_those_before_it() -> None:
    assert [[have.is_at_least(need) for need in Role] for have in Role] == [
        [True, False, False],
        [True, True, False],
        [True, True, True],
    ]


@pytest.mark.parametrize(
    ("host", "secure", "is_secure"),
    [
        ("127.0.0.1", False, False),
        ("localhost", False, False),
        ("::1", False, False),
        ("127.0.0.1", True, True),
        ("0.0.0.0", False, True),
        ("10.1.2.3", False, True),
        ("::", False, True),
        ("manager.example", False, True),
    ],
)
def test_only_loopback_can_be_open(host: str, secure: bool, is_secure: bool) -> None:
    assert ManagerSettings(host=host, secure=secure).is_secure is is_secure


# ---------------------------------------------------------------- limits


@given(per_s=st.floats(0.1, 100), burst=st.integers(1, 50), gaps=st.lists(st.floats(0, 5), max_size=100))
def test_no_key_gets_more_than_its_burst_and_its_rate(per_s: float, burst: int, gaps: list[float]) -> None:
    now = 0.0
    limiter = RateLimiter(per_s, burst, lambda: now)
    taken = 0
    for gap in gaps:
        now += gap
        wait_s = limiter.count_call("a")
        if wait_s == 0.0:
            taken += 1
        else:
            assert wait_s <= 1 / per_s + 1e-6
        assert taken <= burst + per_s * now + 1e-6
    assert limiter.count_call("b") == 0.0
    now += burst / per_s + 1e-6
    assert limiter.count_call("a") == 0.0


def test_buckets_forget_the_keys_used_longest_ago() -> None:
    limiter = RateLimiter(0.001, 1, lambda: 0.0)
    for number in range(10_001):
        assert limiter.count_call(str(number)) == 0.0
    assert limiter.count_call("0") == 0.0  # forgotten
    assert limiter.count_call("10000") > 0.0


def test_messages_have_a_size_by_their_kind() -> None:
    large = "x" * 2_000_000
    assert find_excess(pb.AgentMessage(heartbeat=pb.Heartbeat(sequence=1))) is None
    assert find_excess(pb.AgentMessage(hello=pb.Hello(vm_id=large))) is not None
    assert find_excess(pb.AgentMessage(log_chunk=pb.LogChunk(data=b"x" * 2_000_000))) is not None
    exited = pb.Report(worker_exited=pb.WorkerExited(error_text=large))
    assert "kind report" in (find_excess(pb.AgentMessage(report=exited)) or "")
    profile = pb.Report(profile_measured=pb.ProfileMeasured(profile_json=large))
    assert find_excess(pb.AgentMessage(report=profile)) is None
    assert MAX_MESSAGE_BYTES > 2_000_000


# ---------------------------------------------------------------- before every call


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    migrated(tmp_path / "manager.db")
    store = Database(f"sqlite:///{tmp_path / 'manager.db'}")
    yield store
    await store.close()


async def answer(scope: Scope, receive: Receive, send: Send) -> None:
    await JSONResponse({"who": scope["state"]["principal"].name})(scope, receive, send)


def caller(
    database: Database, tokens: TokenService | None, limits: RequestLimits, url: str = "http://x"
) -> httpx.AsyncClient:
    services = AccessServices(audit=AuditLog(database), tokens=tokens, enrolments=None, limits=limits)
    transport = httpx.ASGITransport(AccessMiddleware(answer, services), client=("10.0.0.7", 1))
    return httpx.AsyncClient(transport=transport, base_url=url)


async def test_changes_have_a_rate_and_reads_have_none(database: Database) -> None:
    tokens = TokenService(database, pin="")
    token = (await tokens.create_access_token("ann", Role.USER, None, by="test"))["token"]
    limits = RequestLimits(changes=RateLimiter(0.001, 3))
    async with caller(database, tokens, limits) as client:
        client.headers["Authorization"] = f"Bearer {token}"
        codes = [(await client.post("/api/v1/jobs")).status_code for _ in range(5)]
        assert codes == [200, 200, 200, 429, 429]
        assert (await client.get("/api/v1/jobs")).json() == {"who": "ann"}
    audit = await AuditLog(database).list_entries(0, 100)
    assert [(entry["who"], entry["address"], entry["status"]) for entry in audit] == [("ann", "10.0.0.7", 200)] * 3


async def test_the_record_says_what_a_call_that_is_cut_off_was_answered(database: Database) -> None:
    called = asyncio.Event()

    async def wait(scope: Scope, receive: Receive, send: Send) -> None:
        called.set()
        await asyncio.Event().wait()

    services = AccessServices(audit=AuditLog(database), tokens=None, enrolments=None, limits=RequestLimits())
    transport = httpx.ASGITransport(CutOffApp(AccessMiddleware(wait, services)))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        asking = asyncio.create_task(client.post("/api/v1/jobs"))
        await called.wait()
        asking.cancel()
        assert (await asking).status_code == 503
    assert [entry["status"] for entry in await AuditLog(database).list_entries(0, 9)] == [503]


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


async def test_wrong_tokens_lock_out_nobody_else_at_the_same_address(database: Database) -> None:
    tokens = TokenService(database, pin="")
    good = (await tokens.create_access_token("ann", Role.VIEWER, None, by="test"))["token"]
    join = (await tokens.create_join_token("vm", 3600.0, single_use=True, vm_id=None, by="test"))["token"]
    async with caller(database, tokens, RequestLimits(failures=RateLimiter(0.001, 10))) as client:
        wrong = [await client.get("/api/v1/jobs", headers=bearer("vt1.0.0")) for _ in range(12)]
        assert [answer.status_code for answer in wrong] == [401] * 10 + [429] * 2
        assert int(wrong[-1].headers["retry-after"]) >= 1
        assert (await client.get("/api/v1/jobs", headers=bearer(good))).status_code == 200
        for path in ("/healthz", "/readyz", "/api/v1/healthz", "/api/v1/readyz", "/", "/api/v1/ca"):
            assert (await client.get(path)).status_code == 200, path
        assert (await client.post("/api/v1/join", headers=bearer(join))).status_code == 200
        assert (await client.post("/api/v1/join", headers=bearer("vj1.0.0.0"))).status_code == 429
        assert (await client.get("/api/v1/jobs")).status_code == 401, "who shows no token hears that one is asked for"
    assert len(await AuditLog(database).list_entries(0, 100)) == 10, "the record does not grow with every guess"


async def test_a_machine_that_guesses_from_all_its_ipv6_addresses_is_one_caller() -> None:
    assert caller_of("2001:db8::1") == caller_of("2001:db8::ffff:1") != caller_of("2001:db8:0:1::1")
    assert caller_of("::ffff:10.0.0.7") == caller_of("10.0.0.7") != caller_of("10.0.0.8")


@pytest.mark.long
@pytest.mark.parametrize(
    ("peer", "forwarded", "address"),
    [
        ("10.0.0.1", "203.0.113.9", "203.0.113.9"),
        ("10.0.0.1", "1.2.3.4, 203.0.113.9", "203.0.113.9"),  # the caller's own header comes first
        ("10.0.0.1", "1.2.3.4, 203.0.113.9, 10.1.2.3", "203.0.113.9"),
        ("10.0.0.1", "2001:db8::1", "2001:db8::1"),
        ("10.0.0.1", "\0junk" * 100, "unknown"),
        ("10.0.0.1", None, "10.0.0.1"),
        ("::ffff:10.0.0.1", "203.0.113.9", "203.0.113.9"),
        ("10.0.0.2", "203.0.113.9", "10.0.0.2"),  # no proxy of ours
    ],
)
async def test_a_callers_address_is_what_trusted_proxies_say(
    database: Database, peer: str, forwarded: str | None, address: str
) -> None:
    trusted = ManagerSettings(trusted_proxies="10.0.0.1, 10.1.0.0/16").proxies
    services = AccessServices(audit=AuditLog(database), tokens=None, enrolments=None, limits=RequestLimits())
    config = _make_http_server(AccessMiddleware(answer, services), None, trusted).config
    config.load()
    transport = httpx.ASGITransport(config.loaded_app, client=(peer, 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        sent = [] if forwarded is None else [(b"x-forwarded-for", forwarded.encode())]
        assert (await client.post("/api/v1/jobs", headers=sent)).status_code == 200
    assert [entry["address"] for entry in await AuditLog(database).list_entries(0, 9)] == [address]


@pytest.mark.parametrize("text", ["*", "proxy.example", "10.0.0.1,", "10.0.0.1/8", "10.0.0.1 10.0.0.2"])
def test_trusted_proxies_are_addresses_and_networks(text: str) -> None:
    with pytest.raises(ValidationError, match="is neither an address nor a network"):
        ManagerSettings(trusted_proxies=text)


@pytest.mark.parametrize("host", ["127.0.0.1:8750", "localhost:8750", "[::1]:8750", "127.8.8.8"])
async def test_an_open_manager_answers_to_the_names_of_its_machine(database: Database, host: str) -> None:
    async with caller(database, None, RequestLimits(), f"http://{host}") as client:
        assert (await client.post("/api/v1/jobs")).status_code == 200
        assert (await client.post("/api/v1/jobs", headers={"Origin": f"http://{host}"})).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", "10.0.0.1"])
async def test_a_web_page_that_names_itself_after_this_machine_is_refused(database: Database, host: str) -> None:
    async with caller(database, None, RequestLimits(), f"http://{host}") as client:
        assert (await client.get("/api/v1/jobs")).status_code == 403


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "https://127.0.0.1:8750", "http://127.0.0.1:9"])
async def test_a_page_of_elsewhere_changes_nothing(database: Database, origin: str) -> None:
    async with caller(database, None, RequestLimits(), "http://127.0.0.1:8750") as client:
        refused = await client.post("/api/v1/jobs/job-1/cancel", headers={"Origin": origin})
        assert refused.status_code == 403
        assert (await client.get("/api/v1/jobs", headers={"Origin": origin})).status_code == 200  # it cannot read it


async def test_no_header_but_a_tokens_authenticates(database: Database) -> None:
    tokens = TokenService(database, pin="")
    token = (await tokens.create_access_token("ann", Role.USER, None, by="test"))["token"]
    odd = ["", "Bearer", "Bearer ", f"Basic {token}", f"Bearer {token}x", f"Bearer {token[:-1]}", f"Bearer {token}."]
    odd += [
        token,
        "Bearer vt1..",
        "Bearer vt1.\0.x",
        "Bearer vt1.é.é",
        f"Bearer {token} {token}",
        "Bearer " + "." * 600,
    ]
    async with caller(database, tokens, RequestLimits(failures=RateLimiter(1e9, 1))) as client:
        for text in odd:
            sent = {b"authorization": text.encode()}
            assert (await client.get("/api/v1/jobs", headers=sent)).status_code == 401, text  # type: ignore[arg-type]
        assert (await client.get("/api/v1/jobs", headers={"Authorization": f"bearer {token}"})).status_code == 200


async def test_long_headers_and_queries_are_refused(database: Database) -> None:
    async with caller(database, None, RequestLimits(), "http://127.0.0.1") as client:
        assert (await client.get("/api/v1/jobs", headers={"X-Long": "x" * 40_000})).status_code == 431
        assert (await client.get("/api/v1/jobs", params={"q": "x" * 40_000})).status_code == 431


async def test_a_path_with_a_nul_is_refused_before_anything_is_recorded(database: Database) -> None:
    async with caller(database, None, RequestLimits(), "http://127.0.0.1") as client:
        for call in (client.get, client.delete):
            answer = await call("/api/v1/jobs/%00")
            assert (answer.status_code, answer.json()["detail"]) == (
                400,
                "the path has a NUL character in it: remove it",
            )
    assert await AuditLog(database).list_entries(0, 10) == []


async def test_no_page_may_be_framed_by_another(database: Database) -> None:
    async with caller(database, None, RequestLimits(), "http://127.0.0.1") as client:
        for path in ("/", "/docs"):
            assert (await client.get(path)).headers["x-frame-options"] == "DENY"


# ---------------------------------------------------------------- the client's side


def test_how_long_a_token_is_good() -> None:
    assert [_seconds(text) for text in ("", "90s", "30m", "1h", "7d")] == [None, 90.0, 1800.0, 3600.0, 604_800.0]
    for wrong in ("1", "h", "-1h", "1w", "1.5h"):
        with pytest.raises(UserError, match="90s, 30m, 1h or 7d"):
            _seconds(wrong)
