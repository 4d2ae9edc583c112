"""The demo's verdict: every way in which a run can be wrong fails it, by name."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import psutil
import pytest
from rich.console import Console

from varuna_client.demo.other_load import OtherLoad
from varuna_client.demo.report import (
    DemoRecord,
    Report,
    busy_note,
    closing_table,
    make_report,
    replicas_note,
    verdict,
)
from varuna_client.demo.scenario import DemoSnapshot

STEPS = 8
REFERENCE = [5.0 - 0.1 * step for step in range(STEPS)]
PLAYED = DemoRecord(
    disturbances=(
        {"kind": "KillVm", "vm_id": "vm-3"},
        {"kind": "OfferVm"},
        {"kind": "PreemptVm", "vm_id": "vm-0", "notice_s": 30.0, "left_after_s": 2.5},
    )
)
SHAPES = [(2, 2), (3, 1), (2, 2), (3, 1)]
SOURCES = ({"kept": 2**20}, {"peers": 2**21})
"""Of generations with an even number, which go on in place, and of the others."""


def generation(number: int, p: int, d: int, kind: str = "training") -> dict[str, Any]:
    return {
        "number": number,
        "kind": kind,
        "p": p,
        "d": d,
        "micro_batch": 1,
        "reason": f"reason {number}",
        "seconds_without_progress": 3.25 if number > 2 else None,
        "steps_redone": 0,
        "kind_of_morph": None if number < 3 else "restart" if number % 2 else "reshape",
        "state_from": None if number < 3 else {"kept": 0, "peers": 0, "store": 0} | SOURCES[number % 2],
        "micro_batches_redone": None if number % 2 or number < 3 else 3,
        "plan": {"predicted_minibatch_s": 0.2, "global_batch": 8},
    }


def metrics(losses: list[float]) -> list[dict[str, Any]]:
    """Two steps to each generation, from generation 2 on."""
    return [
        {"step": step, "loss": loss, "step_s": 0.75, "between_s": 0.5, "generation": 2 + (step - 1) // 2, "at": 1.0}
        for step, loss in enumerate(losses, 1)
    ]


def report_of(
    *,
    shapes: list[tuple[int, int]] = SHAPES,
    seen: list[dict[str, Any]] | None = None,
    reference: list[float] = REFERENCE,
    played: DemoRecord = PLAYED,
    job: dict[str, Any] | None = None,
) -> Report:
    trained = [generation(number, p, d) for number, (p, d) in enumerate(shapes, 2)]
    observed = DemoSnapshot(
        job=job or {"state": "succeeded", "step": STEPS, "error": None},  # type: ignore[arg-type]
        generations=(generation(1, 1, 4, "calibration"), *trained),  # type: ignore[arg-type]
        metrics=tuple(metrics(REFERENCE) if seen is None else seen),  # type: ignore[arg-type]
        events=(),
        vms=(),
    )
    return make_report(STEPS, observed, reference, played)


def test_a_run_that_did_all_of_it_is_ok_and_its_report_has_the_promised_keys() -> None:
    report = report_of()
    assert report.ok, report.failures
    document = json.loads(json.dumps(report.document))
    assert {"steps", "generations", "max_loss_difference", "reference_losses", "losses", "ok"} <= document.keys()
    assert document["steps"] == STEPS
    assert document["losses"] == document["reference_losses"] == REFERENCE
    assert document["max_loss_difference"] == 0.0
    assert [g["number"] for g in document["generations"]] == [2, 3, 4, 5]
    wanted = {"number", "p", "d", "micro_batch", "reason", "seconds_without_progress", "steps_redone"}
    assert all(wanted <= g.keys() for g in document["generations"])
    morphs = [(g["kind_of_morph"], g["micro_batches_redone"], g["global_batch"]) for g in document["generations"]]
    assert morphs == [(None, None, 8), ("restart", None, 8), ("reshape", 3, 8), ("restart", None, 8)]
    assert document["generations"][2]["state_from"] == {"kept": 2**20, "peers": 0, "store": 0}
    assert verdict(report).startswith("OK: 8 steps over 4 generations")


def test_a_loss_beyond_the_tolerance_fails_at_its_step() -> None:
    within = [loss * (1 + 9e-5) for loss in REFERENCE]
    assert report_of(seen=metrics(within)).ok
    beyond = [*REFERENCE[:4], REFERENCE[4] * (1 + 2e-4), *REFERENCE[5:]]
    report = report_of(seen=metrics(beyond))
    assert "step 5: loss" in verdict(report)
    assert not report.document["ok"]


def test_a_loss_that_is_no_number_fails() -> None:
    seen = [{**metrics(REFERENCE)[0], "loss": None}, *metrics(REFERENCE)[1:]]
    assert report_of(seen=seen).failures[0].startswith("1 of 8 steps have no loss, the first is step 1")


def test_a_step_that_was_redone_counts_both_times() -> None:
    twice = [{**metrics(REFERENCE)[2], "loss": 9.9, "generation": 2}, *metrics(REFERENCE)]
    report = report_of(seen=twice)
    assert report.document["losses"] == REFERENCE
    assert any("step 3" in failure for failure in report.failures)


def test_a_missing_step_fails() -> None:
    assert report_of(seen=metrics(REFERENCE)[:-1]).failures == ("1 of 8 steps have no loss, the first is step 8",)


@pytest.mark.parametrize(
    ("shapes", "says"),
    [
        ([(2, 2), (3, 1), (2, 2)], "2 morphs where at least 3 were due"),
        ([(1, 4), (1, 3), (1, 4), (1, 3)], "no morph went to another P×D with P > 1"),
        ([(2, 2), (2, 2), (2, 2), (2, 2)], "no morph went to another P×D with P > 1"),
    ],
)
def test_a_run_without_the_promised_morphs_fails(shapes: list[tuple[int, int]], says: str) -> None:
    assert says in verdict(report_of(shapes=shapes))


@pytest.mark.parametrize("first", [(4, 1), (2, 2)])
def test_morphs_to_no_replicas_are_no_fault_of_the_run_but_are_said(first: tuple[int, int]) -> None:
    report = report_of(shapes=[first, (3, 1), (4, 1), (3, 1)])
    assert report.ok, report.failures
    note = replicas_note(report.document)
    assert note is not None
    assert note.startswith("no morph went to another P×D with D > 1")
    assert replicas_note(report_of().document) is None


def test_a_vm_that_outstays_its_notice_fails() -> None:
    for left in (None, 31.0):
        late = DemoRecord(disturbances=(*PLAYED.disturbances[:2], {**PLAYED.disturbances[2], "left_after_s": left}))
        assert "vm-0 had not left 30 s after its notice" in verdict(report_of(played=late))


def test_a_job_that_failed_is_told_by_its_own_last_line_and_nothing_else() -> None:
    job = {"state": "failed", "step": 3, "error": "Traceback ...\nRuntimeError: boom\n"}
    report = report_of(job=job, reference=[], seen=metrics(REFERENCE)[:3])
    assert verdict(report) == "FAILED: the job is failed at step 3: RuntimeError: boom"


def test_the_closing_table_has_a_row_for_each_generation() -> None:
    out = io.StringIO()
    Console(file=out, width=200).print(closing_table(report_of().document))
    text = out.getvalue()
    assert all(f"reason {number}" in text for number in (2, 3, 4, 5))
    assert "0.25 (0.20)" in text
    lines = [line.split("│")[4].strip() for line in text.splitlines() if line.startswith("│")]
    assert lines == [
        "reason 2",
        "reason 3",
        "restart, 2.0 MiB of state from memory",
        "reason 4",
        "in place, 3 of 8 micro-batches run again, 1.0 MiB of state kept in memory",
        "reason 5",
        "restart, 2.0 MiB of state from memory",
    ]


def with_load(shares: dict[int, float | None]) -> Report:
    """Step times are 25 % above their predictions in every generation."""
    return report_of(played=replace(PLAYED, other_load=shares))


def test_step_times_far_from_their_predictions_are_put_down_to_a_busy_machine_only_when_it_was_busy() -> None:
    assert busy_note(report_of().document) is None, "nothing is known of other programs"
    assert busy_note(with_load({2: 0.02, 3: 0.05, 4: None, 5: 0.0}).document) is None
    note = busy_note(with_load({2: 0.02, 3: 0.71, 4: 0.4, 5: 0.0}).document)
    assert note is not None
    assert "up to 71%" in note
    assert "generations 3, 4 " in note


def test_step_times_as_predicted_need_no_explanation() -> None:
    document = with_load(dict.fromkeys(range(2, 6), 0.9)).document
    for one in document["generations"]:
        one["predicted_minibatch_s"] = one["minibatch_s"]
    assert busy_note(document) is None


class Program(NamedTuple):
    """A process that has used `used_s` so far."""

    pid: int
    used_s: float

    def cpu_times(self) -> SimpleNamespace:
        return SimpleNamespace(user=self.used_s, system=0.0)


def test_the_load_of_other_programs_is_what_ours_did_not_use(monkeypatch: pytest.MonkeyPatch) -> None:
    ours: list[Any] = []
    all_s = 0.0
    monkeypatch.setattr(psutil, "cpu_count", lambda: 2)
    monkeypatch.setattr(psutil, "cpu_times", lambda: SimpleNamespace(user=all_s, nice=0.0, system=0.0))
    monkeypatch.setattr(psutil, "Process", lambda: Program(1, 0.0))
    load = OtherLoad(lambda: ours)
    for now, running, used_s in (
        (0.0, [Program(2, 0.0)], 100.0),
        (10.0, [Program(2, 6.0), Program(3, 4.0)], 120.0),  # two processors, 10 s of each: half of it is ours
        (20.0, [Program(3, 14.0)], 130.0),  # one of ours has ended, the other had a processor, the rest was idle
    ):
        ours, all_s = running, used_s
        load.add_sample(now)
        load.add_sample(now + 0.5)  # too soon to look again
    assert load.compute_share(0.0, 10.0) == pytest.approx(0.5)
    assert load.compute_share(10.0, 20.0) == pytest.approx(0.0)
    assert load.compute_share(0.0, 20.0) == pytest.approx(0.25)
    assert load.compute_share(0.0, 9.0) is None, "one look is not enough"
