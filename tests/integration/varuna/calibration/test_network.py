"""Links and all-reduces, measured by threads as ranks over real gloo groups, on VMs that are names only."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TypeVar

import pytest
from torch._C._distributed_c10d import HashStore, PrefixStore

from varuna.calibration.links import (
    GroupConnector,
    LinkSample,
    classify_links,
    measure_all_reduce,
    measure_links,
    rings_to_measure,
)
from varuna.distributed.gloo import GlooGroup, connect_group
from waiting import DEADLINE_S

T = TypeVar("T")


def on_every_rank(world_size: int, measure: Callable[[int, GroupConnector], T]) -> list[T]:
    """The results of `measure(rank, connect)`, by rank."""
    store = HashStore()

    def run(rank: int) -> T:
        def connect(name: str, ranks: Sequence[int]) -> GlooGroup:
            members = list(ranks)
            group_store = PrefixStore(name, store)
            wait = timedelta(seconds=DEADLINE_S)
            return connect_group(group_store, members.index(rank), len(members), address="127.0.0.1", timeout=wait)

        return measure(rank, connect)

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(run, range(world_size)))


def test_every_link_is_measured_both_ways() -> None:
    samples = on_every_rank(3, lambda rank, connect: measure_links(rank, ["a", "a", "b"], connect))
    assert [[sample.ranks for sample in of_rank] for of_rank in samples] == [[(0, 1)], [(1, 0), (1, 2)], [(2, 1)]]
    for sample in (sample for of_rank in samples for sample in of_rank):
        assert sample.latency_us > 0
        assert sample.jitter_us >= 0
        assert sample.bandwidth_bytes_per_s > 0
        assert len(sample.several_bytes_per_s) == (2 if 2 in sample.ranks else 0), "only between hosts"
        assert all(bandwidth > 0 for bandwidth in sample.several_bytes_per_s)
        assert LinkSample.from_json(json.loads(json.dumps(sample.to_json()))) == sample


@pytest.mark.parametrize(
    ("bandwidths", "connections"),
    [((1e9, 2e9, 4e9), 4), ((1e9, 2e9, 2.1e9), 2), ((1e9, 1.05e9, 1.2e9), 4), ((1e9, 1.05e9, 1.09e9), 1)],
)
def test_links_have_more_connections_where_these_are_clearly_faster(
    bandwidths: tuple[float, float, float], connections: int
) -> None:
    one, *several = bandwidths
    samples = [LinkSample((0, 1), 10.0, one * factor, 1.0, tuple(b * factor for b in several)) for factor in (1, 1, 9)]
    between = classify_links(samples, ["a", "b"]).other_vm
    assert between.connections == connections
    assert between.bandwidth_bytes_per_s == (one, several[0], several[1])[(1, 2, 4).index(connections)]


def test_the_way_of_the_gradients_counts_as_much_as_that_of_the_activations() -> None:
    there, back = LinkSample((0, 1), 10.0, 4e9, 1.0), LinkSample((1, 0), 30.0, 2e9, 3.0)
    assert classify_links([there, back], ["a", "b"]).other_vm == classify_links([back, there], ["a", "b"]).other_vm
    other = classify_links([there, back], ["a", "b"]).other_vm
    assert (other.latency_us, other.bandwidth_bytes_per_s, other.jitter_us) == (20.0, 3e9, 2.0)


def sample(first: int, second: int, latency_us: float) -> LinkSample:
    return LinkSample((first, second), latency_us, 1e9, 1.0)


def test_links_between_zones_are_a_class_of_their_own_where_there_are_any() -> None:
    samples = [sample(0, 1, 10.0), sample(1, 2, 200.0), sample(2, 3, 5000.0)]
    hosts = ["a", "a", "b", "c"]
    links = classify_links(samples, hosts, ["north", "north", "north", "south"])
    assert links.other_zone is not None
    assert [each.latency_us for each in (links.same_vm, links.other_vm, links.other_zone)] == [10.0, 200.0, 5000.0]
    for zones in ((), ["north"] * 4, ["north", "north", "north", ""]):
        unknown = classify_links(samples, hosts, zones)
        assert (unknown.other_vm.latency_us, unknown.other_zone) == (2600.0, None)
    alone = classify_links([sample(0, 1, 5000.0)], ["a", "b"], ["north", "south"])
    assert alone.same_vm == alone.other_vm == alone.other_zone, "all that is known of this network"


def test_rings_have_one_rank_on_each_vm_alone_and_all_at_once() -> None:
    assert rings_to_measure(["a"]) == []
    assert rings_to_measure(["a"] * 3) == [((0, 1),), ((0, 1, 2),)]
    assert rings_to_measure(["a", "b", "c"]) == [((0, 1),), ((0, 1, 2),)]
    assert rings_to_measure(["a", "a", "b", "b"]) == [((0, 2),), ((0, 2), (1, 3))]
    uneven = rings_to_measure(["a", "b", "a", "a", "b", "c", "c"])
    assert uneven == [((0, 1),), ((0, 1), (2, 4)), ((0, 1, 5),), ((0, 1, 5), (2, 4, 6))]
    assert max(len(rings[0]) for rings in rings_to_measure([str(rank // 2) for rank in range(128)])) == 32


def test_all_reduces_are_timed_with_one_ring_and_with_one_for_each_rank_of_a_vm() -> None:
    hosts = ["a", "a", "b", "b"]
    found, *others = on_every_rank(4, lambda rank, connect: measure_all_reduce(rank, hosts, connect))
    assert others == [[], [], []]
    assert {(measured.ranks, measured.rings) for measured in found} == {(2, 1), (2, 2)}
    assert len({measured.bytes for measured in found}) == 3
    assert all(measured.us > 0 for measured in found)
