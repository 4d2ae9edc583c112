"""Views of a watched job: events above a bar with step, loss, rate and time left in a terminal, else lines."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from varuna_client.commands.options import print_line
from varuna_client.text import render
from varuna_proto.rest import EventDocument, JobDocument, ProgressDocument
from varuna_proto.wording import count_of

_LINE_EACH_S = 10.0
"""Between two lines of progress in plain output."""
_IDLE_S = 5.0
"""After this long without a step, the footer shows the last event."""


class WatchedJob:
    """The state of a watched job."""

    def __init__(self, job: JobDocument) -> None:
        self.job = job
        self.total = render.total_steps(job["spec"])
        self.progress: ProgressDocument | None = None
        self.last_event: EventDocument | None = None
        self.stepped_at: float | None = None

    def add_progress(self, progress: ProgressDocument, now: float) -> None:
        self.progress, self.stepped_at = progress, now

    @property
    def step(self) -> int:
        return max(self.job["step"], self.progress["step"] if self.progress else 0)

    def left_s(self) -> float | None:
        """Seconds left at the step time of the newest steps; None: not known."""
        if self.total is None or self.progress is None:
            return None
        return max(self.total[0] - self.step, 0) * self.progress["step_s"]

    def render_figures(self) -> str:
        """Step, loss, rate, time left."""
        of = f"/{self.total[0]}" if self.total else ""
        parts = [f"step {self.step}{of}"]
        if self.progress is not None:
            loss = self.progress["loss"]
            parts.append(f"loss {'not finite' if loss is None else render.number(loss)}")
            parts.append(f"{render.rate(self.progress['examples_per_s'])} ex/s")
            left = self.left_s()
            step_s = self.progress["step_s"]
            parts.append(f"{render.number(step_s, 3)} s/step" if left is None else f"{render.duration(left)} left")
        return "  ".join(parts)

    def render_footer(self, now: float) -> RenderableType:
        """The lines at the foot of the terminal."""
        job = self.job
        plan, what = job.get("plan"), []
        if plan and job["state"] == "running":
            what += [render.shape(plan["p"], plan["d"]), f"micro-batch {plan['micro_batch']}"]
        if job["generation"]:
            what.append(f"generation {job['generation']}")
        gpus = job.get("gpus") or 0
        what.append(count_of(gpus, "GPU"))
        head = Text.assemble((job["name"], "bold"), "  ", render.state(job["state"]), "  ", ("  ".join(what), "dim"))
        lines: list[RenderableType] = [_cut(head)]
        if self.total:
            row = Table.grid(padding=(0, 2), expand=True)
            row.add_column(ratio=1)
            row.add_column(no_wrap=True)
            bar = ProgressBar(total=self.total[0], completed=min(self.step, self.total[0]))
            row.add_row(bar, self.render_figures())
            lines.append(row)
        else:
            lines.append(Text(self.render_figures()))
        is_idle = self.stepped_at is None or now - self.stepped_at > _IDLE_S
        if is_idle and self.last_event is not None and job["state"] != "succeeded":
            lines.append(_cut(Text(f"… {self.last_event['message']}", style="dim")))
        return Group("", *lines)


def _cut(text: Text) -> Text:
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


class LiveWatch:
    """Shows a watched job in a terminal."""

    def __init__(self, watched: WatchedJob, console: Console) -> None:
        self._watched = watched
        self._live = Live(
            console=console,
            refresh_per_second=4,
            transient=True,
            get_renderable=lambda: watched.render_footer(time.monotonic()),
        )

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._live.stop()

    def show_event(self, event: EventDocument) -> None:
        self._live.console.print(render.event_row(event))

    def show_progress(self, progress: ProgressDocument) -> None:
        """The footer shows it."""


class LineWatch:
    """Prints a watched job to a pipe or file, or as JSON."""

    def __init__(self, watched: WatchedJob, *, as_json: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._watched = watched
        self._as_json = as_json
        self._clock = clock
        self._last_line: tuple[int, float] | None = None
        """Generation and time of the last line of progress."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        pass

    def show_event(self, event: EventDocument) -> None:
        print_line(event, render.event_line(event), self._as_json)

    def show_progress(self, progress: ProgressDocument) -> None:
        now = self._clock()
        last = self._last_line
        is_due = last is None or last[0] != progress["generation"] or now - last[1] >= _LINE_EACH_S
        if self._as_json or is_due:
            self._last_line = (progress["generation"], now)
            line = f"{render.clock(progress['at'])} {self._watched.render_figures()}  g{progress['generation']}"
            print_line(progress, Text(line), self._as_json)


def render_summary(
    job: JobDocument, goodput: float | None, generations: Iterable[str], whole: render.WholeRate | None = None
) -> Text:
    """One line about a finished job. `whole`: its rate over all its steps."""
    kinds = list(generations)
    took = None
    if job["finished_at"] and job["created_at"]:
        took = render.seconds_between(job["created_at"], job["finished_at"])
    parts = [f"step {job['step']}, loss {render.job_loss(job)}"]
    if whole is not None:
        parts.append(f"{render.rate(whole.examples_per_s)} ex/s over all {count_of(whole.steps, 'step')}")
    if took is not None:
        parts.append(f"in {render.duration(took)}")
    morphs = max(kinds.count("training") - 1, 0)
    parts.append(count_of(morphs, "morph"))
    if goodput is not None:
        parts.append(f"goodput {goodput:.0%}")
    note = ""
    if job["state"] == "succeeded" and (job.get("reason") or "").startswith("succeeded, "):
        note = f"\n  {job['reason']}"
    return Text.assemble(render.job_state(job), " ", (job["name"], "bold"), f": {', '.join(parts)}", (note, "yellow"))
