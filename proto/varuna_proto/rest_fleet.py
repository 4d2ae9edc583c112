"""The documents of the REST API about VMs and access: see `varuna_proto.rest`."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict

from varuna_proto.rest import Entry, Timestamp, Worker

_documented = with_config(ConfigDict(use_attribute_docstrings=True))


@_documented
class Vm(TypedDict):
    """One VM. `ref` is the provider's handle; the local provider's holds the agent's `pid`."""

    id: str
    provider: str
    state: str
    """requested, ready, suspect, draining, lost or gone."""
    gpus: int
    device_memory_bytes: int | None
    """Of each GPU."""
    gpu_type: str | None
    """What its GPUs are called, as its agent says."""
    host: str | None
    ref: dict[str, Any]
    generation: int | None
    """The newest that runs there."""
    workers: list[Worker]
    """That have not stopped."""
    last_heard_s: float | None
    created_at: Timestamp
    reason: str | None
    slow_ratio: float | None
    """How many times as long as its peers it takes, while it is found slow."""
    slow_reason: str | None
    quarantined_until: Timestamp | None
    quarantines: int
    notice_deadline: Timestamp | None
    """When its provider will take it."""
    drain_deadline: Timestamp | None
    cordoned_at: Timestamp | None
    """Since when a user wants nothing new to start there; null: it may."""
    hangs: int
    price_per_hour: float | None


@_documented
class VmDetail(Vm):
    """A VM with its past."""

    history: list[Entry]


@_documented
class VmSummary(TypedDict):
    """The fleet in numbers."""

    total: int
    """VMs that are not gone."""
    gone: int
    by_state: dict[str, int]
    gpus: int
    """Of ready VMs."""
    gpus_busy: int
    workers: int
    quarantined: int
    slow: int
    noticed: int
    """VMs whose provider has said that it will take them."""
    cost_per_hour: float | None


@_documented
class Fleet(TypedDict):
    """How many VMs are wanted, and how many there are."""

    provider: str
    target: int
    min_vms: int | None
    max_vms: int | None
    """With both, the target follows the jobs' wants between them."""
    capacity: int | None
    """VMs that an emulated market grants; null: any number."""
    vms: dict[str, int]
    """By state."""
    gpus: int
    """Of ready VMs."""


@_documented
class FleetHistory(TypedDict):
    """The fleet over time, as columns: one entry for each bucket of `bucket_s` seconds."""

    bucket_s: float
    at_unix_s: list[float]
    """The bucket's end."""
    present: list[int]
    """VMs that were there at its end, from their first request until they were gone."""
    ready: list[int]
    """VMs that became ready in it."""
    lost: list[int]
    """VMs that were lost or gone in it."""
    notices: list[int]
    quarantines: list[int]


@_documented
class FleetCost(TypedDict):
    """VM-hours of the fleet since a time, whether jobs ran or not."""

    since: Timestamp
    vms: int
    vm_hours: float
    gpu_hours: float
    cost: float | None
    cost_per_hour: float | None
    vms_without_price: int


@_documented
class Preempted(TypedDict):
    """A VM that the emulated market takes."""

    id: str
    notice_s: float


@_documented
class Whoami(TypedDict):
    """Whom the manager takes the caller for."""

    name: str
    role: str
    """viewer, user or admin."""
    open: bool
    """Whether it asks nobody for a token."""


@_documented
class Token(TypedDict):
    """A token, without what opens anything."""

    id: str
    name: str
    kind: str
    """access (of the REST API) or join (of agents)."""
    role: str | None
    vm_id: str | None
    single_use: bool
    created_at: Timestamp
    created_by: str
    expires_at: Timestamp | None
    last_used_at: Timestamp | None
    revoked_at: Timestamp | None


@_documented
class NewToken(Token):
    """A token and its text, which is told once."""

    token: str


@_documented
class AuditEntry(TypedDict):
    """A call that changed something, or was refused."""

    id: int
    at: Timestamp
    who: str
    role: str | None
    address: str
    action: str
    status: int | None
    """Of the answer; null: it is not known."""


@_documented
class Certificate(TypedDict):
    """What an agent that has joined is given."""

    vm_id: str
    certificate: str
    """PEM."""


@_documented
class Revoked(TypedDict):
    """A VM of which no certificate is taken any more."""

    id: str
    revoked: bool
