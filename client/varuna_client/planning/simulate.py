"""`varuna simulate`: what a mini-batch would take under a policy, and how its time is spent."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from varuna_client.commands.options import AsJson, make_console, print_document
from varuna_client.errors import UserError
from varuna_client.planning.files import read_profile, write_text
from varuna_client.planning.gantt import Bar, Chart, as_html, as_svg, as_text
from varuna_client.planning.models import NO_LIMIT, DeviceMemoryGb, device_memory_bytes
from varuna_client.text.render import shape

if TYPE_CHECKING:
    from varuna_planner.what_if import SimulatedPlan, SimulationRequest

WRITERS = {".svg": as_svg, ".html": as_html}


def simulate(
    profile: Annotated[Path, typer.Option(metavar="P.json", help="A profile, measured or synthesised.")],
    p: Annotated[int, typer.Option(help="Pipeline stages.")],
    micro_batch: Annotated[int, typer.Option(help="Examples in a micro-batch.")],
    global_batch: Annotated[int, typer.Option(help="Examples in a mini-batch.")],
    d: Annotated[int, typer.Option(help="Data-parallel replicas.")] = 1,
    policy: Annotated[
        str, typer.Option(metavar="NAME", help="gpipe, 1f1b, varuna, work-conserving; zero-bubble: simulated only.")
    ] = "work-conserving",
    network_scale: Annotated[float, typer.Option(help="Slow the network between VMs down by this factor.")] = 1.0,
    jitter: Annotated[float, typer.Option(help="Mean of a random delay of each message, in seconds.")] = 0.0,
    compute_noise: Annotated[float, typer.Option(help="Relative standard deviation of each op's time.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the random delays and times.")] = 0,
    stages: Annotated[
        str | None, typer.Option(metavar="0,4,8", help="First section of each stage; default: balanced.")
    ] = None,
    run_ahead: Annotated[
        int | None, typer.Option(metavar="K", help="Forwards in flight beyond P - stage; default: as planned.")
    ] = None,
    recompute: Annotated[
        str | None,
        typer.Option(metavar="MASK", help="Stages that recompute: 1,1,0, or all, or none; default: as planned."),
    ] = None,
    gpus_per_vm: Annotated[int, typer.Option(min=1, help="GPUs of each VM.")] = 1,
    device_memory_gb: DeviceMemoryGb = None,
    gantt: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw a chart into .svg or .html.")] = None,
    as_json: AsJson = False,
) -> None:
    """Simulate a mini-batch of one plan: its time, bubbles and stash, with a chart of each stage's ops."""
    if gantt is not None and gantt.suffix not in WRITERS:
        raise UserError(f"--gantt {gantt}: the chart is drawn as {' or '.join(WRITERS)}")
    from varuna_planner.schedule.policies import parse_policy  # numba: the other commands start faster without it
    from varuna_planner.what_if import SimulationRequest, simulate_plan

    try:
        question = SimulationRequest(
            profile=read_profile(profile),
            p=p,
            d=d,
            micro_batch=micro_batch,
            global_batch=global_batch,
            policy=parse_policy(policy),
            network_scale=network_scale,
            jitter_us=jitter * 1e6,
            compute_noise=compute_noise,
            seed=seed,
            stage_starts=None if stages is None else _numbers("--stages", stages),
            run_ahead=run_ahead,
            recompute=None if recompute is None else _mask(recompute, p),
            gpus_per_vm=gpus_per_vm,
            device_memory_bytes=device_memory_bytes(device_memory_gb),
        )
        outcome = simulate_plan(question)
    except ValueError as error:
        raise UserError(str(error)) from None
    chart = make_chart(question, outcome)
    if gantt is not None:
        write_text(gantt, WRITERS[gantt.suffix](chart), "chart")
    page = Text() if as_json else _page(question, outcome, chart, make_console().width)
    print_document(document(outcome), page, as_json)


def document(outcome: SimulatedPlan) -> dict[str, Any]:
    """What --json prints."""
    return {
        "minibatch_s": outcome.minibatch_us / 1e6,
        "bubble_fraction": outcome.bubble_fraction,
        "stash_max": outcome.stash_max,
        "lower_bound_s": outcome.lower_bound_us / 1e6,
        "stages": list(outcome.stage_starts),
        "run_ahead": outcome.run_ahead,
        "recompute": list(outcome.recompute),
    }


def make_chart(question: SimulationRequest, outcome: SimulatedPlan) -> Chart:
    """The simulated run of one replica; what follows its last backwards, too."""
    from varuna_planner.schedule.policies import Op

    run, finish = outcome.simulation, outcome.pipeline.finish_us
    letters = {op.value: op.name for op in Op}
    rows = []
    for stage, count in enumerate(run.counts):
        done = dict.fromkeys(letters, 0)
        row = []
        for code, begin, end in zip(
            run.ops[stage, :count].tolist(),
            run.spans_us[0, stage, :count].tolist(),
            run.spans_us[1, stage, :count].tolist(),
            strict=True,
        ):
            row.append(Bar(letters[code], done[code], begin, end))
            done[code] += 1
        if finish[stage] > 0:
            end = float(run.backward_end_us[stage])
            row.append(Bar("A", None, end, end + float(finish[stage])))
        rows.append(tuple(row))
    disturbed = question.jitter_us > 0 or question.compute_noise > 0
    return Chart(
        title=f"{question.policy.value}, {shape(question.p, question.d)}, micro-batch {question.micro_batch}: "
        f"{duration(outcome.minibatch_us)} per mini-batch",
        subtitle=f"{outcome.pipeline.micro_batches} micro-batches per replica, {outcome.bubble_fraction:.1%} bubbles, "
        f"at most {outcome.stash_max} in flight" + (", one of several random runs" if disturbed else ""),
        stages=tuple(rows),
        lower_bound_us=outcome.lower_bound_us,
    )


def _page(question: SimulationRequest, outcome: SimulatedPlan, chart: Chart, width: int) -> RenderableType:
    table = Table(
        "P×D", "M", "POLICY", "K", "MINI-BATCH", "LOWER BOUND", "BUBBLES", "STASH", "EX/S", box=None, pad_edge=False
    )
    table.add_row(
        shape(question.p, question.d),
        str(question.micro_batch),
        question.policy.value,
        str(outcome.run_ahead),
        duration(outcome.minibatch_us),
        duration(outcome.lower_bound_us),
        f"{outcome.bubble_fraction:.1%}",
        str(outcome.stash_max),
        f"{question.global_batch / outcome.minibatch_us * 1e6:.4g}" if outcome.minibatch_us > 0 else "-",
    )
    notes = [Text(NO_LIMIT, style="dim")] if question.device_memory_bytes is None else []
    return Group(table, *notes, "", as_text(chart, width))


def duration(us: float) -> str:
    """For people: 1.234 s."""
    for unit_us, unit in ((1e6, "s"), (1e3, "ms")):
        if us >= unit_us:
            return f"{us / unit_us:.4g} {unit}"
    return f"{us:.4g} µs"


def _numbers(option: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UserError(f"{option} {text}: give section numbers joined by commas, such as 0,4,8") from None


def _mask(text: str, p: int) -> tuple[bool, ...]:
    if text in ("all", "none"):
        return (text == "all",) * max(0, p)
    parts = text.split(",")
    if not set(parts) <= {"0", "1"}:
        raise UserError(
            f"--recompute {text}: give all, none, or a 1 or 0 for each stage joined by commas, such as 1,1,0"
        )
    return tuple(part == "1" for part in parts)
