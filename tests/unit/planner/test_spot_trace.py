"""Traces of spot fleets: reading them, and the hazards they show."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from varuna_planner.liveput.spot_trace import measure_hazard, parse_trace


def test_a_trace_is_read_and_its_fleets_follow() -> None:
    trace = parse_trace("# two to begin with\n0,add,a\n0,add,b\n\n1500,remove,a\n1500,add,c\n2000, add, a\n")

    assert (trace.starts_s, trace.ends_s) == (0, 2)
    assert list(trace.iterate_fleets()) == [
        (0, frozenset({"a", "b"})),
        (1.5, frozenset({"b", "c"})),
        (2, frozenset({"a", "b", "c"})),
    ]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("5,add", "'5,add': expected milliseconds,add|remove,node"),
        ("5,add,", "expected milliseconds,add|remove,node"),
        ("soon,add,b", "'soon' is no number of milliseconds"),
        ("nan,add,b", "nan milliseconds: a time is finite"),
        ("-1,add,b", "-1 milliseconds: a time is finite and not negative"),
        ("5,join,b", "'join' is neither add nor remove"),
        ("5,add,a", "node a is added and was there already"),
        ("5,remove,b", "node b is removed and was not there"),
        ("0.5,add,b", "0.0005 s comes after 0.001 s: times must ascend"),
    ],
)
def test_a_wrong_line_is_named_with_what_is_wrong(line: str, says: str) -> None:
    with pytest.raises(ValueError) as error:
        parse_trace(f"1,add,a\n{line}\n", name="aws.csv")

    assert str(error.value).startswith("aws.csv, line 2: ")
    assert says in str(error.value)


def test_an_empty_trace_is_refused() -> None:
    with pytest.raises(ValueError, match="trace has no events"):
        parse_trace("# nothing\n")


def test_hazards_are_events_over_exposure() -> None:
    hour = 3_600_000
    lines = ["0,add,a", "0,add,b", "0,add,c", f"{hour},remove,a", f"{hour},remove,b", f"{2 * hour},remove,c"]
    lines += [f"{2 * hour},add,d", f"{4 * hour},add,e"]

    hazard = measure_hazard(parse_trace("\n".join(lines)))

    # 3 VMs for an hour, 1 for another, 1 for two more; the fleet at the start was not added.
    assert hazard.removals_per_vm_hour == pytest.approx(3 / 6)
    assert hazard.additions_per_hour == pytest.approx(2 / 4)
    assert hazard.removal_sizes == (0.5, 0.5)
    assert hazard.addition_sizes == (1.0,)


def test_a_trace_without_removals_has_no_hazard() -> None:
    hazard = measure_hazard(parse_trace("0,add,a\n1000,add,b\n"))

    assert hazard.removals_per_vm_hour == 0


def test_a_trace_without_time_or_vms_says_nothing() -> None:
    with pytest.raises(ValueError, match=r"2 events, all at 0 s: it covers no time"):
        measure_hazard(parse_trace("0,add,a\n0,add,b\n"))
    with pytest.raises(ValueError, match="no VM for any time"):
        measure_hazard(parse_trace("0,add,a\n0,remove,a\n9,add,a\n"))


# ---------------------------------------------------------------- other formats (these traces are made up)

PARCAE = """\
[0, "add", {"nodes": ["n0", "n1", "n2"], "duration": 60000, "liveput_predict_strategy": [1, 3]}]
[60000, "no-op", {"nodes": [], "duration": 60000, "liveput_predict_strategy": [1, 2]}]
# a comment
[120000, "remove", {"nodes": ["n1"], "duration": 60000, "liveput_predict_strategy": [2, 1]}]
"""
SKYPILOT = '{"metadata": {"gap_seconds": 600}, "data": [2, 2, 3, 1, 1], "prices": [0.9, 0.9, 1.0, 1.2, 1.2]}'


def test_parcaes_intervals_have_nodes_and_the_shapes_that_it_chose() -> None:
    trace = parse_trace(PARCAE)
    assert [(at_s, sorted(vms)) for at_s, vms in trace.iterate_fleets()] == [
        (0, ["n0", "n1", "n2"]),
        (120, ["n0", "n2"]),
    ]
    assert (trace.starts_s, trace.ends_s) == (0, 180)
    assert trace.decisions == {"liveput_predict": ((0, 3, 1), (60, 2, 1), (120, 1, 2))}, "stages come before pipelines"
    assert trace.find_price(50) is None


def test_skypilots_counts_become_vms_that_stay() -> None:
    trace = parse_trace(SKYPILOT)
    fleets = [*trace.iterate_fleets()]
    assert [(at_s, len(vms)) for at_s, vms in fleets] == [(0, 2), (1200, 3), (1800, 1)]
    assert fleets[0][1] < fleets[1][1] > fleets[2][1]
    assert trace.ends_s == 3000
    assert [trace.find_price(at_s) for at_s in (0, 599, 1200, 1800, 1e9)] == [0.9, 0.9, 1.0, 1.2, 1.2]
    hazard = measure_hazard(trace)
    assert hazard.removals_per_vm_hour == pytest.approx(2 / ((2 * 1200 + 3 * 600 + 1 * 1200) / 3600)), "to its end"


@given(st.lists(st.integers(0, 12), min_size=1, max_size=30).filter(any))
def test_any_counts_are_kept(counts: list[int]) -> None:
    text = json.dumps({"metadata": {"gap_seconds": 60}, "data": counts})
    trace = parse_trace(text)
    assert trace == parse_trace(text)
    fleets = dict(trace.iterate_fleets())
    found: list[int] = []
    for interval in range(len(counts)):
        at_s = interval * 60.0
        found.append(len(fleets[at_s]) if at_s in fleets else (found[-1] if found else 0))
    assert found == counts


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('[0, "add", {"nodes": ["a"]}]\n[1, "take", {"nodes": []}]', "line 2: 'take' is none of add, remove and no-op"),
        ('[0, "add", ["a"]]', "line 1: .*expected \\[milliseconds"),
        ('[0, "add", {"nodes": ["a"]}', "line 1: .*expected \\[milliseconds"),
        ('[0, "add", {"nodes": ["a"]}]\n[1, "add", {"nodes": ["a"]}]', "line 2: node a is added and was there"),
        ('[9, "add", {"nodes": ["a"]}]\n[1, "remove", {"nodes": ["a"]}]', "line 2: 0.001 s comes after 0.009 s"),
        ('[9, "add", {"nodes": ["a"], "x_strategy": [1]}]', r"line 1: x_strategy is \[1\]: expected \[pipelines"),
        ('[true, "add", {"nodes": ["a"]}]', "line 1: milliseconds is True"),
        ('[0, "no-op", {"nodes": ["a"]}]', "line 1: no-op names nodes"),
        ('[0, "no-op", {"nodes": []}]', "has no events"),
        ('{"data": [1]}', "has no 'metadata'"),
        ('{"metadata": {"gap_seconds": 0}, "data": [1]}', "gap above 0"),
        ('{"metadata": {"gap_seconds": "x"}, "data": [1]}', "metadata.gap_seconds is x"),
        ('{"metadata": {"gap_seconds": 1}, "data": [1, -1]}', "interval 1: -1 is no number of VMs"),
        ('{"metadata": {"gap_seconds": 1}, "data": [0]}', "no VM at any time"),
        ('{"metadata": {"gap_seconds": 1}, "data": [1], "prices": [1, 2]}', "2 prices for 1 intervals"),
        ('{"metadata": {"gap_seconds": 1}, "data": [1], "prices": ["x"]}', r"prices\[0\] is x"),
        ('{"metadata"', "expected"),
    ],
)
def test_a_fault_in_another_format_is_named(text: str, fault: str) -> None:
    with pytest.raises(ValueError, match=fault) as raised:
        parse_trace(text, name="t.json")
    assert str(raised.value).startswith("t.json")
    assert "\n" not in str(raised.value)
