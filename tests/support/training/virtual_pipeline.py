"""The engines of a whole pipeline in one process and in virtual time: only devices, links and the clock are not real.

Each stage's engine runs in a thread of its own, and one thread runs at a time. A thread goes on until its device works
or its engine waits; then whichever is next on the virtual clock goes on. So a run has no overhead and no chance in it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from varuna.diagnostics.timeline import Timeline
from varuna.distributed.departure import Departure
from varuna.pipeline.engine import Engine
from varuna.pipeline.micro_batches import MicroBatch
from varuna.pipeline.stage_setting import StageLinks, StagePosition
from varuna_planner.schedule.actions import Action, Schedule
from varuna_planner.schedule.policies import Op, Policy

US = 1000
"""Nanoseconds."""


@dataclass(frozen=True, kw_only=True)
class Times:
    """Whole microseconds, so that the engine's nanoseconds and the simulator's floats agree exactly."""

    action_us: npt.NDArray[np.int64]
    """[F R B, P, N]."""
    latency_us: npt.NDArray[np.int64]
    """[P]: of the link after each stage, in both directions."""
    recompute: tuple[bool, ...]


class Clock:
    """Virtual time, which decides which thread goes on next."""

    def __init__(self, threads: int) -> None:
        self.now_ns = 0
        self.wake: list[tuple[float, int]] = [(0, 0)] * threads
        """(when, whether it chooses then): at the same moment, what ends comes before what chooses."""
        self._go = [threading.Semaphore(0) for _ in range(threads)]
        self._back = threading.Semaphore(0)
        self._ended = [False] * threads
        self._error: BaseException | None = None

    def perf_counter_ns(self) -> int:
        return self.now_ns

    def sleep(self, thread: int, until_ns: float, *, chooses: bool) -> None:
        """Called by the thread that runs; the other threads go on until that time."""
        self.wake[thread] = (until_ns, int(chooses))
        self._back.release()
        self._go[thread].acquire()

    def run(self, mains: Sequence[Callable[[], None]]) -> None:
        """Runs all from now to their ends."""
        self.wake = [(self.now_ns, 0)] * len(mains)
        self._ended = [False] * len(mains)
        threads = [threading.Thread(target=self._main, args=(i, main), daemon=True) for i, main in enumerate(mains)]
        for thread in threads:
            thread.start()
        while not all(self._ended):
            _, _, number = min((*self.wake[i], i) for i in range(len(mains)) if not self._ended[i])
            assert self.wake[number][0] < math.inf, "all engines wait for each other"
            self.now_ns = max(self.now_ns, int(self.wake[number][0]))
            self._go[number].release()
            self._back.acquire()
            if self._error is not None:
                raise self._error
        for one in threads:
            one.join()

    def _main(self, thread: int, main: Callable[[], None]) -> None:
        self._go[thread].acquire()
        try:
            main()
        except BaseException as error:  # for `run`, which raises it
            self._error = error
        finally:
            self._ended[thread] = True
            self._back.release()


class VirtualDeparture(Departure):
    """Waits on the virtual clock. Nobody ever leaves."""

    def __init__(self, clock: Clock, stage: int) -> None:
        super().__init__()
        self._clock, self._stage = clock, stage
        self.inboxes: list[VirtualReceiver] = []

    def raise_if_leaving(self) -> None:
        """The engine does so before it chooses."""
        self._clock.sleep(self._stage, self._clock.now_ns, chooses=True)

    def wait_until(self, ready: Callable[[], bool], recheck_s: Callable[[], float] | None = None) -> None:
        while not ready():
            wake_ns = min((inbox.next_ns for inbox in self.inboxes), default=math.inf)
            if recheck_s is not None:
                wake_ns = min(wake_ns, self._clock.now_ns + round(min(1e6, recheck_s()) * 1e9))
            self._clock.sleep(self._stage, wake_ns, chooses=True)


@dataclass
class VirtualReceiver:
    """One end of a link; `stage` is who receives."""

    clock: Clock
    stage: int
    due: list[tuple[int, list[Tensor]]] = field(default_factory=list)

    @property
    def arrived(self) -> int:
        return sum(at_ns <= self.clock.now_ns for at_ns, _ in self.due)

    @property
    def next_ns(self) -> float:
        return min((at_ns for at_ns, _ in self.due if at_ns > self.clock.now_ns), default=math.inf)

    @property
    def last_arrival_ns(self) -> int:
        return max((at_ns for at_ns, _ in self.due if at_ns <= self.clock.now_ns), default=0)

    def post_receive(self, *_: Any) -> None: ...

    def take_message(self, number: int, *_: Any) -> list[Tensor]:
        return self.due[number][1]


@dataclass
class VirtualSender:
    """The other end."""

    inbox: VirtualReceiver
    latency_us: int

    def send_message(self, tensors: Sequence[Tensor], micro_batch: int = 0) -> None:
        clock = self.inbox.clock
        at_ns = clock.now_ns + self.latency_us * US
        self.inbox.due.append((at_ns, [tensor.detach().clone() for tensor in tensors]))
        when, chooses = clock.wake[self.inbox.stage]
        if chooses and at_ns < when:  # it waits, for something later
            clock.wake[self.inbox.stage] = (at_ns, chooses)

    def wait_until_sent(self) -> None: ...


class _Work(torch.autograd.Function):
    """Takes the device's time backwards."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, backward: Callable[[], None]) -> Tensor:
        ctx.work = backward
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        ctx.work()
        return gradients[0].clone(), torch.zeros(1), None


