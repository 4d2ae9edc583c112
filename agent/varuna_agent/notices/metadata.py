"""Notices of preemption from the metadata services of Azure, AWS and Google Cloud.

Sources: Azure "Scheduled Events for Linux VMs", AWS "Spot Instance interruption notices" and "EC2 instance rebalance
recommendations" (IMDSv2), Google Cloud "Preemptible VM instances: detecting preemption". All are best effort: a VM may
also vanish without any of them.
"""

from __future__ import annotations

import asyncio
import email.utils
from collections.abc import AsyncIterator, Callable, Mapping
from datetime import datetime
from typing import Any, Protocol

import httpx
import structlog

from varuna_agent.notices.notices import Notice, NoticeCancellation, unix_now_s

__all__ = ["METADATA_URL", "AwsNotices", "AzureNotices", "GcpNotices", "MetadataSource", "make_metadata_source"]

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()

METADATA_URL = "http://169.254.169.254"
_TIMEOUT_S = 5.0
_FIRST_TIMEOUT_S = 150.0
"""Azure's first answer may take two minutes: the service is switched on by the first question."""
_FAILURES_PER_LOG_LINE = 60
"""Failures in a row between two log lines."""

_AZURE_VERSION = "2020-07-01"
_AZURE_NAME_VERSION = "2021-02-01"
_AZURE_TAKES_VM = frozenset({"Preempt", "Terminate", "Reboot", "Redeploy"})
_AWS_TOKEN_S = 21_600
_AWS_REBALANCE_S = 600.0
"""How long after a recommendation to rebalance the VM is left at the latest."""
_GCP_NOTICE_S = 30.0


class _MetadataService(Protocol):
    """One cloud's metadata service.

    Raises httpx.HTTPError, or ValueError, KeyError, TypeError for an answer that cannot be understood.
    """

    name: str

    async def fetch_notices(self, client: httpx.AsyncClient) -> Mapping[str, Notice]:
        """The notices in force, by id."""

    async def acknowledge_notice(self, client: httpx.AsyncClient, notice_id: str) -> None:
        """Let the cloud take the VM before the deadline."""


class MetadataSource:
    """Polls a metadata service every `poll_s`. A notice that disappears before its deadline was cancelled."""

    def __init__(self, service: _MetadataService, *, url: str = METADATA_URL, poll_s: float = 1.0) -> None:
        self._service = service
        self._poll_s = poll_s
        self._client = httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_S, trust_env=False)

    async def watch_notices(self) -> AsyncIterator[Notice | NoticeCancellation]:
        known: dict[str, Notice] = {}
        failures = 0
        while True:
            try:
                pending = await self._service.fetch_notices(self._client)
                failures = 0
            except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
                if failures % _FAILURES_PER_LOG_LINE == 0:
                    _log.warning("the metadata service does not answer", cloud=self._service.name, error=repr(error))
                failures += 1
                await asyncio.sleep(self._poll_s)
                continue
            for notice_id, notice in pending.items():
                if known.get(notice_id) != notice:
                    yield notice
            for notice_id in known.keys() - pending.keys():
                yield NoticeCancellation(notice_id)
            known = dict(pending)
            await asyncio.sleep(self._poll_s)

    async def acknowledge_notice(self, notice_id: str) -> None:
        """The VM is empty and may go now. A failure is logged: the cloud takes the VM at the deadline anyway."""
        try:
            await self._service.acknowledge_notice(self._client, notice_id)
        except httpx.HTTPError as error:
            _log.warning("the notice could not be acknowledged", cloud=self._service.name, error=repr(error))


class AzureNotices:
    """Scheduled Events. An event with several VMs is not acknowledged, because the others may still be saving."""

    name = "azure"

    def __init__(self) -> None:
        self._vm_name: str | None = None
        self._first = True
        self._deadlines: dict[str, float] = {}
        self._shared: set[str] = set()

    async def fetch_notices(self, client: httpx.AsyncClient) -> Mapping[str, Notice]:
        if self._vm_name is None:
            self._vm_name = await self._fetch_name(client)
        timeout_s = _FIRST_TIMEOUT_S if self._first else _TIMEOUT_S
        answer = await client.get(
            "/metadata/scheduledevents",
            params={"api-version": _AZURE_VERSION},
            headers={"Metadata": "true"},
            timeout=timeout_s,
        )
        answer.raise_for_status()
        self._first = False
        events = answer.json()["Events"]
        mine = [event for event in events if self._concerns_this_vm(event)]
        return {event["EventId"]: self._make_notice(event) for event in mine}

    async def acknowledge_notice(self, client: httpx.AsyncClient, notice_id: str) -> None:
        if notice_id in self._shared:
            return
        answer = await client.post(
            "/metadata/scheduledevents",
            params={"api-version": _AZURE_VERSION},
            headers={"Metadata": "true"},
            json={"StartRequests": [{"EventId": notice_id}]},
        )
        answer.raise_for_status()

    async def _fetch_name(self, client: httpx.AsyncClient) -> str:
        answer = await client.get(
            "/metadata/instance/compute/name",
            params={"api-version": _AZURE_NAME_VERSION, "format": "text"},
            headers={"Metadata": "true"},
        )
        answer.raise_for_status()
        return answer.text.strip()

    def _concerns_this_vm(self, event: Mapping[str, Any]) -> bool:
        """A Freeze is a pause of seconds with the VM's memory kept: not worth leaving for."""
        assert self._vm_name is not None
        names = {str(name).lower() for name in event["Resources"]}
        return self._vm_name.lower() in names and event["EventType"] in _AZURE_TAKES_VM

    def _make_notice(self, event: Mapping[str, Any]) -> Notice:
        """An event that has started has no deadline: it keeps its earlier one, or else is due now."""
        notice_id = str(event["EventId"])
        if len(event["Resources"]) > 1:
            self._shared.add(notice_id)
        if event.get("NotBefore"):
            self._deadlines[notice_id] = email.utils.parsedate_to_datetime(event["NotBefore"]).timestamp()
        deadline = self._deadlines.setdefault(notice_id, unix_now_s())
        return Notice(notice_id, deadline, f"azure {event['EventType']}")


