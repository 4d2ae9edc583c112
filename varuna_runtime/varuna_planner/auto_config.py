"""The choice of a plan: P stages × D replicas, micro-batch m, cuts, recompute and run-ahead, from a profile.

Letters: G GPUs, K sections, B examples in the global batch, m in a micro-batch, M micro-batches of the global batch, N
of one replica.

The search is best first: every (m, P, D) worth a thought gets a rough lower bound; the lowest is refined, then
simulated, until no bound is left below the best simulated time. So the best is the best of all, though few are
simulated.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from math import inf
from typing import Any

import numpy as np
import numpy.typing as npt

from varuna_planner import balance as cutting
from varuna_planner.balance import Cost, Cuts, Network, SectionTable
from varuna_planner.batching import count_micro_batches, micro_batch_sizes
from varuna_planner.memory import human, usable_bytes
from varuna_planner.profile import Measurement, Profile, Section
from varuna_planner.schedule import Policy
from varuna_planner.simulator import simulate

__all__ = ["Candidate", "Choice", "Pins", "Plan", "choose_plan", "warm_up"]

IMPROVEMENT = 0.03
"""F(m)/m has stopped improving when no larger m betters it by more than this part: the noise of measurement."""

RUN_AHEAD_STAGES = 2
"""Run-ahead asked for, in units of P, when memory is free: by it jitter costs least (ANCHORS, schedules)."""


ALL_REPLICAS = 8
"""Up to so many replicas, every number of them is tried."""


@dataclass(frozen=True, kw_only=True)
class Pins:
    """What the user fixes; None leaves it to the planner."""

    p: int | None = None
    d: int | None = None
    micro_batch: int | None = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a job runs on P × D GPUs."""

    p: int
    d: int
    micro_batch: int
    """Examples."""
    global_batch: int
    """Examples."""
    stage_starts: tuple[int, ...]
    """First section of each stage."""
    policy: str
    run_ahead: int
    recompute: tuple[bool, ...]
    """Per stage."""
    predicted_minibatch_s: float
    examples_per_s: float
    memory_bytes: tuple[int, ...]
    """Per stage: predicted peak."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A shape that was considered."""

    p: int
    d: int
    micro_batch: int
    predicted_minibatch_s: float | None
    """Simulated; a lower bound when `reason` says "at least"; None when it does not fit."""
    fits: bool
    """In memory."""
    reason: str
    """Why it won or lost, in words."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The answer: the best plan, or why there is none, with all that was considered, best first."""

    best: Plan | None
    candidates: tuple[Candidate, ...]
    reason: str
    elapsed_ms: float = 0.0
    """Filled in by the caller: nothing here reads a clock."""


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class _Shape:
    """A candidate that fits."""

    table: SectionTable
    p: int
    cost: Cost
    cuts: Cuts
    bound_us: float
    """N times the work of the busiest stage: a rough lower bound."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Drawn:
    """A shape with its stages."""

    shape: _Shape
    bounds: npt.NDArray[np.int64]
    recompute: npt.NDArray[np.bool_]
    run_ahead: int
    bound_us: float


def choose_plan(
    profile: Profile,
    *,
    gpus: int,
    global_batch: int,
    device_memory_bytes: int | None,
    gpus_per_vm: int = 1,
    pins: Pins = Pins(),
    policy: Policy = Policy.WORK_CONSERVING,
) -> Choice:
    """The fastest plan for `gpus` equal devices, which may leave some of them unused.

    Args:
        profile: what calibration measured.
        gpus: G, devices there are. 0, or too few for the model or the pins, gives a Choice without a plan.
        global_batch: B, examples.
        device_memory_bytes: of each device; None when not known: then memory limits nothing.
        gpus_per_vm: devices of each VM, for which hops stay inside one.
        pins: what the user has fixed.
        policy: the schedule.

    Raises:
        ValueError: a value is out of range, or a pin can never be met, whatever the fleet.
    """
    _check(profile, global_batch, gpus_per_vm, pins)
    if gpus < 1:
        return Choice(best=None, candidates=(), reason="there are no GPUs")
    search = _Search(profile, gpus, global_batch, device_memory_bytes, gpus_per_vm, pins, policy)
    shapes: list[_Shape] = []
    unfit: list[Candidate] = []
    for micro_batch in search.micro_batches():
        for found in search.shapes(micro_batch):
            if isinstance(found, _Shape):
                shapes.append(found)
            else:
                unfit.append(found)
    if not shapes:
        return Choice(best=None, candidates=tuple(unfit), reason=search.why_none(bool(unfit)))
    return _choose_among(search, shapes, unfit)


def _choose_among(search: _Search, shapes: list[_Shape], unfit: list[Candidate]) -> Choice:
    """Refines and simulates the lowest bound while it could still win."""
    # (time or bound, GPUs, P, m, place): on equal times fewer GPUs win, then fewer stages.
    queue = [
        (shape.bound_us, shape.p * shape.cost.d, shape.p, shape.table.micro_batch, place)
        for place, shape in enumerate(shapes)
    ]
    heapq.heapify(queue)
    drawn: dict[int, _Drawn] = {}
    simulated: list[tuple[float, int, int, int, int]] = []
    while queue and (not simulated or queue[0][0] < simulated[0][0]):
        _, *rest, place = heapq.heappop(queue)
        if place not in drawn:
            drawn[place] = search.draw(shapes[place])
            heapq.heappush(queue, (drawn[place].bound_us, rest[0], rest[1], rest[2], place))
        else:
            heapq.heappush(simulated, (search.simulate_us(drawn[place]), rest[0], rest[1], rest[2], place))
    best = search.plan(drawn[simulated[0][-1]], simulated[0][0])
    candidates: list[Candidate] = []
    for least, entries in (("", sorted(simulated)), ("at least ", sorted(queue))):
        for time_us, gpus, p, micro_batch, place in entries:
            won = not candidates
            candidates.append(
                Candidate(
                    p=p,
                    d=shapes[place].cost.d,
                    micro_batch=micro_batch,
                    predicted_minibatch_s=time_us / 1e6,
                    fits=True,
                    reason="the fastest" if won else least + _why_lost(time_us / 1e6, gpus, best),
                )
            )
    reason = (
        f"{best.p}×{best.d}, micro-batch {best.micro_batch}: {best.examples_per_s:.4g} examples/s predicted, "
        f"the fastest of {len(shapes)} shapes that fit {search.gpus} GPUs"
    )
    unused = search.gpus - best.p * best.d
    if unused:
        reason += f"; {unused} GPUs are left unused, for more would not make it faster"
    return Choice(best=best, candidates=(*candidates, *unfit), reason=reason)


def _why_lost(time_s: float, gpus: int, best: Plan) -> str:
    """A time beside the best one's; what follows "at least" when the time is a bound."""
    slower = time_s / best.predicted_minibatch_s - 1 if best.predicted_minibatch_s > 0 else 0.0
    versus = f"{best.p}×{best.d} with micro-batch {best.micro_batch}"
    if slower >= 0.0005:
        return f"{slower:.1%} slower than {versus}"
    more = gpus - best.p * best.d
    return f"as slow as {versus}" + (f", on {more} GPUs more" if more > 0 else "")


