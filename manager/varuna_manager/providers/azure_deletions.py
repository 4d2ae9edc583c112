"""Deletes VMs at Azure: in batches, and with a pause after each refusal.

Azure refuses a whole batch because of one of its VMs (a lock, an operation under way, a VM that is gone). The VMs of a
refused batch are then deleted one by one, and a VM that is refused by itself is tried again after a while.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import structlog
from azure.core.exceptions import AzureError, HttpResponseError
from azure.mgmt.compute.aio import ComputeManagementClient

from varuna_manager.domain.fleet_decision import RefusalKind
from varuna_manager.providers.azure_market import first_line, parse_refusal
from varuna_manager.providers.azure_settings import AzureSettings

__all__ = ["Deletions"]

_AT_ONCE = 100
_THROTTLED_S = 10.0
"""Pause when Azure throttles calls without a Retry-After."""
_REFUSED_S = 60.0
"""Time between two attempts to delete a VM that Azure refuses to delete."""


class Deletions:
    """`on_end`: called when VMs were deleted, or could not be."""

    def __init__(
        self,
        settings: AzureSettings,
        client: ComputeManagementClient,
        now: Callable[[], float],
        on_end: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._client = client
        self._now = now
        self._on_end = on_end
        self._throttled_until = -float("inf")
        self._refused_until: dict[str, float] = {}
        self._deleting: set[str] = set()
        self._under_way: set[asyncio.Task[Any]] = set()
        self._log = structlog.get_logger("varuna.azure").bind(scale_set=settings.scale_set)

    async def delete_vms(self, vm_ids: Sequence[str]) -> None:
        """Return once Azure has accepted the deletions, or throttles them. Raises the first AzureError after all VMs
        were tried."""
        now = self._now()
        self._refused_until = {vm_id: until for vm_id, until in self._refused_until.items() if until > now}
        wanted = [vm_id for vm_id in vm_ids if vm_id not in self._deleting and vm_id not in self._refused_until]
        errors: list[AzureError] = []
        for start in range(0, len(wanted), _AT_ONCE):
            await self._delete_batch(wanted[start : start + _AT_ONCE], errors)
        if errors:
            raise errors[0]

    async def close(self) -> None:
        """Stop waiting for accepted deletions."""
        for task in self._under_way:
            task.cancel()
        await asyncio.gather(*self._under_way, return_exceptions=True)

    async def _delete_batch(self, names: Sequence[str], errors: list[AzureError]) -> None:
        if self._now() < self._throttled_until:
            return
        body: Any = {"instanceIds": [*names]}
        try:
            poller = await self._client.virtual_machine_scale_sets.begin_delete_instances(
                self._settings.resource_group, self._settings.scale_set, body, force_deletion=True
            )
        except HttpResponseError as error:
            refusal = parse_refusal(error)
            if refusal.kind is RefusalKind.THROTTLED:
                self._throttled_until = self._now() + (refusal.retry_after_s or _THROTTLED_S)
                self._log.warning("Azure throttles deletions of VMs", reason=refusal.reason, vms=[*names])
            elif len(names) > 1:  # because of one of them, which Azure does not always name
                for name in names:
                    await self._delete_batch([name], errors)
            elif error.status_code not in (404, 400):  # these are gone
                self._note_refused(names, error)
                errors.append(error)
            return
        self._deleting.update(names)
        task = asyncio.ensure_future(poller.result())
        self._under_way.add(task)
        task.add_done_callback(lambda task: self._ended(task, names))

    def _ended(self, task: asyncio.Task[Any], names: Iterable[str]) -> None:
        self._under_way.discard(task)
        self._deleting.difference_update(names)
        if not task.cancelled() and isinstance(error := task.exception(), AzureError):
            # The fleet controller finds them in the list and deletes them again.
            self._note_refused(names, error)
        self._on_end()

    def _note_refused(self, names: Iterable[str], error: AzureError) -> None:
        self._refused_until.update(dict.fromkeys(names, self._now() + _REFUSED_S))
        self._log.warning("VMs could not be deleted", vms=[*names], error=first_line(error), again_in_s=_REFUSED_S)
