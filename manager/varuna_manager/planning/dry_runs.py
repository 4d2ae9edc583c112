"""What a job would be if it were submitted now: its mistakes, and the plan for the GPUs that are free."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import cast

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from varuna_manager.db.engine import Database
from varuna_manager.db.models import JobRow
from varuna_manager.domain.fitting import fits_job
from varuna_manager.domain.gpu_types import choose_job_type, explain_one_type
from varuna_manager.domain.job_text import TextProblem, read_job_text
from varuna_manager.domain.spec import JobSpec
from varuna_manager.fleet.vm_list import VmFilter, VmList
from varuna_manager.jobs.jobs import IS_KEPT
from varuna_manager.planning.planner import GpuCount, ShapeQuestion, sum_gpu_counts
from varuna_manager.world.reading import IS_LIVE
from varuna_proto.plan import Plan
from varuna_proto.rest import DryRunDocument, PlanDocument
from varuna_proto.rest_fleet import VmDocument
from varuna_proto.wording import count_of

_MOST_VMS = 10_000
_EARLIER = 20
"""Earlier jobs of the same name among which one with a profile is looked for."""


class DryRuns:
    def __init__(self, database: Database, vms: VmList, explain_no_place: Callable[[JobSpec], str]) -> None:
        """`explain_no_place`: why a job has no place for its checkpoints; empty: it has one."""
        self._database = database
        self._vms = vms
        self._explain_no_place = explain_no_place

    async def try_job(self, text: str) -> DryRunDocument:
        """`text`: the job in YAML. It is an estimate: the manager plans with the facts at the job's start."""
        spec, problems = await asyncio.to_thread(read_job_text, text)
        if spec is None:
            return _make_document(problems)
        if placeless := self._explain_no_place(spec):
            return _make_document([TextProblem(1, "checkpoint.url", placeless)])
        async with self._database.read() as session:
            rival = await session.scalar(select(JobRow).where(JobRow.active_name == spec.name))
            if rival is not None:
                line = next((n for n, each in enumerate(text.splitlines(), 1) if each.startswith("name:")), 1)
                reason = f"job {spec.name!r} is already {rival.state}: choose another name or cancel it first"
                return _make_document([TextProblem(line, "name", reason)])
            profile_json = await _find_profile(session, spec)
            others = await session.scalar(select(func.count()).where(IS_LIVE))
        ready = await self._vms.list_page(VmFilter(gone=False, states=["ready"]), limit=_MOST_VMS)
        usable = [vm for vm in ready.items if _is_usable(vm, spec)]
        types = _count_types(usable)
        counts = {each.gpu_type: each.gpus for each in types}
        if len(types) > 1 and explain_one_type(spec.resources, counts, is_alone=not others):
            memory_bytes = {each.gpu_type: each.device_memory_bytes or 0 for each in types}
            most = choose_job_type(counts, None, max_gpus=spec.resources.max_gpus, memory_bytes=memory_bytes)
            usable = [vm for vm in usable if vm["gpu_type"] == most]
            types = tuple(each for each in types if each.gpu_type == most)
        free = sum(_count_free(vm) for vm in usable)
        gpus = min(free, spec.resources.max_gpus or free)
        found = _make_document([])
        found["document"] = spec.model_dump(mode="json", exclude_unset=True)
        found["free_gpus"], found["all_gpus"] = free, sum(vm["gpus"] for vm in usable)
        if profile_json is None:
            found["reason"] = "not profiled yet: that comes first, once, for about a minute"
        elif gpus == 0:
            found["reason"] = "no GPU is free: the job waits, or gets its share"
        else:
            limited = types if gpus == sum(counts.values()) else ()
            if len(types) == 1:
                limited = (types[0]._replace(gpus=min(types[0].gpus, gpus)),)
            zones = _count_zones(usable) if gpus == free else ()
            plan, found["reason"] = await asyncio.to_thread(
                _choose, profile_json, spec, usable, gpus, types=limited, zones=zones
            )
            if plan is not None:
                found["plan"] = cast(PlanDocument, plan.to_document())
                found["cost_per_hour"] = _price(usable, plan.p * plan.d)
        return found


