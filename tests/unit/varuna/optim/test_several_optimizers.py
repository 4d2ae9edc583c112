"""Several optimizers, what none of them holds, and stages that have nothing for an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import LBFGS, SGD, AdamW, Muon, Optimizer

from varuna import CutPoint, Varuna
from varuna.calibration.optimizer_costs import OptimizerCosts, OptimizerMemory, OptimizerTime
from varuna.inspection.document import optimizer_document
from varuna.optim.optimizers import allow_empty_stages, check_parameters, left_out, list_optimizers
from varuna.optim.script_steps import step_optimizers, take_over_steps
from varuna.optim.split_check import check_optimizer


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 1)
        self.cut_point = CutPoint()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.second(self.cut_point(self.first(x).tanh())), y)


def batch(size: int, device: str = "cpu") -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(size)
    return {"x": torch.randn(size, 3, generator=generator), "y": torch.randn(size, 1, generator=generator)}


def pair(parameters: Iterable[nn.Parameter]) -> list[Optimizer]:
    every = list(parameters)
    return [
        Muon([p for p in every if p.ndim == 2], lr=0.1),
        AdamW([p for p in every if p.ndim != 2], lr=0.01),
    ]


def wrapped(**options: Any) -> Varuna:
    return Varuna(Regression(), get_batch_fn=batch, **options)


def test_a_pair_trains_as_in_plain_pytorch_and_comes_back_from_a_checkpoint(tmp_path: Path) -> None:
    plain = Regression()
    optimizers = pair(plain.parameters())
    model = wrapped()
    model.set_optimizer(pair(model.parameters()))
    for step in range(4):
        if step == 2:
            assert model.checkpoint(str(tmp_path))
            model = wrapped()
            model.set_optimizer(pair(model.parameters()))
            model.load_checkpoint(str(tmp_path), 2)
        plain.zero_grad()
        expected = plain(**batch(6))
        expected.backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        for optimizer in optimizers:
            optimizer.step()
        loss, _, ours = model.step(batch(6), clip_grad_max_norm=0.1)
        assert (loss, ours) == (pytest.approx(expected.item(), rel=1e-6), pytest.approx(norm.item(), rel=1e-6))
    for (name, own), (_, theirs) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(own, theirs, msg=name)


def test_an_overflow_in_fp16_leaves_both_optimizers_alone() -> None:
    model = wrapped(fp16=True)
    model.set_optimizer(pair(model.parameters()), init_loss_scale=2.0**10)
    before = [p.clone() for p in model.parameters()]
    spoilt = next(iter(model.parameters())).register_hook(lambda gradient: gradient + torch.inf)
    assert model.step(batch(4))[1]
    spoilt.remove()
    assert all(torch.equal(*both) for both in zip(before, model.parameters(), strict=True))
    assert not model.step(batch(4))[1]
    assert not any(torch.equal(*both) for both in zip(before, model.parameters(), strict=True))


def test_what_is_refused() -> None:
    model = wrapped()
    muon, adamw = pair(model.parameters())
    with pytest.raises(ValueError, match="give at least one optimizer"):
        model.set_optimizer([])
    with pytest.raises(TypeError, match="got a dict"):
        model.set_optimizer([muon, {}])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="same optimizer twice"):
        model.set_optimizer([muon, muon])
    every = SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"first\.weight is in two optimizers \(Muon and SGD\)"):
        model.set_optimizer([muon, every])
    with pytest.raises(ValueError, match="evaluates the loss several times"):
        model.set_optimizer([LBFGS([muon.param_groups[0]["params"][0]]), adamw])
    model.set_optimizer([muon, adamw])
    model.set_optimizer([muon, adamw])
    with pytest.raises(ValueError, match=r"called before, with other optimizers: .*set_optimizer\(\[first, second\]\)"):
        model.set_optimizer(every)
    assert model.step(batch(4))


def test_trainable_parameters_that_no_optimizer_holds_are_named_once() -> None:
    model = wrapped()
    with structlog.testing.capture_logs() as log:
        model.set_optimizer(Muon([p for p in model.parameters() if p.ndim == 2]))
    (warning,) = [line["event"] for line in log if line["log_level"] == "warning"]
    assert warning.startswith("no optimizer holds first.bias, second.bias, so training never changes them: ")
    named = dict(model.named_parameters())
    named["second.bias"].requires_grad_(False)
    assert left_out([Muon([named["first.weight"]])], named) == ["first.bias", "second.weight"]


def test_the_report_of_an_inspection_has_all_optimizers() -> None:
    parameters = dict(Regression().named_parameters())
    muon, adamw = pair(parameters.values())
    findings = [finding for optimizer in (muon, adamw) for finding in check_optimizer(optimizer)]
    document = optimizer_document(["Muon", "AdamW"], findings, left_out([muon], parameters))
    assert document == {"class": "Muon and AdamW", "findings": [], "left_out": ["first.bias", "second.bias"]}


def test_each_parameter_costs_what_its_own_optimizer_takes() -> None:
    parameters = dict(Regression().named_parameters())
    costs = OptimizerCosts(
        pair(parameters.values()),
        [OptimizerMemory(4.0, 0), OptimizerMemory(8.0, 4)],
        [OptimizerTime(100.0, 1.0), OptimizerTime(10.0, 2.0)],
    )
    assert costs.bytes_for(parameters.values()) == 4 * (12 + 4) + 8 * (4 + 1) + 2 * 4
    assert costs.us_for([parameters["first.weight"], parameters["first.bias"]]) == 100 + 12 + 10 + 2 * 4


# ---------------------------------------------------------------- stages that have nothing for an optimizer


@pytest.fixture
def _one_stage_of_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Optimizer, "__init__", Optimizer.__init__)  # as it is again after the test
    allow_empty_stages(torch.device("cpu"))


TORCHS = [
    kind
    for kind in vars(torch.optim).values()
    if isinstance(kind, type) and issubclass(kind, Optimizer) and kind not in (Optimizer, LBFGS, torch.optim.SparseAdam)
]


@pytest.mark.usefixtures("_one_stage_of_several")
@pytest.mark.parametrize("kind", TORCHS)
def test_every_optimizer_of_torch_works_without_parameters(kind: Callable[..., Optimizer]) -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    given: Any
    for given in (
        [],
        iter([]),
        [{"params": []}, {"params": iter([]), "lr": 0.5}],
        [{"params": []}, {"params": [("weight", weight)]}],
    ):
        optimizer = kind(given, lr=0.1)
        take_over_steps(optimizer)
        check_parameters([optimizer], {"weight": weight})
        assert not check_optimizer(optimizer)
        weight.grad = torch.ones_like(weight)
        for _ in range(3):
            optimizer.step()  # the script's own
            step_optimizers([optimizer], 1.0)
            optimizer.zero_grad()
        placed = [p for group in optimizer.param_groups for p in group["params"] if p is not weight]
        assert placed
        assert not any(p.any() for p in placed)


@pytest.mark.usefixtures("_one_stage_of_several")
def test_optimizers_that_hold_something_are_made_as_ever() -> None:
    weight, bias = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    for given in ([weight, bias], iter([weight, bias]), [{"params": weight}, {"params": [bias]}], [("w", weight)]):
        groups = SGD(given, lr=0.1).param_groups
        assert {id(p) for group in groups for p in group["params"]} <= {id(weight), id(bias)}
    with pytest.raises(TypeError, match="should be an iterable"):
        SGD(weight, lr=0.1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="ordered collections"):
        SGD([{"params": {weight, bias}}], lr=0.1)
    allow_empty_stages(torch.device("cpu"))
    assert len(SGD([], lr=0.1).param_groups[0]["params"]) == 1


def test_a_whole_model_without_anything_to_train_is_refused_as_ever() -> None:
    model = wrapped()
    with pytest.raises(ValueError, match="empty parameter list"):
        SGD([p for p in model.parameters() if not p.requires_grad], lr=0.1)
    assert list_optimizers(SGD(model.parameters(), lr=0.1))
