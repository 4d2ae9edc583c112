"""The GCE provider with Google's own client against a small Compute Engine over HTTP.

It speaks the JSON of the REST API as far as the provider's calls go. As in the real one, a request's outcome is in an
operation that has to be waited for, an instance whose allocation fails is gone again, and names are unique in a zone.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import threading
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from google.auth.credentials import AnonymousCredentials
from google.cloud.compute_v1 import InstancesClient, ZoneOperationsClient
from google.cloud.compute_v1.services.instances.transports import InstancesRestTransport
from google.cloud.compute_v1.services.zone_operations.transports import ZoneOperationsRestTransport

from varuna_manager.providers.base import RefusalKind
from varuna_manager.providers.conformance import ProviderBench
from varuna_manager.providers.gce import GceClients, GceProvider
from varuna_manager.providers.gce_settings import GceSettings
from waiting import DEADLINE_S

_PAUSES_S = 3600.0
_OPERATION_ERRORS = {
    RefusalKind.CAPACITY: ("ZONE_RESOURCE_POOL_EXHAUSTED", "The zone does not have enough resources available."),
    RefusalKind.QUOTA: ("QUOTA_EXCEEDED", "Quota 'PREEMPTIBLE_NVIDIA_A100_GPUS' exceeded.  Limit: 1.0 in region."),
}


@dataclass
class FakeProject:
    """`instances`: by zone and name."""

    instances: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    operations: dict[str, dict[str, Any]] = field(default_factory=dict)
    inserts: list[dict[str, Any]] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)
    """Names of instances, once for each deletion that was accepted."""
    refuses_deletions: bool = False
    full: frozenset[tuple[str, str]] = frozenset()
    """Machine types and zones without capacity."""
    unknown: frozenset[tuple[str, str]] = frozenset()
    """Machine types that do not exist in these zones."""
    granted: int | None = None
    refusal: RefusalKind = RefusalKind.CAPACITY
    is_cut_off: bool = False
    loses_answer: bool = False
    loses_once: str = ""
    """The end of a path: the next request for it is done, and its answer is lost."""
    slowness_s: float = 0.0
    """How long each wait for an operation takes."""
    lock: threading.RLock = field(default_factory=threading.RLock)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def insert(self, zone: str, instance: dict[str, Any]) -> Response:
        name = instance["name"]
        if self.granted is not None and self.refusal is RefusalKind.THROTTLED:
            return _error(403, "rateLimitExceeded", "Rate Limit Exceeded")
        if (zone, name) in self.instances:
            return _error(409, "alreadyExists", f"The resource '{name}' already exists")
        machine_type = instance["machineType"].rpartition("/")[2]
        if (machine_type, zone) in self.unknown:
            return _error(400, "invalid", f"Machine type with name '{machine_type}' does not exist in zone '{zone}'.")
        self.inserts.append(instance)
        error: tuple[str, str] | None = None
        if (machine_type, zone) in self.full:
            error = _OPERATION_ERRORS[RefusalKind.CAPACITY]
        elif self.granted == 0:
            error = _OPERATION_ERRORS[self.refusal]
        else:
            created = datetime.now(UTC).isoformat()
            self.instances[zone, name] = {**instance, "status": "STAGING", "creationTimestamp": created}
            self.granted = None if self.granted is None else self.granted - 1
        return self._start(error)

    def delete(self, zone: str, name: str) -> Response:
        if (zone, name) not in self.instances:
            return _error(404, "notFound", f"The resource '{name}' was not found")
        if self.refuses_deletions:
            return _error(403, "rateLimitExceeded", "Rate Limit Exceeded")
        self.deleted.append(name)
        self.instances[zone, name]["status"] = "STOPPING"
        return self._start(None)

    def settle(self) -> None:
        """Instances that stop are gone."""
        with self.lock:
            self.instances = {key: each for key, each in self.instances.items() if each["status"] != "STOPPING"}

    def _start(self, error: tuple[str, str] | None) -> Response:
        name = f"operation-{next(self._numbers)}"
        failed = {} if error is None else {"error": {"errors": [{"code": error[0], "message": error[1]}]}}
        self.operations[name] = {"name": name, "status": "DONE", **failed}
        return JSONResponse({"name": name, "status": "RUNNING"})

    def list_instances(self, wanted: str) -> dict[str, Any]:
        """`wanted`: a filter of the form labels.NAME="VALUE"."""
        label, _, value = wanted.removeprefix("labels.").partition("=")
        found: dict[str, Any] = {}
        for (zone, _), instance in self.instances.items():
            if instance.get("labels", {}).get(label) == value.strip('"'):
                found.setdefault(f"zones/{zone}", {"instances": []})["instances"].append(instance)
        return {"items": found}


class FakeGce:
    """A server with projects, by their ids."""

    def __init__(self) -> None:
        self.projects: dict[str, FakeProject] = {}
        self.address = ""

    def make_clients(self) -> GceClients:
        place: dict[str, Any] = {
            "host": self.address, "credentials": AnonymousCredentials(), "url_scheme": "http",
        }  # fmt: skip
        return GceClients(
            InstancesClient(transport=InstancesRestTransport(**place)),
            ZoneOperationsClient(transport=ZoneOperationsRestTransport(**place)),
        )


def _error(status: int, reason: str, message: str) -> Response:
    detail = {"message": message, "domain": "global", "reason": reason}
    return JSONResponse({"error": {"code": status, "message": message, "errors": [detail]}}, status)


def _make_app(gce: FakeGce) -> FastAPI:
    app = FastAPI()
    base = "/compute/v1/projects/{project}"

    @app.middleware("http")
    async def disturb(request: Request, call_next: Any) -> Response:
        project = gce.projects[request.url.path.split("/")[4]]
        if project.is_cut_off:
            return _error(500, "backendError", "Internal error.\nPlease try again.")
        response: Response = await call_next(request)
        if project.loses_answer and request.method == "POST" and request.url.path.endswith("/instances"):
            project.is_cut_off = True
            return _error(500, "backendError", "the answer is lost")
        if request.method == "POST" and project.loses_once and request.url.path.endswith(project.loses_once):
            project.loses_once = ""
            return _error(503, "backendError", "the answer is lost once")
        return response

    @app.post(base + "/zones/{zone}/instances")
    async def insert(project: str, zone: str, request: Request) -> Response:
        with gce.projects[project].lock:
            return gce.projects[project].insert(zone, await request.json())

    @app.get(base + "/aggregated/instances")
    async def list_instances(project: str, request: Request) -> Response:
        return JSONResponse(gce.projects[project].list_instances(request.query_params["filter"]))

    @app.delete(base + "/zones/{zone}/instances/{name}")
    async def delete(project: str, zone: str, name: str) -> Response:
        with gce.projects[project].lock:
            return gce.projects[project].delete(zone, name)

    @app.post(base + "/zones/{zone}/instances/{name}/simulateMaintenanceEvent")
    async def simulate(project: str, zone: str, name: str) -> Response:
        with gce.projects[project].lock:
            return gce.projects[project].delete(zone, name)

    @app.post(base + "/zones/{zone}/operations/{name}/wait")
    async def wait(project: str, zone: str, name: str) -> Response:
        await asyncio.sleep(gce.projects[project].slowness_s)
        return JSONResponse(gce.projects[project].operations[name])

    return app


@contextmanager
def fake_gce() -> Iterator[FakeGce]:
    """The server, on a port of its own, in a thread of its own."""
    gce = FakeGce()
    listener = socket.create_server(("127.0.0.1", 0))
    gce.address = f"127.0.0.1:{listener.getsockname()[1]}"
    idle_s = int(DEADLINE_S)  # a client that stood still with this machine may use its connections again
    config = uvicorn.Config(_make_app(gce), log_config=None, lifespan="off", ws="none", timeout_keep_alive=idle_s)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    try:
        yield gce
    finally:
        server.should_exit = True
        thread.join(30)
        listener.close()


class GceBench(ProviderBench):
    """A project of its own."""

    refusals = frozenset({RefusalKind.CAPACITY, RefusalKind.QUOTA, RefusalKind.THROTTLED})

    def __init__(self, gce: FakeGce, **changes: Any) -> None:
        self._gce = gce
        name = f"project-{len(gce.projects)}"
        self.project = gce.projects[name] = FakeProject()
        settings = GceSettings(
            project=name,
            zones=("us-central1-a", "us-central1-b"),
            machine_types=("a2-highgpu-1g", "g2-standard-4"),
            gpus=1,
            image="projects/ubuntu-os-cloud/global/images/family/ubuntu-2404-lts-amd64",
            subnetwork="projects/p/regions/us-central1/subnetworks/vms",
            list_every_s=0,
        )
        self.settings = settings.model_copy(update=changes)
        self.now = 1000.0
        self._providers: list[GceProvider] = []
        self.provider: GceProvider = self.make_provider()

    def make_provider(self, **options: Any) -> GceProvider:
        made = GceProvider(self.settings, self._gce.make_clients(), _boot_script, now=lambda: self.now, **options)
        self._providers.append(made)
        return made

    async def close(self) -> None:
        for provider in self._providers:
            await provider.close(end_vms=False)

    async def restart_provider(self) -> None:
        self.provider = self.make_provider()

    async def list_real_vms(self) -> Collection[str]:
        return {name for (_, name), each in self.project.instances.items() if "varuna-fleet" in each["labels"]}

    async def advance(self) -> None:
        self.project.settle()

    async def lose_next_answer(self) -> None:
        self.project.loses_answer = True

    async def refuse_creations(self, kind: RefusalKind, granted: int) -> None:
        self.project.granted, self.project.refusal = granted, kind

    async def end_refusals(self) -> None:
        self.project.granted, self.project.full = None, frozenset()
        self.now += _PAUSES_S

    async def take_vm(self, vm_id: str, notice_s: float) -> None:
        self.project.instances = {key: each for key, each in self.project.instances.items() if key[1] != vm_id}

    async def cut_off(self) -> None:
        self.project.is_cut_off = True

    async def reconnect(self) -> None:
        self.project.is_cut_off = self.project.loses_answer = False

    async def add_stranger(self) -> str | None:
        created = datetime.now(UTC).isoformat()
        stranger = {
            "name": "stranger",
            "labels": {"owner": "somebody"},
            "status": "RUNNING",
            "creationTimestamp": created,
        }
        self.project.instances["us-central1-a", "stranger"] = stranger
        return "stranger"


@asynccontextmanager
async def open_gce_bench(gce: FakeGce, **changes: Any) -> AsyncIterator[GceBench]:
    bench = GceBench(gce, **changes)
    try:
        yield bench
    finally:
        await bench.close()


async def _boot_script(name: str) -> str:
    return f"#cloud-config\n# {name}\n"
