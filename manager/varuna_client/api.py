"""The manager's REST API as typed calls."""

from __future__ import annotations

import uuid
from types import TracebackType
from typing import Any, Self, cast
from urllib.parse import quote

import httpx

from varuna_client.documents import Event, Generation, Job, JobSpec, Metric, Vm
from varuna_client.errors import NotFoundError, RefusedError, UnreachableError

DEFAULT_URL = "http://127.0.0.1:8750"
API = "/api/v1"


class Client:
    """A synchronous client; close it, or use it in a `with`.

    Every call raises UnreachableError when nobody answers, NotFoundError for what the manager does not know, and
    RefusedError with the manager's own words for all else that it does not take.
    """

    def __init__(
        self, url: str = DEFAULT_URL, *, timeout_s: float = 15.0, transport: httpx.BaseTransport | None = None
    ) -> None:
        self.url = url.rstrip("/")
        # The environment's proxies are for the outside; the manager is on this machine or network.
        self._http = httpx.Client(base_url=self.url, timeout=timeout_s, transport=transport, trust_env=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    # ------------------------------------------------------------------ jobs

    def submit(self, spec: JobSpec, *, idempotency_key: str | None = None) -> Job:
        """Hand in a job. The key makes it safe to send again when the answer was lost: the same job comes back."""
        headers = {"Idempotency-Key": idempotency_key or str(uuid.uuid4())}
        return cast(Job, self._call("POST", "/jobs", json=spec, headers=headers))

    def jobs(self) -> list[Job]:
        return cast(list[Job], self._call("GET", "/jobs"))

    def job(self, job: str) -> Job:
        """A job by id or name."""
        return cast(Job, self._call("GET", f"/jobs/{_segment(job)}"))

    def cancel(self, job: str) -> Job:
        return cast(Job, self._call("POST", f"/jobs/{_segment(job)}/cancel"))

    def generations(self, job: str) -> list[Generation]:
        return cast(list[Generation], self._call("GET", f"/jobs/{_segment(job)}/generations"))

    def metrics(self, job: str, *, after_step: int = 0) -> list[Metric]:
        """The steps after `after_step`, oldest first."""
        return cast(
            list[Metric], self._call("GET", f"/jobs/{_segment(job)}/metrics", params={"after_step": after_step})
        )

    def checkpoints(self, job: str) -> list[dict[str, Any]]:
        return cast(list[dict[str, Any]], self._call("GET", f"/jobs/{_segment(job)}/checkpoints"))

    def profile(self, job: str) -> str:
        """The job's profile, a JSON document. Raises NotFoundError before it is measured."""
        return self._request("GET", f"/jobs/{_segment(job)}/profile").text

    def events(self, job: str | None = None, *, after: int = 0) -> list[Event]:
        """The events after number `after`, oldest first: all, or those of one job."""
        path = "/events" if job is None else f"/jobs/{_segment(job)}/events"
        found = list[Event]()
        while page := cast(list[Event], self._call("GET", path, params={"after": after})):
            found += page  # the manager sends so many at once
            after = page[-1]["id"]
        return found

    def logs(self, job: str, *, generation: int | None = None, rank: int = 0, offset: int = 0) -> bytes:
        """A worker's log from byte `offset` on (negative: from the end), as much as the manager sends at once."""
        params: dict[str, int] = {"rank": rank, "offset": offset}
        if generation is not None:
            params["generation"] = generation
        return self._request("GET", f"/jobs/{_segment(job)}/logs", params=params).content

    # ------------------------------------------------------------------ fleet

    def vms(self, *, gone: bool = False) -> list[Vm]:
        """The VMs that there are; with `gone` also those that there were, oldest first."""
        return cast(list[Vm], self._call("GET", "/vms", params={"gone": gone}))

    def preempt(self, vm_id: str, *, notice_s: float) -> None:
        """Give a VM the notice that a spot provider would give. Only providers that can emulate it."""
        self._request("POST", f"/vms/{_segment(vm_id)}/preempt", json={"notice_s": notice_s})

    def fleet(self) -> dict[str, Any]:
        return cast(dict[str, Any], self._call("GET", "/fleet"))

    def set_fleet_target(self, target: int) -> None:
        """How many VMs the manager should ask its providers for."""
        self._request("PUT", "/fleet", json={"target": target})

    def set_local_capacity(self, capacity: int) -> None:
        """How many VMs the emulated spot market of the local provider grants."""
        self._request("PUT", "/providers/local", json={"capacity": capacity})

    def ready(self) -> bool:
        """Whether the manager answers and can serve."""
        try:
            return self._http.get("/readyz").status_code == 200
        except httpx.TransportError:
            return False

    # ------------------------------------------------------------------ how

    def _call(self, method: str, path: str, **arguments: Any) -> Any:
        return self._request(method, path, **arguments).json()

    def _request(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        try:
            response = self._http.request(method, API + path, **arguments)
        except httpx.TransportError as error:
            raise UnreachableError(self.url, str(error) or type(error).__name__) from error
        if response.is_success:
            return response
        message = _problem(response)
        raise NotFoundError(message) if response.status_code == 404 else RefusedError(response.status_code, message)


def _problem(response: httpx.Response) -> str:
    """The manager's reason in one line: `detail` of a problem document, else the status."""
    try:
        document = response.json()
    except ValueError:
        document = None
    detail = document.get("detail") or document.get("title") if isinstance(document, dict) else None
    if isinstance(detail, str) and detail:
        return " ".join(detail.split())
    return f"{response.request.method} {response.request.url} answered {response.status_code} {response.reason_phrase}"


def _segment(name: str) -> str:
    """A name as one segment of a path."""
    return quote(name, safe="")
