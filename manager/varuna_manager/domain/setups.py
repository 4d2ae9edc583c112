"""How far the workdir of a job is on its way to the VMs, and when it is the job's own fault that it does not arrive."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

_TRIES_WITHOUT_SETUP = 3
"""Failures before the setup ran (a download, a full disk) that count: the manager or the network may be at fault."""


@dataclass(frozen=True, kw_only=True)
class SetupFailure:
    """What one VM has said."""

    times: int
    exit_code: int | None
    """Of the setup, the last time; None: it did not come to that."""

    @property
    def counts(self) -> bool:
        """Whether it speaks against the job."""
        return self.exit_code is not None or self.times >= _TRIES_WITHOUT_SETUP


@dataclass(frozen=True, kw_only=True)
class Setups:
    """Those of one job, on all VMs."""

    ready_gpus: int = 0
    """Of usable VMs where its workdir is ready."""
    missing_gpus: int = 0
    """Free ones of VMs that are still to make it ready."""
    under_way: int = 0
    """VMs that make it ready now."""
    failed_on: frozenset[str] = frozenset()
    """VMs, present ones and others, whose failure counts."""
    untried: int = 0
    """VMs that are here or on their way and of which that is not known."""

    def own_fault(self, several: int) -> str:
        """Where it failed, once that is the fault of a job that never ran; empty: it is not, or not yet.

        One VM may have a full disk, or no way to the packages. So `several` have to fail, and no fewer than are still
        at it; or all that there are.
        """
        failed = len(self.failed_on)
        if self.ready_gpus or not failed:
            return ""
        if self.untried == 0:
            return "on the only VM" if failed == 1 else f"on all {failed} VMs"
        return f"on {failed} VMs" if failed >= max(several, self.under_way) else ""


def failed_vms(failures: Mapping[str, SetupFailure], ready_on: Collection[str]) -> frozenset[str]:
    """VMs whose failure counts: the workdir is not ready there by now."""
    return frozenset(vm_id for vm_id, failure in failures.items() if failure.counts and vm_id not in ready_on)
