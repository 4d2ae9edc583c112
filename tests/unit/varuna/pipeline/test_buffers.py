"""Buffers that forward writes, in a pipeline with micro-batches in flight: as one process has them, recomputed or not.

Letters: H hidden, N micro-batches.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.utils.checkpoint import checkpoint

from varuna.distributed.departure import Departure
from varuna.distributed.gloo import GlooGroup, connect_group
from varuna.distributed.link_connections import GlooConnection
from varuna.partition import Stage, build_stage, trace
from varuna.pipeline.engine import Engine
from varuna.pipeline.micro_batches import MicroBatch
from varuna.pipeline.stage_setting import StageContext, StageLinks, StagePosition
from varuna.pipeline.transport import LinkReceiver, LinkSender
from varuna_planner.schedule.policies import Policy
from waiting import DEADLINE_S
from written_buffers_script import H, Model

N = 5
LIMIT = timedelta(seconds=DEADLINE_S)


def batches() -> list[dict[str, Tensor]]:
    return [{"x": torch.randn(3, H, generator=torch.Generator().manual_seed(n))} for n in range(N)]


class CheckpointedModel(Model):
    """The backward runs its modules again."""

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(lambda x: self.norm(self.first(x)).tanh(), x, use_reentrant=False)
        y = checkpoint(self.last, self.cut(y), use_reentrant=False)
        assert isinstance(y, Tensor)
        return y.square().mean()


def pair() -> list[GlooGroup]:
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        made = [pool.submit(connect_group, store, rank, 2, address="127.0.0.1", timeout=LIMIT) for rank in range(2)]
        return [future.result() for future in made]


def run_two_stages(stages: list[Stage], *, recompute: bool) -> float:
    """A step of both, as threads; the sum of its losses."""
    down, up = pair(), pair()

    def run(stage: int) -> float:
        departure = Departure(lambda code: None)
        first = StageLinks(
            activations_out=LinkSender(GlooConnection(down[0], 1), peer=0, departure=departure),
            gradients_in=LinkReceiver(GlooConnection(up[0], 1), peer=0, pinned=False, departure=departure),
        )
        last = StageLinks(
            activations_in=LinkReceiver(GlooConnection(down[1], 0), peer=0, pinned=False, departure=departure),
            gradients_out=LinkSender(GlooConnection(up[1], 0), peer=0, departure=departure),
        )
        position = StagePosition(stage=stage, p=2, policy=Policy.GPIPE, run_ahead=0, recompute=recompute)
        engine = Engine(
            stages[stage],
            position=position,
            links=(first, last)[stage],
            device=torch.device("cpu"),
            departure=departure,
            context=StageContext(backward=stages[stage].running_again, written=stages[stage].written),
        )
        micro_batches = [MicroBatch(n, 3, inputs) for n, inputs in enumerate(batches())]
        return engine.run_training_pass(micro_batches, expected_weight=lambda *_: 3 * N, seed=0, step=1).loss_sum

    with ThreadPoolExecutor(2) as pool:
        return sum(future.result(timeout=DEADLINE_S) for future in [pool.submit(run, stage) for stage in range(2)])


def train_whole() -> tuple[Model, float]:
    """Plain PyTorch, without checkpointing: the trained model, and the sum of the losses."""
    whole, losses = Model(), 0.0
    for inputs in batches():
        loss = whole(**inputs)
        (loss / N).backward()
        losses += loss.item()
    return whole, losses


def check_trained(stage: Stage, whole: Model) -> None:
    held = dict(stage.module.named_buffers())
    for name, buffer in stage.buffers.items():
        assert held[name] is buffer  # what checkpoints read is what the model has
        torch.testing.assert_close(buffer, whole.get_buffer(name), msg=name)
    for name, parameter in stage.parameters.items():
        torch.testing.assert_close(parameter.grad, whole.get_parameter(name).grad, msg=name)


@pytest.mark.parametrize("model", [Model, CheckpointedModel])
@pytest.mark.parametrize("recompute", [False, True])
def test_every_micro_batch_writes_once_and_backward_finds_what_its_forward_saw(
    recompute: bool, model: type[Model]
) -> None:
    whole, losses = train_whole()
    model_map = trace(model(), batches()[0])
    stages = [build_stage(model(), model_map, stage, stage + 1, device="cpu") for stage in range(2)]

    assert run_two_stages(stages, recompute=recompute) == pytest.approx(3 * losses, rel=1e-5)

    for stage in stages:
        check_trained(stage, whole)
    assert stages[0].buffers["first.seen"].item() == N


@pytest.mark.parametrize("model", [Model, CheckpointedModel])
@pytest.mark.parametrize("policy", [Policy.WORK_CONSERVING, Policy.GPIPE])
def test_what_a_backward_runs_again_writes_no_buffer_twice(policy: Policy, model: type[Model]) -> None:
    whole, _ = train_whole()
    stage = build_stage(model(), trace(model(), batches()[0]), 0, 2, device="cpu")
    engine = Engine(
        stage,
        position=StagePosition(stage=0, p=1, policy=policy, run_ahead=0, recompute=False),
        links=StageLinks(),
        device=torch.device("cpu"),
        departure=Departure(lambda code: None),
        context=StageContext(backward=stage.running_again, written=stage.written),
    )
    micro_batches = [MicroBatch(n, 3, inputs) for n, inputs in enumerate(batches())]

    engine.run_training_pass(micro_batches, expected_weight=lambda *_: 3 * N, seed=0, step=1)

    check_trained(stage, whole)
    assert stage.buffers["norm.num_batches_tracked"].item() == N
