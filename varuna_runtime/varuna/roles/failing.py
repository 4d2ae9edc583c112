"""What a process whose script has raised an exception can leave to others: the state after a step, or nothing.

Inside a call of `step` the state is that after the step before, until the update begins. Between two calls it may be
that after the step, or that with the script's part of the step still missing: schedulers step there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from varuna.checkpoint.script_states import RegisteredStates
from varuna.devices.accelerator import peak_memory_bytes, total_memory_bytes
from varuna.devices.out_of_memory import is_memory_error
from varuna.distributed.topology import Topology
from varuna_planner.memory import human
from varuna_proto.plan import Plan

__all__ = ["ScriptHabits", "are_finite", "explaining_memory"]


class ScriptHabits:
    """Whether the script changes learning rates or schedulers between two steps, as it did between those before."""

    def __init__(self) -> None:
        self._at_end: str | None = None
        """What the script can change, at the end of the newest step."""
        self._changes: bool | None = None
        """Whether the script had changed it when that step began; None: no step came before it."""

    def begin_step(self, optimizers: Sequence[Optimizer], registered: RegisteredStates) -> None:
        if self._at_end is not None:
            self._changes = _describe(optimizers, registered) != self._at_end

    def end_step(self, optimizers: Sequence[Optimizer], registered: RegisteredStates) -> None:
        self._at_end = _describe(optimizers, registered)

    def is_between_steps(self, optimizers: Sequence[Optimizer], registered: RegisteredStates) -> bool:
        """Whether the script has done its part since the newest step, as far as that can be known.

        With states of its own that are no schedulers it cannot.
        """
        if self._at_end is None or self._changes is None or registered.list_others():
            return False
        return (_describe(optimizers, registered) != self._at_end) is self._changes


def _describe(optimizers: Sequence[Optimizer], registered: RegisteredStates) -> str:
    options = [
        {name: value for name, value in group.items() if name not in ("params", "param_names")}
        for optimizer in optimizers
        for group in optimizer.param_groups
    ]
    return repr((options, [_list_epochs(scheduler) for scheduler in registered.schedulers.values()]))


def _list_epochs(scheduler: LRScheduler) -> list[Any]:
    """How often the scheduler has stepped, and those in it: a ChainedScheduler has no count of its own."""
    inner = getattr(scheduler, "_schedulers", ())
    return [getattr(scheduler, "last_epoch", None), *map(_list_epochs, inner)]


@contextmanager
def explaining_memory(device: torch.device, topology: Topology, plan: Plan) -> Iterator[None]:
    """Around what a stage does on its device: the last line of an error for want of memory says what may be changed."""
    try:
        yield
    except RuntimeError as error:
        if not is_memory_error(error):
            raise
        has, had = human(total_memory_bytes(device)), human(peak_memory_bytes(device))
        planned = f", and {human(plan.memory_bytes[topology.stage])} were planned" if plan.memory_bytes else ""
        error.add_note(
            f"out of memory on {device}, which has {has}: stage {topology.stage + 1} of {topology.p} had up to {had} "
            f"with micro-batches of {plan.micro_batch}{planned}. Make micro-batches smaller (plan.micro_batch in the "
            "job file, --chunk_size of the launchers), use more GPUs, or an optimizer that takes less (fused=True)"
        )
        raise


def are_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether no value is infinite or not a number: a checkpoint would be refused, too."""
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)
