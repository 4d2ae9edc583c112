"""How the client makes its calls: again when that is safe, to the leader, through pages, and streams that resume."""

from __future__ import annotations

import io
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import IO, Any

import httpx
import pytest

from varuna_client import AsyncClient, Client, NoAnswerError, RefusedError, UnreachableError
from varuna_client.rest.exchange import EventStream, pause_s

Handler = Callable[[httpx.Request], httpx.Response]


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("client", "exchange"):
        monkeypatch.setattr(f"varuna_client.rest.{module}.pause_s", lambda attempt: 0.0)


def client_of(handler: Handler) -> Client:
    return Client("http://manager:1", transport=httpx.MockTransport(handler))


class Script:
    """Answers, or errors, one after the other; the last one again and again."""

    def __init__(self, *answers: httpx.Response | Exception) -> None:
        self._answers = list(answers)
        self.asked: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request)
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_what_is_safe_to_ask_again_is_asked_again() -> None:
    script = Script(httpx.ConnectError("refused"), httpx.Response(502), httpx.Response(200, json={"id": "j"}))
    with client_of(script) as client:
        assert client.job("a")["id"] == "j"
    assert len(script.asked) == 3
    submitting = Script(httpx.ReadError("cut"), httpx.Response(201, json={"id": "j"}))
    with client_of(submitting) as client:
        client.submit({"name": "gpt"})
    keys = {request.headers["Idempotency-Key"] for request in submitting.asked}
    assert (len(submitting.asked), len(keys)) == (2, 1)


def test_a_job_is_submitted_again_with_its_key_when_the_manager_is_slow_to_answer() -> None:
    script = Script(httpx.ReadTimeout("timed out"), httpx.Response(201, json={"id": "j"}))
    with client_of(script) as client:
        assert client.submit({"name": "gpt"})["id"] == "j"
    keys = {request.headers["Idempotency-Key"] for request in script.asked}
    assert (len(script.asked), len(keys)) == (2, 1)


@pytest.mark.parametrize(
    ("errors", "begins"),
    [
        ([httpx.ReadTimeout("timed out")], "the manager at http://manager:1 took the call and has not answered"),
        ([httpx.ReadTimeout("timed out"), httpx.ConnectError("refused")], "no manager answers at http://manager:1"),
        ([httpx.ReadError("cut")], "no manager answers at http://manager:1"),
    ],
)
def test_where_the_result_stays_unknown_the_error_says_that_the_job_may_be_there(
    errors: list[Exception], begins: str
) -> None:
    script = Script(*errors)
    with client_of(script) as client, pytest.raises(UnreachableError) as caught:
        client.submit({"name": "gpt"})
    assert str(caught.value).startswith(begins)
    assert "job 'gpt' may have been submitted: 'varuna ps' lists it" in str(caught.value)
    assert len(script.asked) == 3


def test_a_call_that_never_reached_the_manager_has_done_nothing() -> None:
    with client_of(Script(httpx.ConnectError("refused"))) as client, pytest.raises(UnreachableError) as caught:
        client.submit({"name": "gpt"})
    assert "may have been" not in str(caught.value)


def test_a_slow_manager_is_not_one_that_is_not_there() -> None:
    script = Script(httpx.ReadTimeout("timed out"))
    with client_of(script) as client, pytest.raises(NoAnswerError, match="it is slow or stands still") as caught:
        client.job("a")
    assert "start one" not in str(caught.value)
    assert len(script.asked) == 1


def test_a_connection_that_is_closed_before_the_answer_is_opened_again() -> None:
    """A manager that changes its role closes what it has not read yet."""
    closed = httpx.RemoteProtocolError("Server disconnected without sending a response.")
    script = Script(closed, httpx.Response(200, json={"id": "j"}))
    with client_of(script) as client:
        assert client.job("a")["id"] == "j"
    with client_of(Script(closed)) as client, pytest.raises(UnreachableError, match="call it as https://manager:1"):
        client.job("a")


