"""Mixed precision: the type that the model computes in, and the loss scale that fp16 gradients need.

Parameters, the optimizer's state and the sums of gradients stay fp32; `torch.autocast` runs the matrix products of the
forward in bf16 or fp16. Activations that a stage sends have the type that autocast gave them. fp16 has 5 bits of
exponent, so the loss is multiplied with a scale before the backward (Micikevicius et al., Mixed Precision Training,
2018). When a gradient still overflows, the step is skipped. bf16 has fp32's exponent and needs no scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import structlog
import torch
from torch import nn

from varuna.devices.accelerator import is_accelerator
from varuna.devices.accelerator_autocast import accelerator_autocast

__all__ = ["GROWTH_STEPS", "LossScaler", "TrainingPrecision"]

_log = structlog.get_logger("varuna")

GROWTH_STEPS = 2000
"""The steps without overflow after which a dynamic scale is doubled (apex's and torch.amp's default)."""

_LARGEST_SCALE = 2.0**24
"""The largest dynamic scale, as in apex: above it small models only reach the end of fp32."""

_TYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class TrainingPrecision:
    """The type of the forward's matrix products, on one kind of device."""

    dtype: torch.dtype
    device_type: str
    casts_persist: bool = field(default_factory=lambda: _casts_persist())
    """Whether `pass_context` works with this version of torch."""

    @classmethod
    def from_arguments(cls, fp16: bool, dtype: torch.dtype | None, device: torch.device) -> TrainingPrecision:
        """The precision that the two arguments of the API give. Raises ValueError when they contradict each other."""
        if dtype is not None and dtype not in _TYPES:
            raise ValueError(f"dtype={dtype}: train in one of {', '.join(map(str, _TYPES))}")
        if fp16 and dtype not in (None, torch.float16):
            raise ValueError(f"fp16=True contradicts dtype={dtype}: give one of the two")
        return cls(torch.float16 if fp16 else dtype or torch.float32, device.type)

    @property
    def is_mixed(self) -> bool:
        """Whether the forward computes in less than the parameters' precision."""
        return self.dtype is not torch.float32

    @property
    def needs_scale(self) -> bool:
        return self.dtype is torch.float16

    def forward_context(self) -> AbstractContextManager[object]:
        """Around one forward or recompute. A backward needs no context, because its types follow from its forward."""
        return torch.autocast(self.device_type, self.dtype) if self.is_mixed else nullcontext()

    def dry_run_context(self) -> AbstractContextManager[object]:
        """Around the dry run, whose fake tensors are on the CPU, whatever device the stages will use.

        Boundaries have the types of that device, whose autocast has other rules than the CPU's.
        """
        if not self.is_mixed:
            return nullcontext()
        if is_accelerator(torch.device(self.device_type)):
            return accelerator_autocast(self.device_type, self.dtype)
        return torch.autocast("cpu", self.dtype)

    def pass_context(self) -> AbstractContextManager[object]:
        """Around all forwards and backwards between two changes of the parameters.

        Autocast keeps its casts of the parameters until the outermost context ends. This context changes no type, but
        keeps the casts over all micro-batches: one cast and one copy per step, not one per micro-batch in flight.
        """
        if not self.is_mixed or not self.casts_persist:
            return nullcontext()
        torch.clear_autocast_cache()  # of a context that the script may have around its steps
        return torch.autocast(self.device_type, self.dtype, enabled=False)

    def cast_bytes(self, parameters: Iterable[nn.Parameter]) -> int:
        """What autocast keeps, over all micro-batches of a step, of the parameters that matrix products read: a copy of
        each in half precision."""
        if not self.is_mixed or not self.casts_persist:
            return 0
        matrices = [each for each in parameters if each.dim() > 1 and each.requires_grad]
        return sum(each.numel() * self.dtype.itemsize for each in matrices if each.dtype is torch.float32)

    def check_parameters(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Raises ValueError when a trained parameter is in half precision, in which small updates vanish."""
        for name, parameter in named if self.is_mixed else ():
            if parameter.requires_grad and parameter.dtype in (torch.float16, torch.bfloat16):
                raise ValueError(
                    f"parameter {name} is {parameter.dtype}, but mixed precision trains parameters in fp32: leave out "
                    ".half() or .bfloat16(), because Varuna casts"
                )


def _casts_persist() -> bool:
    """Whether a cast without gradients (in a forward that will be recomputed) leaves later casts their gradients.

    It does in torch 2.13. Older versions give the later forward the same cast, and its parameters no gradient.
    """
    parameter = nn.Parameter(torch.zeros(1, 1))
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            torch.mm(parameter, parameter)
        with torch.enable_grad():
            return torch.mm(parameter, parameter).requires_grad


class LossScaler:
    """The factor on the loss: fixed, or halved after each overflow and doubled after `GROWTH_STEPS` without one.

    It decides from values that all ranks have agreed on, so it is the same on all ranks. A step that overflows is
    skipped with either kind.
    """

    def __init__(self, loss_scale: float | Literal["dynamic"], init_loss_scale: float, min_loss_scale: float) -> None:
        """Raises ValueError for a scale that is not a positive number, or an initial one below the least."""
        self._dynamic = loss_scale == "dynamic"
        self._least = float(min_loss_scale)
        self.scale = float(init_loss_scale if loss_scale == "dynamic" else loss_scale)
        for name, value in (("loss scale", self.scale), ("min_loss_scale", self._least)):
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} {value}: it must be a positive number, or 'dynamic' for loss_scale")
        if self._dynamic and self.scale < self._least:
            raise ValueError(f"init_loss_scale {self.scale:g} is below min_loss_scale {self._least:g}")
        self._good_steps = 0

    @property
    def can_shrink(self) -> bool:
        """Whether the next step may have a smaller scale than this one."""
        return self._dynamic and self.scale > self._least

    def update_scale(self, overflow: bool) -> None:
        """Adjusts the scale after a step."""
        if overflow:
            before, self._good_steps = self.scale, 0
            if self._dynamic:
                self.scale = max(self._least, self.scale / 2)
            _log.warning("step skipped: its gradients overflowed", loss_scale=before, next_loss_scale=self.scale)
        elif self._dynamic:
            self._good_steps += 1
            if self._good_steps == GROWTH_STEPS:
                self._good_steps = 0
                self.scale = max(self.scale, min(2 * self.scale, _LARGEST_SCALE))

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "good_steps": self._good_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """A fixed scale stays as the script gives it."""
        if self._dynamic:
            self.scale = max(self._least, float(state["scale"]))
            self._good_steps = int(state["good_steps"])
