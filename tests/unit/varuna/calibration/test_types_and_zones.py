"""What ranks on several types of GPU, in several zones, have measured: put together, and with what was known before."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from varuna.calibration.fleet_network import FleetNetwork
from varuna.calibration.measurements import compare_types, merge_measurements
from varuna.calibration.rank_types import RankTypes
from varuna_planner.profile.document import GpuTypeSpeeds, Link, Links, Measurement, Profile, SectionProfile


def measure(**us_by_size: float) -> list[Measurement]:
    """`m1=30`: 10 µs forward and 20 µs backward with one example."""
    return [
        Measurement(
            micro_batch=int(size[1:]),
            forward_us=us / 3,
            backward_us=2 * us / 3,
            recompute_us=us / 3,
            output_bytes=1,
            input_bytes=1,
            activation_bytes=1,
        )
        for size, us in us_by_size.items()
    ]


def make_profile(links: Links | None = None, **speeds: tuple[float, ...]) -> Profile:
    state = {"parameter_bytes": 1, "gradient_bytes": 1, "optimizer_bytes": 1}
    return Profile(
        environment={"ranks": "2", "hosts": "a", "global_batch": "1"},
        gpu_type="V100",
        sections=tuple(
            SectionProfile(index=index, name=str(index), measurements=tuple(measure(m1=30)), **state)
            for index in (0, 1)
        ),
        other_gpu_types=tuple(GpuTypeSpeeds(gpu_type=name, section_speeds=each) for name, each in speeds.items()),
        links=links or Links(),
    )


def test_the_profile_is_of_the_type_that_most_ranks_have() -> None:
    types = RankTypes(("K80", "V100", "V100"))
    assert (types.own, types.leader, types.all) == ("V100", 1, ["K80", "V100"])
    assert RankTypes(("A100", "V100")).own == "A100", "of two the lowest rank's"
    assert RankTypes(("", "", "")).own == ""


@given(st.lists(st.sampled_from(["", "K80", "V100"]), min_size=1, max_size=9), st.integers(1, 12))
def test_the_ranks_of_each_type_share_all_sections(by_rank: list[str], count: int) -> None:
    types = RankTypes(tuple(by_rank))
    for gpu_type in types.all:
        shares = [types.share_sections(range(count), rank) for rank in types.list_ranks(gpu_type)]
        assert sorted(section for share in shares for section in share) == list(range(count))
        assert max(map(len, shares)) <= types.count_most_sections(count)


def test_equal_ranks_share_the_sections_as_they_always_did() -> None:
    types = RankTypes(("V100",) * 3)
    assert [list(types.share_sections(range(5), rank)) for rank in range(3)] == [[0, 3], [1, 4], [2]]
    assert types.count_most_sections(5) == 2


def test_the_speed_of_a_section_is_the_median_over_the_sizes_that_both_have_measured() -> None:
    own = {0: measure(m1=10, m2=20, m4=30), 1: measure(m1=10)}
    others = {"A100": {0: measure(m1=5, m2=5, m4=10, m8=1), 1: measure(m2=5)}, "": {0: measure(m1=1)}}
    [speeds] = compare_types(own, others, None, 2, own_type="V100")
    assert (speeds.gpu_type, speeds.section_speeds) == ("A100", pytest.approx((3.0, 1.0)))


def test_speeds_that_were_not_measured_now_are_kept() -> None:
    before = make_profile(A100=(2.0, 4.0), K80=(0.5, 0.5))
    found = compare_types({0: measure(m1=10)}, {"A100": {0: measure(m1=2)}}, before, 2, own_type="V100")
    assert {each.gpu_type: each.section_speeds for each in found} == {
        "A100": pytest.approx((5.0, 4.0)),
        "K80": (0.5, 0.5),
    }
    assert compare_types({}, {}, before, 2, own_type="K80")[0].gpu_type == "A100", "the profile's own has its times"


def test_a_section_that_takes_no_time_has_a_speed_that_a_profile_can_hold() -> None:
    for own_us, other_us, speed in ((0.0, 1.0, 1.0), (1.0, 0.0, 1.0), (1e12, 1e-3, 1e5)):
        [found] = compare_types({0: measure(m1=own_us)}, {"A100": {0: measure(m1=other_us)}}, None, 1, own_type="")
        assert found.section_speeds == (speed,)


def test_merged_sizes_are_those_of_the_profiles_own_type() -> None:
    merged = merge_measurements({0: measure(m2=50)}, make_profile(A100=(2.0, 4.0)), 2, every_size=True)
    assert [[each.micro_batch for each in merged[section]] for section in (0, 1)] == [[1, 2], [1]]


def make_network(ranks: int, latency_us: float, across_us: float | None) -> FleetNetwork:
    link = Link(latency_us=latency_us, bandwidth_bytes_per_s=1e9)
    across = None if across_us is None else link.model_copy(update={"latency_us": across_us})
    environment = {"ranks": str(ranks), "hosts": "a", "global_batch": "1"}
    return FleetNetwork(environment, Links(same_vm=link, other_vm=link, other_zone=across), [])


@pytest.mark.parametrize(
    ("ranks", "now_us", "before_us", "latency_us", "across_us"),
    [
        (4, None, 9.0, 1.0, 9.0),
        (4, 8.0, 9.0, 1.0, 8.0),
        (1, 8.0, None, 2.0, 8.0),
        (1, 8.0, 9.0, 2.0, 9.0),
        (1, None, None, 2.0, None),
    ],
)
def test_an_earlier_network_of_more_ranks_is_kept_and_so_is_what_only_one_fleet_had(
    ranks: int, now_us: float | None, before_us: float | None, latency_us: float, across_us: float | None
) -> None:
    network, before = make_network(ranks, 1.0, now_us), make_network(2, 2.0, before_us)
    network.add_earlier(make_profile(before.links))
    across = network.links.other_zone
    assert (network.links.other_vm.latency_us, None if across is None else across.latency_us) == (latency_us, across_us)
