"""What every REST request passes first: limits, authentication, authorisation, the audit log.

One policy by method and path, closed by default: viewers may read a new route and only admins may change something with
it, until `required_role` says otherwise.
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

from varuna_manager.access.audit import AuditLog
from varuna_manager.access.enrolments import EnrolmentService
from varuna_manager.access.rate_limiter import RateLimiter
from varuna_manager.access.tokens import TokenService
from varuna_manager.answers.errors import ForbiddenError, ServiceError, UnauthenticatedError
from varuna_manager.api.http.problems import problem, problem_of
from varuna_manager.db.engine import NotLeaderError, StoreAwayError
from varuna_manager.domain.access import OPEN_PRINCIPAL, Principal, Role
from varuna_manager.jobs.archives import MOST_BYTES
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
"""Joining checks a join token instead."""
_CHANGE_NOTHING = frozenset({("POST", "/api/v1/jobs/dry-run")})
"""Calls with a body that only ask: the dashboard makes them while a user types."""
_MISSING = "this manager requires a token: set VARUNA_TOKEN, or pass --token-file (Authorization: Bearer vt1...)"
_MISSING_JOIN = "a join token is missing: send it as Authorization: Bearer vj1..."
_OWN_SCRIPTS = {
    "content-security-policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; "
    # The two style elements that plotly.js creates, by their contents; it adds rules to them by script.
    "style-src 'self' 'sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU=' "
    "'sha256-ji27qzEtxXZW+7dun6UwjHXJ18e6WAin1VvNtkzIE/o='",
}
_NOT_FRAMED = {"x-frame-options": "DENY", "referrer-policy": "no-referrer"}


def required_role(method: str, path: str) -> Role | None:
    """The role that a request needs; None: it needs no token of REST (health, the dashboard's files, joining)."""
    guarded = path == "/metrics" or path == "/api" or path.startswith("/api/")
    if not guarded or (method, path) in _PUBLIC:
        return None
    if path.startswith(("/api/v1/tokens", "/api/v1/audit")):
        return Role.ADMIN
    if method in _SAFE:
        return Role.VIEWER
    return Role.USER if path == "/api/v1/jobs" or path.startswith(("/api/v1/jobs/", _ARCHIVES)) else Role.ADMIN


@dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """How large requests may be, and how many of them one caller may send."""

    max_body_bytes: int = 1024 * 1024
    max_archive_bytes: int = MOST_BYTES
    """Largest packed workdir."""
    changes: RateLimiter = field(default_factory=lambda: RateLimiter(per_s=20.0, burst=100))
    """Requests that change something, by token."""
    failures: RateLimiter = field(default_factory=lambda: RateLimiter(per_s=0.2, burst=10))
    """Requests without a valid token, by address. Requests with a valid token and health probes from the same address
    are not limited by it."""

    def body_limit(self, path: str) -> int:
        """Most bytes of a request's body."""
        return self.max_archive_bytes if path.startswith(_ARCHIVES) else self.max_body_bytes


@dataclass(frozen=True, kw_only=True)
class AccessServices:
    """An open manager has no `tokens` and no `enrolments`: it listens on loopback only, and callers may do anything."""

    audit: AuditLog
    tokens: TokenService | None
    enrolments: EnrolmentService | None
    limits: RequestLimits


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
        call = _ApiCall(scope["method"], scope["path"], get_caller_address(scope), header_bytes)
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
        scope.setdefault("state", {})["principal"] = principal or OPEN_PRINCIPAL
        answered, unanswered = _StatusRecorder(send, scope["path"]), 500
        try:
            await self._app(scope, _BoundedReceive(receive, self._limits.body_limit(call.path)), answered)
        except asyncio.CancelledError:
            unanswered = 503  # as `roles.CutOffApp` answers
            raise
        finally:
            await self._end(call, entry, answered.status or unanswered, scope["state"].get("joined"))

    async def _admit(self, call: _ApiCall, headers: Headers) -> Principal | None:
        """The caller; None: the request needs no token. Raises ServiceError, HTTPException."""
        if call.header_bytes > MAX_HEADER_BYTES:
            raise HTTPException(431, f"query and headers are larger than {MAX_HEADER_BYTES} bytes: send less")
        if "\0" in call.path:  # PostgreSQL keeps none, not even in the audit log
            raise HTTPException(400, "the path has a NUL character in it: remove it")
        length = headers.get("content-length", "")
        most = self._limits.body_limit(call.path)
        if length.isdecimal() and int(length) > most:
            raise HTTPException(413, f"the body is larger than {most} bytes: send less")
        if self._tokens is None:
            _refuse_foreign_pages(call, headers)
            return OPEN_PRINCIPAL
        needed = required_role(call.method, call.path)
        if needed is None:
            if call.path == _JOIN and call.changes:
                await self._check(call, headers, self._tokens.check_join_token)
            return None
        principal = await self._check(call, headers, self._tokens.find_principal)
        if not principal.role.is_at_least(needed):
            with suppress(NotLeaderError, StoreAwayError):
                await self._audit.add_entry(principal, call.address, call.action, status=403)
            raise ForbiddenError(
                f"token {principal.name!r} has the role {principal.role.value}, and {call.action} needs "
                f"{needed.value}: ask an admin for a token with that role"
            )
        wait_s = self._limits.changes.count_call(principal.name) if call.changes else 0.0
        if wait_s:
            raise _too_many(wait_s, f"token {principal.name!r} makes too many changes")
        return principal

    async def _check(self, call: _ApiCall, headers: Headers, find: Callable[[str], Awaitable[_Found]]) -> _Found:
        """Look the request's token up with `find`. The failures of its address count only if the token is wrong:
        otherwise ten wrong tokens would lock out all callers behind that address.

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
            if wait_s and text:  # a caller without a token does not guess, and needs the answer that one is required
                raise _too_many(wait_s, f"too many requests without a valid token came from {call.address}") from error
            raise

    async def _note_failure(self, call: _ApiCall, reason: str) -> float:
        """Log and record a failure, at a limited rate. Returns 0, or how many seconds the address has to wait."""
        wait_s = self._limits.failures.count_call(caller_of(call.address))
        if wait_s:
            return wait_s
        self._log.warning("a request was not authenticated", address=call.address, call=call.action, reason=reason)
        with suppress(NotLeaderError, StoreAwayError):  # a standby writes nothing
            await self._audit.add_entry(None, call.address, call.action, status=401)
        return 0.0

    async def _begin(self, call: _ApiCall, principal: Principal | None) -> int | None:
        if not call.changes or call.path == _JOIN:
            return None
        return await self._audit.add_entry(principal, call.address, call.action)

    async def _end(self, call: _ApiCall, entry: int | None, status: int, joined: str | None) -> None:
        try:
            if entry is not None:
                await self._audit.set_status(entry, status)
            elif call.path == _JOIN and status in (401, 403):
                await self._note_failure(call, "its join token was refused")
            elif joined is not None:
                await self._audit.add_entry(None, call.address, call.action, status=status, who=f"VM {joined}")
        except (NotLeaderError, StoreAwayError) as error:
            self._log.warning(
                "the status of a request was not recorded",
                call=call.action,
                status=status,
                reason=str(error),
            )


@dataclass(frozen=True)
class _ApiCall:
    method: str
    path: str
    address: str
    header_bytes: int
    """Headers and query together."""

    @property
    def action(self) -> str:
        return f"{self.method} {self.path}"

    @property
    def changes(self) -> bool:
        return self.method not in _SAFE and (self.method, self.path) not in _CHANGE_NOTHING


def get_principal(request: Request) -> Principal:
    """Who sent the request."""
    found = request.scope["state"]["principal"]
    assert isinstance(found, Principal), "AccessMiddleware sets it"
    return found


def get_caller_address(scope: Scope) -> str:
    """The caller's IP address; "unknown" if a proxy names something that is not an address."""
    host = scope["client"][0] if scope.get("client") else ""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return "unknown"


class _BoundedReceive:
    """Receives at most `most` bytes of a body, then raises HTTPException, which FastAPI answers."""

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


class _StatusRecorder:
    """Sends an answer with further headers, and keeps its status."""

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
    else:
        # The scripts of /docs come from another host.
        added |= _NOT_FRAMED if path.startswith("/docs") else _NOT_FRAMED | _OWN_SCRIPTS
    message["headers"] = [*message["headers"], *((key.encode(), value.encode()) for key, value in added.items())]


def _refuse_foreign_pages(call: _ApiCall, headers: Headers) -> None:
    """Refuse requests of web pages from elsewhere: without tokens, any page that the user has open could send them.

    They carry the page's `Origin`; if the page's host name resolves to this machine, they carry that name as `Host`.
    """
    host = headers.get("host", "")
    if not _is_this_machine(host):
        raise ForbiddenError(
            f"Host {host!r} is not a name of this machine: use localhost or 127.0.0.1 for an open manager, or start it "
            "with --secure"
        )
    origin = headers.get("origin")
    if call.changes and origin not in (None, f"http://{host}"):
        raise ForbiddenError(f"a page of {origin!r} may not change anything here")


def _is_this_machine(host: str) -> bool:
    """Whether the value of a Host header is a loopback address."""
    name = host.partition("]")[0].removeprefix("[") if host.startswith("[") else host.partition(":")[0]
    return is_loopback(name)


def _too_many(wait_s: float, text: str) -> HTTPException:
    seconds = max(1, round(wait_s + 0.5))
    return HTTPException(429, f"{text}: try again in {seconds} s", {"Retry-After": str(seconds)})