class AwsNotices:
    """The spot instance's action, if there is one; two minutes ahead. AWS takes no acknowledgement.

    `leaves_early`: a recommendation to rebalance is a notice, too. AWS gives it when the risk of an interruption has
    risen, and does not say when that would be. So its deadline is our own: time enough for a planned morph.
    """

    name = "aws"

    def __init__(self, *, leaves_early: bool = False) -> None:
        self._leaves_early = leaves_early
        self._token = ""

    async def fetch_notices(self, client: httpx.AsyncClient) -> Mapping[str, Notice]:
        notices = {}
        if self._leaves_early:
            recommendation = await self._fetch(client, "events/recommendations/rebalance")
            if recommendation is not None:
                said = datetime.fromisoformat(recommendation["noticeTime"]).timestamp()
                notice_id = f"rebalance-{recommendation['noticeTime']}"
                notices[notice_id] = Notice(notice_id, said + _AWS_REBALANCE_S, "aws rebalance")
        action = await self._fetch(client, "spot/instance-action")
        if action is not None:
            due = datetime.fromisoformat(action["time"])
            notice_id = f"{action['action']}-{action['time']}"
            notices[notice_id] = Notice(notice_id, due.timestamp(), f"aws {action['action']}")
        return notices

    async def acknowledge_notice(self, client: httpx.AsyncClient, notice_id: str) -> None:
        return

    async def _fetch(self, client: httpx.AsyncClient, path: str) -> Mapping[str, Any] | None:
        """The document at a path below meta-data; None: there is none."""
        answer = await self._get(client, path)
        if answer.status_code == httpx.codes.UNAUTHORIZED:
            await self._renew_token(client)
            answer = await self._get(client, path)
        if answer.status_code == httpx.codes.NOT_FOUND:
            return None
        answer.raise_for_status()
        document: Mapping[str, Any] = answer.json()
        return document

    async def _get(self, client: httpx.AsyncClient, path: str) -> httpx.Response:
        return await client.get(f"/latest/meta-data/{path}", headers={"X-aws-ec2-metadata-token": self._token})

    async def _renew_token(self, client: httpx.AsyncClient) -> None:
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(_AWS_TOKEN_S)}
        answer = await client.put("/latest/api/token", headers=headers)
        answer.raise_for_status()
        self._token = answer.text.strip()


class GcpNotices:
    """Whether the instance is being preempted; some 30 s ahead. Google Cloud takes no acknowledgement."""

    name = "gcp"

    def __init__(self) -> None:
        self._deadline: float | None = None

    async def fetch_notices(self, client: httpx.AsyncClient) -> Mapping[str, Notice]:
        answer = await client.get("/computeMetadata/v1/instance/preempted", headers={"Metadata-Flavor": "Google"})
        answer.raise_for_status()
        if answer.text.strip() != "TRUE":
            self._deadline = None
            return {}
        if self._deadline is None:
            self._deadline = unix_now_s() + _GCP_NOTICE_S
        return {"preempted": Notice("preempted", self._deadline, "gcp preempted")}

    async def acknowledge_notice(self, client: httpx.AsyncClient, notice_id: str) -> None:
        return


_SERVICES: Mapping[str, Callable[[], _MetadataService]] = {
    "azure": AzureNotices,
    "aws": AwsNotices,
    "aws-rebalance": lambda: AwsNotices(leaves_early=True),
    "gcp": GcpNotices,
}


def make_metadata_source(cloud: str, *, url: str = METADATA_URL, poll_s: float = 1.0) -> MetadataSource:
    """The source for `azure`, `aws`, `aws-rebalance` or `gcp`. Raises ValueError for any other name."""
    if cloud not in _SERVICES:
        raise ValueError(f"--notices {cloud!r}: expected one of {', '.join(_SERVICES)}, or file")
    return MetadataSource(_SERVICES[cloud](), url=url, poll_s=poll_s)