def _check(profile: Profile, global_batch: int, gpus_per_vm: int, pins: Pins) -> None:
    sections = len(profile.sections)
    if global_batch < 1:
        raise ValueError(f"global_batch is {global_batch}: it needs at least 1 example")
    if gpus_per_vm < 1:
        raise ValueError(f"gpus_per_vm is {gpus_per_vm}: a VM needs at least 1")
    for name, pinned in (("p", pins.p), ("d", pins.d), ("micro_batch", pins.micro_batch)):
        if pinned is not None and pinned < 1:
            raise ValueError(f"{name}={pinned} is pinned but must be at least 1")
    if pins.p is not None and pins.p > sections:
        raise ValueError(
            f"p={pins.p} is pinned but the model has {sections} sections, so at most {sections} stages: "
            f"pin p to at most {sections}, or add cut-points"
        )
    if pins.micro_batch is not None and pins.micro_batch > global_batch:
        raise ValueError(
            f"micro_batch={pins.micro_batch} is pinned but the global batch has only {global_batch} examples: "
            f"pin at most {global_batch}, or enlarge the global batch"
        )
    if pins.d is not None:
        # Without a pinned micro-batch it may be as small as the smallest that was measured.
        smallest = pins.micro_batch or min(global_batch, profile.micro_batches[0])
        most = count_micro_batches(global_batch, smallest)
        if pins.d > most:
            raise ValueError(
                f"d={pins.d} is pinned but a global batch of {global_batch} has at most {most} micro-batches "
                f"(of {smallest}), and every replica needs one: pin d to at most {most}, or enlarge the global batch"
            )


