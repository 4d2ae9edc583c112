"""The demo's report: its document, the checks behind its verdict, and the closing table. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from rich.table import Table
from rich.text import Text

from varuna_client.demo.scenario import SCENES, DemoSnapshot
from varuna_client.text.pages import render_morph
from varuna_client.text.render import shape
from varuna_proto.rest import GenerationDocument

TOLERANCE = 1e-4
"""The largest accepted relative difference between a step's loss and the uninterrupted run's (fp32)."""
MIN_MORPHS = 3
_FAR_OFF = 0.2
"""The relative error of a predicted step time from which the report explains it."""
_BUSY = 0.15
"""The share of the processors used by other programs that explains such an error."""


@dataclass(frozen=True, kw_only=True)
class DemoRecord:
    """What the demo did."""

    disturbances: tuple[dict[str, Any], ...] = ()
    """Each has kind, story, step, generation and, for the notice, `left_after_s` and `notice_s`."""
    problems: tuple[str, ...] = ()
    """What went wrong outside the training: a deadline passed, a process that would not end."""
    other_load: Mapping[int, float | None] = field(default_factory=dict)
    """By generation: the share of the processors, from 0 to 1, that other programs used while it trained."""
    elapsed_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Report:
    """The document of `demo-report.json` and the list of what failed."""

    document: dict[str, Any]
    failures: tuple[str, ...] = field(default=())

    @property
    def ok(self) -> bool:
        return not self.failures


def make_report(steps: int, observed: DemoSnapshot, reference: Sequence[float], played: DemoRecord) -> Report:
    """Compares the run with `reference` (loss of step k at k-1) and checks that all disturbances happened."""
    trained = [g for g in observed.generations if g["kind"] == "training"]
    losses = _losses(observed, steps)
    differences = _differences(observed, reference)
    largest = max(differences.values(), default=None)
    if largest == math.inf:
        largest = None  # JSON has no infinity; the failures say which step it was
    failures = [*played.problems, *_job_failures(observed)]
    if not failures:  # otherwise these would only repeat that the job did not finish
        failures = [*_loss_failures(losses, differences, reference, steps), *_morph_failures(trained, played)]
    document = {
        "ok": not failures,
        "failures": failures,
        "steps": steps,
        "max_loss_difference": largest,
        "tolerance": TOLERANCE,
        "generations": [_generation(g, observed, played.other_load.get(g["number"])) for g in trained],
        "calibration": [_generation(g, observed, None) for g in observed.generations if g["kind"] == "calibration"],
        "disturbances": list(played.disturbances),
        "elapsed_s": round(played.elapsed_s, 1),
        "losses": losses,
        "reference_losses": list(reference),
    }
    return Report(document=document, failures=tuple(failures))


def closing_table(document: dict[str, Any]) -> Table:
    """The generations of the run: shape, why, and what each change cost."""
    table = Table("generation", "P×D", "m", "why", "seconds without progress", "steps redone", "s/step (predicted)")
    for generation in document["generations"]:
        stalled, redone = generation["seconds_without_progress"], generation["steps_redone"]
        actual, predicted = generation["minibatch_s"], generation["predicted_minibatch_s"]
        table.add_row(
            str(generation["number"]),
            shape(generation["p"], generation["d"]),
            str(generation["micro_batch"]),
            _render_reason(generation),
            "-" if stalled is None else f"{stalled:.1f}",
            "-" if redone is None else str(redone),
            "-" if actual is None else f"{actual:.2f}" + (f" ({predicted:.2f})" if predicted else ""),
        )
    return table


def _render_reason(generation: Mapping[str, Any]) -> Text:
    """Why the generation began, and how its workers came to their state."""
    text = Text(generation["reason"])
    if morph := render_morph(generation, generation["global_batch"]):
        text.append(f"\n{morph}", style="dim")
    return text


def verdict(report: Report) -> str:
    """One line for the end."""
    document = report.document
    if report.failures:
        return "FAILED: " + "; ".join(report.failures)
    return (
        f"OK: {document['steps']} steps over {len(document['generations'])} generations; the loss of every step equals "
        f"the uninterrupted plain PyTorch run (largest relative difference {document['max_loss_difference']:.1e}, "
        f"allowed {TOLERANCE:.0e})"
    )


def _losses(observed: DemoSnapshot, steps: int) -> list[float | None]:
    """The loss of each step in the last generation that made it; None where no generation did."""
    losses: list[float | None] = [None] * steps
    for metric in sorted(observed.metrics, key=lambda metric: metric["generation"]):
        if 1 <= metric["step"] <= steps:
            losses[metric["step"] - 1] = metric["loss"]
    return losses


def _differences(observed: DemoSnapshot, reference: Sequence[float]) -> dict[int, float]:
    """The largest relative difference of each step to the reference, over all generations that made it."""
    differences: dict[int, float] = {}
    for metric in observed.metrics:
        step = metric["step"]
        if 1 <= step <= len(reference):
            expected = reference[step - 1]
            loss = metric["loss"]  # None is NaN: as far away as possible
            difference = math.inf if loss is None else abs(loss - expected) / abs(expected)
            differences[step] = max(differences.get(step, 0.0), difference)
    return differences


def _job_failures(observed: DemoSnapshot) -> list[str]:
    job = observed.job
    if job["state"] == "succeeded":
        return []
    error = (job["error"] or "").strip().splitlines()
    return [f"the job is {job['state']} at step {job['step']}{': ' + error[-1] if error else ''}"]


def _loss_failures(
    losses: Sequence[float | None], differences: dict[int, float], reference: Sequence[float], steps: int
) -> list[str]:
    failures = []
    missing = [step for step, loss in enumerate(losses, 1) if loss is None]
    if missing:
        failures.append(f"{len(missing)} of {steps} steps have no loss, the first is step {missing[0]}")
    if len(reference) != steps:
        failures.append(f"the reference run has {len(reference)} losses for {steps} steps")
    worst = max(differences, key=lambda step: differences[step], default=None)
    if worst is not None and differences[worst] > TOLERANCE:
        failures.append(
            f"step {worst}: loss {losses[worst - 1]} is not the reference's {reference[worst - 1]} "
            f"(relative difference {differences[worst]:.1e}, allowed {TOLERANCE:.0e})"
        )
    return failures


def _morph_failures(trained: Sequence[GenerationDocument], played: DemoRecord) -> list[str]:
    """Checks that every disturbance led to a morph, and that some morphs led to another shape, in which P > 1.

    Whether also D > 1 hangs on what calibration measures, and is no fault: see `replicas_note`.
    """
    failures = []
    if len(played.disturbances) < SCENES:
        failures.append(
            f"only {len(played.disturbances)} of {SCENES} disturbances happened before the job ended (more --steps?)"
        )
    morphs = max(len(trained) - 1, 0)
    if morphs < MIN_MORPHS:
        failures.append(f"{morphs} morphs where at least {MIN_MORPHS} were due")
    if not any(p > 1 for p, _ in _list_new_shapes(trained)):
        failures.append("no morph went to another P×D with P > 1")
    for disturbance in played.disturbances:
        notice_s = disturbance.get("notice_s")
        left_after_s = disturbance.get("left_after_s")
        if notice_s is not None and (left_after_s is None or left_after_s > notice_s):
            failures.append(f"{disturbance['vm_id']} had not left {notice_s:.0f} s after its notice")
    return failures


def busy_note(document: dict[str, Any]) -> str | None:
    """One line if step times were far from predictions while other programs used the processors, else None."""
    off = [generation for generation in document["generations"] if _is_explained_by_load(generation)]
    if not off:
        return None
    numbers = ", ".join(str(generation["number"]) for generation in off)
    share = max(generation["other_programs_share"] for generation in off)
    return (
        f"this machine was busy: other programs used up to {share:.0%} of its processors, so the step times of "
        f"generation{'s' if len(off) > 1 else ''} {numbers} and the seconds without progress mean little"
    )


def replicas_note(document: dict[str, Any]) -> str | None:
    """One line if no morph led to a shape with replicas, else None.

    On an idle machine 2×2 is predicted some tenth faster than 4×1; beside other programs calibration is off by more.
    """
    if any(d > 1 for _, d in _list_new_shapes(document["generations"])):
        return None
    return "no morph went to another P×D with D > 1: by what was measured on this machine, D = 1 is faster"


def _list_new_shapes(generations: Sequence[Mapping[str, Any]]) -> list[tuple[int, int]]:
    """P and D of each generation that has others than the one before."""
    shapes = [(generation["p"], generation["d"]) for generation in generations]
    return [new for old, new in pairwise(shapes) if old != new]


def _is_explained_by_load(generation: Mapping[str, Any]) -> bool:
    actual, predicted = generation["minibatch_s"], generation["predicted_minibatch_s"]
    if not actual or not predicted or abs(actual - predicted) / predicted < _FAR_OFF:
        return False
    return (generation["other_programs_share"] or 0.0) >= _BUSY


def _generation(generation: GenerationDocument, observed: DemoSnapshot, other_share: float | None) -> dict[str, Any]:
    of_it = (metric for metric in observed.metrics if metric["generation"] == generation["number"])
    times = [metric["step_s"] - metric["between_s"] for metric in of_it]  # which the planner predicts
    return {
        "number": generation["number"],
        "p": generation["p"],
        "d": generation["d"],
        "micro_batch": generation["micro_batch"],
        "global_batch": generation["plan"]["global_batch"],
        "reason": generation["reason"],
        "kind_of_morph": generation.get("kind_of_morph"),
        "state_from": generation.get("state_from"),
        "end_reason": generation.get("end_reason"),
        "seconds_without_progress": generation.get("seconds_without_progress"),
        "steps_redone": generation.get("steps_redone"),
        "micro_batches_redone": generation.get("micro_batches_redone"),
        "steps": len(times),
        "minibatch_s": statistics.median(times) if times else None,
        "predicted_minibatch_s": generation["plan"].get("predicted_minibatch_s"),
        "other_programs_share": None if other_share is None else round(other_share, 2),
    }
