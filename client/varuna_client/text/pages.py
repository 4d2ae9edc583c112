"""What `varuna show` prints about one job: its state, its progress, and the reasons for both."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from varuna_client.text.render import (
    WholeRate,
    ago,
    duration,
    event_row,
    job_loss,
    job_state,
    number,
    rate,
    shape,
    size,
    sparkline,
    state,
    table,
    total_steps,
    whole_rate,
)
from varuna_proto.rest import (
    END_STATES,
    CandidateDocument,
    CheckpointDocument,
    EventDocument,
    GenerationDocument,
    JobCostDocument,
    JobDocument,
    JobTimeDocument,
    MetricBucketsDocument,
    PlanRecordDocument,
    StepMetricsDocument,
)
from varuna_proto.wording import count_of

CANDIDATES_SHOWN = 8
EVENTS_SHOWN = 10
_TOLD_SHARE = 0.02
"""Less of a step's time than this between steps is not worth a word."""
_BAR_COLUMNS = 24
"""The width in columns of a bar for 100 %."""


@dataclass(frozen=True, kw_only=True)
class JobParts:
    """All that is known about a job; what the manager does not report is None or empty."""

    job: JobDocument
    generations: Sequence[GenerationDocument] = ()
    plan: PlanRecordDocument | None = None
    time: JobTimeDocument | None = None
    cost: JobCostDocument | None = None
    metrics: Sequence[StepMetricsDocument] = ()
    """Of the newest steps."""
    course: MetricBucketsDocument | None = None
    """Of all steps."""
    checkpoints: Sequence[CheckpointDocument] = ()
    events: Sequence[EventDocument] = field(default=())

    def to_document(self) -> dict[str, Any]:
        """The output of --json."""
        return {
            **self.job,
            "generations": list(self.generations),
            "plan_record": self.plan,
            "time": self.time,
            "cost": self.cost,
            "metrics": list(self.metrics),
            "checkpoints": list(self.checkpoints),
            "events": list(self.events),
        }


def job_page(parts: JobParts, now: datetime) -> RenderableType:
    job = parts.job
    sections: list[RenderableType] = [_make_head(parts, now)]
    if job["error"]:
        sections += [_make_title("error", "bold red"), Padding(Text(job["error"].rstrip()), (0, 0, 0, 2))]
    if parts.generations:
        sections += [_make_title("generations"), generations_table(parts.generations)]
    if parts.plan is not None and parts.plan["candidates"]:
        sections += [_make_title(f"plan of generation {parts.plan['generation']}"), plan_section(parts.plan)]
    if parts.time is not None and parts.time["total_s"] > 0:
        sections += [_make_title("where the time went"), time_section(parts.time)]
    if parts.events:
        sections += [_make_title("newest events"), *(event_row(event) for event in parts.events[-EVENTS_SHOWN:])]
        sections.append(Text(f"all of them: varuna events {job['name']}", style="dim"))
    return Group(*sections)


def _make_title(text: str, style: str = "bold") -> RenderableType:
    return Group("", Text(text.upper(), style=style))


def _make_head(parts: JobParts, now: datetime) -> Table:
    job, spec = parts.job, parts.job["spec"]
    head = Table.grid(padding=(0, 2))
    head.add_column(style="dim", no_wrap=True)
    head.add_column(overflow="fold")
    head.add_row("job", Text(f"{job['name']}  ({job['id']})", style="bold"))
    since = f", submitted {ago(job['created_at'], now)}"
    head.add_row("state", Text.assemble(job_state(job), since))
    if job.get("reason"):
        head.add_row("why", Text(str(job["reason"])))
    head.add_row("run", Text(f"{spec.get('run')}  in {spec.get('workdir')}"))
    limits = spec.get("resources") or {}
    most = limits.get("max_gpus")
    wanted = f"{limits.get('min_gpus', 1)} to {most}" if most else f"{limits.get('min_gpus', 1)} or more"
    head.add_row("GPUs", f"{job.get('gpus') or 0} now, {wanted} wanted")
    plan = job.get("plan")
    if plan:
        head.add_row("shape", f"{_render_shape(plan['p'], plan['d'])}, micro-batch {plan['micro_batch']}")
        if types := _describe_gpu_types(plan):
            head.add_row("GPU types", types)
    total = total_steps(spec)
    steps = f"{job['step']} of {total[0]} ({total[1]})" if total else str(job["step"])
    begun = _find_first_resumed_step(parts.generations)
    steps += f", begun at step {begun} from a checkpoint" if begun else ""
    head.add_row("step", f"{steps}, global batch {spec.get('global_batch')}")
    series = parts.course["loss"]["mean"] if parts.course else ()
    head.add_row("loss", Text.assemble(job_loss(job), _describe_odd_steps(job), "  ", sparkline(series)))
    if job.get("step_s"):
        whole = whole_rate(parts.course) if job["state"] in END_STATES and parts.course else None
        head.add_row("rate", _render_rate(job, whole))
        head.add_row("step time", _render_step_time(job, parts.plan, whole))
    if parts.checkpoints:
        newest = parts.checkpoints[-1]
        head.add_row("checkpoint", f"step {newest['step']}, {size(newest['total_bytes'])}, {ago(newest['at'], now)}")
    if parts.cost is not None:
        head.add_row("cost", _render_cost(parts.cost))
    return head


