"""`Varuna` in a plain process: P = D = 1, and the arguments that it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from varuna import CutPoint, Varuna
from varuna.checkpoint import CheckpointError
from varuna.data import Batches


class Regression(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 1)
        self.dropout = nn.Dropout(dropout)
        self.cut_point = CutPoint()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.second(self.cut_point(self.dropout(self.first(x).tanh()))), y)


def batch(size: int, device: str = "cpu") -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(size)
    return {"x": torch.randn(size, 3, generator=generator), "y": torch.randn(size, 1, generator=generator)}


def wrapped(model: nn.Module | None = None, **options: Any) -> tuple[Varuna, torch.optim.Optimizer]:
    model = Varuna(model or Regression(), get_batch_fn=batch, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model.set_optimizer(optimizer)
    return model, optimizer


@pytest.mark.parametrize("options", [{}, {"batch_size": 6, "chunk_size": 4}])
def test_a_step_is_what_plain_pytorch_does(options: dict[str, int]) -> None:
    plain = Regression()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    model, _ = wrapped(**options)
    for _ in range(3):
        optimizer.zero_grad()
        expected = plain(**batch(6))
        expected.backward()
        optimizer.step()
        loss, overflow, norm = model.step(batch(6))
        assert loss == pytest.approx(expected.item(), rel=1e-6)
        assert not overflow
        assert norm == pytest.approx(float(nn.utils.get_total_norm([p.grad for p in plain.parameters()])), rel=1e-6)
    for (name, ours), (_, theirs) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, msg=name)
        torch.testing.assert_close(ours.grad, theirs.grad, msg=name)


def test_another_batch_than_agreed_is_still_its_own_mean() -> None:
    agreed, _ = wrapped(batch_size=8, chunk_size=4)
    free, _ = wrapped()
    for size in (8, 5):
        assert agreed.step(batch(size)) == pytest.approx(free.step(batch(size)), rel=1e-5)
    for ours, theirs in zip(agreed.parameters(), free.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_evaluate_leaves_modes_and_gradients_alone() -> None:
    model, _ = wrapped(Regression(dropout=0.5))
    model.step(batch(4))
    gradients = [p.grad.clone() for p in model.parameters()]
    plain = Regression(dropout=0.5).eval()
    plain.load_state_dict(model.state_dict())
    assert model.evaluate(batch(4)) == pytest.approx(plain(**batch(4)).item(), rel=1e-6)
    assert model.evaluate(batch(4)) == model.evaluate(batch(4))
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))
    with pytest.raises(ValueError, match="batch_size=5"):
        model.evaluate(batch(4), batch_size=5)


def test_a_checkpoint_brings_everything_back(tmp_path: Path) -> None:
    def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

    model, optimizer = wrapped(Regression(dropout=0.5))
    scheduler = schedule(optimizer)
    model.register_state("scheduler", scheduler)
    for _ in range(2):
        model.step(batch(4))
        scheduler.step()
    assert model.checkpoint(str(tmp_path))
    expected = [model.step(batch(4)) for _ in range(2)]

    again, optimizer = wrapped(Regression(dropout=0.5))
    again.load_checkpoint(str(tmp_path), 2)
    scheduler = schedule(optimizer)
    again.register_state("scheduler", scheduler)  # registered after the load, it still gets its state
    assert scheduler.last_epoch == 2
    assert [again.step(batch(4)) for _ in range(2)] == expected

    with pytest.raises(CheckpointError, match="varuna_ckpt_9"):
        again.load_checkpoint(str(tmp_path), 9)
    with pytest.raises(ValueError, match="registered already"):
        again.register_state("scheduler", scheduler)
    with pytest.raises(ValueError, match=r"names that begin with 'varuna\.' are Varuna's own"):
        again.register_state("varuna.mine", scheduler)


def test_resume_without_a_job_starts_at_nothing() -> None:
    model, _ = wrapped()
    assert model.resume() == 0


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="contradicts"):
        Varuna(Regression(), get_batch_fn=batch, fp16=True, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="get_batch_fn is missing"):
        Varuna(Regression())
    model = Varuna(Regression(), get_batch_fn=batch)
    with pytest.raises(RuntimeError, match="set_optimizer"):
        model.step(batch(4))
    with pytest.raises(ValueError, match="not of this stage"):
        model.set_optimizer(torch.optim.SGD(Regression().parameters(), lr=0.1))
    with pytest.raises(RuntimeError, match="step\\(inputs\\)"):
        model(**batch(4))


class ChangesItsInput(Regression):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x.mul_(2), y)


def test_a_change_in_place_that_would_spoil_a_recompute_is_reported() -> None:
    model, _ = wrapped(ChangesItsInput())
    with pytest.raises(RuntimeError, match="the input 'x' in place"):
        model.step(batch(4))
    with pytest.raises(RuntimeError, match="failed half-way"):
        model.step(batch(4))


class Unkeepable:
    """A state that a checkpoint can hold only on request."""

    def __init__(self) -> None:
        self.value: Any = print

    def state_dict(self) -> dict[str, Any]:
        return {"callback": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["callback"]


def test_a_checkpoint_that_fails_raises_and_training_can_go_on(tmp_path: Path) -> None:
    model, optimizer = wrapped()
    state = Unkeepable()
    model.register_state("mine", state)
    model.step(batch(4))
    with pytest.raises(CheckpointError, match=r"step 1 was not saved in .*varuna_ckpt_1: /?user/mine/callback"):
        model.checkpoint(str(tmp_path))
    model.step(batch(4))
    state.value = optimizer.param_groups[0]["lr"] = (1 - 1.0001) ** 0.5  # as NVIDIA's BERT has it at its end
    assert model.checkpoint(str(tmp_path))
    state.value, optimizer.param_groups[0]["lr"] = 0, 0.1
    model.load_checkpoint(str(tmp_path), 2)
    assert state.value == optimizer.param_groups[0]["lr"] == (1 - 1.0001) ** 0.5


def test_a_checkpoint_that_fails_in_the_background_raises_at_the_next_call(tmp_path: Path) -> None:
    model, _ = wrapped()
    state = Unkeepable()
    model.register_state("mine", state)
    store, copies = str(tmp_path / "store"), str(tmp_path / "copies")
    assert model.checkpoint(store, step=1, tmpdir=copies)
    state.value = 1
    model.step(batch(4))
    with pytest.raises(CheckpointError, match="user/mine/callback"):
        model.checkpoint(store)
    assert model.checkpoint(store, tmpdir=copies)
    assert model.checkpoint(store, step=2, keep=1)
    assert model.checkpoint(store, step=3, keep=1)
    assert {folder.name for folder in (tmp_path / "store").iterdir()} == {"varuna_ckpt_1", "varuna_ckpt_3"}
    with pytest.raises(ValueError, match="keep=0"):
        model.checkpoint(store, keep=0)


def test_an_evaluation_over_a_finite_set_counts_each_example_of_its_whole_batches_once() -> None:
    """As docs/training-script.md shows it."""
    examples = [{"x": torch.full((2,), float(number))} for number in range(11)]

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = (x * self.scale).mean()
            return loss

    model = Varuna(Mean(), get_batch_fn={"x": torch.ones(4, 2)}, chunk_size=2)
    validation = Batches(examples, global_batch=4, shuffle=False)
    rounds = len(examples) // validation.global_batch
    model.set_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    mean = sum(model.evaluate(validation.batch(index)) for index in range(1, rounds + 1)) / rounds
    assert mean == pytest.approx(sum(range(8)) / 8)
