"""The REST client: what it sends, and its messages when something goes wrong."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable

import httpx
import pytest

from varuna_client import Client, NotFoundError, RefusedError, UnreachableError

Handler = Callable[[httpx.Request], httpx.Response]


def client_of(handler: Handler) -> Client:
    return Client("http://manager:1", transport=httpx.MockTransport(handler))


def test_submitting_sends_the_spec_with_an_idempotency_key() -> None:
    seen: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(201, json={"id": "j1"})

    with client_of(handler) as client:
        assert client.submit({"name": "gpt"})["id"] == "j1"
        client.submit({"name": "gpt"}, idempotency_key="mine")
    assert json.loads(seen[0].content) == {"name": "gpt"}
    assert seen[0].url.path == "/api/v1/jobs"
    assert len(seen[0].headers["Idempotency-Key"]) >= 32
    assert seen[1].headers["Idempotency-Key"] == "mine"


def test_a_name_is_one_segment_of_the_path_whatever_is_in_it() -> None:
    seen: list[bytes] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request.url.raw_path)
        return httpx.Response(200, json={})

    with client_of(handler) as client:
        client.job("../vms?x#y")
    assert seen == [b"/api/v1/jobs/..%2Fvms%3Fx%23y"]


def test_what_the_manager_does_not_know_is_a_not_found_error_in_its_own_words() -> None:
    problem = {"type": "about:blank", "title": "Not Found", "status": 404, "detail": "no job 'x':\n  see varuna ps"}
    with client_of(lambda _: httpx.Response(404, json=problem)) as client, pytest.raises(NotFoundError) as caught:
        client.job("x")
    assert str(caught.value) == "no job 'x': see varuna ps"


@pytest.mark.parametrize(
    "response",
    [
        httpx.Response(502, text="<html>bad gateway</html>"),
        httpx.Response(500, json=["no", "problem"]),
        httpx.Response(500, json={"detail": [{"loc": ["body"]}]}),
    ],
)
def test_an_error_without_a_reason_still_says_what_was_asked_and_answered(response: httpx.Response) -> None:
    with client_of(lambda _: response) as client, pytest.raises(RefusedError) as caught:
        client.vms()
    assert caught.value.status == response.status_code
    assert "GET http://manager:1/api/v1/vms" in str(caught.value)
    assert str(response.status_code) in str(caught.value)


def test_nobody_at_the_address_says_how_to_start_a_manager() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and never listening: connecting is refused
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with Client(url) as client:
            assert not client.is_ready()
            with pytest.raises(UnreachableError) as caught:
                client.jobs()
    message = str(caught.value)
    assert url in message
    assert "varuna manager" in message
    assert "\n" not in message