def _describe_odd_steps(job: JobDocument) -> Text:
    """The mark next to the loss about steps whose loss or gradient was not finite; empty: there is none."""
    since, skipped = job.get("not_finite_from"), job.get("steps_skipped")
    parts = [] if since is None else [f"no finite loss or gradient since step {since}"]
    parts += [f"{count_of(skipped, 'step')} skipped"] if skipped else []
    style = "yellow" if since is None else "red"
    return Text(f"  {', '.join(parts)}", style=style) if parts else Text()


def _find_first_resumed_step(generations: Iterable[GenerationDocument]) -> int | None:
    """The step at which the job's first training generation began; None or 0: no step was there yet."""
    training = (one for one in sorted(generations, key=lambda one: one["number"]) if one["kind"] == "training")
    return next((one["resumed_step"] for one in training), None)


def _render_shape(p: int, d: int) -> str:
    stages = "1 stage" if p == 1 else f"{p} stages"
    return f"{shape(p, d)} ({stages} × {d} replica{'' if d == 1 else 's'})"


def _describe_gpu_types(plan: Mapping[str, Any]) -> str:
    if not plan.get("gpu_types"):  # of an earlier manager, or all are equal
        return ""
    from varuna_planner.search.layouts import describe_gpu_types  # other commands start without the planner
    from varuna_proto.plan import Plan

    return describe_gpu_types(Plan.from_document(plan))


def _render_rate(job: JobDocument, whole: WholeRate | None) -> str:
    """Over the newest steps; of a job that is over, first over all."""
    newest = f"{rate(job.get('examples_per_s'))} examples/s over {_render_newest_steps(job)}"
    if whole is None:
        return newest
    return f"{rate(whole.examples_per_s)} examples/s over all {count_of(whole.steps, 'step')}; {newest}"


def _render_newest_steps(job: JobDocument) -> str:
    """Which steps the document's rate and step time are of."""
    steps = job.get("rate_steps") or 0
    return f"the last {steps} steps" if steps > 1 else "the last step"


def _render_step_time(job: JobDocument, plan: PlanRecordDocument | None, whole: WholeRate | None) -> str:
    """The step time over the newest steps; of a job that is over, first over all."""
    newest = _render_newest_step_time(job, plan)
    if whole is None:
        return newest
    return (
        f"{number(whole.step_s, 3)} s over all {count_of(whole.steps, 'step')}; {_render_newest_steps(job)}: {newest}"
    )


def _render_newest_step_time(job: JobDocument, plan: PlanRecordDocument | None) -> str:
    """The measured step time, its part between steps, and the rest next to what was predicted."""
    step_s, between_s = job["step_s"] or 0.0, job.get("between_s") or 0.0
    between = f", {number(between_s, 3)} s of it between steps" if between_s >= _TOLD_SHARE * step_s else ""
    if plan is None or plan["actual_step_s"] is None:
        return f"{number(step_s, 3)} s{between}"
    off = f", {plan['error']:+.0%}" if plan.get("error") is not None else ""
    of_rest = " for the rest" if between else ""
    return f"{number(step_s, 3)} s{between} (predicted{of_rest} {number(plan['predicted_step_s'], 3)} s{off})"


def _render_cost(cost: JobCostDocument) -> str:
    hours = f"{cost['gpu_hours']:.2f} GPU-hours"
    if cost["cost"] is None:
        return f"{hours}; no prices known"
    now = "" if cost["cost_per_hour"] is None else f", {cost['cost_per_hour']:.2f} per hour now"
    missing = f"; {count_of(cost['vms_without_price'], 'VM')} without a price" if cost["vms_without_price"] else ""
    return f"{cost['cost']:.2f} for {hours}{now}{missing}"


def generations_table(generations: Iterable[GenerationDocument]) -> Table:
    right = ("M", "STEPS", "IDLE", "REDONE")
    made = table("GEN", "STATE", "P×D", *right, "WHY", right=right, fold=("WHY",))
    for generation in generations:
        resumed, last = generation.get("resumed_step"), generation.get("last_step")
        redone = generation.get("steps_redone")
        is_training = generation["kind"] == "training"
        made.add_row(
            str(generation["number"]),
            state(generation["state"]),
            shape(generation["p"], generation["d"]) if is_training else "profile",
            str(generation["micro_batch"]) if is_training else "-",
            "-" if resumed is None or last is None else f"{resumed + 1}-{last}",
            duration(generation.get("seconds_without_progress")),
            "-" if redone is None else str(redone),
            _render_generation_reasons(generation),
        )
    return made


