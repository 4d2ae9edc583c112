"""Asks the planner, in a thread, and remembers its answers.

The planner brings numba with it, so it is imported in such a thread only: the event loop never waits for it.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from varuna_manager.domain.observed import Device, Plan, Proposal
from varuna_manager.services.planner import ShapeQuestion, load_planner, parsed_profile

_REMEMBERED = 256
_CANDIDATES_KEPT = 64
"""Of the planner's table, best first: what is stored with a generation."""
_PLENTY_OF_GPUS = 1024
"""When no plan fits the GPUs that are there, this many tell whether one could ever fit."""

NoteTime = Callable[[str, float], None]
"""Takes the kind of a question to the planner, and the seconds that the answer took."""


@contextmanager
def noting(question: str, note: NoteTime | None) -> Iterator[None]:
    began = time.perf_counter()
    try:
        yield
    finally:
        if note is not None:
            note(question, time.perf_counter() - began)


@dataclass(frozen=True, kw_only=True)
class Question(ShapeQuestion):
    """All that an answer depends on."""

    devices: tuple[Device, ...]
    previous: tuple[Device, ...] = ()
    """Placement of the generation before: index = rank."""
    previous_p: int | None = None
    """Its stages."""
    present: Plan | None = None
    """The plan of the generation that runs: the answer says what it is worth by the same profile."""

    def key(self) -> Hashable:
        placed = (self.devices, self.previous, self.previous_p, self.present)
        return self.shape_key(), self.spec.resources.max_gpus, placed


@dataclass(frozen=True, kw_only=True)
class Examined:
    """A profile beside what the workers take."""

    expected_us: tuple[float, ...]
    """Forward and backward of a micro-batch, per stage."""
    corrected_json: str | None = None
    """The profile as it should be; None: it is true."""
    drift: str | None = None
    """What it was corrected by."""


class PlanningService:
    """`cache_dir`: for compiled code, where neither the package's folder nor the user's cache can be written."""

    def __init__(self, cache_dir: Path | None = None, note: NoteTime | None = None) -> None:
        """`note`: told how long each answer took."""
        self._cache_dir = cache_dir
        self._note = note
        self._answers: OrderedDict[Hashable, Proposal] = OrderedDict()
        self._log = structlog.get_logger("varuna.planning")

    async def warm_up(self) -> None:
        """Load the planner and compile it, so that the first question need not wait. Never fails."""
        try:
            await asyncio.to_thread(_warm_up, self._cache_dir)
        except Exception:
            self._log.exception("the planner could not be warmed up: the first question will tell")

    async def propose(self, question: Question) -> Proposal:
        """The best plan for the question's devices and where its ranks go; a reason when there is none."""
        key = question.key()
        if key not in self._answers:
            with noting("plan", self._note):
                self._answers[key] = await asyncio.to_thread(_answer, question)
            if len(self._answers) > _REMEMBERED:
                self._answers.popitem(last=False)
        self._answers.move_to_end(key)
        return self._answers[key]

    async def check_profile(self, profile_json: str) -> str | None:
        """What is wrong with a profile document; None when nothing is."""
        return await asyncio.to_thread(_profile_error, profile_json)

    async def examine(self, profile_json: str, plan: Plan, micro_batch_us: Mapping[int, float]) -> Examined:
        """A profile beside `micro_batch_us`: forward and backward of a micro-batch, for every rank of the plan."""
        return await asyncio.to_thread(_examine, profile_json, plan, micro_batch_us)


def _warm_up(cache_dir: Path | None) -> None:
    load_planner(cache_dir)
    from varuna_planner.auto_config import warm_up

    warm_up()


def _profile_error(profile_json: str) -> str | None:
    from varuna_planner.profile import Profile

    try:
        Profile.from_json(profile_json)
    except Exception as error:  # whatever a document does to the parser: it is not a profile
        return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    return None


def _examine(profile_json: str, plan: Plan, micro_batch_us: Mapping[int, float]) -> Examined:
    from varuna_planner.drift import StageTimes, expected, find_drift

    profile = parsed_profile(profile_json)
    bounds = [*plan.stage_starts, len(profile.sections)]
    stages = [
        StageTimes(
            first=first,
            stop=stop,
            replicas_us=tuple(micro_batch_us[replica * plan.p + stage] for replica in range(plan.d)),
        )
        for stage, (first, stop) in enumerate(itertools.pairwise(bounds))
    ]
    drift = find_drift(profile, plan.micro_batch, stages)
    return Examined(
        expected_us=tuple(expected(profile, plan.micro_batch, stages)),
        corrected_json=None if drift is None else drift.profile.to_json(),
        drift=None if drift is None else drift.reason,
    )


def _answer(question: Question) -> Proposal:
    """In a thread. The planner's ValueError means that no fleet would do.

    Any other error is a defect: a job that has trained waits for another fleet, a new one fails with what is known.
    """
    try:
        return _choose(question)
    except ValueError as error:
        return Proposal(plan=None, possible=False, reason=str(error))
    except Exception as error:
        log = structlog.get_logger("varuna.planning")
        log.exception("the planner failed", gpus=len(question.devices), global_batch=question.spec.global_batch)
        reason = f"the planner failed on {len(question.devices)} GPUs: {type(error).__name__}: {error}"
        return Proposal(plan=None, possible=question.previous_p is not None, reason=reason)


def _choose(question: Question) -> Proposal:
    choice = question.choose(len(question.devices))
    candidates = tuple(candidate.to_dict() for candidate in choice.candidates[:_CANDIDATES_KEPT])
    if choice.best is None:
        # A job that keeps its micro-batch waits for VMs on which it can.
        free = replace(question, trained_micro_batch=None)
        plenty = free.choose(question.spec.resources.max_gpus or _PLENTY_OF_GPUS)
        possible = plenty.best is not None
        reason = choice.reason if possible else plenty.reason
        return Proposal(plan=None, candidates=candidates, reason=reason, possible=possible)
    plan = Plan.from_document(choice.best.to_dict())
    placement = _place(plan, question)
    present_rate = None
    if question.present is not None:
        from varuna_planner.auto_config import Pins

        now = question.present
        same = question.choose(now.p * now.d, Pins(p=now.p, d=now.d, micro_batch=now.micro_batch)).best
        present_rate = same.examples_per_s if same is not None else None
    return Proposal(
        plan=plan,
        placement=placement,
        candidates=candidates,
        reason=choice.reason,
        present_examples_per_s=present_rate,
    )


def _place(plan: Plan, question: Question) -> tuple[Device, ...]:
    from varuna_planner import placement

    def planners(devices: Sequence[Device]) -> list[placement.Device]:
        return [placement.Device(device.vm_id, device.local_rank) for device in devices]

    previous = {device: rank for rank, device in enumerate(planners(question.previous))}
    placed = placement.place(plan.p, plan.d, planners(question.devices), previous, previous_p=question.previous_p)
    return tuple(Device(device.vm_id, device.local_rank) for device in placed)
