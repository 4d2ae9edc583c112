"""`varuna profile`, `varuna estimate` and `varuna calibrate`, as a user calls them: JSON, text, errors in one line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from varuna_client.cli import app
from varuna_client.errors import UserError
from varuna_planner.hardware.table import Hardware
from varuna_planner.profile.document import Profile

MODEL = ["--model", "gpt2", "--layers", "12", "--hidden", "768", "--seq", "512"]
ON = ["--gpu", "v100-16gb", "--network", "ethernet-10g"]


def invoke(*arguments: str) -> str:
    """What the command printed. Raises the UserError that the entry point would print as its one line."""
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=True)
    if isinstance(result.exception, UserError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def invoke_json(*arguments: str) -> Any:
    return json.loads(invoke(*arguments, "--json"))


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "P.json"
    invoke("profile", "synth", *MODEL, *ON, "--out", str(path))
    return path


def test_synth_writes_a_profile_that_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "P.json"
    document = invoke_json("profile", "synth", *MODEL, *ON, "--out", str(path))
    assert document["sections"] == len(Profile.from_json(path.read_text()).sections) == 14
    assert document["environment"]["source"] == "synthesised, not measured"


def test_show_tells_sections_at_a_size(profile: Path) -> None:
    shown = invoke_json("profile", "show", str(profile), "--micro-batch", "3")
    assert shown["micro_batch"] == 3
    assert len(shown["sections"]) == 14
    assert shown["forward_us"] == pytest.approx(sum(section["forward_us"] for section in shown["sections"]))
    text = invoke("profile", "show", str(profile))
    assert "layer 0 … layer 11" in text  # layers that are alike are one line
    assert "other vm" in text
    assert "other zone" not in text


def test_show_tells_all_that_a_measured_profile_has(profile: Path, tmp_path: Path) -> None:
    document = json.loads(profile.read_text())
    document["stage_overhead_us"] = 123.0
    document["all_reduce"] = [{"ranks": 4, "bytes": 2**20, "us": 4567.0, "rings": 2}]
    document["sections"][3]["optimizer_us"] = 8900.0
    document["gpu_type"] = "V100"
    document["other_gpu_types"] = [
        {"gpu_type": "A100", "section_speeds": [2.0] * 13 + [3.5]},
        {"gpu_type": "K80", "section_speeds": [0.5] * 14},
    ]
    document["links"]["other_zone"] = {"latency_us": 4321.0, "bandwidth_bytes_per_s": 1e8}
    measured = tmp_path / "measured.json"
    measured.write_text(json.dumps(document))
    text = invoke("profile", "show", str(measured))
    assert "123 µs on top of each forward" in text
    assert re.search(r"1\.0 MiB +4 +2 +4\.567 ms", text)
    assert "8.900 ms" in text
    assert "tied weights" in text
    assert "A100, 2 to 3.5 times as fast" in text
    assert "K80, 0.5 times as fast" in text
    assert re.search(r"other zone +4321 µs", text)
    shown = invoke_json("profile", "show", str(measured))
    assert shown["stage_overhead_us"] == 123.0
    assert shown["sections"][3]["optimizer_us"] == 8900.0


def test_validate_tells_what_is_odd_and_refuses_what_is_wrong(profile: Path, tmp_path: Path) -> None:
    assert invoke_json("profile", "validate", str(profile)) == {"valid": True, "sections": 14, "warnings": []}
    document = json.loads(profile.read_text())
    document["sections"][2]["measurements"][0]["forward_us"] = 0
    document["all_reduce"] = []
    odd = tmp_path / "odd.json"
    odd.write_text(json.dumps(document))
    warnings = invoke_json("profile", "validate", str(odd))["warnings"]
    assert any("section 2 (layer 1) at micro-batch 1 takes no time" in warning for warning in warnings)
    assert any("no all-reduce" in warning for warning in warnings)
    document["sections"][2]["measurements"][0]["forward_us"] = -1
    odd.write_text(json.dumps(document))
    with pytest.raises(UserError, match=r"sections\.2\.measurements\.0\.forward_us.*-1"):
        invoke("profile", "validate", str(odd))
    with pytest.raises(UserError, match=r"cannot read profile .*No such file"):
        invoke("profile", "show", str(tmp_path / "none.json"))


def test_estimate_gives_plan_rate_memory_time_and_cost() -> None:
    found = invoke_json(
        "estimate", *MODEL, *ON, "--gpus", "8", "--global-batch", "256", "--price", "0.9", "--examples", "1000000"
    )
    best = found["best"]
    used = best["p"] * best["d"]
    assert used == found["gpus_used"] <= 8
    assert found["examples_per_s"] == pytest.approx(256 / found["predicted_minibatch_s"])
    assert found["examples_per_s_per_gpu"] == pytest.approx(found["examples_per_s"] / used)
    assert sum(stage["sections"] for stage in best["stages"]) == 14
    assert max(found["memory_bytes"]) <= found["device_memory_bytes"]
    assert found["hours"] == pytest.approx(1e6 / found["examples_per_s"] / 3600)
    assert found["cost"] == pytest.approx(found["hours"] * 0.9 * used)
    assert found["cost_per_million_examples"] == pytest.approx(found["cost"])
    text = invoke("estimate", *MODEL, *ON, "--gpus", "8", "--global-batch", "256", "--price", "0.9")
    assert f"{best['p']}×{best['d']}" in text
    assert "per million examples" in text
    many = invoke("estimate", *MODEL, *ON, "--gpus", "8", "--global-batch", "256", "--examples", "1000000000")
    assert re.search(r"1,000,000,000 examples +[\d,.]+ hours \([\d,.]+ days\)", many)
    with pytest.raises(UserError, match="--price inf: give a number"):
        invoke("estimate", *MODEL, *ON, "--gpus", "8", "--global-batch", "256", "--price", "inf")


def test_a_users_hardware_file_is_used(tmp_path: Path, profile: Path) -> None:
    mine = {
        "schema": "varuna.hardware/1",
        "gpus": [
            {
                "name": "mine",
                "peak_flop_per_s": {"fp16": 1e12},
                "memory_bytes": 2**34,
                "memory_bandwidth_bytes_per_s": 1e11,
                "compute_efficiency": 0.5,
                "head_efficiency": 0.5,
                "section_overhead_us": 0,
                "micro_batch_overhead_us": 0,
                "inside_vm": "pcie4",
            }
        ],
    }
    path = tmp_path / "hw.json"
    path.write_text(json.dumps(mine))
    rest = ["--network", "ethernet-10g", "--gpus", "2", "--global-batch", "64"]
    slow = invoke_json("estimate", *MODEL, "--gpu", "mine", "--hardware", str(path), *rest)
    fast = invoke_json("estimate", *MODEL, "--gpu", "v100-16gb", "--hardware", str(path), *rest)
    assert slow["examples_per_s"] < fast["examples_per_s"] / 10


def test_calibrate_writes_entries_that_estimate_takes(tmp_path: Path) -> None:
    run = {"model": "gpt2", "layers": 12, "hidden": 768, "seq": 512, "p": 2, "d": 2, "micro_batch": 4}
    rows = [{**run, "global_batch": 256, "minibatch_s": 30}, {**run, "global_batch": 512, "minibatch_s": 59}]
    observations, out = tmp_path / "O.json", tmp_path / "hw.json"
    observations.write_text(json.dumps(rows))
    document = invoke_json("calibrate", *ON, "--observations", str(observations), "--out", str(out))
    assert [row["measured_s"] for row in document["observations"]] == [30, 59]
    assert document["worst_error"] == pytest.approx(max(abs(row["error"]) for row in document["observations"]))
    assert "predicted within" in document["confidence"]
    written = Hardware.from_json(out.read_text())
    assert [gpu.name for gpu in written.gpus] == ["v100-16gb"]
    # The rows are slow, so the fitted GPU is slower than the table's.
    question = ["estimate", *MODEL, *ON, "--gpus", "4", "--global-batch", "256"]
    assert (
        invoke_json(*question, "--hardware", str(out))["predicted_minibatch_s"]
        > invoke_json(*question)["predicted_minibatch_s"]
    )


def test_calibrate_says_which_rows_cannot_be(tmp_path: Path) -> None:
    run = {"model": "gpt2", "layers": 2, "hidden": 64, "seq": 64, "p": 1, "d": 1, "micro_batch": 4, "global_batch": 8}
    observations = tmp_path / "O.json"
    observations.write_text(json.dumps([{**run, "name": "hours", "minibatch_s": 7200}]))
    arguments = [*ON, "--observations", str(observations), "--out", str(tmp_path / "hw.json")]
    assert "micro_batch_overhead at" in invoke("calibrate", *arguments)
    rows = [
        {**run, "name": f"{batch} examples", "global_batch": batch, "minibatch_s": batch / 400} for batch in (80, 160)
    ]
    observations.write_text(json.dumps([*rows, {**run, "name": "hours", "minibatch_s": 7200}]))
    warnings = invoke_json("calibrate", *arguments)["warnings"]
    assert [warning.partition(":")[0] for warning in warnings] == ["hours"]


NAMED = ["--network", "ethernet-10g", "--gpus", "102", "--global-batch", "512"]


def test_a_model_is_estimated_by_its_name_with_its_optimizer_on_the_host() -> None:
    question = ["estimate", "--model", "gpt2-200b", "--gpu", "v100-32gb", *NAMED]
    found = invoke_json(*question, "--offload-optimizer")
    assert (found["model"], found["best"]["d"]) == ("gpt2-200b", 1)
    layer_bytes = 12 * 12960**2 * 16
    assert layer_bytes < found["host_memory_bytes"] < 2 * layer_bytes
    assert "of the host's for each GPU" in invoke(*question, "--offload-optimizer")
    with pytest.raises(UserError, match=r"does not fit devices with 28\.8 GiB"):
        invoke(*question)


def test_an_estimate_of_a_shape_that_is_given() -> None:
    question = ["estimate", "--model", "gpt2-2.5b", "--seq", "512", "--gpu", "v100-16gb", *NAMED]
    best = invoke_json(*question, "--p", "9", "--d", "7", "--micro-batch", "2")["best"]
    assert (best["p"], best["d"], best["micro_batch"]) == (9, 7, 2)
    with pytest.raises(UserError, match="p=60 is pinned but the model has 56 sections"):
        invoke(*question, "--p", "60")


def test_boundaries_in_bf16_make_a_pipeline_over_a_slow_network_faster() -> None:
    slow = ["--gpu", "a100-40gb", "--network", "ethernet-1g", "--gpus", "4", "--global-batch", "256"]
    question = ["estimate", *MODEL, *slow, "--p", "4", "--d", "1", "--precision", "bf16"]
    wide, narrow = invoke_json(*question), invoke_json(*question, "--boundaries", "bf16")
    assert narrow["predicted_minibatch_s"] < wide["predicted_minibatch_s"]
    assert (wide["boundaries"], narrow["boundaries"]) == (None, "bf16")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (
            ["--model", "gpt3"],
            "no model is called 'gpt3': use one of gpt2-355m, .*, or gpt2, bert, llama, t5 with --lay",
        ),
        (
            ["--model", "gpt2", "--hidden", "64"],
            "--model gpt2 is a kind of model: give --layers, --seq, or one by name: ",
        ),
        (["--model", "llama"], "--model llama is a kind of model: give --layers, --hidden, --seq$"),
        (
            ["--model", "gpt2-20b", "--layers", "9"],
            "gpt2-20b has its own --layers: leave it out, or give --model gpt2 a",
        ),
    ],
)
def test_models_that_are_not_told_whole_are_refused(arguments: list[str], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        invoke("estimate", *arguments, "--gpu", "v100-16gb", *NAMED)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--gpu", "v100", "--network", "ethernet-10g"], "no GPU is called 'v100': there are a10,"),
        (["--gpu", "t4", "--network", "wlan"], "no network is called 'wlan'"),
        ([*ON, "--precision", "fp8"], "no precision is called 'fp8': use one of fp32, fp16, bf16"),
        ([*ON, "--precision", "bf16"], "v100-16gb does not compute in bf16"),
        ([*ON, "--boundaries", "fp8"], "no type of boundaries is called 'fp8': use one of fp32, fp16, bf16"),
        ([*ON, "--boundaries", "bf16"], "boundaries=bf16, but the model computes in fp16: give fp16 or fp32"),
        ([*ON, "--heads", "7"], "heads=7 must divide hidden=768"),
        ([*ON, "--hardware", "none.json"], "cannot read hardware none.json"),
    ],
)
def test_errors_are_one_line_with_the_way_out(arguments: list[str], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint) as caught:
        invoke("estimate", *MODEL, *arguments, "--gpus", "8", "--global-batch", "256")
    assert "\n" not in str(caught.value)


def test_a_model_too_large_for_the_gpus_says_how_many_it_needs() -> None:
    large = ["--model", "gpt2", "--layers", "72", "--hidden", "3072", "--seq", "1024"]
    with pytest.raises(UserError, match=r"2 × v100-16gb: .*needs at least \d+ GPUs"):
        invoke("estimate", *large, *ON, "--gpus", "2", "--global-batch", "256")
