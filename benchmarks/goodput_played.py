"""Goodput of a real job on local VMs that come and go as a spot trace says, and what the replay predicts for it.

    make soak-goodput                                  # or, with options:
    make soak-goodput SOAK="--minutes 20 --copies on --json played.json"

**The segment.** Of a trace, every k-th node, so that at most `--most-vms` VMs are there at once: the removals per
VM-hour stay as they are, and bursts get smaller. Of all hours (`--hours`) of such a trace, the one with the most
moments at which VMs go, played in `--minutes`. VMs are agents on this machine with a manager of their own. One that
goes gets SIGKILL with all its processes, and the manager is not told.

**The job.** Linear layers with AdamW, as in `recovery.py`, which also wait for as long as a device would compute, so
that a step on four VMs takes `--step-s`. No device holds the whole model; shapes are the planner's choice.

**The prediction.** What does not get shorter with the trace (to notice a loss, to start and meet, the start of a VM)
weighs more in it. So `goodput.py` replays the trace as it was played, in its own time: a VM leaves when it was killed,
and comes when its agent had connected. It has the planner's answers for the profile that the job has measured, with the
time of a step by shape as measured. Costs are once those of this run (medians by kind of morph), and once those with
which docs/goodput.md reckons. What both sides do with the same trace is compared as a share of the same bound.

**Ray's nightly scenario** (`_goodput_nightly.py`): 1,600 steps, checkpoints every 400, four preemptions. `wasted` are
committed steps that are done again, and micro-batches that are run again, in steps.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from _goodput_books import (
    Books,
    MeasuredPlans,
    PlayedMorph,
    PlayedRun,
    keep_books,
    list_morphs,
    make_system,
    measure_step_times,
)
from _goodput_job import Replayed, ReplayedJob
from _goodput_nightly import PREEMPTED_AT, PUBLISHED, WAYS, NightlyFigures, play_nightly
from _goodput_player import play_segment
from _goodput_segment import Segment, find_busiest_segment
from _goodput_setting import State, System
from _recovery_trial import ModelSize
from _text_tables import render_table
from goodput import TRACE, PlannersAnswers, find_upper_bound, make_managers_rules, make_system_of_today

from varuna_planner.liveput.morph_cost import MorphKind
from varuna_planner.liveput.spot_trace import parse_trace
from varuna_planner.profile.document import Profile
from varuna_proto.rest import GenerationDocument

LAYERS, WIDTH, GLOBAL_BATCH = 24, 256, 64
MICRO_BATCH = 2
"""A guess, for the emulated device's speed alone."""
LEAST_VMS = 2
"""No device holds the whole model."""
AIM = 0.03
"""The most by which the prediction should miss, as a share of the bound."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A played segment, and what the replay makes of the same trace."""

    run: PlayedRun
    plans: MeasuredPlans
    step_times: dict[tuple[int, int, int], float]
    bound: float
    """Examples."""
    morphs: list[PlayedMorph]
    measured: Books
    predictions: dict[str, tuple[System, Replayed]]

    def measured_share(self) -> float:
        return self.measured.examples / self.bound

    def predicted_share(self, name: str) -> float:
        return self.predictions[name][1].examples / self.bound


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=["segment", "nightly"], default=["segment", "nightly"])
    parser.add_argument("--trace", type=Path, default=TRACE, help="(default: %(default)s)")
    parser.add_argument("--hours", type=float, default=1.0, help="of the trace that are played")
    parser.add_argument("--start-s", type=float, help="where in the trace; default: where the most VMs go")
    parser.add_argument("--minutes", type=float, default=7.5, help="that playing them takes")
    parser.add_argument("--most-vms", type=int, default=6, help="VMs on this machine at once")
    parser.add_argument("--step-s", type=float, default=4.0, help="a step on four VMs")
    parser.add_argument("--copies", choices=["off", "on"], default="off", help="of the job")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["killed", "notice"], help="of the nightly scenario")
    parser.add_argument("--json", type=Path, help="write the figures here")
    given = parser.parse_args()
    if min(given.hours, given.minutes, given.step_s) <= 0 or given.most_vms < LEAST_VMS:
        parser.error(f"--hours, --minutes and --step-s must be above 0, and --most-vms at least {LEAST_VMS}")
    report: dict[str, Any] = {"cores": os.cpu_count(), "load": os.getloadavg()[0]}
    if "segment" in given.parts:
        try:
            segment = find_busiest_segment(
                parse_trace(given.trace.read_text(), name=str(given.trace)),
                seconds=3600 * given.hours,
                speed=60 * given.hours / given.minutes,
                least_vms=LEAST_VMS,
                most_vms=given.most_vms,
                start_s=given.start_s,
            )
        except (OSError, ValueError) as error:
            parser.error(str(error))
        print(describe_segment(segment), flush=True)
        comparison = play_and_predict(segment, given.step_s, given.copies)
        print(render_comparison(comparison), flush=True)
        report["segment"] = make_document(segment, comparison)
    if "nightly" in given.parts:
        figures = [play_nightly(way) for way in given.ways]
        print(render_nightly(figures))
        report["nightly"] = {
            "preempted_at": PREEMPTED_AT,
            "published": PUBLISHED,
            "ways": [asdict(one) for one in figures],
        }
    if given.json:
        given.json.write_text(json.dumps(report, indent=1))