def _count_free(vm: VmDocument) -> int:
    return max(vm["gpus"] - len(vm["workers"]), 0)


def _count_types(usable: list[VmDocument]) -> tuple[GpuCount, ...]:
    """The free GPUs by type, where types are known."""
    return sum_gpu_counts(
        GpuCount(vm["gpu_type"], _count_free(vm), vm["device_memory_bytes"])
        for vm in usable
        if vm["gpu_type"] and _count_free(vm)
    )


def _count_zones(usable: list[VmDocument]) -> tuple[int, ...]:
    """The free GPUs of each zone; those whose zone is not known are one more."""
    zones = Counter[str]()
    for vm in usable:
        zones[vm["zone"] or ""] += _count_free(vm)
    return tuple(zones.values())


def _choose(
    profile_json: str,
    spec: JobSpec,
    usable: list[VmDocument],
    gpus: int,
    *,
    types: Sequence[GpuCount],
    zones: Sequence[int],
) -> tuple[Plan | None, str]:
    """The best plan and why; None and why there is none. Runs in a thread.

    Args:
        types: the GPUs by type, if they are of one, or if all of several may be used.
        zones: the GPUs of each zone, if all may be used.
    """
    memories = [vm["device_memory_bytes"] for vm in usable if vm["device_memory_bytes"]]
    question = ShapeQuestion(
        profile_json=profile_json,
        spec=spec,
        device_memory_bytes=min(memories, default=None),
        gpus_per_vm=min((vm["gpus"] for vm in usable), default=1),
    )
    try:
        told = question.tell_types_apart(types, gpus)
        planned = sum(each.gpus for each in told) or gpus  # of unknown type none is used beside those
        choice = question.choose_shape(planned, types=told, zones=zones if planned == gpus else ())
    except ValueError as error:
        return None, str(error)
    if choice.best is None:
        return None, f"no plan fits {count_of(gpus, 'GPU')} now: the job waits for more"
    return choice.best, choice.reason


async def _find_profile(session: AsyncSession, spec: JobSpec) -> str | None:
    """That of the newest job of the same name, command and environment that was profiled."""
    query = select(JobRow.spec, JobRow.profile_json).where(JobRow.name == spec.name, IS_KEPT)
    query = query.where(JobRow.profile_json.is_not(None)).order_by(JobRow.created_at.desc()).limit(_EARLIER)
    for earlier, profile_json in await session.execute(query):
        if (earlier.get("run"), earlier.get("env") or {}) == (spec.run, spec.env):
            return profile_json  # type: ignore[no-any-return]
    return None


def _is_usable(vm: VmDocument, spec: JobSpec) -> bool:
    leaves = vm["quarantined_until"] or vm["notice_deadline"] or vm["cordoned_at"]
    memory = vm["device_memory_bytes"]
    return not leaves and fits_job(spec.resources, gpu_type=vm["gpu_type"] or "", device_memory_bytes=memory)


def _price(usable: list[VmDocument], gpus: int) -> float | None:
    """Per hour, by the mean over the GPUs with a price; None: none has one."""
    priced = [(vm["price_per_hour"], vm["gpus"]) for vm in usable if vm["price_per_hour"] is not None]
    return gpus * sum(price for price, _ in priced) / sum(count for _, count in priced) if priced else None


def _make_document(problems: list[TextProblem]) -> DryRunDocument:
    return {
        "problems": [{"line": each.line, "field": each.field, "text": each.text} for each in problems],
        "document": None,
        "free_gpus": 0,
        "all_gpus": 0,
        "plan": None,
        "reason": None,
        "cost_per_hour": None,
    }
