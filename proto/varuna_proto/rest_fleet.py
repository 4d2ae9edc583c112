"""The documents of the REST API about VMs and access; see `varuna_proto.rest`."""

from __future__ import annotations

from typing import Any

from typing_extensions import TypedDict

from varuna_proto.rest import (
    CheckpointDocument,
    EventDocument,
    GenerationDocument,
    JobCostDocument,
    JobDocument,
    JobTimeDocument,
    MetricBucketsDocument,
    PlanRecordDocument,
    StateChangeDocument,
    Timestamp,
    WorkerDocument,
    document,
)


@document
class VmDocument(TypedDict):
    """One VM. `ref` is the provider's handle; the local provider keeps the agent's `pid` in it."""

    id: str
    provider: str
    state: str
    """requested, ready, suspect, draining, lost or gone."""
    gpus: int
    device_memory_bytes: int | None
    """Memory of each GPU."""
    gpu_type: str | None
    """Name of its GPUs, as its agent reports it."""
    host: str | None
    ref: dict[str, Any]
    generation: int | None
    """The newest generation that runs there."""
    workers: list[WorkerDocument]
    """Workers that have not stopped."""
    held_bytes: int
    """States of workers that have ended, which its memory keeps for their job's next generation."""
    last_heard_s: float | None
    """Seconds since its agent's last message."""
    created_at: Timestamp
    reason: str | None
    slow_ratio: float | None
    """While it is slow: its time for the same work, as a multiple of its peers' time."""
    slow_reason: str | None
    quarantined_until: Timestamp | None
    quarantines: int
    notice_deadline: Timestamp | None
    """When its provider takes it."""
    drain_deadline: Timestamp | None
    cordoned_at: Timestamp | None
    """Since when nothing new starts there, because a user cordoned it; null: it is not cordoned."""
    hangs: int
    price_per_hour: float | None
    pool: str | None
    """The pool of the fleet's settings that it belongs to; null: the fleet has no pools."""
    zone: str | None
    """Null: its provider names none."""
    machine_type: str | None
    """The provider's name for machines like it; null: it names none."""


@document
class VmDetailDocument(VmDocument):
    """A VM with its history."""

    history: list[StateChangeDocument]


@document
class VmUsageDocument(TypedDict):
    """How busy a VM has been, as columns with one entry for each point: dense for the newest, rarer for older ones.
    Null: not known."""

    at_unix_s: list[float]
    cpu_share: list[float | None]
    """0 to 1, of all processors."""
    memory_used_bytes: list[float | None]
    memory_bytes: list[float | None]
    received_bytes_per_s: list[float | None]
    """Over all interfaces of the machine."""
    sent_bytes_per_s: list[float | None]
    gpu_share: list[float | None]
    """0 to 1: the part of the time in which its GPUs computed."""
    gpu_memory_used_bytes: list[float | None]
    """Of all its GPUs."""
    gpu_memory_bytes: list[float | None]


@document
class VmSummaryDocument(TypedDict):
    """The fleet in numbers."""

    total: int
    """VMs that are not gone."""
    gone: int
    by_state: dict[str, int]
    gpus: int
    """GPUs of ready VMs."""
    gpus_busy: int
    workers: int
    quarantined: int
    slow: int
    noticed: int
    """VMs that their provider has announced to take."""
    cost_per_hour: float | None


@document
class PoolDocument(TypedDict):
    """A pool of the fleet's settings, as the manager last looked at it."""

    name: str
    zone: str
    machine_type: str
    gpu_type: str
    relative_speed: float
    price_per_hour: float
    """Of one more VM, now."""
    max_vms: int | None
    vms: int
    """Those that stay, and those that it was asked for."""
    hazard_per_hour: float
    """Expected losses per VM-hour, by what became of its VMs."""
    gpu_hours_per_dollar: float
    """What a dollar buys: hours of a GPU with the relative speed 1, less what losses take."""
    examples_per_dollar: float | None
    """The same in examples; null: no job trains."""
    refusals: int
    """In a row, without a VM in between."""
    closed: str | None
    """Why it is not asked now; null: it can be."""


