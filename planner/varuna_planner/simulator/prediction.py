"""How long a mini-batch takes in a given shape, from a profile: the stages, messages and reductions as a simulator
pipeline. `auto_config` chooses a shape; here it is given.

Letters: K sections, P stages, D replicas, N micro-batches of the busiest replica.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from varuna_planner.cutting import balance as cutting
from varuna_planner.cutting.pipeline import Pipeline
from varuna_planner.profile.document import Profile
from varuna_planner.schedule.batching import micro_batch_sizes, micro_batches
from varuna_planner.schedule.policies import Policy
from varuna_planner.simulator.simulation import Jitter, simulate

__all__ = ["PipelineShape", "even_starts", "pipeline_of", "predict_s"]

RUN_AHEAD_STAGES = 2
"""Run-ahead of policies that know it, in units of P: as the planner asks for when memory is free."""


@dataclass(frozen=True, kw_only=True)
class PipelineShape:
    """How a job runs. Raises ValueError at construction when it cannot."""

    p: int
    d: int
    micro_batch: int
    global_batch: int
    stage_starts: tuple[int, ...]
    """First section of each stage."""
    recompute: tuple[bool, ...]
    """Per stage."""
    policy: Policy = Policy.WORK_CONSERVING
    run_ahead: int | None = None
    """None: 2 P."""
    gpus_per_vm: int = 1

    def __post_init__(self) -> None:
        if len(self.stage_starts) != self.p or len(self.recompute) != self.p:
            raise ValueError(
                f"p={self.p} stages, but stage_starts has {len(self.stage_starts)} and recompute {len(self.recompute)}"
            )
        if self.stage_starts[0] != 0 or list(self.stage_starts) != sorted(set(self.stage_starts)):
            raise ValueError(f"stage_starts must ascend from 0, got {list(self.stage_starts)}")


def even_starts(sections: int, p: int, *, ends_ride: bool) -> tuple[int, ...]:
    """Stages with the same number of sections, as near as can be: how uniform models are cut in the paper.

    `ends_ride`: the first and the last section (embedding and head) join the stages beside them and do not count.
    Raises ValueError when there are fewer sections than stages.
    """
    ends = 1 if ends_ride else 0
    inner = sections - 2 * ends
    if p < 1 or p > inner:
        raise ValueError(f"p={p}: {inner} {'layers' if ends_ride else 'sections'} make 1 to {inner} stages")
    return (0, *(ends + (inner * stage + p // 2) // p for stage in range(1, p)))


def pipeline_of(profile: Profile, shape: PipelineShape) -> Pipeline:
    """The busiest replica's pipeline. Raises ValueError when a replica would have no micro-batch."""
    sizes = micro_batch_sizes(shape.global_batch, shape.micro_batch)
    replicas = micro_batches(shape.global_batch, shape.micro_batch, shape.d)
    sections = len(profile.sections)
    if shape.stage_starts[-1] >= sections:
        raise ValueError(f"stage_starts {list(shape.stage_starts)}: the model has only {sections} sections")
    return cutting.make_pipeline(
        cutting.section_tables(profile, [(shape.micro_batch, sizes[-1])]),
        cutting.make_network_costs(profile, gpus=shape.p * shape.d, gpus_per_vm=shape.gpus_per_vm),
        np.array([*shape.stage_starts, sections], dtype=np.int64),
        np.array(shape.recompute, dtype=np.bool_),
        N=len(replicas[0]),
        d=shape.d,
    )


def predict_s(profile: Profile, shape: PipelineShape) -> float:
    """Seconds of a mini-batch, by `simulate` of the shape's policy, whose stages know what the engine's know.

    Messages have random delays with the profile's jitter between VMs, the same ones in every call.
    """
    jitter = Jitter(latency_us=profile.links.other_vm.jitter_us)
    # Otherwise the jitter's mean would count as latency, too.
    steady = {name: link.model_copy(update={"jitter_us": 0.0}) for name, link in profile.links if link}
    profile = profile.model_copy(update={"links": profile.links.model_copy(update=steady)})
    run_ahead = RUN_AHEAD_STAGES * shape.p if shape.run_ahead is None else shape.run_ahead
    found = simulate(pipeline_of(profile, shape), shape.policy, run_ahead=run_ahead, jitter=jitter)
    return found.makespan_us / 1e6
