"""The manager's REST API as typed calls, synchronous and asynchronous."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial, wraps
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import httpx

from varuna_client import calls
from varuna_client.calls import Call
from varuna_client.errors import NotFoundError
from varuna_client.exchange import (
    API,
    Flow,
    Pause,
    Request,
    Stream,
    Told,
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
"""For how long a manager that is being restarted may stay silent before following its events ends."""
_SILENCE_S = 45.0
"""Of a stream: the manager says something each 15 s."""

P = ParamSpec("P")
T = TypeVar("T")


def _now(make: Callable[P, Call[T]]) -> Callable[Concatenate[Client, P], T]:
    """The call as a method of Client."""

    @wraps(make)
    def method(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.send(make(*args, **kwargs))

    return method


def _later(make: Callable[P, Call[T]]) -> Callable[Concatenate[AsyncClient, P], Awaitable[T]]:
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
        "headers": {} if token is None else {"Authorization": f"Bearer {token}"},
        "verify": trust(ca) if url.startswith("https:") else False,
    }


class Client:
    """A synchronous client; close it, or use it in a `with`. Its calls are described in `varuna_client.calls`.

    Every call raises UnreachableError when nobody answers, NotFoundError for what the manager does not know, and
    RefusedError with the manager's own words for all else that it does not take, and TlsError when TLS fails. What may
    be sent twice is sent again a few times first, and to the manager that leads where another one answers.

    Args:
        token: of the manager's API (`vt1...`); None for an open manager.
        ca: a PEM file with the authority of the manager's certificate; None: those that this machine trusts.
        retries: of a call that may be sent twice, before its error is raised.
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

    def send(self, call: Call[T]) -> T:
        """Make the call."""
        flow: Flow[T] = exchange(call, self.url, self._retries)
        advance: Callable[[], Request | Pause] = partial(next, flow)
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

    def stream(self, job: str | None = None, *, after: int = 0, patience_s: float = _PATIENCE_S) -> Iterator[Told]:
        """("event", one) for every event after number `after`, past and to come, and ("progress", how far a job is):
        of all, or of one job. It never ends by itself, and goes on where it was after the manager was restarted.

        Raises UnreachableError when it is away for longer than `patience_s`; NotFoundError, RefusedError.
        """
        stream, at, failures, since = Stream(after), self.url, 0, time.monotonic()
        params = {} if job is None else {"job": job}
        timeout = httpx.Timeout(15.0, read=_SILENCE_S)
        while True:
            try:
                url = f"{at}{API}/events/stream"
                with self._http.stream(
                    "GET", url, params=params, headers=stream.headers(), timeout=timeout
                ) as response:
                    if response.is_success:
                        failures, since = 0, time.monotonic()
                        yield from stream.take_all(response.iter_lines())
                        since = time.monotonic()
                    else:
                        response.read()
                        at = _next_address(response, at, time.monotonic() - since > patience_s) or self.url
            except httpx.TransportError as error:
                if time.monotonic() - since > patience_s:
                    raise_unreachable(at, error)
                at = self.url
            time.sleep(pause_s(failures))
            failures += 1

    def ready(self) -> bool:
        """Whether the manager answers and can serve."""
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

    submit = _now(calls.submit)
    jobs = _now(calls.jobs)
    job = _now(calls.job)
    change = _now(calls.change)
    cancel = _now(calls.cancel)
    retry = _now(calls.retry)
    delete = _now(calls.delete)
    profile = _now(calls.profile)
    archive_size = _now(calls.archive_size)
    upload_archive = _now(calls.upload_archive)

    generations = _now(calls.generations)
    generation = _now(calls.generation)
    plans = _now(calls.plans)
    plan = _now(calls.plan)
    metrics = _now(calls.metrics)
    metric_buckets = _now(calls.metric_buckets)
    time = _now(calls.time)
    cost = _now(calls.cost)
    pipeline = _now(calls.pipeline)
    checkpoints = _now(calls.checkpoints)

    events = _now(calls.events)
    newest_events = _now(calls.newest_events)
    logs = _now(calls.logs)
    log_chunk = _now(calls.log_chunk)
    search_log = _now(calls.search_log)
    stacks = _now(calls.stacks)

    vms = _now(calls.vms)
    vm = _now(calls.vm)
    vm_summary = _now(calls.vm_summary)
    drain = _now(calls.drain)
    cordon = _now(calls.cordon)
    uncordon = _now(calls.uncordon)
    preempt = _now(calls.preempt)
    fleet = _now(calls.fleet)
    fleet_history = _now(calls.fleet_history)
    fleet_cost = _now(calls.fleet_cost)
    set_fleet_target = _now(calls.set_fleet_target)
    set_local_capacity = _now(calls.set_local_capacity)

    whoami = _now(calls.whoami)
    create_token = _now(calls.create_token)
    tokens = _now(calls.tokens)
    revoke_token = _now(calls.revoke_token)
    revoke_vm = _now(calls.revoke_vm)
    audit = _now(calls.audit)


