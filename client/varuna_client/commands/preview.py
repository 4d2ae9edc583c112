"""The preview of `varuna submit`: the plan for the present GPUs, its rate and its price.

The client makes this plan from the profile of an earlier run of the same job. It is an estimate: the manager plans with
the facts at the job's start.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from varuna_client.errors import NotFoundError
from varuna_client.rest.client import Client
from varuna_client.text.render import ago, duration, rate, shape, total_steps
from varuna_manager.domain.fitting import fits_job
from varuna_manager.domain.spec import Resources
from varuna_proto.rest import JobDocument, JobSpecDocument
from varuna_proto.rest_fleet import VmDocument
from varuna_proto.wording import count_of

if TYPE_CHECKING:
    from varuna_planner.search.auto_config import PlanChoice


@dataclass(frozen=True, kw_only=True)
class FreeGpus:
    """GPUs that a job could get, on VMs that are ready and neither slow nor about to leave."""

    gpus: int
    vms: int
    gpus_per_vm: int
    device_memory_bytes: int | None
    all_gpus: int
    price_per_gpu_hour: float | None
    """Mean over the GPUs with a price."""


@dataclass(frozen=True, kw_only=True)
class Preview:
    free: FreeGpus
    gpus: int
    """GPUs that the job would use at most."""
    plan: dict[str, Any] | None = None
    profile_of: JobDocument | None = None
    why_not: str | None = None
    """Why there is no plan."""
    cost_per_hour: float | None = None

    def to_document(self) -> dict[str, Any]:
        """For --json."""
        return {
            "free_gpus": self.free.gpus,
            "all_gpus": self.free.all_gpus,
            "plan": self.plan,
            "profile_of_job": None if self.profile_of is None else self.profile_of["id"],
            "why_no_plan": self.why_not,
            "cost_per_hour": self.cost_per_hour,
        }


def preview(client: Client, spec: JobSpecDocument) -> Preview:
    """Plan the job for the present fleet."""
    free = free_gpus(client.vms(), spec)
    most = (spec.get("resources") or {}).get("max_gpus")
    gpus = min(free.gpus, most) if most else free.gpus
    earlier = _profiled_before(client, spec)
    if earlier is None:
        return Preview(free=free, gpus=gpus, why_not="not profiled yet: that comes first, once, for about a minute")
    job, profile_json = earlier
    if gpus == 0:
        return Preview(free=free, gpus=0, profile_of=job, why_not="no GPU is free: the job waits, or gets its share")
    try:
        best = _choose(profile_json, spec, free, gpus).best
    except ValueError as error:
        return Preview(free=free, gpus=gpus, profile_of=job, why_not=str(error))
    except (ImportError, RuntimeError) as error:  # numba finds no folder for its cache, say: that stops no job
        why_not = f"the planner does not run here ({error}): the manager will plan"
        return Preview(free=free, gpus=gpus, profile_of=job, why_not=why_not)
    if best is None:
        why_not = f"no plan fits {count_of(gpus, 'GPU')} now: the job waits for more"
        return Preview(free=free, gpus=gpus, profile_of=job, why_not=why_not)
    price = free.price_per_gpu_hour
    cost = None if price is None else price * best.p * best.d
    return Preview(free=free, gpus=gpus, plan=best.to_document(), profile_of=job, cost_per_hour=cost)


def free_gpus(vms: list[VmDocument], spec: JobSpecDocument | None = None) -> FreeGpus:
    """Count the free GPUs. `spec`: only GPUs that fit this job's wishes."""
    usable = [
        vm
        for vm in vms
        if vm["state"] == "ready"
        and not (vm["quarantined_until"] or vm["notice_deadline"] or vm.get("cordoned_at"))  # an older manager has none
        and _is_fitting(vm, spec or {})
    ]
    left = {vm["id"]: vm["gpus"] - len(vm["workers"]) for vm in usable}
    memories = [vm["device_memory_bytes"] for vm in usable if vm["device_memory_bytes"]]
    priced = [(vm["price_per_hour"], vm["gpus"]) for vm in usable if vm["price_per_hour"] is not None]
    return FreeGpus(
        gpus=sum(max(count, 0) for count in left.values()),
        vms=sum(count > 0 for count in left.values()),
        gpus_per_vm=min((vm["gpus"] for vm in usable), default=1),
        device_memory_bytes=min(memories, default=None),
        all_gpus=sum(vm["gpus"] for vm in usable),
        price_per_gpu_hour=sum(price for price, _ in priced) / sum(gpus for _, gpus in priced) if priced else None,
    )


