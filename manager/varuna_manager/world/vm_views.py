"""The decisions' views of all VMs, kept between looks, because making ten thousand takes long and few change."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from varuna_manager.domain.observed import VmView
from varuna_manager.world.facts import VmFacts
from varuna_manager.world.vm_registry import VmRegistry

_AT_ONCE = 500
"""Views that are made before other tasks may run: some milliseconds."""
_CLOCK_SET_S = 0.1
"""When the wall clock has moved by this much against the monotonic one, the views' moments are no longer right."""


class VmViews:
    """`now`: the wall clock. For one reader at a time."""

    def __init__(self, registry: VmRegistry, now: Callable[[], float]) -> None:
        self._registry = registry
        self._now = now
        self._seen = 0
        self._ahead_s = 0.0
        """The wall clock less the monotonic one."""
        self._rows: Mapping[str, VmFacts] = {}
        self._busy: Mapping[str, int] = {}
        self._views: dict[str, VmView] = {}

    async def update_views(self, rows: Mapping[str, VmFacts], workers: Mapping[str, int]) -> Mapping[str, VmView]:
        """By id; heartbeats are handled meanwhile. Returns the same object as before if only time has passed.

        Args:
            rows: all VMs that are not gone.
            workers: how many have not stopped, by VM; none for other VMs.
        """
        self._seen, changed = self._registry.changed_since(self._seen)
        if rows is not self._rows:
            changed |= {vm_id for vm_id, row in rows.items() if row is not self._rows.get(vm_id)}
        if workers is not self._busy:
            before = self._busy
            changed |= {vm_id for vm_id in workers.keys() | before.keys() if workers.get(vm_id) != before.get(vm_id)}
        changed |= {vm_id for vm_id, view in self._views.items() if view.quarantined}  # until a certain time
        ahead_s = self._now() - self._registry.monotonic_s()
        if abs(ahead_s - self._ahead_s) > _CLOCK_SET_S:
            self._ahead_s, changed = ahead_s, {*rows}
        if changed or rows.keys() != self._views.keys():
            views = {vm_id: view for vm_id, view in self._views.items() if vm_id in rows}
            for number, vm_id in enumerate(sorted(changed & rows.keys())):
                if number % _AT_ONCE == _AT_ONCE - 1:
                    await asyncio.sleep(0)
                views[vm_id] = self._registry.make_view(rows[vm_id], now=self._now(), workers=workers.get(vm_id, 0))
            self._views = views
        self._rows, self._busy = rows, workers
        return self._views
