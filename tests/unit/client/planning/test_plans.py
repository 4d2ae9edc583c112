"""`varuna plan`: the document, the text for people, and wrong input in one line."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from varuna_client.cli import app
from varuna_client.errors import UserError
from varuna_planner.profile.document import Measurement, Profile, SectionProfile


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """Six sections of some 30 ms an example, 1 MiB of state each."""
    sections = tuple(
        SectionProfile(
            index=i,
            name=f"block.{i}",
            parameter_bytes=2**18,
            gradient_bytes=2**18,
            optimizer_bytes=2**19,
            measurements=tuple(
                Measurement(
                    micro_batch=m,
                    forward_us=1000 + 10_000 * m,
                    backward_us=2000 + 20_000 * m,
                    recompute_us=1000 + 10_000 * m,
                    output_bytes=1000 * m,
                    input_bytes=1000 * m,
                    activation_bytes=100_000 * m,
                )
                for m in (1, 2, 4)
            ),
        )
        for i in range(6)
    )
    path = tmp_path / "P.json"
    path.write_text(Profile(sections=sections).to_json())
    return path


def invoke(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["plan", *map(str, arguments)], catch_exceptions=True)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def ask(profile: Path, *more: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(invoke("--profile", profile, "--gpus", 6, "--global-batch", 48, *more, "--json"))
    return found


def test_the_document_has_the_best_plan_and_the_candidates(profile: Path) -> None:
    found = ask(profile)

    assert set(found) == {"best", "candidates", "candidates_left_out", "elapsed_ms"}
    best = found["best"]
    assert {"p", "d", "micro_batch", "stages", "policy", "predicted_minibatch_s", "examples_per_s"} <= set(best)
    assert len(best["stages"]) == best["p"]
    assert sum(stage["sections"] for stage in best["stages"]) == 6
    assert best["examples_per_s"] == pytest.approx(48 / best["predicted_minibatch_s"])
    first = found["candidates"][0]
    assert set(first) == {"p", "d", "micro_batch", "predicted_minibatch_s", "fits", "reason"}
    assert (first["p"], first["d"], first["reason"]) == (best["p"], best["d"], "the fastest")


def test_the_best_few_of_each_number_of_stages_are_told_and_how_many_are_not(profile: Path) -> None:
    few, every = ask(profile), ask(profile, "--all-candidates")

    assert every["candidates_left_out"] == 0
    assert few["candidates_left_out"] == len(every["candidates"]) - len(few["candidates"]) > 0
    expected, of_each_p = [], Counter[int]()
    for candidate in every["candidates"]:
        of_each_p[candidate["p"]] += 1
        if of_each_p[candidate["p"]] <= 4:
            expected.append(candidate)
    assert few["candidates"] == expected


def test_memory_and_policy_are_heeded(profile: Path) -> None:
    found = ask(profile, "--device-memory-gb", 0.0045, "--policy", "gpipe")

    assert found["best"]["policy"] == "gpipe"
    assert found["best"]["p"] > 1
    unfit = [candidate for candidate in found["candidates"] if not candidate["fits"]]
    assert unfit
    assert all(candidate["predicted_minibatch_s"] is None for candidate in unfit)


def test_a_hazard_adds_what_to_expect(profile: Path) -> None:
    found = ask(profile, "--hazard", 0.6, "--morph-s", 60)

    assert set(found) == {"best", "candidates", "candidates_left_out", "elapsed_ms", "liveput"}
    liveput = found["liveput"]
    assert 0 < liveput["expected_examples_per_s"] < found["best"]["examples_per_s"]
    assert liveput["ranked"][0]["p"] == found["best"]["p"]
    assert liveput["ranked"][0]["expected_examples_per_s"] == liveput["expected_examples_per_s"]
    assert liveput["checkpoint_interval_s"] > 0
    dearer = ask(profile, "--hazard", 0.6, "--morph-s", 600)
    assert dearer["liveput"]["expected_examples_per_s"] < liveput["expected_examples_per_s"]


def test_a_trace_tells_the_hazard(profile: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    lines = [*(f"0,add,n{i}" for i in range(6)), "1800000,remove,n0", "3600000,add,n9"]
    trace.write_text("\n".join(lines))

    found = ask(profile, "--trace", trace)

    used = found["liveput"]["ranked"][0]["vms"]
    assert found["liveput"]["stops_per_hour"] == pytest.approx(used * 1 / 5.5)


def test_people_get_tables(profile: Path) -> None:
    text = invoke("--profile", profile, "--gpus", 6, "--global-batch", 48, "--hazard", 0.6)

    assert "examples/s are expected; save every" in text
    for head in ("STAGE", "P×D", "PEAK EX/S", "WHY"):
        assert head in text
    assert "the fastest" in text
    assert "slower than" in text
    for line in text.splitlines():
        assert ("≥" in line) == ("at least" in line)  # a bound is never shown as a time
    assert "memory is not limited: --device-memory-gb" in text
    limited = invoke("--profile", profile, "--gpus", 6, "--global-batch", 48, "--device-memory-gb", 1)
    assert "memory is not limited" not in limited


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--policy", "fifo"], "fifo"),
        (["--device-memory-gb", "0.001"], "the model does not fit"),
        (["--device-memory-gb", "inf"], "--device-memory-gb inf: give a number of GiB, or leave it out"),
        (["--hazard", "inf"], "removals_per_vm_hour is inf: it must be finite"),
        (["--hazard", "1", "--trace", "x.csv"], "--hazard and --trace both"),
        (
            ["--morph-s", "9", "--detect-s", "1"],
            "--morph-s, --detect-s without a hazard would change nothing: give --haz",
        ),
        (["--p", "7"], "p=7 is pinned but the model has 6 sections"),
        (["--trace", "nothing.csv"], "cannot read trace nothing.csv: No such file"),
    ],
)
def test_what_cannot_be_answered_is_one_line(profile: Path, more: list[str], says: str) -> None:
    with pytest.raises(UserError, match=says) as error:
        ask(profile, *more)
    assert "\n" not in str(error.value)


def test_a_profile_that_is_none_is_named(tmp_path: Path) -> None:
    wrong = tmp_path / "P.json"
    wrong.write_text('{"schema": "varuna.profile/1", "sections": []}')
    with pytest.raises(UserError, match="profile: sections"):
        ask(wrong)
    with pytest.raises(UserError, match="cannot read profile"):
        ask(tmp_path / "other.json")


def test_a_wrong_line_of_a_trace_is_named(profile: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("0,add,a\n5,remove,b\n")
    with pytest.raises(UserError, match=r"trace\.csv, line 2: node b is removed and was not there"):
        ask(profile, "--trace", trace)
