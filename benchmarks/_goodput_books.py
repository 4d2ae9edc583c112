"""Where the time of a played segment went, and what its morphs cost: in the terms of the replay. Pure."""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cache

from _goodput_setting import Plans, System
from _recovery_figures import StepLine, Wait

from varuna_planner.liveput.morph_cost import PRIOR_FIXED_S, MorphKind
from varuna_planner.liveput.spot_trace import SpotTrace
from varuna_proto.plan import Plan
from varuna_proto.rest import GenerationDocument

__all__ = [
    "Books",
    "MeasuredPlans",
    "PlayedMorph",
    "PlayedRun",
    "keep_books",
    "list_morphs",
    "make_system",
    "measure_step_times",
    "read_time",
    "shape_of",
]

Shape = tuple[int, int, int]
"""Stages, replicas, micro-batch."""
_LEAST_STEPS = 2
"""The time of a step is the median of so many at least."""


def shape_of(generation: GenerationDocument) -> Shape:
    return generation["p"], generation["d"], generation["micro_batch"]


@dataclass(frozen=True, kw_only=True)
class PlayedRun:
    """What was observed of a job while a segment was played. Times are in seconds since the trace's beginning."""

    trace: SpotTrace
    """As it was played: a VM leaves when it is killed, and comes when its agent has connected."""
    granted_s: tuple[float, ...]
    """Of each VM that came later: from the trace's time to that."""
    lines: tuple[StepLine, ...]
    killed: tuple[tuple[str, float], ...]
    """VMs, and when."""
    waits: tuple[Wait, ...]
    """When layers of micro-batches waited, as if a device computed them."""
    generations: tuple[GenerationDocument, ...]
    """Those that trained."""
    began_at: float
    """The trace's beginning, by the clock: the first of them was decided on."""
    between_s: float
    """Between steps: data and checkpoints."""
    checkpoints: int
    profile_json: str
    goodput: float
    """By the manager's own definition."""

    def since(self, timestamp: str | None) -> float | None:
        """A time of a document, as time of the trace."""
        return None if timestamp is None else read_time(timestamp) - self.began_at


def read_time(timestamp: str) -> float:
    return datetime.fromisoformat(timestamp).timestamp()


@dataclass(frozen=True, kw_only=True)
class PlayedMorph:
    """The time around the beginning of a generation in which no micro-batch ran anywhere."""

    number: int
    """Of the generation."""
    kind: MorphKind
    is_loss: bool
    """Whether a VM that the generation before used was lost."""
    noticed_s: float | None
    """From the loss to the manager's decision to leave; None: there was no loss."""
    began_s: float
    noticing_s: float
    """Of the pause, until the loss was noticed."""
    waiting_s: float
    """Of the pause, while there were too few VMs for any shape."""
    launching_s: float
    """The rest of the pause."""
    has_run: bool
    """Whether a micro-batch of the generation ran; if not, the pause goes on in the next morph."""

    @property
    def pause_s(self) -> float:
        return self.noticing_s + self.waiting_s + self.launching_s


@dataclass(frozen=True, kw_only=True)
class Books:
    """Every second from the trace's beginning to its end, once."""

    examples: float
    """Of committed steps, and of the part of the last one that was done."""
    kept_s: float
    """What these take at the rates of their shapes."""
    redone_s: float
    """What is left: work that was run again, and steps that took longer than others of their shape."""
    launching_s: float
    noticing_s: float
    saving_s: float
    """Between steps: checkpoints and data."""
    waiting_s: float
    steps_redone: int
    micro_batches_redone: int


def measure_step_times(run: PlayedRun) -> dict[Shape, float]:
    """The median time of an undisturbed step, by shape: within one generation, and not its first."""
    times: defaultdict[Shape, list[float]] = defaultdict(list)
    for generation in run.generations:
        ends = _list_step_ends(run, generation)
        times[shape_of(generation)] += [
            later - earlier
            for (before, earlier), (step, later) in itertools.pairwise(sorted(ends.items()))
            if step == before + 1
        ]
    return {shape: statistics.median(each) for shape, each in times.items() if len(each) >= _LEAST_STEPS}


