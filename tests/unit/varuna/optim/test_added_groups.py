"""Parameter groups that a script adds while it trains, and a process that goes on without them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from training_roles import training_role
from varuna import Varuna
from varuna.distributed.calls import CallKind

BATCH = {"x": torch.ones(2, 3)}


class Pretrained(nn.Module):
    """Its base is frozen at first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.base, self.head = nn.Linear(3, 3), nn.Linear(3, 1)
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.base(x)).square().mean()


def begin(users: nn.Module | None = None) -> tuple[Varuna, Optimizer]:
    model = Varuna(Pretrained() if users is None else users, get_batch_fn=BATCH)
    optimizer = SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    model.set_optimizer(optimizer)
    return model, optimizer


def unfreeze(model: Varuna, optimizer: Optimizer) -> None:
    base = [parameter for name, parameter in model.named_parameters() if name.startswith("base")]
    for parameter in base:
        parameter.requires_grad_(True)
    optimizer.add_param_group({"params": base, "lr": 0.05})


@pytest.fixture
def saved(tmp_path: Path) -> str:
    """A checkpoint of a script that has added a group."""
    model, optimizer = begin()
    model.step(BATCH)
    unfreeze(model, optimizer)
    model.step(BATCH)
    model.checkpoint(str(tmp_path))
    return str(tmp_path)


def test_a_script_that_does_not_add_its_group_again_is_refused(saved: str) -> None:
    model, _ = begin()
    model.load_checkpoint(saved, 2)
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(RuntimeError, match=r"^base\.weight and 1 more .* no optimizer holds .*: call add_param_group"):
        model.step(BATCH)
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("when", ["before", "after", "frozen", "frozen in its own model"])
def test_a_script_that_adds_its_group_or_freezes_the_layers_goes_on(saved: str, when: str) -> None:
    users = Pretrained()
    model, optimizer = begin(users)
    if when == "before":
        unfreeze(model, optimizer)
    model.load_checkpoint(saved, 2)
    if when == "after":
        unfreeze(model, optimizer)
    is_frozen = when.startswith("frozen")
    if is_frozen:
        for parameter in optimizer.param_groups[0]["params"]:
            assert parameter.requires_grad
        (model.base if when == "frozen" else users.base).requires_grad_(False)
    weight = model.get_parameter("base.weight").clone()
    model.step(BATCH)
    assert torch.equal(model.get_parameter("base.weight"), weight) is is_frozen
    if not is_frozen:
        assert "momentum_buffer" in optimizer.state[model.get_parameter("base.weight")]


@pytest.mark.parametrize("through", ["users", "varuna"])
def test_nothing_is_said_of_layers_that_are_frozen_after_wrapping(through: str) -> None:
    users = Pretrained()
    users.base.requires_grad_(True)
    model = Varuna(users, get_batch_fn=BATCH)
    (users if through == "users" else model).base.requires_grad_(False)
    with capture_logs() as logs:
        model.set_optimizer(SGD(list(model.head.parameters()), lr=0.1))
    assert not any("no optimizer holds" in entry["event"] for entry in logs)


def test_a_new_process_without_the_group_leaves_before_it_trains_beside_others(
    saved: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = begin()
    model.load_checkpoint(saved, 2)
    membership, reasons = training_role(model)._membership, list[str]()
    monkeypatch.setattr(membership, "_awaited_in", CallKind.STEP)
    monkeypatch.setattr(membership, "_leave_unmoved", reasons.append)
    membership.check_call(CallKind.STEP)
    [reason] = reasons
    assert "base.weight and 1 more trained in a parameter group before" in reason
