"""Simulates one plan under chosen circumstances: another policy, a slower network, jitter, other stages.

Letters: K sections, P stages, D replicas, N micro-batches of the busiest replica.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from varuna_planner.cutting import balance as cutting
from varuna_planner.cutting._tables import LEVELS
from varuna_planner.cutting.balance import NetworkCosts, SectionTables
from varuna_planner.cutting.pipeline import Pipeline
from varuna_planner.cutting.typed_cut import SectionRuns, fit_stages
from varuna_planner.memory import human, usable_bytes
from varuna_planner.profile.document import Profile
from varuna_planner.schedule.batching import count_micro_batches, micro_batch_sizes, micro_batches
from varuna_planner.schedule.policies import Policy
from varuna_planner.search._enumerate import most_run_ahead
from varuna_planner.search.auto_config import Pins, choose_plan, make_search_limits
from varuna_planner.simulator.simulation import Jitter, Simulation, lower_bound, simulate

__all__ = ["SimulatedPlan", "SimulationRequest", "simulate_plan"]

SAMPLES = 20
"""Mini-batches over which a random result is averaged."""
MOST_SIMULATIONS = 200
"""At most; with many replicas fewer mini-batches do, because each replica is disturbed on its own."""


@dataclass(frozen=True, kw_only=True)
class SimulationRequest:
    """What to simulate. None leaves a choice to the planner."""

    profile: Profile
    p: int
    d: int
    micro_batch: int
    """Examples."""
    global_batch: int
    """Examples."""
    policy: Policy = Policy.WORK_CONSERVING
    network_scale: float = 1.0
    """How many times as slow the network between VMs is: latency, transfers, all-reduce."""
    jitter_us: float = 0.0
    """Mean of a random (exponential) delay of each message."""
    compute_noise: float = 0.0
    """Standard deviation of each action's time, relative."""
    seed: int = 0
    stage_starts: tuple[int, ...] | None = None
    """First section of each stage."""
    run_ahead: int | None = None
    recompute: tuple[bool, ...] | None = None
    """Per stage."""
    gpus_per_vm: int = 1
    device_memory_bytes: int | None = None
    """None: memory limits nothing, so the planner recomputes nowhere and runs ahead as far as it pays."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SimulatedPlan:
    """The result of a simulation."""

    minibatch_us: float
    """The mean if there is randomness, else exact."""
    bubble_fraction: float
    """Share of the devices' time until the last backward in which no op runs."""
    stash_max: int
    """The most micro-batches in flight on any stage."""
    lower_bound_us: float
    """No schedule is faster without disturbance."""
    stage_starts: tuple[int, ...]
    run_ahead: int
    recompute: tuple[bool, ...]
    pipeline: Pipeline
    """Of the busiest replica."""
    simulation: Simulation
    """Of one mini-batch of it, with its spans."""


def simulate_plan(question: SimulationRequest) -> SimulatedPlan:
    """Simulates a plan as the planner does, with the changes of the request.

    Memory decides what the request leaves open of stages, run-ahead and recompute, and nothing where it has all three.
    Raises ValueError naming the value that is out of range, or saying why there is no such plan.
    """
    _check(question)
    profile, m, K = question.profile, question.micro_batch, len(question.profile.sections)
    sizes = [(m, micro_batch_sizes(question.global_batch, m)[-1])]
    sections = cutting.section_tables(profile, sizes, sums_gradients=question.d > 1)
    net = cutting.make_network_costs(profile, gpus=question.p * question.d, gpus_per_vm=question.gpus_per_vm)
    N = len(micro_batches(question.global_batch, m, question.d)[0])

    def make_pipeline(stages: _Stages, net: NetworkCosts) -> Pipeline:
        bounds = np.array([*stages.starts, K], dtype=np.int64)
        return cutting.make_pipeline(sections, net, bounds, np.array(stages.recompute), N=N, d=question.d)

    stages = _choose_stages(question, sections, N, lambda stages: make_pipeline(stages, net))
    slower = _slower(net, question.network_scale, one_vm=question.p * question.d <= question.gpus_per_vm)
    pipeline = make_pipeline(stages, slower)
    runs = _simulate(question, pipeline, stages.run_ahead)
    return SimulatedPlan(
        minibatch_us=float(np.mean([makespan for makespan, _ in runs])),
        bubble_fraction=float(np.mean([bubble_fraction(run) for _, run in runs])),
        stash_max=max(max(run.stash) for _, run in runs),
        lower_bound_us=lower_bound(pipeline, split_backward=question.policy is Policy.ZERO_BUBBLE),
        stage_starts=stages.starts,
        run_ahead=stages.run_ahead,
        recompute=stages.recompute,
        pipeline=pipeline,
        simulation=runs[0][1],
    )


