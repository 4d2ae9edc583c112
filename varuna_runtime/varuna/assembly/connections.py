"""The connections of a rank to the other ranks of its generation: the links of its pipeline, and groups of ranks.

Letters: P stages, D replicas; rank = replica * P + stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch._C._distributed_c10d import PrefixStore

from varuna.devices.accelerator import is_accelerator
from varuna.devices.cuda_alone import nccl_device_name
from varuna.diagnostics.timeline import Timeline
from varuna.distributed.departure import Departure
from varuna.distributed.gloo import GlooGroup
from varuna.distributed.groups import RankGroup
from varuna.distributed.nccl import NcclGroup, connect_nccl, have_own_devices
from varuna.distributed.rendezvous import Rendezvous
from varuna.distributed.topology import Topology
from varuna.optim.reduction import TiedGroup
from varuna.pipeline.stage_setting import StageLinks
from varuna.pipeline.transport import LinkReceiver, LinkSender

__all__ = ["LinkGroups", "connect_holders", "connect_links", "connect_tied", "start_links"]


class LinkGroups(NamedTuple):
    """The groups of two ranks between a stage and its neighbours; None where the pipeline ends."""

    down_in: GlooGroup | None = None
    up_out: GlooGroup | None = None
    up_in: GlooGroup | None = None
    down_out: GlooGroup | None = None


def connect_links(topology: Topology, rendezvous: Rendezvous) -> LinkGroups:
    """Connects this rank to the stages before and after it in its replica.

    Groups are made stage by stage along the pipeline, so that two neighbours never wait for each other's later group.
    """
    groups = LinkGroups()
    if topology.stage > 0:
        peer = topology.rank - 1
        down, up = (rendezvous.connect_gloo(f"{way}/{peer}", (peer, topology.rank)) for way in ("down", "up"))
        groups = groups._replace(down_in=down, up_out=up)
    if topology.stage < topology.p - 1:
        peer = topology.rank + 1
        down, up = (rendezvous.connect_gloo(f"{way}/{topology.rank}", (topology.rank, peer)) for way in ("down", "up"))
        groups = groups._replace(up_in=up, down_out=down)
    return groups


def start_links(
    groups: LinkGroups, topology: Topology, device: torch.device, *, departure: Departure, timeline: Timeline
) -> StageLinks:
    """Starts the threads of the links, once all connections are made: nothing that fails then leaves one behind."""

    def receive(group: GlooGroup | None, *, peer: int, peer_in_group: int, carries: str) -> LinkReceiver | None:
        if group is None:
            return None
        return LinkReceiver(
            group,
            peer=peer,
            peer_in_group=peer_in_group,
            pinned=is_accelerator(device),
            departure=departure,
            carries=carries,
            timeline=timeline,
        )

    def send(group: GlooGroup | None, *, peer: int, peer_in_group: int, carries: str) -> LinkSender | None:
        if group is None:
            return None
        return LinkSender(
            group, peer=peer, peer_in_group=peer_in_group, departure=departure, carries=carries, timeline=timeline
        )

    before, after = topology.rank - 1, topology.rank + 1
    return StageLinks(
        activations_in=receive(groups.down_in, peer=before, peer_in_group=0, carries="activations"),
        gradients_out=send(groups.up_out, peer=before, peer_in_group=0, carries="gradients"),
        gradients_in=receive(groups.up_in, peer=after, peer_in_group=1, carries="gradients"),
        activations_out=send(groups.down_out, peer=after, peer_in_group=1, carries="activations"),
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
