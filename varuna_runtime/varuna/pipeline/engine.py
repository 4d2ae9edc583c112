"""The engine: runs one stage's share of a mini-batch, one action at a time, as the planner's `choose` says.

Letters: P stages, N micro-batches of this replica in this pass, F forward, R recompute, B backward.

Nothing is planned ahead here. After each action the engine asks `choose` with what is done and what has arrived; WAIT
means waiting until a message arrives or the worker must leave. Micro-batches go in order on every link.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from varuna.departure import Departure
from varuna.partition.batch import take_examples
from varuna.partition.written_buffers import WrittenBuffers
from varuna.pipeline.forecast import GradientForecast
from varuna.pipeline.randomness import RandomStreams, generators_left_as_found
from varuna.pipeline.timeline import Timeline
from varuna.pipeline.timing import PassTimer, Usual
from varuna.pipeline.transport import Inbox, Outbox, TensorSpec
from varuna.pipeline.weights import WeightedLoss
from varuna_planner.schedule import WAIT, Op, Policy, choose, require_executable, stash_cap

__all__ = ["Boundary", "Engine", "Links", "MicroBatch", "PassResult", "Position", "Stage", "cut_inputs"]

_OP_NAMES = tuple(op.name for op in Op)
"""By number: looking an enum's member up for every op would take as long as choosing it."""


_EVALUATED_AHEAD = 2
"""Messages that wait for the next stage at most, in an evaluation: one is on its way while the next is computed."""


class Boundary(Protocol):
    """What the engine needs to know of one tensor that crosses between stages (`varuna.partition.Boundary`)."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def requires_grad(self) -> bool: ...
    def shape_for(self, batch: int, /) -> tuple[int, ...]: ...


class Stage(Protocol):
    """What the engine runs (`varuna.partition.Stage`)."""

    on_section: Callable[[int], None] | None

    @property
    def receives(self) -> Sequence[Boundary]: ...
    @property
    def sends(self) -> Sequence[Boundary]: ...
    @property
    def is_last(self) -> bool: ...
    def forward(self, inputs: dict[str, Any], received: list[Tensor], /) -> list[Tensor] | Tensor: ...


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where the stage stands in the pipeline, and how it orders its work."""

    stage: int
    p: int
    policy: Policy
    run_ahead: int
    recompute: bool


@dataclass(frozen=True, kw_only=True)
class Links:
    """The stage's connections; None where the pipeline ends."""

    activations_in: Inbox | None = None
    activations_out: Outbox | None = None
    gradients_in: Inbox | None = None
    gradients_out: Outbox | None = None


@dataclass(frozen=True)
class MicroBatch:
    """What the model gets for one micro-batch."""

    index: int
    """In the global batch: the key of random streams that belong to micro-batches."""
    examples: int
    inputs: dict[str, Any]
    first_example: int = 0
    """Its place in the global batch: with it, the key of random streams that belong to examples."""


@dataclass(frozen=True, kw_only=True)
class PassResult:
    """What a pass over the replica's micro-batches came to on this rank."""

    loss_sum: float
    """Sum over micro-batches of mean loss times weight; 0 except on the last stage."""
    weight: float
    """That `loss_sum` is over; 0 except on the last stage. The number of examples, if the model gives no weights."""
    examples: int
    """0 except on the last stage."""
    expected_weight: float
    """By which backwards were divided; 0 except on the last stage."""
    forward_us: int
    """Median per micro-batch."""
    backward_us: int
    wait_us: int
    """Time in which no op ran."""


@dataclass
class _InFlight:
    """What a micro-batch leaves in memory between its forward and its backward."""

    micro_batch: MicroBatch
    received: list[Tensor]
    outputs: list[Tensor] | None = None
    """None after a forward that is to be recomputed."""
    buffers: list[Tensor] = field(default_factory=list)
    """Those that forward writes, as they were before, for a recompute."""


@dataclass
class _Pass:
    """The state of one pass."""

    micro_batches: Sequence[MicroBatch]
    timer: PassTimer
    activations: _Intake
    gradients: _Intake
    forwards: int = 0
    recomputes: int = 0
    backwards: int = 0
    in_flight: dict[int, _InFlight] = field(default_factory=dict)
    losses: list[WeightedLoss] = field(default_factory=list)
    """On the last stage, by micro-batch."""
    expected_weight: float = 0.0


