"""Latency, bandwidth and jitter between ranks, and the time of all-reduces, over the transport that training uses.

Ranks r and r+1 measure their link both ways (activations go one way, their gradients the other), first all pairs with
an even r at once, then those with an odd r: links are as busy as in a pipeline. Between hosts, large messages also go
over several connections, because many networks limit what one carries. All-reduces run over one rank of each
of the first 2, 4, 8, … VMs, as the replicas of a stage lie; first one ring alone, then as many as the VMs have ranks.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import AllreduceOptions

from varuna.distributed.gloo import GlooGroup
from varuna.distributed.link_connections import Connection, make_connection
from varuna_planner.profile.document import AllReduceMeasurement, Link, Links

__all__ = ["GroupConnector", "LinkSample", "classify_links", "is_across_zones", "measure_all_reduce", "measure_links"]

GroupConnector = Callable[[str, Sequence[int]], GlooGroup | None]
"""Makes the named group of some ranks, as `varuna.distributed.rendezvous.Rendezvous.connect_gloo` does."""

_WAIT = timedelta(seconds=60)
_ROUND_TRIPS = 60
_MESSAGE_BYTES = 4 * 1024 * 1024
_MESSAGES = 4
_SEVERAL = (2, 4)
"""Numbers of connections that are tried beside one."""
_LEAST_GAIN = 1.1
"""More connections are worth their threads where they are this many times as fast."""
_RING_BYTES = (64 * 1024, 1024 * 1024, 8 * 1024 * 1024)
_LARGEST_RING = 32
"""Connecting a ring takes time quadratic in its size; beyond this size the planner extrapolates."""
_TIMES = 5


@dataclass(frozen=True)
class LinkSample:
    """A link between two ranks, measured one way."""

    ranks: tuple[int, int]
    """From the first to the second."""
    latency_us: float
    bandwidth_bytes_per_s: float
    """Over one connection."""
    jitter_us: float
    several_bytes_per_s: tuple[float, ...] = ()
    """The bandwidth over each of `_SEVERAL` connections; empty within a host."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> LinkSample:
        first, second = fields["ranks"]
        return cls(**{**fields, "ranks": (first, second), "several_bytes_per_s": tuple(fields["several_bytes_per_s"])})


def measure_links(rank: int, hosts: Sequence[str], connect: GroupConnector) -> list[LinkSample]:
    """Measures the links from this rank to its neighbours. Called by all ranks. `hosts`: the VM of each rank."""
    samples = []
    for parity in (0, 1):
        first = rank if rank % 2 == parity else rank - 1
        if not 0 <= first < len(hosts) - 1:
            continue
        other = 2 * first + 1 - rank
        counts = (1, *_SEVERAL) if hosts[first] != hosts[first + 1] else (1,)
        names = [f"calibrate/pair{first}", *(f"calibrate/pair{first}/{i}" for i in range(1, counts[-1]))]
        groups = [group for name in names if (group := connect(name, [first, first + 1])) is not None]
        if not groups:
            continue
        connections = [make_connection(groups[:count], other - first) for count in counts]
        for sender in (first, first + 1):
            if rank == sender:
                samples.append(_measure_as_sender(connections, (rank, other)))
            else:
                _answer_sender(connections)
        for connection in connections:
            connection.end()
    return samples


def _measure_as_sender(connections: Sequence[Connection], ranks: tuple[int, int]) -> LinkSample:
    """Measures the link as its sender. `connections`: over one, and over each of `_SEVERAL`."""
    single = connections[0]
    small, large = _buffers()
    one_way_us = []
    for _ in range(_ROUND_TRIPS):
        started_s = time.perf_counter()
        _send(single, small)
        _receive(single, small)
        one_way_us.append((time.perf_counter() - started_s) * 1e6 / 2)
    # The lower tenth is the link at rest; the average excess over it is jitter.
    latency_us = sorted(one_way_us)[_ROUND_TRIPS // 10]
    jitter_us = max(0.0, statistics.fmean(one_way_us) - latency_us)
    transfers_s: list[list[float]] = [[] for _ in connections]
    for _ in range(_MESSAGES):
        for connection, times_s in zip(connections, transfers_s, strict=True):  # in turns, for others use the link, too
            started_s = time.perf_counter()
            _send(connection, large)
            _receive(single, small)
            times_s.append(time.perf_counter() - started_s)
    # Half of a round trip belongs to the answer, the other half to the message's own latency.
    bandwidth, *several = (
        _MESSAGE_BYTES / max(statistics.median(times_s) - 2e-6 * latency_us, 1e-6) for times_s in transfers_s
    )
    return LinkSample(ranks, latency_us, bandwidth, jitter_us, tuple(several))


def _answer_sender(connections: Sequence[Connection]) -> None:
    single = connections[0]
    small, large = _buffers()
    for _ in range(_ROUND_TRIPS):
        _receive(single, small)
        _send(single, small)
    for _ in range(_MESSAGES):
        for connection in connections:
            _receive(connection, large)
            _send(single, small)


def _buffers() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(8, dtype=torch.uint8), torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8)


def _send(connection: Connection, tensor: torch.Tensor) -> None:
    connection.start_sending(tensor, 0).wait(_WAIT)


