"""What is special about a parameter (hooks, its class, memory that it shares) stays in the stages, or is refused."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stages_by_hand import gradients, run_by_hand
from varuna import CutPoint
from varuna.optim.host_parameters import HostParameters
from varuna.partition import PartitionError, Stage, build_stage, trace

H = 4


class Model(nn.Module):
    """Two layers with a cut-point between."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.a, self.b = nn.Linear(H, H), nn.Linear(H, H)
        self.cut = CutPoint()
        self.register_buffer("kept", torch.tensor([1.0, 0.0, 2.0, 0.0]))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.cut(self.a(x))).square().mean()


def example() -> dict[str, Tensor]:
    return {"x": torch.randn(3, H, generator=torch.Generator().manual_seed(5))}


def stages_of(model: nn.Module, count: int = 2) -> list[Stage]:
    model_map = trace(model, example())
    cuts = [0, 1, 2] if count == 2 else [0, 2]
    return [build_stage(model, model_map, start, end, device="cpu") for start, end in pairwise(cuts)]


def assert_gradients_of_whole(whole: nn.Module, stages: list[Stage]) -> None:
    whole(**example()).backward()
    run_by_hand(stages, example())
    summed = gradients(stages)
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(summed[name], parameter.grad, msg=name)


# Hooks


class MasksItsGradients(Model):
    """With every kind of hook that follows the model when it is copied."""

    def __init__(self) -> None:
        super().__init__()
        mask = torch.tensor([0.0, 1.0, 1.0, 0.0])
        self.a.weight.register_hook(lambda gradient: gradient * mask)
        self.a.bias.register_hook(self.masked)
        self.b.weight.register_hook(partial(self.scaled, 3.0))
        self.b.weight.register_hook(lambda gradient: gradient + self.b.weight)  # the one that trains, not this one
        self.b.bias.register_hook(lambda gradient, own=self.b.bias: gradient + own)

    def masked(self, gradient: Tensor) -> Tensor:
        return gradient * self.kept

    def scaled(self, factor: float, gradient: Tensor) -> Tensor:
        return gradient * factor * self.kept


@pytest.mark.parametrize("count", [1, 2])
def test_gradient_hooks_set_before_wrapping_run_in_the_stage_that_has_the_parameter(count: int) -> None:
    model = MasksItsGradients()
    stages = stages_of(model, count)
    with torch.no_grad():
        for stage in stages:
            for parameter in stage.parameters.values():
                parameter.add_(1)
    whole = MasksItsGradients()
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.add_(1)
    assert_gradients_of_whole(whole, stages)
    assert model.b.weight.grad is None


def test_a_hook_sees_the_callers_own_object() -> None:
    class Log:
        def __init__(self) -> None:
            self.shapes: list[tuple[int, ...]] = []

        def note(self, gradient: Tensor) -> None:
            self.shapes.append(tuple(gradient.shape))

    model, log = Model(), Log()
    counted = 0

    def count(gradient: Tensor) -> None:
        nonlocal counted
        counted += 1

    model.a.weight.register_hook(log.note)
    model.a.weight.register_hook(count)
    run_by_hand(stages_of(model), example())
    assert log.shapes == [(H, H)]
    assert counted == 1


def test_a_hook_of_a_frozen_parameter_is_there_when_it_trains() -> None:
    def frozen() -> Model:
        model = Model()
        model.a.weight.register_hook(lambda gradient: gradient * 2)
        model.a.weight.requires_grad_(False)
        return model

    stages, whole = stages_of(frozen()), frozen()
    assert not stages[0].parameters["a.weight"].requires_grad
    stages[0].parameters["a.weight"].requires_grad_(True)
    whole.a.weight.requires_grad_(True)
    assert_gradients_of_whole(whole, stages)


def test_a_hook_that_reads_another_stages_parameter_is_refused() -> None:
    def of_the_model(model: Model) -> Any:
        return lambda gradient: gradient + model.b.weight

    def of_the_parameter(model: Model) -> Any:
        weight = model.b.weight
        return lambda gradient: gradient * weight.norm().item()

    for hook_of in (of_the_model, of_the_parameter):
        model = Model()
        model.a.weight.register_hook(hook_of(model))
        with pytest.raises(PartitionError, match=r"a gradient hook on a\.weight \(.*<lambda>\) uses .* another stage"):
            run_by_hand(stages_of(model), example())
        run_by_hand(stages_of(model, count=1), example())


