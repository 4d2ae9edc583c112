"""A training script whose model computes nothing but takes its time, as a device would: sleeping needs no processor.

Its one argument is a JSON file: {"forward_ms", "backward_ms", "steps"}.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from varuna import CutPoint, Varuna

BLOCKS = 3
N = 6


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return gradients[0].clone(), torch.zeros(1), None, None


class Sleeper(nn.Module):
    def __init__(self, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(1)) for _ in range(BLOCKS))
        self.cut_points = [CutPoint() for _ in range(BLOCKS - 1)]
        self.forward_s, self.backward_s = forward_s, backward_s

    def forward(self, x: Tensor) -> Tensor:
        for block, weight in enumerate(self.weights):
            # Stages differ, so that they have to wait for each other.
            slower = 1.0 + 0.25 * block
            x = Sleep.apply(x, weight, self.forward_s * slower, self.backward_s * slower)
            if block < BLOCKS - 1:
                x = self.cut_points[block](x)
        return x.mean()


def main() -> None:
    torch.set_num_threads(1)
    job = json.loads(Path(sys.argv[1]).read_text())
    plain = Sleeper(job["forward_ms"] / 1e3, job["backward_ms"] / 1e3)
    model = Varuna(plain, get_batch_fn=lambda size, device="cpu": {"x": torch.ones(size, 4)}, batch_size=N)
    model.set_optimizer(torch.optim.SGD(model.parameters(), lr=0.0))
    for _ in range(job["steps"]):
        model.step({"x": torch.ones(N, 4)})


if __name__ == "__main__":
    main()