@pytest.mark.parametrize(
    "call", [lambda client: client.preempt("v", notice_s=1), lambda client: client.create_token({})]
)
def test_what_is_not_safe_is_sent_once(call: Callable[[Client], Any]) -> None:
    script = Script(httpx.ReadError("cut"))
    with client_of(script) as client, pytest.raises(UnreachableError, match="cut"):
        call(client)
    assert len(script.asked) == 1


def test_an_error_that_will_not_change_is_not_asked_about_again() -> None:
    script = Script(httpx.Response(503, json={"detail": "VM v is out of reach"}))
    with client_of(script) as client, pytest.raises(RefusedError, match="out of reach"):
        client.logs("a")
    assert len(script.asked) == 1
    patient = Script(httpx.Response(429, headers={"Retry-After": "0"}), httpx.Response(200, json=[]))
    with client_of(patient) as client:
        assert client.tokens() == []


def test_a_manager_that_does_not_lead_names_the_one_that_does() -> None:
    standby = httpx.Response(503, json={"detail": "x", "leader": "http://other:2"}, headers={"Retry-After": "0"})
    script = Script(standby, httpx.Response(200, json={"id": "j"}))
    with client_of(script) as client:
        client.cancel("a")
    assert [request.url.host for request in script.asked] == ["manager", "other"]
    lured = Script(httpx.Response(503, json={"detail": "x", "leader": "http://other:2"}))
    with (
        Client("https://manager:1", token="vt1.a.b", transport=httpx.MockTransport(lured)) as client,
        pytest.raises(RefusedError),
    ):
        client.cancel("a")  # never from https to http: anybody who listens would get the token
    assert {request.url.host for request in lured.asked} == {"manager"}


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.upload_archive("ab", io.BytesIO(b"packed")),
        lambda client: client.change("a", {"priority": 1}),
        lambda client: client.create_token({}),
        lambda client: client.preempt("v", notice_s=1),
    ],
)
def test_what_is_sent_once_is_sent_to_the_leader(call: Callable[[Client], Any]) -> None:
    """A manager that does not lead has done nothing of the call, and may have read some of its body."""
    standby = httpx.Response(503, json={"detail": "x", "leader": "http://other:2"}, headers={"Retry-After": "1"})
    script = Script(standby, httpx.Response(200, json={"id": "j"}))
    with client_of(script) as client:
        call(client)
    assert [request.url.host for request in script.asked] == ["manager", "other"]
    first, second = (request.content for request in script.asked)
    assert first == second
    lost = Script(standby, httpx.ReadError("cut"))
    with client_of(lost) as client, pytest.raises(UnreachableError, match="cut"):
        call(client)
    assert len(lost.asked) == 2
    circle = Script(standby)
    with client_of(circle) as client, pytest.raises(RefusedError):
        call(client)
    assert len(circle.asked) == 2


async def test_an_archive_is_uploaded_by_both_clients() -> None:
    """From the file's present position on, again from there at the leader."""
    packed = b"before" + bytes(600_000) + b"end"
    uploaded: list[bytes] = []
    for upload in (_upload, _upload_later):
        standby = httpx.Response(503, json={"detail": "x", "leader": "http://other:2"}, headers={"Retry-After": "1"})
        script = Script(standby, httpx.Response(201, json={}))
        file = io.BytesIO(packed)
        file.seek(len(b"before"))
        await upload(script, file)
        assert [request.url.host for request in script.asked] == ["manager", "other"]
        uploaded += [request.content for request in script.asked]
        lengths = {request.headers["Content-Length"] for request in script.asked}
        assert lengths == {str(len(packed) - len(b"before"))}, "the manager waits as long as this takes"
        assert not any("Transfer-Encoding" in request.headers for request in script.asked)
    assert uploaded == [packed[len(b"before") :]] * 4


async def _upload(script: Script, file: IO[bytes]) -> None:
    with client_of(script) as client:
        client.upload_archive("ab", file)


async def _upload_later(script: Script, file: IO[bytes]) -> None:
    async def answer(request: httpx.Request) -> httpx.Response:
        await request.aread()
        return script(request)

    async with AsyncClient("http://manager:1", transport=httpx.MockTransport(answer)) as client:
        await client.upload_archive("ab", file)


