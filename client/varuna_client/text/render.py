"""The manager's documents as text for people: tables and lines. Pure: documents in, renderables out."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

from rich.table import Table
from rich.text import Text

from varuna_proto.rest import (
    EventDocument,
    JobDocument,
    JobSpecDocument,
    MetricBucketsDocument,
    StepMetricsDocument,
    Timestamp,
)
from varuna_proto.rest_fleet import VmDocument
from varuna_proto.wording import render_bytes

STATE_SIGNS = {
    "running": ("▶", "green"),
    "ready": ("●", "green"),
    "succeeded": ("✔", "green"),
    "failed": ("✘", "red"),
    "lost": ("✘", "red"),
    "suspect": ("?", "yellow"),
    "draining": ("◐", "yellow"),
    "cancelling": ("◐", "yellow"),
    "cancelled": ("■", "yellow"),
    "gone": ("○", "dim"),
    "ended": ("○", "dim"),
    "queued": ("…", ""),
    "requested": ("…", ""),
    "launching": ("…", "yellow"),
    "stopping": ("◐", "yellow"),
}
"""A symbol next to each state's word, so that colour is never the only distinction, and the style of both."""
SPARKS = "▁▂▃▄▅▆▇█"
_BAD = re.compile(r"_(failed|lost|rejected)$|^hang|worker_exited|loss_not_finite")
_GOOD = re.compile(r"_(succeeded|ready|released|well|measured)$|^first_step$")
_ODD = re.compile(r"notice|suspect|slow|cordoned|quarantined|draining|cancel|preempted|stopping|drift")
_STEPS = re.compile(r"(--(?:max|num|train|total)?[-_]?steps)[= ]([0-9]{1,12})\b")


def state(name: str) -> Text:
    sign, style = STATE_SIGNS.get(name, ("·", ""))
    return Text(f"{sign} {name}", style=style, no_wrap=True)


def job_state(job: JobDocument) -> Text:
    """Like `state`, but a success with steps that were not finite does not look like another."""
    is_odd = job.get("not_finite_from") is not None or job.get("steps_skipped")
    if job["state"] == "succeeded" and is_odd:
        return Text("! succeeded", style="yellow", no_wrap=True)
    return state(job["state"])


LoggedValues = Mapping[str, Mapping[int, float]]
"""What a script has logged: by name, and there by step."""


class WholeRate(NamedTuple):
    """Step time and rate over all steps of a job, each step counted once."""

    steps: int
    step_s: float
    examples_per_s: float


def whole_rate(course: MetricBucketsDocument) -> WholeRate | None:
    """`course`: all steps of the job. None: it has none."""
    times = [count * mean_s for count, mean_s in zip(course["count"], course["step_s"]["mean"], strict=True) if mean_s]
    rates = course["examples_per_s"]["mean"]
    parts = zip(course["count"], course["step_s"]["mean"], rates, strict=True)
    examples = sum(count * mean_s * rate for count, mean_s, rate in parts if mean_s and rate)
    steps, total_s = sum(course["count"]), sum(times)
    return WholeRate(steps, total_s / steps, examples / total_s) if total_s else None


def job_loss(job: JobDocument) -> Text:
    """The newest step's loss, red if it or the gradient is not finite."""
    is_odd = job.get("not_finite_from") is not None
    shown = "not finite" if is_odd and job["loss"] is None else number(job["loss"])
    return Text(shown, style="red" if is_odd else "")


def shape(p: int | None, d: int | None) -> str:
    """P×D, or a dash when there is no plan."""
    return f"{p}×{d}" if p and d else "-"


