"""Which rank does what in a generation of P×D, and the groups in which the ranks speak.

Letters: P stages, D replicas; rank = replica * P + stage; K sections.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch._C._distributed_c10d import PrefixStore

from varuna.departure import Departure
from varuna.launch import Group, Rendezvous
from varuna.nccl import NcclGroup, connect_nccl, device_name, each_its_own
from varuna.optim import TiedGroup
from varuna.pipeline.engine import Links
from varuna.pipeline.timeline import Timeline
from varuna.pipeline.transport import Inbox, Outbox
from varuna_planner.batching import micro_batch_sizes, micro_batches
from varuna_proto.environment import WorkerEnvironment

__all__ = [
    "Topology",
    "connect_holders",
    "connect_links",
    "connect_tied",
    "share_of_batch",
    "stage_sections",
    "tied_over_stages",
]


@dataclass(frozen=True)
class Topology:
    """The shape of a generation, and this rank's place in it."""

    p: int
    d: int
    rank: int

    @property
    def stage(self) -> int:
        return self.rank % self.p

    @property
    def replica(self) -> int:
        return self.rank // self.p

    @property
    def everyone(self) -> tuple[int, ...]:
        return tuple(range(self.p * self.d))

    def ranks_of(self, stages: Sequence[int]) -> tuple[int, ...]:
        """The ranks of all replicas of these stages, replica by replica."""
        return tuple(replica * self.p + stage for replica in range(self.d) for stage in sorted(stages))


def stage_sections(starts: Sequence[int], p: int, section_count: int) -> tuple[range, ...]:
    """The sections of each stage. Empty `starts`: as many in each as can be.

    Raises ValueError when the starts do not fit P or the model's number of sections.
    """
    if p > section_count:
        raise ValueError(
            f"P={p} stages, but the model has only {section_count} section(s): use at most {section_count} stages, "
            "or place more CutPoints in the model"
        )
    starts = tuple(starts) or tuple(stage * section_count // p for stage in range(p))
    ends = (*starts[1:], section_count)
    if len(starts) != p or starts[0] != 0 or any(a >= b for a, b in zip(starts, ends, strict=True)):
        raise ValueError(
            f"stage starts {list(starts)} do not cut {section_count} sections into {p} stages: "
            f"give {p} rising section numbers that begin with 0 and end below {section_count}"
        )
    return tuple(range(a, b) for a, b in zip(starts, ends, strict=True))


def share_of_batch(examples: int, environment: WorkerEnvironment, replica: int) -> tuple[tuple[int, ...], int]:
    """(sizes of this replica's micro-batches, number of the first in the global batch) for `examples` local examples.

    A batch other than the agreed one (the end of a data set, an evaluation) is cut into micro-batches just the same.
    """
    m = environment.micro_batch
    if not environment.global_batch:  # a single process that was told nothing of it: what comes is the whole batch
        return (micro_batch_sizes(examples, m or examples) if examples else ()), 0
    run = micro_batches(environment.global_batch, m, environment.d)[replica]
    sizes = micro_batch_sizes(environment.global_batch, m)[run.start : run.stop]
    if sum(sizes) != examples:
        sizes = micro_batch_sizes(examples, m) if examples else ()
    return sizes, run.start


def connect_links(
    topology: Topology,
    rendezvous: Rendezvous,
    device: torch.device,
    departure: Departure,
    timeline: Timeline | None = None,
) -> Links:
    """Connects this rank to the stages before and after it in its replica, and starts their threads.

    Groups are made stage by stage along the pipeline, so two neighbours never wait for each other's later group.
    """
    pinned = device.type == "cuda"
    links = Links()
    if topology.stage > 0:
        peer = topology.rank - 1
        down, up = (rendezvous.gloo(f"{way}/{peer}", (peer, topology.rank)) for way in ("down", "up"))
        links = replace(
            links,
            activations_in=Inbox(down, peer, 0, pinned, departure, carries="activations", timeline=timeline),
            gradients_out=Outbox(up, peer, 0, departure, carries="gradients", timeline=timeline),
        )
    if topology.stage < topology.p - 1:
        peer = topology.rank + 1
        down, up = (rendezvous.gloo(f"{way}/{topology.rank}", (topology.rank, peer)) for way in ("down", "up"))
        links = replace(
            links,
            gradients_in=Inbox(up, peer, 1, pinned, departure, carries="gradients", timeline=timeline),
            activations_out=Outbox(down, peer, 1, departure, carries="activations", timeline=timeline),
        )
    return links


def connect_holders(
    topology: Topology,
    name: str,
    ranks: Sequence[int],
    rendezvous: Rendezvous,
    device: torch.device,
    departure: Departure,
) -> Group:
    """The group of `ranks`, of which this is one, that hold the same parameters on their `device`s.

    Over NCCL if each of them has a CUDA device of its own; over gloo on CPUs and where ranks share a device.
    """
    if device.type == "cuda" and len(ranks) > 1:
        devices = rendezvous.exchange(f"{name}/device", ranks, device_name(device))
        if each_its_own(devices):
            own = list(ranks).index(topology.rank)
            group = connect_nccl(PrefixStore(f"{name}/nccl", rendezvous.store), own, len(ranks))
            return NcclGroup(group, ranks, departure)
    return rendezvous.group(name, ranks)


def connect_tied(
    topology: Topology,
    rendezvous: Rendezvous,
    tied: Mapping[str, tuple[int, ...]],
    device: torch.device,
    departure: Departure,
) -> list[TiedGroup]:
    """The groups in which this rank's tied parameters (name -> stages) are summed, one per combination of stages."""
    by_stages: dict[tuple[int, ...], list[str]] = {}
    for name, stages in tied.items():
        by_stages.setdefault(stages, []).append(name)
    return [
        TiedGroup(
            connect_holders(
                topology, f"tied/{'-'.join(map(str, stages))}", topology.ranks_of(stages), rendezvous, device, departure
            ),
            tuple(by_stages[stages]),
        )
        for stages in sorted(by_stages)
        if topology.stage in stages
    ]


def tied_over_stages(shared: Mapping[str, Sequence[int]], stages: Sequence[range]) -> dict[str, tuple[int, ...]]:
    """The parameters that sections of more than one stage use -> those stages, from name -> sections."""
    holders = {
        name: tuple(stage for stage, held in enumerate(stages) if any(section in held for section in sections))
        for name, sections in shared.items()
    }
    return {name: holding for name, holding in holders.items() if len(holding) > 1}
