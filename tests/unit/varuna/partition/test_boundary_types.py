"""Boundaries that cross in bf16: half the bytes, and what the model computes with them.

Letters: B examples, H hidden.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stages_by_hand import gradients, run_by_hand
from varuna import CutPoint, Varuna
from varuna.calibration.optimizer_costs import OptimizerSetup
from varuna.calibration.profile import calibrate
from varuna.calibration.subject import CalibrationSubject
from varuna.optim.precision import TrainingPrecision
from varuna.partition import ModelMap, build_stage, trace

B, H = 6, 8
CPU = torch.device("cpu")
BF16 = TrainingPrecision(torch.bfloat16, "cpu")


class Sum(nn.Module):
    """A module, so that later stages can get what it returns."""

    def forward(self, way: Tensor, x: Tensor) -> Tensor:
        return way + x.mean()


class Sums(nn.Module):
    """Three layers with fp32 sums between them, and a number that is summed up on the way."""

    def __init__(self, residual: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(H, H) for _ in range(3))
        self.cuts = nn.ModuleList(CutPoint() for _ in range(2))
        self.sums = nn.ModuleList(Sum() for _ in range(3))
        self.residual = residual

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        way = torch.zeros(())
        for number, layer in enumerate(self.layers):
            x = (x if self.residual else 0.5) + layer(x).float()
            way = self.sums[number](way, x)
            x = self.cuts[number](x) if number < 2 else x
        return F.mse_loss(x, y) + way


def batch(size: int, device: str = "cpu") -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {"x": torch.randn(size, H), "y": torch.randn(size, H)}


def map_of(model: nn.Module) -> ModelMap:
    with BF16.dry_run_context():
        return trace(model, batch(2))


def train(model: nn.Module, model_map: ModelMap) -> tuple[Tensor, list[list[Tensor]], dict[str, Tensor]]:
    """(loss, what the stages sent, gradients)."""
    with BF16.forward_context():
        stages = [
            build_stage(copy.deepcopy(model), model_map, section, section + 1, device=CPU) for section in range(3)
        ]
        loss, sent = run_by_hand(stages, batch(B))
    return loss, sent, gradients(stages)


def count_bytes(sent: list[list[Tensor]]) -> int:
    """Of what has a batch."""
    return sum(tensor.nbytes for each in sent for tensor in each if tensor.dim())


def test_it_is_exact_where_autocast_computes_in_bf16_behind_the_boundary() -> None:
    model = Sums(residual=False)
    as_made = map_of(model)
    loss, sent, before = train(model, as_made)
    small_loss, small, after = train(model, replace(as_made, crosses_as=torch.bfloat16))
    assert torch.equal(small_loss, loss)
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert count_bytes(small) * 2 == count_bytes(sent) > 0
    assert {tensor.dtype for each in small for tensor in each if tensor.dim()} == {torch.bfloat16}
    assert {tensor.dtype for each in small for tensor in each if not tensor.dim()} == {torch.float32}


def test_a_residual_path_is_rounded_at_each_boundary() -> None:
    model = Sums(residual=True)
    as_made = map_of(model)
    loss, sent, before = train(model, as_made)
    small_loss, small, after = train(model, replace(as_made, crosses_as=torch.bfloat16))
    assert count_bytes(small) * 2 == count_bytes(sent) > 0
    torch.testing.assert_close(small_loss, loss, rtol=2e-2, atol=2e-2)
    for name, gradient in before.items():
        torch.testing.assert_close(after[name], gradient, rtol=5e-2, atol=2e-2)
    assert not all(torch.equal(after[name], before[name]) for name in before)


def test_the_profile_counts_the_smaller_messages() -> None:
    model = Sums(residual=True)
    as_made = map_of(model)

    def measure(model_map: ModelMap) -> list[tuple[int, int]]:
        subject = CalibrationSubject(model, model_map, batch, CPU, BF16)
        optimizer = torch.optim.SGD(model.parameters())
        profile = calibrate(subject, OptimizerSetup(optimizer), global_batch=4, micro_batches=[4], budget_s=0.1)
        assert profile is not None
        at = [section.measurements[0] for section in profile.sections]
        return [(one.input_bytes, one.output_bytes) for one in at]

    whole, number = 4 * H * 4, 4
    large = measure(as_made)
    assert [out for _, out in large[:2]] == [whole + number] * 2
    small = measure(replace(as_made, crosses_as=torch.bfloat16))
    assert [out for _, out in small[:2]] == [whole // 2 + number] * 2
    assert small[1][0] - small[0][1] == large[1][0] - large[0][1] > 0, "an input of the model"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"boundaries": "bf16"}, r"boundaries='bf16', but the model computes in torch.float32: train with dtype="),
        ({"boundaries": "fp8", "dtype": torch.bfloat16}, "boundaries='fp8': give 'bf16', or leave it out"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Varuna(Sums(residual=True), get_batch_fn=batch, **options)
