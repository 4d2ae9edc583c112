"""`varuna plan`: the best plan for a profile and GPUs, and its expected rate when VMs are taken away."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from varuna_client.commands.options import AsJson, print_document
from varuna_client.errors import UserError
from varuna_client.planning.files import read_profile, read_text
from varuna_client.planning.models import (
    NO_LIMIT,
    DeviceMemoryGb,
    GpusPerVm,
    PinnedD,
    PinnedMicroBatch,
    PinnedP,
    device_memory_bytes,
)
from varuna_client.text.render import number, shape, size
from varuna_proto.plan import Plan

if TYPE_CHECKING:
    from varuna_planner.liveput.liveput import Hazard
    from varuna_planner.profile.document import Profile
    from varuna_planner.search.auto_config import PlanChoice
    from varuna_planner.search.liveput_ranking import LiveputChoice

WITH_HAZARD = "With a hazard: "
SHOWN = 12
RANKED_SHOWN = 6
"""Candidates in the printed table."""
OF_EACH_P = 4
"""Candidates with the same number of stages in --json, best first: on 100,000 GPUs there are 140,000 in all."""


def plan(
    profile: Annotated[Path, typer.Option(metavar="P.json", help="A profile, measured or synthesised.")],
    gpus: Annotated[int, typer.Option(min=1, help="Number of GPUs.")],
    global_batch: Annotated[int, typer.Option(min=1, help="Examples in a mini-batch.")],
    gpus_per_vm: GpusPerVm = 1,
    device_memory_gb: DeviceMemoryGb = None,
    policy: Annotated[str, typer.Option(help="Schedule: gpipe, 1f1b, varuna, work-conserving.")] = "work-conserving",
    p: PinnedP = None,
    d: PinnedD = None,
    micro_batch: PinnedMicroBatch = None,
    hazard: Annotated[
        float | None,
        typer.Option(min=0, help="Removals per VM and hour: rank by expected, not peak rate."),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Take the hazard from a history: milliseconds,add|remove,node.")
    ] = None,
    morph_s: Annotated[
        float | None, typer.Option(min=0, help=f"{WITH_HAZARD}time from a stop to the next mini-batch (30).")
    ] = None,
    replace_s: Annotated[
        float | None,
        typer.Option(min=0, help=f"{WITH_HAZARD}the same when a warm spare takes over (--morph-s)."),
    ] = None,
    detect_s: Annotated[
        float | None, typer.Option(min=0, help=f"{WITH_HAZARD}time to detect a loss without notice (3).")
    ] = None,
    notice_probability: Annotated[
        float | None, typer.Option(min=0, max=1, help=f"{WITH_HAZARD}share of removals that come with notice (0).")
    ] = None,
    save_stall_s: Annotated[
        float | None, typer.Option(min=0, help=f"{WITH_HAZARD}time for which a save stops training (0.5).")
    ] = None,
    save_write_s: Annotated[
        float | None, typer.Option(min=0, help=f"{WITH_HAZARD}time of a save in the background (5).")
    ] = None,
    fleet: Annotated[
        Path | None,
        typer.Option(metavar="FLEET.yaml", help="Compare the fleet's pools; the profile is of GPUs with speed 1."),
    ] = None,
    all_candidates: Annotated[
        bool,
        typer.Option("--all-candidates", help=f"Every candidate in --json, not just {OF_EACH_P} per P."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Choose a plan for a profile: stages, replicas, micro-batch; with a hazard also save interval and spares."""
    from varuna_planner.liveput.checkpoint_interval import StopCosts
    from varuna_planner.schedule.policies import parse_policy
    from varuna_planner.search.auto_config import Pins, choose_plan  # numba: the other commands start faster without it
    from varuna_planner.search.liveput_ranking import SpotMarket, rank_by_liveput

    costs = {
        "morph_s": morph_s,
        "replace_s": replace_s,
        "detect_s": detect_s,
        "notice_probability": notice_probability,
        "save_stall_s": save_stall_s,
        "save_write_s": save_write_s,
    }
    costs_given = {name: value for name, value in costs.items() if value is not None}
    hazards, measured = _hazard(hazard, trace), read_profile(profile)
    if hazards is None and costs_given:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in costs_given)
        raise UserError(
            f"{options} without a hazard would change nothing: give --hazard or --trace, too, or leave it out"
        )
    if fleet is not None and (trace is not None or costs_given):
        raise UserError("--fleet compares pools by price and speed: of the hazard it takes --hazard, and nothing else")
    try:
        question: dict[str, Any] = {
            "gpus": gpus,
            "global_batch": global_batch,
            "device_memory_bytes": device_memory_bytes(device_memory_gb),
            "gpus_per_vm": gpus_per_vm,
            "policy": parse_policy(policy),
            "pins": Pins(p=p, d=d, micro_batch=micro_batch),
        }
        if fleet is not None:
            _print_fleet(fleet, measured, hazard, question, as_json)
            return
        started = time.perf_counter()
        ranking: LiveputChoice | None = None
        if hazards is None:
            choice = choose_plan(measured, **question)
        else:
            ranking = rank_by_liveput(
                measured, **question, market=SpotMarket(hazard=hazards, costs=StopCosts(**costs_given))
            )
            choice = ranking.peak
        elapsed_ms = (time.perf_counter() - started) * 1e3
    except ValueError as error:
        raise UserError(str(error)) from None
    if choice.best is None:
        raise UserError(choice.reason)
    document = plan_document(
        choice,
        ranking,
        sections=len(measured.sections),
        elapsed_ms=elapsed_ms,
        of_each_p=None if all_candidates else OF_EACH_P,
    )
    print_document(document, plan_page(document, limited=device_memory_gb is not None), as_json)