@dataclass(frozen=True)
class _Boundary:
    name: str = "x"
    dtype: torch.dtype = torch.float32
    requires_grad: bool = True

    def shape_for(self, batch: int, /) -> tuple[int, ...]:
        return (batch,)


class _Stage:
    """A stage whose device does nothing, for the right time."""

    def __init__(self, clock: Clock, times: Times, stage: int) -> None:
        P = times.action_us.shape[1]
        self.on_section: Callable[[int], None] | None = None
        self.receives = (_Boundary(),) if stage > 0 else ()
        self.sends = (_Boundary(),) if stage < P - 1 else ()
        self.is_last = stage == P - 1
        self._clock, self._times, self._stage = clock, times, stage
        self._weight = nn.Parameter(torch.zeros(1))

    def forward(self, inputs: dict[str, Any], received: list[Tensor]) -> list[Tensor] | Tensor:
        number = inputs["number"]
        again = self._times.recompute[self._stage] and torch.is_grad_enabled()
        self._work(Op.R if again else Op.F, number)
        x = received[0] if received else torch.zeros(1)
        out: Tensor = _Work.apply(x, self._weight, lambda: self._work(Op.B, number))
        return out.sum() if self.is_last else [out]

    def _work(self, op: Op, number: int) -> None:
        ends_ns = self._clock.now_ns + int(self._times.action_us[op, self._stage, number]) * US
        self._clock.sleep(self._stage, ends_ns, chooses=False)


class _Order(Timeline):
    """Keeps the order of a pass."""

    def __init__(self) -> None:
        super().__init__()
        self.actions: list[Action] = []

    def begin_step(self, step: int) -> None:
        self.actions = []

    def add_span(self, track: str, name: str, begin_ns: int, end_ns: int, **details: Any) -> None:
        self.actions.append(Action(Op[name[0]], int(name[1:])))


@dataclass(frozen=True)
class Ran:
    """A pass of all engines."""

    order: Schedule
    makespan_us: float
    usual_us: npt.NDArray[np.float64]
    """[F R B, P]: what the engines took their ops to take."""


def run_engines(times: Times, policy: Policy, run_ahead: int, patch_time: Callable[[Clock], None]) -> Ran:
    """The engines' second pass, which knows the times of the first. `patch_time` gives the engine a clock."""
    _, P, N = times.action_us.shape
    clock = Clock(P)
    patch_time(clock)
    down = [VirtualReceiver(clock, stage) for stage in range(P)]
    up = [VirtualReceiver(clock, stage) for stage in range(P)]
    engines: list[Engine] = []
    orders = [_Order() for _ in range(P)]
    for stage in range(P):
        departure = VirtualDeparture(clock, stage)
        departure.inboxes = [down[stage], up[stage]]
        latency = times.latency_us
        links = StageLinks(
            activations_in=down[stage] if stage > 0 else None,
            gradients_in=up[stage] if stage < P - 1 else None,
            activations_out=VirtualSender(down[stage + 1], int(latency[stage])) if stage < P - 1 else None,
            gradients_out=VirtualSender(up[stage - 1], int(latency[stage - 1])) if stage > 0 else None,
        )
        position = StagePosition(stage=stage, p=P, policy=policy, run_ahead=run_ahead, recompute=times.recompute[stage])
        work = _Stage(clock, times, stage)
        engines.append(
            Engine(
                work,
                position=position,
                links=links,
                device=torch.device("cpu"),
                departure=departure,
                timeline=orders[stage],
            )
        )
    batches = [MicroBatch(number, 1, {"number": number}) for number in range(N)]
    usual = np.zeros((3, P))
    began_ns = 0
    for step in (1, 2):
        usual = np.array(
            [[e._op_times.forward_us, e._op_times.recompute_us, e._op_times.backward_us] for e in engines],
            dtype=np.float64,
        ).T
        began_ns = clock.now_ns
        sizes = {"expected_weight": lambda *_: float(N), "seed": 0, "step": step}
        clock.run([partial(engine.run_training_pass, batches, **sizes) for engine in engines])
    return Ran(tuple(tuple(order.actions) for order in orders), (clock.now_ns - began_ns) / US, usual)
