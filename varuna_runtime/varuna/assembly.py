"""Building what one rank trains with: its stage of the model, and its connections to the other ranks.

Letters: P stages, D replicas; rank = replica * P + stage.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from varuna.launch import Group
from varuna.offload import HostParameters
from varuna.optim import GradientReducer, copy_from_first
from varuna.partition import Stage, Values, build_stage
from varuna.partition.model_map import ModelMap
from varuna.pipeline.engine import Engine, Position
from varuna.pipeline.randomness import RandomStreams
from varuna.pipeline.timeline import Timeline
from varuna.precision import Precision
from varuna.topology import (
    connect_holders,
    connect_links,
    connect_tied,
    share_of_batch,
    stage_sections,
    tied_over_stages,
)
from varuna.worker import Worker
from varuna_planner.schedule import Policy

__all__ = ["Assembly", "agreed_seed", "assemble", "stages_of"]


@dataclass(frozen=True, kw_only=True)
class Assembly:
    """One rank, ready to train."""

    stage: Stage
    engine: Engine
    """Runs micro-batches through the stage."""
    reducer: GradientReducer
    """Sums gradients with the other ranks."""
    everyone: Group
    replicas: Group
    """The ranks that hold the same stage."""
    timeline: Timeline

    def follow(self, model_map: ModelMap, host: HostParameters | None) -> None:
        """From now on train the stage as it was traced again. Called by all ranks, between passes.

        Modules hold what the stage computes with (`RestingModules.refitted`).
        `host`: the optimizer's parameters, where it is on the host.
        """
        self.stage.follow(model_map)
        self.engine.follow_stage(self.stage.written, _random_streams(model_map, self.stage.device))
        if host is not None:
            host.follow(self.stage.module, self.stage.parameters)
        self.reducer.rebuild()

    def keep_buffers_equal(self) -> None:
        """Gives all replicas the first one's buffers that forward writes. Called by all ranks, between passes.

        The rule is DistributedDataParallel's: what a checkpoint holds does not depend on who writes it, and a job that
        goes on from it is where one that never stopped would be.
        """
        if len(self.replicas.ranks) > 1:
            by_type: dict[torch.dtype, list[Tensor]] = {}
            for buffer in self.stage.written.homes.values():
                by_type.setdefault(buffer.dtype, []).append(buffer)
            for buffers in by_type.values():
                flat = torch.cat([buffer.flatten() for buffer in buffers])
                copy_from_first([flat], self.replicas)
                parts = torch.split(flat, [buffer.numel() for buffer in buffers])
                for buffer, part in zip(buffers, parts, strict=True):
                    buffer.copy_(part.view_as(buffer))

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluation mode for the block; afterwards every module is in the mode that it was in."""
        modes = {part: part.training for part in self.stage.module.modules()}
        self.stage.module.eval()
        try:
            yield
        finally:
            for part, training in modes.items():
                part.training = training


def assemble(
    model: nn.Module,
    model_map: ModelMap,
    worker: Worker,
    device: torch.device,
    precision: Precision,
    values: Values | None = None,
) -> Assembly:
    """Builds this rank's stage of `model` on `device` and meets the ranks that it works with. Called by all ranks.

    `values`: of parameters and buffers, where they are not the model's own.

    Copies of a parameter, or of a buffer that forward writes, are afterwards equal everywhere: the first rank's that
    holds it.

    Raises ValueError when the plan does not fit the model, PartitionError when the model cannot be cut.
    """
    environment, topology, rendezvous = worker.environment, worker.topology, worker.rendezvous
    if environment.global_batch:
        share_of_batch(0, environment, 0)  # refuses a global batch that is too small for D replicas
    stages = stages_of(worker, len(model_map.sections))
    own = stages[topology.stage]
    stage = build_stage(model, model_map, own.start, own.stop, device, values)
    worker.phases.done("build")
    tied = tied_over_stages(model_map.shared, stages)
    tell = worker.link.step_traced if environment.agent_socket else None
    timeline = Timeline.from_environ(os.environ, rank=topology.rank, p=topology.p, tell=tell)
    links = connect_links(topology, rendezvous, device, worker.departure, timeline)
    same_stage = topology.ranks_of((topology.stage,))
    replicas = connect_holders(topology, f"replicas/{topology.stage}", same_stage, rendezvous, device, worker.departure)
    tied_groups = connect_tied(topology, rendezvous, tied, device, worker.departure)
    everyone = rendezvous.group("everyone", topology.everyone)
    counted = [
        name
        for name in stage.parameters
        if topology.replica == 0 and tied.get(name, (topology.stage,))[0] == topology.stage
    ]
    reducer = GradientReducer(stage.parameters, replicas, tied_groups, counted=counted, timeline=timeline)
    copy_from_first(list(stage.parameters.values()), replicas)
    for group in tied_groups:
        copy_from_first([stage.parameters[name] for name in group.names], group.group)
    position = Position(
        stage=topology.stage,
        p=topology.p,
        policy=Policy(environment.policy),
        run_ahead=environment.run_ahead,
        recompute=bool(environment.recompute) and environment.recompute[topology.stage],
    )
    engine = Engine(
        stage,
        position,
        links,
        device,
        worker.departure,
        forward_context=precision.forward,
        backward_context=stage.running_again,
        timeline=timeline,
        written=stage.written,
        random=_random_streams(model_map, device),
    )
    parts = Assembly(
        stage=stage, engine=engine, reducer=reducer, everyone=everyone, replicas=replicas, timeline=timeline
    )
    parts.keep_buffers_equal()
    return parts


def _random_streams(model_map: ModelMap, device: torch.device) -> RandomStreams:
    return RandomStreams(device, model_map.draws if model_map.random_by_example else None)


def stages_of(worker: Worker, sections: int) -> tuple[range, ...]:
    """The sections of every stage. Raises ValueError when the plan does not fit a model of so many."""
    return stage_sections(worker.environment.stage_starts, worker.topology.p, sections)


def agreed_seed(seed: int, everyone: Group) -> int:
    """Rank 0's seed, on every rank."""
    # In halves: gloo's int64 would do, but a seed may use all 64 bits unsigned.
    halves = torch.tensor([seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF], dtype=torch.int64)
    copy_from_first([halves], everyone)
    low, high = halves.tolist()
    return int(high << 32 | low)
