"""The systems under test, all with the same sleeping stages: Varuna's engine, and torch.distributed.pipelining."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from _pipeline_world import Conditions, Sender, busy_until
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, schedules

from varuna.distributed.departure import Departure
from varuna.pipeline.engine import Engine
from varuna.pipeline.micro_batches import MicroBatch
from varuna.pipeline.stage_setting import StageLinks, StagePosition
from varuna_planner.schedule.policies import Op

__all__ = ["PEERS", "make_ours", "make_peer"]

PEERS = {"torch-gpipe": ScheduleGPipe, "torch-1f1b": Schedule1F1B}
_CPU = torch.device("cpu")


class _Compute(torch.autograd.Function):
    """Takes the device's time, forward and backward. The host's own work, such as making tensors, is part of that time,
    because a real device works while the host prepares.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends_s: float, backward_s: Callable[[], float]) -> Tensor:
        ctx.backward_s = backward_s
        out = torch.empty_like(x)
        busy_until(ends_s)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        ends_s = time.perf_counter() + ctx.backward_s()
        # A new tensor, like that of any real op: autograd would copy one that it does not own.
        found = torch.empty_like(gradients[0]), torch.zeros(1), None, None
        busy_until(ends_s)
        return found


def _compute(x: Tensor, weight: Tensor, forward_s: float, backward_s: Callable[[], float]) -> Tensor:
    ends_s = time.perf_counter() + forward_s
    out: Tensor = _Compute.apply(x, weight, ends_s, backward_s)  # type: ignore[no-untyped-call]
    return out


@dataclass(frozen=True)
class _Boundary:
    name: str
    elements: int
    dtype: torch.dtype = torch.float32
    requires_grad: bool = True

    def shape_for(self, batch: int, /) -> tuple[int, ...]:
        return (batch, self.elements)


class _SleepingStage:
    """A stage for Varuna's engine."""

    def __init__(self, conditions: Conditions, activation_bytes: int, stage: int, p: int) -> None:
        self.on_section: Callable[[int], None] | None = None
        boundary = _Boundary("x", activation_bytes // 4)
        self.receives = (boundary,) if stage > 0 else ()
        self.sends = (boundary,) if stage < p - 1 else ()
        self.is_last = stage == p - 1
        self._conditions = conditions
        self._recomputes = not self.is_last
        self._weight = nn.Parameter(torch.zeros(1))
        self._first_input = torch.zeros(1, boundary.elements)

    def forward(self, inputs: dict[str, Any], received: list[Tensor]) -> list[Tensor] | Tensor:
        recomputing = self._recomputes and torch.is_grad_enabled()
        forward_s = self._conditions.op_s(Op.R if recomputing else Op.F)
        x = received[0] if received else self._first_input
        x = _compute(x, self._weight, forward_s, partial(self._conditions.op_s, Op.B))
        return x.flatten()[0] if self.is_last else [x]


def make_ours(
    position: StagePosition,
    n: int,
    *,
    conditions: Conditions,
    activation_bytes: int,
    links: StageLinks,
    departure: Departure,
) -> Callable[[], Any]:
    """One mini-batch by Varuna's engine."""
    engine = Engine(
        _SleepingStage(conditions, activation_bytes, position.stage, position.p),
        position=position,
        links=links,
        device=_CPU,
        departure=departure,
    )
    batches = [MicroBatch(index, 1, {}) for index in range(n)]
    return lambda: engine.run_training_pass(batches, expected_weight=lambda *_: n, seed=0, step=1)


class _SleepingModule(nn.Module):
    """A stage for torch.distributed.pipelining. Its backward contains the recompute, which is no action there."""

    def __init__(self, conditions: Conditions, is_last: bool) -> None:
        super().__init__()
        self._conditions = conditions
        self._is_last = is_last
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return _compute(x, self.weight, self._conditions.op_s(Op.F), self._backward_s)

    def _backward_s(self) -> float:
        return self._conditions.op_s(Op.B) + (0.0 if self._is_last else self._conditions.op_s(Op.R))


def make_peer(
    name: str, *, conditions: Conditions, activation_bytes: int, stage: int, p: int, n: int
) -> Callable[[], Any]:
    """One mini-batch by a schedule of torch.distributed.pipelining, over the default process group."""
    example = torch.zeros(1, activation_bytes // 4)
    module = _SleepingModule(conditions, stage == p - 1)
    boundary = torch.zeros_like(example, requires_grad=True)
    pipeline_stage = PipelineStage(
        module, stage, p, _CPU, input_args=(boundary if stage else example,), output_args=(boundary,)
    )
    schedule = PEERS[name](pipeline_stage, n, loss_fn=lambda output, target: output.flatten()[0])
    whole = torch.zeros(n, activation_bytes // 4)
    target = torch.zeros(n, 1)

    def run() -> None:
        schedule.step(*([whole] if stage == 0 else []), target=target if stage == p - 1 else None, return_outputs=False)

    return run


def delay_peers(delays: Conditions, rank: int) -> None:
    """From now on the messages of this process' torch pipeline arrive late, like those of Varuna's engine."""
    links = {
        rank + 1: Sender(partial(delays.delay_s, f"down/{rank}")),
        rank - 1: Sender(partial(delays.delay_s, f"up/{rank - 1}")),
    }
    direct = schedules._batch_p2p

    def batch(ops: Sequence[dist.P2POp], desc: str | None = None) -> list[dist.Work]:
        works = direct([op for op in ops if op.op is dist.irecv], desc)
        for op in ops:
            if op.op is dist.isend:
                links[op.peer].send(partial(op.op, op.tensor, op.peer, op.group, op.tag))
        return works

    schedules._batch_p2p = batch  # type: ignore[assignment]
