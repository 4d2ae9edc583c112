"""What the engine needs to know of a stage: what it runs, where it stands, and what surrounds its passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from varuna.partition.stages.written_buffers import WrittenBuffers
from varuna.pipeline.random_streams import RandomStreams
from varuna.pipeline.transport import MessageReceiver, MessageSender
from varuna_planner.schedule.policies import Policy

__all__ = ["BoundaryShape", "RunnableStage", "StageContext", "StageLinks", "StagePosition"]


class BoundaryShape(Protocol):
    """One tensor that crosses between stages (`varuna.partition.Boundary`)."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def requires_grad(self) -> bool: ...
    def shape_for(self, batch: int, /) -> tuple[int, ...]: ...


class RunnableStage(Protocol):
    """A stage of the model (`varuna.partition.Stage`)."""

    on_section: Callable[[int], None] | None

    @property
    def receives(self) -> Sequence[BoundaryShape]: ...
    @property
    def sends(self) -> Sequence[BoundaryShape]: ...
    @property
    def is_last(self) -> bool: ...
    def forward(self, inputs: dict[str, Any], received: list[Tensor], /) -> list[Tensor] | Tensor: ...


@dataclass(frozen=True, kw_only=True)
class StagePosition:
    """Where the stage stands in the pipeline, and how it orders its work."""

    stage: int
    p: int
    """Stages in the pipeline."""
    policy: Policy
    run_ahead: int
    """Micro-batches that may be in flight beyond the P - stage that the schedule needs."""
    recompute: bool
    """Whether backwards recompute the activations."""


@dataclass(frozen=True, kw_only=True)
class StageLinks:
    """The stage's connections to its neighbours; None where the pipeline ends."""

    activations_in: MessageReceiver[Any] | None = None
    activations_out: MessageSender | None = None
    gradients_in: MessageReceiver[Any] | None = None
    gradients_out: MessageSender | None = None

    @property
    def are_sending(self) -> bool:
        """Whether a message to a neighbour is on its way."""
        return any(link is not None and link.is_sending for link in (self.activations_out, self.gradients_out))

    def end(self, within_s: float) -> bool:
        """Ends the links, whose connections are broken. Returns whether each has ended in this time."""
        links = (self.activations_in, self.activations_out, self.gradients_in, self.gradients_out)
        ended = [link.end(within_s) for link in links if link is not None]
        return all(ended)


def _no_backward_context(inputs: Mapping[str, Any], received: Sequence[Tensor]) -> AbstractContextManager[object]:
    return nullcontext()


@dataclass(frozen=True, kw_only=True)
class StageContext:
    """What surrounds the forwards and backwards of the stage."""

    forward: Callable[[], AbstractContextManager[object]] = nullcontext
    """Entered around every forward, recomputes included (autocast, for example). Boundaries must have the dtypes that
    tensors have in it."""
    backward: Callable[[Mapping[str, Any], Sequence[Tensor]], AbstractContextManager[object]] = _no_backward_context
    """Entered around every backward, with the arguments that the micro-batch's forward had."""
    written: WrittenBuffers | None = None
    """The buffers that the forward writes; None: it writes none."""
    random: RandomStreams | None = None
    """What the forward draws; None: random numbers that belong to micro-batches."""
