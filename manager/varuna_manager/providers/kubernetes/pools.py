"""The pools of nodes from which a fleet takes pods, in order of preference, with a pause for those that refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from varuna_manager.domain.fleet_decision import Refusal, RefusalKind
from varuna_manager.providers.kubernetes.settings import KubernetesPool

__all__ = ["NodePools"]

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 30.0, 600.0


@dataclass(frozen=True)
class _PoolRefusals:
    in_a_row: int
    until: float
    last: Refusal


class NodePools:
    """`needs_prices`: use only pools with a known price. `now`: a monotonic clock in seconds."""

    def __init__(self, pools: Sequence[KubernetesPool], *, needs_prices: bool, now: Callable[[], float]) -> None:
        self._pools = [pool for pool in pools if not needs_prices or pool.price_per_hour is not None]
        self._now = now
        self._refused: dict[str, _PoolRefusals] = {}

    def find_open(self) -> KubernetesPool | None:
        """The first pool that may be used now."""
        now = self._now()
        return next(
            (pool for pool in self._pools if pool.name not in self._refused or self._refused[pool.name].until <= now),
            None,
        )

    def find_highest_price(self) -> float | None:
        """None: no pool has a price."""
        return max((pool.price_per_hour for pool in self._pools if pool.price_per_hour is not None), default=None)

    def note_granted(self, name: str) -> None:
        self._refused.pop(name, None)

    def note_refused(self, name: str, refusal: Refusal) -> None:
        """Pause the pool. Several refusals during one pause count once."""
        before = self._refused.get(name)
        if before is not None and self._now() < before.until:
            return
        in_a_row = 1 if before is None else before.in_a_row + 1
        pause_s = min(_FIRST_PAUSE_S * 2.0 ** min(in_a_row - 1, 16), _LONGEST_PAUSE_S)
        self._refused[name] = _PoolRefusals(in_a_row, self._now() + max(pause_s, refusal.retry_after_s or 0.0), refusal)

    def make_refusal(self) -> Refusal:
        """Why no pool is open: what the first one said."""
        if not self._pools:
            text = "no pool has a price, and the cost of the fleet is limited: give each pool its price_per_hour"
            return Refusal(kind=RefusalKind.FAILED, reason=text)
        first = self._refused[self._pools[0].name]
        soonest_s = min(self._refused[pool.name].until for pool in self._pools) - self._now()
        others = "" if len(self._pools) == 1 else f" (and {len(self._pools) - 1} more refused as well)"
        reason = f"pool {self._pools[0].name}{others}: {first.last.reason}"
        return Refusal(kind=first.last.kind, reason=reason, retry_after_s=max(soonest_s, 0.0))
