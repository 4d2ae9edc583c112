"""What is known of each pool: its offer, its VMs, its past, and what it has refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import quantiles

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from varuna_manager.controllers.vm_requester import VmRequester
from varuna_manager.db.models import GenerationRow, VmRow, WorkerRow
from varuna_manager.domain.fleet_past import LivesSummary
from varuna_manager.domain.observed import VmView
from varuna_manager.domain.pool_choice import PoolChoice, PoolConditions, PoolView
from varuna_manager.domain.pools import PoolTerms
from varuna_manager.domain.states import GenerationKind, GenerationState, VmState
from varuna_manager.providers.base import ProviderVm, VmOffer
from varuna_manager.world.facts import VmFacts
from varuna_manager.world.pasts import read_lives_by_pool
from varuna_planner.liveput.hazard import removals_per_vm_hour
from varuna_proto.plan import Plan
from varuna_proto.rest_fleet import PoolDocument

__all__ = ["FleetVms", "PoolBoard"]

_PAST_EVERY_S = 60.0
"""How often the past is read, which is thousands of rows."""
_DEFAULT_JOIN_S = 300.0
"""What a VM takes to join while none has: a cloud makes it, and it installs its agent."""
_STOP_S = 10.0
"""What a lost VM costs all others: a morph, and the share of the step under way that is done again."""


@dataclass(frozen=True, kw_only=True)
class FleetVms:
    """All VMs of the fleet at one look."""

    rows: Mapping[str, VmFacts]
    """Those that are not gone."""
    views: Mapping[str, VmView]
    going: Sequence[ProviderVm]
    """Gone, but the provider is still deleting them."""
    coming: Mapping[str, int]
    """By pool: those that its provider is working on."""


class PoolBoard:
    """`pools`: of the fleet's settings."""

    def __init__(self, pools: Mapping[str, PoolTerms], now: Callable[[], float]) -> None:
        self._pools = pools
        self._now = now
        self._lives: Mapping[str, LivesSummary] = {}
        self._examples_per_s: float | None = None
        self._read_at: float | None = None

    async def refresh_past(self, session: AsyncSession) -> None:
        """Read what became of each pool's VMs, and how fast the newest job trains, if that was not read lately."""
        now = self._now()
        if self._read_at is not None and 0 <= now - self._read_at < _PAST_EVERY_S:
            return
        self._read_at = now
        self._lives = await read_lives_by_pool(session, now)
        self._examples_per_s = await self._read_rate(session)

    def make_views(
        self,
        vms: FleetVms,
        offers: Mapping[str, VmOffer],
        requesters: Mapping[str, VmRequester],
        wanted_types: Collection[str] | None,
    ) -> tuple[PoolView, ...]:
        """`wanted_types`: types of GPUs that the jobs take; None: any."""
        stay = Counter(vms.rows[view.id].pool for view in vms.views.values() if view.state is not VmState.DRAINING)
        paid = Counter(row.pool for row in vms.rows.values()) + Counter(vm.pool for vm in vms.going)
        views = []
        for name, terms in self._pools.items():
            offer, requester, coming = offers.get(name), requesters[name], vms.coming.get(name, 0)
            closed = ""
            if offer is None:
                closed = "it does not answer"
            elif requester.answer is not None:
                closed = "its provider is working on a request"
            elif wanted_types is not None and offer.gpu_type not in wanted_types:
                closed = "no job takes its GPUs"
            price = terms.price_per_hour if offer is None else offer.price_per_hour
            view = PoolView(
                terms=terms,
                gpus=1 if offer is None else offer.gpus,
                price_per_hour=terms.price_per_hour if price is None else price,
                hazard_per_hour=self._estimate_hazard(name, offer),
                vms=stay[name] + coming,
                paid_for=paid[name] + coming,
                refusals=requester.refusals,
                gpu_type=terms.gpu_type if offer is None else offer.gpu_type,
                closed=closed,
            )
            views.append(view)
        return tuple(views)

    def make_conditions(self, budget_per_hour: float | None, *, mixes_types: bool) -> PoolConditions:
        joins = [seconds for lives in self._lives.values() for seconds in lives.joins_s]
        join_s = quantiles(joins, n=4, method="inclusive")[2] if len(joins) > 1 else (*joins, _DEFAULT_JOIN_S)[0]
        return PoolConditions(
            join_s=join_s,
            stop_s=_STOP_S,
            budget_per_hour=budget_per_hour,
            examples_per_s=self._examples_per_s,
            mixes_types=mixes_types,
        )

    def make_documents(
        self, views: Sequence[PoolView], choice: PoolChoice, conditions: PoolConditions
    ) -> list[PoolDocument]:
        rate = conditions.examples_per_s
        return [
            {
                "name": view.name,
                "zone": view.terms.zone,
                "machine_type": view.terms.machine_type,
                "gpu_type": view.gpu_type,
                "relative_speed": view.terms.relative_speed,
                "price_per_hour": view.price_per_hour,
                "max_vms": view.terms.max_vms,
                "vms": view.vms,
                "hazard_per_hour": view.hazard_per_hour,
                "gpu_hours_per_dollar": choice.values[view.name] / 3600.0,
                "examples_per_dollar": None if rate is None else choice.values[view.name] * rate,
                "refusals": 0 if view.refusals is None else view.refusals.count,
                "closed": view.describe_closure(self._now()) or None,
            }
            for view in views
        ]

    def _estimate_hazard(self, pool: str, offer: VmOffer | None) -> float:
        lives = self._lives.get(pool, LivesSummary())
        expected = None if offer is None else offer.hazard_per_hour
        return removals_per_vm_hour(lives.removals, lives.vm_hours, expected)

    async def _read_rate(self, session: AsyncSession) -> float | None:
        """Examples per second of a GPU with the relative speed 1, as the newest generation that trains should make them
        by its job's profile; None: none trains."""
        row = GenerationRow
        on_rank_0 = (WorkerRow.job_id == row.job_id) & (WorkerRow.generation == row.number) & (WorkerRow.rank == 0)
        query = select(row.plan, VmRow.pool).join(WorkerRow, on_rank_0).join(VmRow, VmRow.id == WorkerRow.vm_id)
        query = query.where(row.state == GenerationState.RUNNING.value, row.kind == GenerationKind.TRAINING.value)
        found = (await session.execute(query.order_by(row.id.desc()).limit(1))).first()
        if found is None or found.pool not in self._pools:
            return None
        plan = Plan.from_document(found.plan)
        if plan.predicted_minibatch_s <= 0:
            return None
        per_gpu = plan.global_batch / plan.predicted_minibatch_s / (plan.p * plan.d)
        return per_gpu / self._pools[found.pool].relative_speed