def _list_step_ends(run: PlayedRun, generation: GenerationDocument) -> dict[int, float]:
    """When the first worker ended each step of this generation."""
    began, ended = run.since(generation["created_at"]), run.since(generation["ended_at"])
    assert began is not None
    until = run.trace.ends_s if ended is None else ended
    ends: dict[int, float] = {}
    for line in run.lines:
        if began <= line.at <= until:
            ends.setdefault(line.step, line.at)
    return ends


def list_morphs(run: PlayedRun, least_vms: int) -> list[PlayedMorph]:
    """One for each generation, the first included. No second is in two of them."""
    losses = _list_losses(run)
    found: list[PlayedMorph] = []
    for (before, generation), after in zip(
        itertools.pairwise((None, *run.generations)), (*run.generations[1:], None), strict=True
    ):
        assert generation is not None
        created = run.since(generation["created_at"])
        assert created is not None
        ended = [wait.ended for wait in run.waits if wait.began < created]
        until = run.trace.ends_s if after is None else run.since(after["created_at"])
        assert until is not None
        begins = min((wait.began for wait in run.waits if wait.began >= created), default=until)
        has_run = begins < until
        begins = min(begins, until)
        booked_until = found[-1].began_s + found[-1].pause_s if found else 0.0
        began = max(booked_until, min(max(ended, default=0.0), created))
        pause_s = max(0.0, begins - began)
        lost_at = None if before is None else losses.get(before["number"])
        stopped = None if before is None else run.since(before["stop_requested_at"])
        if lost_at is not None and stopped is None:
            stopped = created
        noticing_s = 0.0
        if lost_at is not None and stopped is not None:
            noticing_s = min(max(0.0, stopped - max(lost_at, began)), pause_s)
        waiting_s = min(_measure_lack(run.trace, least_vms, began, begins), pause_s - noticing_s)
        found.append(
            PlayedMorph(
                number=generation["number"],
                kind=find_kind(before, generation),
                is_loss=lost_at is not None,
                noticed_s=None if lost_at is None or stopped is None else max(0.0, stopped - lost_at),
                began_s=began,
                noticing_s=noticing_s,
                waiting_s=waiting_s,
                launching_s=pause_s - noticing_s - waiting_s,
                has_run=has_run,
            )
        )
    return found


def find_kind(before: GenerationDocument | None, generation: GenerationDocument) -> MorphKind:
    """As the replay has it, in which new processes do not join others: a growth in place counts as from memory."""
    sources = generation["state_from"]
    if before is None or sources is None or sources["store"] or not (sources["kept"] or sources["peers"]):
        return MorphKind.FROM_STORE
    old = {(one["vm_id"], one["local_rank"]) for one in before["placement"]}
    stays = all((one["vm_id"], one["local_rank"]) in old for one in generation["placement"])
    return MorphKind.IN_PLACE if generation["kind_of_morph"] == "reshape" and stays else MorphKind.FROM_MEMORY


def _list_losses(run: PlayedRun) -> dict[int, float]:
    """By the number of the generation that lived on them: when the first of its VMs was killed."""
    found: dict[int, float] = {}
    for vm_id, at_s in run.killed:
        for generation in run.generations:
            created, ended = run.since(generation["created_at"]), run.since(generation["ended_at"])
            assert created is not None
            lived = created <= at_s and (ended is None or at_s <= ended)
            if lived and any(one["vm_id"] == vm_id for one in generation["placement"]):
                found[generation["number"]] = min(at_s, found.get(generation["number"], at_s))
    return found


def _measure_lack(trace: SpotTrace, least_vms: int, since_s: float, until_s: float) -> float:
    """The time within the bounds in which the trace had fewer VMs."""
    fleets = [*trace.iterate_fleets(), (trace.ends_s, frozenset[str]())]
    return sum(
        max(0.0, min(later_s, until_s) - max(at_s, since_s))
        for (at_s, fleet), (later_s, _) in itertools.pairwise(fleets)
        if len(fleet) < least_vms
    )


