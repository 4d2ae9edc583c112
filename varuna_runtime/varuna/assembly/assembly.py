"""Building what one rank trains with: its stage of the model, and its connections to the other ranks.

Letters: P stages, D replicas; rank = replica * P + stage.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from varuna.assembly.connections import LinkConnector, LinkKind, connect_holders, connect_tied, start_links
from varuna.diagnostics.timeline import Timeline
from varuna.distributed.groups import RankGroup
from varuna.distributed.topology import Topology, share_of_batch, stage_sections, tied_over_stages
from varuna.optim.host_parameters import HostParameters
from varuna.optim.precision import TrainingPrecision
from varuna.optim.reduction import GradientReducer, TiedGroup, broadcast_from_first
from varuna.partition import Stage, ValueSource, build_stage
from varuna.partition.cutting.model_map import ModelMap
from varuna.pipeline.engine import Engine
from varuna.pipeline.random_streams import RandomStreams
from varuna.pipeline.stage_setting import StageContext, StageLinks, StagePosition
from varuna.worker.worker import WorkerProcess
from varuna_planner.schedule.policies import Policy

__all__ = ["Assembly", "agree_on_seed", "assemble_alone", "assemble_rank", "connect_stage", "stages_of"]


@dataclass(frozen=True, kw_only=True)
class Assembly:
    """One rank, ready to train."""

    stage: Stage
    engine: Engine
    """Runs micro-batches through the stage."""
    reducer: GradientReducer
    """Sums gradients with the other ranks."""
    everyone: RankGroup
    replicas: RankGroup
    """The ranks that hold the same stage."""
    links: StageLinks
    timeline: Timeline

    def disconnect(self, within_s: float) -> bool:
        """Ends the use of the connections, which are broken. Returns whether no thread waits for one after this time.

        The stage itself stays as it is.
        """
        self.reducer.remove_hooks()
        return self.links.end(within_s)

    def apply_map(self, model_map: ModelMap, host: HostParameters | None) -> None:
        """Trains the stage from now on by a new trace. All ranks must call it, between passes.

        The modules must hold the parameters that the stage computes with (`TensorSwap.change_pass_tensors`).
        `host`: the optimizer's parameters, where it is on the host.
        """
        self.stage.apply_map(model_map)
        self.engine.update_stage(self.stage.written, _random_streams(model_map, self.stage.device))
        if host is not None:
            host.add_trained_parameters(self.stage.module, self.stage.parameters)
        self.reducer.rebuild_buckets()

    def equalize_buffers(self) -> None:
        """Copies the buffers that forward writes from the first replica to all. All ranks must call it, between passes.

        DistributedDataParallel has the same rule. A checkpoint then does not depend on the rank that writes it, and a
        job that continues from it is where a job without interruption would be.
        """
        if len(self.replicas.ranks) > 1:
            by_type: dict[torch.dtype, list[Tensor]] = {}
            for buffer in self.stage.written.homes.values():
                by_type.setdefault(buffer.dtype, []).append(buffer)
            for buffers in by_type.values():
                flat = torch.cat([buffer.flatten() for buffer in buffers])
                broadcast_from_first([flat], self.replicas)
                parts = torch.split(flat, [buffer.numel() for buffer in buffers])
                for buffer, part in zip(buffers, parts, strict=True):
                    buffer.copy_(part.view_as(buffer))

    @contextmanager
    def evaluation_mode(self) -> Iterator[None]:
        """Evaluation mode for the block; afterwards every module is in the mode that it was in."""
        modes = {part: part.training for part in self.stage.module.modules()}
        try:
            self.stage.module.eval()
            yield
        finally:
            # By `train`, parents first: an override may undo there what it has done for evaluation (merged weights).
            for part, training in modes.items():
                if part.training != training:
                    part.train(training)
            # An override may also set another mode than it is given.
            for part, training in modes.items():
                part.training = training


def assemble_rank(
    model: nn.Module,
    model_map: ModelMap,
    worker: WorkerProcess,
    *,
    device: torch.device,
    precision: TrainingPrecision,
    values: ValueSource | None = None,
    link_kind: LinkKind = "gloo",
) -> Assembly:
    """Builds this rank's stage of `model` on `device` and connects the rank to others. All ranks must call it.

    `values`: a source of parameters and buffers, if they are not the model's own.

    Afterwards all copies of a parameter, or of a buffer that forward writes, are equal: to those of the first rank that
    holds it.

    Raises ValueError when the plan does not fit the model, PartitionError when the model cannot be cut.
    """
    environment = worker.environment
    if environment.plan.global_batch:
        share_of_batch(0, environment, 0)  # refuses a global batch that is too small for D replicas
    stage = _build_own_stage(model, model_map, worker, device, values)
    worker.rendezvous.wait_for_loading(worker.topology.everyone)
    parts, tied_groups = _connect(stage, model_map, worker, device=device, precision=precision, link_kind=link_kind)
    broadcast_from_first(list(stage.parameters.values()), parts.replicas)
    for group in tied_groups:
        broadcast_from_first([stage.parameters[name] for name in group.names], group.group)
    parts.equalize_buffers()
    return parts


def assemble_alone(
    model: nn.Module,
    model_map: ModelMap,
    worker: WorkerProcess,
    *,
    device: torch.device,
    precision: TrainingPrecision,
    values: ValueSource | None = None,
    link_kind: LinkKind = "gloo",
) -> Assembly:
    """As `assemble_rank`, but connects this rank to nobody yet. Its stage runs when `connect_stage` has done that, with
    parameters that the caller has given their values."""
    environment = worker.environment
    stage = _build_own_stage(model, model_map, worker, device, values, parameters_follow=True)
    plan = replace(environment.plan, p=1, d=1, stage_starts=(), recompute=())
    alone = replace(
        worker, environment=replace(environment, plan=plan, rank=0, world_size=1), topology=Topology(1, 1, 0)
    )
    parts, _ = _connect(stage, model_map, alone, device=device, precision=precision, link_kind=link_kind)
    return parts


def _build_own_stage(
    model: nn.Module,
    model_map: ModelMap,
    worker: WorkerProcess,
    device: torch.device,
    values: ValueSource | None,
    *,
    parameters_follow: bool = False,
) -> Stage:
    own = stages_of(worker, len(model_map.sections))[worker.topology.stage]
    stage = build_stage(
        model, model_map, own.start, own.stop, device=device, values=values, parameters_follow=parameters_follow
    )
    worker.phases.end_phase("build")
    return stage


def connect_stage(
    stage: Stage,
    model_map: ModelMap,
    worker: WorkerProcess,
    *,
    device: torch.device,
    precision: TrainingPrecision,
    link_kind: LinkKind,
) -> Assembly:
    """Connects a rank that holds `stage` and its trained state already. All ranks must call it.

    Afterwards all copies of a buffer that forward writes are equal to those of the first rank that holds it.
    """
    parts, _ = _connect(stage, model_map, worker, device=device, precision=precision, link_kind=link_kind)
    parts.equalize_buffers()
    return parts


def _connect(
    stage: Stage,
    model_map: ModelMap,
    worker: WorkerProcess,
    *,
    device: torch.device,
    precision: TrainingPrecision,
    link_kind: LinkKind,
) -> tuple[Assembly, list[TiedGroup]]:
    environment, topology, rendezvous = worker.environment, worker.topology, worker.rendezvous
    tied = tied_over_stages(model_map.shared, stages_of(worker, len(model_map.sections)))
    send_step = worker.link.report_step_trace if environment.agent_socket else None
    timeline = Timeline.from_environ(os.environ, rank=topology.rank, p=topology.p, send_step=send_step)
    connector = LinkConnector(
        rendezvous=rendezvous, device=device, count=environment.plan.link_connections, kind=link_kind
    )
    connections = connector.connect_links(topology)
    same_stage = topology.ranks_of((topology.stage,))
    replicas = connect_holders(
        topology,
        f"replicas/{topology.stage}",
        same_stage,
        rendezvous=rendezvous,
        device=device,
        departure=worker.departure,
    )
    tied_groups = connect_tied(topology, rendezvous, tied, device=device, departure=worker.departure)
    everyone = rendezvous.make_group("everyone", topology.everyone)
    counted = [
        name
        for name in stage.parameters
        if topology.replica == 0 and tied.get(name, (topology.stage,))[0] == topology.stage
    ]
    links = start_links(connections, topology, device, departure=worker.departure, timeline=timeline)
    departure = worker.departure
    reducer = GradientReducer(
        stage.parameters,
        replicas,
        tied_groups,
        counted=counted,
        timeline=timeline,
        may_overlap=lambda: not departure.is_deferred and departure.exit_code is None,
    )
    position = StagePosition(
        stage=topology.stage,
        p=topology.p,
        policy=Policy(environment.plan.policy),
        run_ahead=environment.plan.run_ahead,
        recompute=bool(environment.plan.recompute) and environment.plan.recompute[topology.stage],
    )
    context = StageContext(
        forward=precision.forward_context,
        backward=stage.running_again,
        written=stage.written,
        random=_random_streams(model_map, device),
    )
    engine = Engine(
        stage,
        position=position,
        links=links,
        device=device,
        departure=worker.departure,
        context=context,
        timeline=timeline,
    )
    parts = Assembly(
        stage=stage,
        engine=engine,
        reducer=reducer,
        everyone=everyone,
        replicas=replicas,
        links=links,
        timeline=timeline,
    )
    return parts, tied_groups


def _random_streams(model_map: ModelMap, device: torch.device) -> RandomStreams:
    return RandomStreams(device, model_map.draws if model_map.random_by_example else None)


def stages_of(worker: WorkerProcess, sections: int) -> tuple[range, ...]:
    """The sections of every stage. Raises ValueError when the plan does not fit this number of sections."""
    return stage_sections(worker.environment.plan.stage_starts, worker.topology.p, sections)


def agree_on_seed(seed: int, everyone: RankGroup) -> int:
    """Rank 0's seed, on every rank."""
    # In halves: gloo's int64 would do, but a seed may use all 64 bits unsigned.
    halves = torch.tensor([seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF], dtype=torch.int64)
    broadcast_from_first([halves], everyone)
    low, high = halves.tolist()
    return int(high << 32 | low)
