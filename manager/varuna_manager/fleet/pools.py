"""The pools of the fleet's settings, compared with the VMs that there are."""

from __future__ import annotations

from sqlalchemy import select

from varuna_manager.db.engine import Database
from varuna_manager.db.models import VmRow
from varuna_manager.errors import StartError
from varuna_manager.providers.base import PooledProvider, Provider
from varuna_manager.world.reading import NOT_GONE
from varuna_proto.wording import count_of

__all__ = ["check_pools"]

_SHOWN = 3


async def check_pools(database: Database, provider: Provider) -> None:
    """Raises StartError if there are VMs of a pool that the settings no longer have: nobody could list them, so they
    would count as gone, and cost money for ever."""
    known = provider.pools.keys() if isinstance(provider, PooledProvider) else ()
    query = select(VmRow.pool, VmRow.id).where(NOT_GONE, VmRow.pool.is_not(None), VmRow.pool.not_in([*known]))
    async with database.read() as session:
        rows = (await session.execute(query.order_by(VmRow.pool, VmRow.id))).all()
    if not rows:
        return
    pool = rows[0].pool
    vms = [row.id for row in rows if row.pool == pool]
    names = ", ".join(vms[:_SHOWN]) + (", ..." if len(vms) > _SHOWN else "")
    raise StartError(
        f"the fleet's settings have no pool {pool!r} any longer, but {count_of(len(vms), 'VM')} of it may still run "
        f"({names}): put it back with max_vms: 0, and remove it when they are drained (varuna drain)"
    )
