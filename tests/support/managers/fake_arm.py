"""A small Azure Resource Manager: scale sets, spot VMs, evictions, long-running operations, all that it refuses.

It speaks the REST API's own JSON over HTTP, as far as the SDK's calls of the provider go, and keeps state as Azure
does: a VM whose allocation fails stays as a failed resource, a VM that runs may be a failed resource too, a request's
outcome is in an operation that has to be polled, and lists come in pages. It also serves the public list of prices.
"""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import httpx
import uvicorn
from azure.core.pipeline.policies import SansIOHTTPPolicy
from azure.core.pipeline.transport import AsyncHttpTransport
from azure.core.rest import AsyncHttpResponse, HttpRequest
from azure.core.rest._http_response_impl_async import AsyncHttpResponseImpl
from azure.mgmt.compute.aio import ComputeManagementClient
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from varuna_manager.providers.azure import PatientRetryPolicy
from varuna_manager.providers.azure_settings import AzureSettings

PAGE = 10
_IDLE_S = 600
"""How long a connection may be idle: a client that stood still with this machine may use it again."""
GROUP = "/subscriptions/{subscription}/resourceGroups/{group}/providers/Microsoft.Compute"


class _NoCredential:
    async def get_token(self, *scopes: str, **options: Any) -> Any:
        raise AssertionError("the fake server wants no token")

    async def close(self) -> None:
        return


class _InProcess(AsyncHttpTransport[HttpRequest, AsyncHttpResponse]):
    """Hands requests to the application as they are, without a network."""

    def __init__(self, app: FastAPI) -> None:
        self._asgi = httpx.ASGITransport(app=app)

    async def send(self, request: HttpRequest, **options: Any) -> AsyncHttpResponse:
        sent = httpx.Request(request.method, request.url, headers=request.headers, content=request.content)
        answer = await self._asgi.handle_async_request(sent)

        async def body(**options: Any) -> AsyncIterator[bytes]:
            yield await answer.aread()

        response = AsyncHttpResponseImpl(
            request=request,
            internal_response=self,
            status_code=answer.status_code,
            headers=answer.headers,
            reason=answer.reason_phrase,
            content_type=answer.headers.get("content-type"),
            block_size=4096,
            stream_download_generator=body,
        )
        await response.read()
        return response

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def __aexit__(self, *error: Any) -> None: ...


def client_of(
    url: str, settings: AzureSettings, polling_s: float = 0.0, app: FastAPI | None = None
) -> ComputeManagementClient:
    """Azure's own client, for a fake server. `polling_s`: between two polls of an operation. `app`: the server, in
    this process; None: it is reached over HTTP."""
    return ComputeManagementClient(
        _NoCredential(),  # type: ignore[arg-type]
        settings.subscription_id,
        base_url=url,
        authentication_policy=SansIOHTTPPolicy(),
        polling_interval=polling_s,
        retry_policy=PatientRetryPolicy(retry_total=4, retry_backoff_factor=0.01),
        **({} if app is None else {"transport": _InProcess(app)}),
    )


@dataclass
class FakeVm:
    name: str
    body: dict[str, Any]
    created_at: float
    state: str = "Creating"
    power: str = ""
    """running, stopped, deallocated; empty: it has never been started, or Azure does not report it."""
    error_code: str = ""
    """Of the operation that failed."""

    @property
    def size(self) -> str:
        return str(self.body["properties"]["hardwareProfile"]["vmSize"])

    @property
    def scale_set(self) -> str:
        return str(self.body["properties"]["virtualMachineScaleSet"]["id"].rpartition("/")[2])

    @property
    def place(self) -> tuple[str, str | None]:
        return self.size, next(iter(self.body.get("zones", ())), None)

    def document(self, group: str) -> dict[str, Any]:
        created = datetime.fromtimestamp(self.created_at, UTC).isoformat()
        properties = {**self.body["properties"], "provisioningState": self.state, "timeCreated": created}
        properties["osProfile"] = {key: value for key, value in properties["osProfile"].items() if key != "customData"}
        return {**self.body, "id": f"{group}/virtualMachines/{self.name}", "name": self.name, "properties": properties}

    def instance_view(self) -> dict[str, Any]:
        error = f"/{self.error_code}" if self.error_code else ""
        codes = [f"ProvisioningState/{self.state.lower()}{error}"]
        codes += [f"PowerState/{self.power}"] if self.power else []
        return {"statuses": [{"code": code, "level": "Info"} for code in codes]}