def number(value: float | None, digits: int = 4) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def rate(value: float | None) -> str:
    """About three digits: `19.3`, `0.142`, `4,120`."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def size(count: int) -> str:
    """Bytes for people: `48.0 MiB`; zero means unknown."""
    return render_bytes(count) if count else "-"


def clock(at: Timestamp | None) -> str:
    """The local time of day."""
    if not at:
        return "-"
    return datetime.fromisoformat(at).astimezone().strftime("%H:%M:%S")


def duration(seconds: float | None) -> str:
    """`0.4 s`, `58 s`, `3 m 20 s`, `2 h 05 m`, `3 d 4 h`."""
    if seconds is None:
        return "-"
    if seconds < 9.95:
        return f"{max(seconds, 0.0):.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} m {whole % 60:02d} s"
    if whole < 86_400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} m"
    return f"{whole // 86_400} d {whole % 86_400 // 3600} h"


def sparkline(series: Sequence[float | None], width: int = 40) -> str:
    """A series as a one-line chart, newest value last; values that are not numbers are left out."""
    values = [value for value in series if value is not None]
    if not values:
        return ""
    count = min(width, len(values))
    picked = [values[(index + 1) * len(values) // count - 1] for index in range(count)]
    low, high = min(picked), max(picked)
    span = (high - low) or 1.0
    return "".join(SPARKS[int((value - low) / span * (len(SPARKS) - 1))] for value in picked)


def total_steps(spec: JobSpecDocument) -> tuple[int, str] | None:
    """How many steps the job trains and where the number is from; None: only its script knows."""
    if spec.get("steps"):
        return int(spec["steps"]), "steps in the job file"
    found = _STEPS.findall(str(spec.get("run") or ""))
    if not found or int(found[-1][1]) == 0:
        return None
    option, count = found[-1]
    return int(count), f"{option} in run"


def table(*heads: str, right: Sequence[str] = (), fold: Sequence[str] = ()) -> Table:
    """A table without a frame. Only the columns in `fold` wrap their cells."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for head in heads:
        made.add_column(
            head,
            justify="right" if head in right else "left",
            no_wrap=head not in fold,
            overflow="fold" if head in fold else "ellipsis",
            ratio=1 if head in fold else None,
            min_width=8 if head in fold else None,
        )
    return made


def jobs_table(jobs: Iterable[JobDocument], now: datetime) -> Table:
    numbers = ("GPUS", "STEP", "LOSS", "EX/S")
    made = table("JOB", "STATE", "P×D", *numbers, "AGE", "ID", right=(*numbers, "AGE"), fold=("JOB",))
    for job in jobs:
        plan, total = job.get("plan"), total_steps(job["spec"])
        made.add_row(
            job["name"],
            job_state(job),
            shape(plan and plan["p"], plan and plan["d"]),
            str(job.get("gpus") or "-"),
            f"{job['step']}/{total[0]}" if total else str(job["step"]),
            job_loss(job),
            rate(job.get("examples_per_s")) if job["state"] == "running" else "-",
            ago(job["created_at"], now).removesuffix(" ago"),
            job["id"],
        )
    return made


def seconds_between(start: Timestamp, end: Timestamp) -> float:
    return (datetime.fromisoformat(end) - datetime.fromisoformat(start)).total_seconds()


def ago(at: Timestamp | None, now: datetime) -> str:
    """Rounded: `40 s ago`, `9 m ago`, `3 h ago`, `2 d ago`."""
    if not at:
        return "-"
    seconds = max((now - datetime.fromisoformat(at)).total_seconds(), 0.0)
    for unit_s, unit in ((86_400, "d"), (3600, "h"), (60, "m")):
        if seconds >= unit_s:
            return f"{seconds // unit_s:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def vms_table(vms: Iterable[VmDocument]) -> Table:
    right = ("GPUS", "MEM/GPU", "HELD", "$/H")
    vms = list(vms)
    has_prices = any(vm.get("price_per_hour") is not None for vm in vms)
    has_pools = any(vm.get("pool") for vm in vms)
    holds = any(vm.get("held_bytes") for vm in vms)
    shown = {"$/H": has_prices, "HELD": holds, "POOL": has_pools, "ZONE": any(vm.get("zone") for vm in vms)}
    left_out = {head for head, is_shown in shown.items() if not is_shown}
    heads = [
        head for head in ("VM", "POOL", "ZONE", "STATE", *right, "JOBS", "HEARD", "HOST", "WHY") if head not in left_out
    ]
    made = table(*heads, right=right, fold=("WHY",))
    for vm in vms:
        silent_s = vm.get("last_heard_s")
        heard = "-" if silent_s is None else f"{duration(silent_s)} ago"
        # An older manager gives no names.
        jobs = sorted({worker.get("job_name") or worker["job_id"] for worker in vm.get("workers") or ()})
        memory = size(vm.get("device_memory_bytes") or 0)
        cells: list[str | Text] = [vm["id"]]
        cells += [vm.get("pool") or "-"] if has_pools else []
        cells += [vm.get("zone") or "-"] if shown["ZONE"] else []
        cells += [state(vm["state"]), str(vm["gpus"]), memory]
        cells += [size(vm.get("held_bytes") or 0)] if holds else []
        cells += [rate(vm.get("price_per_hour"))] if has_prices else []
        made.add_row(*cells, ", ".join(jobs) or "-", heard, vm.get("host") or "-", _why(vm))
    return made


