"""Keeps the earlier prices of VMs (`VmPriceRow`), so that hours keep the price that the VM had in them.

A cost is the time at the VM's present price, and what parts of that time cost more or less at earlier ones. Most VMs
have no earlier price. Time before a VM's first known price counts at that one.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, SQLColumnExpression, case, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from varuna_manager.db.models import VmPriceRow, VmRow


def change_price(session: AsyncSession, vm: VmRow, price_per_hour: float, now: float) -> None:
    """Give the VM this price from now on."""
    since = vm.priced_since or 0.0
    if vm.price_per_hour is not None and since < now:
        session.add(VmPriceRow(vm_id=vm.id, since=since, until=now, price_per_hour=vm.price_per_hour))
        vm.priced_since = now
    vm.price_per_hour = price_per_hour


def sum_price_changes(begins: SQLColumnExpression[Any], ends: SQLColumnExpression[Any]) -> ColumnElement[float]:
    """How much more the time from `begins` to `ends` costs than at the VM's present price, in seconds times price per
    hour. The query that it is part of must select from `VmRow`."""
    row = VmPriceRow
    first, last = case((row.since > begins, row.since), else_=begins), case((row.until < ends, row.until), else_=ends)
    changes = func.sum((last - first) * (row.price_per_hour - VmRow.price_per_hour))
    overlaps = (row.vm_id == VmRow.id, row.until > begins, row.since < ends, begins < ends)
    return select(func.coalesce(changes, 0.0)).where(*overlaps).scalar_subquery()
