"""The usage of a VM over its life in few points: the newest are dense, older ones are means of ever longer times."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import astuple, dataclass, fields

MOST_POINTS = 480
"""When there are more, each two neighbours of the older half become one."""
POINT_S = 15.0
"""Samples of this time are one point at first."""


@dataclass(frozen=True, kw_only=True)
class UsagePoint:
    """Means. NaN: not known."""

    at: float
    """Seconds since the epoch (UTC)."""
    cpu_share: float
    """0 to 1, of all processors."""
    memory_used_bytes: float
    memory_bytes: float
    received_bytes_per_s: float
    sent_bytes_per_s: float
    gpu_share: float = math.nan
    """0 to 1: the part of the time in which the GPUs computed, over all of them."""
    gpu_memory_used_bytes: float = math.nan
    """Of all GPUs."""
    gpu_memory_bytes: float = math.nan


_NAMES = tuple(field.name for field in fields(UsagePoint))
_PACKED = struct.Struct(f"<d{len(_NAMES) - 1}f")


def pack_point(point: UsagePoint) -> bytes:
    return _PACKED.pack(*astuple(point))


def unpack_points(packed: bytes) -> Iterator[UsagePoint]:
    """The points, oldest first. Bytes that a later version has packed otherwise are left out."""
    whole = len(packed) - len(packed) % _PACKED.size
    for values in _PACKED.iter_unpack(packed[:whole]):
        yield UsagePoint(**dict(zip(_NAMES, values, strict=True)))


def add_points(packed: bytes, more: bytes) -> bytes:
    """All points, but no more than MOST_POINTS."""
    joined = packed + more
    while len(joined) > MOST_POINTS * _PACKED.size:
        points = list(unpack_points(joined))
        half = len(points) // 2 // 2 * 2
        merged = [average(points[index : index + 2]) for index in range(0, half, 2)]
        joined = b"".join(map(pack_point, [*merged, *points[half:]]))
    return joined


def average(points: list[UsagePoint]) -> UsagePoint:
    """One point for several, at their mean time. What is not known of some is the mean of the others."""

    def mean(name: str) -> float:
        known = [value for point in points if not math.isnan(value := getattr(point, name))]
        return sum(known) / len(known) if known else math.nan

    return UsagePoint(**{name: mean(name) for name in _NAMES})
