"""`varuna top`: jobs that are not over and VMs on one screen, redrawn each second."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from varuna_client.commands.options import AsJson, ManagerUrl, connect, make_console, print_document
from varuna_client.errors import RefusedError, UnreachableError
from varuna_client.rest.client import Client
from varuna_client.text import render
from varuna_proto.rest import JobDocument
from varuna_proto.rest_fleet import VmDocument

_EACH_S = 1.0
_LIVE_STATES = ("queued", "running", "cancelling")
_FRAME_ROWS = 9
"""Rows of the screen that list no job and no VM."""
_FEWEST_ROWS = 3


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What the screen shows."""

    url: str
    jobs: Sequence[JobDocument]
    vms: Sequence[VmDocument]

    def to_document(self) -> dict[str, Any]:
        """The output of --json."""
        return {"jobs": list(self.jobs), "vms": list(self.vms)}

    def render(self, now: datetime, *, height: int | None = None, trouble: str = "") -> RenderableType:
        """The screen. `height`: its rows; None: as many as there are. `trouble`: why it is not up to date."""
        jobs, vms = len(self.jobs), len(self.vms)
        if height is not None:
            free = max(height - _FRAME_ROWS, 2 * _FEWEST_ROWS)
            jobs = min(jobs, max(free - vms, free // 2))
            vms = min(vms, free - jobs)
        parts: list[RenderableType] = [*self._render_head(now, trouble), ""]
        if self.jobs:
            parts.append(render.jobs_table(self.jobs[:jobs], now))
        else:
            parts.append(Text("no job runs or waits: varuna submit JOB.yaml"))
        parts += [*_render_rest(len(self.jobs) - jobs, "varuna ps"), ""]
        parts.append(render.vms_table(self.vms[:vms]) if self.vms else Text("no VMs: start the manager with --vms N"))
        return Group(*parts, *_render_rest(len(self.vms) - vms, "varuna vms"))

    def _render_head(self, now: datetime, trouble: str) -> Iterator[Text]:
        running = [job for job in self.jobs if job["state"] == "running"]
        ready = [vm for vm in self.vms if vm["state"] == "ready"]
        gpus, busy = sum(vm["gpus"] for vm in ready), sum(job.get("gpus") or 0 for job in running)
        total = sum(job.get("examples_per_s") or 0.0 for job in running)
        figures = (
            f"{len(running)} of {len(self.jobs)} jobs running",
            f"{len(ready)} of {len(self.vms)} VMs ready",
            f"{busy} of {gpus} GPUs busy",
            f"{render.rate(total)} examples/s",
        )
        yield Text.assemble((self.url, "bold"), f"  {render.clock(now.isoformat())}")
        yield Text("  ".join(figures), no_wrap=True, overflow="ellipsis")
        if trouble:
            yield Text(trouble, style="red", no_wrap=True, overflow="ellipsis")


def top(manager_url: ManagerUrl = None, as_json: AsJson = False) -> None:
    """Show jobs that are not over and VMs, redrawn each second; q or Ctrl-C ends it. Without a terminal: once."""
    with connect(manager_url) as client:
        console = make_console()
        snapshot = _take_snapshot(client)
        if as_json or not console.is_terminal:
            print_document(snapshot.to_document(), snapshot.render(datetime.now(UTC)), as_json)
            return
        with contextlib.suppress(KeyboardInterrupt), _read_keys(), Live(console=console, screen=True) as live:
            trouble = ""
            while True:
                live.update(snapshot.render(datetime.now(UTC), height=console.height, trouble=trouble), refresh=True)
                if _is_quit(_EACH_S):
                    return
                try:
                    snapshot, trouble = _take_snapshot(client), ""
                except (UnreachableError, RefusedError) as error:  # it may be restarting
                    trouble = str(error)


def _take_snapshot(client: Client) -> Snapshot:
    return Snapshot(url=client.url, jobs=client.jobs(state=_LIVE_STATES), vms=client.vms())


def _render_rest(count: int, command: str) -> Iterator[Text]:
    if count > 0:
        yield Text(f"and {count} more: {command}", style="dim")


@contextlib.contextmanager
def _read_keys() -> Iterator[None]:
    """Let standard input give each key at once and not show it, if it is a terminal."""
    if not sys.stdin.isatty():
        yield
        return
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _is_quit(wait_s: float) -> bool:
    """Wait for a key or `wait_s`; whether the key ends the command."""
    if not sys.stdin.isatty():
        time.sleep(wait_s)
        return False
    if not select.select([sys.stdin], [], [], wait_s)[0]:
        return False
    keys = os.read(sys.stdin.fileno(), 64)
    return not keys or b"q" in keys.lower()  # nothing: the terminal is gone
