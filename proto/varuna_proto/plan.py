"""The plan of a training generation and the device of a worker, as the planner, the manager, agents and workers know
them. Both need the standard library only.

A new field of the plan goes into `Plan`, into `PlanSpec` of agent.proto and `environment` when workers need it, and
into `rest` for users.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

__all__ = ["Device", "Plan"]


class Device(NamedTuple):
    """One accelerator (or CPU slot) of one VM: the place of one worker."""

    vm_id: str
    local_rank: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a job runs on P × D devices: p pipeline stages × d replicas."""

    p: int
    d: int
    micro_batch: int
    """Examples in a micro-batch."""
    global_batch: int
    """Examples in a mini-batch, over all replicas; 0: not known before the first one."""
    stage_starts: tuple[int, ...] = ()
    """First section of each stage; empty: sections are spread evenly by number."""
    policy: str = "work-conserving"
    """A `Policy` of varuna_planner.schedule.policies."""
    run_ahead: int = 0
    """Forwards in flight beyond those that the stage's place in the pipeline needs."""
    recompute: tuple[bool, ...] = ()
    """By stage; empty: no stage recomputes."""
    predicted_minibatch_s: float = 0.0
    """0: not predicted."""
    examples_per_s: float = 0.0
    """Predicted; 0: not predicted."""
    memory_bytes: tuple[int, ...] = ()
    """Predicted peak, by stage; empty: not predicted."""
    shares: tuple[int, ...] = ()
    """Micro-batches of each replica; empty: as equal as can be."""
    gpu_types: tuple[str, ...] = ()
    """By rank, the type of GPU that the rank is planned for, by its VM's `gpu_type`; empty: all GPUs are equal."""
    link_connections: int = 1
    """TCP connections of each link between two VMs, over which large messages go side by side."""

    def to_document(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Plan:
        """The plan of a document that `to_document` made."""
        tuples = {name: tuple(document[name]) for name in _TUPLES if name in document}
        return cls(**{**document, **tuples})


_TUPLES = tuple(field.name for field in fields(Plan) if field.default == ())
"""Documents of earlier versions lack some of them."""
