"""Schedules for tests: they are printed, parsed, drawn, checked for deadlock, and made tick by tick without numba.

The text form has one line per stage: `F0 F1 R0 B0 R1 B1`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from varuna_planner.schedule.actions import Action, Schedule
from varuna_planner.schedule.policies import (
    WAIT,
    Op,
    Policy,
    RecomputeTiming,
    StageOrders,
    StageProgress,
    choose,
    choose_split,
)

__all__ = [
    "ActionTicks",
    "check_schedule",
    "draw_schedule",
    "format_schedule",
    "make_schedule",
    "make_timeline",
    "parse_schedule",
]


class ActionTicks(NamedTuple):
    """The ticks of `make_timeline` in which an action runs."""

    action: Action
    start: int
    end: int


_ACTION = re.compile(r"([FRBW])(0|[1-9][0-9]*)")


def format_schedule(schedule: Schedule) -> str:
    """One line per stage; `parse_schedule` reads it back."""
    return "\n".join(" ".join(map(str, stage)) for stage in schedule)


def parse_schedule(text: str) -> Schedule:
    """The schedule of a text such as `F0 B0`. Raises ValueError naming the stage and the word it cannot read."""
    return tuple(
        tuple(_parse_action(word, stage) for word in line.split()) for stage, line in enumerate(text.split("\n"))
    )


def _parse_action(word: str, stage: int) -> Action:
    match = _ACTION.fullmatch(word)
    if match is None:
        raise ValueError(f"stage {stage}: {word!r} is not an action: write F, R, B or W and a micro-batch, such as F0")
    return Action(Op[match[1]], int(match[2]))


def make_timeline(
    schedule: Schedule,
    forward: int = 1,
    recompute: int = 1,
    backward: int = 2,
    *,
    weight: int = 1,
    late_recompute: bool = False,
) -> list[list[ActionTicks]]:
    """When each action of a schedule runs, if each starts as soon as it can and messages take no time.

    `weight` is of W, `backward` of B alone. `late_recompute`: R waits for the gradient, as under Policy.ONE_F_ONE_B.
    Raises ValueError saying what each stuck stage waits for when the schedule cannot finish.
    """
    ticks = {Op.F: forward, Op.R: recompute, Op.B: backward, Op.W: weight}
    ends: dict[tuple[int, Action], int] = {}
    spans: list[list[ActionTicks]] = [[] for _ in schedule]
    work = list(range(len(schedule)))
    while work:
        stage = work.pop()
        while len(spans[stage]) < len(schedule[stage]):
            action = schedule[stage][len(spans[stage])]
            needs = _need(stage, action, len(schedule), late_recompute)
            if needs is not None and needs not in ends:
                break
            start = max(spans[stage][-1].end if spans[stage] else 0, ends[needs] if needs else 0)
            ends[stage, action] = start + ticks[action.op]
            spans[stage].append(ActionTicks(action, start, start + ticks[action.op]))
            work.extend(s for s in (stage - 1, stage + 1) if 0 <= s < len(schedule))
    stuck = [
        f"stage {stage} at {actions[len(spans[stage])]}"
        for stage, actions in enumerate(schedule)
        if len(spans[stage]) < len(actions)
    ]
    if stuck:
        raise ValueError("deadlock: " + ", ".join(stuck) + " wait for messages that never come")
    return spans


def _need(stage: int, action: Action, stages: int, late_recompute: bool) -> tuple[int, Action] | None:
    """The (stage, action) whose message an action waits for."""
    if action.op == Op.F and stage > 0:
        return stage - 1, action
    if stage < stages - 1 and (action.op == Op.B or (action.op == Op.R and late_recompute)):
        return stage + 1, Action(Op.B, action.micro_batch)
    return None


def check_schedule(schedule: Schedule) -> int:
    """The number of micro-batches of a schedule that is complete, in order and free of deadlock.

    Raises ValueError naming the stage and the action otherwise.
    """
    if not schedule:
        raise ValueError("the schedule has no stages")
    counts = {sum(action.op == Op.F for action in stage) for stage in schedule}
    if len(counts) != 1:
        raise ValueError(f"stages differ in their number of forwards: {sorted(counts)}")
    micro_batches = counts.pop()
    for stage, actions in enumerate(schedule):
        _check_stage(stage, actions, micro_batches)
    make_timeline(schedule)
    return micro_batches


def _check_stage(stage: int, actions: Sequence[Action], micro_batches: int) -> None:
    done = dict.fromkeys(Op, 0)
    for action in actions:
        op, micro_batch = action
        # R may be left out where activations are kept, so it only has to move forward.
        expected = max(done[Op.R], done[Op.B]) if op == Op.R else done[op]
        if micro_batch < expected or (op != Op.R and micro_batch > expected):
            raise ValueError(f"stage {stage}: {action} is out of order, {op.name}{expected} is next")
        if op != Op.F and micro_batch >= done[Op.F]:
            raise ValueError(f"stage {stage}: {action} comes before F{micro_batch}")
        if op == Op.W and micro_batch >= done[Op.B]:
            raise ValueError(f"stage {stage}: {action} comes before B{micro_batch}")
        done[op] = micro_batch + 1
    if done[Op.B] != micro_batches:
        raise ValueError(f"stage {stage}: {micro_batches} forwards but {done[Op.B]} backwards")
    if done[Op.W] not in (0, micro_batches):
        raise ValueError(f"stage {stage}: {micro_batches} backwards are split but only {done[Op.W]} have their W")


def draw_schedule(
    schedule: Schedule,
    forward: int = 1,
    recompute: int = 1,
    backward: int = 2,
    *,
    weight: int = 1,
    late_recompute: bool = False,
) -> str:
    """The schedule as a grid, one row per stage and one column per tick, as the paper's figure 4.

    An action stands in its first tick and dashes fill its others; dots are idle. Raises ValueError on deadlock.
    """
    spans = make_timeline(schedule, forward, recompute, backward, weight=weight, late_recompute=late_recompute)
    width = max((len(str(span.action)) for row in spans for span in row), default=1)
    length = max((row[-1].end for row in spans if row), default=0)
    lines = []
    for stage, row in enumerate(spans):
        cells = ["." * width] * length
        for span in row:
            cells[span.start : span.end] = ["-" * width] * (span.end - span.start)
            if span.end > span.start:
                cells[span.start] = str(span.action).ljust(width)
        lines.append(f"S{stage + 1:<3} " + " ".join(cells))
    return "\n".join(lines)


def make_schedule(
    policy: Policy,
    P: int,
    N: int,
    *,
    run_ahead: int = 0,
    recompute: Sequence[bool] | None = None,
    forward: int = 1,
    recompute_ticks: int = 1,
    backward: int = 2,
    weight: int = 1,
) -> Schedule:
    """The schedule that a policy makes of equal stages and free messages, by running `choose` tick by tick.

    `recompute` is per stage; by default all but the last. Durations are in ticks, at least 1; under ZERO_BUBBLE
    `backward` is of B alone and `weight` of W. Raises ValueError on durations below 1.
    """
    if min(forward, recompute_ticks, backward, weight) < 1:
        raise ValueError("forward, recompute_ticks, backward and weight are whole ticks, at least 1")
    if recompute is None:
        recompute = [stage < P - 1 for stage in range(P)]
    run = _TickRun(policy, P, N, run_ahead, tuple(recompute), (forward, recompute_ticks, backward, weight))
    now = 0
    while any(stage.backwards < N or (run.splits and stage.weights < N) for stage in run.stages):
        # A neighbour may wait until a stage starts its backward, so this repeats until no stage starts anything.
        while sum(run.start_action(stage, now) for stage in range(P)):
            pass
        assert now == 0 or any(stage.free_at >= now for stage in run.stages), "the policy is in deadlock"
        now += 1
    return tuple(tuple(stage.actions) for stage in run.stages)


@dataclass
class _RunningStage:
    """One stage while `make_schedule` runs it."""

    free_at: int = 0
    forwards: int = 0
    recomputes: int = 0
    backwards: int = 0
    weights: int = 0
    activation_at: dict[int, int] = field(default_factory=dict)
    """When each micro-batch's inputs are here."""
    gradient_at: dict[int, int] = field(default_factory=dict)
    actions: list[Action] = field(default_factory=list)


