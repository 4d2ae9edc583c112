"""Parts of a step combined: what the script changes, accumulates, weighs and keeps on the host, all in one run."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from varuna import Varuna

B = 6
STEPS = 8


class Weighed(nn.Module):
    """A frozen layer with a gradient hook before batch norm; its loss may have a weight."""

    def __init__(self, weighted: bool) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)
        self.first.weight.register_hook(lambda gradient: gradient * 0.5)
        self.first.weight.requires_grad_(False)
        self.weighted = weighted

    def forward(self, x: Tensor, y: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        loss = nn.functional.mse_loss(self.last(torch.relu(self.norm(self.first(x)))), y)
        return (loss, torch.tensor(3.0 * len(x))) if self.weighted else loss


@pytest.mark.long
@pytest.mark.parametrize("offload", [False, True], ids=["device", "host"])
@pytest.mark.parametrize("weighted", [False, True], ids=["mean", "weighted"])
@pytest.mark.parametrize("every", [1, 2], ids=["each step", "accumulated"])
def test_unfreezing_and_modes_train_as_plain_pytorch_does(every: int, weighted: bool, offload: bool) -> None:
    torch.manual_seed(0)
    batches = [{"x": torch.randn(B, 4), "y": torch.randn(B, 1)} for _ in range(STEPS)]
    torch.manual_seed(1)
    plain = Weighed(weighted)
    torch.manual_seed(1)
    model = Varuna(
        Weighed(weighted),
        get_batch_fn=copy.deepcopy(batches[0]),
        batch_size=B,
        offload_optimizer=offload,
        accumulate=every > 1,
    )
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, plain)]
    model.set_optimizer(optimizers[0])
    for number, batch in enumerate(batches):
        for each in (model, plain):
            if number == 3:  # between two updates, where they are made of two steps
                each.get_parameter("first.weight").requires_grad_(True)
            if number == 5:
                each.get_submodule("norm").eval()
        loss, _, _ = model.step(batch)
        result = plain(**batch)
        expected = result[0] if weighted else result
        (expected / every).backward()
        assert loss == pytest.approx(expected.item(), rel=1e-5)
        if (number + 1) % every == 0:
            if every > 1:
                optimizers[0].step()
                optimizers[0].zero_grad()
            optimizers[1].step()
            optimizers[1].zero_grad()
    state = model.state_dict()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5, msg=name)