@document
class FleetDocument(TypedDict):
    """How many VMs are wanted, and how many there are."""

    provider: str
    target: int
    min_vms: int | None
    max_vms: int | None
    """With both, the target follows the jobs between these limits."""
    capacity: int | None
    """VMs that the emulated market grants; null: any number."""
    vms: dict[str, int]
    """Number of VMs by state."""
    gpus: int
    """GPUs of ready VMs."""
    pools: list[PoolDocument]
    """Those of the fleet's settings; none where the fleet has no pools, or this manager does not lead."""
    pools_reason: str | None
    """Why VMs were last requested of these pools; null: none were."""


@document
class JobOverviewDocument(TypedDict):
    """A job, its newest generation and the VMs of that one, all of one moment."""

    at: Timestamp
    job: JobDocument
    generation: GenerationDocument | None
    """Null: it has none yet."""
    vms: list[VmDocument]
    """Those on which the generation's workers are, but no more than 5000; none of a generation that has ended."""


@document
class JobReportDocument(TypedDict):
    """A job with its past, all of one moment."""

    at: Timestamp
    job: JobDocument
    generations: list[GenerationDocument]
    """The newest 1000, oldest first."""
    plan: PlanRecordDocument | None
    """The newest plan, with the other candidates; null: it has none yet."""
    time: JobTimeDocument
    cost: JobCostDocument
    course: MetricBucketsDocument
    """All its steps, in a few buckets."""
    checkpoint: CheckpointDocument | None
    """The newest one; null: it has none yet."""
    events: list[EventDocument]
    """The newest ones, oldest first."""


@document
class FleetOverviewDocument(TypedDict):
    """The fleet in numbers and one page of its VMs, all of one moment."""

    at: Timestamp
    fleet: FleetDocument
    summary: VmSummaryDocument
    quarantined: list[VmDocument]
    """Those that are not gone, but no more than 100."""
    vms: list[VmDocument]
    next_cursor: str | None
    """`cursor` of the next page of `vms`; null: there is none."""


@document
class FleetHistoryDocument(TypedDict):
    """The fleet over time, as columns with one entry for each bucket of `bucket_s` seconds."""

    bucket_s: float
    at_unix_s: list[float]
    """End of the bucket."""
    present: list[int]
    """VMs at the end of the bucket; a VM counts from its request until it is gone."""
    ready: list[int]
    """VMs that became ready in the bucket."""
    lost: list[int]
    """VMs that were lost or gone in the bucket. One that is lost and then gone counts when it is lost."""
    notices: list[int]
    quarantines: list[int]


@document
class FleetCostDocument(TypedDict):
    """VM-hours and cost of the fleet since a time, whether jobs ran or not."""

    since: Timestamp
    vms: int
    vm_hours: float
    gpu_hours: float
    cost: float | None
    cost_per_hour: float | None
    vms_without_price: int


@document
class PreemptionDocument(TypedDict):
    """A VM that the emulated market takes."""

    id: str
    notice_s: float


@document
class CallerDocument(TypedDict):
    """Who the caller is to the manager."""

    name: str
    role: str
    """viewer, user or admin."""
    open: bool
    """Whether this manager needs no tokens."""


@document
class TokenDocument(TypedDict):
    """A token, without its secret."""

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


@document
class NewTokenDocument(TokenDocument):
    """A new token with its text, which no other answer has."""

    token: str


@document
class AuditEntryDocument(TypedDict):
    """A call that changed something, or was refused."""

    id: int
    at: Timestamp
    who: str
    role: str | None
    address: str
    action: str
    status: int | None
    """HTTP status of the answer; null: it is not known."""


@document
class CertificateDocument(TypedDict):
    """The certificate of an agent that has joined."""

    vm_id: str
    certificate: str
    """PEM."""


@document
class RevokedVmDocument(TypedDict):
    """A VM whose certificates were revoked."""

    id: str
    revoked: bool
