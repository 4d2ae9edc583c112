"""The state of one pass of a stage over its micro-batches, and its result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from varuna.pipeline.loss_weight import WeightedLoss
from varuna.pipeline.micro_batches import MicroBatch, StartedInputs
from varuna.pipeline.pass_timer import PassTimer
from varuna.pipeline.stage_setting import BoundaryShape
from varuna.pipeline.transport import MessageReceiver, MessageTensor

__all__ = [
    "NO_HOOKS",
    "ForwardLimit",
    "MessageIntake",
    "PassHooks",
    "PassResult",
    "PassState",
    "PassTimes",
    "Stash",
]


@dataclass(frozen=True, kw_only=True)
class PassResult:
    """The result of a pass over the replica's micro-batches on this rank.

    `loss_sum`, `weight`, `examples` and `expected_weight` are 0 except on the last stage.
    """

    loss_sum: float
    """Sum over micro-batches of mean loss times weight."""
    weight: float
    """Sum of the weights in `loss_sum`: the number of examples if the model returns no weights."""
    examples: int
    expected_weight: float
    """The number that the backwards were divided by."""
    forward_us: int
    """Median over the largest micro-batches."""
    backward_us: int
    """Median over the largest micro-batches."""
    wait_us: int
    """Time in which no op ran."""

    def without_op_times(self) -> PassResult:
        """As if no micro-batch had been timed."""
        return replace(self, forward_us=0, backward_us=0)

    def join(self, later: PassResult) -> PassResult:
        """The result of both passes; the times are those of the later one, if it ran anything."""
        return replace(
            later if later.forward_us else self,
            loss_sum=self.loss_sum + later.loss_sum,
            weight=self.weight + later.weight,
            examples=self.examples + later.examples,
            expected_weight=later.expected_weight or self.expected_weight,
        )


class PassTimes(NamedTuple):
    """As `PassResult` has them."""

    forward_us: int
    backward_us: int
    wait_us: int


_NO_TIMES = PassTimes(0, 0, 0)


@dataclass
class Stash:
    """What a micro-batch leaves in memory between its forward and its backward."""

    micro_batch: MicroBatch
    """With its inputs on the device."""
    received: list[Tensor]
    outputs: list[Tensor] | None = None
    """None after a forward that will be recomputed."""
    buffers: list[Tensor] = field(default_factory=list)
    """The values before the forward of the buffers that it writes, for what runs again: a recompute, and in a backward
    what the model checkpoints."""


class ForwardLimit(Protocol):
    """How far a pass may go, when the ranks may end it early. Asked under the condition of `Departure`."""

    def limit_forwards(self, begun: int) -> int:
        """How many micro-batches may have begun now. `begun`: those that have."""

    @property
    def end(self) -> int | None:
        """After how many micro-batches the pass ends early; None: that is not decided, or it does not."""


@dataclass(frozen=True, kw_only=True)
class PassHooks:
    """What happens in the course of a training pass."""

    before_backward: Callable[[], None] | None = None
    """Called before each backward, and before `before_last_backward`: nothing has changed `.grad` since the backward
    before. No forward and no recompute comes between the call and the backward."""
    before_last_backward: Callable[[], None] | None = None
    """Called when one backward is left, after which gradients are final. Not called when there are no micro-batches, or
    the pass ends early."""
    after_backward: Callable[[int, PassState], None] | None = None
    """Called with how many backwards are done, after each but the last: `.grad` has the sums of so many micro-batches
    then."""
    limit: ForwardLimit | None = None
    """Where the ranks may end the pass early: the micro-batches before `limit.end` are run then."""


NO_HOOKS = PassHooks()


@dataclass
class PassState:
    """The state of one pass."""

    micro_batches: Sequence[MicroBatch]
    timer: PassTimer
    activations: MessageIntake
    gradients: MessageIntake
    forwards: int = 0
    recomputes: int = 0
    backwards: int = 0
    end: int = 0
    """The micro-batches that the pass runs: all, unless it ends early."""
    may_begin: int = 0
    """Those whose forward may have begun now; never more than `end`."""
    stashes: dict[int, Stash] = field(default_factory=dict)
    """By micro-batch, of those between forward and backward."""
    losses: list[WeightedLoss] = field(default_factory=list)
    """On the last stage, by micro-batch."""
    expected_weight: float = 0.0
    next_inputs: StartedInputs | None = None
    """Of the micro-batch whose forward comes next; None: their copy has not been started, or a CPU needs none."""

    def sum_up(self, count: int, times: PassTimes = _NO_TIMES) -> PassResult:
        """The result of the first `count` micro-batches."""
        losses = self.losses[:count]
        return PassResult(
            loss_sum=WeightedLoss.sum_losses(losses),
            weight=sum(loss.weight for loss in losses),
            examples=sum(loss.examples for loss in losses),
            expected_weight=self.expected_weight,
            forward_us=times.forward_us,
            backward_us=times.backward_us,
            wait_us=times.wait_us,
        )


class MessageIntake:
    """The messages of one pass from one link.

    At any time there are receive buffers for at most `room` messages, posted ahead. A message occupies its buffer until
    it is released.
    """

    def __init__(
        self,
        receiver: MessageReceiver[Any] | None,
        boundaries: Sequence[BoundaryShape],
        sizes: Sequence[int],
        room: int,
    ) -> None:
        """`receiver`: None where no neighbour sends. `sizes`: the examples in each micro-batch."""
        self.has_source = receiver is not None and len(boundaries) > 0
        self._receiver = receiver if self.has_source else None
        self._boundaries = boundaries
        self._sizes = sizes
        self._before = 0 if self._receiver is None else self._receiver.arrived
        self._room = room
        self._posted = 0

    def post_first_receives(self) -> None:
        """Posts receives for as many messages as there is room for."""
        for _ in range(min(self._room, len(self._sizes))):
            self._post_receive()

    @property
    def arrived(self) -> int:
        """Messages of this pass that have arrived; all of them where no neighbour sends."""
        return len(self._sizes) if self._receiver is None else self._receiver.arrived - self._before

    @property
    def last_arrival_ns(self) -> int:
        """When the newest message arrived; 0 without a source."""
        return 0 if self._receiver is None else self._receiver.last_arrival_ns

    def take_message(self, number: int, device: torch.device) -> list[Tensor]:
        """The tensors of one micro-batch, on `device`."""
        if self._receiver is None:
            return []
        return self._receiver.take_message(self._before + number, device)

    def release_oldest(self) -> None:
        """Gives the room of the oldest taken message to the next one."""
        if self._posted < len(self._sizes):
            self._post_receive()

    def _post_receive(self) -> None:
        if self._receiver is not None:
            examples = self._sizes[self._posted]
            tensors = [MessageTensor(b.shape_for(examples), b.dtype) for b in self._boundaries]
            self._receiver.post_receive(tensors, self._posted)
        self._posted += 1