def play_and_predict(segment: Segment, step_s: float, copies: str) -> Comparison:
    example_ms = 1e3 * step_s * 4 / (3 * LAYERS * GLOBAL_BATCH)
    size = ModelSize(
        name="goodput",
        width=WIDTH,
        layers=LAYERS,
        global_batch=GLOBAL_BATCH,
        micro_batch=MICRO_BATCH,
        example_ms=example_ms,
    )
    run = play_segment(size, segment.trace, device_memory_bytes=size.state_bytes, copies=copies)
    return compare(run, size, copies=copies == "on")


def compare(run: PlayedRun, size: ModelSize, *, copies: bool) -> Comparison:
    profile = Profile.from_json(run.profile_json)
    step_times = measure_step_times(run)
    plans = MeasuredPlans(PlannersAnswers(profile, size.global_batch, size.state_bytes), step_times)
    morphs = list_morphs(run, LEAST_VMS)
    pages = make_system_of_today(copies=copies)
    systems = {"this run's costs": make_system(run, morphs, pages), "the page's costs": pages}
    state = State.of_profile(profile)
    return Comparison(
        run=run,
        plans=plans,
        step_times=step_times,
        bound=find_upper_bound(run.trace, plans),
        morphs=morphs,
        measured=keep_books(run, morphs, plans, size.global_batch),
        predictions={name: (system, predict(run, plans, state, system)) for name, system in systems.items()},
    )


def predict(run: PlayedRun, plans: MeasuredPlans, state: State, system: System) -> Replayed:
    policy = make_managers_rules(run.trace, plans, state, system)
    return ReplayedJob(run.trace, plans, state, system, policy).replay()


# ---------------------------------------------------------------- what is printed


def describe_segment(segment: Segment) -> str:
    fewest, most = segment.fleet_sizes
    return (
        f"node {segment.phase + 1} and every {segment.every}th after it, {segment.seconds / 3600:g} h from "
        f"{segment.start_s / 3600:.2f} h on, {segment.speed:g} times as fast: {fewest} to {most} VMs, "
        f"{segment.removals} removals at {segment.removal_moments} moments, {segment.additions} additions"
    )


COLUMNS = (
    "",
    "OF BOUND",
    "EXAMPLES",
    "KEPT",
    "REDONE",
    "LAUNCH",
    "NOTICE",
    "SAVE",
    "WAIT",
    "IN PLACE / MEMORY / STORE",
)


