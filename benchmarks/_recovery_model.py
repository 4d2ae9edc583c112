"""The model of the recovery benchmarks, without Varuna: equal Linear layers that wait, and a file of when they did.

Each layer waits for as long as a device would compute. A machine with fewer cores than ranks computes no faster
with two replicas than with one, so nothing would be gained or lost with a replica. The waits of all processes are the
micro-batches' time on the emulated devices: where there is none, no micro-batch runs anywhere.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Activity", "Layers", "Noise", "open_to_append"]

_SAMPLES = 4096


def open_to_append(path: Path) -> int:
    """A descriptor of a file to which several processes append whole lines."""
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)


class Activity:
    """Appends a line `BEGIN END` to a file for each time that a layer of a real micro-batch has waited."""

    def __init__(self, path: Path) -> None:
        self._file = open_to_append(path)

    def wait(self, x: Tensor, seconds: float) -> None:
        began = time.time()
        time.sleep(seconds)
        if type(x) in (Tensor, nn.Parameter) and not x.is_meta:  # not while the model is traced
            os.write(self._file, f"{began:.4f} {time.time():.4f}\n".encode())


class DeviceTime(torch.autograd.Function):
    """Waits in forward, and twice as long in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float, activity: Activity) -> Tensor:
        ctx.seconds, ctx.activity = seconds, activity
        activity.wait(x, seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        ctx.activity.wait(gradient, 2 * ctx.seconds)
        return gradient, None, None


class Layer(nn.Module):
    def __init__(self, width: int, example_s: float, activity: Activity) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)
        self._example_s = example_s
        self._activity = activity

    def forward(self, x: Tensor) -> Tensor:
        waited: Tensor = DeviceTime.apply(self.linear(x), self._example_s * len(x), self._activity)
        return waited.tanh()


class Layers(nn.Module):
    def __init__(self, width: int, layers: int, example_s: float, activity: Activity) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Layer(width, example_s, activity) for _ in range(layers)))

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = (self.blocks(x) - x).square().mean()
        return loss


class Noise:
    """Sample i: always the same random vector."""

    def __init__(self, width: int) -> None:
        self._width = width

    def __len__(self) -> int:
        return _SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.randn(self._width, generator=torch.Generator().manual_seed(index))}
