"""A script changes a wrapped model in a plain process: modes and `requires_grad`, through either handle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from training_roles import training_role
from varuna import Varuna
from varuna.partition import PartitionError, trace

H = 3


class Head(nn.Module):
    """Has a second head that it uses in training mode only, whose loss a model in evaluation mode leaves out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body, self.norm = nn.Linear(H, H), nn.BatchNorm1d(H)
        self.head, self.second = nn.Linear(H, 1), nn.Linear(H, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.body(x)).tanh()
        loss = self.head(x).square().mean()
        return loss + self.second(x).abs().mean() if self.training else loss


class FrozenNorm(Head):
    """Freezes batch norm as users do: in its own `train`."""

    def train(self, mode: bool = True) -> FrozenNorm:
        super().train(mode)
        self.norm.eval()
        return self


def batch(step: int = 0) -> dict[str, Tensor]:
    return {"x": torch.randn(4, H, generator=torch.Generator().manual_seed(step))}


def wrap(model: nn.Module, **options: Any) -> Varuna:
    wrapped = Varuna(model, get_batch_fn=batch(), **options)
    wrapped.set_optimizer(torch.optim.SGD(wrapped.parameters(), lr=0.1))
    return wrapped


def test_a_model_that_is_wrapped_in_evaluation_mode_is_traced_as_it_will_train() -> None:
    assert "norm.running_mean" in trace(Head().eval(), batch()).graph.buffers_changed
    assert "norm.running_mean" not in trace(FrozenNorm().eval(), batch()).graph.buffers_changed
    frozen = Head()
    frozen.norm.eval()
    assert "norm.running_mean" not in trace(frozen, batch()).graph.buffers_changed


@pytest.mark.parametrize("through", ["users", "varuna"])
def test_modes_are_those_that_the_script_sets_last(through: str) -> None:
    plain, users = Head().eval(), Head().eval()
    model = wrap(users)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    assert not model.training
    for step, mode in enumerate([False, True, True, False, True]):
        plain.train(mode)
        (users if through == "users" else model).train(mode)
        optimizer.zero_grad()
        expected = plain(**batch(step))
        expected.backward()
        optimizer.step()
        assert model.step(batch(step))[0] == pytest.approx(expected.item(), rel=1e-6)
        assert users.training == mode
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(training_role(model).assembly.stage.buffers[name], buffer, msg=name)


def test_what_the_optimizer_is_given_of_the_wrapped_model_is_refused() -> None:
    users = Head()
    users.body.requires_grad_(False)
    model = Varuna(users, get_batch_fn=batch())
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model.set_optimizer(optimizer)
    model.step(batch())
    users.body.requires_grad_(True)
    optimizer.add_param_group({"params": list(users.body.parameters())})
    with pytest.raises(ValueError, match=r"given body.weight of the model that was wrapped.*named_parameters\(\)"):
        model.step(batch())


def test_a_change_that_the_stages_cannot_follow_is_refused_by_name() -> None:
    class NoLoss(Head):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x) if self.training else x

    model = wrap(NoLoss())
    model.step(batch())
    model.eval()
    with pytest.raises(PartitionError, match=r"cannot be trained after eval\(\) of the model.*call train\(\)"):
        model.step(batch())
