"""Asks the planner in a thread, and caches its answers."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import structlog

from varuna_manager.domain.keepers import SaveCost
from varuna_manager.domain.observed import Proposal
from varuna_manager.planning.planner import (
    GpuCount,
    ShapeQuestion,
    is_machines_fault,
    load_planner,
    parsed_profile,
    sum_gpu_counts,
)
from varuna_planner.liveput.checkpoint_interval import StopCosts
from varuna_planner.liveput.morph_cost import MEMORY_BYTES_PER_S, NO_MOVES, StateMoves, predict_moving
from varuna_planner.schedule.batching import shared_micro_batch
from varuna_proto.plan import Device, Plan
from varuna_proto.wording import count_of

if TYPE_CHECKING:
    from varuna_planner.search.auto_config import Pins

_REMEMBERED = 256
FAILURE_KEPT_S = 60.0
"""After an error, the planner is asked the same question again: what caused it (a full disk, no memory) may be over. A
steady error must not be met, and logged, at each look."""
_CANDIDATES_KEPT = 64
"""The number of candidates, best first, that are stored with a generation."""
_PLENTY_OF_GPUS = 1024
"""When no plan fits the present GPUs, a plan for this many shows whether one could ever fit."""

NoteTime = Callable[[str, float], None]
"""Takes the kind of a question to the planner, and the seconds that the answer took."""


@contextmanager
def measure_answer(question: str, note: NoteTime | None) -> Iterator[None]:
    began = time.perf_counter()
    try:
        yield
    finally:
        if note is not None:
            note(question, time.perf_counter() - began)


class GpuOfVm(NamedTuple):
    """The GPUs of a VM."""

    vm_id: str
    gpu_type: str
    memory_bytes: int | None
    """Of each; None: not known."""


@dataclass(frozen=True, kw_only=True)
class PlanQuestion(ShapeQuestion):
    """Everything on which an answer depends."""

    devices: tuple[Device, ...]
    zones: tuple[tuple[str, str], ...] = ()
    """Each VM of `devices` and `previous` with its zone, where these are in several; else empty."""
    gpu_types: tuple[GpuOfVm, ...] = ()
    """Of each VM whose GPUs are known by name."""
    previous: tuple[Device, ...] = ()
    """Placement of the previous generation; the index is the rank."""
    previous_p: int | None = None
    """Stages of the previous generation."""
    has_fitted: bool = False
    """Whether that had a plan, and did not run out of memory with it."""
    previous_starts: tuple[int, ...] = ()
    """The first section of each of them; empty: not known."""
    present: Plan | None = None
    """The plan of the newest generation that trains or has trained. The answer has its rate by the same profile."""
    survivors: tuple[Device, ...] = ()
    """Devices whose processes have a part of the step under way. The answer also has the best plan that keeps it."""
    kept_micro_batch: int = 0
    """That of the step under way."""

    def answer_key(self) -> Hashable:
        placed = (
            self.devices,
            self.zones,
            self.gpu_types,
            self.previous,
            self.previous_p,
            self.previous_starts,
            self.present,
            self.has_fitted,
        )
        kept = (self.survivors, self.kept_micro_batch)
        return self.shape_key(), self.spec.resources.max_gpus, placed, kept

    def count_types(self, devices: Sequence[Device]) -> tuple[GpuCount, ...]:
        """The devices by type, those of unknown type left out; empty: plans tell no types apart."""
        on_vm = Counter(device.vm_id for device in devices)
        counts = sum_gpu_counts(
            GpuCount(each.gpu_type, on_vm[each.vm_id], each.memory_bytes) for each in self.gpu_types
        )
        return self.tell_types_apart(counts, len(devices))

    def list_planned(self, devices: Sequence[Device]) -> Sequence[Device]:
        """Those that plans count on: where they tell types apart, a device of unknown type gets no rank."""
        named = {each.vm_id for each in self.gpu_types}
        return [device for device in devices if device.vm_id in named] if self.count_types(devices) else devices

    def count_zones(self, devices: Iterable[Device]) -> tuple[int, ...]:
        """The number of devices in each zone; empty: all are in one."""
        zones = dict(self.zones)
        return tuple(Counter(zones.get(device.vm_id, "") for device in devices).values()) if zones else ()


@dataclass(frozen=True, kw_only=True)
class ProfileCheck:
    """A profile compared with the measured times of the workers."""

    gpu_types: tuple[str, ...]
    """By rank; a type that is not known counts as the profile's own."""
    expected_us: tuple[float, ...]
    """Time of a micro-batch, forward and backward, by rank, on its type of GPU."""
    guessed_types: frozenset[str] = frozenset()
    """Types that the profile does not know: they are expected to be as fast as its own."""
    corrected_json: str | None = None
    """The corrected profile; None: it needs no correction."""
    drift: str | None = None
    """How it was corrected, as text; None: it was not."""


