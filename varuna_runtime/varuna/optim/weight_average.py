"""An exponential moving average of the parameters, kept beside them: `Varuna(..., ema=0.999)`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

__all__ = ["AVERAGE_STATE", "WeightAverage", "check_decay"]

AVERAGE_STATE = "varuna.ema"
"""The name under which checkpoints keep the number of updates."""


def check_decay(decay: float | None) -> None:
    """Raises ValueError for a bad decay of a moving average."""
    if decay is not None and not (isinstance(decay, float | int) and 0 <= decay < 1):
        raise ValueError(
            f"ema={decay!r}: give the share of the average that each step keeps, from 0 to below 1, such as 0.999"
        )


class WeightAverage:
    """The averages of a stage's trained parameters, as `torch.optim.swa_utils.AveragedModel` computes an EMA.

    The first update copies the parameters; each later one moves the averages towards them. Frozen parameters do not
    change, so their average is their value and takes no memory.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], decay: float) -> None:
        self._parameters = parameters
        self._decay = decay
        self.averages: dict[str, Tensor] = {}
        """By parameter name; with the device and type of the parameter."""
        self.updates = 0
        self.add_trained_parameters()

    def add_trained_parameters(self) -> None:
        """Starts averages of newly trained parameters. Called before each step of the optimizer."""
        self.start_averages([name for name, parameter in self._parameters.items() if parameter.requires_grad])

    def start_averages(self, names: Collection[str]) -> dict[str, Tensor]:
        """The averages of these parameters; those that are new start at the parameters' values."""
        for name in names:
            if name not in self.averages:
                self.averages[name] = self._parameters[name].detach().clone()
        return {name: self.averages[name] for name in names}

    def follow_stage(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """From now on these are the stage's parameters. Averages of those that it had stay; new ones start there."""
        self._parameters = parameters
        self.averages = {name: average for name, average in self.averages.items() if name in parameters}
        self.add_trained_parameters()

    @torch.no_grad()
    def update_averages(self) -> None:
        """Moves the averages towards the parameters. Called after each step of the optimizer."""
        groups: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
        for name, average in self.averages.items():
            averages, values = groups.setdefault((average.device, average.dtype), ([], []))
            averages.append(average)
            values.append(self._parameters[name].detach())
        move: Callable[..., None] = get_ema_multi_avg_fn(self._decay)  # type: ignore[no-untyped-call]
        for averages, values in groups.values():
            if self.updates == 0:
                torch._foreach_copy_(averages, values)
            else:
                move(averages, values, self.updates)
        self.updates += 1

    @torch.no_grad()
    def reset_averages(self) -> None:
        """Sets the averages to the parameters and the number of updates to 0."""
        for name, average in self.averages.items():
            average.copy_(self._parameters[name])
        self.updates = 0

    @contextmanager
    def exchange_values(self, parameters: Mapping[str, Tensor]) -> Iterator[None]:
        """In the block `parameters` have the averages as their values; afterwards both are bit for bit as before."""
        self._exchange(parameters)
        try:
            yield
        finally:
            self._exchange(parameters)

    @torch.no_grad()
    def _exchange(self, parameters: Mapping[str, Tensor]) -> None:
        for name, average in self.averages.items():  # one at a time, for the memory of one copy
            before = parameters[name].detach().clone()
            parameters[name].copy_(average)
            average.copy_(before)

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.updates = int(state["updates"])
