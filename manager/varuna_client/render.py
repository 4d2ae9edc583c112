"""The manager's documents as text for people: rich tables and lines. Pure: documents in, renderables out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from varuna_client.documents import Event, Generation, Job, Metric, Timestamp, Vm

STATE_STYLES = {
    "running": "green",
    "ready": "green",
    "succeeded": "green",
    "failed": "red",
    "lost": "red",
    "suspect": "yellow",
    "draining": "yellow",
    "cancelling": "yellow",
    "cancelled": "yellow",
    "gone": "dim",
    "ended": "dim",
    "launching": "yellow",
    "stopping": "yellow",
}
STATE_SIGNS = {
    "running": "▶",
    "ready": "●",
    "succeeded": "✔",
    "failed": "✘",
    "lost": "✘",
    "suspect": "?",
    "draining": "◐",
    "cancelling": "◐",
    "cancelled": "■",
    "gone": "○",
    "ended": "○",
    "queued": "…",
    "requested": "…",
    "launching": "…",
    "stopping": "◐",
}
"""A sign beside each state's word, so that none is told by colour alone."""
SPARKS = "▁▂▃▄▅▆▇█"


def state(name: str) -> Text:
    return Text(f"{STATE_SIGNS.get(name, '·')} {name}", style=STATE_STYLES.get(name, ""))


def shape(p: int | None, d: int | None) -> str:
    """P×D; a dash when there is no plan."""
    return f"{p}×{d}" if p and d else "-"


def number(value: float | None, digits: int = 4) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def size(count: int) -> str:
    """Bytes for people: `48.0 MiB`; zero means that nobody said."""
    if not count:
        return "-"
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.1f} {unit}" if unit != "B" else f"{count} B"


def clock(at: Timestamp | None) -> str:
    """Time of day, here, of a moment."""
    if not at:
        return "-"
    return datetime.fromisoformat(at).astimezone().strftime("%H:%M:%S")


def sparkline(series: Sequence[float | None], width: int = 40) -> str:
    """The course of a series in one line of text, its newest value last; what is no number is left out."""
    values = [value for value in series if value is not None]
    if not values:
        return ""
    count = min(width, len(values))
    picked = [values[(index + 1) * len(values) // count - 1] for index in range(count)]
    low, high = min(picked), max(picked)
    span = (high - low) or 1.0
    return "".join(SPARKS[int((value - low) / span * (len(SPARKS) - 1))] for value in picked)


def jobs_table(jobs: Iterable[Job]) -> Table:
    table = Table("JOB", "STATE", "P×D", "M", "GENERATION", "STEP", "LOSS", "ID", box=None, pad_edge=False)
    for job in jobs:
        plan = job.get("plan")
        table.add_row(
            job["name"],
            state(job["state"]),
            shape(plan and plan["p"], plan and plan["d"]),
            str(plan["micro_batch"] if plan else "-"),
            str(job["generation"] or "-"),
            str(job["step"]),
            number(job["loss"]),
            job["id"],
        )
    return table


def vms_table(vms: Iterable[Vm]) -> Table:
    table = Table("VM", "STATE", "GPUS", "MEMORY/GPU", "HOST", "HEARD", "PROVIDER", "WHY", box=None, pad_edge=False)
    for vm in vms:
        heard = vm.get("last_heard_s")
        table.add_row(
            vm["id"],
            state(vm["state"]),
            str(vm["gpus"]),
            size(vm.get("device_memory_bytes") or 0),
            vm.get("host") or "-",
            "-" if heard is None else f"{heard:.1f} s ago",
            vm["provider"],
            _why(vm),
        )
    return table


def _why(vm: Vm) -> str:
    """Why the VM is in its state, and what is held against it."""
    until = vm.get("quarantined_until")
    if until:
        return f"quarantined as slow until {clock(until)}"
    if vm.get("slow_ratio"):
        return f"slow: {vm.get('slow_reason')}"
    return vm.get("reason") or ""


def generations_table(generations: Iterable[Generation]) -> Table:
    table = Table("GEN", "KIND", "STATE", "P×D", "M", "STEPS", "NO PROGRESS", "REDONE", "WHY", box=None, pad_edge=False)
    for generation in generations:
        resumed, last = generation.get("resumed_step"), generation.get("last_step")
        stalled, redone = generation.get("seconds_without_progress"), generation.get("steps_redone")
        table.add_row(
            str(generation["number"]),
            generation["kind"],
            state(generation["state"]),
            shape(generation["p"], generation["d"]),
            str(generation["micro_batch"]),
            "-" if resumed is None or last is None else f"{resumed + 1}-{last}",
            "-" if stalled is None else f"{stalled:.1f} s",
            "-" if redone is None else str(redone),
            generation["reason"],
        )
    return table


def job_page(
    job: Job, generations: Sequence[Generation], metrics: Sequence[Metric], events: Sequence[Event]
) -> RenderableType:
    """All that `varuna show` says: the state, the error if there is one, the course of training, how it came about."""
    spec = job["spec"]
    head = Table.grid(padding=(0, 2))
    head.add_row("job", Text(f"{job['name']}  ({job['id']})", style="bold"))
    head.add_row("state", state(job["state"]))
    head.add_row("run", f"{spec.get('run')}  in {spec.get('workdir')}")
    head.add_row("global batch", f"{spec.get('global_batch')} examples")
    head.add_row("step", f"{job['step']}   loss {number(job['loss'])}")
    if metrics:
        head.add_row("loss", sparkline([metric["loss"] for metric in metrics]))
        head.add_row("step time", f"{metrics[-1]['step_s']:.3f} s{_predicted(generations)}")
    parts: list[RenderableType] = [head]
    if job["error"]:
        parts += ["", Text("error", style="bold red"), Padding(Text(job["error"].rstrip()), (0, 0, 0, 2))]
    if generations:
        parts += ["", generations_table(generations)]
    if events:
        parts += ["", *(event_line(event) for event in events[-12:])]
    return Group(*parts)


def event_line(event: Event) -> Text:
    """One event as one line: when, what kind, and the reason in words."""
    generation = event.get("generation")
    where = f"g{generation}" if generation else ""
    return Text.assemble(
        (clock(event["at"]), "dim"), "  ", (f"{event['kind']:<24}", "cyan"), f" {where:<4} ", event["message"]
    )


def _predicted(generations: Sequence[Generation]) -> str:
    plan = generations[-1].get("plan") if generations else None
    predicted = plan.get("predicted_minibatch_s") if plan else None
    return f"  (predicted {predicted:.3f} s)" if predicted else ""