async def test_pages_are_followed_by_both_clients() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        if "cursor" in request.url.params:
            return httpx.Response(200, json=[{"id": "2"}])
        following = {"Link": '</api/v1/jobs?state=failed&state=queued&cursor=x%2B>; rel="next"'}
        return httpx.Response(200, json=[{"id": "1"}], headers=following)

    with client_of(handler) as client:
        assert [job["id"] for job in client.jobs(state=["failed", "queued"])] == ["1", "2"]
    async with AsyncClient("http://manager:1", transport=httpx.MockTransport(handler)) as later:
        assert [job["id"] for job in await later.jobs(state=["failed", "queued"])] == ["1", "2"]


def test_a_stream_resumes_after_the_last_event_that_it_told() -> None:
    first = 'retry: 2000\n\n: keep-alive\n\nid: 7\nevent: odd\ndata: {"id": 7}\n\n'
    first += 'event: progress\ndata: {"step": 1}\n\nid: 8\nda'
    script = Script(
        httpx.Response(200, text=first),
        httpx.ConnectError("it is being restarted"),
        httpx.Response(503, json={"detail": "not leading", "leader": "http://other:2"}),
        httpx.Response(200, text='id: 8\nevent: odd\ndata: {"id": 8}\n\n'),
    )
    with client_of(script) as client:
        messages = client.stream("job", after=3)
        assert [next(messages) for _ in range(3)] == [
            ("event", {"id": 7}),
            ("progress", {"step": 1}),
            ("event", {"id": 8}),
        ]
    assert [request.headers["Last-Event-ID"] for request in script.asked] == ["3", "7", "7", "7"]
    assert [request.url.host for request in script.asked] == ["manager", "manager", "manager", "other"]
    assert {request.url.params["job"] for request in script.asked} == {"job"}


class BrokenStream(httpx.SyncByteStream, httpx.AsyncByteStream):
    """A stream of events that breaks after it was open for longer than the manager may be away."""

    def __iter__(self) -> Iterator[bytes]:
        yield b'event: event\nid: 7\ndata: {"id": 7}\n\n'
        time.sleep(2 * PATIENCE_S)
        raise httpx.RemoteProtocolError("incomplete chunked read")

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for part in self:
            yield part


PATIENCE_S = 0.5


async def test_a_stream_that_breaks_late_goes_on() -> None:
    """How long the manager may be away counts from the break, however old the stream is."""

    def script() -> Script:
        last = httpx.Response(200, content=b'event: event\nid: 8\ndata: {"id": 8}\n\n')
        return Script(httpx.Response(200, stream=BrokenStream()), last)

    now = script()
    with client_of(now) as client:
        told = client.stream(patience_s=PATIENCE_S)
        assert [next(told) for _ in range(2)] == [("event", {"id": 7}), ("event", {"id": 8})]
    later = script()
    async with AsyncClient("http://manager:1", transport=httpx.MockTransport(later)) as patient:
        following = patient.stream(patience_s=PATIENCE_S)
        assert [await anext(following) for _ in range(2)] == [("event", {"id": 7}), ("event", {"id": 8})]
    for one in (now, later):
        assert one.asked[1].headers["Last-Event-ID"] == "7"


def test_a_stream_that_is_refused_says_why() -> None:
    script = Script(httpx.Response(404, json={"detail": "no job"}))
    with client_of(script) as client, pytest.raises(RefusedError, match="no job"):
        next(client.stream("a"))
    with client_of(Script(httpx.ConnectError("refused"))) as client, pytest.raises(UnreachableError):
        next(client.stream(patience_s=0.0))


def test_data_of_a_stream_may_come_in_any_order_of_fields() -> None:
    stream = EventStream(0)
    messages = list(
        stream.parse_lines(['data: {"id": 5}', ": a comment", "event: x", "id: 5", "", "event: nothing", ""])
    )
    assert messages == [("event", {"id": 5})]
    assert stream.after == 5


def test_pauses_grow_and_differ() -> None:
    assert len({pause_s(3) for _ in range(20)}) > 1
    assert max(pause_s(0) for _ in range(50)) <= 0.2 < min(pause_s(3) for _ in range(50))
    assert pause_s(100) <= 5.0