def _print_fleet(fleet: Path, profile: Profile, hazard: float | None, question: dict[str, Any], as_json: bool) -> None:
    """Raises UserError, ValueError."""
    from varuna_client.planning.fleet_plans import FleetQuestion, fleet_page, plan_fleet, read_fleet
    from varuna_planner.liveput.hazard import removals_per_vm_hour

    options = dict(question)
    asked = FleetQuestion(
        profile=profile,
        gpus=options.pop("gpus"),
        gpus_per_vm=options.pop("gpus_per_vm"),
        hazard_per_hour=removals_per_vm_hour(0.0, 0.0) if hazard is None else hazard,
        options=options,
    )
    document = plan_fleet(read_fleet(fleet), asked)
    print_document(document, fleet_page(document), as_json)


def _hazard(rate: float | None, trace: Path | None) -> Hazard | None:
    from varuna_planner.liveput.liveput import Hazard
    from varuna_planner.liveput.spot_trace import measure_hazard, parse_trace

    if rate is not None and trace is not None:
        raise UserError("--hazard and --trace both give the hazard: leave one of them out")
    try:
        if trace is None:
            return None if rate is None else Hazard(removals_per_vm_hour=rate)
        return measure_hazard(parse_trace(read_text(trace, "trace"), name=str(trace)))
    except ValueError as error:
        raise UserError(str(error)) from None


# ---------------------------------------------------------------- the document


def plan_document(
    choice: PlanChoice,
    ranking: LiveputChoice | None,
    *,
    sections: int,
    elapsed_ms: float,
    of_each_p: int | None = OF_EACH_P,
) -> dict[str, Any]:
    """What --json prints; `best` is the best in expectation if there is a ranking.

    `of_each_p`: candidates with the same number of stages; None: all.
    """
    best = ranking.best.plan if ranking is not None and ranking.best is not None else choice.best
    assert best is not None, "the caller raises when there is no plan"
    candidates = choice.candidates
    if candidates:
        candidates.look_closer(SHOWN)
    few = candidates[:] if of_each_p is None or not candidates else candidates.best_of_each_p(of_each_p)
    document: dict[str, Any] = {
        "best": {
            **shape_document(best, sections),
            "predicted_minibatch_s": best.predicted_minibatch_s,
            "examples_per_s": best.examples_per_s,
        },
        "candidates": [candidate.to_dict() for candidate in few],
        "candidates_left_out": len(candidates) - len(few),
        "elapsed_ms": elapsed_ms,
    }
    if ranking is not None:
        document["liveput"] = _liveput(ranking)
    return document


def shape_document(plan: Plan, sections: int) -> dict[str, Any]:
    """The plan's shape and stages, for --json."""
    ends = (*plan.stage_starts[1:], sections)
    stages = [
        {"first_section": first, "sections": end - first, "recompute": recompute, "memory_bytes": memory_bytes}
        for first, end, recompute, memory_bytes in zip(
            plan.stage_starts, ends, plan.recompute, plan.memory_bytes, strict=True
        )
    ]
    return {
        "p": plan.p,
        "d": plan.d,
        "micro_batch": plan.micro_batch,
        "stages": stages,
        "policy": plan.policy,
        "run_ahead": plan.run_ahead,
    }


