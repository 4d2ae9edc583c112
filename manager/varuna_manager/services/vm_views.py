"""The decisions' views of all VMs, kept from look to look: ten thousand of them take long to make, and few change."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from varuna_manager.domain.observed import VmView
from varuna_manager.services.vm_registry import VmRegistry
from varuna_manager.services.vm_rows import VmFacts

_AT_ONCE = 500
"""Views that are made while nothing else runs: some milliseconds."""


class VmViews:
    """`now`: the wall clock, for ages. For one reader at a time."""

    def __init__(self, registry: VmRegistry, now: Callable[[], float]) -> None:
        self._registry = registry
        self._now = now
        self._seen = 0
        self._rows: Mapping[str, VmFacts] = {}
        self._busy: Mapping[str, int] = {}
        self._views: dict[str, VmView] = {}

    async def look(self, rows: Mapping[str, VmFacts], workers: Mapping[str, int]) -> Mapping[str, VmView]:
        """By id; heartbeats are noted meanwhile. The same object as the last time when nothing but time has passed.

        Args:
            rows: of all VMs that are not gone.
            workers: those that have not stopped, by VM; none for the others.
        """
        self._seen, changed = self._registry.changed_since(self._seen)
        if rows is not self._rows:
            changed |= {vm_id for vm_id, row in rows.items() if row is not self._rows.get(vm_id)}
        if workers is not self._busy:
            before = self._busy
            changed |= {vm_id for vm_id in workers.keys() | before.keys() if workers.get(vm_id) != before.get(vm_id)}
        changed |= {vm_id for vm_id, view in self._views.items() if view.quarantined}  # until some time
        if changed or rows.keys() != self._views.keys():
            views = {vm_id: view for vm_id, view in self._views.items() if vm_id in rows}
            for number, vm_id in enumerate(sorted(changed & rows.keys())):
                if number % _AT_ONCE == _AT_ONCE - 1:
                    await asyncio.sleep(0)
                views[vm_id] = self._view(rows[vm_id], workers.get(vm_id, 0))
            self._views = views
        self._rows, self._busy = rows, workers
        return self._views

    def _view(self, row: VmFacts, workers: int) -> VmView:
        return self._registry.view(row, now=self._now, workers=workers)
