"""Notices from the clouds' metadata services, from a server that answers as they document it."""

from __future__ import annotations

import asyncio
import email.utils
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from varuna_agent.notices.metadata import make_metadata_source
from varuna_agent.notices.notices import Notice, NoticeCancellation
from waiting import DEADLINE_S, POLL_S


@dataclass
class Request:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes


Answer = tuple[int, str]


@dataclass
class Metadata:
    """The server; `answer` makes its answers, and may be replaced while it runs."""

    answer: Callable[[Request], Answer]
    url: str = ""
    requests: list[Request] = field(default_factory=list)


@pytest.fixture
def metadata() -> Iterator[Metadata]:
    served = Metadata(lambda request: (500, ""))

    class Handler(BaseHTTPRequestHandler):
        def _serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            request = Request(self.command, self.path, {k.lower(): v for k, v in self.headers.items()}, body)
            served.requests.append(request)
            status, text = served.answer(request)
            self.send_response(status)
            self.send_header("Content-Length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

        do_GET = do_PUT = do_POST = _serve  # noqa: N815 - the base class's names

        def log_message(self, format: str, *args: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(POLL_S,), daemon=True)
    thread.start()
    served.url = f"http://127.0.0.1:{server.server_port}"
    yield served
    server.shutdown()
    server.server_close()


async def collect(
    cloud: str, metadata: Metadata, count: int, then: Callable[[int], None] = lambda n: None
) -> list[Any]:
    """The first `count` notices of the source; `then(n)` is called after the n-th."""
    source = make_metadata_source(cloud, url=metadata.url, poll_s=0.01)
    notices: list[Any] = []

    async def listen() -> None:
        async for notice in source.watch_notices():
            notices.append(notice)
            then(len(notices))
            if len(notices) == count:
                return

    await asyncio.wait_for(listen(), DEADLINE_S)
    return notices


# ---------------------------------------------------------------- Azure

NOT_BEFORE = "Mon, 19 Sep 2022 18:29:47 GMT"


def azure_event(**changes: Any) -> dict[str, Any]:
    """As in the samples of "Azure Metadata Service: Scheduled Events for Linux VMs"."""
    return {
        "EventId": "C7061BAC-AFDC-4513-B24B-AA5F13A16123",
        "EventStatus": "Scheduled",
        "EventType": "Preempt",
        "ResourceType": "VirtualMachine",
        "Resources": ["gpus_a1b2c3"],
        "NotBefore": NOT_BEFORE,
        "Description": "",
        "EventSource": "Platform",
        "DurationInSeconds": -1,
        **changes,
    }


def azure(*events: dict[str, Any]) -> Callable[[Request], Answer]:
    def answer(request: Request) -> Answer:
        if request.headers.get("metadata") != "true" or "api-version=" not in request.path:
            return 400, json.dumps({"error": "Bad request. Required metadata header not specified"})
        if request.path.startswith("/metadata/instance/compute/name"):
            return 200, "gpus_a1b2c3"
        if request.method == "POST":
            return 200, ""
        return 200, json.dumps({"DocumentIncarnation": 2, "Events": list(events)})

    return answer


@pytest.mark.parametrize("kind", ["Preempt", "Terminate", "Reboot", "Redeploy"])
async def test_azure_event_that_takes_the_vm_is_a_notice(metadata: Metadata, kind: str) -> None:
    metadata.answer = azure(azure_event(EventType=kind))
    notices = await collect("azure", metadata, 1)
    due = email.utils.parsedate_to_datetime(NOT_BEFORE).timestamp()
    assert notices == [Notice("C7061BAC-AFDC-4513-B24B-AA5F13A16123", due, f"azure {kind}")]


async def test_azure_events_that_do_not_take_this_vm_are_none(metadata: Metadata) -> None:
    other = azure_event(EventId="other", Resources=["gpus_zzz"])
    freeze = azure_event(EventId="freeze", EventType="Freeze", DurationInSeconds=5)
    metadata.answer = azure(other, freeze, azure_event(Resources=["gpus_zzz", "GPUS_A1B2C3"]))
    notices = await collect("azure", metadata, 1)
    assert [notice.notice_id for notice in notices] == ["C7061BAC-AFDC-4513-B24B-AA5F13A16123"]


async def test_azure_event_that_disappears_is_cancelled(metadata: Metadata) -> None:
    metadata.answer = azure(azure_event())

    def then(number: int) -> None:
        metadata.answer = azure()

    notices = await collect("azure", metadata, 2, then)
    assert notices[1] == NoticeCancellation("C7061BAC-AFDC-4513-B24B-AA5F13A16123")


async def test_azure_event_that_has_started_is_due_and_keeps_its_time(metadata: Metadata) -> None:
    before = time.time()
    metadata.answer = azure(azure_event(EventStatus="Started", NotBefore=""))
    (started,) = await collect("azure", metadata, 1)
    assert before <= started.deadline_unix_s <= time.time()

    metadata.answer = azure(azure_event())

    def then(number: int) -> None:
        # The second one shows that the first was not reported again when it lost its time.
        started = azure_event(EventStatus="Started", NotBefore="")
        metadata.answer = azure(started, azure_event(EventId="second"))

    notices = await collect("azure", metadata, 2, then)
    assert [notice.notice_id for notice in notices] == ["C7061BAC-AFDC-4513-B24B-AA5F13A16123", "second"]


async def test_azure_acknowledges_only_an_event_of_its_own(metadata: Metadata) -> None:
    metadata.answer = azure(
        azure_event(EventId="own"), azure_event(EventId="ours", Resources=["gpus_a1b2c3", "gpus_z"])
    )
    source = make_metadata_source("azure", url=metadata.url, poll_s=0.01)
    notices = source.watch_notices()
    ids = {(await anext(notices)).notice_id for _ in range(2)}
    for notice_id in ids:
        await source.acknowledge_notice(notice_id)
    await notices.aclose()  # type: ignore[attr-defined] # it is a generator
    posted = [json.loads(request.body) for request in metadata.requests if request.method == "POST"]
    assert posted == [{"StartRequests": [{"EventId": "own"}]}]


async def test_a_service_that_fails_is_asked_again(metadata: Metadata) -> None:
    answers: list[Answer] = [(500, ""), (200, "not json"), (200, "{}"), (200, '{"Events": [{}]}'), (410, "gone")]
    good = azure(azure_event())

    def answer(request: Request) -> Answer:
        if request.path.startswith("/metadata/scheduledevents") and answers:
            return answers.pop(0)
        return good(request)

    metadata.answer = answer
    notices = await collect("azure", metadata, 1)
    assert len(notices) == 1
    assert not answers


# ---------------------------------------------------------------- AWS, Google Cloud


async def test_aws_action_is_a_notice_and_its_token_is_renewed(metadata: Metadata) -> None:
    tokens = iter(["first", "second"])
    valid = ""

    def answer(request: Request) -> Answer:
        nonlocal valid
        if request.method == "PUT" and request.path == "/latest/api/token":
            assert int(request.headers["x-aws-ec2-metadata-token-ttl-seconds"]) > 0
            valid = next(tokens)
            return 200, valid
        if request.headers.get("x-aws-ec2-metadata-token") != valid or not valid:
            return 401, ""
        assert request.path == "/latest/meta-data/spot/instance-action"
        if valid == "first":
            valid = "expired"
            return 404, ""
        return 200, '{"action": "terminate", "time": "2017-09-18T08:22:00Z"}'

    metadata.answer = answer
    notices = await collect("aws", metadata, 1)
    assert notices == [Notice("terminate-2017-09-18T08:22:00Z", 1505722920.0, "aws terminate")]


@pytest.mark.parametrize("leaves_early", [True, False])
async def test_aws_recommendation_to_rebalance_is_a_notice_only_if_the_vm_is_to_leave_early(
    metadata: Metadata, leaves_early: bool
) -> None:
    def answer(request: Request) -> Answer:
        if request.method == "PUT":
            return 200, "token"
        if request.headers.get("x-aws-ec2-metadata-token") != "token":
            return 401, ""
        if request.path == "/latest/meta-data/events/recommendations/rebalance":
            return 200, '{"noticeTime": "2017-09-18T08:00:00Z"}'
        return 200, '{"action": "terminate", "time": "2017-09-18T08:22:00Z"}'

    metadata.answer = answer
    notices = await collect("aws-rebalance" if leaves_early else "aws", metadata, 1 + leaves_early)
    interruption = Notice("terminate-2017-09-18T08:22:00Z", 1505722920.0, "aws terminate")
    rebalance = Notice("rebalance-2017-09-18T08:00:00Z", 1505722200.0, "aws rebalance")
    assert notices == ([rebalance, interruption] if leaves_early else [interruption])


async def test_gcp_preemption_is_a_notice_of_thirty_seconds(metadata: Metadata) -> None:
    asked = 0

    def answer(request: Request) -> Answer:
        nonlocal asked
        assert request.headers.get("metadata-flavor") == "Google"
        assert request.path == "/computeMetadata/v1/instance/preempted"
        asked += 1
        return 200, "TRUE\n" if asked > 2 else "FALSE"

    metadata.answer = answer
    before = time.time()
    (notice,) = await collect("gcp", metadata, 1)
    assert before + 30 <= notice.deadline_unix_s <= time.time() + 30
    assert notice.source == "gcp preempted"


def test_an_unknown_cloud_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"--notices 'oracle': expected one of azure, aws, aws-rebalance, gcp"):
        make_metadata_source("oracle")
