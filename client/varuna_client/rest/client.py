"""The manager's REST API as typed calls, synchronous and asynchronous."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial, wraps
from types import TracebackType
from typing import IO, Any, Concatenate, ParamSpec, Self, TypeVar

import httpx

from varuna_client.errors import NotFoundError
from varuna_client.rest import calls
from varuna_client.rest.calls import ApiCall
from varuna_client.rest.exchange import (
    API,
    ApiRequest,
    EventStream,
    Flow,
    Pause,
    StreamItem,
    exchange,
    leader_of,
    pause_s,
    raise_refused,
    raise_unreachable,
    trust,
)

DEFAULT_URL = "http://127.0.0.1:8750"
_RETRIES = 2
_PATIENCE_S = 30.0
"""How long following events survives a manager that is away, because it is being restarted."""
_SILENCE_S = 45.0
"""The read timeout of a stream, on which the manager sends something every 15 s."""
_REUSED_FOR_S = 2.0
"""How long an idle connection may be used again: less than the 5 s after which the manager closes it. Otherwise a call
that is sent just then gets no answer, and one that may not be sent twice fails."""
_PIECE_BYTES = 256 * 1024
"""Of an upload, as read at once."""

P = ParamSpec("P")
T = TypeVar("T")


def _make_method(make: Callable[P, ApiCall[T]]) -> Callable[Concatenate[Client, P], T]:
    """The call as a method of Client."""

    @wraps(make)
    def method(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.send(make(*args, **kwargs))

    return method


def _make_async_method(make: Callable[P, ApiCall[T]]) -> Callable[Concatenate[AsyncClient, P], Awaitable[T]]:
    """The call as a method of AsyncClient."""

    @wraps(make)
    async def method(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.send(make(*args, **kwargs))

    return method


def _options(url: str, token: str | None, ca: str | None, timeout_s: float) -> dict[str, Any]:
    # The environment's proxies are for the outside; the manager is on this machine or network.
    return {
        "timeout": timeout_s,
        "trust_env": False,
        "limits": httpx.Limits(keepalive_expiry=_REUSED_FOR_S),
        "headers": {} if token is None else {"Authorization": f"Bearer {token}"},
        "verify": trust(ca) if url.startswith("https:") else False,
    }


class Client:
    """A synchronous client; close it, or use it in a `with`. `varuna_client.rest.calls` describes its calls.

    Every call raises UnreachableError if no manager answers (NoAnswerError if it does not in time), NotFoundError if
    the manager does not know the object, RefusedError with the manager's message if it rejects the call, and TlsError
    if TLS fails. A call that may be sent twice is first retried a few times. If another manager answers, the call goes
    to the one that leads.

    Args:
        token: a token of the manager's API (`vt1...`); None: the manager asks for none.
        ca: a PEM file with the authority of the manager's certificate; None: the authorities that this machine trusts.
        retries: attempts after the first one, for a call that may be sent twice.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        token: str | None = None,
        ca: str | None = None,
        timeout_s: float = 15.0,
        retries: int = _RETRIES,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self._retries = retries
        self._http = httpx.Client(transport=transport, **_options(self.url, token, ca, timeout_s))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def send(self, call: ApiCall[T]) -> T:
        """Make the call."""
        flow: Flow[T] = exchange(call, self.url, self._retries)
        advance: Callable[[], ApiRequest | Pause] = partial(next, flow)
        while True:
            try:
                step = advance()
            except StopIteration as end:
                answer: T = end.value
                return answer
            if isinstance(step, Pause):
                time.sleep(step.seconds)
                advance = partial(flow.send, None)
                continue
            try:
                response = self._http.request(step.method, step.url, **step.arguments)
                advance = partial(flow.send, response)
            except httpx.TransportError as error:
                advance = partial(flow.throw, error)

    def stream(
        self, job: str | None = None, *, after: int = 0, patience_s: float = _PATIENCE_S
    ) -> Iterator[StreamItem]:
        """Yield ("event", document) for every event after number `after`, past and future, and ("progress", document)
        for the progress of jobs: of all jobs, or of one.

        The stream never ends by itself, and continues at its position after a restart of the manager. Raises
        UnreachableError if the manager is away for longer than `patience_s`; NotFoundError, RefusedError.
        """
        stream, at, failures, since = EventStream(after), self.url, 0, time.monotonic()
        params = {} if job is None else {"job": job}
        timeout = httpx.Timeout(15.0, read=_SILENCE_S)
        while True:
            is_open = False
            try:
                url = f"{at}{API}/events/stream"
                with self._http.stream(
                    "GET", url, params=params, headers=stream.make_headers(), timeout=timeout
                ) as response:
                    if response.is_success:
                        failures, is_open = 0, True
                        yield from stream.parse_lines(response.iter_lines())
                        since = time.monotonic()
                    else:
                        response.read()
                        at = _next_address(response, at, time.monotonic() - since > patience_s) or self.url
            except httpx.TransportError as error:
                since = time.monotonic() if is_open else since  # the manager was there until now
                if time.monotonic() - since > patience_s:
                    raise_unreachable(at, error)
                at = self.url
            time.sleep(pause_s(failures))
            failures += 1

    def is_ready(self) -> bool:
        """Whether the manager answers and is ready to serve."""
        try:
            return self._http.get(f"{self.url}/readyz").status_code == 200
        except httpx.TransportError:
            return False

    def has_archive(self, sha256: str) -> bool:
        """Whether the manager has this packed workdir."""
        try:
            self.archive_size(sha256)
        except NotFoundError:
            return False
        return True

    submit = _make_method(calls.submit)
    jobs = _make_method(calls.jobs)
    job = _make_method(calls.job)
    change = _make_method(calls.change)
    cancel = _make_method(calls.cancel)
    retry = _make_method(calls.retry)
    delete = _make_method(calls.delete)
    profile = _make_method(calls.profile)
    archive_size = _make_method(calls.archive_size)
    upload_archive = _make_method(calls.upload_archive)

    report = _make_method(calls.report)
    generations = _make_method(calls.generations)
    generation = _make_method(calls.generation)
    plans = _make_method(calls.plans)
    plan = _make_method(calls.plan)
    metrics = _make_method(calls.metrics)
    metric_buckets = _make_method(calls.metric_buckets)
    logged_values = _make_method(calls.logged_values)
    time = _make_method(calls.time)
    cost = _make_method(calls.cost)
    pipeline = _make_method(calls.pipeline)
    checkpoints = _make_method(calls.checkpoints)

    events = _make_method(calls.events)
    newest_events = _make_method(calls.newest_events)
    logs = _make_method(calls.logs)
    log_chunk = _make_method(calls.log_chunk)
    search_log = _make_method(calls.search_log)
    stacks = _make_method(calls.stacks)

    vms = _make_method(calls.vms)
    vm = _make_method(calls.vm)
    vm_summary = _make_method(calls.vm_summary)
    drain = _make_method(calls.drain)
    cordon = _make_method(calls.cordon)
    uncordon = _make_method(calls.uncordon)
    preempt = _make_method(calls.preempt)
    fleet = _make_method(calls.fleet)
    fleet_history = _make_method(calls.fleet_history)
    fleet_cost = _make_method(calls.fleet_cost)
    set_fleet_target = _make_method(calls.set_fleet_target)
    set_local_capacity = _make_method(calls.set_local_capacity)

    whoami = _make_method(calls.whoami)
    create_token = _make_method(calls.create_token)
    tokens = _make_method(calls.tokens)
    revoke_token = _make_method(calls.revoke_token)
    revoke_vm = _make_method(calls.revoke_vm)
    audit = _make_method(calls.audit)