class Engine:
    """Runs a stage for whole passes: `train` with backward, `evaluate` without."""

    def __init__(
        self,
        stage: Stage,
        position: Position,
        links: Links,
        device: torch.device,
        departure: Departure,
        *,
        forward_context: Callable[[], AbstractContextManager[object]] = nullcontext,
        backward_context: Callable[
            [Mapping[str, Any], Sequence[Tensor]], AbstractContextManager[object]
        ] = lambda inputs, received: nullcontext(),
        timeline: Timeline | None = None,
        written: WrittenBuffers | None = None,
        random: RandomStreams | None = None,
    ) -> None:
        """`forward_context` is entered around every forward of the stage, recomputes too (autocast, say), and
        `backward_context` around every backward, with what the micro-batch's forward was given.

        Boundaries must have the dtypes that tensors have under it. The timeline is told of every op. `written`: by
        the stage's forward. `random`: what it draws; by default its numbers belong to micro-batches.
        Raises ValueError for a policy that can only be simulated.
        """
        require_executable(position.policy)
        self._stage = stage
        self._forward_context = forward_context
        self._backward_context = backward_context
        self._position = position
        self._links = links
        self._device = device
        self._departure = departure
        self._timeline = timeline or Timeline()
        self._written = written or WrittenBuffers(nn.Module(), {})
        self._random = random or RandomStreams(device)
        # What the policy `varuna` knows of time; the others do not ask.
        self._forecast: GradientForecast | None = None
        if position.policy is Policy.VARUNA:
            self._forecast = GradientForecast(position.p - 1 - position.stage)
        self._usual = Usual()
        self.follow_stage(self._written, self._random)

    def follow_stage(self, written: WrittenBuffers, random: RandomStreams) -> None:
        """Between passes, when what the stage receives, sends, writes and draws may have changed."""
        self._written, self._random = written, random
        self._gradients_sent = [b for b in self._stage.receives if b.requires_grad]
        self._gradients_received = [b for b in self._stage.sends if b.requires_grad]

    def train(
        self,
        micro_batches: Sequence[MicroBatch],
        *,
        expected_weight: Callable[[float, int], float],
        seed: int,
        step: int,
        loss_scale: float = 1.0,
        before_last_backward: Callable[[], None] | None = None,
        settle: bool = True,
    ) -> PassResult:
        """Forward and backward of all micro-batches. Adds to the parameters' gradients the gradient of
        sum over micro-batches of loss_scale * weight/expected weight * mean loss, where a micro-batch's weight is what
        the model returns with the loss, or its number of examples.

        `expected_weight` is called once, on the last stage alone, with the weight and the number of examples of the
        first micro-batch there, or zeros: it says about what the weights of the global batch come to.
        `before_last_backward` is called when one backward is left to do, after which gradients are final; not at all
        when there are no micro-batches. `PassResult.loss_sum` is unscaled. Without `settle` the caller decides whether
        the buffers that the forward writes keep what it wrote (`WrittenBuffers.settle` or `drop`).
        """
        self._timeline.begin(step)
        run = self._begin(micro_batches, self._gradients_received)
        n = len(micro_batches)
        if self._forecast is not None:
            self._forecast.begin(self._usual)
        if self._stage.is_last and not n:
            run.expected_weight = expected_weight(0.0, 0)
        with generators_left_as_found(self._device):
            while run.backwards < n:
                action = self._choose_or_wait(run)
                number = (run.forwards, run.recomputes, run.backwards)[action]
                with run.timer.measure(_OP_NAMES[action], number):
                    if action == Op.F:
                        self._forward(run, seed, step)
                    elif action == Op.R:
                        self._recompute(run, seed, step)
                    else:
                        if before_last_backward is not None and run.backwards == n - 1:
                            before_last_backward()
                        if self._stage.is_last and run.backwards == 0:
                            run.expected_weight = expected_weight(run.losses[0].weight, run.losses[0].examples)
                        self._backward(run, loss_scale, seed, step)
        result = self._finish(run)
        if settle:
            self._written.settle()
        return result

    def evaluate(self, micro_batches: Sequence[MicroBatch], after_each: Callable[[], None]) -> PassResult:
        """Forward of all micro-batches, in order, without gradients. Buffers are afterwards as they were.

        A stage that is faster than the next one waits for it, with few messages in memory.
        """
        run = self._begin(micro_batches, ())
        as_now = self._written.as_before([*self._written.homes.values()])
        with torch.no_grad(), as_now, generators_left_as_found(self._device):
            for number, micro_batch in enumerate(micro_batches):
                if self._links.activations_out is not None:
                    self._links.activations_out.wait_for_room(_EVALUATED_AHEAD)
                self._departure.wait_until(lambda: run.activations.arrived > run.forwards)
                with run.timer.measure(Op.F.name, number):
                    outputs = self._run_stage(micro_batch, run.activations.take(number, self._device))
                    self._emit(run, outputs, number)
                run.forwards += 1
                run.activations.release()
                after_each()
        return self._finish(run)

    def _begin(self, micro_batches: Sequence[MicroBatch], gradients: Sequence[Boundary]) -> _Pass:
        position, sizes = self._position, [micro_batch.examples for micro_batch in micro_batches]
        cap = max(1, stash_cap(position.policy.code, position.stage, position.p, len(sizes), position.run_ahead))
        # The stage before this one has at most one micro-batch more in flight. So with room for one more here, its
        # messages never have to wait, and the next one is here when a backward has made place for its forward.
        run = _Pass(
            micro_batches,
            PassTimer(self._device),
            _Intake(self._links.activations_in, self._stage.receives, sizes, cap + 1),
            _Intake(self._links.gradients_in, gradients, sizes, cap),
        )
        run.activations.open()
        return run

    def _finish(self, run: _Pass) -> PassResult:
        for outbox in (self._links.activations_out, self._links.gradients_out):
            if outbox is not None:
                outbox.drain()
        usual, wait_us = run.timer.finish(self._timeline)
        self._usual = usual
        return PassResult(
            loss_sum=sum(loss.total for loss in run.losses),
            weight=sum(loss.weight for loss in run.losses),
            examples=sum(loss.examples for loss in run.losses),
            expected_weight=run.expected_weight,
            forward_us=usual.forward_us,
            backward_us=usual.backward_us,
            wait_us=wait_us,
        )

    def _choose_or_wait(self, run: _Pass) -> int:
        action = WAIT

        def can_act() -> bool:
            nonlocal action
            action = self._choose(run)
            return action != WAIT

        self._departure.wait_until(can_act, None if self._forecast is None else self._recheck_s)
        return action

    def _choose(self, run: _Pass) -> int:
        position = self._position
        # Where no gradient comes from below, a backward may follow its forward at once.
        gradients = run.gradients.arrived if run.gradients.has_source else run.forwards
        due_us = -1.0
        if self._forecast is not None and run.gradients.has_source:
            self._forecast.arrived(gradients, run.gradients.last_arrival_ns)
            due_us = self._forecast.due_us(time.perf_counter_ns())
        return choose(
            position.policy.code,
            position.stage,
            position.p,
            len(run.micro_batches),
            position.run_ahead,
            position.recompute,
            run.forwards,
            run.recomputes,
            run.backwards,
            run.activations.arrived,
            gradients,
            self._usual.forward_us,
            self._usual.recompute_us,
            due_us,
        )

    def _recheck_s(self) -> float:
        """When a stage that waits should choose again although nothing has arrived."""
        assert self._forecast is not None
        return self._forecast.changes_in_s(time.perf_counter_ns())

    def _forward(self, run: _Pass, seed: int, step: int) -> None:
        number, micro_batch = run.forwards, run.micro_batches[run.forwards]
        received = run.activations.take(number, self._device)
        for tensor, boundary in zip(received, self._stage.receives, strict=False):
            tensor.requires_grad_(boundary.requires_grad)
        in_flight = _InFlight(micro_batch, received)
        before = self._written.next_forward()
        with torch.set_grad_enabled(not self._position.recompute), self._streams(seed, step, micro_batch):
            outputs = self._run_stage(micro_batch, received)
        self._emit(run, outputs, number)
        if self._position.recompute:
            in_flight.buffers = before
        else:
            in_flight.outputs = outputs
        run.in_flight[number] = in_flight
        run.forwards += 1
        if number == 0:
            run.gradients.open()  # only now: the next stage is waiting for this forward, and no gradient comes before
            if self._forecast is not None:
                self._forecast.first_forward(time.perf_counter_ns())

    def _recompute(self, run: _Pass, seed: int, step: int) -> None:
        in_flight = run.in_flight[run.recomputes]
        as_before = self._written.as_before(in_flight.buffers)
        with torch.enable_grad(), as_before, self._streams(seed, step, in_flight.micro_batch):
            in_flight.outputs = self._run_stage(in_flight.micro_batch, in_flight.received)
        run.recomputes += 1

    def _backward(self, run: _Pass, loss_scale: float, seed: int, step: int) -> None:
        number = run.backwards
        in_flight = run.in_flight.pop(number)
        assert in_flight.outputs is not None, "choose gave B before R"
        if self._stage.is_last:
            weight = run.losses[number].weight
            # A mean over nothing is NaN, and so may be its gradients: a micro-batch without weight has none.
            outputs = in_flight.outputs[:1] if weight else []
            gradients = [torch.full_like(loss, loss_scale * weight / run.expected_weight) for loss in outputs]
        else:
            gradients = run.gradients.take(number, self._device)
            outputs = [o for o, b in zip(in_flight.outputs, self._stage.sends, strict=True) if b.requires_grad]
        # A boundary that needs gradients in general may still hold a tensor that nothing trainable led to.
        pairs = [(o, g) for o, g in zip(outputs, gradients, strict=True) if o.requires_grad]
        if pairs:
            # Activation checkpointing in the user's model runs parts of the forward again, which draw the same numbers.
            again = self._backward_context(in_flight.micro_batch.inputs, in_flight.received)
            with again, self._streams(seed, step, in_flight.micro_batch):
                torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
        if self._links.gradients_out is not None and self._gradients_sent:
            wanted = [t for t, b in zip(in_flight.received, self._stage.receives, strict=True) if b.requires_grad]
            self._links.gradients_out.send([torch.zeros_like(t) if t.grad is None else t.grad for t in wanted], number)
        run.backwards += 1
        run.activations.release()
        run.gradients.release()

    def _run_stage(self, micro_batch: MicroBatch, received: list[Tensor]) -> list[Tensor]:
        """The stage's forward; guards what must stay as it is for a recompute, which would else be silently wrong."""
        inputs = {name: _to_device(value, self._device) for name, value in micro_batch.inputs.items()}
        kept = [*(value for value in micro_batch.inputs.values() if isinstance(value, Tensor)), *received]
        versions = [tensor._version for tensor in kept]
        with self._forward_context():
            outputs = self._stage.forward(inputs, received)
        if [tensor._version for tensor in kept] != versions:
            self._refuse_changed(micro_batch, kept, versions)
        return [outputs] if isinstance(outputs, Tensor) else list(outputs)

    def _refuse_changed(self, micro_batch: MicroBatch, kept: Sequence[Tensor], versions: Sequence[int]) -> NoReturn:
        names = [f"the input {name!r}" for name, value in micro_batch.inputs.items() if isinstance(value, Tensor)]
        names += [f"what it receives, {boundary.name!r}," for boundary in self._stage.receives]
        changed = (tensor._version != version for tensor, version in zip(kept, versions, strict=True))
        name = next(name for name, was_changed in zip(names, changed, strict=True) if was_changed)
        raise RuntimeError(
            f"stage {self._position.stage}: the model changes {name} in place, which Varuna needs unchanged: "
            "write it out of place (y = x + 1, not x += 1)"
        )

    def _emit(self, run: _Pass, outputs: list[Tensor], number: int) -> None:
        if self._stage.is_last:
            run.losses.append(WeightedLoss(outputs, run.micro_batches[number].examples))
        elif self._links.activations_out is not None and outputs:
            self._links.activations_out.send(outputs, number)

    def _streams(self, seed: int, step: int, micro_batch: MicroBatch) -> AbstractContextManager[None]:
        return self._random.running(self._stage, seed, step, micro_batch)


