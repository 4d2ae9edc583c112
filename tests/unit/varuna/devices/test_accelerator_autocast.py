"""The dry run's rules of autocast are those that torch has for CUDA, whose kernels run on fake tensors anywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from varuna.cut_point import CutPoint
from varuna.devices.accelerator_autocast import accelerator_autocast, list_rules
from varuna.optim.precision import TrainingPrecision
from varuna.partition import trace

BF16, FP32 = torch.bfloat16, torch.float32
ARGUMENTS = ([FP32], [BF16], [BF16, FP32])
"""The types of an operator's arguments, in turn."""


class _ReachedError(Exception):
    """An operator would run now."""


class _FirstOperator(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not type its modes
    """Notes casts, lets them through, and ends at the first other operator."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.casts: list[torch.dtype] = []
        self.computes_in: torch.dtype | None = None
        """The type of the first argument, or the one that the result is to have."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default:
            self.casts.append(kwargs["dtype"])
        if func in (torch.ops.aten._to_copy.default, torch.ops.prim.device.default):
            return func(*args, **kwargs)
        given = {**dict(zip((each.name for each in func._schema.arguments), args, strict=False)), **kwargs}
        leaves = [x for x in tree_flatten(given)[0] if isinstance(x, Tensor) and x.is_floating_point()]
        self.computes_in = given.get("dtype") or (leaves[0].dtype if leaves else None)
        raise _ReachedError


@contextmanager
def cudas_own_autocast() -> Iterator[None]:
    before = torch.is_autocast_enabled("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", BF16)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", before)
        torch.clear_autocast_cache()


def list_types(device: str) -> dict[str, str]:
    """What autocast does with each operator's arguments, which are fake tensors on `device`."""
    found = {}
    for name in list_rules():
        packet, _, overload = name.partition(".")
        operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
        for types in ARGUMENTS:
            with FakeTensorMode() as fakes:
                arguments = make_arguments(operator, types, device, fakes)
                with _FirstOperator() as first, pytest.raises(Exception) as ended:  # of any kind
                    operator(*arguments)
            # Some operators refuse such arguments, after autocast has cast them.
            is_reached = isinstance(ended.value, _ReachedError)
            found[f"{name} of {types}"] = str(first.computes_in if is_reached else (first.casts, ended.value))
    return found


def make_arguments(operator: Any, types: list[torch.dtype], device: str, fakes: FakeTensorMode) -> list[Any]:
    made = 0

    def tensor() -> Tensor:
        nonlocal made
        made += 1
        meta = torch.empty(2, 2, dtype=types[(made - 1) % len(types)], device="meta")
        return fakes.fake_tensor_converter.from_meta_and_device(fakes, meta, torch.device(device))

    values: list[Any] = []
    for each in operator._schema.arguments:
        if each.has_default_value() or each.kwarg_only:
            break
        kind = str(each.type)
        makers: dict[str, Callable[[], Any]] = {
            "Tensor": tensor,
            "List[Tensor]": lambda: [tensor(), tensor()],
            "Optional[Tensor]": lambda: None,
            "List[Optional[Tensor]]": lambda: [torch.zeros(1, dtype=torch.long, device=device)],
            "List[int]": lambda: [1, 1],
            "bool": lambda: False,
            "str": lambda: "ij,jk->ik",
        }
        values.append(makers.get(kind, lambda: 1)())
    return values


@pytest.mark.long
def test_every_operator_computes_in_the_types_of_cudas_autocast() -> None:
    with cudas_own_autocast():
        expected = list_types("cuda")
    with accelerator_autocast("cuda", BF16):
        found = list_types("cpu")
    assert found == expected
    plain = {name: expected[f"{name} of {[BF16]}"] for name in ("layer_norm", "softmax.int", "linear", "cat")}
    assert plain == {"layer_norm": str(FP32), "softmax.int": str(FP32), "linear": str(BF16), "cat": str(BF16)}


def test_the_rules_of_the_cpu_come_back() -> None:
    product, norm = nn.Linear(4, 4)(torch.ones(2, 4)).bfloat16(), nn.LayerNorm(4)
    with torch.autocast("cpu", BF16):
        before = norm(product).dtype
    with accelerator_autocast("cuda", BF16):
        there = norm(product).dtype
    with torch.autocast("cpu", BF16):
        after = norm(product).dtype
    assert (before, there, after) == (BF16, FP32, BF16)
    assert not torch.is_autocast_enabled("cuda")


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_code_may_switch_autocast_off_by_the_kind_of_device_or_of_its_tensors(kind: str) -> None:
    layer, x = nn.Linear(4, 4), torch.ones(2, 4)
    with accelerator_autocast("cuda", BF16):
        with torch.autocast(kind, enabled=False):
            assert layer(x).dtype is FP32
        assert layer(x).dtype is BF16


class Blocks(nn.Module):
    """Blocks that end with a norm, as those of post-norm transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)
        self.after_norm, self.after_product = CutPoint(), CutPoint()

    def forward(self, x: Tensor) -> Tensor:
        x = self.after_product(self.second(self.after_norm(self.norm(self.first(x)))))
        return F.mse_loss(x, torch.ones_like(x))


@pytest.mark.parametrize(("device", "after_norm"), [("cuda", FP32), ("xpu", FP32), ("cpu", BF16)])
def test_boundaries_have_the_types_of_the_training_device(device: str, after_norm: torch.dtype) -> None:
    precision = TrainingPrecision(BF16, device)
    with precision.dry_run_context():
        model_map = trace(Blocks(), {"x": torch.ones(4, 4)})
    assert [boundary.dtype for cut in (1, 2) for boundary in model_map.find_boundary(cut)] == [after_norm, BF16]
