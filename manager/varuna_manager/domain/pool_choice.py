"""Which pools to ask for VMs.

What a dollar buys in a pool is its speed per price, less what losses take: after each loss a VM is paid for until it
has joined, and all others wait for the morph. So of an hour of a VM, 1 / (1 + h · (j + n · s)) is useful, where h is
the pool's hazard, j the hours that a VM takes to join, s the hours that a morph takes, and n the VMs that wait for it.

VMs are given out one by one, each to the pool where it is worth most. A VM is worth less where many others are, because
one burst takes them together: a pool that has them all counts for `SPREAD` less. So two pools that are nearly as good
share the VMs, and a pool that is much better gets all.

A pool that has refused is left alone for its pause, which doubles with each refusal in a row. Then it is asked for one
VM first. Where one job has the fleet to itself and may mix types of GPU, pools of all types are asked. Otherwise all
GPUs of a job are of one type, and so are all VMs (see `choose_gpu_type`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from varuna_manager.domain.clock import is_within
from varuna_manager.domain.fleet_decision import RefusalStreak
from varuna_manager.domain.gpu_types import OTHER_TYPE_FACTOR
from varuna_manager.domain.pools import PoolTerms
from varuna_proto.wording import count_of

__all__ = ["SPREAD", "PoolChoice", "PoolConditions", "PoolView", "choose_gpu_type", "choose_pools", "compute_value"]

SPREAD = 0.25
"""How much less a VM is worth in a pool that has all VMs than in one that has none."""
_SECONDS_PER_HOUR = 3600.0
_LEAST_PRICE = 1e-6
"""What a VM without a price counts for."""


@dataclass(frozen=True, kw_only=True)
class PoolView:
    """A pool as it is now."""

    terms: PoolTerms
    gpus: int
    """Of one VM."""
    price_per_hour: float
    """Of one more VM."""
    hazard_per_hour: float
    """Expected losses per VM-hour."""
    vms: int = 0
    """Those that stay, and those that it was asked for."""
    paid_for: int = 0
    """All that cost money: those that stay or leave, and those that it was asked for."""
    refusals: RefusalStreak | None = None
    gpu_type: str = ""
    """The name of its GPUs; empty: not known."""
    closed: str = ""
    """Why it cannot be asked, whatever it has refused; empty: it can be."""

    @property
    def name(self) -> str:
        return self.terms.name

    @property
    def room(self) -> int | None:
        """How many more VMs it may have; None: any number."""
        most = self.terms.max_vms
        return None if most is None else max(most - self.paid_for, 0)

    def paused_s(self, now: float) -> float:
        """How long it is still left alone after its last refusal."""
        last = self.refusals
        if last is None or not is_within(now, last.last_at, last.pause_s):
            return 0.0
        return max(last.last_at + last.pause_s - now, 0.0)

    def describe_closure(self, now: float) -> str:
        """Why it cannot be asked now; empty: it can be."""
        if self.closed:
            return self.closed
        if self.room == 0:
            return f"it has the {count_of(self.terms.max_vms or 0, 'VM')} that it may have"
        paused_s = self.paused_s(now)
        if paused_s and self.refusals is not None:
            times = "once" if self.refusals.count == 1 else f"{self.refusals.count} times in a row"
            return f"it has refused {times} ({self.refusals.last.kind}) and is asked again in {paused_s:.3g} s"
        return ""


@dataclass(frozen=True, kw_only=True)
class PoolConditions:
    """What is true of the fleet as a whole."""

    join_s: float
    """What a VM takes from its request until it is ready."""
    stop_s: float
    """What a lost VM costs all others: a morph, and what is done again."""
    budget_per_hour: float | None = None
    """What may be spent in addition; None: any amount."""
    examples_per_s: float | None = None
    """Of one GPU with the relative speed 1; None: no job trains."""
    mixes_types: bool = False
    """Whether VMs may have GPUs of several types."""


@dataclass(frozen=True, kw_only=True)
class PoolChoice:
    counts: Mapping[str, int]
    """How many VMs to ask each pool for; a pool that is not named is not asked."""
    reason: str
    values: Mapping[str, float]
    """What a dollar buys in each pool: see `compute_value`."""


def compute_value(pool: PoolView, vms: int, conditions: PoolConditions) -> float:
    """The useful seconds of a GPU with the relative speed 1 that a dollar buys. `vms`: those of the whole fleet."""
    lost_h = (conditions.join_s + vms * conditions.stop_s) / _SECONDS_PER_HOUR
    useful = 1.0 / (1.0 + pool.hazard_per_hour * lost_h)
    speed = pool.gpus * pool.terms.relative_speed
    return useful * speed * _SECONDS_PER_HOUR / max(pool.price_per_hour, _LEAST_PRICE)


def choose_gpu_type(
    missing: int, pools: Sequence[PoolView], usable: Collection[str], values: Mapping[str, float]
) -> str:
    """The GPU type to ask for.

    It stays the type that most VMs have. Another one is asked for when no pool of that type can be asked and
    so much is missing that jobs would move to the other type (`OTHER_TYPE_FACTOR`).

    Args:
        missing: VMs that are wanted in addition.
        usable: the pools that can be asked now.
        values: see `PoolChoice`.
    """
    there: dict[str, int] = {}
    for pool in pools:
        there[pool.gpu_type] = there.get(pool.gpu_type, 0) + pool.vms
    present = max(there, key=lambda gpu_type: there[gpu_type])
    open_pools = [pool for pool in pools if pool.name in usable]
    if not open_pools:
        return present
    best = max(open_pools, key=lambda pool: values[pool.name]).gpu_type
    if there[present] == 0:
        return best
    can_ask = any(pool.gpu_type == present for pool in open_pools)
    return present if can_ask or missing < OTHER_TYPE_FACTOR * there[present] else best


def choose_pools(now: float, missing: int, pools: Sequence[PoolView], conditions: PoolConditions) -> PoolChoice:
    """Which pools to ask for `missing` VMs, and why. `pools`: at least one."""
    total = sum(pool.vms for pool in pools)
    values = {pool.name: compute_value(pool, total + missing, conditions) for pool in pools}
    closures = {pool.name: pool.describe_closure(now) for pool in pools}
    usable = {name for name, closure in closures.items() if not closure}
    if not conditions.mixes_types:
        gpu_type = choose_gpu_type(missing, pools, usable, values)
        for pool in pools:
            if not closures[pool.name] and pool.gpu_type != gpu_type:
                closures[pool.name] = f"its GPUs are {pool.gpu_type or 'of no known type'}, and a job's are all equal"
    candidates = [pool for pool in pools if not closures[pool.name]]
    counts: dict[str, int] = {}
    left = conditions.budget_per_hour
    for given in range(missing):
        best = _find_best(candidates, counts, values, total + given, left)
        if best is None:
            break
        counts[best.name] = counts.get(best.name, 0) + 1
        left = None if left is None else left - best.price_per_hour
    reason = _render_reason(pools, counts, closures, values, conditions)
    asked = sum(counts.values())
    if candidates and asked < missing and left is not None:
        reason += f"; {left:.4g} an hour is left of the limit of cost"
    return PoolChoice(counts=counts, reason=reason, values=values)


def _find_best(
    candidates: Sequence[PoolView],
    counts: Mapping[str, int],
    values: Mapping[str, float],
    total: int,
    left: float | None,
) -> PoolView | None:
    """The pool for one more VM; None: none can be asked."""
    best, most = None, -1.0
    for pool in candidates:
        given = counts.get(pool.name, 0)
        is_full = pool.room is not None and given >= pool.room
        is_probed = pool.refusals is not None and given >= 1
        if is_full or is_probed or (left is not None and pool.price_per_hour > left + 1e-9):
            continue
        share = (pool.vms + given) / max(total, 1)
        worth = values[pool.name] * (1.0 - SPREAD * share)
        if worth > most:
            best, most = pool, worth
    return best


def _render_reason(
    pools: Sequence[PoolView],
    counts: Mapping[str, int],
    closures: Mapping[str, str],
    values: Mapping[str, float],
    conditions: PoolConditions,
) -> str:
    ordered = sorted(pools, key=lambda pool: -values[pool.name])
    worth = {pool.name: _render_value(pool, values, conditions) for pool in ordered}
    asked = [f"{counts[name]} of {name} ({text})" for name, text in worth.items() if name in counts]
    closed = [f"{pool.name}: {closures[pool.name]}" for pool in ordered if closures[pool.name]]
    spared = [f"{name} ({text}) gets none" for name, text in worth.items() if name not in counts and not closures[name]]
    first = ", ".join(asked) or "no pool can be asked"
    return "; ".join([first, *(spared if asked else ()), *closed])


def _render_value(pool: PoolView, values: Mapping[str, float], conditions: PoolConditions) -> str:
    value = values[pool.name]
    if conditions.examples_per_s is not None:
        bought = f"{value * conditions.examples_per_s:,.0f} examples"
    else:
        bought = f"{value / _SECONDS_PER_HOUR:.3g} GPU-hours"
    return f"{bought} per dollar, {pool.hazard_per_hour:.2g} losses per VM-hour"
