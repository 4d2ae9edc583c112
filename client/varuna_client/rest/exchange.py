"""How a call becomes requests: retries, the leader's address, pages, errors, streams.

`exchange` yields the next step (a request or a pause) and receives its result, like httpx's authentication flows. So
the synchronous and the asynchronous client share this code.
"""

from __future__ import annotations

import json
import os
import random
import ssl
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, cast
from urllib.parse import parse_qsl, urlsplit

import httpx

from varuna_client.errors import NoAnswerError, NotFoundError, RefusedError, TlsError, UnreachableError, UserError
from varuna_client.rest.calls import ApiCall
from varuna_proto.rest import EventDocument, ProgressDocument

API = "/api/v1"
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 5.0
_CLOSED = "without sending a response"
"""What httpx says when the server closed the connection before its answer."""
_NO_ANSWER = (httpx.ReadTimeout, httpx.WriteTimeout)
_NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
"""Errors before any byte of the request is sent."""
_SICK = frozenset({502, 504})
_LATER = frozenset({429, 503})

T = TypeVar("T")
StreamItem = tuple[Literal["event"], EventDocument] | tuple[Literal["progress"], ProgressDocument]
"""An item of the event stream."""


@dataclass(frozen=True, kw_only=True)
class ApiRequest:
    method: str
    url: str
    arguments: dict[str, Any]
    """Keyword arguments of httpx's `request`."""


@dataclass(frozen=True)
class Pause:
    seconds: float


Flow = Generator[ApiRequest | Pause, httpx.Response | None, T]


def exchange(call: ApiCall[T], base_url: str, retries: int) -> Flow[T]:
    """Make the call step by step. Raises the errors that `Client` documents."""
    if not call.has_pages:
        return call.read((yield from _one(call, base_url, retries)))
    items: list[Any] = []
    while True:
        response = yield from _one(call, base_url, retries)
        items += response.json()
        following = response.links.get("next", {}).get("url")
        if following is None:
            return call.read(items)
        call = _page(call, following)


def _page(call: ApiCall[T], url: str) -> ApiCall[T]:
    return ApiCall(
        method=call.method,
        path=call.path,
        read=call.read,
        params=parse_qsl(urlsplit(url).query, keep_blank_values=True),
        has_pages=True,
    )


def _one(call: ApiCall[Any], base_url: str, retries: int) -> Flow[httpx.Response]:
    attempts = retries if call.is_repeatable else 0
    arguments: dict[str, Any] = {"params": list(call.params), "headers": call.headers}
    if call.json is not None:
        arguments["json"] = call.json
    begins_at = 0
    if call.content is not None:
        begins_at = call.content.tell()
        body_bytes = call.content.seek(0, os.SEEK_END) - begins_at
        # httpx takes the whole file's; and without it the manager does not know for how long it may have to wait.
        arguments |= {"content": call.content, "headers": {**call.headers, "Content-Length": str(body_bytes)}}
    if call.timeout_s is not None:
        arguments["timeout"] = call.timeout_s
    at, unknown = base_url, ""
    attempt, has_followed = 0, False
    while True:
        is_last = attempt == attempts
        if call.content is not None:
            call.content.seek(begins_at)
        try:
            response = yield ApiRequest(method=call.method, url=at + API + call.path, arguments=arguments)
        except httpx.TransportError as error:
            unknown = unknown if isinstance(error, _NOT_SENT) else call.unknown
            if is_last or (isinstance(error, _NO_ANSWER) and not call.is_patient):
                raise_unreachable(at, error, unknown)
            raise_if_tls(at, str(error), error)
            yield Pause(pause_s(attempt))
            attempt += 1
            continue
        assert response is not None, "a request yields a response or raises"
        if response.is_success:
            return response
        leader = leader_of(response, at)
        if leader is not None and not has_followed:
            at, has_followed = leader, True
            continue  # no attempt: a manager that does not lead has done nothing of the call
        wait_s = _retry_after_s(response)
        if is_last or (leader is None and wait_s is None):
            raise_refused(response)
        at = leader or at
        yield Pause(max(wait_s or 0.0, pause_s(attempt)))
        attempt += 1


def pause_s(attempt: int) -> float:
    """The pause before the next attempt, which grows and has a random part."""
    longest_s: float = min(_FIRST_PAUSE_S * 2.0**attempt, _LONGEST_PAUSE_S)
    return longest_s * random.uniform(0.5, 1.0)


