"""A job's use of VMs and its cost. The store adds up, so that a job with thousands of VMs is read quickly.

The store has sums by VM of ended generations (`db.job_vms`). Only what comes after them is added up rank by rank.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, Select, Subquery, case, func, literal, select, union_all
from sqlalchemy.ext.asyncio import AsyncSession

from varuna_manager.db.models import GenerationRow, JobProgressRow, JobVmRow, VmRow, WorkerRow
from varuna_manager.db.vm_prices import sum_price_changes
from varuna_proto.rest import JobCostDocument


async def read_job_bill(
    session: AsyncSession, job_id: str, now: float, *, after: int = 0, most_vms: int = 1
) -> JobCostDocument:
    """The bill of the job's generations after number `after`. A VM that jobs share counts by the fraction of its GPUs.

    It is one query, so that no generation ends in between.
    """
    vm = _by_vm(_use(job_id, now, after))
    sums = [func.sum(each).over() for each in (vm.c.hours, vm.c.gpu_hours, vm.c.cost, vm.c.rate)]
    unpriced = func.count().over() - func.count(vm.c.price).over()
    query = select(vm.c.vm_id, vm.c.hours, vm.c.gpu_hours, vm.c.price, vm.c.cost, *sums, unpriced)
    query = query.order_by(func.coalesce(vm.c.cost, 0.0).desc(), vm.c.hours.desc(), vm.c.vm_id)
    rows = (await session.execute(query.limit(max(most_vms, 1)))).all()
    hours, gpu_hours, cost, rate, without_price = rows[0][5:] if rows else (0.0, 0.0, None, None, 0)
    return {
        "vm_hours": hours,
        "gpu_hours": gpu_hours,
        "cost": cost,
        "cost_per_hour": None if cost is None else rate,
        "vms_without_price": without_price,
        "by_vm": [
            {"vm_id": vm_id, "hours": of_vm, "gpu_hours": gpus, "price_per_hour": price, "cost": paid}
            for vm_id, of_vm, gpus, price, paid, *_ in rows[:most_vms]
        ],
    }


def _by_vm(use: Subquery) -> Subquery:
    gpu_hours = func.sum(use.c.gpu_seconds) / 3600.0
    vm_gpus = case((VmRow.gpus > 1, VmRow.gpus), else_=1)
    hours, lasting = gpu_hours / vm_gpus, func.sum(use.c.lasting_gpus)
    at_present_price = (func.sum(use.c.gpu_seconds) - func.sum(use.c.priced_gpu_seconds)) * VmRow.price_per_hour
    return (
        select(
            use.c.vm_id,
            hours.label("hours"),
            gpu_hours.label("gpu_hours"),
            VmRow.price_per_hour.label("price"),
            ((at_present_price + func.sum(use.c.seconds_times_price)) / 3600.0 / vm_gpus).label("cost"),
            (VmRow.price_per_hour * lasting / vm_gpus).label("rate"),
        )
        .join(VmRow, VmRow.id == use.c.vm_id)
        .group_by(use.c.vm_id, VmRow.gpus, VmRow.price_per_hour)
        .subquery()
    )


def _use(job_id: str, now: float, after: int) -> Subquery:
    """By VM: GPU-seconds, those that are priced and their price (as in `JobVmRow`), and the GPUs that a live generation
    has there."""
    if after:
        return _rank_by_rank(job_id, now, after).subquery()
    billed = select(JobProgressRow.billed).where(JobProgressRow.job_id == job_id).scalar_subquery()
    row = JobVmRow
    ended = select(row.vm_id, row.gpu_seconds, row.priced_gpu_seconds, row.seconds_times_price, literal(0))
    since = _rank_by_rank(job_id, now, func.coalesce(billed, 0))
    return union_all(since, ended.where(row.job_id == job_id)).subquery()


def _rank_by_rank(job_id: str, now: float, after: int | ColumnElement[int]) -> Select[Any]:
    begins, ends = GenerationRow.created_at, func.coalesce(GenerationRow.ended_at, now)
    return (
        select(
            WorkerRow.vm_id,
            case((ends > begins, ends - begins), else_=0.0).label("gpu_seconds"),
            literal(0.0).label("priced_gpu_seconds"),
            sum_price_changes(begins, ends).label("seconds_times_price"),
            case((GenerationRow.ended_at.is_(None), 1), else_=0).label("lasting_gpus"),
        )
        .join(GenerationRow, (GenerationRow.job_id == job_id) & (GenerationRow.number == WorkerRow.generation))
        .join(VmRow, VmRow.id == WorkerRow.vm_id)
        .where(WorkerRow.job_id == job_id, WorkerRow.generation > after)
    )
