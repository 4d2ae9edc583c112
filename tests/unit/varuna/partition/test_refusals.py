"""Models that cutting could silently change: each trains as the whole model does, or is refused.

Letters: H hidden.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from stages_by_hand import gradients, run_by_hand
from varuna import CutPoint
from varuna.partition import PartitionError, build_stage, trace

H = 4


class Model(nn.Module):
    """Two layers with a cut-point between; `body` says what is done with them."""

    def __init__(self, body: Callable[[Any, Tensor], Tensor], **attributes: Any) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.a, self.b = nn.Linear(H, H), nn.Linear(H, H)
        self.cut, self.body = CutPoint(), body
        self.register_buffer("mean", torch.zeros(H))
        self.register_buffer("count", torch.zeros(()))
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x).square().mean()

    def plain(self, x: Tensor) -> Tensor:
        return self.b(self.cut(self.a(x)))


def example() -> dict[str, Tensor]:
    return {"x": torch.randn(3, H, generator=torch.Generator().manual_seed(5))}


def refused(model: nn.Module, match: str) -> None:
    with pytest.raises(PartitionError, match=match):
        trace(model, example()).find_boundary(1)


def same_as_whole(make: Callable[[], nn.Module]) -> None:
    """Losses, gradients and buffers over three forwards, in two stages and whole."""
    whole, model = make(), make()
    model_map = trace(model, example())
    stages = [build_stage(model, model_map, section, section + 1, device="cpu") for section in range(2)]
    for _ in range(3):
        expected = whole(**example())
        expected.backward()
        loss, _ = run_by_hand(stages, example())
        torch.testing.assert_close(loss, expected.detach())
    summed = gradients(stages)
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(summed[name], parameter.grad, msg=name)
    held = {name: buffer for stage in stages for name, buffer in stage.buffers.items()}
    for name, buffer in whole.named_buffers():
        if name in model_map.graph.buffers_used:
            torch.testing.assert_close(held[name], buffer, msg=name)


# State that is no buffer


def test_a_hidden_state_carried_from_forward_to_forward_is_refused() -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        y = m.a(x) if m.hidden is None else m.a(x) + m.hidden
        m.hidden = y.detach()
        return m.b(m.cut(y))

    refused(Model(body, hidden=None), r"in body a tensor .* left behind \(kept in hidden\), made at .*register_buffer")


def test_activations_kept_in_a_list_outside_of_the_model_are_refused() -> None:
    memory: list[Tensor] = []

    def body(m: Any, x: Tensor) -> Tensor:
        y = m.a(x) + sum(memory)
        memory.append(y.detach())
        return m.b(m.cut(y))

    refused(Model(body), r"in body a tensor of shape \(2, 4\) that an earlier forward left behind outside of the model")


def test_a_python_number_that_forward_counts_and_computes_with_is_refused() -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        m.calls += 1
        return m.plain(x * 0.9**m.calls)

    refused(Model(body, calls=0), "forward changes calls each time and computes with it")

    def harmless(m: Any, x: Tensor) -> Tensor:
        m.calls += 1
        return m.plain(x)

    same_as_whole(lambda: Model(harmless, calls=0))


@pytest.mark.parametrize("in_place", [True, False])
def test_a_tensor_that_forward_counts_with_and_no_buffer_is_refused(in_place: bool) -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        if in_place:
            m.total += 1
        else:
            m.total = m.total + 1
        return m.plain(x * m.total)

    refused(Model(body, total=torch.zeros(())), r"left behind \(kept in total\)|left behind, made at")


def test_what_is_made_once_and_kept_is_no_state() -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        if m.scale is None:
            m.scale = torch.arange(H).float().cos()
            m.width = x.shape[1]
        return m.plain(x * m.scale)

    same_as_whole(lambda: Model(body, scale=None))


@pytest.mark.parametrize(("draw", "name"), [(random.random, "random"), (np.random.rand, "numpy")])
def test_draws_from_generators_that_varuna_does_not_keep_are_refused(draw: Callable[[], float], name: str) -> None:
    with pytest.raises(PartitionError, match=f"draws from {name}'s generator"):
        trace(Model(lambda m, x: m.plain(x * (0.5 if draw() < 0.1 else 2.0))), example())


# Parameters


def test_parameters_changed_by_forward_are_refused() -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            m.a.weight.clamp_(-0.1, 0.1)
        return m.plain(x)

    refused(Model(body), r"forward changes parameter a.weight in place at test_refusals.py:\d+ in body")

    def replaced(m: Any, x: Tensor) -> Tensor:
        m.a.weight.data = m.a.weight.data.clamp(-0.1, 0.1)
        return m.plain(x)

    def another(m: Any, x: Tensor) -> Tensor:
        m.b.weight = nn.Parameter(m.b.weight.detach() * 0.5)
        return m.plain(x)

    refused(Model(replaced), "forward replaces parameter a.weight, or its .data")
    refused(Model(another), "forward replaces parameter b.weight, or its .data")
    table = nn.Embedding(5, H, max_norm=1.0)  # it shrinks the rows that it is asked for
    refused(
        Model(lambda m, x: m.plain(m.table(x.argmax(1))), table=table),
        r"forward changes parameter table.weight in place at test_refusals.py:\d+ in <lambda>",
    )


def test_one_parameter_used_by_modules_and_functions_of_two_sections_is_shared() -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        return F.linear(m.b(m.cut(m.a(x))), m.a.weight.t(), m.a.bias)

    same_as_whole(lambda: Model(body))
    assert trace(Model(body), example()).shared == {"a.weight": (0, 1), "a.bias": (0, 1)}


# Buffers that forward writes


def test_a_buffer_that_forward_replaces_is_written() -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        y = m.a(x)
        m.mean = 0.9 * m.mean + 0.1 * y.detach().mean(0)
        return m.b(m.cut(y - m.mean))

    assert trace(Model(body), example()).graph.buffers_changed.keys() == {"mean"}

    def with_history(m: Any, x: Tensor) -> Tensor:
        m.mean = m.a(x).mean(0)
        return m.plain(x)

    refused(Model(with_history), "forward keeps the tensor made at .* as buffer mean with its autograd history")


def test_a_buffer_that_forward_writes_belongs_to_one_stage() -> None:
    def read_later(m: Any, x: Tensor) -> Tensor:
        m.count += 1
        return m.b(m.cut(m.a(x))) / m.count

    refused(Model(read_later), r"buffer count is changed by forward \(.* in read_later\).*both sides of cut-point 1")

    def computed(m: Any, x: Tensor) -> Tensor:
        m.count += 1
        factor = m.count.sqrt()
        return m.b(m.cut(m.a(x))) * factor

    refused(Model(computed), "buffer count is changed by forward .* through tensors computed from it")

    def chooses(m: Any, x: Tensor) -> Tensor:
        again = m.count.item() > 2  # in all stages, which would count for themselves
        m.count += 1
        return m.plain(x + 1 if again else x)

    refused(Model(chooses), "buffer count is changed by forward .*both sides of cut-point 1")


class Counted(nn.Module):
    """A block that divides by the number of runs of all blocks of its class."""

    counter: Any

    def __init__(self, counter: nn.Module) -> None:
        super().__init__()
        self.linear, self.counter = nn.Linear(H, H), counter

    def forward(self, x: Tensor) -> Tensor:
        self.counter.count += 1
        return self.linear(x) / self.counter.count


def test_no_cut_is_made_between_blocks_that_write_one_buffer() -> None:
    counter = nn.Module()
    counter.register_buffer("count", torch.zeros(()))
    blocks = nn.Sequential(Counted(counter), Counted(counter), *(nn.Linear(H, H) for _ in range(2)))

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = blocks

        def forward(self, x: Tensor) -> Tensor:
            return self.blocks(x).square().mean()

    model_map = trace(Chain(), example())
    assert [place.path for place in model_map.cut_places] == ["blocks.1", "blocks.2"]
    assert "after blocks.0: buffer blocks.0.counter.count is changed by forward" in model_map.refused[0]


def test_statistics_and_power_iterations_are_those_of_the_whole_model() -> None:
    def make() -> nn.Module:
        norms = nn.ModuleList([nn.BatchNorm1d(H), nn.BatchNorm1d(H, momentum=None)])
        return Model(lambda m, x: m.norms[1](m.b(m.cut(m.norms[0](m.a(x))))), norms=norms)

    same_as_whole(make)

    def constrained() -> nn.Module:
        model = Model(lambda m, x: m.plain(x))
        torch.manual_seed(4)
        spectral_norm(model.a)
        return model

    same_as_whole(constrained)


def test_an_auxiliary_loss_handed_over_in_an_attribute_or_by_a_hook() -> None:
    def by_attribute(m: Any, x: Tensor) -> Tensor:
        y = m.a(x)
        m.penalty = y.square().mean()
        return m.b(m.cut(y)) + m.penalty

    same_as_whole(lambda: Model(by_attribute))

    class Outputs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Tensor] = []
            self.linear = nn.Linear(H, H)

        def forward(self, x: Tensor) -> Tensor:
            self.seen.clear()
            y = self.linear(x)
            self.seen.append(y)
            return y.tanh()

    same_as_whole(lambda: Model(lambda m, x: m.b(m.cut(m.outputs(m.a(x)))) + m.outputs.seen[0], outputs=Outputs()))


# Numbers beside tensors


class Counts(nn.Module):
    """Returns a number beside its tensor, or keeps it in `n`.

    `merges`: its tensor is one that a later stage cannot make from what its own modules return.
    """

    def __init__(self, number: Callable[[Tensor], Any], *, keeps: bool = False, merges: bool = False) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.linear, self.other = nn.Linear(H, H), nn.Linear(H, H) if merges else None
        self.number, self.keeps, self.n = number, keeps, 1.0

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x) if self.other is None else self.linear(x) + self.other(x)
        number = self.number(x)
        if self.keeps:
            self.n = number
            return y
        return y, number


def counting(number: Callable[[Tensor], Any], **how: Any) -> Model:
    """Divides by the number in the section behind the cut; with `merges`, adds the module's tensor there, too."""

    def body(m: Any, x: Tensor) -> Tensor:
        y, n = (m.counts(x), m.counts.n) if m.counts.keeps else m.counts(x)
        z = m.b(m.cut(m.a(y))) / n
        return z if m.counts.other is None else z + y

    return Model(body, counts=Counts(number, **how))


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize(
    "number",
    [
        lambda x: float((x > 0).sum()),
        lambda x: int((x > 0).sum()),
        lambda x: int((x > 0).sum(1).max()) + 1,
        lambda x: 1 / x.shape[0],
        lambda x: x.shape[0],
        lambda x: x.shape[0] ** 2,
        lambda x: -(-x.shape[0] * 5 // 4),
        lambda x: max(x.shape[0], 3),
        lambda x: x.shape[0] > 2,
        lambda x: x.shape[1],
    ],
)
def test_a_number_beside_tensors_is_that_of_the_batch(number: Callable[[Tensor], Any], keeps: bool) -> None:
    same_as_whole(lambda: counting(number, keeps=keeps))


@pytest.mark.parametrize("keeps", [False, True])
def test_a_number_of_the_batch_that_a_later_stage_cannot_compute_is_refused(keeps: bool) -> None:
    model = counting(lambda x: 1 / x.shape[0], keeps=keeps, merges=True)
    what = "sets n, which other code reads" if keeps else r"returns 0\.5 with 2 examples and 0\.25 with 4"
    refused(model, rf"module counts {what}.* as a tensor, or compute it in forward outside of counts")


def test_a_number_that_only_looks_fixed_is_refused_when_it_differs() -> None:
    """A stage that does not run the module has the number of the dry run, and another stage compares."""
    model = counting(lambda x: max(x.shape[0], 4), merges=True)
    model_map = trace(model, example())
    stages = [build_stage(model, model_map, section, section + 1, device="cpu") for section in range(2)]
    whole = model(**example())
    torch.testing.assert_close(run_by_hand(stages, example())[0], whole.detach())
    with pytest.raises(
        PartitionError, match=r"module counts has returned 5 beside its tensors, and 4 .* as a tensor, or compute it"
    ):
        stages[0].forward({"x": torch.zeros(5, H)}, [])


@pytest.mark.parametrize("number", [lambda x: x.shape[0], lambda x: 2 if x.sum() > -99 else 3])
def test_a_number_that_a_later_stage_can_foretell_needs_no_run_of_its_module(number: Callable[[Tensor], int]) -> None:
    same_as_whole(lambda: counting(number, merges=True))


@pytest.mark.parametrize(
    ("kept", "read"),
    [
        (lambda x: x.shape, lambda n: n[0]),
        (lambda x: [x.shape[1], 3], lambda n: n[0]),
        (lambda x: {"rows": x.shape[0]}, lambda n: n["rows"]),
    ],
)
def test_numbers_kept_together_are_those_of_the_batch(
    kept: Callable[[Tensor], Any], read: Callable[[Any], int]
) -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        return m.b(m.cut(m.a(m.counts(x)))) / read(m.counts.n)

    same_as_whole(lambda: Model(body, counts=Counts(lambda x: kept(x), keeps=True)))


def test_modules_whose_numbers_nobody_needs_stay_ghosts() -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        y = m.counts(x)
        return m.b(m.cut(m.a(y))) + y

    def make() -> Model:
        return Model(body, counts=Counts(lambda x: 1 / x.shape[0], keeps=True, merges=True))

    same_as_whole(make)

    def sized(m: Any, x: Tensor) -> Tensor:
        y, width = m.counts(x)
        return m.b(m.cut(m.a(y))).view(-1, width) + y

    same_as_whole(lambda: Model(sized, counts=Counts(lambda x: x.shape[1], merges=True)))
