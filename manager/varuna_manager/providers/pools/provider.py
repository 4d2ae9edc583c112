"""Several providers as one. Every VM carries the name of its pool, with the zone, type and price of that pool where its
own provider names none.

The pool of a VM is the one whose provider lists it, so nothing needs to be remembered from one manager to the next.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from varuna_manager.domain.fleet_decision import Refusal, RefusalKind
from varuna_manager.domain.pools import PoolTerms
from varuna_manager.providers.base import (
    CreatedVms,
    Provider,
    ProviderNotice,
    ProviderPartlyAwayError,
    ProviderRefusedError,
    ProviderVm,
    UnknownVmError,
    VmOffer,
)

__all__ = ["Pool", "PoolsProvider"]

_Answer = TypeVar("_Answer")
_PATIENCE_S = 30.0
"""How long the answers of the others wait for a pool's, which then counts as one that does not answer."""
_WORST_FIRST = (RefusalKind.THROTTLED, RefusalKind.FAILED, RefusalKind.QUOTA, RefusalKind.CAPACITY)


@dataclass(frozen=True)
class Pool:
    """What the settings say of a pool, and its provider."""

    terms: PoolTerms
    provider: Provider

    def mark_vm(self, vm: ProviderVm) -> ProviderVm:
        """The VM with its pool."""
        terms = self.terms
        return replace(
            vm,
            pool=terms.name,
            zone=vm.zone or terms.zone,
            machine_type=vm.machine_type or terms.machine_type,
            price_per_hour=terms.price_per_hour if vm.price_per_hour is None else vm.price_per_hour,
        )

    def mark_offer(self, offer: VmOffer) -> VmOffer:
        terms = self.terms
        price = terms.price_per_hour if offer.price_per_hour is None else offer.price_per_hour
        return replace(offer, price_per_hour=price, gpu_type=terms.gpu_type or offer.gpu_type)