def _receive(connection: Connection, tensor: torch.Tensor) -> None:
    connection.start_receiving(tensor, 0).wait(_WAIT)


def measure_all_reduce(rank: int, hosts: Sequence[str], connect: GroupConnector) -> list[AllReduceMeasurement]:
    """All-reduce times by ring size, rings at once and bytes, on rank 0 (empty elsewhere). Called by all ranks.

    `hosts`: the VM of each rank.
    """
    found = []
    connected: dict[tuple[int, ...], GlooGroup] = {}

    def group_of(ranks: tuple[int, ...]) -> GlooGroup:
        if ranks not in connected:
            group = connect("calibrate/ring" + ".".join(map(str, ranks)), ranks)
            assert group is not None
            connected[ranks] = group
        return connected[ranks]

    for rings in rings_to_measure(hosts):
        mine = next((ring for ring in rings if rank in ring), None)
        if mine is None:
            continue
        ring = group_of(mine)
        # The ranks beside this one on its VM, one of each ring.
        beside = group_of(tuple(other[mine.index(rank)] for other in rings)) if len(rings) > 1 else None
        for count in _RING_BYTES:
            us = _time_all_reduce(ring, beside, count)
            if rank == 0:
                found.append(AllReduceMeasurement(ranks=len(mine), bytes=count, us=us, rings=len(rings)))
    return found


def rings_to_measure(hosts: Sequence[str]) -> list[tuple[tuple[int, ...], ...]]:
    """Sets of rings (their ranks) that run at once, one set after the other; rank 0 is in the first ring of each set.

    Over several VMs a ring has one rank on each. On a lone VM there is one ring at a time, over its first ranks.
    """
    vms: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        vms.setdefault(host, []).append(rank)
    if len(vms) == 1:
        return [(tuple(range(size)),) for size in ring_sizes(len(hosts))]
    at_once = min(len(ranks) for ranks in vms.values())
    found = []
    for size in ring_sizes(len(vms)):
        rings = tuple(tuple(ranks[local] for ranks in list(vms.values())[:size]) for local in range(at_once))
        found.append(rings[:1])
        if at_once > 1:
            found.append(rings)
    return found


def ring_sizes(world_size: int) -> list[int]:
    """Powers of two up to the world size or `_LARGEST_RING`, and always that limit itself."""
    largest = min(world_size, _LARGEST_RING)
    doubled = [1 << power for power in range(1, largest.bit_length())]
    return sorted({size for size in (*doubled, largest) if 2 <= size <= largest})


def _time_all_reduce(ring: GlooGroup, beside: GlooGroup | None, count: int) -> float:
    """Median microseconds of an all-reduce of `count` bytes of float32. The ranks `beside` start theirs with it."""
    tensor, together = torch.zeros(count // 4), torch.zeros(1)
    times_us = []
    for _ in range(_TIMES + 1):
        if beside is not None:
            _all_reduce(beside, together)
        started_s = time.perf_counter()
        _all_reduce(ring, tensor)
        times_us.append((time.perf_counter() - started_s) * 1e6)
    return statistics.median(times_us[1:])  # the first one warms up


def _all_reduce(group: GlooGroup, tensor: torch.Tensor) -> None:
    options = AllreduceOptions()
    options.timeout = _WAIT
    group.allreduce([tensor], options).wait(_WAIT)


def classify_links(samples: Sequence[LinkSample], hosts: Sequence[str], zones: Sequence[str] = ()) -> Links:
    """Link classes from the measured pairs and the host and zone of each rank.

    A class of links between or within VMs that has no pair gets the figures of the next one, because they are all that
    is known of this network. Without any pair the planner's defaults stand. Links between zones are a class only where
    there is such a pair.

    Args:
        zones: an empty name, or none at all: not known.
    """
    if not samples:
        return Links()
    same, other, across = [], [], []
    for sample in samples:
        first, second = sample.ranks
        if hosts[first] == hosts[second]:
            same.append(sample)
        elif zones and is_across_zones(zones[first], zones[second]):
            across.append(sample)
        else:
            other.append(sample)
    return Links(
        same_vm=_typical(same or other or across),
        other_vm=_typical(other or across or same),
        other_zone=_typical(across) if across else None,
    )


def is_across_zones(first: str, second: str) -> bool:
    """Whether the zones of two VMs are known to differ."""
    return bool(first and second) and first != second


def _typical(samples: Sequence[LinkSample]) -> Link:
    connections, bandwidth = _choose_connections(samples)
    return Link(
        latency_us=statistics.median(sample.latency_us for sample in samples),
        bandwidth_bytes_per_s=bandwidth,
        jitter_us=statistics.median(sample.jitter_us for sample in samples),
        connections=connections,
    )


def _choose_connections(samples: Sequence[LinkSample]) -> tuple[int, float]:
    """How many connections each link is to have, and the bandwidth with them."""
    chosen, bandwidth = 1, statistics.median(sample.bandwidth_bytes_per_s for sample in samples)
    for place, count in enumerate(_SEVERAL):
        measured = [sample.several_bytes_per_s[place] for sample in samples if sample.several_bytes_per_s]
        if measured and statistics.median(measured) >= _LEAST_GAIN * bandwidth:
            chosen, bandwidth = count, statistics.median(measured)
    return chosen, bandwidth