class AsyncClient:
    """As Client, with every call to be awaited; close it, or use it in an `async with`."""

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

    async def send(self, call: Call[T]) -> T:
        """Make the call."""
        flow: Flow[T] = exchange(call, self.url, self._retries)
        advance: Callable[[], Request | Pause] = partial(next, flow)
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
                response = await self._http.request(step.method, step.url, **step.arguments)
                advance = partial(flow.send, response)
            except httpx.TransportError as error:
                advance = partial(flow.throw, error)

    async def stream(
        self, job: str | None = None, *, after: int = 0, patience_s: float = _PATIENCE_S
    ) -> AsyncIterator[Told]:
        """As Client.stream."""
        stream, at, failures, since = Stream(after), self.url, 0, time.monotonic()
        params = {} if job is None else {"job": job}
        timeout = httpx.Timeout(15.0, read=_SILENCE_S)
        while True:
            try:
                url = f"{at}{API}/events/stream"
                async with self._http.stream(
                    "GET", url, params=params, headers=stream.headers(), timeout=timeout
                ) as response:
                    if response.is_success:
                        failures, since = 0, time.monotonic()
                        async for line in response.aiter_lines():
                            told = stream.take(line)
                            if told is not None:
                                yield told
                        since = time.monotonic()
                    else:
                        await response.aread()
                        at = _next_address(response, at, time.monotonic() - since > patience_s) or self.url
            except httpx.TransportError as error:
                if time.monotonic() - since > patience_s:
                    raise_unreachable(at, error)
                at = self.url
            await asyncio.sleep(pause_s(failures))
            failures += 1

    async def ready(self) -> bool:
        """Whether the manager answers and can serve."""
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

    submit = _later(calls.submit)
    jobs = _later(calls.jobs)
    job = _later(calls.job)
    change = _later(calls.change)
    cancel = _later(calls.cancel)
    retry = _later(calls.retry)
    delete = _later(calls.delete)
    profile = _later(calls.profile)
    archive_size = _later(calls.archive_size)
    upload_archive = _later(calls.upload_archive)

    generations = _later(calls.generations)
    generation = _later(calls.generation)
    plans = _later(calls.plans)
    plan = _later(calls.plan)
    metrics = _later(calls.metrics)
    metric_buckets = _later(calls.metric_buckets)
    time = _later(calls.time)
    cost = _later(calls.cost)
    pipeline = _later(calls.pipeline)
    checkpoints = _later(calls.checkpoints)

    events = _later(calls.events)
    newest_events = _later(calls.newest_events)
    logs = _later(calls.logs)
    log_chunk = _later(calls.log_chunk)
    search_log = _later(calls.search_log)
    stacks = _later(calls.stacks)

    vms = _later(calls.vms)
    vm = _later(calls.vm)
    vm_summary = _later(calls.vm_summary)
    drain = _later(calls.drain)
    cordon = _later(calls.cordon)
    uncordon = _later(calls.uncordon)
    preempt = _later(calls.preempt)
    fleet = _later(calls.fleet)
    fleet_history = _later(calls.fleet_history)
    fleet_cost = _later(calls.fleet_cost)
    set_fleet_target = _later(calls.set_fleet_target)
    set_local_capacity = _later(calls.set_local_capacity)

    whoami = _later(calls.whoami)
    create_token = _later(calls.create_token)
    tokens = _later(calls.tokens)
    revoke_token = _later(calls.revoke_token)
    revoke_vm = _later(calls.revoke_vm)
    audit = _later(calls.audit)


def _next_address(response: httpx.Response, at: str, is_late: bool) -> str | None:
    """Where to ask for a stream that was refused: the leader's address, if that is told. Raises what it said when it
    is late, or not about to change."""
    leader = leader_of(response, at)
    if is_late or (leader is None and response.status_code not in (429, 502, 503, 504)):
        raise_refused(response)
    return leader
