"""Traces of spot fleets: reading them, and the hazards they show."""

import pytest

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