def _why(vm: VmDocument) -> str:
    """The reason for the VM's state."""
    until, notice = vm.get("quarantined_until"), vm.get("notice_deadline")
    if notice:
        return f"its provider takes it at {clock(notice)}"
    if vm.get("cordoned_at"):
        state = "" if vm["state"] == "ready" else f"; {vm.get('reason') or vm['state']}"
        return f"cordoned since {clock(vm['cordoned_at'])}: varuna uncordon {vm['id']}{state}"
    if until:
        return f"quarantined until {clock(until)}"
    if vm.get("slow_ratio"):
        return f"slow: {vm.get('slow_reason')}"
    return vm.get("reason") or ""


def steps_table(steps: Iterable[StepMetricsDocument], logged: LoggedValues) -> Table:
    right = ("STEP", "LOSS", "EX/S", "SECONDS", "BETWEEN", "GEN", *logged)
    made = table("STEP", "TIME", "LOSS", "EX/S", "SECONDS", "BETWEEN", "GEN", *logged, right=right)
    for step in steps:
        made.add_row(
            str(step["step"]),
            clock(step["at"]),
            number(step["loss"]),
            rate(_examples_per_s(step)),
            number(step["step_s"], 3),
            number(step["between_s"], 3),
            str(step["generation"]),
            *(_render_value(values.get(step["step"])) for values in logged.values()),
        )
    return made


def _render_value(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def steps_csv(steps: Iterable[StepMetricsDocument], logged: LoggedValues) -> str:
    """With a line of heads, all digits, and an empty field for what is not known."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    heads = ("step", "time", "loss", "examples_per_s", "step_s", "between_s", "examples", "generation")
    writer.writerow((*heads, *logged))
    for step in steps:
        times = (_examples_per_s(step), step["step_s"], step["between_s"])
        values = (of_name.get(step["step"]) for of_name in logged.values())
        writer.writerow((step["step"], step["at"], step["loss"], *times, step["examples"], step["generation"], *values))
    return out.getvalue()


def _examples_per_s(step: StepMetricsDocument) -> float | None:
    return step["examples"] / step["step_s"] if step["step_s"] > 0 else None


def event_line(event: EventDocument) -> Text:
    """One event as one line: when, what kind, and the reason in words."""
    return Text.assemble(*_event_head(event), " ", event["message"])


def event_row(event: EventDocument) -> Table:
    """Like event_line, but in a narrow terminal the reason wraps in its own column."""
    row = Table.grid(padding=(0, 1, 0, 0))
    row.add_column(no_wrap=True)
    row.add_column(ratio=1, overflow="fold")
    row.add_row(Text.assemble(*_event_head(event)), Text(event["message"]))
    return row


def _event_head(event: EventDocument) -> list[str | tuple[str, str]]:
    generation, kind = event.get("generation"), event["kind"]
    where = f"g{generation}" if generation else ""
    style = next(
        (style for rule, style in ((_BAD, "red"), (_GOOD, "green"), (_ODD, "yellow")) if rule.search(kind)), ""
    )
    if kind == "job_succeeded" and (event.get("data") or {}).get("note"):
        style = "yellow"  # it succeeded, but
    return [(clock(event["at"]), "dim"), " ", (f"{kind:<19}", style or "cyan"), f" {where:<3}"]