def _render_generation_reasons(generation: GenerationDocument) -> Text:
    """Why the generation began, its phases, and why it ended."""
    text = Text(generation["reason"])
    origin = render_morph(generation, generation["plan"]["global_batch"])
    if origin:
        text.append(f"\n{origin}", style="dim")
    if why := generation.get("copies_reason"):
        text.append(f"\n{why}", style="dim")
    if copies := render_keepers(generation):
        text.append(f"\n{copies}", style="dim")
    for what, obstacle in _list_obstacles(generation):
        text.append(f"\nno {what} are kept: {obstacle}", style="yellow")
    phases = [f"{phase['name'].replace('_', ' ')} {duration(phase['seconds'])}" for phase in generation["phases"]]
    if phases:
        text.append(f"\n{', '.join(phases)}", style="dim")
    if generation.get("end_reason"):
        text.append(f"\nended: {generation['end_reason']}", style="dim")
    return text


def render_morph(generation: Mapping[str, Any], global_batch: int) -> str:
    """Whether the workers go on in place or are new, what is run again, and where their state comes from.

    `generation`: with fields of a GenerationDocument.
    """
    from varuna_planner.schedule.batching import count_micro_batches  # other commands start without the planner

    kind = generation.get("kind_of_morph")
    parts = [] if kind is None else ["in place" if kind == "reshape" else kind]
    if (redone := generation.get("micro_batches_redone")) is not None:
        count = count_micro_batches(global_batch, generation["micro_batch"])
        parts.append(f"{redone} of {count} micro-batches run again")
    if (given := generation.get("state_from")) is not None:
        sources = (
            (given["kept"], "of state kept in memory"),
            (given.get("peers", 0), "of state from memory"),
            (given.get("store", 0), "of state from a checkpoint"),
        )
        parts += [f"{size(count)} {text}" for count, text in sources if count]
    return ", ".join(parts)


def render_keepers(generation: Mapping[str, Any]) -> str:
    """Which VMs keep copies, as `stage (the VM that has it → the VM that keeps a copy)`; empty: none do.

    `generation`: with fields of a GenerationDocument.
    """
    vm_of = {place["rank"]: place["vm_id"] for place in generation.get("placement") or ()}
    keepers = () if generation.get("copies_obstacle") else generation.get("keepers") or ()
    if not vm_of:
        return f"{len(keepers)} stages have copies" if keepers else ""
    kept = [f"{stage} ({vm_of.get(stage)} → {vm_of.get(keeper)})" for stage, keeper in enumerate(keepers)]
    return f"copies of stages {', '.join(kept)}: {_render_copied_step(generation)}" if kept else ""


def _list_obstacles(generation: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Which copies the workers cannot keep, and why."""
    found = {
        "copies of states": generation.get("copies_obstacle"),
        "marks": generation.get("marks_obstacle"),
    }
    return [(what, obstacle) for what, obstacle in found.items() if obstacle]


def _render_copied_step(generation: Mapping[str, Any]) -> str:
    copied, last = generation.get("copied_step"), generation.get("last_step")
    if copied is None:
        return "none is whole yet"
    return f"whole at step {copied} of {last}" if generation["state"] == "running" else f"whole at step {copied}"


def plan_section(plan: PlanRecordDocument) -> RenderableType:
    """The candidates, and why those that were not chosen lost."""
    made = table("P×D", "M", "PREDICTED", "WHY", right=("M", "PREDICTED"), fold=("WHY",))
    for one in plan["candidates"][:CANDIDATES_SHOWN]:
        made.add_row(shape(one["p"], one["d"]), str(one["micro_batch"]), _render_prediction(one), one["reason"])
    more = len(plan["candidates"]) - CANDIDATES_SHOWN
    rest = [Text(f"and {more} more: --json", style="dim")] if more > 0 else []
    return Group(made, *rest)


def _render_prediction(one: CandidateDocument) -> str:
    if not one["fits"]:
        return "too large"
    return "-" if one["predicted_minibatch_s"] is None else f"{one['predicted_minibatch_s']:.3g} s"


def time_section(time: JobTimeDocument) -> RenderableType:
    made = table("CAUSE", "TIME", "SHARE", "", "WHAT", right=("TIME", "SHARE"), fold=("WHAT",))
    for one in time["causes"]:
        if one["seconds"] < 0.05:
            continue
        bar = Text(
            "█" * round(one["share"] * _BAR_COLUMNS) or "▏", style="green" if one["cause"] == "training" else "yellow"
        )
        cause = one["cause"].replace("_", " ").replace("vms", "VMs")
        made.add_row(cause, duration(one["seconds"]), f"{one['share']:.0%}", bar, one["text"])
    if not time["elapsed_s"]:
        return made  # it has not started yet
    useful, elapsed = duration(time["useful_s"]), duration(time["elapsed_s"])
    total = f"{useful} of {elapsed} since the first start passed in steps that count: goodput {time['goodput']:.0%}"
    return Group(made, Text(total, style="bold"))
