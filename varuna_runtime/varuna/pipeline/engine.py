"""The engine: runs one stage's share of a mini-batch, one action at a time, as the planner's `choose` decides.

Letters: P stages, N micro-batches of this replica in this pass, F forward, R recompute, B backward.

The engine plans nothing ahead. After each action it calls `choose` with what is done and what has arrived; WAIT means
that the engine waits until a message arrives or the worker must leave. Micro-batches go in order on every link.

An accelerator runs ops after the host has launched them. The engine chooses an op when at most one is left to finish:
the device always has work, and a gradient that arrives is not behind forwards that were launched long before it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import NoReturn

import torch
from torch import Tensor, nn

from varuna.devices.accelerator import is_accelerator
from varuna.devices.copy_stream import CopyStream
from varuna.diagnostics.timeline import Timeline
from varuna.distributed.departure import Departure
from varuna.partition.stages.written_buffers import WrittenBuffers
from varuna.pipeline.gradient_forecast import GradientForecast
from varuna.pipeline.loss_weight import WeightedLoss
from varuna.pipeline.micro_batches import MicroBatch, copy_containers, start_loading
from varuna.pipeline.pass_state import (
    NO_HOOKS,
    ForwardLimit,
    MessageIntake,
    PassHooks,
    PassResult,
    PassState,
    PassTimes,
    Stash,
)
from varuna.pipeline.pass_timer import OpTimes, PassTimer
from varuna.pipeline.random_streams import RandomStreams, preserve_generators
from varuna.pipeline.stage_setting import BoundaryShape, RunnableStage, StageContext, StageLinks, StagePosition
from varuna_planner.schedule.policies import (
    WAIT,
    Op,
    Policy,
    RecomputeTiming,
    StageOrders,
    StageProgress,
    choose,
    require_executable,
    stash_cap,
)

__all__ = ["Engine"]

_OP_NAMES = tuple(op.name for op in Op)
"""By number, because looking up a member of an enum for every op would take as long as choosing it."""

_MESSAGES_AHEAD_IN_EVALUATION = 2
"""Messages that may wait for the next stage in an evaluation: one is on its way while the next is computed."""


class Engine:
    """Runs a stage for whole passes: `run_training_pass` with backward, `run_evaluation_pass` without."""

    def __init__(
        self,
        stage: RunnableStage,
        *,
        position: StagePosition,
        links: StageLinks,
        device: torch.device,
        departure: Departure,
        context: StageContext | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        """`timeline` gets every op.

        Raises ValueError for a policy that can only be simulated.
        """
        require_executable(position.policy)
        context = context or StageContext()
        self._stage = stage
        self._forward_context = context.forward
        self._backward_context = context.backward
        self._position = position
        self._links = links
        self._device = device
        self._departure = departure
        self._timeline = timeline or Timeline()
        # Only the policy `varuna` needs to know when gradients are due.
        self._forecast: GradientForecast | None = None
        if position.policy is Policy.VARUNA:
            self._forecast = GradientForecast(position.p - 1 - position.stage)
        self._op_times = OpTimes()
        self._input_copies = CopyStream()
        self.update_stage(context.written or WrittenBuffers(nn.Module(), {}), context.random or RandomStreams(device))

    @property
    def longest_bubble_s(self) -> float:
        """About how long a wait of the coming pass may be, with stages as slow as this one was in the pass before."""
        times = self._op_times
        return self._position.p * (times.forward_us + times.recompute_us + times.backward_us) / 1e6

    def update_stage(self, written: WrittenBuffers, random: RandomStreams) -> None:
        """To be called between passes when what the stage receives, sends, writes or draws has changed."""
        self._written, self._random = written, random
        self._gradients_sent = [b for b in self._stage.receives if b.requires_grad]
        self._gradients_received = [b for b in self._stage.sends if b.requires_grad]

    def run_training_pass(
        self,
        micro_batches: Sequence[MicroBatch],
        *,
        expected_weight: Callable[[float, int], float],
        seed: int,
        step: int,
        loss_scale: float = 1.0,
        write_back_buffers: bool = True,
        hooks: PassHooks = NO_HOOKS,
    ) -> PassResult:
        """Runs forward and backward of all micro-batches.

        Adds to the parameters' gradients the gradient of the sum over micro-batches of
        loss_scale * weight / expected weight * mean loss, where the weight of a micro-batch is what the model returns
        with the loss, or the number of examples.

        Args:
            expected_weight: called once, on the last stage only, with the weight and the number of examples of the
                first micro-batch (or zeros without one); returns the approximate sum of the global batch's weights.
            loss_scale: not part of `PassResult.loss_sum`.
            write_back_buffers: if false, the caller decides whether the buffers that the forward writes keep their new
                values (`WrittenBuffers.write_back` or `discard_writes`).
        """
        self._timeline.begin_step(step)
        run = self._begin_pass(micro_batches, self._gradients_received)
        n = len(micro_batches)
        if self._forecast is not None:
            self._forecast.begin_pass(self._op_times)
        if self._stage.is_last and not n:
            run.expected_weight = expected_weight(0.0, 0)
        with preserve_generators(self._device):
            while run.backwards < run.end:
                action = self._choose_or_wait(run, hooks.limit)
                if action == WAIT:  # all that has begun is done, and the pass ends here
                    break
                number = (run.forwards, run.recomputes, run.backwards)[action]
                if action == Op.B and hooks.before_backward is not None:
                    hooks.before_backward()  # not timed: a wait is no part of the op
                with run.timer.measure_op(_OP_NAMES[action], number):
                    if action == Op.F:
                        self._run_forward(run, seed, step)
                    elif action == Op.R:
                        self._run_recompute(run, seed, step)
                    else:
                        if hooks.before_last_backward is not None and run.backwards == n - 1:
                            hooks.before_last_backward()
                        if self._stage.is_last and run.backwards == 0:
                            run.expected_weight = expected_weight(run.losses[0].weight, run.losses[0].examples)
                        self._run_backward(run, loss_scale, seed, step)
                        if hooks.after_backward is not None and run.backwards < n:
                            hooks.after_backward(run.backwards, run)
        result = self._finish_pass(run)
        if write_back_buffers:
            self._written.write_back()
        return result

    def run_evaluation_pass(
        self, micro_batches: Sequence[MicroBatch], after_each: Callable[[], None], *, seed: int, step: int
    ) -> PassResult:
        """Runs the forward of all micro-batches, in order, without gradients. Buffers keep their values.

        A stage that is faster than the next one waits for it, so that few messages are in memory.

        Args:
            seed: of this evaluation (`evaluation_seed`).
            step: the newest one.
        """
        run = self._begin_pass(micro_batches, ())
        unchanged_buffers = self._written.restore_values([*self._written.homes.values()])
        with torch.no_grad(), unchanged_buffers, preserve_generators(self._device):
            for number in range(len(micro_batches)):
                if self._links.activations_out is not None:
                    self._links.activations_out.wait_for_room(_MESSAGES_AHEAD_IN_EVALUATION)
                self._departure.wait_until(lambda: run.activations.arrived > run.forwards)
                with run.timer.measure_op(Op.F.name, number):
                    micro_batch = self._take_inputs(run, number)
                    received = run.activations.take_message(number, self._device)
                    with self._seeding_sections(seed, step, micro_batch):
                        outputs = self._run_stage(micro_batch, received)
                    self._send_outputs(run, outputs, number)
                    self._start_loading(run, number + 1)
                run.forwards += 1
                run.activations.release_oldest()
                after_each()
        return self._finish_pass(run)

    def _begin_pass(self, micro_batches: Sequence[MicroBatch], gradients: Sequence[BoundaryShape]) -> PassState:
        position, sizes = self._position, [micro_batch.examples for micro_batch in micro_batches]
        cap = max(1, stash_cap(position.policy.code, position.stage, position.p, len(sizes), position.run_ahead))
        # The stage before this one has at most one micro-batch more in flight. With room for one more here, its
        # messages never wait, and the next message has arrived when a backward has made room for its forward.
        run = PassState(
            micro_batches,
            PassTimer(self._device, sizes),
            MessageIntake(self._links.activations_in, self._stage.receives, sizes, cap + 1),
            MessageIntake(self._links.gradients_in, gradients, sizes, cap),
        )
        run.end = run.may_begin = len(sizes)
        run.activations.post_first_receives()
        return run

    def _finish_pass(self, run: PassState) -> PassResult:
        for sender in (self._links.activations_out, self._links.gradients_out):
            if sender is not None:
                sender.wait_until_sent()
        op_times, wait_us = run.timer.finish_pass(self._timeline)
        if run.forwards:
            self._op_times = op_times
        return run.sum_up(len(run.losses), PassTimes(op_times.forward_us, op_times.backward_us, wait_us))

    def _choose_or_wait(self, run: PassState, limit: ForwardLimit | None) -> int:
        """The next action; WAIT: the pass ends early, and all that has begun is done."""
        action = WAIT
        run.timer.wait_for_last_but_one()

        def can_act() -> bool:
            nonlocal action
            if limit is not None:
                run.may_begin = limit.limit_forwards(run.forwards)
                run.end = run.end if limit.end is None else limit.end
            action = self._choose(run) if run.backwards < run.end else WAIT
            return action != WAIT or run.backwards >= run.end

        self._departure.wait_until(can_act, None if self._forecast is None else self._recheck_s)
        return action

    def _choose(self, run: PassState) -> int:
        position = self._position
        # Where no gradients are received, a backward may follow its forward at once.
        gradients = run.gradients.arrived if run.gradients.has_source else run.forwards
        due_us = -1.0
        if self._forecast is not None and run.gradients.has_source:
            self._forecast.record_arrivals(gradients, run.gradients.last_arrival_ns)
            due_us = self._forecast.due_us(time.perf_counter_ns())
        return choose(
            StageOrders(
                policy=position.policy.code,
                stage=position.stage,
                P=position.p,
                N=run.may_begin,
                run_ahead=position.run_ahead,
                recompute=position.recompute,
            ),
            StageProgress(
                forwards=run.forwards,
                recomputes=run.recomputes,
                backwards=run.backwards,
                activations=run.activations.arrived,
                gradients=gradients,
            ),
            RecomputeTiming(self._op_times.forward_us, self._op_times.recompute_us, due_us),
        )

    def _recheck_s(self) -> float:
        """Seconds after which a waiting stage should choose again although nothing has arrived."""
        assert self._forecast is not None
        return self._forecast.changes_in_s(time.perf_counter_ns())

    def _run_forward(self, run: PassState, seed: int, step: int) -> None:
        number, micro_batch = run.forwards, self._take_inputs(run, run.forwards)
        received = run.activations.take_message(number, self._device)
        for tensor, boundary in zip(received, self._stage.receives, strict=False):
            tensor.requires_grad_(boundary.requires_grad)
        stash = Stash(micro_batch, received, buffers=self._written.begin_forward())
        with torch.set_grad_enabled(not self._position.recompute), self._seeding_sections(seed, step, micro_batch):
            outputs = self._run_stage(micro_batch, received)
        self._send_outputs(run, outputs, number)
        self._start_loading(run, number + 1)
        if not self._position.recompute:
            stash.outputs = outputs
        run.stashes[number] = stash
        run.forwards += 1
        if number == 0:
            # Only now: the next stage waits for this forward, and no gradient arrives before it.
            run.gradients.post_first_receives()
            if self._forecast is not None:
                self._forecast.record_first_forward(time.perf_counter_ns())

    def _run_recompute(self, run: PassState, seed: int, step: int) -> None:
        stash = run.stashes[run.recomputes]
        restored = self._written.restore_values(stash.buffers)
        with torch.enable_grad(), restored, self._seeding_sections(seed, step, stash.micro_batch):
            stash.outputs = self._run_stage(stash.micro_batch, stash.received)
        run.recomputes += 1

    def _run_backward(self, run: PassState, loss_scale: float, seed: int, step: int) -> None:
        number = run.backwards
        stash = run.stashes.pop(number)
        assert stash.outputs is not None, "choose gave B before R"
        if self._stage.is_last:
            weight = run.losses[number].weight
            # A mean over nothing is NaN, and its gradients may be: a micro-batch without weight contributes none.
            outputs = stash.outputs[:1] if weight else []
            gradients = [torch.full_like(loss, loss_scale * weight / run.expected_weight) for loss in outputs]
        else:
            gradients = run.gradients.take_message(number, self._device)
            outputs = [o for o, b in zip(stash.outputs, self._stage.sends, strict=True) if b.requires_grad]
        # A boundary that requires gradients may still hold a tensor that does not depend on anything trainable.
        pairs = [(o, g) for o, g in zip(outputs, gradients, strict=True) if o.requires_grad]
        if pairs:
            # Activation checkpointing in the user's model runs parts of the forward again. They draw the same numbers
            # and find the same buffers; what they write to these is dropped, because the forward has written it.
            again = self._backward_context(stash.micro_batch.inputs, stash.received)
            restored = self._written.restore_values(stash.buffers)
            with again, restored, self._seeding_sections(seed, step, stash.micro_batch):
                torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
        if self._links.gradients_out is not None and self._gradients_sent:
            wanted = [t for t, b in zip(stash.received, self._stage.receives, strict=True) if b.requires_grad]
            self._links.gradients_out.send_message(
                [torch.zeros_like(t) if t.grad is None else t.grad for t in wanted], number
            )
        run.backwards += 1
        run.activations.release_oldest()
        run.gradients.release_oldest()

    def _take_inputs(self, run: PassState, number: int) -> MicroBatch:
        """The micro-batch with its inputs on the device, where they stay until the backward: a recompute reads them
        again."""
        if run.next_inputs is None:
            self._start_loading(run, number)
        loading, run.next_inputs = run.next_inputs, None
        micro_batch = run.micro_batches[number]
        return micro_batch if loading is None else replace(micro_batch, inputs=loading.take())

    def _start_loading(self, run: PassState, number: int) -> None:
        """Starts to copy the inputs of a micro-batch, if there is one of this number: a stage that waits for the stage
        before has them when its activations arrive."""
        if is_accelerator(self._device) and number < len(run.micro_batches):
            run.next_inputs = start_loading(run.micro_batches[number].inputs, self._device, self._input_copies)

    def _run_stage(self, micro_batch: MicroBatch, received: list[Tensor]) -> list[Tensor]:
        """Runs the stage's forward. Refuses changes in place that would make a recompute silently wrong.

        `micro_batch`: with its inputs on the device.
        """
        inputs = {name: copy_containers(value) for name, value in micro_batch.inputs.items()}
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
            f"stage {self._position.stage}: the model changes {name} in place, but Varuna needs it unchanged: "
            "write it out of place (y = x + 1, not x += 1)"
        )

    def _send_outputs(self, run: PassState, outputs: list[Tensor], number: int) -> None:
        if self._stage.is_last:
            run.losses.append(WeightedLoss(outputs, run.micro_batches[number].examples))
        elif self._links.activations_out is not None and outputs:
            self._links.activations_out.send_message(outputs, number)

    def _seeding_sections(self, seed: int, step: int, micro_batch: MicroBatch) -> AbstractContextManager[None]:
        return self._random.seeding_sections(self._stage, seed, step, micro_batch)
