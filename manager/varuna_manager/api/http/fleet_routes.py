"""VMs and the fleet."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from varuna_manager.api.http import parameters as by
from varuna_manager.domain.states import VmState
from varuna_manager.fleet.drains import DrainService
from varuna_manager.fleet.fleet import FleetService
from varuna_manager.fleet.vm_list import VmFilter
from varuna_manager.history.views import Views
from varuna_proto import rest_fleet as rest

_MOST_VMS = 100_000
_LONGEST_S = 7 * 86400
"""Of what becomes a deadline."""


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class PreemptBody(_Body):
    notice_s: float = Field(
        default=0.0,
        ge=0,
        le=_LONGEST_S,
        allow_inf_nan=False,
        description="time until the VM is taken; 0: at once",
    )


class DrainBody(_Body):
    deadline_s: float | None = Field(
        default=None,
        ge=0,
        le=_LONGEST_S,
        allow_inf_nan=False,
        description="the VM is empty by then, even if its workers have not saved; null: no deadline",
    )


class FleetBody(_Body):
    target: int = Field(ge=0, le=_MOST_VMS, description="number of VMs to keep")


class LocalBody(_Body):
    capacity: int | None = Field(
        ge=0, le=_MOST_VMS, description="VMs that the emulated market grants; null: any number"
    )


def fleet_routes(fleet: FleetService, drains: DrainService, views: Views) -> APIRouter:
    router = APIRouter()
    _vm_routes(router, fleet, drains, views)

    @router.get("/fleet")
    async def get_fleet() -> rest.FleetDocument:
        """How many VMs the fleet should have, and how many it has."""
        return await fleet.describe_fleet()

    @router.put("/fleet")
    async def set_fleet(body: FleetBody) -> rest.FleetDocument:
        """Keep a fixed number of VMs, whatever the jobs want."""
        return await fleet.set_target(body.target)

    @router.get("/fleet/history")
    async def get_fleet_history(
        since: by.At = None,
        until: by.At = None,
        points: Annotated[int, Query(ge=1, le=2000, description="number of buckets")] = 200,
    ) -> rest.FleetHistoryDocument:
        """The number of VMs over time, and what happened to them. `since` null: a day; `until` null: now."""
        return await views.fleet.read_history(by.seconds(since), by.seconds(until), points)

    @router.get("/fleet/cost")
    async def get_fleet_cost(since: by.At = None) -> rest.FleetCostDocument:
        """VM-hours of the fleet, and their cost where the provider has prices. `since` null: from the first VM on."""
        return await views.fleet.read_cost(by.seconds(since))

    @router.put("/providers/local")
    async def set_local_capacity(body: LocalBody) -> rest.FleetDocument:
        """Set how many VMs the emulated market grants."""
        return await fleet.set_capacity(body.capacity)

    return router


def _vm_routes(router: APIRouter, fleet: FleetService, drains: DrainService, views: Views) -> None:
    @router.get("/vms")
    async def list_vms(
        request: Request,
        response: Response,
        gone: Annotated[bool, Query(description="include VMs that are gone")] = True,
        state: Annotated[list[VmState], Query(description="only in one of these states")] = [],  # noqa: B006
        provider: by.Text = None,
        job: by.Text = None,
        quarantined: bool | None = None,
        q: by.Text = None,
        limit: by.Limit = 10_000,
        cursor: by.Cursor = None,
    ) -> list[rest.VmDocument]:
        """The VMs, oldest first. `job`: only those with workers of this job; `q`: only with this text in id or host."""
        wanted = VmFilter(gone=gone, states=state, provider=provider, job=job, quarantined=quarantined, text=q)
        found = await views.vms.list_page(wanted, limit=limit, cursor=cursor)
        by.link_next(request, response, found.next_cursor)
        return found.items

    @router.get("/vms/summary")
    async def get_vm_summary() -> rest.VmSummaryDocument:
        """The fleet in numbers."""
        return await views.vms.summarize_vms()

    @router.get("/vms/{vm}")
    async def get_vm(vm: by.VmId) -> rest.VmDetailDocument:
        """One VM, with its history."""
        return await views.vms.find_vm(vm)

    @router.get("/vms/{vm}/usage")
    async def get_vm_usage(vm: by.VmId) -> rest.VmUsageDocument:
        """How busy the VM has been over its life: processors, memory, network, GPUs."""
        return await views.usage.read_usage(vm)

    @router.post("/vms/{vm}/preempt")
    async def preempt_vm(vm: by.VmId, body: PreemptBody) -> rest.PreemptionDocument:
        """Take a VM as a spot market does, with a provider that emulates one."""
        return await fleet.preempt_vm(vm, body.notice_s)

    @router.post("/vms/{vm}/drain")
    async def drain_vm(vm: by.VmId, body: DrainBody | None = None) -> rest.VmDocument:
        """Cordon the VM, let its workers save and leave, then give it back."""
        return await drains.drain_vm(vm, None if body is None else body.deadline_s)

    @router.post("/vms/{vm}/cordon")
    async def cordon_vm(vm: by.VmId) -> rest.VmDocument:
        """Start nothing new on the VM until it is uncordoned, even if it restarts. Its workers go on."""
        return await drains.cordon_vm(vm)

    @router.post("/vms/{vm}/uncordon")
    async def uncordon_vm(vm: by.VmId) -> rest.VmDocument:
        """Use the VM again."""
        return await drains.uncordon_vm(vm)
