"""The connections of a rank to the other ranks of its generation: the links of its pipeline, and groups of ranks.

Letters: P stages, D replicas; rank = replica * P + stage.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch._C._distributed_c10d import PrefixStore

from varuna.devices.accelerator import is_accelerator
from varuna.devices.cuda_alone import nccl_device_name
from varuna.diagnostics.timeline import Timeline
from varuna.distributed.departure import Departure
from varuna.distributed.groups import RankGroup
from varuna.distributed.link_connections import Connection, make_connection
from varuna.distributed.nccl import NcclGroup, connect_nccl, have_own_devices
from varuna.distributed.rendezvous import Rendezvous
from varuna.distributed.topology import Topology
from varuna.optim.reduction import TiedGroup
from varuna.pipeline.stage_setting import StageLinks
from varuna.pipeline.transport import LinkReceiver, LinkSender

__all__ = ["LinkConnections", "connect_holders", "connect_links", "connect_tied", "start_links"]


class LinkConnections(NamedTuple):
    """The connections of a stage to its neighbours; None where the pipeline ends."""

    down_in: Connection | None = None
    up_out: Connection | None = None
    up_in: Connection | None = None
    down_out: Connection | None = None


def connect_links(topology: Topology, rendezvous: Rendezvous, count: int = 1) -> LinkConnections:
    """Connects this rank to the stages before and after it in its replica.

    `count`: the TCP connections of each link and direction between two hosts; within a host there is one.

    Groups are made stage by stage along the pipeline, so that two neighbours never wait for each other's later group.
    """
    links = LinkConnections()
    if topology.stage > 0:
        down, up = _connect_stages(topology.rank - 1, rendezvous, count, peer_in_group=0)
        links = links._replace(down_in=down, up_out=up)
    if topology.stage < topology.p - 1:
        down, up = _connect_stages(topology.rank, rendezvous, count, peer_in_group=1)
        links = links._replace(up_in=up, down_out=down)
    return links


def _connect_stages(first: int, rendezvous: Rendezvous, count: int, *, peer_in_group: int) -> tuple[Connection, ...]:
    """The connections, down and up, between the ranks `first` and `first` + 1, of which this one is not the peer."""
    ranks = (first, first + 1)
    if count > 1:
        hosts = rendezvous.exchange_values(f"host/{first}", ranks, socket.gethostname())
        count = count if hosts[0] != hosts[1] else 1
    return tuple(
        make_connection([rendezvous.connect_gloo(name, ranks) for name in names], peer_in_group)
        for names in ([f"{way}/{first}", *(f"{way}/{first}/{i}" for i in range(1, count))] for way in ("down", "up"))
    )


def start_links(
    connections: LinkConnections, topology: Topology, device: torch.device, *, departure: Departure, timeline: Timeline
) -> StageLinks:
    """Starts the threads of the links, once all connections are made: nothing that fails then leaves one behind."""

    def receive(connection: Connection | None, *, peer: int, carries: str) -> LinkReceiver | None:
        if connection is None:
            return None
        pinned = is_accelerator(device)
        return LinkReceiver(
            connection, peer=peer, pinned=pinned, departure=departure, carries=carries, timeline=timeline
        )

    def send(connection: Connection | None, *, peer: int, carries: str) -> LinkSender | None:
        if connection is None:
            return None
        return LinkSender(connection, peer=peer, departure=departure, carries=carries, timeline=timeline)

    before, after = topology.rank - 1, topology.rank + 1
    return StageLinks(
        activations_in=receive(connections.down_in, peer=before, carries="activations"),
        gradients_out=send(connections.up_out, peer=before, carries="gradients"),
        gradients_in=receive(connections.up_in, peer=after, carries="gradients"),
        activations_out=send(connections.down_out, peer=after, carries="activations"),
    )


def connect_holders(
    topology: Topology,
    name: str,
    ranks: Sequence[int],
    *,
    rendezvous: Rendezvous,
    device: torch.device,
    departure: Departure,
) -> RankGroup:
    """Connects this rank to the others of `ranks`, which hold the same parameters on their `device`s.

    The group uses NCCL if each rank has a CUDA device of its own, and gloo on CPUs and where ranks share a device.
    """
    if device.type == "cuda" and len(ranks) > 1:
        devices = rendezvous.exchange_values(f"{name}/device", ranks, nccl_device_name(device))
        if have_own_devices(devices):
            own = list(ranks).index(topology.rank)
            store = PrefixStore(f"{name}/nccl", rendezvous.store)
            group = connect_nccl(store, own, len(ranks), address=rendezvous.own_address())
            rendezvous.abort_at_end(group)
            return NcclGroup(group, ranks, departure)
    return rendezvous.make_group(name, ranks)


def connect_tied(
    topology: Topology,
    rendezvous: Rendezvous,
    tied: Mapping[str, tuple[int, ...]],
    *,
    device: torch.device,
    departure: Departure,
) -> list[TiedGroup]:
    """Connects the groups that sum this rank's tied parameters (name -> stages): one for each combination of stages."""
    by_stages: dict[tuple[int, ...], list[str]] = {}
    for name, stages in tied.items():
        by_stages.setdefault(stages, []).append(name)
    return [
        TiedGroup(
            connect_holders(
                topology,
                f"tied/{'-'.join(map(str, stages))}",
                topology.ranks_of(stages),
                rendezvous=rendezvous,
                device=device,
                departure=departure,
            ),
            tuple(by_stages[stages]),
        )
        for stages in sorted(by_stages)
        if topology.stage in stages
    ]
