"""The choice of a plan: P stages × D replicas, micro-batch m, cuts, recompute and run-ahead, from a profile.

Letters: G GPUs, K sections, B examples in the global batch, m in a micro-batch, M micro-batches of the global batch, N
of one replica, k run-ahead.

The search covers every useful m, every P and every D; of the D with the same N, the smallest. Each shape is cut with
room for a run-ahead of 0, P and 2P micro-batches. Its cut is the one whose busiest stage has the least work: forward,
backward, and recompute where memory demands it. Its k is the largest for which memory is left. Its time is the
simulator's.

The search is best first: every shape gets a rough lower bound; the shape with the lowest bound is cut, which gives a
closer bound, and then simulated, until no bound is below the best time. So the best plan is the best of all, though few
shapes are simulated.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

import numpy as np
import numpy.typing as npt

from varuna_planner.cutting import _tables
from varuna_planner.cutting import balance as cutting
from varuna_planner.memory import human, usable_bytes
from varuna_planner.profile.document import Measurement, Profile, SectionProfile
from varuna_planner.schedule.batching import count_micro_batches
from varuna_planner.schedule.policies import Policy, require_executable
from varuna_planner.search import _enumerate, _search
from varuna_planner.search.candidates import PlanCandidate, PlanCandidates
from varuna_planner.search.pins import NO_PINS, Pins
from varuna_planner.simulator.simulation import simulate
from varuna_proto.plan import Plan
from varuna_proto.wording import count_are, count_of, render_rate

__all__ = [
    "Pins",
    "PlanCandidate",
    "PlanCandidates",
    "PlanChoice",
    "choose_plan",
    "list_micro_batches",
    "make_search_limits",
    "warm_up",
]

IMPROVEMENT = 0.03
"""F(m)/m has stopped improving when no larger m improves it by more than this share, the noise of measurement."""


@dataclass(frozen=True, kw_only=True)
class PlanChoice:
    """The best plan, or the reason why there is none, with all candidates, best first."""

    best: Plan | None
    candidates: PlanCandidates | tuple[()]
    reason: str
    elapsed_ms: float = 0.0
    """Filled in by the caller: nothing here reads a clock."""

    @property
    def examples_per_s(self) -> float:
        """Predicted; 0: there is no plan."""
        return 0.0 if self.best is None else self.best.examples_per_s


def choose_plan(
    profile: Profile,
    *,
    gpus: int,
    global_batch: int,
    device_memory_bytes: int | None,
    gpus_per_vm: int = 1,
    pins: Pins = NO_PINS,
    policy: Policy = Policy.WORK_CONSERVING,
) -> PlanChoice:
    """The fastest plan for `gpus` equal devices, which may leave some of them unused.

    Args:
        profile: what calibration measured.
        gpus: G, the number of devices. 0, or too few for the model or the pins, gives a choice without a plan.
        global_batch: B, examples.
        device_memory_bytes: of each device; None: memory sets no limit.
        gpus_per_vm: devices of each VM; between them, links are fast.
        pins: what the user has fixed.
        policy: the schedule.

    Raises:
        ValueError: a value is out of range, or a pin can never be met, whatever the fleet.
    """
    _check(profile, global_batch, gpus_per_vm, pins)
    require_executable(policy)
    if gpus < 1:
        return PlanChoice(best=None, candidates=(), reason="there are no GPUs")

    def search(pins: Pins) -> PlanChoice:
        return _Search(
            profile,
            gpus=gpus,
            global_batch=global_batch,
            device_memory_bytes=device_memory_bytes,
            gpus_per_vm=gpus_per_vm,
            pins=pins,
            policy=policy,
        ).find_best()

    choice = search(pins)
    if choice.best is not None or pins.d is not None or device_memory_bytes is None:
        return choice
    # Cuts leave room for the copies of gradients that replicas sum. One replica needs none.
    alone = search(replace(pins, d=1))
    return choice if alone.best is None else alone


def _check(profile: Profile, global_batch: int, gpus_per_vm: int, pins: Pins) -> None:
    if global_batch < 1:
        raise ValueError(f"global_batch is {global_batch}: it needs at least 1 example")
    if gpus_per_vm < 1:
        raise ValueError(f"gpus_per_vm is {gpus_per_vm}: a VM needs at least 1")
    pins.check_pins(sections=len(profile.sections), global_batch=global_batch, smallest=profile.micro_batches[0])


def make_search_limits(profile: Profile, usable: int, policy: Policy) -> _tables.SearchLimits:
    """`usable`: bytes of a device that a plan may use."""
    return _tables.SearchLimits(
        usable_bytes=usable,
        policy=policy.code,
        staged=profile.is_of_accelerator,
        runs_ahead=policy in (Policy.VARUNA, Policy.WORK_CONSERVING),
        counts_stages=policy is not Policy.GPIPE,
    )


def list_micro_batches(profile: Profile, global_batch: int) -> list[int]:
    """Sizes to try: measured, no larger than the global batch, up to where F(m)/m stops improving (paper, 4.4).

    Smaller ones stay: they divide a small global batch among more GPUs and need less memory.
    """
    sizes = [size for size in profile.micro_batches if size <= global_batch]
    if not sizes:
        return [global_batch]
    tables = cutting.section_tables(profile, [(size, size) for size in sizes])
    per_example = (tables.forward_us[:, 0, -1] + tables.backward_us[:, 0, -1]) / np.array(sizes)
    return sizes[: int(np.argmax(per_example <= per_example.min() * (1 + IMPROVEMENT))) + 1]


def warm_up() -> None:
    """Compiles the code of `choose_plan`: some thirty seconds on a new machine, then numba has it in its cache."""
    one = Measurement(
        micro_batch=1,
        forward_us=1,
        backward_us=2,
        recompute_us=1,
        output_bytes=1,
        input_bytes=1,
        activation_bytes=1,
    )
    sections = tuple(
        SectionProfile(
            index=i, name=str(i), parameter_bytes=1, optimizer_bytes=1, gradient_bytes=1, measurements=(one,)
        )
        for i in range(2)
    )
    pins = Pins(p=2)
    choose_plan(Profile(sections=sections), gpus=2, global_batch=4, device_memory_bytes=1000, pins=pins)


@dataclass(frozen=True, kw_only=True, eq=False)
class _StagedShape:
    """A shape with its stages."""

    busiest_us: float
    """Work of its busiest stage for one micro-batch; infinite if no cut fits."""
    run_ahead: int
    starts: npt.NDArray[np.int64]
    """[P + 1]."""
    recompute: npt.NDArray[np.bool_]
    needed_bytes: npt.NDArray[np.int64]
    """[P]."""
    finish_us: float
    """The longest all-reduce of any stage, as far as it does not overlap the backward."""


class _Search:
    """One search, with everything that its candidates share."""

    def __init__(
        self,
        profile: Profile,
        *,
        gpus: int,
        global_batch: int,
        device_memory_bytes: int | None,
        gpus_per_vm: int,
        pins: Pins,
        policy: Policy,
    ) -> None:
        self.profile, self.gpus, self.global_batch = profile, gpus, global_batch
        self.pins, self.policy, self.device_memory_bytes = pins, policy, device_memory_bytes
        self.sizes = [pins.micro_batch] if pins.micro_batch is not None else list_micro_batches(profile, global_batch)
        counts = [count_micro_batches(global_batch, m) for m in self.sizes]
        lasts = [global_batch - m * (count - 1) for m, count in zip(self.sizes, counts, strict=True)]
        self.sections = cutting.section_tables(
            profile, list(zip(self.sizes, lasts, strict=True)), sums_gradients=gpus > 1 and pins.d != 1
        )
        self.network = cutting.make_network_costs(profile, gpus=gpus, gpus_per_vm=gpus_per_vm)
        self.limits = make_search_limits(profile, usable_bytes(device_memory_bytes), policy)
        self.problem, self.shapes = self._enumerate(np.array(counts))
        self.best: Plan | None = None
        self.best_parts_us = (0.0, 0.0, 0.0)
        self.best_index = -1

    def find_best(self) -> PlanChoice:
        rough_us = self.shapes.time_us
        self.shapes, best, level, time_us = self._find(np.argsort(rough_us))
        shapes = self.shapes
        if best >= 0:  # none is faster, also where the bound that proves it was not kept
            others = shapes.state != _tables.SIMULATED
            shapes.time_us[others] = np.maximum(shapes.time_us[others], time_us)
        simulated = shapes.state == _tables.SIMULATED
        candidates = PlanCandidates(
            p=shapes.p,
            time_us=shapes.time_us,
            simulated=simulated,
            rough_us=rough_us,
            chosen=best,
            render=self._row,
            simulate=self._look_closer,
        )
        if best < 0:
            return PlanChoice(best=None, candidates=candidates, reason=self._explain_no_plan())
        self.best_index, drawn = best, self._draw(best, level)
        self.best = plan = self._plan(best, drawn, time_us)
        self.best_parts_us = self._parts_us(best, drawn, time_us)
        fitting = int((shapes.state != _tables.UNFIT).sum())
        reason = (
            f"{plan.p}×{plan.d}, micro-batch {plan.micro_batch}: {render_rate(plan.examples_per_s)} examples/s "
            f"predicted, the fastest of {fitting} shapes for {count_of(self.gpus, 'GPU')}"
        )
        unused = self.gpus - plan.p * plan.d
        if unused:
            reason += f"; {count_are(unused, 'GPU')} left unused, because more would not make it faster"
        return PlanChoice(best=plan, candidates=candidates, reason=reason)

    def _enumerate(self, counts: npt.NDArray[np.int64]) -> tuple[_tables.SearchProblem, _tables.ShapeTable]:
        sections, pins = self.sections, self.pins
        S, K = sections.inputs.shape
        most = min(K, self.gpus)
        lowest, highest = (pins.p, min(pins.p, most)) if pins.p else (1, most)
        tables = _tables.FreeCuts(
            free_us=np.empty((S, highest + 1)),
            free_end=np.empty((S, highest + 1, K + 1), dtype=np.int16),
            least_us=np.empty((S, highest + 1)),
        )
        problem = _tables.SearchProblem(sections, self.network, self.limits, tables)
        total = _enumerate.count_shapes(counts, self.gpus, lowest, highest, pins.d or 0)
        size, p, d, n, state = np.empty((5, total), dtype=np.int64)
        shapes = _tables.ShapeTable(size, p, d, n, state, np.empty(total))
        found = _enumerate.fill_shape_table(problem, counts, self.gpus, lowest, pins.d or 0, shapes)
        return problem, _tables.ShapeTable._make(column[:found] for column in shapes)

    def _find(self, among: npt.NDArray[np.int64]) -> tuple[_tables.ShapeTable, int, int, float]:
        """(all shapes with their new states and times, the best of those `among` or -1, its level, its time).

        `among`: numbers of shapes, by bound.
        """
        simulated: dict[int, float] = {}
        while True:
            found = self.shapes._replace(state=self.shapes.state.copy(), time_us=self.shapes.time_us.copy())
            shapes, times = np.array([*simulated], dtype=np.int64), np.array([*simulated.values()], dtype=np.float64)
            best, level, _, time_us = _search.search_shapes(self.problem, found, among, shapes, times)
            if time_us >= 0:
                return found, best, level, time_us
            simulated[best * _tables.LEVELS + level] = self._simulated_us(best, level)

    def _look_closer(self, index: int) -> float:
        """The time of shape number `index`, for which the search has only a bound."""
        shapes = self.shapes
        assert self.best is not None, "where none is the best none has a bound"
        _, found, _, time_us = self._find(np.array([index]))
        fits = found == index
        shapes.state[index] = _tables.SIMULATED if fits else _tables.UNFIT
        shapes.time_us[index] = max(time_us, self.best.predicted_minibatch_s * 1e6) if fits else inf
        return float(shapes.time_us[index])

    def _simulated_us(self, index: int, level: int) -> float:
        """The simulator's time, for policies that the search does not run itself."""
        shapes, drawn = self.shapes, self._draw(index, level)
        size, n, d = int(shapes.size[index]), int(shapes.n[index]), int(shapes.d[index])
        pipeline = cutting.make_pipeline(
            self.sections, self.network, drawn.starts, drawn.recompute, N=n, d=d, size=size
        )
        return simulate(pipeline, self.policy, run_ahead=drawn.run_ahead).makespan_us

    def _draw(self, index: int, level: int = 0) -> _StagedShape:
        """The stages of shape number `index`, with room for that level of run-ahead."""
        shapes = self.shapes
        a, p, d, n = (int(column[index]) for column in (shapes.size, shapes.p, shapes.d, shapes.n))
        busiest, k, starts, recompute, needed, times = _search.draw_cut(self.problem, a, p, d, n, level)
        return _StagedShape(
            busiest_us=busiest,
            run_ahead=k,
            starts=starts,
            recompute=recompute,
            needed_bytes=needed,
            finish_us=float(times.finish.max()),
        )

    def _plan(self, index: int, drawn: _StagedShape, time_us: float) -> Plan:
        return Plan(
            p=int(self.shapes.p[index]),
            d=int(self.shapes.d[index]),
            micro_batch=self.sizes[self.shapes.size[index]],
            global_batch=self.global_batch,
            stage_starts=tuple(int(start) for start in drawn.starts[:-1]),
            policy=self.policy.value,
            run_ahead=drawn.run_ahead,
            recompute=tuple(bool(flag) for flag in drawn.recompute),
            predicted_minibatch_s=time_us / 1e6,
            examples_per_s=self.global_batch / (time_us / 1e6) if time_us > 0 else inf,
            memory_bytes=tuple(int(count) for count in drawn.needed_bytes),
            link_connections=self.profile.links.other_vm.connections,
        )

    def _parts_us(self, index: int, drawn: _StagedShape, time_us: float) -> tuple[float, float, float]:
        """A mini-batch's time in three: the busiest stage's work, all-reduce, and the rest."""
        shapes = self.shapes
        # With one replica the last micro-batch may be smaller; with several, the busiest one has full ones only.
        alone = self.global_batch / self.sizes[shapes.size[index]]
        work = (alone if shapes.d[index] == 1 else int(shapes.n[index])) * drawn.busiest_us
        rest = time_us - work - drawn.finish_us
        return work, drawn.finish_us, rest if rest > 1e-9 * time_us else 0.0

    def _row(self, index: int) -> PlanCandidate:
        """The candidate of shape number `index`."""
        shapes = self.shapes
        p, d, m = int(shapes.p[index]), int(shapes.d[index]), self.sizes[shapes.size[index]]
        drawn = self._draw(index)
        if drawn.busiest_us == inf:
            return PlanCandidate(
                p=p, d=d, micro_batch=m, predicted_minibatch_s=None, fits=False, reason=self._explain_misfit(p)
            )
        time_us = float(shapes.time_us[index])
        reason = "the fastest" if index == self.best_index else self._explain_slowness(index, drawn, time_us)
        return PlanCandidate(p=p, d=d, micro_batch=m, predicted_minibatch_s=time_us / 1e6, fits=True, reason=reason)

    def _explain_slowness(self, index: int, drawn: _StagedShape, time_us: float) -> str:
        """By how much a shape is slower than the best plan, and which part of the time costs it most."""
        best = self.best
        assert best is not None, "a shape that fits is simulated if no other is"
        least = "" if self.shapes.state[index] == _tables.SIMULATED else "at least "
        best_us = best.predicted_minibatch_s * 1e6
        slower = time_us / best_us - 1 if best_us > 0 else 0.0
        versus = f"{best.p}×{best.d} with micro-batch {best.micro_batch}"
        if slower < 0.0005:
            more = int(self.shapes.p[index] * self.shapes.d[index]) - best.p * best.d
            unit = "GPU" if more == 1 else "GPUs"
            return f"{least}as slow as {versus}" + (f", on {more} more {unit}" if more > 0 else "")
        parts = self._parts_us(index, drawn, time_us)
        names = ("its busiest stage works", "its all-reduce takes", "filling the pipeline and waiting take")
        loss, name, own, other = max(
            (own - other, name, own, other) for own, other, name in zip(parts, self.best_parts_us, names, strict=True)
        )
        why = f": {name} {own / 1e6:.4g} s instead of {other / 1e6:.4g} s" if loss > 0 else ""
        return f"{least}{slower:.1%} slower than {versus}{why}"

    def _explain_misfit(self, p: int) -> str:
        state = int(self.sections.state_bytes[-1])
        return (
            f"does not fit: in {p} {'stage' if p == 1 else 'stages'}, one of them always needs more than the "
            f"{human(self.limits.usable_bytes)} that a device offers (parameters, gradients and optimizer alone "
            f"are {human(state // p)} a stage)"
        )

    def _explain_no_plan(self) -> str:
        """Why there is no plan at all, and what to do about it."""
        pins, usable = self.pins, human(self.limits.usable_bytes)
        if len(self.shapes.p) == 0:
            wanted = " and ".join(f"{n}={v}" for n, v in (("p", pins.p), ("d", pins.d)) if v is not None)
            needed = (pins.p or 1) * (pins.d or 1)
            gpus = count_of(needed, "GPU")
            return f"{wanted} pinned needs {gpus} and only {self.gpus} can be used: wait for more, or unpin"
        fitting = self._fewest_stages()
        if fitting is None or pins.p is not None:
            one, size = self.sections, self.sizes[0]
            passes = np.diff(one.activation_bytes[0]) + one.inputs[0] + one.working[0]
            alone = np.diff(one.state_bytes) + np.maximum(passes, np.diff(one.update_bytes))
            optimizer = np.array([section.optimizer_bytes for section in self.profile.sections])
            heaviest = int(np.argmax(alone))
            ways = ["devices with more memory", "more cut-points"]
            if size > 1:
                ways.append("a smaller micro-batch")
            if (alone - optimizer).max() <= self.limits.usable_bytes < alone.max():
                ways.append("the optimizer on the host (offload_optimizer=True)")
            return (
                f"the model does not fit devices with {usable} to give, however it is cut"
                + (f" into p={pins.p} stages" if pins.p is not None else "")
                + f" (section {self.profile.sections[heaviest].name} alone needs {human(int(alone[heaviest]))} "
                f"at micro-batch {size}): use {', '.join(ways[:-1])} or {ways[-1]}"
            )
        needed = fitting * (pins.d or 1)
        if needed <= self.gpus:
            return (
                f"the model fits {count_of(needed, 'GPU')} with {usable} to give each, but not with all micro-batches "
                f"that a stage holds at a time with the schedule {self.policy.value!r}: use devices with more memory, "
                f"more GPUs than {self.gpus}, or another schedule"
            )
        return (
            f"the model needs at least {count_of(needed, 'GPU')} with {usable} to give each, "
            f"and there are {self.gpus}: wait for more"
        )

    def _fewest_stages(self) -> int | None:
        """How many the smallest micro-batch needs on any fleet; None when no number will do."""
        stages, m = len(self.profile.sections), self.sizes[0]
        pins = Pins(micro_batch=m, d=1)
        plenty = _Search(
            self.profile,
            gpus=stages,
            global_batch=m * stages,
            device_memory_bytes=self.device_memory_bytes,
            gpus_per_vm=self.network.gpus_per_vm,
            pins=pins,
            policy=self.policy,
        )
        return next((p for p in range(1, stages + 1) if plenty._draw(p - 1).busiest_us < inf), None)
