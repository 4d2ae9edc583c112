"""What a replay is given (plans, the system that trains, the model's state), and what its policy may do."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from varuna_planner.liveput.copies import CopiedParts, predict_stall_s
from varuna_planner.liveput.morph_cost import MorphKind, StateMoves, predict_moving
from varuna_planner.profile.document import Profile
from varuna_proto.plan import Device, Plan


class Plans(Protocol):
    """The planner's answers, one GPU a VM."""

    def best(self, gpus: int) -> Plan | None:
        """The fastest plan on so many GPUs; None: none fits."""

    def best_keeping(self, gpus: int, micro_batch: int) -> Plan | None:
        """The fastest plan on so many GPUs with this micro-batch; None: none fits."""

    def shaped(self, p: int, d: int, micro_batch: int) -> Plan | None:
        """The best plan of this shape; None: it does not fit."""


@dataclass(frozen=True, kw_only=True)
class System:
    """What happens at a morph, and how long it takes."""

    fixed_s: Mapping[MorphKind, float]
    survivors: bool = False
    """Whether complete replicas keep their share of a step, and processes give their state to new ones."""
    copies: bool = False
    """Whether a second VM has each committed section."""
    weighs_copies: bool = False
    """Whether a generation has only those copies and marks that are worth what they cost."""
    moves: bool = False
    """Whether processes take other stages in place, with what counts of the step where all hold a part of it."""
    marks_s: float | None = None
    """Replicas copy their sums to one another that often, and one alone to the VMs that have its copies; they leave at
    once where that is worth more than to finish their shares. None: they do not."""
    sums_copied_s: float | None = None
    """Gradient sums are copied to a second VM that often, and move to any shape; None: they are not."""
    starts_ahead_s: float | None = None
    """How long a process takes that is started ahead for a generation to come, up to its `Varuna()`. None: none is
    started ahead."""
    prepares: bool = False
    """Whether the state moves while the generation before still trains, where that is not lost."""
    detect_s: float = 2.0
    """The time until a loss is noticed, as measured for a silent VM. Replicas that are not hit train meanwhile."""
    save_stall_s: float = 0.5
    """What the copy of a state takes that is saved."""
    copies_beside_passes: bool = False
    """Whether states and sums are copied while passes run, in steps that take longer. If not, training stands still."""

    def find_stall_s(self, plan: Plan) -> float:
        """How long training stands still for a save."""
        step_s = plan.predicted_minibatch_s
        return predict_stall_s(self.save_stall_s, step_s=step_s, beside_passes=self.copies_beside_passes)


@dataclass(frozen=True, kw_only=True)
class State:
    """The model's state, and the links over which it moves."""

    section_bytes: tuple[int, ...]
    parameter_bytes: tuple[int, ...]
    """The part of each section's that passes read."""
    link_bytes_per_s: float

    @classmethod
    def of_profile(cls, profile: Profile) -> State:
        return cls(
            section_bytes=tuple(one.state_bytes for one in profile.sections),
            parameter_bytes=tuple(one.value_bytes for one in profile.sections),
            link_bytes_per_s=profile.links.other_vm.bandwidth_bytes_per_s,
        )

    def read_store_s(self, plan: Plan) -> float:
        """The time of the largest stage's state over its VM's link."""
        bounds = [*plan.stage_starts, len(self.section_bytes)]
        stages = [sum(self.section_bytes[first:stop]) for first, stop in itertools.pairwise(bounds)]
        return max(stages) / self.link_bytes_per_s

    def predict_moving(self, plan: Plan, vms: Sequence[str], before: Plan, holders: Sequence[str]) -> StateMoves:
        """How long processes on `vms` take the state of `before` from the memories of `holders`."""
        return predict_moving(
            self.section_bytes,
            self.parameter_bytes,
            self.link_bytes_per_s,
            stage_starts=plan.stage_starts,
            placement=[Device(vm, 0) for vm in vms],
            held_starts=before.stage_starts,
            holders=[Device(vm, 0) for vm in holders],
        )


@dataclass(frozen=True, kw_only=True)
class Start:
    plan: Plan
    vms: tuple[str, ...]
    """The VM of each rank."""
    in_place: bool = False
    from_memory: bool = False
    """Whether processes of the generation before give the whole state. With `in_place`, they take other stages."""
    copied: CopiedParts | None = None
    """What its VMs copy to each other; None: all that the system has."""


@dataclass(frozen=True, kw_only=True)
class Stop:
    """Leave for another shape: at the end of the step, or at once if gradient sums move."""

    at_once: bool = False
    """If it has not begun to train, it does not."""
    within_step: bool = False
    """Leave at once, with what is done of the step: pipelines drain and fill once more."""
    before_vms_leave: bool = False
    """Leave at once, as after the loss of the VMs that have notice, which nobody has to notice. With `within_step`,
    others get what their replicas have of the step."""
    saves: bool = False
    """Save first."""
    has_state: bool = False
    """Whether the state that the step began with is where the next shape needs it: only sums move."""
