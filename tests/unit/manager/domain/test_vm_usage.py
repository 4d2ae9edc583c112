"""The points of a VM's usage: bounded, in order, dense at the end, and true to the mean."""

from __future__ import annotations

import itertools
import math
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from varuna_manager.domain.vm_usage import MOST_POINTS, UsagePoint, add_points, average, pack_point, unpack_points


def point(at: float, cpu_share: float = 0.5, **values: float) -> UsagePoint:
    known = {"memory_used_bytes": 1.0, "memory_bytes": 2.0, "received_bytes_per_s": 0.0, "sent_bytes_per_s": 0.0}
    return UsagePoint(at=at, cpu_share=cpu_share, **{**known, **values})


@cache
def packed_point(number: int) -> bytes:
    """One of a series, every 15 seconds."""
    return pack_point(point(15.0 * number))


@pytest.mark.long
@given(st.lists(st.integers(1, 300), min_size=1, max_size=12))
def test_they_are_bounded_cover_the_whole_life_and_are_dense_at_the_end(parts: list[int]) -> None:
    packed, at = b"", 0
    for count in parts:
        packed = add_points(packed, b"".join(packed_point(at + i) for i in range(count)))
        at += count
    points = list(unpack_points(packed))
    assert min(at, MOST_POINTS // 2) <= len(points) <= MOST_POINTS
    times = [one.at for one in points]
    assert times == sorted(times)
    assert times[-1] == 15.0 * (at - 1)
    assert times[0] <= 15.0 * at / 2
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert not gaps or gaps[-1] == 15.0


def test_what_is_not_known_does_not_count() -> None:
    found = average([point(0, gpu_share=0.5), point(2, 0.7), point(4, 0.9)])
    assert (found.at, found.cpu_share, found.gpu_share) == (2.0, pytest.approx(0.7), 0.5)
    assert math.isnan(found.gpu_memory_bytes)
    (unpacked,) = unpack_points(pack_point(found) + b"cut")
    assert unpacked.gpu_share == 0.5
