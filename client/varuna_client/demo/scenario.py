"""What the demo does to the fleet and when: pure decisions over what the manager shows."""

from __future__ import annotations

from dataclasses import dataclass

from varuna_proto.rest import (
    END_STATES,
    EventDocument,
    GenerationDocument,
    JobDocument,
    StepMetricsDocument,
)
from varuna_proto.rest_fleet import VmDocument

FULL_FLEET = 4
NOTICE_S = 30.0
"""Azure's notice before a spot VM is taken."""


@dataclass(frozen=True, kw_only=True)
class DemoSnapshot:
    """What the manager shows at one moment, with all metrics and events so far."""

    job: JobDocument
    generations: tuple[GenerationDocument, ...]
    metrics: tuple[StepMetricsDocument, ...]
    events: tuple[EventDocument, ...]
    vms: tuple[VmDocument, ...]

    @property
    def over(self) -> bool:
        return self.job["state"] in END_STATES

    @property
    def training(self) -> GenerationDocument | None:
        """The newest training generation that has not ended."""
        living = [g for g in self.generations if g["kind"] == "training" and g["state"] != "ended"]
        return living[-1] if living else None

    def steps_of(self, number: int) -> int:
        """The number of steps that a generation has made so far."""
        return sum(metric["generation"] == number for metric in self.metrics)


@dataclass(frozen=True, kw_only=True)
class KillVm:
    """A VM vanishes without notice, and the market has no other to offer."""

    vm_id: str
    pid: int
    capacity: int = FULL_FLEET - 1

    @property
    def story(self) -> str:
        return f"killing {self.vm_id} without notice (SIGKILL to its process group, pid {self.pid})"


@dataclass(frozen=True, kw_only=True)
class OfferVm:
    """The market offers one more VM, which the fleet controller wants."""

    capacity: int = FULL_FLEET

    @property
    def story(self) -> str:
        return f"the market offers a new VM (capacity {self.capacity})"


@dataclass(frozen=True, kw_only=True)
class PreemptVm:
    """A VM gets its notice, and the market has no other to offer."""

    vm_id: str
    pid: int
    notice_s: float = NOTICE_S
    capacity: int = FULL_FLEET - 1

    @property
    def story(self) -> str:
        return f"preempting {self.vm_id} with {self.notice_s:.0f} s of notice"


Disturbance = KillVm | OfferVm | PreemptVm
SCENES = 3
"""Kill, offer, preempt."""


def next_disturbance(
    scene: int, after_generation: int, observed: DemoSnapshot, *, steps_between: int
) -> Disturbance | None:
    """The disturbance that is due now; None: not yet, or the play is over.

    `scene` counts the disturbances so far and `after_generation` is the generation that the last one hit: the next
    one waits until a newer generation has made `steps_between` steps. So each is followed by a morph that trains.
    """
    generation = observed.training
    if scene >= SCENES or generation is None or observed.over or generation["state"] != "running":
        return None
    if generation["number"] <= after_generation or observed.steps_of(generation["number"]) < steps_between:
        return None
    if scene == 1:
        return OfferVm()
    ranks = sorted(generation["placement"], key=lambda place: place["rank"])
    # The last stage's VM is killed; rank 0's VM, the rendezvous of the others, gets the notice.
    vm_id = str(ranks[-1 if scene == 0 else 0]["vm_id"])
    pid = next((int(vm["ref"]["pid"]) for vm in observed.vms if vm["id"] == vm_id), None)
    if pid is None:
        return None  # the VM has just gone, and the generation is about to end
    return KillVm(vm_id=vm_id, pid=pid) if scene == 0 else PreemptVm(vm_id=vm_id, pid=pid)
