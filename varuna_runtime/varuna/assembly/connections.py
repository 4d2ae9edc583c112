"""The connections of a rank to the other ranks of its generation: the links of its pipeline, and groups of ranks.

Letters: P stages, D replicas; rank = replica * P + stage.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch._C._distributed_c10d import PrefixStore

from varuna.devices.accelerator import is_accelerator
from varuna.devices.cuda_alone import nccl_device_name
from varuna.diagnostics.timeline import Timeline
from varuna.distributed.departure import Departure
from varuna.distributed.groups import RankGroup
from varuna.distributed.link_connections import Connection, make_connection
from varuna.distributed.nccl import NcclGroup, NcclPair, connect_nccl, have_own_devices
from varuna.distributed.rendezvous import Rendezvous
from varuna.distributed.topology import Topology
from varuna.optim.reduction import TiedGroup
from varuna.pipeline.device_transport import DeviceLinkReceiver, DeviceLinkSender
from varuna.pipeline.stage_setting import StageLinks
from varuna.pipeline.transport import LinkOptions, LinkReceiver, LinkSender, MessageReceiver, MessageSender

__all__ = [
    "LINK_KINDS",
    "LinkConnections",
    "LinkConnector",
    "LinkKind",
    "connect_holders",
    "connect_tied",
    "start_links",
]


LinkKind = Literal["gloo", "nccl", "nccl-everywhere"]
"""What carries the links: gloo; NCCL between ranks on one host, gloo between hosts; NCCL."""

LINK_KINDS: tuple[LinkKind, ...] = get_args(LinkKind)

LinkConnection = Connection | NcclPair


class LinkConnections(NamedTuple):
    """The connections of a stage to its neighbours; None where the pipeline ends."""

    down_in: LinkConnection | None = None
    up_out: LinkConnection | None = None
    up_in: LinkConnection | None = None
    down_out: LinkConnection | None = None


@dataclass(frozen=True, kw_only=True)
class LinkConnector:
    """Connects a rank to the stages before and after it in its replica."""

    rendezvous: Rendezvous
    device: torch.device
    count: int = 1
    """TCP connections of each link and direction between two hosts over gloo; within a host there is one."""
    kind: LinkKind = "gloo"

    def connect_links(self, topology: Topology) -> LinkConnections:
        """Makes the connections, stage by stage along the pipeline, so that two neighbours never wait for each other's
        later one.

        Raises ValueError on all ranks of a pipeline that is to use NCCL when one of them has no CUDA device of its own.
        """
        links = LinkConnections()
        if self.kind != "gloo" and topology.p > 1:
            self._require_own_devices(topology.everyone)
        if topology.stage > 0:
            down, up = self._connect_stages(topology.rank - 1, peer_in_group=0)
            links = links._replace(down_in=down, up_out=up)
        if topology.stage < topology.p - 1:
            down, up = self._connect_stages(topology.rank, peer_in_group=1)
            links = links._replace(up_in=up, down_out=down)
        return links

    def _require_own_devices(self, ranks: Sequence[int]) -> None:
        devices = self.rendezvous.exchange_values("links/device", ranks, nccl_device_name(self.device))
        for rank, name in enumerate(devices):
            if not name or name in devices[:rank]:
                why = f"shares its device with rank {devices.index(name)}" if name else "has no CUDA device"
                raise ValueError(
                    f"links={self.kind!r}: rank {rank} {why}, and NCCL needs one for each rank: give each rank a GPU "
                    "of its own, or leave out `links`"
                )

    def _connect_stages(self, first: int, *, peer_in_group: int) -> tuple[LinkConnection, LinkConnection]:
        """Down and up, between the ranks `first` and `first` + 1. This rank is one of them."""
        ranks, is_on_host = (first, first + 1), True
        if self.count > 1 or self.kind == "nccl":
            hosts = self.rendezvous.exchange_values(f"host/{first}", ranks, socket.gethostname())
            is_on_host = hosts[0] == hosts[1]
        if self.kind == "nccl-everywhere" or (self.kind == "nccl" and is_on_host):
            return self._pair(f"down/{first}", peer_in_group), self._pair(f"up/{first}", peer_in_group)
        count = 1 if is_on_host else self.count

        def connect(way: str) -> Connection:
            names = [f"{way}/{first}", *(f"{way}/{first}/{number}" for number in range(1, count))]
            return make_connection([self.rendezvous.connect_gloo(name, ranks) for name in names], peer_in_group)

        return connect("down"), connect("up")

    def _pair(self, name: str, peer_in_group: int) -> NcclPair:
        store = PrefixStore(f"{name}/nccl", self.rendezvous.store)
        group = connect_nccl(store, 1 - peer_in_group, 2, address=self.rendezvous.own_address())
        self.rendezvous.abort_at_end(group)
        return NcclPair(group, peer_in_group)


def start_links(
    connections: LinkConnections, topology: Topology, device: torch.device, *, departure: Departure, timeline: Timeline
) -> StageLinks:
    """Starts the threads of the links, once all connections are made: nothing that fails then leaves one behind."""

    def receive(connection: LinkConnection | None, *, peer: int, carries: str) -> MessageReceiver[Any] | None:
        options = LinkOptions(peer=peer, departure=departure, carries=carries, timeline=timeline)
        if connection is None:
            return None
        if isinstance(connection, NcclPair):
            return DeviceLinkReceiver(connection, device, **options)
        return LinkReceiver(connection, pinned=is_accelerator(device), **options)

    def send(connection: LinkConnection | None, *, peer: int, carries: str) -> MessageSender | None:
        options = LinkOptions(peer=peer, departure=departure, carries=carries, timeline=timeline)
        if connection is None:
            return None
        if isinstance(connection, NcclPair):
            return DeviceLinkSender(connection, device, **options)
        return LinkSender(connection, **options)

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