def test_a_hook_that_keeps_the_model_where_it_cannot_be_exchanged_is_refused() -> None:
    class Decay:
        def __init__(self, parameter: nn.Parameter) -> None:
            self.parameter = parameter

        def __call__(self, gradient: Tensor) -> Tensor:
            return gradient + self.parameter

    model = Model()
    model.a.weight.register_hook(Decay(model.a.weight))
    with pytest.raises(PartitionError, match=r"a gradient hook on a\.weight \(Decay\) keeps .*after wrapping"):
        stages_of(model)


def test_a_post_accumulate_hook_is_refused() -> None:
    model = Model()
    model.b.bias.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(PartitionError, match=r"b\.bias has a post-accumulate-grad hook.*register_hook"):
        trace(model, example())


# Classes


class Marked(nn.Parameter):
    """A class of the user's own, with attributes and methods."""

    def doubled(self) -> Tensor:
        return self * 2


class UsesItsClass(Model):
    def __init__(self) -> None:
        super().__init__()
        self.b.weight, self.b.bias = Marked(self.b.weight.detach()), None  # type: ignore[assignment]
        self.b.weight.group = "experts"  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        x = self.cut(self.a(x))
        weight = self.b.weight.doubled() if isinstance(self.b.weight, Marked) else self.b.weight
        return (x @ weight).square().mean()


@pytest.mark.parametrize("count", [1, 2])
def test_a_parameter_keeps_its_class(count: int) -> None:
    stages = stages_of(UsesItsClass(), count)
    kept = stages[-1].parameters["b.weight"]
    assert type(kept) is Marked
    assert kept.group == "experts"  # type: ignore[attr-defined]
    assert_gradients_of_whole(UsesItsClass(), stages)
    host = HostParameters(stages[-1].parameters).parameters["b.weight"]
    assert type(host) is Marked
    assert host.group == "experts"  # type: ignore[attr-defined]


class Quantised(torch.Tensor):
    """Eight bits and a scale, as libraries for quantised weights do it."""

    bits: Tensor
    scale: float

    @staticmethod
    def __new__(cls, data: Tensor, scale: float) -> Quantised:
        made: Any = torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32)
        made.bits, made.scale = (data / scale).to(torch.int8), scale
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return args[0]
        whole = [x.bits.float() * x.scale if isinstance(x, Quantised) else x for x in args]
        return func(*whole, **(kwargs or {}))


class OwnFunction(nn.Parameter):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


class MovesInItsOwnWay(nn.Parameter):
    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        return super().to(*args, **kwargs)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda data: nn.Parameter(Quantised(data, 0.1), requires_grad=False), r"Quantised.*__torch_dispatch__"),
        (OwnFunction, "OwnFunction.*__torch_function__"),
        (MovesInItsOwnWay, r"MovesInItsOwnWay.*\bto\b"),
    ],
)
def test_a_parameter_that_does_arithmetic_in_its_own_way_is_refused_by_name(make: Any, match: str) -> None:
    model = Model()
    model.a.weight = make(model.a.weight.detach())
    with pytest.raises(PartitionError, match=rf"parameter a\.weight is a \S*{match}.*buffers"):
        trace(model, example())


def test_a_buffer_of_such_a_class_is_refused_by_name() -> None:
    model = Model()
    model.register_buffer("table", Quantised(torch.randn(H, H), 0.1))
    with pytest.raises(PartitionError, match=r"buffer table is a \S*Quantised"):
        trace(model, example())


# One memory


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(lambda w: w.t(), id="transposed"),
        pytest.param(lambda w: w[:2], id="a part"),
        pytest.param(lambda w: w[:, 1:3], id="columns"),
        pytest.param(lambda w: w.view(torch.int32), id="another type"),
    ],
)
@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_one_memory_in_another_layout_is_refused_by_name(other: Any, kind: str) -> None:
    model = Model()
    seen = other(model.a.weight.data)
    if kind == "parameter":
        model.twin = nn.Parameter(seen, requires_grad=seen.is_floating_point())
    else:
        model.register_buffer("twin", seen)
    with pytest.raises(PartitionError, match=r"(a\.weight.* twin|twin.* a\.weight) share memory.*in forward"):
        trace(model, example())


def test_parts_of_one_memory_that_do_not_overlap_are_fine() -> None:
    def make() -> Model:
        model = Model()
        flat = torch.cat([model.a.weight.detach(), model.b.weight.detach()], dim=1)  # as interleaved columns
        model.a.weight.data, model.b.weight.data = flat[:, :H], flat[:, H:]
        return model

    assert_gradients_of_whole(make(), stages_of(make()))


def test_a_buffer_that_is_a_parameters_own_memory_is_refused() -> None:
    model = Model()
    model.register_buffer("twin", model.a.weight.detach())
    with pytest.raises(PartitionError, match=r"a\.weight and buffer twin share memory"):
        trace(model, example())
