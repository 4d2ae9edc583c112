"""Processes that are started ahead for a job's next generation, while the present one trains.

They run the script up to `Varuna()` and wait there, so that neither their start nor the script's beginning is in the
pause of the morph. Then the state may go to them (`domain.sending_ahead`).

Nothing depends on either: a generation whose newcomers are not there starts new processes, as after a loss. So what is
wanted is decided at every look, and is in no row.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from varuna_proto.plan import Device, Plan


@dataclass(frozen=True, kw_only=True)
class WantedNewcomers:
    """The generation for which processes are started ahead, as it is expected."""

    number: int
    plan: Plan
    placement: tuple[Device, ...]
    devices: frozenset[Device]
    """Of the placement: where processes are started. On the others the present ones go on."""
    sends_state: bool = False
    """Whether the present generation sends the state ahead."""

    @cached_property
    def request(self) -> str:
        """The same for the same wish, also from a manager that has just started."""
        plan = replace(self.plan, predicted_minibatch_s=0.0, examples_per_s=0.0, memory_bytes=())
        text = json.dumps([self.number, plan.to_document(), self.placement, sorted(self.devices)])
        return hashlib.sha256(text.encode()).hexdigest()[:32]


@dataclass(frozen=True, kw_only=True)
class NewcomersView:
    """What is wanted, and what agents report of it."""

    wanted: WantedNewcomers
    since: float
    """When processes of the generation were first wanted."""
    at_door: frozenset[Device] = frozenset()
    """Where one waits in `Varuna()`."""
    faults: Mapping[Device, str] = field(default_factory=dict)
    """Where there will be none, and why."""
    sending_since: float | None = None
    """When the present generation was first to send the state ahead; None: it is not to."""
    sent_steps: Mapping[int, int] = field(default_factory=dict)
    """By its ranks that have sent all that they had to: the step of that state."""


class NewcomersStand(NamedTuple):
    """How far the processes of a generation are that is to start."""

    is_awaited: bool
    obstacle: str = ""
    """Why it starts without them; empty: they are there, or are awaited."""


def judge_newcomers(
    now: float, wanted: WantedNewcomers, view: NewcomersView | None, obstacle: str, wait_s: float
) -> NewcomersStand:
    """Whether a planned morph waits for the processes that are started ahead for it.

    Args:
        view: what has been started; None: nothing.
        obstacle: why the job's processes cannot be started ahead; empty: they can.
        wait_s: the longest wait, from the first wish for the generation on; 0: none are started ahead.
    """
    if obstacle or wait_s <= 0:
        return NewcomersStand(False, obstacle if wait_s > 0 else "")
    if view is None:
        return NewcomersStand(True)
    if gave_up := explain_giving_up(now, view, wait_s):
        return NewcomersStand(False, gave_up)
    if view.wanted.request == wanted.request:
        return NewcomersStand(not view.at_door.issuperset(wanted.devices))
    if now - view.since >= wait_s:
        return NewcomersStand(False, f"what is planned has changed for {wait_s:g} s")
    return NewcomersStand(True)


def explain_giving_up(now: float, view: NewcomersView, wait_s: float) -> str:
    """Why the newcomers are not waited for any longer; empty: they are."""
    for rank, device in enumerate(view.wanted.placement):
        if device in view.faults:
            return f"the process for rank {rank} on VM {device.vm_id}: {view.faults[device]}"
    if now - view.since < wait_s:
        return ""
    wanted = [device for device in view.wanted.placement if device in view.wanted.devices]
    missing = [device.vm_id for device in wanted if device not in view.at_door]
    if not missing:
        return ""
    return (
        f"{len(missing)} of {len(wanted)} processes had not reached Varuna() after {wait_s:g} s (first: "
        f"on VM {missing[0]})"
    )
