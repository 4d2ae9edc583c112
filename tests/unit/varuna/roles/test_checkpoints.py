"""What a process keeps of its checkpoints when it goes on in another generation."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from training_roles import training_role
from varuna import Varuna


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = (x * self.scale).mean()
        return loss


def test_the_time_of_the_newest_save_outlives_its_generation() -> None:
    role = training_role(Varuna(Scaled(), get_batch_fn={"x": torch.ones(4, 2)}))
    before = role.checkpoints.checkpointing.automatic
    role.checkpoints.follow_ranks(role.assembly.everyone, role._parts.model_map)
    after = role.checkpoints.checkpointing.automatic
    assert after is not before
    assert after._last_save_s == before._last_save_s