def render_comparison(comparison: Comparison) -> str:
    """The table, in seconds, and the morphs and steps from which it comes."""
    books = comparison.measured
    kinds = [sum(morph.kind is kind for morph in comparison.morphs[1:]) for kind in MorphKind]
    times = (books.kept_s, books.redone_s, books.launching_s, books.noticing_s, books.saving_s, books.waiting_s)
    rows = [COLUMNS, _make_row("measured", comparison.measured_share(), books.examples, times, kinds)]
    for name, (_, one) in comparison.predictions.items():
        times = (one.kept_s, one.redone_s, one.launching_s, one.detecting_s, one.saving_s, one.waiting_s)
        kinds = [one.morphs[kind.value] for kind in MorphKind]
        rows.append(_make_row(f"predicted, {name}", comparison.predicted_share(name), one.examples, times, kinds))
    lines = [render_table(rows, words=0)]
    for name, (system, _) in comparison.predictions.items():
        missed = comparison.predicted_share(name) - comparison.measured_share()
        verdict = "within" if abs(missed) <= AIM else "beyond"
        costs = ", ".join(f"{kind} {seconds:.2f} s" for kind, seconds in system.fixed_s.items())
        lines.append(
            f"{name}: {100 * missed:+.1f} points, {verdict} the aim of {100 * AIM:g} ({costs}, noticed after "
            f"{system.detect_s:.2f} s, a save {system.save_stall_s:.3f} s)"
        )
    lines.append(f"steps took {comparison.plans.ratio:.3f} of what the planner predicts, in the mean of shapes:")
    lines.append(", ".join(f"{p}×{d} m={m} {s:.2f} s" for (p, d, m), s in sorted(comparison.step_times.items())))
    lines.append(f"VMs were ready {', '.join(f'{s:.1f}' for s in comparison.run.granted_s)} s after the trace had them")
    lines += [
        _render_morph(one, morph) for one, morph in zip(comparison.run.generations, comparison.morphs, strict=True)
    ]
    return "\n".join(lines)


def _make_row(
    name: str, share: float, examples: float, times: Sequence[float], kinds: Sequence[int]
) -> tuple[str, ...]:
    return (name, f"{share:.1%}", f"{examples:,.0f}", *(f"{one:.1f}" for one in times), " / ".join(map(str, kinds)))


def _render_morph(generation: GenerationDocument, morph: PlayedMorph) -> str:
    shape = f"{generation['p']}×{generation['d']} m={generation['micro_batch']}"
    noticed = "" if morph.noticed_s is None else f", noticed after {morph.noticed_s:.2f} s"
    redone = f"{generation['steps_redone'] or 0} steps and {generation['micro_batches_redone'] or 0} micro-batches"
    return (
        f"{morph.began_s:7.1f} s  {shape} {morph.kind}: pause {morph.pause_s:.2f} s ({morph.noticing_s:.2f} noticing, "
        f"{morph.waiting_s:.2f} waiting){noticed}, redone {redone}: {generation['reason']}"
    )


def render_nightly(figures: Sequence[NightlyFigures]) -> str:
    rows = [
        (
            "1,600 steps, four preemptions",
            "WASTED",
            "STEPS REDONE",
            "MICRO-BATCHES REDONE",
            "NO PROGRESS, S",
            "STEP, MS",
        )
    ]
    rows += [(f"{name} (published)", str(wasted), "", "", "", "") for name, wasted in PUBLISHED.items()]
    rows += [
        (
            f"varuna, {one.way}",
            f"{one.steps_wasted:.1f}",
            str(one.steps_redone),
            str(one.micro_batches_redone),
            f"{one.seconds_without_progress:.1f}",
            f"{1e3 * one.step_s:.0f}",
        )
        for one in figures
    ]
    return render_table(rows, words=0)


def make_document(segment: Segment, comparison: Comparison) -> dict[str, Any]:
    run = comparison.run
    return {
        "segment": {
            **{name: getattr(segment, name) for name in ("every", "phase", "start_s", "seconds", "speed")},
            "removals": segment.removals,
            "removal_moments": segment.removal_moments,
            "additions": segment.additions,
            "fleet_sizes": segment.fleet_sizes,
        },
        "played": [[event.at_s, "add" if event.add else "remove", event.node] for event in run.trace.events],
        "granted_s": run.granted_s,
        "bound_examples": comparison.bound,
        "managers_goodput": run.goodput,
        "step_times": [{"shape": shape, "seconds": seconds} for shape, seconds in comparison.step_times.items()],
        "steps_to_predicted": comparison.plans.ratio,
        "measured": {"of_bound": comparison.measured_share(), **asdict(comparison.measured)},
        "predicted": {
            name: {
                "of_bound": comparison.predicted_share(name),
                "points_off": 100 * (comparison.predicted_share(name) - comparison.measured_share()),
                "system": asdict(system),
                **{key: value for key, value in asdict(replayed).items() if key != "progress"},
            }
            for name, (system, replayed) in comparison.predictions.items()
        },
        "morphs": [
            {**asdict(morph), "shape": [one["p"], one["d"], one["micro_batch"]], "reason": one["reason"]}
            for one, morph in zip(run.generations, comparison.morphs, strict=True)
        ],
    }


if __name__ == "__main__":
    main()