def bubble_fraction(run: Simulation) -> float:
    """The share of the stages' time, until the last one ends, in which no op runs. Needs the spans."""
    length = float(run.backward_end_us.max()) * len(run.stash)
    busy = float((run.spans_us[1] - run.spans_us[0]).sum())
    return max(0.0, 1.0 - busy / length) if length > 0 else 0.0


def _simulate(question: SimulationRequest, pipeline: Pipeline, run_ahead: int) -> list[tuple[float, Simulation]]:
    """For each mini-batch its time, with every stage waiting for its slowest replica, and one replica's run."""
    disturbed = question.jitter_us > 0 or question.compute_noise > 0
    replicas = question.d if disturbed else 1
    samples = min(SAMPLES, -(-MOST_SIMULATIONS // replicas)) if disturbed else 1
    runs = []
    for sample in range(samples):
        each = [
            simulate(
                pipeline,
                question.policy,
                run_ahead=run_ahead,
                jitter=Jitter(
                    latency_us=question.jitter_us,
                    compute=question.compute_noise,
                    seed=(question.seed * samples + sample) * replicas + replica,
                )
                if disturbed
                else None,
                record=True,
            )
            for replica in range(replicas)
        ]
        ends = np.max([run.backward_end_us for run in each], axis=0)
        runs.append((float((ends + pipeline.finish_us).max()), each[0]))
    return runs


class _Stages(NamedTuple):
    starts: tuple[int, ...]
    """First section of each."""
    run_ahead: int
    recompute: tuple[bool, ...]


def _choose_stages(
    question: SimulationRequest, sections: SectionTables, N: int, make_pipeline: Callable[[_Stages], Pipeline]
) -> _Stages:
    """The stages as given; what the request leaves open is as the planner chooses it. Raises ValueError."""
    starts, run_ahead, recompute = question.stage_starts, question.run_ahead, question.recompute
    if starts is not None and run_ahead is not None and recompute is not None:
        return _Stages(starts, run_ahead, recompute)
    # A policy that cannot run is a variant of the work-conserving one.
    policy = question.policy if question.policy.executable else Policy.WORK_CONSERVING
    if starts is None:
        choice = choose_plan(
            question.profile,
            gpus=question.p * question.d,
            global_batch=question.global_batch,
            device_memory_bytes=question.device_memory_bytes,
            gpus_per_vm=question.gpus_per_vm,
            pins=Pins(p=question.p, d=question.d, micro_batch=question.micro_batch),
            policy=policy,
        )
        if choice.best is None:
            raise ValueError(choice.reason)
        starts = choice.best.stage_starts
        if run_ahead is None and recompute is None:
            return _Stages(starts, choice.best.run_ahead, choice.best.recompute)
    found = _fit_stages(question, starts, sections, policy, N)
    return min(found, key=lambda one: simulate(make_pipeline(one), policy, run_ahead=one.run_ahead).makespan_us)


def _fit_stages(
    question: SimulationRequest, starts: tuple[int, ...], sections: SectionTables, policy: Policy, N: int
) -> list[_Stages]:
    """These stages with each amount of room for run-ahead that the planner tries and that memory allows, the least
    first. Raises ValueError if it allows none."""
    P, usable = question.p, usable_bytes(question.device_memory_bytes)
    limits = make_search_limits(question.profile, usable, policy)
    most = most_run_ahead(limits, P, N)
    rooms = [min(level * P, most) for level in range(LEVELS)]
    if question.run_ahead is not None:
        rooms, most = [question.run_ahead], question.run_ahead
    bounds = np.array([*starts, len(question.profile.sections)], dtype=np.int64)
    runs = SectionRuns(sections)
    fitted = [
        fit_stages(runs, bounds, [usable] * P, limits=limits, N=N, room=room, most=most, recompute=question.recompute)
        for room in rooms
    ]
    needed = fitted[0].needed_bytes
    if max(needed) > usable:
        stage = needed.index(max(needed))
        raise ValueError(
            f"stages {','.join(map(str, starts))}: stage {stage} needs {human(needed[stage])} with a run-ahead of "
            f"{rooms[0]}, and a device has {human(usable)} to give: use other stages, recompute, devices with more "
            "memory, or a smaller micro-batch"
        )
    fitting = (one for one in fitted if max(one.needed_bytes) <= usable)
    stages = (_Stages(starts, one.run_ahead, tuple(bool(flag) for flag in one.recompute)) for one in fitting)
    return list(dict.fromkeys(stages))


def _slower(net: NetworkCosts, scale: float, *, one_vm: bool) -> NetworkCosts:
    """The network with the links between VMs `scale` times as slow; all-reduces use them unless all is on one VM."""
    reduction = 1.0 if one_vm else scale
    return net._replace(
        other_vm=net.other_vm * np.array([scale, 1.0 / scale]),
        hop_us=net.hop_us * reduction,
        byte_us=net.byte_us * reduction,
    )


def _check(question: SimulationRequest) -> None:
    sections = len(question.profile.sections)
    if not 1 <= question.p <= sections:
        raise ValueError(f"p={question.p}: the profile has {sections} sections, so there are 1 to {sections} stages")
    count = count_micro_batches(question.global_batch, question.micro_batch)
    if not 1 <= question.d <= count:
        raise ValueError(
            f"d={question.d}: a global batch of {question.global_batch} has {count} micro-batches of "
            f"{question.micro_batch}, so there are 1 to {count} replicas"
        )
    if question.micro_batch > question.global_batch:
        raise ValueError(
            f"micro-batch {question.micro_batch}: the global batch has only {question.global_batch} examples"
        )
    if not 0 < question.network_scale < np.inf:
        raise ValueError(f"network scale {question.network_scale:g}: it must be above 0; 2 is twice as slow")
    if question.run_ahead is not None and question.run_ahead < 0:
        raise ValueError(f"run-ahead {question.run_ahead}: it is 0 or more")
    if question.seed < 0:
        raise ValueError(f"seed {question.seed}: it is 0 or more")
    for name, value, unit in (
        ("jitter", question.jitter_us / 1e6, " s"),
        ("compute noise", question.compute_noise, ""),
    ):
        if not 0 <= value < np.inf:
            raise ValueError(f"{name} {value:g}{unit}: it is 0 or more")
    if question.recompute is not None and len(question.recompute) != question.p:
        raise ValueError(f"the recompute mask has {len(question.recompute)} stages, the plan {question.p}")
    if question.stage_starts is not None:
        _check_starts(question.stage_starts, question.p, sections)


def _check_starts(starts: Sequence[int], p: int, sections: int) -> None:
    text = ",".join(map(str, starts))
    if len(starts) != p:
        raise ValueError(f"stages {text}: these are the first sections of {len(starts)} stages, the plan has {p}")
    if starts[0] != 0 or any(a >= b for a, b in zip(starts, [*starts[1:], sections], strict=True)):
        raise ValueError(f"stages {text}: first sections begin with 0, ascend, and are below {sections}")
