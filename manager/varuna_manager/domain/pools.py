"""What the settings of a fleet say of its pools."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PoolTerms"]


@dataclass(frozen=True, kw_only=True)
class PoolTerms:
    """One pool: VMs of one machine type in one zone, at one price."""

    name: str
    price_per_hour: float
    """Of a VM, where its provider names no price of its own."""
    zone: str = ""
    """The zone, or any other place within which the network is fast; empty: not known."""
    machine_type: str = ""
    gpu_type: str = ""
    """The name of its GPUs; empty: not known."""
    relative_speed: float = 1.0
    """The examples per second of one of its GPUs, compared with those of the other pools."""
    max_vms: int | None = None
    """The most VMs that it may have; None: any number."""