def warm_up() -> None:
    """Compiles what `choose_plan` runs (some ten seconds on a machine that has not yet; numba caches it)."""
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
        Section(index=i, name=str(i), parameter_bytes=1, optimizer_bytes=1, gradient_bytes=1, measurements=(one,))
        for i in range(2)
    )
    pins = Pins(p=2)
    choose_plan(Profile(sections=sections), gpus=2, global_batch=4, device_memory_bytes=1000, pins=pins)


class _Search:
    """One question, and what its candidates share."""

    def __init__(
        self,
        profile: Profile,
        gpus: int,
        global_batch: int,
        device_memory_bytes: int | None,
        gpus_per_vm: int,
        pins: Pins,
        policy: Policy,
    ) -> None:
        self.profile, self.gpus, self.global_batch = profile, gpus, global_batch
        self.pins, self.policy = pins, policy
        self.limited = device_memory_bytes is not None
        self.usable = usable_bytes(device_memory_bytes)
        self.network: Network = cutting.network(profile, gpus=gpus, gpus_per_vm=gpus_per_vm)

    def micro_batches(self) -> list[int]:
        """Sizes to try: measured, no larger than the global batch, up to where F(m)/m stops improving (paper, 4.4).

        Smaller ones stay: they cut a small global batch among more GPUs and need less memory.
        """
        if self.pins.micro_batch is not None:
            return [self.pins.micro_batch]
        sizes = [size for size in self.profile.micro_batches if size <= self.global_batch]
        if not sizes:
            return [self.global_batch]
        per_example = [sum(m.forward_us + m.backward_us for m in self.profile.at(size)) / size for size in sizes]
        enough = next(i for i, us in enumerate(per_example) if us <= min(per_example) * (1 + IMPROVEMENT))
        return sizes[: enough + 1]

    def table(self, micro_batch: int) -> SectionTable:
        return cutting.section_table(self.profile, micro_batch, micro_batch_sizes(self.global_batch, micro_batch)[-1])

    def shapes(self, micro_batch: int) -> Iterator[_Shape | Candidate]:
        """Every P and some D at a micro-batch size: a shape, or a candidate that does not fit."""
        table = self.table(micro_batch)
        count = count_micro_batches(self.global_batch, micro_batch)
        most_stages = min(table.sections, self.gpus)
        cuts: dict[int, Cuts] = {}
        for p in [self.pins.p] if self.pins.p else range(1, most_stages + 1):
            for d in self.replicas(p, count):
                cost = Cost(N=-(-count // d), d=d)
                # A stage has at most P in flight before run-ahead: from N = P on, or without limit, cuts are the same.
                in_flight = min(cost.N, most_stages) if self.limited else most_stages
                if in_flight not in cuts:
                    cuts[in_flight] = self.cuts(table, in_flight, most_stages)
                busiest_us = cuts[in_flight].busiest_us(p)
                if busiest_us == inf:
                    reason = self.too_big(p)
                    yield Candidate(
                        p=p, d=d, micro_batch=micro_batch, predicted_minibatch_s=None, fits=False, reason=reason
                    )
                    break  # with fewer replicas each has more micro-batches, and its stages no less in flight
                else:
                    full = cost.N - 1 if cost.short_last else cost.N
                    yield _Shape(table=table, p=p, cost=cost, cuts=cuts[in_flight], bound_us=full * busiest_us)

    def draw(self, shape: _Shape) -> _Drawn:
        """The shape's stages, with what memory makes of them, and a closer bound."""
        table, N = shape.table, shape.cost.N
        bounds = shape.cuts.bounds(shape.p)
        assert bounds is not None, "a shape fits"
        usable, policy = self.usable, self.policy
        recompute = cutting.recompute_where_needed(table, bounds, usable_bytes=usable, policy=policy, N=N)
        run_ahead = 0
        if shape.p > 1 and self.policy in (Policy.VARUNA, Policy.WORK_CONSERVING):
            most = min(RUN_AHEAD_STAGES * shape.p, N - 1)
            run_ahead = cutting.largest_run_ahead(
                table, bounds, recompute, usable_bytes=usable, policy=policy, N=N, most=most
            )
        bound_us = cutting.bound_us(
            table, self.network, bounds, recompute, shape.cost, policy=self.policy, run_ahead=run_ahead
        )
        return _Drawn(shape=shape, bounds=bounds, recompute=recompute, run_ahead=run_ahead, bound_us=bound_us)

    def replicas(self, p: int, count: int) -> list[int]:
        """The numbers of replicas to try with p stages, the most first.

        Of those with the same N only the fewest: more would cost GPUs and all-reduce for nothing. All of these for up
        to ALL_REPLICAS; beyond, as many as there can be, the nearest below, and then by halves, since where all-reduce
        is slow far fewer are faster.
        """
        most = min(self.gpus // p, count)
        if self.pins.d is not None:
            return [self.pins.d] if self.pins.d <= most else []
        if most <= ALL_REPLICAS:
            tried: Iterable[int] = range(1, most + 1)
        else:
            tried = [most, most - 1, *(most >> halvings for halvings in range(1, most.bit_length()))]
        return sorted({-(-count // -(-count // d)) for d in tried}, reverse=True)

    def cuts(self, table: SectionTable, N: int, most_stages: int) -> Cuts:
        return cutting.balance(table, usable_bytes=self.usable, policy=self.policy, N=N, most_stages=most_stages)

    def simulate_us(self, drawn: _Drawn) -> float:
        pipeline = cutting.pipeline(drawn.shape.table, self.network, drawn.bounds, drawn.recompute, drawn.shape.cost)
        return simulate(pipeline, self.policy, run_ahead=drawn.run_ahead).makespan_us

    def plan(self, drawn: _Drawn, time_us: float) -> Plan:
        shape = drawn.shape
        memory = cutting.stage_memory(
            shape.table,
            drawn.bounds,
            drawn.recompute,
            policy=self.policy,
            N=shape.cost.N,
            run_ahead=drawn.run_ahead,
        )
        return Plan(
            p=shape.p,
            d=shape.cost.d,
            micro_batch=shape.table.micro_batch,
            global_batch=self.global_batch,
            stage_starts=tuple(int(start) for start in drawn.bounds[:-1]),
            policy=self.policy.value,
            run_ahead=drawn.run_ahead,
            recompute=tuple(bool(flag) for flag in drawn.recompute),
            predicted_minibatch_s=time_us / 1e6,
            examples_per_s=self.global_batch / (time_us / 1e6) if time_us > 0 else inf,
            memory_bytes=memory,
        )

    def too_big(self, p: int) -> str:
        return (
            f"does not fit: cut into {p} {'stage' if p == 1 else 'stages'}, one always needs more than the "
            f"{human(self.usable)} that a device has to give"
        )

    def why_none(self, any_unfit: bool) -> str:
        """Why there is no plan at all, and what to do about it."""
        if not any_unfit:
            wanted = " and ".join(f"{n}={v}" for n, v in (("p", self.pins.p), ("d", self.pins.d)) if v is not None)
            needed = (self.pins.p or 1) * (self.pins.d or 1)
            return f"{wanted} pinned needs {needed} GPUs and there are {self.gpus}: wait for more, or unpin"
        micro_batch = self.micro_batches()[0]
        table = self.table(micro_batch)
        cuts = self.cuts(table, table.sections, table.sections)
        fitting = next((p for p in range(1, table.sections + 1) if cuts.bounds(p) is not None), None)
        if fitting is None or self.pins.p is not None:
            heaviest = max(range(table.sections), key=lambda i: _alone(table, i))
            return (
                f"the model does not fit devices with {human(self.usable)} to give, however it is cut"
                + (f" into p={self.pins.p} stages" if self.pins.p is not None else "")
                + f" (section {self.profile.sections[heaviest].name} alone needs {human(_alone(table, heaviest))} "
                f"at micro-batch {micro_batch}): use devices with more memory, a smaller micro-batch or more cut-points"
            )
        return (
            f"the model needs at least {fitting * (self.pins.d or 1)} GPUs with {human(self.usable)} to give each, "
            f"and there are {self.gpus}: wait for more"
        )


def _alone(table: SectionTable, section: int) -> int:
    """Bytes of one section as a stage with one micro-batch in flight."""
    state, activation = (int(sums[section + 1] - sums[section]) for sums in (table.state_bytes, table.activation_bytes))
    return state + activation + int(table.input_bytes[section] + table.working_bytes[section])