def _liveput(ranking: LiveputChoice) -> dict[str, Any]:
    """The expectation of the best plan, and the table of the ranked plans."""
    rows = [
        {
            "p": one.plan.p,
            "d": one.plan.d,
            "micro_batch": one.plan.micro_batch,
            "vms": one.vms,
            "spare_vms": one.spare_vms,
            "examples_per_s": one.plan.examples_per_s,
            "expected_examples_per_s": one.expected_examples_per_s,
            "stops_per_hour": one.stops_per_hour,
            "checkpoint_interval_s": one.checkpoint_interval_s,
            "checkpoint_every": one.checkpoint_every,
            "redone_s": one.redone_s,
            "reason": one.reason,
        }
        for one in ranking.ranked
    ]
    names = ("expected_examples_per_s", "stops_per_hour", "checkpoint_interval_s", "checkpoint_every", "spare_vms")
    return {**{name: rows[0][name] for name in names}, "spare_reason": ranking.spare_reason, "ranked": rows}


# ---------------------------------------------------------------- text for people


def plan_page(document: dict[str, Any], *, limited: bool) -> RenderableType:
    """`limited`: whether the memory of a GPU is known."""
    best = document["best"]
    head = (
        f"{shape(best['p'], best['d'])}, micro-batch {best['micro_batch']}, {best['policy']}: "
        f"{best['predicted_minibatch_s']:.4g} s per mini-batch, {best['examples_per_s']:.4g} examples/s"
    )
    parts: list[RenderableType] = [Text(head, style="bold")]
    if not limited:
        parts.append(Text(NO_LIMIT, style="dim"))
    liveput = document.get("liveput")
    if liveput:
        every = "1 mini-batch" if liveput["checkpoint_every"] == 1 else f"{liveput['checkpoint_every']} mini-batches"
        parts += [
            Text(
                f"{liveput['expected_examples_per_s']:.4g} examples/s are expected; save every "
                f"{liveput['checkpoint_interval_s']:.4g} s ({every})"
            ),
            Text(liveput["spare_reason"]),
            "",
            _ranked_table(liveput["ranked"]),
        ]
    parts += ["", stages_table(best["stages"]), "", _candidates_table(document["candidates"])]
    more = len(document["candidates"]) + document["candidates_left_out"] - SHOWN
    if more > 0:
        parts.append(Text(f"and {more} more: --json --all-candidates", style="dim"))
    return Group(*parts)


def stages_table(stages: list[dict[str, Any]]) -> Table:
    table = Table("STAGE", "SECTIONS", "RECOMPUTE", "MEMORY", box=None, pad_edge=False)
    for index, stage in enumerate(stages):
        first, last = stage["first_section"], stage["first_section"] + stage["sections"] - 1
        sections = str(first) if first == last else f"{first}-{last}"
        table.add_row(str(index), sections, "yes" if stage["recompute"] else "no", size(stage["memory_bytes"]))
    return table


def _candidates_table(candidates: list[dict[str, Any]]) -> Table:
    table = Table("P×D", "M", "MINI-BATCH", "FITS", "WHY", box=None, pad_edge=False)
    for one in candidates[:SHOWN]:
        predicted = one["predicted_minibatch_s"]
        table.add_row(
            shape(one["p"], one["d"]),
            str(one["micro_batch"]),
            "-" if predicted is None else f"{'≥ ' if one['reason'].startswith('at least') else ''}{predicted:.4g} s",
            "yes" if one["fits"] else "no",
            one["reason"],
        )
    return table


def _ranked_table(rows: list[dict[str, Any]]) -> Table:
    heads = ("P×D", "M", "VMS", "SPARE", "PEAK EX/S", "EXPECTED", "STOPS/H", "SAVE EVERY", "WHY")
    table = Table(*heads, box=None, pad_edge=False)
    for one in rows[:RANKED_SHOWN]:
        table.add_row(
            shape(one["p"], one["d"]),
            str(one["micro_batch"]),
            str(one["vms"]),
            str(one["spare_vms"]),
            number(one["examples_per_s"], 2),
            number(one["expected_examples_per_s"], 2),
            number(one["stops_per_hour"], 2),
            f"{one['checkpoint_interval_s']:.4g} s",
            one["reason"],
        )
    return table
