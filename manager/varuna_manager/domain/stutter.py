"""Fail-stutter: which VMs are slow, by their workers' compute time per micro-batch without waiting.

A synchronous pipeline runs at the pace of its slowest rank, so one slow VM slows all. A rank is compared with the other
replicas of its stage on GPUs of its type, which do the same work equally fast. A rank without such replicas is compared
with the profile, scaled by the pace of the other ranks of its type, or of all where there are none. A slow rank is
slower by a ratio that matters and by more than noise, in several looks in a row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

NOISE = 3.5
"""Robust z-score beyond which a difference is no noise: the usual bound for outliers by median and MAD."""
_MAD_TO_SIGMA = 1.4826
_MEDIAN_ERROR = 1.2533
"""Standard error of a median of n independent values, in units of sigma/√n."""
_STEPS_PER_VALUE = 2.0
"""Neighbouring steps are not independent: this many count as one."""
_LEAST_SIGMA = 0.01
"""As a fraction of the median: clocks and counters are no more exact."""


@dataclass(frozen=True, kw_only=True)
class RankTimes:
    """The time of one rank for a micro-batch, forward and backward, over the steps of a window."""

    stage: int
    vm_id: str
    median_us: float
    mad_us: float
    """Median absolute deviation over the window."""
    steps: int
    """Steps in the window."""
    expected_us: float
    """The time that the profile predicts on its type of GPU."""
    gpu_type: str = ""
    is_type_profiled: bool = True
    """Whether the profile has the times of its type of GPU; else it is expected to be as fast as another type."""


@dataclass(frozen=True, kw_only=True)
class Slowness:
    """How much slower than its peers a VM's slowest rank is."""

    vm_id: str
    rank: int
    ratio: float
    """Its time over that of its peers."""
    z: float
    """The difference in units of its noise."""
    against: str
    """What it was compared with, as text."""

    @property
    def reason(self) -> str:
        return f"rank {self.rank} takes {self.ratio:.2f} times as long as {self.against} (z {self.z:.1f})"


def compare_ranks(ranks: Mapping[int, RankTimes]) -> dict[str, Slowness]:
    """The slowness of every VM, by its slowest rank. Ranks without peers or profile are left out."""
    found: dict[str, Slowness] = {}
    for number, rank in ranks.items():
        others = [other for n, other in ranks.items() if n != number]
        equals = [other for other in others if other.gpu_type == rank.gpu_type]
        replicas = [other for other in equals if other.stage == rank.stage]
        on_type = f" on {rank.gpu_type}" if rank.gpu_type and len(equals) < len(others) else ""
        slowness = None
        if replicas:
            slowness = _among_replicas(number, rank, replicas, on_type)
        elif equals:
            slowness = _against_profile(number, rank, equals, on_type)
        elif rank.is_type_profiled:
            slowness = _against_profile(number, rank, others, "")
        if slowness is not None and slowness.ratio > found.get(rank.vm_id, _NOT_SLOW).ratio:
            found[rank.vm_id] = slowness
    return found


_NOT_SLOW = Slowness(vm_id="", rank=-1, ratio=0.0, z=0.0, against="")


def _among_replicas(number: int, rank: RankTimes, peers: Sequence[RankTimes], on_type: str) -> Slowness:
    usual = median(peer.median_us for peer in peers)
    spread = median(abs(peer.median_us - usual) for peer in peers)
    count = len(peers)
    replicas = f"the other replica{'s' if count > 1 else ''} of stage {rank.stage}{on_type}"
    against = f"{replicas} ({usual / 1e3:.3g} ms per micro-batch)"
    return _slowness(number, rank, usual, spread, against)


def _against_profile(number: int, rank: RankTimes, others: Sequence[RankTimes], on_type: str) -> Slowness | None:
    """An excess over the profile that all the others have is the profile's error, not this VM's."""
    paces = [other.median_us / other.expected_us for other in others if other.expected_us > 0]
    if not paces or rank.expected_us <= 0:
        return None
    pace = median(paces)
    usual = rank.expected_us * pace
    spread = median(abs(each - pace) for each in paces) * rank.expected_us
    against = f"its profile predicts at the pace of the other stages{on_type} ({usual / 1e3:.3g} ms per micro-batch)"
    return _slowness(number, rank, usual, spread, against)


def _slowness(number: int, rank: RankTimes, usual: float, spread_us: float, against: str) -> Slowness:
    """`spread_us`: median absolute deviation of the ranks that it is compared with."""
    # Its own variation from step to step makes its median uncertain by much less.
    own_error = _MEDIAN_ERROR * _MAD_TO_SIGMA * rank.mad_us / math.sqrt(rank.steps / _STEPS_PER_VALUE)
    sigma = max(_MAD_TO_SIGMA * spread_us, own_error, _LEAST_SIGMA * usual)
    ratio = rank.median_us / usual if usual > 0 else 1.0
    return Slowness(vm_id=rank.vm_id, rank=number, ratio=ratio, z=(rank.median_us - usual) / sigma, against=against)


@dataclass(frozen=True, kw_only=True)
class SlownessRecord:
    """What the next look knows of a VM."""

    looks: int = 0
    """Looks in a row in which it was slow."""
    is_slow: bool = False


def update_records(
    before: Mapping[str, SlownessRecord], slowness: Mapping[str, Slowness], *, threshold: float, looks: int
) -> dict[str, SlownessRecord]:
    """The new record of each VM that was compared.

    A VM is slow after `looks` looks in a row in which it was beyond `threshold` (0.15: 15 % slower) and beyond noise.
    It is no longer slow when it is back under half the threshold.
    """
    after = {}
    for vm_id, now in slowness.items():
        was = before.get(vm_id, SlownessRecord())
        beyond = now.ratio > 1 + threshold and now.z > NOISE
        count = was.looks + 1 if beyond else 0
        is_slow = count >= looks or (was.is_slow and now.ratio > 1 + threshold / 2)
        after[vm_id] = SlownessRecord(looks=count, is_slow=is_slow)
    return after
