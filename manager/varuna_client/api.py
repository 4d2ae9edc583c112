"""The manager's REST API as typed calls."""

from __future__ import annotations

import ssl
import uuid
from types import TracebackType
from typing import Any, Self, cast
from urllib.parse import quote

import httpx

from varuna_client.documents import Event, Generation, Job, JobSpec, Metric, Stack, Vm
from varuna_client.errors import NotFoundError, RefusedError, TlsError, UnreachableError, UserError

DEFAULT_URL = "http://127.0.0.1:8750"
API = "/api/v1"


class Client:
    """A synchronous client; close it, or use it in a `with`.

    Every call raises UnreachableError when nobody answers, NotFoundError for what the manager does not know, and
    RefusedError with the manager's own words for all else that it does not take, and TlsError when TLS fails.

    Args:
        token: of the manager's API (`vt1...`); None for an open manager.
        ca: a PEM file with the authority of the manager's certificate; None: those that this machine trusts.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        token: str | None = None,
        ca: str | None = None,
        timeout_s: float = 15.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        # The environment's proxies are for the outside; the manager is on this machine or network.
        self._http = httpx.Client(
            base_url=self.url,
            timeout=timeout_s,
            transport=transport,
            trust_env=False,
            headers={} if token is None else {"Authorization": f"Bearer {token}"},
            verify=_trust(ca) if self.url.startswith("https:") else False,
        )

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

    def cancel(self, job: str, *, save: bool = False) -> Job:
        """Ask for the job's end; with `save` after a last checkpoint."""
        return cast(Job, self._call("POST", f"/jobs/{_segment(job)}/cancel", json={"save": save}))

    def retry(self, job: str) -> Job:
        """Queue a job that failed or was cancelled once more."""
        return cast(Job, self._call("POST", f"/jobs/{_segment(job)}/retry"))

    def stacks(self, job: str, *, generation: int | None = None) -> list[Stack]:
        """Where the ranks of a generation that hung stood; of all that did, without `generation`."""
        params = {} if generation is None else {"generation": generation}
        return cast(list[Stack], self._call("GET", f"/jobs/{_segment(job)}/stacks", params=params))

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

    def drain(self, vm_id: str, *, deadline_s: float | None = None) -> Vm:
        """Take a VM out of use: its workers save and leave; it is to be empty within `deadline_s`."""
        return cast(Vm, self._call("POST", f"/vms/{_segment(vm_id)}/drain", json={"deadline_s": deadline_s}))

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

    # ------------------------------------------------------------------ access

    def create_token(self, body: dict[str, Any]) -> dict[str, Any]:
        """A token of the API (`name`, `role`) or for joining (`join`); only this answer has its text (`token`)."""
        return cast(dict[str, Any], self._call("POST", "/tokens", json=body))

    def tokens(self) -> list[dict[str, Any]]:
        return cast(list[dict[str, Any]], self._call("GET", "/tokens"))

    def revoke_token(self, id_or_name: str) -> dict[str, Any]:
        return cast(dict[str, Any], self._call("DELETE", f"/tokens/{_segment(id_or_name)}"))

    def revoke_vm(self, vm_id: str) -> dict[str, Any]:
        return cast(dict[str, Any], self._call("POST", f"/vms/{_segment(vm_id)}/revoke"))

    def audit(self, *, after: int = 0) -> list[dict[str, Any]]:
        """The entries after number `after`, oldest first."""
        found = list[dict[str, Any]]()
        while page := cast(list[dict[str, Any]], self._call("GET", "/audit", params={"after": after})):
            found += page
            after = page[-1]["id"]
        return found

    # ------------------------------------------------------------------ how

    def _call(self, method: str, path: str, **arguments: Any) -> Any:
        return self._request(method, path, **arguments).json()

    def _request(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        try:
            response = self._http.request(method, API + path, **arguments)
        except httpx.TransportError as error:
            text = str(error) or type(error).__name__
            _raise_if_tls(self.url, text, error)
            raise UnreachableError(self.url, text) from error
        if response.is_success:
            return response
        message = _problem(response)
        raise NotFoundError(message) if response.status_code == 404 else RefusedError(response.status_code, message)


def _trust(ca: str | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca)
    except OSError as error:  # ssl.SSLError among them
        raise UserError(
            f"the authority's certificate {ca} cannot be used ({error}): give the manager's pki/ca.pem with --ca or "
            "VARUNA_CA"
        ) from error


def _raise_if_tls(url: str, text: str, error: httpx.TransportError) -> None:
    """Raise TlsError for what the manager's address or certificate is the matter of."""
    if "CERTIFICATE_VERIFY_FAILED" in text:
        raise TlsError(
            f"the certificate of {url} is not trusted ({text.partition('CERTIFICATE_VERIFY_FAILED]')[2].strip()}): "
            "give the manager's pki/ca.pem with --ca or VARUNA_CA, and call it by a name of its --server-names"
        ) from error
    if "WRONG_VERSION_NUMBER" in text or "record layer failure" in text.lower():
        raise TlsError(f"{url} speaks no TLS: call it as http://{url.partition('://')[2]}") from error
    # What a server that expects TLS does with a plain request.
    closed = isinstance(error, httpx.RemoteProtocolError) and "without sending a response" in text
    if url.startswith("http:") and closed:
        raise UnreachableError(
            url, f"{text.rstrip('.')}; if it is a secure manager, call it as https://{url.partition('://')[2]}"
        ) from error


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