def _retry_after_s(response: httpx.Response) -> float | None:
    """Seconds after which the same call may succeed; None: it will not."""
    if response.status_code in _SICK:
        return 0.0
    after = response.headers.get("Retry-After", "")
    if response.status_code in _LATER and after.isdecimal() and int(after) <= _LONGEST_PAUSE_S:
        return float(after)
    return None


def leader_of(response: httpx.Response, base_url: str) -> str | None:
    """The leader's address, if this manager does not lead and names it. Never from https to http."""
    if response.status_code != 503:
        return None
    leader = _problem(response).get("leader")
    if not isinstance(leader, str) or urlsplit(leader).scheme != urlsplit(base_url).scheme:
        return None
    return leader.rstrip("/")


# ---------------------------------------------------------------- streams


@dataclass
class EventStream:
    """The event stream and its position, from which it continues after a break."""

    after: int
    _lines: list[str] = field(default_factory=list)

    def make_headers(self) -> dict[str, str]:
        self._lines = []
        return {"Accept": "text/event-stream", "Last-Event-ID": str(self.after)}

    def parse_line(self, line: str) -> StreamItem | None:
        """Parse one line of the stream; returns the item that it completes, if any."""
        if line:
            self._lines.append(line)
            return None
        fields = dict(_field(each) for each in self._lines if not each.startswith(":"))
        self._lines = []
        if "data" not in fields:
            return None
        document = json.loads(fields["data"])
        if fields.get("event") == "progress":
            return "progress", cast(ProgressDocument, document)
        self.after = int(fields["id"]) if fields.get("id", "").isdecimal() else self.after
        return "event", cast(EventDocument, document)

    def parse_lines(self, lines: Iterable[str]) -> Iterator[StreamItem]:
        for line in lines:
            item = self.parse_line(line)
            if item is not None:
                yield item


def _field(line: str) -> tuple[str, str]:
    name, _, value = line.partition(":")
    return name, value.removeprefix(" ")


# ---------------------------------------------------------------- errors


def trust(ca: str | None) -> ssl.SSLContext:
    """Raises UserError."""
    try:
        return ssl.create_default_context(cafile=ca)
    except OSError as error:  # ssl.SSLError among them
        raise UserError(
            f"the authority's certificate {ca} cannot be used ({error}): give the manager's pki/ca.pem with --ca or "
            "VARUNA_CA"
        ) from error


def raise_unreachable(url: str, error: httpx.TransportError, unknown: str = "") -> None:
    """Raises UnreachableError, NoAnswerError or TlsError. `unknown`: as in UnreachableError."""
    text = str(error) or type(error).__name__
    raise_if_tls(url, text, error)
    # A server that expects TLS closes a plain request so, and so does a manager that changes its role: only the last
    # attempt tells them apart.
    if url.startswith("http:") and isinstance(error, httpx.RemoteProtocolError) and _CLOSED in text:
        text = f"{text.rstrip('.')}; if it is a secure manager, call it as https://{url.partition('://')[2]}"
    kind = NoAnswerError if isinstance(error, _NO_ANSWER) else UnreachableError
    raise kind(url, text, unknown) from error


def raise_if_tls(url: str, text: str, error: httpx.TransportError) -> None:
    """Raises TlsError if the manager's address or certificate is the cause."""
    if "CERTIFICATE_VERIFY_FAILED" in text:
        raise TlsError(
            f"the certificate of {url} is not trusted ({text.partition('CERTIFICATE_VERIFY_FAILED]')[2].strip()}): "
            "give the manager's pki/ca.pem with --ca or VARUNA_CA, and call it by a name of its --server-names"
        ) from error
    if "WRONG_VERSION_NUMBER" in text or "record layer failure" in text.lower():
        raise TlsError(f"{url} speaks no TLS: call it as http://{url.partition('://')[2]}") from error


def raise_refused(response: httpx.Response) -> None:
    """Raises NotFoundError or RefusedError, with the manager's reason in one line."""
    document = _problem(response)
    detail = document.get("detail") or document.get("title")
    if isinstance(detail, str) and detail:
        message = " ".join(detail.split())
    else:
        request = response.request
        message = f"{request.method} {request.url} answered {response.status_code} {response.reason_phrase}"
    raise NotFoundError(message) if response.status_code == 404 else RefusedError(response.status_code, message)


def _problem(response: httpx.Response) -> dict[str, Any]:
    try:
        document = response.json()
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}
