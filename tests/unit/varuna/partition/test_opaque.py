"""Kernels that PyTorch's dispatcher does not know: refused with the way out, or declared by `varuna.opaque`.

The kernel here reads and writes memory by its address, as Triton's and extensions' do.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import varuna
from stages_by_hand import gradients, run_by_hand
from varuna.partition import PartitionError, build_stage, trace

H = 6


def memory_of(tensor: Tensor) -> np.ndarray[Any, np.dtype[np.float32]]:
    address = ctypes.cast(tensor.data_ptr(), ctypes.POINTER(ctypes.c_float))
    return np.ctypeslib.as_array(address, shape=tuple(tensor.shape))


class RawScale(torch.autograd.Function):
    """x * weight, over the memory of contiguous tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        assert x.is_contiguous(), "the kernel walks through memory"
        y = torch.empty_like(x)
        memory_of(y)[...] = memory_of(x) * memory_of(weight)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum(0)


def raw_scale(x: Tensor, weight: Tensor) -> Tensor:
    return RawScale.apply(x, weight)


class Kernel(nn.Module):
    def __init__(self, function: Any = raw_scale) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(1, 2, H))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight)


@varuna.opaque(shapes=0)
class DeclaredKernel(Kernel):
    pass


class Model(nn.Module):
    """The kernel in three blocks, and once between modules, where every later stage runs it on hollow tensors."""

    def __init__(self, kernel: Any, free: Any = raw_scale) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(H, H), kernel()) for _ in range(3)])
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, H))
        self.free = free
        self.cuts = [varuna.CutPoint(), varuna.CutPoint()]

    def forward(self, x: Tensor) -> Tensor:
        x = self.cuts[0](self.free(self.blocks[0](x), self.scale))
        x = self.cuts[1](self.blocks[1](x))
        return self.blocks[2](x).square().mean()


def inputs() -> dict[str, Tensor]:
    return {"x": torch.randn(4, H, generator=torch.Generator().manual_seed(1))}


declared = varuna.opaque(raw_scale, shapes=lambda x, weight: x.new_empty(x.shape))

DECLARED = {
    "function": lambda: Kernel(declared),
    "module": lambda: varuna.opaque(Kernel(), shapes=lambda x: torch.empty_like(x)),
    "class": DeclaredKernel,
}


@pytest.mark.parametrize("kind", DECLARED)
def test_a_declared_kernel_trains_in_stages_as_in_the_whole_model(kind: str) -> None:
    plain = Model(Kernel)
    expected = plain(**inputs())
    expected.backward()
    model = Model(DECLARED[kind], declared)
    model_map = trace(model, inputs())
    stages = [build_stage(model, model_map, section, section + 1, device="cpu") for section in range(3)]
    loss, _ = run_by_hand(stages, inputs())
    torch.testing.assert_close(loss, expected.detach())
    found = gradients(stages)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, msg=name)
    assert sum(model_map.section_costs()) > 0


def test_an_undeclared_kernel_is_refused_with_its_place_and_the_way_out() -> None:
    with pytest.raises(PartitionError) as refused:
        trace(Model(Kernel), inputs())
    for part in ("module blocks.0.1 ", "test_opaque.py:", "in memory_of", "varuna.opaque(", "register_fake"):
        assert part in str(refused.value)


def test_an_extension_that_refuses_its_arguments_is_named_too() -> None:
    def extension(x: Tensor, weight: Tensor) -> Tensor:
        return torch.from_numpy(np.frombuffer(x, dtype=np.float32))  # type: ignore[call-overload]

    with pytest.raises(PartitionError, match=r"module blocks\.0\.1 calls at .* in extension .*varuna\.opaque"):
        trace(Model(lambda: Kernel(extension)), inputs())


def test_an_error_of_the_models_own_stays_what_it_is() -> None:
    def wrong(x: Tensor, weight: Tensor) -> Tensor:
        raise ValueError("no such mode")

    with pytest.raises(ValueError, match="no such mode") as raised:
        trace(Model(lambda: Kernel(wrong)), inputs())
    assert not isinstance(raised.value, PartitionError)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [(lambda x, weight: torch.zeros(x.shape), "on cpu"), (lambda x: x, "TypeError: .* takes 1 positional argument")],
)
def test_shapes_that_do_not_fit_are_refused(shapes: Any, message: str) -> None:
    with pytest.raises(PartitionError, match=f"shapes of varuna.opaque.*{message}"):
        trace(Model(lambda: Kernel(varuna.opaque(raw_scale, shapes=shapes))), inputs())


def test_what_cannot_be_declared_is_refused() -> None:
    with pytest.raises(TypeError, match="takes a function, a module or a class of modules, not 3"):
        varuna.opaque(3, shapes=0)  # type: ignore[call-overload]