def keep_books(run: PlayedRun, morphs: Sequence[PlayedMorph], plans: MeasuredPlans, global_batch: int) -> Books:
    """`morphs`: those of `list_morphs`."""
    ends_s = run.trace.ends_s
    made: dict[int, Shape] = {}
    last_at = 0.0
    for generation in run.generations:
        for step, at in _list_step_ends(run, generation).items():
            made[step] = shape_of(generation)
            last_at = max(last_at, at)
    newest = max(made, default=0)
    kept_s = sum(plans.step_s(shape) for shape in made.values())
    part = 0.0
    if run.generations:
        # What of the step under way was done: never more than all of it.
        begun = max([last_at, *(morph.began_s + morph.pause_s for morph in morphs)])
        part = min(1.0, max(0.0, ends_s - begun) / plans.step_s(shape_of(run.generations[-1])))
        kept_s += part * plans.step_s(shape_of(run.generations[-1]))
    pauses = [sum(getattr(morph, name) for morph in morphs) for name in ("launching_s", "noticing_s", "waiting_s")]
    return Books(
        examples=(newest + part) * global_batch,
        kept_s=kept_s,
        redone_s=ends_s - kept_s - sum(pauses) - run.between_s,
        launching_s=pauses[0],
        noticing_s=pauses[1],
        saving_s=run.between_s,
        waiting_s=pauses[2],
        steps_redone=sum(one["steps_redone"] or 0 for one in run.generations),
        micro_batches_redone=sum(one["micro_batches_redone"] or 0 for one in run.generations),
    )


def make_system(run: PlayedRun, morphs: Sequence[PlayedMorph], base: System) -> System:
    """`base` with what morphs, noticing and saves took in this run: medians by kind, where there were any. Its training
    stood still for saves, as it does on processors."""
    by_kind: defaultdict[MorphKind, list[float]] = defaultdict(list)
    for morph in morphs:
        if morph.has_run:
            by_kind[morph.kind].append(morph.launching_s)
    fixed_s = {kind: statistics.median(by_kind[kind]) if by_kind[kind] else PRIOR_FIXED_S[kind] for kind in MorphKind}
    noticed = [morph.noticed_s for morph in morphs if morph.noticed_s is not None]
    return replace(
        base,
        fixed_s=fixed_s,
        detect_s=statistics.median(noticed) if noticed else base.detect_s,
        save_stall_s=run.between_s / run.checkpoints if run.checkpoints else base.save_stall_s,
        copies_beside_passes=False,
    )


class MeasuredPlans:
    """The planner's plans with the rates that were measured, as `Plans`.

    Shapes that were not seen take as many times as long as predicted as those that were, in the mean.
    """

    def __init__(self, plans: Plans, step_times: Mapping[Shape, float]) -> None:
        self._plans, self._step_times = plans, dict(step_times)
        ratios = [
            seconds / plan.predicted_minibatch_s
            for shape, seconds in step_times.items()
            if (plan := plans.shaped(*shape)) is not None
        ]
        self.ratio = statistics.mean(ratios) if ratios else 1.0
        """How many times as long as predicted the steps took."""
        self.best = cache(lambda gpus: self._correct(plans.best(gpus)))
        self.best_keeping = cache(lambda gpus, micro_batch: self._correct(plans.best_keeping(gpus, micro_batch)))
        self.shaped = cache(lambda p, d, micro_batch: self._correct(plans.shaped(p, d, micro_batch)))

    def step_s(self, shape: Shape) -> float:
        plan = self.shaped(*shape)
        assert plan is not None, f"the planner has no plan for {shape}"
        return plan.predicted_minibatch_s

    def _correct(self, plan: Plan | None) -> Plan | None:
        if plan is None:
            return None
        shape = plan.p, plan.d, plan.micro_batch
        seconds = self._step_times.get(shape, plan.predicted_minibatch_s * self.ratio)
        return replace(plan, predicted_minibatch_s=seconds, examples_per_s=plan.global_batch / seconds)
