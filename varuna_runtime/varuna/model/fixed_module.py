"""What only a whole model can do: a stage refuses it, in one line that names the alternative."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn

from varuna.diagnostics.user_code import user_code

__all__ = ["CUT_MODEL", "FixedModule", "ModelSurface"]

CUT_MODEL = "the model is already cut: change it before Varuna(model, …)"
_PRECISION = (
    "parameters keep the type that the model was built with: leave the model in fp32 and give Varuna fp16=True or "
    "dtype=torch.bfloat16"
)
_DEVICE = "a stage stays on the device that it was built on: give Varuna device=…, or let the launcher choose"


@dataclass(frozen=True, kw_only=True)
class ModelSurface:
    """What the script sees of the model."""

    module: nn.Module
    """The user's model, or the stage's copy of its structure."""
    parameters: Mapping[str, nn.Parameter]
    """Those of this stage, by first name."""
    buffers: Mapping[str, Tensor]
    device: torch.device
    seed: Callable[[], int]
    """The seed of what `apply` draws, the same on all ranks."""


class FixedModule(nn.Module):
    """A module that keeps its structure, its device and its types."""

    _surface: ModelSurface
    _here: dict[int, Tensor]
    """This stage's parameters and buffers, by id."""

    def _refusal(self, what: str, instead: str) -> RuntimeError:
        return RuntimeError(f"{what} at {user_code()}: {instead}")

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Does nothing for the present device and type, and raises RuntimeError for any other."""
        device, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)
        if device is not None and not _same_device(torch.device(device), self._surface.device):
            raise self._refusal(f"to({device})", _DEVICE)
        if dtype is not None and any(x.dtype != dtype for x in self._floating()):
            raise self._refusal(f"to({dtype})", _PRECISION)
        return self

    def _floating(self) -> Iterator[Tensor]:
        return (x for x in self._here.values() if x.is_floating_point())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> NoReturn:
        raise self._refusal("a conversion of the model", f"{_DEVICE}; {_PRECISION}")

    def half(self) -> Self:
        return self.to(torch.float16)

    def bfloat16(self) -> Self:
        return self.to(torch.bfloat16)

    def float(self) -> Self:
        return self.to(torch.float32)

    def double(self) -> Self:
        return self.to(torch.float64)

    def type(self, dst_type: Any) -> Self:
        if not isinstance(dst_type, torch.dtype):
            raise self._refusal(f"type({dst_type})", f"{_DEVICE}; {_PRECISION}")
        return self.to(dst_type)

    def cuda(self, device: int | torch.device | None = None) -> Self:
        if isinstance(device, int):
            device = torch.device("cuda", device)
        return self.to("cuda" if device is None else device)

    def cpu(self) -> Self:
        return self.to("cpu")

    def to_empty(self, *, device: Any, recurse: bool = True) -> NoReturn:
        raise self._refusal("to_empty()", f"{_DEVICE}; a model on meta is initialised by Varuna itself")

    def share_memory(self) -> NoReturn:
        raise self._refusal("share_memory()", "each rank trains its own stage: exchange tensors through state_dict()")

    def compile(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise self._refusal("compile()", "Varuna runs the parts of the model itself: leave it out")

    def add_module(self, name: str, module: nn.Module | None) -> NoReturn:
        raise self._refusal(f"add_module({name!r})", CUT_MODEL)

    def register_module(self, name: str, module: nn.Module | None) -> NoReturn:
        raise self._refusal(f"register_module({name!r})", CUT_MODEL)

    def set_submodule(self, target: str, *args: Any, **kwargs: Any) -> NoReturn:
        raise self._refusal(f"set_submodule({target!r})", CUT_MODEL)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> NoReturn:
        raise self._refusal(f"register_parameter({name!r})", CUT_MODEL)

    def register_buffer(self, name: str, *args: Any, **kwargs: Any) -> NoReturn:
        raise self._refusal(f"register_buffer({name!r})", CUT_MODEL)


def _same_device(one: torch.device, own: torch.device) -> bool:
    return one.type == own.type and (one.index is None or own.index is None or one.index == own.index)
