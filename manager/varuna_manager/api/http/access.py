"""What stands before every call of the REST API: limits, authentication, authorisation, the audit record.

One policy by method and path, closed by default: a route that is added later can be read by viewers and changed with by
admins only, until `required_role` says otherwise.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import structlog
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from varuna_manager.api.http.problems import problem, problem_of
from varuna_manager.db.engine import NotLeaderError, StoreAwayError
from varuna_manager.domain.access import OPEN, Principal, Role
from varuna_manager.services.archives import MOST_BYTES
from varuna_manager.services.audit import AuditLog
from varuna_manager.services.buckets import Buckets
from varuna_manager.services.enrolments import EnrolmentService
from varuna_manager.services.errors import ForbiddenError, ServiceError, UnauthenticatedError
from varuna_manager.services.tokens import TokenService
from varuna_proto.hosts import caller_of, is_loopback

MAX_HEADER_BYTES = 32 * 1024
_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
_JOIN = "/api/v1/join"
_ARCHIVES = "/api/v1/archives/"
_Found = TypeVar("_Found")
_PUBLIC = frozenset(
    {
        ("GET", "/api/v1/healthz"),
        ("GET", "/api/v1/readyz"),
        ("GET", "/api/v1/ca"),
        ("GET", "/api/v1/agent/wheel"),
        ("GET", "/api/v1/agent/constraints"),
        ("POST", _JOIN),
    }
)
"""Joining takes a token of its own."""
_MISSING = "this manager asks for a token: set VARUNA_TOKEN, or pass --token-file (Authorization: Bearer vt1...)"
_MISSING_JOIN = "a join token is missing: send it as Authorization: Bearer vj1..."
_PAGE_HEADERS = {
    "content-security-policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; "
    # The two style elements that plotly.js makes, by their contents; it adds rules to them by script.
    "style-src 'self' 'sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU=' "
    "'sha256-ji27qzEtxXZW+7dun6UwjHXJ18e6WAin1VvNtkzIE/o='",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
}


def required_role(method: str, path: str) -> Role | None:
    """The role that a call needs; None: anybody may make it (health, the page's own files, joining)."""
    guarded = path == "/metrics" or path == "/api" or path.startswith("/api/")
    if not guarded or (method, path) in _PUBLIC:
        return None
    if path.startswith(("/api/v1/tokens", "/api/v1/audit")):
        return Role.ADMIN
    if method in _SAFE:
        return Role.VIEWER
    return Role.USER if path == "/api/v1/jobs" or path.startswith(("/api/v1/jobs/", _ARCHIVES)) else Role.ADMIN


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one caller may ask of the manager."""

    max_body_bytes: int = 1024 * 1024
    max_archive_bytes: int = MOST_BYTES
    """Of a packed workdir."""
    changes: Buckets = field(default_factory=lambda: Buckets(per_s=20.0, burst=100))
    """Calls that change something, by token."""
    failures: Buckets = field(default_factory=lambda: Buckets(per_s=0.2, burst=10))
    """Calls with no good token, by address. It bounds these calls alone: whoever has a good token, and a health probe,
    may come from the same address."""

    def most_bytes(self, path: str) -> int:
        """Of a call's body."""
        return self.max_archive_bytes if path.startswith(_ARCHIVES) else self.max_body_bytes


@dataclass(frozen=True, kw_only=True)
class AccessServices:
    """`tokens` and `enrolments` are None at an open manager: on a loopback address only, whoever reaches it may all."""

    audit: AuditLog
    tokens: TokenService | None
    enrolments: EnrolmentService | None
    limits: Limits


class AccessMiddleware:
    def __init__(self, app: ASGIApp, services: AccessServices) -> None:
        self._app = app
        self._tokens = services.tokens
        self._audit = services.audit
        self._limits = services.limits
        self._log = structlog.get_logger("varuna.access")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        header_bytes = len(scope["query_string"]) + sum(len(name) + len(value) for name, value in scope["headers"])
        call = _Call(scope["method"], scope["path"], caller_address(scope), header_bytes)
        try:
            principal = await self._admit(call, headers)
            entry = await self._begin(call, principal)
        except ServiceError as error:
            await problem_of(error)(scope, receive, send)
            return
        except (NotLeaderError, StoreAwayError) as error:
            await problem(503, str(error), {"Retry-After": "1"})(scope, receive, send)
            return
        except HTTPException as error:
            await problem(error.status_code, error.detail, error.headers)(scope, receive, send)
            return
        scope.setdefault("state", {})["principal"] = principal or OPEN
        answered, unanswered = _Answered(send, scope["path"]), 500
        try:
            await self._app(scope, _Counted(receive, self._limits.most_bytes(call.path)), answered)
        except asyncio.CancelledError:
            unanswered = 503  # as `roles.CutOff` answers
            raise
        finally:
            await self._end(call, entry, answered.status or unanswered, scope["state"].get("joined"))

    async def _admit(self, call: _Call, headers: Headers) -> Principal | None:
        """Who calls; None: nobody is asked. Raises ServiceError, HTTPException."""
        if call.header_bytes > MAX_HEADER_BYTES:
            raise HTTPException(431, f"address and headers are larger than {MAX_HEADER_BYTES} bytes: send less")
        length = headers.get("content-length", "")
        most = self._limits.most_bytes(call.path)
        if length.isdecimal() and int(length) > most:
            raise HTTPException(413, f"the body is larger than {most} bytes: send less")
        if self._tokens is None:
            _refuse_foreign_pages(call, headers)
            return OPEN
        needed = required_role(call.method, call.path)
        if needed is None:
            if call.path == _JOIN and call.changes:
                await self._check(call, headers, self._tokens.check_join)
            return None
        principal = await self._check(call, headers, self._tokens.authenticate)
        if not principal.role.covers(needed):
            with suppress(NotLeaderError, StoreAwayError):
                await self._audit.begin(principal, call.address, call.action, status=403)
            raise ForbiddenError(
                f"token {principal.name!r} has the role {principal.role.value}, and {call.action} needs "
                f"{needed.value}: ask an admin for such a token"
            )
        wait_s = self._limits.changes.take(principal.name) if call.changes else 0.0
        if wait_s:
            raise _too_many(wait_s, f"token {principal.name!r} makes too many changes")
        return principal

    async def _check(self, call: _Call, headers: Headers, find: Callable[[str], Awaitable[_Found]]) -> _Found:
        """What `find` knows of the call's token. The token is looked at first, and only then how often this address
        has failed: else ten wrong tokens would lock out everybody behind it.

        Raises UnauthenticatedError, HTTPException.
        """
        scheme, _, rest = headers.get("authorization", "").partition(" ")
        text = rest.strip() if scheme.lower() == "bearer" else ""
        try:
            if not text:
                raise UnauthenticatedError(_MISSING_JOIN if call.path == _JOIN else _MISSING)
            return await find(text)
        except UnauthenticatedError as error:
            wait_s = await self._note_failure(call, str(error))
            if wait_s and text:  # who shows no token guesses nothing, and may need to hear that one is asked for
                raise _too_many(wait_s, f"too many calls without a good token came from {call.address}") from error
            raise

    async def _note_failure(self, call: _Call, reason: str) -> float:
        """In the log and the record; the bucket bounds how often. 0, or how long the address has to wait."""
        wait_s = self._limits.failures.take(caller_of(call.address))
        if wait_s:
            return wait_s
        self._log.warning("a call was not authenticated", address=call.address, call=call.action, reason=reason)
        with suppress(NotLeaderError, StoreAwayError):  # a manager that stands by writes nothing
            await self._audit.begin(None, call.address, call.action, status=401)
        return 0.0

    async def _begin(self, call: _Call, principal: Principal | None) -> int | None:
        if not call.changes or call.path == _JOIN:
            return None
        return await self._audit.begin(principal, call.address, call.action)

    async def _end(self, call: _Call, entry: int | None, status: int, joined: str | None) -> None:
        try:
            if entry is not None:
                await self._audit.end(entry, status)
            elif call.path == _JOIN and status in (401, 403):
                await self._note_failure(call, "its join token was refused")
            elif joined is not None:
                await self._audit.begin(None, call.address, call.action, status=status, who=f"VM {joined}")
        except (NotLeaderError, StoreAwayError) as error:
            self._log.warning("an answer was not recorded", call=call.action, status=status, reason=str(error))


@dataclass(frozen=True)
class _Call:
    method: str
    path: str
    address: str
    header_bytes: int
    """With the query."""

    @property
    def action(self) -> str:
        return f"{self.method} {self.path}"

    @property
    def changes(self) -> bool:
        return self.method not in _SAFE


def principal_of(request: Request) -> Principal:
    """Who makes the call."""
    found = request.scope["state"]["principal"]
    assert isinstance(found, Principal), "the middleware has put it there"
    return found


def caller_address(scope: Scope) -> str:
    """The IP address of whoever calls; "unknown" where a proxy names something that is none."""
    host = scope["client"][0] if scope.get("client") else ""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return "unknown"


class _Counted:
    """What is received, up to so many bytes. FastAPI passes the HTTPException on."""

    def __init__(self, receive: Receive, most: int) -> None:
        self._receive = receive
        self._most = most
        self._left = most

    async def __call__(self) -> Message:
        message = await self._receive()
        self._left -= len(message.get("body", b""))
        if self._left < 0:
            raise HTTPException(413, f"the body is larger than {self._most} bytes: send less")
        return message


class _Answered:
    """Sends on, adds headers, and remembers the status."""

    def __init__(self, send: Send, path: str) -> None:
        self._send = send
        self._path = path
        self.status: int | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            _add_headers(message, self._path)
        await self._send(message)


def _add_headers(message: MutableMapping[str, Any], path: str) -> None:
    added = {"x-content-type-options": "nosniff"}
    if path.startswith("/api/"):
        added["cache-control"] = "no-store"
    elif not path.startswith("/docs"):  # whose scripts come from elsewhere
        added |= _PAGE_HEADERS
    message["headers"] = [*message["headers"], *((key.encode(), value.encode()) for key, value in added.items())]


def _refuse_foreign_pages(call: _Call, headers: Headers) -> None:
    """Without tokens, a page of any web site that the user has open could call a manager on this machine.

    Its calls carry its `Origin`; if it has its own name resolve to this machine, they carry that name as `Host`.
    """
    host = headers.get("host", "")
    if not _is_this_machine(host):
        raise ForbiddenError(
            f"Host {host!r} is no name of this machine: call an open manager as localhost or 127.0.0.1, or start it "
            "with --secure"
        )
    origin = headers.get("origin")
    if call.changes and origin not in (None, f"http://{host}"):
        raise ForbiddenError(f"a page of {origin!r} may change nothing here")


def _is_this_machine(host: str) -> bool:
    """Whether a Host header names a loopback address."""
    name = host.partition("]")[0].removeprefix("[") if host.startswith("[") else host.partition(":")[0]
    return is_loopback(name)


def _too_many(wait_s: float, text: str) -> HTTPException:
    seconds = max(1, round(wait_s + 0.5))
    return HTTPException(429, f"{text}: try again in {seconds} s", {"Retry-After": str(seconds)})