def _is_fitting(vm: VmDocument, spec: JobSpecDocument) -> bool:
    wanted = Resources.model_validate(spec.get("resources") or {})
    return fits_job(wanted, gpu_type=vm.get("gpu_type") or "", device_memory_bytes=vm["device_memory_bytes"])


def _profiled_before(client: Client, spec: JobSpecDocument) -> tuple[JobDocument, str] | None:
    """The newest job of the same name, command and environment that was profiled, with its profile."""
    for job in client.jobs(name=spec["name"]):
        same = all(job["spec"].get(key) == spec.get(key, default) for key, default in (("run", None), ("env", {})))
        if same and job["name"] in (spec["name"], f"{spec['name']}-profile"):
            try:
                return job, client.profile(job["id"])
            except NotFoundError:  # it ended before that
                continue
    return None


def _choose(profile_json: str, spec: JobSpecDocument, free: FreeGpus, gpus: int) -> PlanChoice:
    """Raises ValueError if no fleet could run the job."""
    from varuna_planner.profile.document import Profile
    from varuna_planner.search.auto_config import Pins, choose_plan  # numba: it takes half a second

    return choose_plan(
        Profile.from_json(profile_json),
        gpus=gpus,
        global_batch=int(spec["global_batch"]),
        device_memory_bytes=free.device_memory_bytes,
        gpus_per_vm=free.gpus_per_vm,
        pins=Pins(**(spec.get("plan") or {})),
    )


def preview_text(found: Preview, spec: JobSpecDocument, now: datetime | None = None) -> RenderableType:
    free, plan = found.free, found.plan
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    vms = f" on {count_of(free.vms, 'VM')}" if free.gpus else ""
    grid.add_row("GPUs", f"{free.gpus} of {free.all_gpus} free{vms}")
    if plan is None:
        grid.add_row("plan", found.why_not or "-")
    else:
        predicted = f"{plan['predicted_minibatch_s']:.3g} s per step, {rate(plan['examples_per_s'])} examples/s"
        head = Text(f"{shape(plan['p'], plan['d'])}, micro-batch {plan['micro_batch']}", style="bold")
        grid.add_row("plan", Text.assemble(head, f": {predicted} predicted"))
        if found.profile_of is not None:
            when = ago(found.profile_of["created_at"], now or datetime.now(UTC))
            grid.add_row("", Text(f"from the profile of {found.profile_of['id']}, {when}", style="dim"))
    total = total_steps(spec)
    if total:
        takes = "" if plan is None else f", about {duration(total[0] * plan['predicted_minibatch_s'])}"
        grid.add_row("steps", f"{total[0]} ({total[1]}){takes}")
    grid.add_row("cost", _cost(found, total[0] if total else None))
    return grid


def _cost(found: Preview, steps: int | None) -> str:
    price = found.free.price_per_gpu_hour
    if price is None:
        return "unknown: the provider gives no price for these VMs"
    by = "at the present prices of VMs"
    if found.plan is None or found.cost_per_hour is None:
        return f"at most {price * found.gpus:.2f} per hour on {count_of(found.gpus, 'GPU')}, {by}"
    hours = (steps or 0) * found.plan["predicted_minibatch_s"] / 3600
    whole = f", {found.cost_per_hour * hours:.2f} for all steps" if steps else ""
    return f"about {found.cost_per_hour:.2f} per hour{whole}, {by}"
