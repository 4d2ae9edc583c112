"""The demo's live view: one screen that redraws itself on a terminal, plain lines elsewhere."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from varuna_client.demo.scenario import DemoSnapshot
from varuna_client.text import render

RECENT_EVENTS = 8
STEPS_PER_LINE = 10
UNSHOWN = frozenset({"checkpoint", "decision"})
"""Kinds of events that are too frequent for a demo; `varuna events` has them."""


class View(AbstractContextManager["View"], Protocol):
    """Shows what the demo does."""

    def show_action(self, line: str) -> None:
        """Show what the demo does or waits for."""

    def show_snapshot(self, observed: DemoSnapshot) -> None:
        """Show the manager's current state."""


def make_view(console: Console, steps: int) -> View:
    return LiveView(console, steps) if console.is_terminal else PlainView(console, steps)


class PlainView:
    """Lines: each event, every tenth step, each action of the demo."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._steps = steps
        self._event = 0
        self._step = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        pass

    def show_action(self, line: str) -> None:
        self._console.print(f"== {line}", soft_wrap=True)

    def show_snapshot(self, observed: DemoSnapshot) -> None:
        for event in observed.events:
            if event["id"] > self._event and event["kind"] not in UNSHOWN:
                self._event = event["id"]
                self._console.print(render.event_line(event), soft_wrap=True)
        for metric in observed.metrics:
            if metric["step"] > self._step and metric["step"] % STEPS_PER_LINE == 0:
                self._step = metric["step"]
                self._console.print(
                    f"{render.clock(metric['at'])}  step {metric['step']}/{self._steps}  "
                    f"loss {render.number(metric['loss'])}  {metric['step_s']:.2f} s/step  "
                    f"generation {metric['generation']}",
                    soft_wrap=True,
                )


class LiveView:
    """Fleet, job and events on one screen."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._steps = steps
        self._line = ""
        self._observed: DemoSnapshot | None = None
        self._live = Live(console=console, refresh_per_second=4, get_renderable=self._screen, transient=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._live.stop()

    def show_action(self, line: str) -> None:
        self._line = line
        self._console.print(f"== {line}", soft_wrap=True)  # stays above the screen

    def show_snapshot(self, observed: DemoSnapshot) -> None:
        self._observed = observed

    def _screen(self) -> RenderableType:
        now = Text.assemble(("now  ", "bold"), self._line)
        if self._observed is None:
            return Panel(now, title="varuna demo")
        return Group(
            Panel(now, title="varuna demo"),
            Panel(fleet(self._observed), title="fleet", title_align="left"),
            Panel(training(self._observed, self._steps), title="training", title_align="left"),
            Panel(recent_events(self._observed), title="events", title_align="left"),
        )


def fleet(observed: DemoSnapshot) -> Table:
    """The VMs, with the ranks that each holds now."""
    placement = observed.training["placement"] if observed.training else []
    table = Table("VM", "STATE", "RANKS", box=None, pad_edge=False)
    for vm in observed.vms:
        ranks = [str(place["rank"]) for place in placement if place["vm_id"] == vm["id"]]
        table.add_row(vm["id"], render.state(vm["state"]), ", ".join(ranks) or "-")
    return table


def training(observed: DemoSnapshot, steps: int) -> RenderableType:
    """Generation and shape, step, loss, and the time of a step next to its prediction."""
    generation, grid = observed.training, Table.grid(padding=(0, 2))
    grid.add_row("job", render.state(observed.job["state"]))
    if generation is None:
        number = observed.job["generation"]
        grid.add_row("generation", f"{number} is being calibrated or replaced" if number else "none yet")
    else:
        plan = generation["plan"]
        shape = render.shape(generation["p"], generation["d"])
        grid.add_row("generation", f"{generation['number']}:  P×D = {shape}, micro-batch {generation['micro_batch']}")
        grid.add_row("why", generation["reason"])
        times = [metric["step_s"] for metric in observed.metrics if metric["generation"] == generation["number"]]
        if times:
            grid.add_row(
                "step time", f"{times[-1]:.2f} s, predicted {render.number(plan.get('predicted_minibatch_s'), 2)} s"
            )
    step = observed.metrics[-1]["step"] if observed.metrics else 0
    grid.add_row("step", Group(Text(f"{step} of {steps}"), ProgressBar(total=steps, completed=step, width=60)))
    losses = [metric["loss"] for metric in observed.metrics]
    grid.add_row("loss", f"{render.sparkline(losses)}  {render.number(losses[-1] if losses else None)}")
    return grid


def recent_events(observed: DemoSnapshot) -> RenderableType:
    shown = [event for event in observed.events if event["kind"] not in UNSHOWN]
    lines = [render.event_line(event) for event in shown[-RECENT_EVENTS:]]
    for line in lines:
        line.no_wrap, line.overflow = True, "ellipsis"
    return Group(*lines)
