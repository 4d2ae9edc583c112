"""Latency, bandwidth and jitter between ranks, and the time of all-reduces, over the transport that training uses.

Ranks r and r+1 measure their link, first all pairs with an even r at once, then those with an odd r: links are as
busy as in a pipeline. All-reduces run over the first 2, 4, 8, … ranks.
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

from varuna._gloo import GlooGroup
from varuna_planner.profile import AllReduceMeasurement, Link, Links

__all__ = ["Connect", "LinkSample", "classify", "measure_all_reduce", "measure_links"]

Connect = Callable[[str, Sequence[int]], GlooGroup | None]
"""Makes the group of some ranks under a name, as `varuna.launch.Rendezvous.gloo` does."""

_WAIT = timedelta(seconds=60)
_ROUND_TRIPS = 60
_MESSAGE_BYTES = 4 * 1024 * 1024
_MESSAGES = 4
_RING_BYTES = (64 * 1024, 1024 * 1024, 8 * 1024 * 1024)
_LARGEST_RING = 32
"""Connecting a ring costs the square of its size; beyond this the planner extrapolates."""
_TIMES = 5


@dataclass(frozen=True)
class LinkSample:
    """What one pair of ranks measured, one way."""

    ranks: tuple[int, int]
    latency_us: float
    bandwidth_bytes_per_s: float
    jitter_us: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> LinkSample:
        first, second = fields["ranks"]
        return cls(**{**fields, "ranks": (first, second)})


def measure_links(rank: int, world_size: int, connect: Connect) -> list[LinkSample]:
    """The link from this rank to the next one (none on the last rank). Every rank calls it."""
    samples = []
    for parity in (0, 1):
        first = rank if rank % 2 == parity else rank - 1
        if not 0 <= first < world_size - 1:
            continue
        group = connect(f"calibrate/pair{first}", [first, first + 1])
        if group is None:
            continue
        if rank == first:
            samples.append(_initiate(group, (first, first + 1)))
        else:
            _answer(group)
    return samples


def _initiate(group: GlooGroup, ranks: tuple[int, int]) -> LinkSample:
    small, large = _buffers()
    one_way_us = []
    for _ in range(_ROUND_TRIPS):
        started_s = time.perf_counter()
        _send(group, small, 1)
        _receive(group, small, 1)
        one_way_us.append((time.perf_counter() - started_s) * 1e6 / 2)
    # The lower tenth is the link at rest; what comes on top on average is jitter.
    latency_us = sorted(one_way_us)[_ROUND_TRIPS // 10]
    jitter_us = max(0.0, statistics.fmean(one_way_us) - latency_us)
    transfers_s = []
    for _ in range(_MESSAGES):
        started_s = time.perf_counter()
        _send(group, large, 1)
        _receive(group, small, 1)
        transfers_s.append(time.perf_counter() - started_s)
    # Half of a round trip belongs to the answer, the other half to the message's own latency.
    transfer_s = max(statistics.median(transfers_s) - 2e-6 * latency_us, 1e-6)
    return LinkSample(ranks, latency_us, _MESSAGE_BYTES / transfer_s, jitter_us)


def _answer(group: GlooGroup) -> None:
    small, large = _buffers()
    for _ in range(_ROUND_TRIPS):
        _receive(group, small, 0)
        _send(group, small, 0)
    for _ in range(_MESSAGES):
        _receive(group, large, 0)
        _send(group, small, 0)


def _buffers() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(8, dtype=torch.uint8), torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8)


def _send(group: GlooGroup, tensor: torch.Tensor, to: int) -> None:
    group.send([tensor], to, 0).wait(_WAIT)


def _receive(group: GlooGroup, tensor: torch.Tensor, sender: int) -> None:
    group.recv([tensor], sender, 0).wait(_WAIT)


def measure_all_reduce(rank: int, world_size: int, connect: Connect) -> list[AllReduceMeasurement]:
    """All-reduce times by ring size and bytes, on rank 0 (empty elsewhere). Every rank calls it."""
    found = []
    for ranks in ring_sizes(world_size):
        if rank >= ranks:
            continue
        group = connect(f"calibrate/ring{ranks}", range(ranks))
        assert group is not None
        for count in _RING_BYTES:
            us = _time_all_reduce(group, count)
            if rank == 0:
                found.append(AllReduceMeasurement(ranks=ranks, bytes=count, us=us))
    return found


def ring_sizes(world_size: int) -> list[int]:
    """Doubling from 2, up to the world or the largest ring that is worth connecting; that one always."""
    largest = min(world_size, _LARGEST_RING)
    doubled = [1 << power for power in range(1, largest.bit_length())]
    return sorted({size for size in (*doubled, largest) if 2 <= size <= largest})


def _time_all_reduce(group: GlooGroup, count: int) -> float:
    """Median microseconds of an all-reduce of `count` bytes of float32."""
    tensor = torch.zeros(count // 4)
    options = AllreduceOptions()
    options.timeout = _WAIT
    times_us = []
    for _ in range(_TIMES + 1):
        started_s = time.perf_counter()
        group.allreduce([tensor], options).wait(_WAIT)
        times_us.append((time.perf_counter() - started_s) * 1e6)
    return statistics.median(times_us[1:])  # the first warms up


def classify(samples: Sequence[LinkSample], hosts: Sequence[str]) -> Links:
    """Link classes from what the pairs measured and the host of each rank.

    A class that no pair is of gets the other's figures: that is what this fleet's network is known to do. With no pair
    at all, the planner's defaults stand.
    """
    same = [sample for sample in samples if hosts[sample.ranks[0]] == hosts[sample.ranks[1]]]
    other = [sample for sample in samples if hosts[sample.ranks[0]] != hosts[sample.ranks[1]]]
    if not samples:
        return Links()
    return Links(same_vm=_typical(same or other), other_vm=_typical(other or same))


def _typical(samples: Sequence[LinkSample]) -> Link:
    return Link(
        latency_us=statistics.median(sample.latency_us for sample in samples),
        bandwidth_bytes_per_s=statistics.median(sample.bandwidth_bytes_per_s for sample in samples),
        jitter_us=statistics.median(sample.jitter_us for sample in samples),
    )