class _Intake:
    """The messages of one pass from one link. At any time there are buffers for at most `room` of them: room is made
    ahead, and a message takes its own until it is released.
    """

    def __init__(self, inbox: Inbox | None, boundaries: Sequence[Boundary], sizes: Sequence[int], room: int) -> None:
        self.has_source = inbox is not None and len(boundaries) > 0
        self._inbox = inbox if self.has_source else None
        self._boundaries = boundaries
        self._sizes = sizes
        self._before = 0 if self._inbox is None else self._inbox.arrived
        self._room = room
        self._posted = 0

    def open(self) -> None:
        """Makes the room that there is to begin with."""
        for _ in range(min(self._room, len(self._sizes))):
            self._post()

    @property
    def arrived(self) -> int:
        """Messages of this pass that are here; all of them when there is nobody to send any."""
        return len(self._sizes) if self._inbox is None else self._inbox.arrived - self._before

    @property
    def last_arrival_ns(self) -> int:
        """When the newest message came; only with a source."""
        return 0 if self._inbox is None else self._inbox.last_arrival_ns

    def take(self, number: int, device: torch.device) -> list[Tensor]:
        """The tensors of one micro-batch, on the device."""
        if self._inbox is None:
            return []
        return self._inbox.take(self._before + number, device)

    def release(self) -> None:
        """The oldest message taken is needed no more: its room is the next one's."""
        if self._posted < len(self._sizes):
            self._post()

    def _post(self) -> None:
        if self._inbox is not None:
            examples = self._sizes[self._posted]
            self._inbox.post([TensorSpec(b.shape_for(examples), b.dtype) for b in self._boundaries], self._posted)
        self._posted += 1


def _to_device(value: Any, device: torch.device) -> Any:
    """A tensor, or all tensors in nested containers. Containers are new ones: the model may change them."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    return tree_map(lambda leaf: leaf.to(device, non_blocking=True) if isinstance(leaf, Tensor) else leaf, value)


def cut_inputs(
    inputs: Mapping[str, Any], sizes: Sequence[int], first_index: int, first_example: int = 0
) -> list[MicroBatch]:
    """Cuts a replica's inputs into micro-batches of `sizes`, numbered from `first_index` in the global batch.

    `first_example`: that of the first of them, in the global batch too.
    """
    batches = []
    start = 0
    for offset, size in enumerate(sizes):
        part = take_examples(inputs, slice(start, start + size))
        batches.append(MicroBatch(first_index + offset, size, part, first_example + start))
        start += size
    return batches
