"""The training of `recovery.py`: equal Linear layers and AdamW. Each worker writes a line for each step that it ends.

Each layer also waits for as long as a device would compute. A machine with fewer cores than ranks computes no faster
with two replicas than with one, so nothing would be gained or lost with a replica. The parameters are made on `meta`:
no process ever has the whole model, and a restart makes only the parameters of its stage.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from varuna import Varuna
from varuna.data import Batches

SAMPLES = 4096


class DeviceTime(torch.autograd.Function):
    """Waits in forward, and twice as long in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        time.sleep(2 * ctx.seconds)
        return gradient, None


class Layer(nn.Module):
    def __init__(self, width: int, example_s: float) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)
        self._example_s = example_s

    def forward(self, x: Tensor) -> Tensor:
        waited: Tensor = DeviceTime.apply(self.linear(x), self._example_s * len(x))
        return waited.tanh()


class Layers(nn.Module):
    def __init__(self, width: int, layers: int, example_s: float) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Layer(width, example_s) for _ in range(layers)))

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = (self.blocks(x) - x).square().mean()
        return loss


class Noise:
    """Sample i: always the same random vector."""

    def __init__(self, width: int) -> None:
        self._width = width

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.randn(self._width, generator=torch.Generator().manual_seed(index))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--example-ms", type=float, required=True, help="forward of one example through one layer")
    parser.add_argument(
        "--copy-batches", action="store_true", help="give step() copies of its batches, with which no worker stays"
    )
    parser.add_argument("--record", type=Path, required=True, help="file to which all workers append PID STEP TIME")
    given = parser.parse_args()
    torch.manual_seed(0)
    with torch.device("meta"):
        plain = Layers(given.width, given.layers, given.example_ms / 1e3)
    model = Varuna(plain, get_batch_fn=lambda size, device=None: {"x": torch.ones(size, given.width)})
    model.set_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-4))
    record = os.open(given.record, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for step, batch in Batches(Noise(given.width), first_step=model.resume() + 1):
        model.step({**batch} if given.copy_batches else batch)
        os.write(record, f"{os.getpid()} {step} {time.time():.6f}\n".encode())


if __name__ == "__main__":
    main()
