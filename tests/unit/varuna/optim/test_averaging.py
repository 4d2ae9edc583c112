"""`Varuna(ema=)` in a plain process, beside PyTorch's own average. Over shapes: tests/integration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from training_roles import training_role
from varuna import Varuna
from varuna.calibration.optimizer_costs import measure_optimizer
from varuna.checkpoint import CheckpointError
from varuna.checkpoint.export import export_model, main

DECAY = 0.8


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.base, self.norm, self.head = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.head(self.norm(self.base(x))) - x).square().mean()


def batch(size: int = 6, device: str = "cpu") -> dict[str, Tensor]:
    return {"x": torch.randn(size, 3, generator=torch.Generator().manual_seed(size))}


def wrapped(ema: float | None = DECAY, **options: Any) -> Varuna:
    model = Varuna(Tower(), get_batch_fn=batch, ema=ema, **options)
    model.set_optimizer(torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1))
    return model


class PyTorchs:
    """PyTorch's average of all parameters that a `Varuna` has."""

    def __init__(self, model: Varuna) -> None:
        named = dict(model.named_parameters())
        self._names = list(named)
        self._parameters = nn.ParameterList(named.values())
        self._averaged = AveragedModel(self._parameters, multi_avg_fn=get_ema_multi_avg_fn(DECAY))

    def update(self) -> None:
        self._averaged.update_parameters(self._parameters)

    def check(self, exported: Path) -> None:
        ours = load_file(exported)
        for name, value in zip(self._names, self._averaged.module.parameters(), strict=True):
            assert torch.equal(ours[name], value), name


@pytest.mark.parametrize("options", [{}, {"offload_optimizer": True}, {"dtype": torch.bfloat16}], ids=str)
def test_it_is_pytorchs_to_the_bit_and_goes_on_after_a_load(tmp_path: Path, options: dict[str, Any]) -> None:
    model = wrapped(**options)
    expected = PyTorchs(model)
    for _ in range(3):
        model.step(batch())
        expected.update()
    assert model.checkpoint(str(tmp_path))
    losses = [model.step(batch())[0] for _ in range(2)]
    evaluated = model.evaluate(batch(), ema=True)

    again = wrapped(**options)
    again.load_checkpoint(str(tmp_path), 3)
    assert [again.step(batch())[0] for _ in range(2)] == losses
    assert again.evaluate(batch(), ema=True) == evaluated != again.evaluate(batch())
    assert again.checkpoint(str(tmp_path))
    export_model(str(tmp_path / "varuna_ckpt_3"), tmp_path / "model", ema=True)
    expected.check(tmp_path / "model")


def test_evaluation_by_the_average_is_the_averaged_models(tmp_path: Path) -> None:
    model = wrapped()
    for _ in range(3):
        model.step(batch())
    assert model.checkpoint(str(tmp_path))
    export_model(str(tmp_path), tmp_path / "averaged", ema=True)
    averaged = Tower().eval()
    averaged.load_state_dict(load_file(tmp_path / "averaged"))
    assert model.evaluate(batch(), ema=True) == pytest.approx(averaged(**batch()).item(), rel=1e-6)
    export_model(str(tmp_path), tmp_path / "plain")
    averaged.load_state_dict(load_file(tmp_path / "plain"))
    assert model.evaluate(batch()) == pytest.approx(averaged(**batch()).item(), rel=1e-6)


def test_what_is_trained_later_is_averaged_from_then_on(tmp_path: Path) -> None:
    model = Varuna(Tower(), get_batch_fn=batch, ema=DECAY)
    parameters = dict(model.named_parameters())
    model.set_optimizer(torch.optim.SGD(parameters.values(), lr=0.1))
    expected = PyTorchs(model)
    model.step(batch())
    expected.update()
    parameters["base.weight"].requires_grad_(True)
    parameters["base.weight"].grad = None
    average = training_role(model).average
    assert average is not None
    average.add_trained_parameters()
    with torch.no_grad():
        parameters["base.weight"].add_(1)
    average.update_averages()
    expected.update()
    assert model.checkpoint(str(tmp_path))
    export_model(str(tmp_path), tmp_path / "model", ema=True)
    expected.check(tmp_path / "model")


def test_the_average_of_what_was_unfrozen_goes_on_after_a_load(tmp_path: Path) -> None:
    """Also of what is frozen again: it still moves."""

    def wrap_all() -> Varuna:
        model = Varuna(Tower(), get_batch_fn=batch, ema=DECAY)
        model.set_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        return model

    model = wrap_all()
    expected = PyTorchs(model)
    for step in range(4):
        model.get_parameter("base.weight").requires_grad_(step in (1, 2))
        model.get_parameter("base.bias").requires_grad_(step > 0)
        model.step(batch())
        expected.update()
    assert model.checkpoint(str(tmp_path))
    again = wrap_all()
    again.load_checkpoint(str(tmp_path), 4)
    for one in (model, again):
        one.step(batch())
    expected.update()
    average, loaded = training_role(model).average, training_role(again).average
    assert average is not None
    assert loaded is not None
    torch.testing.assert_close(loaded.averages, average.averages, rtol=0, atol=0)
    assert again.checkpoint(str(tmp_path))
    export_model(str(tmp_path / "varuna_ckpt_5"), tmp_path / "model", ema=True)
    expected.check(tmp_path / "model")


def test_a_step_that_overflows_is_not_averaged() -> None:
    model = Varuna(Tower(), get_batch_fn=batch, ema=DECAY, fp16=True)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model.set_optimizer(optimizer, init_loss_scale=2.0)
    assert not model.step(batch())[1]
    hooks = [p.register_hook(lambda g: g * torch.inf) for p in model.parameters() if p.requires_grad]
    assert model.step(batch())[1]
    for hook in hooks:
        hook.remove()
    average = training_role(model).average
    assert average is not None
    assert average.updates == 1


def test_a_checkpoint_with_an_average_and_a_script_without_and_the_other_way_round(tmp_path: Path) -> None:
    plain = wrapped(ema=None)
    plain.step(batch())
    assert plain.checkpoint(str(tmp_path))
    with pytest.raises(CheckpointError, match="has no average of the parameters: leave out --ema"):
        export_model(str(tmp_path), tmp_path / "model", ema=True)
    model = wrapped()
    with structlog.testing.capture_logs() as log:
        model.load_checkpoint(str(tmp_path), 1)
    assert "the checkpoint has no average of the parameters: it starts from them" in [line["event"] for line in log]
    assert model.evaluate(batch(), ema=True) == model.evaluate(batch())
    model.step(batch())
    assert model.checkpoint(str(tmp_path))
    assert main([str(tmp_path), "--ema", "--out", str(tmp_path / "model")]) == 0
    with structlog.testing.capture_logs() as log:
        plain.load_checkpoint(str(tmp_path), 2)
    assert "the checkpoint's average of the parameters is not loaded" in str(log)


@pytest.mark.parametrize("decay", [1, -0.1, 1.5, float("nan"), "0.9"])
def test_what_is_no_decay_is_refused(decay: Any) -> None:
    with pytest.raises(ValueError, match=r"ema=.*: give the share"):
        wrapped(ema=decay)


def test_no_average_to_evaluate_with() -> None:
    with pytest.raises(ValueError, match="no average is kept"):
        wrapped(ema=None).evaluate(batch(), ema=True)


def test_calibration_counts_its_memory() -> None:
    optimizer = torch.optim.SGD(Tower().parameters(), lr=0.1, momentum=0.9)
    assert measure_optimizer(optimizer).per_element == 4
    assert measure_optimizer(optimizer, averaged=True).per_element == 8
