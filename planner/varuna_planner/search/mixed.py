"""The choice of a plan for GPUs of several types.

Letters: T types of GPU, G GPUs, P stages, D replicas, K sections, m examples in a micro-batch, M micro-batches of the
global batch, N of one replica, k run-ahead.

There are two ways to mix types, and both keep one cut for all replicas, which sum their gradients stage by stage:

- *by replica*: each replica is of one type, and runs as many micro-batches as its speed allows (uneven shares);
- *by stage*: all replicas are alike, and each stage is of one type, with as many sections as its speed allows (uneven
  cuts). So types that have too few GPUs for a replica of their own are used, too.

Each type that is left out, and each type alone, is a candidate as well. A rough estimate orders the layouts; the best
few are cut and simulated. A mixed plan must be faster than the best plan of one type by `LEAST_GAIN`, and one that is
mixed by stage faster by as much than one that is mixed by replica.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import ceil, floor, inf

import numpy as np

from varuna_planner.cutting import _tables
from varuna_planner.cutting import balance as cutting
from varuna_planner.cutting.pipeline import Pipeline
from varuna_planner.cutting.typed_cut import TypedCut, cut_by_type
from varuna_planner.memory import usable_bytes
from varuna_planner.profile.document import Profile
from varuna_planner.schedule.batching import count_micro_batches, micro_batches
from varuna_planner.schedule.policies import Policy
from varuna_planner.search.auto_config import choose_plan, list_micro_batches, make_search_limits
from varuna_planner.search.candidates import PlanCandidate
from varuna_planner.search.layouts import Layout, describe_gpu_types, list_layouts
from varuna_planner.search.pins import NO_PINS, Pins
from varuna_planner.simulator.simulation import simulate
from varuna_proto.plan import Plan
from varuna_proto.wording import render_rate

__all__ = ["LEAST_GAIN", "MixedChoice", "TypedGpus", "choose_mixed_plan", "predict_mixed_s"]

LEAST_GAIN = 0.03
"""The gain over one type that a mixed plan must promise: the accuracy of predictions."""
_SIMULATED = 16
"""The layouts of each kind that are cut and simulated: those with the best estimates."""
_CANDIDATES = 64
"""The candidates of one type that the answer lists."""
_LEAST_US = 1e-3
"""Of any work, so that nothing is divided by 0."""


@dataclass(frozen=True, kw_only=True)
class TypedGpus:
    """The GPUs of one type that a job may have."""

    gpu_type: str
    gpus: int
    profile: Profile
    """With the times of this type (`profile.speed.select_gpu_type`)."""
    device_memory_bytes: int | None
    """Of each; None: memory sets no limit."""


@dataclass(frozen=True, kw_only=True)
class MixedChoice:
    """The best plan, or the reason why there is none, with candidates: mixtures, then shapes on the best type alone."""

    best: Plan | None
    candidates: tuple[PlanCandidate, ...]
    reason: str


def choose_mixed_plan(
    groups: Sequence[TypedGpus],
    *,
    global_batch: int,
    gpus_per_vm: int = 1,
    pins: Pins = NO_PINS,
    policy: Policy = Policy.WORK_CONSERVING,
) -> MixedChoice:
    """The fastest plan for GPUs of several types, which may leave some of them unused.

    Its `gpu_types` name the type of each rank, also where all are of one.

    Args:
        groups: the GPUs by type, of T >= 1 types.
        global_batch: examples.
        gpus_per_vm: devices of each VM; between them, links are fast.
        pins: what the user has fixed.
        policy: the schedule.

    Raises:
        ValueError: a value is out of range, or a pin can never be met, whatever the fleet.
    """
    groups = [group for group in groups if group.gpus > 0]
    if not groups:
        return MixedChoice(best=None, candidates=(), reason="there are no GPUs")
    alone = {
        group.gpu_type: choose_plan(
            group.profile,
            gpus=group.gpus,
            global_batch=global_batch,
            device_memory_bytes=group.device_memory_bytes,
            gpus_per_vm=gpus_per_vm,
            pins=pins,
            policy=policy,
        )
        for group in groups
    }
    by_rate = sorted(groups, key=lambda group: (-alone[group.gpu_type].examples_per_s, -group.gpus, group.gpu_type))
    first = by_rate[0].gpu_type
    best_alone = alone[first]
    mixed: list[Plan] = []
    if len(groups) > 1:
        mixed = _Mixer(groups, global_batch=global_batch, gpus_per_vm=gpus_per_vm, pins=pins, policy=policy).list_best()
    least = best_alone.examples_per_s * (1 + LEAST_GAIN)
    of_one = [replace(one, reason=f"all {first}: {one.reason}") for one in best_alone.candidates[:_CANDIDATES]]
    candidates = (*_list_candidates(mixed), *of_one)
    if mixed and mixed[0].examples_per_s >= least:
        plan = mixed[0]
        instead = (
            f", instead of {render_rate(best_alone.examples_per_s)} on {first} alone"
            if best_alone.best is not None
            else f"; no type alone suffices: {best_alone.reason}"
        )
        reason = (
            f"{plan.p}×{plan.d}, micro-batch {plan.micro_batch}, over {describe_gpu_types(plan)}: "
            f"{render_rate(plan.examples_per_s)} examples/s predicted{instead}"
        )
        return MixedChoice(best=plan, candidates=candidates, reason=reason)
    if best_alone.best is None:
        return MixedChoice(best=None, candidates=candidates, reason=best_alone.reason)
    plan = best_alone.best
    plan = replace(plan, gpu_types=(first,) * (plan.p * plan.d))
    reason = f"{best_alone.reason}, all {first}"
    if mixed:
        gain = mixed[0].examples_per_s / plan.examples_per_s - 1
        reason += f"; mixed with other types it would be {abs(gain):.0%} {'faster' if gain > 0 else 'slower'}"
    return MixedChoice(best=plan, candidates=candidates, reason=reason)


def predict_mixed_s(plan: Plan, groups: Sequence[TypedGpus], *, gpus_per_vm: int = 1) -> float:
    """Seconds of a mini-batch of a plan with `gpu_types`, by the present profiles. Infinite if the plan names a type
    that is not among the groups."""
    known = {group.gpu_type for group in groups}
    if not plan.gpu_types or not known.issuperset(plan.gpu_types):
        return inf
    mixer = _Mixer(
        groups,
        global_batch=plan.global_batch,
        gpus_per_vm=gpus_per_vm,
        pins=Pins(micro_batch=plan.micro_batch),
        policy=Policy(plan.policy),
    )
    shares = micro_batches(plan.global_batch, plan.micro_batch, plan.d, plan.shares)
    longest: dict[tuple[str, ...], int] = {}
    for replica, share in enumerate(shares):
        row = plan.gpu_types[replica * plan.p : (replica + 1) * plan.p]
        longest[row] = max(longest.get(row, 0), len(share))
    starts = np.array([*plan.stage_starts, mixer.sections], dtype=np.int64)
    cut = TypedCut(starts, np.array(plan.recompute, dtype=np.bool_), plan.run_ahead, ())
    return max(mixer.simulate_us(row, cut, plan.micro_batch, plan.d, N) for row, N in longest.items()) / 1e6


def _list_candidates(mixed: Sequence[Plan]) -> Iterator[PlanCandidate]:
    for plan in mixed:
        yield PlanCandidate(
            p=plan.p,
            d=plan.d,
            micro_batch=plan.micro_batch,
            predicted_minibatch_s=plan.predicted_minibatch_s,
            fits=True,
            reason=f"mixed: {describe_gpu_types(plan)}",
        )


class _Mixer:
    """One search over layouts, with what they share."""

    def __init__(
        self, groups: Sequence[TypedGpus], *, global_batch: int, gpus_per_vm: int, pins: Pins, policy: Policy
    ) -> None:
        self._groups: Mapping[str, TypedGpus] = {group.gpu_type: group for group in groups}
        self._global_batch, self._pins, self._policy = global_batch, pins, policy
        first = groups[0].profile
        self.sections = len(first.sections)
        self._link_connections = first.links.other_vm.connections
        self._usable = {group.gpu_type: usable_bytes(group.device_memory_bytes) for group in groups}
        self._limits = make_search_limits(first, max(self._usable.values()), policy)
        gpus = sum(group.gpus for group in groups)
        self._network = {
            group.gpu_type: cutting.make_network_costs(group.profile, gpus=gpus, gpus_per_vm=gpus_per_vm)
            for group in groups
        }
        self._known_tables: dict[tuple[str, int, int, bool], _tables.SectionTables] = {}
        self._known_cuts: dict[tuple[tuple[tuple[str, ...], ...], int, int, int, int], TypedCut | None] = {}

    # ------------------------------------------------------------ layouts

    def list_best(self) -> list[Plan]:
        """The best plan of each mixed layout that was simulated, the fastest first."""
        first = next(iter(self._groups.values()))
        sizes = (
            [self._pins.micro_batch]
            if self._pins.micro_batch is not None
            else list_micro_batches(first.profile, self._global_batch)
        )
        estimates = [
            (self._estimate_us(layout, m), layout.p * layout.d, place, layout, m)
            for place, layout in enumerate(self._list_layouts())
            for m in sizes
            if layout.d <= count_micro_batches(self._global_batch, m) and self._has_room(layout)
        ]
        found: dict[Layout, Plan] = {}
        estimates.sort(key=lambda one: one[:3])
        by_replica = [one for one in estimates if one[3].replicas]
        by_stage = [one for one in estimates if one[3].stages]
        for _, _, _, layout, m in (*by_replica[:_SIMULATED], *by_stage[:_SIMULATED]):
            plan = self._plan(layout, m)
            if plan is not None and (
                layout not in found or plan.predicted_minibatch_s < found[layout].predicted_minibatch_s
            ):
                found[layout] = plan

        def rank(one: tuple[Layout, Plan]) -> tuple[float, int]:
            # Where types differ by stage, the loss of one type is the loss of a stage in every replica.
            factor = 1 + LEAST_GAIN if one[0].stages else 1.0
            return one[1].predicted_minibatch_s * factor, one[1].p * one[1].d

        return [plan for _, plan in sorted(found.items(), key=rank)]

    def _list_layouts(self) -> Iterator[Layout]:
        gpus = {name: group.gpus for name, group in self._groups.items()}
        speeds = {name: 1 / self._work_us(name, 1) for name in self._groups}
        return list_layouts(gpus, speeds, sections=self.sections, pins=self._pins)

    def _has_room(self, layout: Layout) -> bool:
        """Whether the devices of each replica could hold the state of the model, however it is cut."""
        state = int(self._tables(layout.rows[0][0][0], 1, 1, layout.d).state_bytes[-1])
        return all(sum(self._usable[name] for name in row) >= state for row, _ in layout.rows)

    def _estimate_us(self, layout: Layout, m: int) -> float:
        """A mini-batch with equal stages, no messages, and shares in proportion to speed."""
        M = count_micro_batches(self._global_batch, m)
        whole = {name: self._work_us(name, m) for name in self._groups}
        if layout.replicas:
            rates = {name: layout.p / whole[name] for name, _ in layout.replicas}
            N = M / sum(count * rates[name] for name, count in layout.replicas)
            return N + max((layout.p - 1) / rates[name] for name in rates)
        stage_us = 1 / sum(count / whole[name] for name, count in layout.stages)
        return (ceil(M / layout.d) + layout.p - 1) * stage_us

    # ------------------------------------------------------------ one layout

    def _plan(self, layout: Layout, m: int) -> Plan | None:
        """The plan of a layout; None if no cut fits its memory."""
        M = count_micro_batches(self._global_batch, m)
        best: tuple[float, TypedCut, tuple[int, ...]] | None = None
        for level in (0, 2) if self._limits.runs_ahead else (0,):
            found = self._cut_and_share(layout, m, level * layout.p, M)
            if found is None:
                continue
            cut, shares = found
            time_us = self._makespan_us(layout, cut, m, shares)
            if best is None or time_us < best[0]:
                best = time_us, cut, shares
        if best is None:
            return None
        time_us, cut, shares = best
        return Plan(
            p=layout.p,
            d=layout.d,
            micro_batch=m,
            global_batch=self._global_batch,
            stage_starts=tuple(int(start) for start in cut.starts[:-1]),
            policy=self._policy.value,
            run_ahead=cut.run_ahead,
            recompute=tuple(bool(flag) for flag in cut.recompute),
            predicted_minibatch_s=time_us / 1e6,
            examples_per_s=self._global_batch / (time_us / 1e6) if time_us > 0 else inf,
            memory_bytes=cut.needed_bytes,
            shares=shares if layout.replicas else (),
            gpu_types=layout.gpu_types,
            link_connections=self._link_connections,
        )

    def _cut_and_share(self, layout: Layout, m: int, room: int, M: int) -> tuple[TypedCut, tuple[int, ...]] | None:
        """The cut with room for what is in flight of the largest share, and the shares; None: there are none.

        A fast replica's share is larger than the mean, by a number that depends on the cut.
        """
        N = -(-M // layout.d)
        while True:
            cut = self._cut(layout, m, room, N)
            shares = None if cut is None else self._share(layout, cut, m, M)
            if cut is None or shares is None:
                return None
            if max(shares) <= N:
                return cut, shares
            N = max(shares)

    def _share(self, layout: Layout, cut: TypedCut, m: int, M: int) -> tuple[int, ...] | None:
        """The micro-batches of each replica, so that all end as nearly together as can be; None: one would get none.

        What a replica takes grows by its busiest stage's work with each micro-batch, so one simulation of each type
        gives the line for all numbers.
        """
        if not layout.replicas:
            return tuple(len(run) for run in micro_batches(self._global_batch, m, layout.d))
        each_us, fixed_us = [], []
        for row, _ in layout.rows:
            pipeline = self._pipeline(row, cut, m, layout.d, 1)
            busy = pipeline.forward_us[0] + pipeline.backward_us[0] + pipeline.recompute_us[0] * cut.recompute
            busiest = max(float(busy.max()), _LEAST_US)
            N = max(1, round(M / layout.d))
            each_us.append(busiest)
            fixed_us.append(self.simulate_us(row, cut, m, layout.d, N) - busiest * N)
        counts = [count for _, count in layout.rows]

        def fill(limit_us: float) -> list[int]:
            return [max(1, floor((limit_us - fixed) / each)) for fixed, each in zip(fixed_us, each_us, strict=True)]

        def total(limit_us: float) -> int:
            return sum(n * count for n, count in zip(fill(limit_us), counts, strict=True))

        low, high = 0.0, max(fixed + each * (M + 1) for fixed, each in zip(fixed_us, each_us, strict=True))
        if total(low) > M:
            return None
        while high - low > 1e-6 * high:
            middle = (low + high) / 2
            low, high = (middle, high) if total(middle) < M else (low, middle)
        each = fill(high)
        # A few more than there are: they come off the replicas that would end last.
        spare = total(high) - M
        shares = [[n] * count for n, count in zip(each, counts, strict=True)]
        last_first = sorted(range(len(each)), key=lambda i: -(fixed_us[i] + each_us[i] * each[i]))
        for i in last_first:
            for replica in reversed(range(counts[i])):
                if spare > 0 and shares[i][replica] > 1:
                    shares[i][replica] -= 1
                    spare -= 1
        return tuple(n for of_type in shares for n in of_type) if spare == 0 else None

    def _makespan_us(self, layout: Layout, cut: TypedCut, m: int, shares: Sequence[int]) -> float:
        longest, replica = 0.0, 0
        for row, count in layout.rows:
            N = max(shares[replica : replica + count])
            replica += count
            longest = max(longest, self.simulate_us(row, cut, m, layout.d, N))
        return longest

    def simulate_us(self, row: Sequence[str], cut: TypedCut, m: int, d: int, N: int) -> float:
        """A mini-batch of a replica whose stages are of these types, and that runs N micro-batches."""
        return simulate(self._pipeline(row, cut, m, d, N), self._policy, run_ahead=cut.run_ahead).makespan_us

    def _pipeline(self, row: Sequence[str], cut: TypedCut, m: int, d: int, N: int) -> Pipeline:
        """Each stage with the times of its type."""
        last = self._global_batch - m * (count_micro_batches(self._global_batch, m) - 1) if d == 1 else m
        of_type = {
            name: cutting.make_pipeline(
                self._tables(name, m, last, d), self._network[name], cut.starts, cut.recompute, N=N, d=d
            )
            for name in set(row)
        }
        if len(of_type) == 1:
            return of_type[row[0]]
        joined = {
            field.name: np.stack(
                [getattr(of_type[name], field.name)[..., stage] for stage, name in enumerate(row)], axis=-1
            )
            for field in fields(Pipeline)
            if field.name.endswith("_us")
        }
        return Pipeline(micro_batches=N, recompute=cut.recompute, **joined)

    # ------------------------------------------------------------ cuts

    def _cut(self, layout: Layout, m: int, room: int, N: int) -> TypedCut | None:
        """The cut whose busiest stage is least busy, with room for a run-ahead of at least `room`; None: none fits."""
        rows = tuple(row for row, _ in layout.rows)
        key = (rows, m, room, N, min(layout.d, 2))
        if key not in self._known_cuts:
            # Replicas of other types have the same cut: their stages' work differs by nearly the same factor.
            leading = rows[0]
            usable = [min(self._usable[row[stage]] for row in rows) for stage in range(layout.p)]
            sections = {name: self._tables(name, m, m, layout.d) for name in set(leading)}
            self._known_cuts[key] = cut_by_type(sections, leading, usable, self._limits, N=N, room=room)
        return self._known_cuts[key]

    def _tables(self, name: str, m: int, last: int, d: int) -> _tables.SectionTables:
        key = (name, m, last, d > 1)
        if key not in self._known_tables:
            profile = self._groups[name].profile
            self._known_tables[key] = cutting.section_tables(profile, [(m, last)], sums_gradients=d > 1)
        return self._known_tables[key]

    def _work_us(self, name: str, m: int) -> float:
        """Forward and backward of the whole model on this type. Above 0, whatever a profile says."""
        return max(float(self._tables(name, m, m, 2).work_us[0, -1]), _LEAST_US)