class AsyncClient:
    """Like Client, with asynchronous calls; close it, or use it in an `async with`."""

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        token: str | None = None,
        ca: str | None = None,
        timeout_s: float = 15.0,
        retries: int = _RETRIES,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self._retries = retries
        self._http = httpx.AsyncClient(transport=transport, **_options(self.url, token, ca, timeout_s))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def send(self, call: ApiCall[T]) -> T:
        """Make the call."""
        flow: Flow[T] = exchange(call, self.url, self._retries)
        advance: Callable[[], ApiRequest | Pause] = partial(next, flow)
        while True:
            try:
                step = advance()
            except StopIteration as end:
                answer: T = end.value
                return answer
            if isinstance(step, Pause):
                await asyncio.sleep(step.seconds)
                advance = partial(flow.send, None)
                continue
            try:
                response = await self._http.request(step.method, step.url, **_read_in_pieces(step.arguments))
                advance = partial(flow.send, response)
            except httpx.TransportError as error:
                advance = partial(flow.throw, error)

    async def stream(
        self, job: str | None = None, *, after: int = 0, patience_s: float = _PATIENCE_S
    ) -> AsyncIterator[StreamItem]:
        """Like Client.stream."""
        stream, at, failures, since = EventStream(after), self.url, 0, time.monotonic()
        params = {} if job is None else {"job": job}
        timeout = httpx.Timeout(15.0, read=_SILENCE_S)
        while True:
            is_open = False
            try:
                url = f"{at}{API}/events/stream"
                async with self._http.stream(
                    "GET", url, params=params, headers=stream.make_headers(), timeout=timeout
                ) as response:
                    if response.is_success:
                        failures, is_open = 0, True
                        async for line in response.aiter_lines():
                            item = stream.parse_line(line)
                            if item is not None:
                                yield item
                        since = time.monotonic()
                    else:
                        await response.aread()
                        at = _next_address(response, at, time.monotonic() - since > patience_s) or self.url
            except httpx.TransportError as error:
                since = time.monotonic() if is_open else since  # the manager was there until now
                if time.monotonic() - since > patience_s:
                    raise_unreachable(at, error)
                at = self.url
            await asyncio.sleep(pause_s(failures))
            failures += 1

    async def is_ready(self) -> bool:
        """Whether the manager answers and is ready to serve."""
        try:
            return (await self._http.get(f"{self.url}/readyz")).status_code == 200
        except httpx.TransportError:
            return False

    async def has_archive(self, sha256: str) -> bool:
        """Whether the manager has this packed workdir."""
        try:
            await self.archive_size(sha256)
        except NotFoundError:
            return False
        return True

    submit = _make_async_method(calls.submit)
    jobs = _make_async_method(calls.jobs)
    job = _make_async_method(calls.job)
    change = _make_async_method(calls.change)
    cancel = _make_async_method(calls.cancel)
    retry = _make_async_method(calls.retry)
    delete = _make_async_method(calls.delete)
    profile = _make_async_method(calls.profile)
    archive_size = _make_async_method(calls.archive_size)
    upload_archive = _make_async_method(calls.upload_archive)

    report = _make_async_method(calls.report)
    generations = _make_async_method(calls.generations)
    generation = _make_async_method(calls.generation)
    plans = _make_async_method(calls.plans)
    plan = _make_async_method(calls.plan)
    metrics = _make_async_method(calls.metrics)
    metric_buckets = _make_async_method(calls.metric_buckets)
    logged_values = _make_async_method(calls.logged_values)
    time = _make_async_method(calls.time)
    cost = _make_async_method(calls.cost)
    pipeline = _make_async_method(calls.pipeline)
    checkpoints = _make_async_method(calls.checkpoints)

    events = _make_async_method(calls.events)
    newest_events = _make_async_method(calls.newest_events)
    logs = _make_async_method(calls.logs)
    log_chunk = _make_async_method(calls.log_chunk)
    search_log = _make_async_method(calls.search_log)
    stacks = _make_async_method(calls.stacks)

    vms = _make_async_method(calls.vms)
    vm = _make_async_method(calls.vm)
    vm_summary = _make_async_method(calls.vm_summary)
    drain = _make_async_method(calls.drain)
    cordon = _make_async_method(calls.cordon)
    uncordon = _make_async_method(calls.uncordon)
    preempt = _make_async_method(calls.preempt)
    fleet = _make_async_method(calls.fleet)
    fleet_history = _make_async_method(calls.fleet_history)
    fleet_cost = _make_async_method(calls.fleet_cost)
    set_fleet_target = _make_async_method(calls.set_fleet_target)
    set_local_capacity = _make_async_method(calls.set_local_capacity)

    whoami = _make_async_method(calls.whoami)
    create_token = _make_async_method(calls.create_token)
    tokens = _make_async_method(calls.tokens)
    revoke_token = _make_async_method(calls.revoke_token)
    revoke_vm = _make_async_method(calls.revoke_vm)
    audit = _make_async_method(calls.audit)


def _read_in_pieces(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a request, with a body that is a file read beside the event loop: httpx takes no other here."""
    content = arguments.get("content")
    return arguments if content is None else {**arguments, "content": _pieces(content)}


async def _pieces(file: IO[bytes]) -> AsyncIterator[bytes]:
    while piece := await asyncio.to_thread(file.read, _PIECE_BYTES):
        yield piece


def _next_address(response: httpx.Response, at: str, is_late: bool) -> str | None:
    """The leader's address after a refused stream, if the answer has it. Raises a refusal that is late or final."""
    leader = leader_of(response, at)
    if is_late or (leader is None and response.status_code not in (429, 502, 503, 504)):
        raise_refused(response)
    return leader