@dataclass
class Operation:
    """A long-running operation, which clients poll until it has ended."""

    asks_left: int
    due_at: float
    error: dict[str, str] | None = None
    vm: FakeVm | None = None
    deletes: tuple[str, ...] = ()


@dataclass
class FakeArm:
    """The state, and the knobs: change them while it runs."""

    capacity: dict[tuple[str, str | None], int] = field(default_factory=dict)
    """VMs that a size has room for in a zone; missing: any number."""
    quota: int | None = None
    """VMs that the subscription may have, also those that failed."""
    refuses_at_once: bool = False
    """Whether the request itself reports a lack of capacity (SkuNotAvailable), not its operation."""
    throttle: list[float] = field(default_factory=list)
    """Retry-After of the answers 429 to the next writes."""
    throttle_polls: list[float] = field(default_factory=list)
    """The same for polls of operations."""
    fails_running: str = ""
    """Code with which the operations of new VMs fail, although the VMs run; empty: they succeed."""
    throttle_deletes: list[float] = field(default_factory=list)
    """The same for deletions of the scale set's VMs."""
    failures: list[int] = field(default_factory=list)
    """Status codes of the next requests of any kind."""
    unaccelerated: set[str] = field(default_factory=set)
    """Sizes without accelerated networking."""
    locked: set[str] = field(default_factory=set)
    """VMs that may not be deleted."""
    retail: dict[str, float] = field(default_factory=dict)
    """Spot prices of the public list, by size as it is written there."""
    retail_status: int = 200
    may_read_subscription: bool = True
    answers_left: int | None = None
    """How many more requests for VMs are answered; then requests take effect, and no answer arrives. None: all."""
    hidden: set[str] = field(default_factory=set)
    """VMs that lists do not show yet."""
    slow_operations: int = 1
    """How often an operation is polled before it ends."""
    clock: Callable[[], float] = time.time
    create_s: float = 0.0
    delete_s: float = 0.0
    """How long these operations take, by the clock."""
    prices: dict[str, float] = field(default_factory=dict)
    """The hourly price on the invoice, by size."""
    most_vms: int = 0
    most_cost: float = 0.0
    """The most VMs that existed at the same time, including those being made or deleted."""
    vms: dict[str, FakeVm] = field(default_factory=dict)
    scale_sets: dict[str, dict[str, Any]] = field(default_factory=dict)
    operations: dict[str, Operation] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)
    market: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Spot price and eviction band by size, in small letters."""
    url: str = ""
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def evict(self, *names: str) -> None:
        """As with eviction policy Delete: they are gone."""
        with self._lock:
            for name in names:
                del self.vms[name]

    def writes(self, kind: str) -> list[str]:
        return [path for method, path in self.requests if method in ("PUT", "POST") and kind in path]

    def vm_writes(self) -> list[str]:
        return [path for method, path in self.requests if method == "PUT" and "/virtualMachines/" in path]

    def client(self, settings: AzureSettings) -> ComputeManagementClient:
        return client_of(self.url, settings)

    def client_without_network(self, settings: AzureSettings, polling_s: float) -> ComputeManagementClient:
        return client_of(self.url, settings, polling_s, app=_app(self))

    # ------------------------------------------------------------ what a request does

    def put_vm(self, name: str, body: dict[str, Any], *, only_new: bool = False) -> Response:
        """`only_new`: it came with If-None-Match: *."""
        with self._lock:
            if name in self.vms:
                return self._again(self.vms[name], only_new)
            used = len(self.vms)
            if self.quota is not None and used >= self.quota:
                text = f"Operation could not be completed as it results in exceeding approved quota. Current: {used}"
                return _error(409, "OperationNotAllowed", text)
            vm = FakeVm(name, body, self.clock())
            invalid = self._invalid(vm)
            if invalid is not None:
                return invalid
            full = self._is_full(vm)
            if full and self.refuses_at_once:
                return _error(409, "SkuNotAvailable", f"The requested VM size {vm.size} is currently not available")
            self.vms[name] = vm
            self._note_most()
            error: dict[str, str] | None
            error = {"code": "AllocationFailed", "message": "Allocation failed. We do not have sufficient capacity"}
            if not full:
                error = {"code": self.fails_running, "message": "it failed"} if self.fails_running else None
            operation = Operation(self.slow_operations, self.clock() + self.create_s, error, vm)
            return JSONResponse(vm.document(self._group()), 201, headers=self._operation(operation))

    def _invalid(self, vm: FakeVm) -> Response | None:
        """The answer to a request that can never be granted."""
        properties = vm.body["properties"]
        scale_set = self.scale_sets.get(vm.scale_set, {})
        zones, allowed = vm.body.get("zones", []), scale_set.get("zones", [])
        if bool(zones) != bool(allowed) or not {*zones} <= {*allowed}:
            text = f"VM of zones {zones} cannot be attached to Virtual Machine Scale Set of zones {allowed}"
            return _error(400, "BadRequest", text)
        terminate = properties.get("scheduledEventsProfile", {}).get("terminateNotificationProfile", {})
        if terminate.get("enable") and properties["priority"] == "Spot":
            return _error(400, "InvalidParameter", "Terminate notifications can't be enabled on Spot instances")
        interface = properties["networkProfile"]["networkInterfaceConfigurations"][0]["properties"]
        if interface["enableAcceleratedNetworking"] and vm.size in self.unaccelerated:
            text = f"VM {vm.name} has size {vm.size}, which does not support accelerated networking"
            return _error(400, "VMSizeIsNotPermittedToEnableAcceleratedNetworking", text)
        return None

    def _again(self, vm: FakeVm, only_new: bool) -> Response:
        if vm.state == "Deleting":
            return _error(409, "OperationNotAllowed", f"VM {vm.name} is being deleted")
        if only_new:
            return _error(412, "PreconditionFailed", f"VM {vm.name} exists")
        return _error(409, "PropertyChangeNotAllowed", "Changing property 'osProfile.customData' is not allowed.")

    def _note_most(self) -> None:
        there = [vm for vm in self.vms.values() if vm.state != "Failed"]
        self.most_vms = max(self.most_vms, len(there))
        self.most_cost = max(self.most_cost, sum(self.prices.get(vm.size, 0.0) for vm in there))

    def _is_full(self, vm: FakeVm) -> bool:
        room = self.capacity.get(vm.place)
        alive = sum(other.place == vm.place and other.state in ("Creating", "Succeeded") for other in self.vms.values())
        return room is not None and alive >= room

    def delete(self, names: list[str], scale_set: str | None = None) -> Response:
        """`scale_set`: the one to which the request was made, which finds only its own VMs; None: any VM is found."""
        with self._lock:
            unknown = [
                name for name in names if name not in self.vms or scale_set not in (None, self.vms[name].scale_set)
            ]
            if unknown:
                return _error(404, "ResourceNotFound", f"The entity {unknown[0]} was not found")
            if self.locked.intersection(names):
                text = f"The scope '{names}' cannot perform delete operation because following scope(s) are locked"
                return _error(409, "ScopeLocked", text)
            for name in names:
                self.vms[name].state = "Deleting"
            operation = Operation(self.slow_operations, self.clock() + self.delete_s, deletes=tuple(names))
            headers = self._operation(operation)
            return Response(status_code=202, headers={"Location": headers["Azure-AsyncOperation"]})

    def _operation(self, operation: Operation) -> dict[str, str]:
        number = f"{next(self._numbers)}"
        self.operations[number] = operation
        return {"Azure-AsyncOperation": f"{self.url}/operations/{number}?api-version=2024-03-01"}

    def ask(self, number: str) -> Response:
        with self._lock:
            operation = self.operations[number]
            operation.asks_left -= 1
            if operation.asks_left > 0 or self.clock() < operation.due_at:
                status = 202 if operation.deletes else 200
                return JSONResponse({"status": "InProgress"}, status, headers={"Location": self._self(number)})
            self._carry_out(operation)
            if operation.error:
                return JSONResponse({"status": "Failed", "error": operation.error})
            return JSONResponse({"status": "Succeeded"})

    def _carry_out(self, operation: Operation) -> None:
        for name in operation.deletes:
            self.vms.pop(name, None)
        if operation.vm is not None and operation.vm.state == "Creating":
            vm = operation.vm
            vm.state, vm.error_code = ("Failed", operation.error["code"]) if operation.error else ("Succeeded", "")
            vm.power = "running" if vm.error_code in ("", self.fails_running) else ""

    def settle(self) -> None:
        """Completes the operations that are due, whether or not anybody polls them."""
        with self._lock:
            for operation in self.operations.values():
                if self.clock() >= operation.due_at:
                    self._carry_out(operation)

    def _self(self, number: str) -> str:
        return f"{self.url}/operations/{number}?api-version=2024-03-01"

    def _group(self) -> str:
        return GROUP.format(subscription="s", group="g")

    def fail(self, name: str, code: str = "VMExtensionProvisioningError", power: str = "running") -> None:
        """An operation on the VM's description fails. `power`: the machine's state, which that does not change."""
        with self._lock:
            vm = self.vms[name]
            vm.state, vm.error_code, vm.power = "Failed", code, power

    def list_vms(self, skip: int, *, with_views: bool = False) -> dict[str, Any]:
        with self._lock:
            everything = sorted((vm for vm in self.vms.values() if vm.name not in self.hidden), key=lambda vm: vm.name)
            shown = everything[skip : skip + PAGE]
            page = [vm.document(self._group()) for vm in shown]
            for vm, document in zip(shown, page, strict=True):
                if with_views:
                    document["properties"]["instanceView"] = vm.instance_view()
            more = len(everything) > skip + PAGE
            views = "&$expand=instanceView" if with_views else ""
            path = f"{self.url}{self._group()}/virtualMachines?api-version=2024-03-01&skip={skip + PAGE}{views}"
            return {"value": page, **({"nextLink": path} if more else {})}

    def graph(self, body: dict[str, Any]) -> Response:
        """`SpotResources` belongs to no subscription, and only who may read one may ask."""
        if not self.may_read_subscription:
            return _error(403, "AccessDenied", "Access is denied to the requested resource")
        index = 0 if "skuspotpricehistory" in body["query"] else 1
        rows = [] if "subscriptions" in body else [*self.market.items()]
        return JSONResponse({"data": [{"size": size, "value": said[index]} for size, said in rows]})

    def retail_page(self, query: str) -> Response:
        """Prices of one size, with those that are no Linux spot prices among them."""
        if self.retail_status != 200:
            return Response(status_code=self.retail_status)
        size = query.partition("armSkuName eq '")[2].partition("'")[0]
        if size not in self.retail:
            return JSONResponse({"Items": [], "NextPageLink": None, "Count": 0})
        price, series = self.retail[size], f"Virtual Machines {size} Series"
        meters = [
            ("x Spot", series, price),
            ("x Spot", f"{series} Windows", price * 3),
            ("x Low Priority", series, 0.01),
        ]
        items = [
            {"meterName": meter, "productName": product, "retailPrice": cost, "unitOfMeasure": "1 Hour",
             "currencyCode": "USD", "armSkuName": size}
            for meter, product, cost in meters
        ]  # fmt: skip
        return JSONResponse({"Items": items, "NextPageLink": None, "Count": len(items)})


def _error(status: int, code: str, message: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"error": {"code": code, "message": message}}, status, headers=headers)


def _too_many(wait_s: float) -> Response:
    return _error(429, "TooManyRequests", "slow down", {"Retry-After": f"{wait_s:g}"})


def _app(arm: FakeArm) -> FastAPI:
    app = FastAPI()
    base = "/subscriptions/{subscription}/resourceGroups/{group}/providers/Microsoft.Compute"

    @app.middleware("http")
    async def refuse(request: Request, call_next: Any) -> Response:
        arm.requests.append((request.method, request.url.path))
        if arm.failures and "/retail/" not in request.url.path:
            return _error(arm.failures.pop(0), "InternalServerError", "try again")
        if arm.throttle and request.method in ("PUT", "POST") and "virtualMachines" in request.url.path:
            return _too_many(arm.throttle.pop(0))
        if arm.throttle_polls and "/operations/" in request.url.path:
            return _too_many(arm.throttle_polls.pop(0))
        response: Response = await call_next(request)
        if arm.answers_left is not None:
            is_vm = request.method == "PUT" and "/virtualMachines/" in request.url.path
            arm.answers_left -= is_vm
            if arm.answers_left < 0:
                return _error(500, "InternalServerError", "the answer is lost")
        return response

    @app.get(base + "/virtualMachineScaleSets/{name}")
    async def get_set(name: str) -> Response:
        if name not in arm.scale_sets:
            return _error(404, "ResourceNotFound", f"{name} was not found")
        return JSONResponse(arm.scale_sets[name])

    @app.put(base + "/virtualMachineScaleSets/{name}")
    async def put_set(name: str, request: Request) -> Response:
        arm.scale_sets[name] = {**await request.json(), "name": name, "id": f"x/{name}"}
        return JSONResponse(arm.scale_sets[name])

    @app.post(base + "/virtualMachineScaleSets/{name}/delete")
    async def delete_instances(name: str, request: Request) -> Response:
        if arm.throttle_deletes:
            return _too_many(arm.throttle_deletes.pop(0))
        return arm.delete((await request.json())["instanceIds"], name)

    @app.get(base + "/virtualMachines")
    async def list_vms(request: Request, skip: int = 0) -> Response:
        if not arm.scale_sets:
            return _error(404, "ResourceNotFound", "no such scale set")
        return JSONResponse(arm.list_vms(skip, with_views=request.query_params.get("$expand") == "instanceView"))

    @app.put(base + "/virtualMachines/{name}")
    async def put_vm(name: str, request: Request) -> Response:
        return arm.put_vm(name, await request.json(), only_new=request.headers.get("If-None-Match") == "*")

    @app.post(base + "/virtualMachines/{name}/simulateEviction")
    async def simulate_eviction(name: str) -> Response:
        if name not in arm.vms:
            return _error(404, "ResourceNotFound", name)
        arm.evict(name)
        return Response(status_code=204)

    @app.get(base + "/virtualMachines/{name}")
    async def get_vm(name: str) -> Response:
        vm = arm.vms.get(name)
        return JSONResponse(vm.document("g")) if vm else _error(404, "ResourceNotFound", name)

    @app.delete(base + "/virtualMachines/{name}")
    async def delete_vm(name: str) -> Response:
        return arm.delete([name])

    @app.get("/operations/{number}")
    async def ask(number: str) -> Response:
        return arm.ask(number)

    @app.post("/providers/Microsoft.ResourceGraph/resources")
    async def graph(request: Request) -> Response:
        return arm.graph(await request.json())

    @app.get("/api/retail/prices")
    async def retail(request: Request) -> Response:
        return arm.retail_page(request.query_params["$filter"])

    return app


@contextmanager
def fake_arm() -> Iterator[FakeArm]:
    """The server, on a port of its own, in a thread of its own."""
    arm = FakeArm()
    listener = socket.create_server(("127.0.0.1", 0))
    arm.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    config = uvicorn.Config(_app(arm), log_config=None, lifespan="off", ws="none", timeout_keep_alive=_IDLE_S)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    try:
        yield arm
    finally:
        server.should_exit = True
        thread.join(30)
        listener.close()
