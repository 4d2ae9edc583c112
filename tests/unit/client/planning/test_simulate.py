"""`varuna simulate`: figures, charts, and errors in one line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from varuna_client.cli import app
from varuna_client.errors import UserError
from varuna_client.planning.gantt import OPS, Bar, Chart, as_html, as_svg, as_text, ticks
from varuna_planner.profile.document import Measurement, Profile, SectionProfile


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """Four equal sections, F = R = 1 ms and B = 2 ms for each example; messages of no bytes."""
    measurement = Measurement(
        micro_batch=1,
        forward_us=1000,
        backward_us=2000,
        recompute_us=1000,
        output_bytes=0,
        input_bytes=0,
        activation_bytes=0,
    )
    sections = tuple(
        SectionProfile(
            index=i,
            name=f"block {i}",
            parameter_bytes=0,
            optimizer_bytes=0,
            gradient_bytes=0,
            measurements=(measurement,),
        )
        for i in range(4)
    )
    text = Profile(sections=sections, links={"other_vm": {"latency_us": 0, "bandwidth_bytes_per_s": 1e9}}).to_json()
    path = tmp_path / "profile.json"
    path.write_text(text)
    return path


FIGURE_4 = ["--p", "4", "--micro-batch", "1", "--global-batch", "5", "--recompute", "1,1,1,0"]


def run(profile: Path, *arguments: str) -> str:
    result = CliRunner().invoke(app, ["simulate", "--profile", str(profile), *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize(("policy", "minibatch_s", "stash"), [("gpipe", 0.028, 5), ("varuna", 0.027, 5)])
def test_figure_4_of_the_paper_from_the_command(profile: Path, policy: str, minibatch_s: float, stash: int) -> None:
    found = json.loads(run(profile, *FIGURE_4, "--policy", policy, "--run-ahead", "9", "--json"))
    assert found["minibatch_s"] == pytest.approx(minibatch_s)
    assert found["lower_bound_s"] == pytest.approx(0.026)
    # 3 stages of 20 ms and one of 15.
    assert found["bubble_fraction"] == pytest.approx(1 - 75 / (4 * minibatch_s * 1e3))
    assert found["stash_max"] == stash


def test_people_get_a_table_and_a_chart(profile: Path) -> None:
    text = run(profile, *FIGURE_4, "--policy", "gpipe")
    assert re.search(r"4×1 +1 +gpipe .* 28 ms +26 ms", text)
    stages = [line for line in text.splitlines() if line.startswith("stage ")]
    assert [line.split()[1][0] for line in stages] == ["0", "1", "2", "3"]
    for op in ("F0", "F4", "R0", "B0", "B4"):
        assert op in stages[0]
    assert "R" not in stages[3]


@pytest.mark.parametrize("suffix", [".svg", ".html"])
def test_the_chart_is_written_and_the_same_each_time(profile: Path, tmp_path: Path, suffix: str) -> None:
    first, second = (tmp_path / f"{name}{suffix}" for name in ("first", "second"))
    for path in (first, second):
        run(profile, *FIGURE_4, "--gantt", str(path), "--json")
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "fifo"], "policy 'fifo' is not known: choose one of gpipe, 1f1b, varuna, work-conserving, zero-"),
        (["--p", "5"], "p=5: the profile has 4 sections, so there are 1 to 4 stages"),
        (["--gantt", "chart.png"], "--gantt chart.png: the chart is drawn as .svg or .html"),
        (["--gantt", "/nowhere/chart.svg"], "cannot write chart /nowhere/chart.svg: No such file or directory"),
        (["--stages", "0,x"], "--stages 0,x: give section numbers joined by commas"),
        (["--micro-batch", "9"], "micro-batch 9: the global batch has only 5 examples"),
        (["--device-memory-gb", "inf"], "--device-memory-gb inf: give a number of GiB, or leave it out for no limit"),
        (["--recompute", "yes"], "--recompute yes: give all, none, or a 1 or 0 for each stage"),
        (["--profile", "/nowhere/p.json"], "cannot read profile /nowhere/p.json: No such file or directory"),
    ],
)
def test_wrong_input_is_one_line(profile: Path, arguments: list[str], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        run(profile, *FIGURE_4, *arguments)
    assert "\n" not in str(caught.value)


def test_a_bad_profile_is_one_line(tmp_path: Path) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text('{"schema": "varuna.profile/1", "sections": []}')
    with pytest.raises(UserError, match="sections") as caught:
        run(bad, *FIGURE_4)
    assert "\n" not in str(caught.value)


@pytest.mark.processes
def test_other_commands_start_without_numba() -> None:
    script = "import sys, varuna_client.cli; sys.exit(any(name in sys.modules for name in ('numba', 'varuna_planner')))"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


CHART = Chart(
    title="a <b> & c",
    subtitle="",
    stages=(
        (Bar("F", 0, 0, 10), Bar("B", 0, 30, 50), Bar("A", None, 50, 60)),
        (Bar("F", 0, 10, 20), Bar("B", 0, 20, 30), Bar("W", 0, 30, 40)),
    ),
    lower_bound_us=55,
)


def test_text_fits_its_width_and_shows_what_fills_most_of_a_column() -> None:
    lines = as_text(CHART, 68).plain.splitlines()
    assert lines[0] == "stage 0 " + "F0".ljust(10) + "·" * 20 + "B0".ljust(20) + "A".ljust(10)
    assert lines[1] == "stage 1 " + "·" * 10 + "F0".ljust(10) + "B0".ljust(10) + "W0".ljust(10) + "·" * 20
    assert lines[2].split() == ["|0", "µs", "|20", "µs", "|40", "µs"]
    for width in (20, 40, 200):
        assert all(len(line) <= width for line in as_text(CHART, width).plain.splitlines()[:-1])


def test_actions_shorter_than_a_column_take_turns() -> None:
    """F R B of 1, 1 and 2: as many columns of each as its time is worth, not only the longest."""
    times = ("F", 0, 1), ("R", 1, 2), ("B", 2, 4)
    row = tuple(Bar(op, n, 4 * n + begin, 4 * n + end) for n in range(75) for op, begin, end in times)
    chart = Chart(title="", subtitle="", stages=(row, row[:150]), lower_bound_us=300)
    full, part = (line.removeprefix("stage ")[2:] for line in as_text(chart, 68).plain.splitlines()[:2])
    assert len(full) == len(part) == 60
    for op, columns in (("F", 15), ("R", 15), ("B", 30)):
        assert abs(full.count(op) - columns) <= 1
        assert abs(part.count(op) - columns * 2 / 3) <= 1
    assert part.endswith("·" * 19)


def test_svg_is_sound_self_contained_and_shows_every_action() -> None:
    root = ElementTree.fromstring(as_svg(CHART))
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert CHART.title in texts
    assert texts.count("F0") == texts.count("B0") == 2
    for op in "FBWA":
        assert OPS[op].name in texts
    assert OPS["R"].name not in texts
    fills = [fill for e in root.iter("{http://www.w3.org/2000/svg}path") if (fill := e.get("fill"))]
    # One path for all actions of an op in a stage.
    assert sorted(fills) == sorted(OPS[op].fill for op in "FBAFBW")
    for text in (as_svg(CHART), as_html(CHART)):
        assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
        assert "<script" not in text


def test_numbers_are_left_out_where_they_do_not_fit() -> None:
    row = tuple(Bar("F", n, n, n + 1.0) for n in range(1000))
    narrow = Chart(title="t", subtitle="", stages=(row,), lower_bound_us=1000)
    assert ">F7<" not in as_svg(narrow)
    assert ">7<" not in as_svg(narrow)


@pytest.mark.parametrize(
    ("length_us", "last", "unit"), [(27_000, 26_000, "ms"), (3.2e6, 3.0e6, "s"), (7, 7, "µs"), (0, 0, "µs")]
)
def test_the_axis_has_round_numbers(length_us: float, last: float, unit: str) -> None:
    moments, _, found = ticks(length_us, 14)
    assert found == unit
    assert moments[0] == 0
    assert moments[-1] == pytest.approx(last)
    assert len(moments) <= 15