class _Answer(NamedTuple):
    proposal: Proposal
    valid_until: float
    """By the monotonic clock."""


class PlanningService:
    """`cache_dir`: for compiled code, when neither the package's folder nor the user's cache is writable."""

    def __init__(
        self,
        cache_dir: Path | None = None,
        note: NoteTime | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`note`: is called with the time of each answer."""
        self._cache_dir = cache_dir
        self._note = note
        self._now = monotonic
        self._answers: OrderedDict[Hashable, _Answer] = OrderedDict()
        self._log = structlog.get_logger("varuna.planning")

    async def warm_up(self) -> None:
        """Load and compile the planner, so that the first question does not wait. Never fails."""
        try:
            await asyncio.to_thread(_warm_up, self._cache_dir)
        except Exception:
            self._log.exception("the planner could not be warmed up: the first question tries again")

    async def propose_plan(self, question: PlanQuestion) -> Proposal:
        """The best plan for the question's devices, and its placement; a reason when there is none."""
        key = question.answer_key()
        known = self._answers.get(key)
        if known is None or self._now() >= known.valid_until:
            with measure_answer("plan", self._note):
                proposal, is_failure = await asyncio.to_thread(_answer, question, self._cache_dir)
            known = _Answer(proposal, self._now() + FAILURE_KEPT_S if is_failure else math.inf)
            self._answers[key] = known
            if len(self._answers) > _REMEMBERED:
                self._answers.popitem(last=False)
        self._answers.move_to_end(key)
        return known.proposal

    async def predict_save(self, profile_json: str, plan: Plan) -> SaveCost:
        """What a save of a generation with this plan takes."""
        return await asyncio.to_thread(_predict_save, profile_json, plan)

    async def check_profile(self, profile_json: str) -> str | None:
        """What is wrong with a profile document; None when nothing is."""
        return await asyncio.to_thread(_profile_error, profile_json)

    async def compare_profile(self, profile_json: str, plan: Plan, micro_batch_us: Mapping[int, float]) -> ProfileCheck:
        """Compare a profile with `micro_batch_us`: by rank, the time of a micro-batch, forward and backward. Some ranks
        may have none."""
        return await asyncio.to_thread(_examine, profile_json, plan, micro_batch_us)


def _warm_up(cache_dir: Path | None) -> None:
    load_planner(cache_dir)
    from varuna_planner.search.auto_config import warm_up

    warm_up()


def _profile_error(profile_json: str) -> str | None:
    from varuna_planner.profile.document import Profile

    try:
        Profile.from_json(profile_json)
    except Exception as error:  # a document that breaks the parser in any way is not a profile
        return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    return None


def _examine(profile_json: str, plan: Plan, micro_batch_us: Mapping[int, float]) -> ProfileCheck:
    from varuna_planner.profile.drift import StageMeasurement, expected, find_drift

    profile = parsed_profile(profile_json)
    gpu_types = tuple(gpu_type or profile.gpu_type for gpu_type in plan.gpu_types or ("",) * (plan.p * plan.d))
    bounds = [*plan.stage_starts, len(profile.sections)]
    groups: dict[tuple[int, str], list[int]] = {}
    for rank, gpu_type in enumerate(gpu_types):
        groups.setdefault((rank % plan.p, gpu_type), []).append(rank)
    stages = [
        StageMeasurement(
            first=bounds[stage],
            stop=bounds[stage + 1],
            replicas_us=tuple(micro_batch_us[rank] for rank in ranks if rank in micro_batch_us),
            gpu_type=gpu_type,
        )
        for (stage, gpu_type), ranks in groups.items()
    ]
    drift = find_drift(profile, plan.micro_batch, [stage for stage in stages if stage.replicas_us])
    expected_us = dict(zip(groups, expected(profile, plan.micro_batch, stages), strict=True))
    return ProfileCheck(
        gpu_types=gpu_types,
        expected_us=tuple(expected_us[rank % plan.p, gpu_type] for rank, gpu_type in enumerate(gpu_types)),
        guessed_types=frozenset(gpu_types).difference(profile.known_gpu_types),
        corrected_json=None if drift is None else drift.profile.to_json(),
        drift=None if drift is None else drift.reason,
    )


def _answer(question: PlanQuestion, cache_dir: Path | None) -> tuple[Proposal, bool]:
    """The answer, and whether it is a failure. Runs in a thread.

    A job that has trained waits after an error. So does a new one if the machine lacks something (space on its disk,
    memory); any other error is a defect, and fails it.
    """
    try:
        load_planner(cache_dir)
        return _choose(question), False
    except Exception as error:
        log = structlog.get_logger("varuna.planning")
        log.exception("the planner failed", gpus=len(question.devices), global_batch=question.spec.global_batch)
        reason = f"the planner failed on {count_of(len(question.devices), 'GPU')}: {type(error).__name__}: {error}"
        possible = question.previous_p is not None or is_machines_fault(error)
        again = "; it is asked again each minute" if possible else ""
        return Proposal(plan=None, possible=possible, reason=reason + again), True


def _choose(question: PlanQuestion) -> Proposal:
    devices = question.list_planned(question.devices)
    types, zones = question.count_types(devices), question.count_zones(devices)
    try:
        choice = question.choose_shape(len(devices), types=types, zones=zones)
    except ValueError as error:  # no fleet would suffice
        return Proposal(plan=None, possible=False, reason=str(error))
    candidates = tuple(candidate.to_dict() for candidate in choice.candidates[:_CANDIDATES_KEPT])
    if choice.best is None:
        flaw = _explain_no_fit(question)
        return Proposal(plan=None, candidates=candidates, reason=flaw or choice.reason, possible=not flaw)
    plan = choice.best
    placement = _place(plan, question)
    moves = _predict_moves(plan, placement, question)
    return Proposal(
        plan=plan,
        placement=placement,
        candidates=candidates,
        reason=choice.reason,
        present_examples_per_s=None if question.present is None else _predict_present(question, question.present),
        moves=moves,
        keeping=_propose_keeping(question),
    )


def _explain_no_fit(question: PlanQuestion) -> str:
    """Why the job, which has no plan for the present devices, gets none for any; empty: it may get one for others.

    A job that keeps its micro-batch waits for VMs on which it can, and one that has fitted somewhere for such VMs. Any
    other one may have as many as it wants of the largest devices that are there.
    """
    if question.has_fitted:
        return ""
    memories = [each.memory_bytes for each in question.gpu_types if each.memory_bytes]
    largest = max(memories, default=question.device_memory_bytes)
    free = replace(question, trained_micro_batch=None, device_memory_bytes=largest)
    plenty = free.choose_shape(question.spec.resources.max_gpus or _PLENTY_OF_GPUS)
    return plenty.reason if plenty.best is None else ""


def _predict_present(question: PlanQuestion, now: Plan) -> float | None:
    """The rate of the present plan by the present profile; None: it does not fit."""
    if max([now.p - 1, *now.stage_starts]) >= len(parsed_profile(question.profile_json).sections):
        return None  # it was made by the profile of another model
    from varuna_planner.search.auto_config import Pins
    from varuna_planner.search.mixed import predict_mixed_s

    if now.gpu_types:
        types = [GpuCount(name, count, None) for name, count in Counter(now.gpu_types).items()]
        took_s = predict_mixed_s(now, question.list_typed_gpus(types), gpus_per_vm=question.gpus_per_vm)
        return None if math.isinf(took_s) else now.global_batch / took_s
    pins = Pins(p=now.p, d=now.d, micro_batch=now.micro_batch)
    same = question.choose_shape(now.p * now.d, pins, zones=question.count_zones(question.previous)).best
    return same.examples_per_s if same is not None else None


def _propose_keeping(question: PlanQuestion) -> Proposal | None:
    """The best plan for the survivors alone that keeps the step under way; None: there is none.

    It is the best one of all, if the step can go on with its micro-batch, and otherwise the best one with that of the
    step.
    """
    if not question.survivors:
        return None
    from varuna_planner.search.auto_config import Pins

    wanted, kept = question.spec.plan, question.kept_micro_batch
    plan = _choose_for_survivors(question)
    if plan is None or shared_micro_batch(plan.micro_batch, kept) is None:
        if wanted.micro_batch not in (None, kept):
            return None
        plan = _choose_for_survivors(question, Pins(p=wanted.p, d=wanted.d, micro_batch=kept))
    if plan is None:
        return None
    of_survivors = replace(question, devices=question.survivors)
    placement = _place(plan, of_survivors)
    return Proposal(plan=plan, placement=placement, moves=_predict_moves(plan, placement, of_survivors))


def _choose_for_survivors(question: PlanQuestion, pins: Pins | None = None) -> Plan | None:
    """`pins`: None: the job's own."""
    devices = question.list_planned(question.survivors)
    try:
        return question.choose_shape(
            len(devices), pins, question.count_types(devices), question.count_zones(devices)
        ).best
    except ValueError:  # no fleet would suffice for it
        return None


def _place(plan: Plan, question: PlanQuestion) -> tuple[Device, ...]:
    from varuna_planner.placement import place, place_by_type

    previous = {device: rank for rank, device in enumerate(question.previous)}
    zones = dict(question.zones) or None
    if plan.gpu_types:
        gpu_types = {each.vm_id: each.gpu_type for each in question.gpu_types}
        return place_by_type(plan, question.devices, gpu_types, previous, previous_p=question.previous_p, zones=zones)
    return place(plan.p, plan.d, question.devices, previous, previous_p=question.previous_p, zones=zones)


def _predict_save(profile_json: str, plan: Plan) -> SaveCost:
    """The largest stage's state is copied within the VM, and then written over its link.

    No copy is assumed to take longer than the planner assumes for all models: a GPU's is faster than one in memory.
    """
    profile = parsed_profile(profile_json)
    bounds = [*(plan.stage_starts or (0,)), len(profile.sections)]
    stages = [profile.sections[first:stop] for first, stop in pairwise(bounds)]
    state_bytes = max((sum(section.state_bytes for section in stage) for stage in stages), default=0)
    return SaveCost(
        stall_s=min(state_bytes / MEMORY_BYTES_PER_S, StopCosts.save_stall_s),
        write_s=state_bytes / profile.links.other_vm.bandwidth_bytes_per_s,
        beside_passes=profile.is_of_accelerator,
    )


def _predict_moves(plan: Plan, placement: tuple[Device, ...], question: PlanQuestion) -> StateMoves:
    """The time in which processes take the state from those of the previous generation; 0: there are none."""
    profile, starts = parsed_profile(question.profile_json), question.previous_starts
    if not starts or len(starts) != question.previous_p or max((*starts, *plan.stage_starts)) >= len(profile.sections):
        return NO_MOVES
    return predict_moving(
        [section.state_bytes for section in profile.sections],
        [section.value_bytes for section in profile.sections],
        profile.links.other_vm.bandwidth_bytes_per_s,
        stage_starts=plan.stage_starts,
        placement=placement,
        held_starts=starts,
        holders=question.previous,
    )
