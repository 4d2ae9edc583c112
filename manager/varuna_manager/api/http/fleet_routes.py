"""VMs and the fleet."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from varuna_manager.api.http import parameters as by
from varuna_manager.domain.states import VmState
from varuna_manager.services.drains import DrainService
from varuna_manager.services.fleet import FleetService
from varuna_manager.services.views import Views
from varuna_manager.services.vm_list import VmFilter
from varuna_proto import rest_fleet as rest


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class PreemptBody(_Body):
    notice_s: float = Field(default=0.0, ge=0, description="0: taken at once, without notice")


class DrainBody(_Body):
    deadline_s: float | None = Field(
        default=None, ge=0, le=7 * 86400, description="the VM is to be empty by then, saved or not; null: when it is"
    )


class FleetBody(_Body):
    target: int = Field(ge=0, le=100_000, description="VMs that are wanted")


class LocalBody(_Body):
    capacity: int | None = Field(ge=0, description="VMs that the emulated market grants; null: any number")


def fleet_routes(fleet: FleetService, drains: DrainService, views: Views) -> APIRouter:
    router = APIRouter()
    _vm_routes(router, fleet, drains, views)

    @router.get("/fleet")
    async def get_fleet() -> rest.Fleet:
        """How many VMs are wanted, and how many there are."""
        return by.as_told(await fleet.fleet())

    @router.put("/fleet")
    async def set_fleet(body: FleetBody) -> rest.Fleet:
        """Want so many VMs, whatever the jobs want."""
        return by.as_told(await fleet.set_target(body.target))

    @router.get("/fleet/history")
    async def get_fleet_history(
        since: by.At = None,
        until: by.At = None,
        points: Annotated[int, Query(ge=1, le=2000, description="buckets")] = 200,
    ) -> rest.FleetHistory:
        """VMs over time, and what happened to them. `since` null: a day before the end; `until` null: now."""
        return by.as_told(await views.fleet.history(by.seconds(since), by.seconds(until), points))

    @router.get("/fleet/cost")
    async def get_fleet_cost(since: by.At = None) -> rest.FleetCost:
        """VM-hours of the fleet, and what they cost where the provider tells prices. `since` null: all of them."""
        return by.as_told(await views.fleet.cost(by.seconds(since)))

    @router.put("/providers/local")
    async def set_local_capacity(body: LocalBody) -> rest.Fleet:
        """How many VMs the emulated market of local VMs grants."""
        return by.as_told(await fleet.set_capacity(body.capacity))

    return router


def _vm_routes(router: APIRouter, fleet: FleetService, drains: DrainService, views: Views) -> None:
    @router.get("/vms")
    async def list_vms(
        request: Request,
        response: Response,
        gone: Annotated[bool, Query(description="also those that are no more")] = True,
        state: Annotated[list[VmState], Query(description="in one of these")] = [],  # noqa: B006
        provider: by.Text = None,
        job: by.Text = None,
        quarantined: bool | None = None,
        q: by.Text = None,
        limit: by.Limit = 10_000,
        cursor: by.Cursor = None,
    ) -> list[rest.Vm]:
        """The VMs, the oldest first: with workers of `job` on them, with `q` in their id or their host."""
        wanted = VmFilter(gone=gone, states=state, provider=provider, job=job, quarantined=quarantined, text=q)
        found = await views.vms.page(wanted, limit=limit, cursor=cursor)
        by.link_next(request, response, found.next_cursor)
        return by.as_told(found.items)

    @router.get("/vms/summary")
    async def get_vm_summary() -> rest.VmSummary:
        """The fleet in numbers."""
        return by.as_told(await views.vms.summary())

    @router.get("/vms/{vm}")
    async def get_vm(vm: by.VmId) -> rest.VmDetail:
        """One VM, with its past."""
        return by.as_told(await views.vms.one(vm))

    @router.post("/vms/{vm}/preempt")
    async def preempt_vm(vm: by.VmId, body: PreemptBody) -> rest.Preempted:
        """Take a VM as a spot market would; only providers that emulate one can."""
        return by.as_told(await fleet.preempt(vm, body.notice_s))

    @router.post("/vms/{vm}/drain")
    async def drain_vm(vm: by.VmId, body: DrainBody | None = None) -> rest.Vm:
        """Take the VM out of use: it is cordoned, its workers save and leave, then it is given back."""
        return by.as_told(await drains.drain(vm, None if body is None else body.deadline_s))

    @router.post("/vms/{vm}/cordon")
    async def cordon_vm(vm: by.VmId) -> rest.Vm:
        """Start nothing new on the VM until it is uncordoned, also when it restarts; what runs there goes on."""
        return by.as_told(await drains.cordon(vm))

    @router.post("/vms/{vm}/uncordon")
    async def uncordon_vm(vm: by.VmId) -> rest.Vm:
        """Use the VM again."""
        return by.as_told(await drains.uncordon(vm))
