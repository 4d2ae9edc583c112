"""The preparation of a job's workdir on VMs, and when its failure is the job's own fault."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

_TRIES_WITHOUT_SETUP = 3
"""Failures before the setup ran (a download, a full disk) until they count: the network may be at fault."""


@dataclass(frozen=True, kw_only=True)
class SetupFailure:
    """The failures on one VM."""

    times: int
    exit_code: int | None
    """Of the last setup; None: the setup did not run."""

    @property
    def counts(self) -> bool:
        """Whether it counts against the job."""
        return self.exit_code is not None or self.times >= _TRIES_WITHOUT_SETUP


@dataclass(frozen=True, kw_only=True)
class SetupProgress:
    """The preparation of one job's workdir on all VMs."""

    ready_gpus: int = 0
    """GPUs of usable VMs where its workdir is ready."""
    missing_gpus: int = 0
    """Free GPUs of VMs that have not prepared it yet."""
    under_way: int = 0
    """VMs that prepare it now."""
    failed_on: frozenset[str] = frozenset()
    """VMs whose failure counts, whether they still exist or not."""
    untried: int = 0
    """VMs, present or requested, on which the outcome is not known yet."""

    def find_own_fault(self, several: int) -> str:
        """Where it failed, once that is the fault of a job that never ran; empty: it is not, or not yet.

        One VM may have a full disk or no access to the packages. So `several` VMs have to fail, and at least as many as
        still prepare it; or all VMs.
        """
        failed = len(self.failed_on)
        if self.ready_gpus or not failed:
            return ""
        if self.untried == 0:
            return "on the only VM" if failed == 1 else f"on all {failed} VMs"
        return f"on {failed} VMs" if failed >= max(several, self.under_way) else ""


def list_failed_vms(failures: Mapping[str, SetupFailure], ready_on: Collection[str]) -> frozenset[str]:
    """VMs whose failure counts and where the workdir is still not ready."""
    return frozenset(vm_id for vm_id, failure in failures.items() if failure.counts and vm_id not in ready_on)