class _TickRun:
    """A pipeline of equal stages, tick by tick."""

    def __init__(
        self, policy: Policy, P: int, N: int, run_ahead: int, recompute: tuple[bool, ...], ticks: tuple[int, ...]
    ) -> None:
        self.policy, self.P, self.N, self.run_ahead = policy, P, N, run_ahead
        self.recompute, self.ticks = recompute, ticks
        self.splits = policy is Policy.ZERO_BUBBLE
        self.stages = [_RunningStage() for _ in range(P)]
        self.stages[0].activation_at = dict.fromkeys(range(N), 0)

    def start_action(self, index: int, now: int) -> bool:
        """Starts what a stage chooses to do now; False when it is busy or waits."""
        stage = self.stages[index]
        if stage.free_at > now:
            return False
        code = self._choose(index, stage, now)
        if code == WAIT:
            return False
        self._start(index, Op(code), now)
        return True

    def _choose(self, index: int, stage: _RunningStage, now: int) -> int:
        recompute = self.recompute[index]
        due_at = stage.gradient_at.get(stage.backwards)
        activations = stage.forwards + (stage.activation_at.get(stage.forwards, now + 1) <= now)
        gradients = stage.backwards + (due_at is not None and due_at <= now)
        orders = StageOrders(self.policy.code, index, self.P, self.N, self.run_ahead, recompute)
        progress = StageProgress(stage.forwards, stage.recomputes, stage.backwards, activations, gradients)
        if self.splits:
            return choose_split(orders, progress, stage.weights)
        due = -1 if due_at is None else max(0, due_at - now)
        return choose(orders, progress, RecomputeTiming(self.ticks[Op.F], self.ticks[Op.R], due))

    def _start(self, index: int, op: Op, now: int) -> None:
        stage = self.stages[index]
        stage.free_at = now + self.ticks[op]
        if op == Op.F:
            stage.actions.append(Action(op, stage.forwards))
            if index < self.P - 1:
                self.stages[index + 1].activation_at[stage.forwards] = stage.free_at
            else:
                stage.gradient_at[stage.forwards] = stage.free_at
            stage.forwards += 1
        elif op == Op.R:
            stage.actions.append(Action(op, stage.recomputes))
            stage.recomputes += 1
        elif op == Op.W:
            stage.actions.append(Action(op, stage.weights))
            stage.weights += 1
        else:
            stage.actions.append(Action(op, stage.backwards))
            if index > 0:
                self.stages[index - 1].gradient_at[stage.backwards] = stage.free_at
            stage.backwards += 1