class PoolsProvider:
    """Raises ValueError if a pool's set of VMs is fixed."""

    name = "pools"
    is_elastic = True

    def __init__(self, pools: Sequence[Pool]) -> None:
        self._pools = {pool.terms.name: pool for pool in pools}
        for pool in pools:
            if not pool.provider.is_elastic:
                text = f"pool {pool.terms.name}: VMs of {pool.provider.name!r} can be neither requested nor given back"
                raise ValueError(f"{text}, so they cannot be a pool: give them a manager of their own")
        self._pool_of: dict[str, str] = {}
        """By VM, from the newest answers."""

    @property
    def pools(self) -> Mapping[str, PoolTerms]:
        return {name: pool.terms for name, pool in self._pools.items()}

    # ------------------------------------------------------------ what there is

    async def list(self) -> Sequence[ProviderVm]:
        """Raises ProviderPartlyAwayError with the VMs of the pools that answer if others do not, and
        ProviderRefusedError if none does."""
        answers, errors = await self._ask_all(lambda provider: provider.list())
        vms = [self._pools[name].mark_vm(vm) for name, listed in answers.items() for vm in listed]
        self._check_apart(vms)
        away = {vm_id: name for vm_id, name in self._pool_of.items() if name in errors}
        self._pool_of = away | {vm.id: vm.pool for vm in vms}
        if errors:
            raise ProviderPartlyAwayError(vms, errors)
        return vms

    async def list_notices(self) -> Sequence[ProviderNotice]:
        """Those of the pools that answer. Raises ProviderRefusedError if none does."""
        answers, _ = await self._ask_all(lambda provider: provider.list_notices())
        return [notice for notices in answers.values() for notice in notices]

    async def list_pool_offers(self) -> Mapping[str, VmOffer]:
        """Raises ProviderRefusedError if no pool answers."""
        answers, _ = await self._ask_all(lambda provider: provider.get_offer())
        return {name: self._pools[name].mark_offer(offer) for name, offer in answers.items()}

    async def get_offer(self) -> VmOffer:
        """That of the pool with the most speed per price, of those that answer and may have VMs. Raises
        ProviderRefusedError if none answers."""
        offers = await self.list_pool_offers()
        ordered = [name for name in self._order_pools(offers) if name in offers]
        usable = [name for name in ordered if self._pools[name].terms.max_vms != 0]
        return offers[(usable or ordered)[0]]

    # ------------------------------------------------------------ creation

    async def create(self, count: int, request: str) -> CreatedVms:
        """As the interface says, for a caller that names no pool: the pools are tried one after the other, the one
        with the most speed per price first. The manager names a pool, by `create_in`."""
        offers = await self.list_pool_offers()
        there = await self.list()  # raises if a pool does not answer: it may have VMs of this request
        made = [vm for vm in there if vm.request == request and not vm.going and vm.ended is None]
        refusals: list[Refusal] = []
        for name in self._order_pools(offers):
            missing = min(count - len(made), self._count_room(name, there))
            own = [vm for vm in made if vm.pool == name]
            if missing <= 0:
                continue
            created = await self.create_in(name, len(own) + missing, request)
            made = [vm for vm in made if vm.pool != name] + [*created.vms]
            if created.refusal is not None:
                refusals.append(replace(created.refusal, reason=f"pool {name}: {created.refusal.reason}"))
                if created.refusal.kind is RefusalKind.FAILED:
                    break  # the pool may have made VMs that are not seen yet
        if len(made) >= count:
            return CreatedVms(vms=tuple(made))
        worst = min(refusals, key=lambda refusal: _WORST_FIRST.index(refusal.kind), default=None)
        full = Refusal(kind=RefusalKind.QUOTA, reason="every pool has as many VMs as its max_vms allows")
        return CreatedVms(vms=tuple(made), refusal=worst or full)

    async def create_in(self, pool: str, count: int, request: str) -> CreatedVms:
        """As `create`, with the VMs of this pool only."""
        chosen = self._pools[pool]
        created = await chosen.provider.create(count, request)
        vms = tuple(chosen.mark_vm(vm) for vm in created.vms)
        self._pool_of |= {vm.id: pool for vm in vms}
        return CreatedVms(vms=vms, refusal=created.refusal)

    def _order_pools(self, offers: Mapping[str, VmOffer]) -> Sequence[str]:
        """The most speed per price first; among equals, in the order of the settings."""

        def measure_price(name: str) -> float:
            terms, offer = self._pools[name].terms, offers.get(name)
            price = terms.price_per_hour if offer is None else offer.price_per_hour or 0.0
            return price / (terms.relative_speed * (1 if offer is None else offer.gpus))

        return sorted(self._pools, key=measure_price)

    def _count_room(self, name: str, there: Sequence[ProviderVm]) -> int:
        most = self._pools[name].terms.max_vms
        taken = sum(vm.pool == name and vm.ended is None for vm in there)
        return 2**31 if most is None else most - taken

    # ------------------------------------------------------------ deletion and preemption

    async def delete(self, vm_ids: Sequence[str]) -> None:
        """Raises ProviderRefusedError after all pools were asked, if some refuse or do not answer."""
        if any(vm_id not in self._pool_of for vm_id in vm_ids):
            await self._list_what_answers()  # a manager that starts again knows of none
        by_pool: dict[str, list[str]] = {}
        for vm_id in vm_ids:
            if vm_id in self._pool_of:
                by_pool.setdefault(self._pool_of[vm_id], []).append(vm_id)
        calls = {name: self._pools[name].provider.delete(ids) for name, ids in by_pool.items()}
        _, errors = await _gather(calls)
        if errors:
            raise ProviderRefusedError(str(ProviderPartlyAwayError((), errors)))

    async def preempt_vm(self, vm_id: str, notice_s: float) -> None:
        if vm_id not in self._pool_of:
            await self._list_what_answers()
        if vm_id not in self._pool_of:
            raise UnknownVmError(f"no pool has a VM {vm_id!r}: varuna vms (GET /api/v1/vms) lists those that run")
        await self._pools[self._pool_of[vm_id]].provider.preempt_vm(vm_id, notice_s)

    async def close(self, *, end_vms: bool) -> None:
        await _gather({name: pool.provider.close(end_vms=end_vms) for name, pool in self._pools.items()})

    # ------------------------------------------------------------ helpers

    async def _list_what_answers(self) -> None:
        try:
            await self.list()
        except (ProviderPartlyAwayError, ProviderRefusedError):
            return

    async def _ask_all(
        self, ask: Callable[[Provider], Awaitable[_Answer]]
    ) -> tuple[dict[str, _Answer], dict[str, str]]:
        """The answers of the pools, and the errors of those that do not answer. Raises ProviderRefusedError if none
        answers."""
        answers, errors = await _gather({name: _limit(ask(pool.provider)) for name, pool in self._pools.items()})
        if not answers:
            raise ProviderRefusedError(str(ProviderPartlyAwayError((), errors)))
        return answers, errors

    def _check_apart(self, vms: Sequence[ProviderVm]) -> None:
        """Raises ProviderRefusedError if a VM is of two pools."""
        twice = next((vm_id for vm_id, count in Counter(vm.id for vm in vms).items() if count > 1), None)
        if twice is None:
            return
        pools = " and ".join(vm.pool for vm in vms if vm.id == twice)
        raise ProviderRefusedError(f"pools {pools} both list VM {twice}: give their settings files different fleets")


async def _limit(call: Awaitable[_Answer]) -> _Answer:
    """Raises ProviderRefusedError if it takes too long. A late answer is dropped: VMs may have been made meanwhile."""
    try:
        async with asyncio.timeout(_PATIENCE_S):
            return await call
    except TimeoutError:
        raise ProviderRefusedError(f"no answer within {_PATIENCE_S:g} s") from None


async def _gather(calls: Mapping[str, Awaitable[_Answer]]) -> tuple[dict[str, _Answer], dict[str, str]]:
    """Make the calls at once: the answers by pool, and the errors, each in one line."""
    outcomes = await asyncio.gather(*calls.values(), return_exceptions=True)
    answers: dict[str, _Answer] = {}
    errors: dict[str, str] = {}
    for name, outcome in zip(calls, outcomes, strict=True):
        if isinstance(outcome, Exception):
            errors[name] = " ".join(f"{type(outcome).__name__}: {outcome}".split())
        elif isinstance(outcome, BaseException):
            raise outcome
        else:
            answers[name] = outcome
    return answers, errors
