"""Modules that choose rows by computed values: experts that run on the tokens which are sent to them.

Letters: T tokens, H hidden, E experts.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from stages_by_hand import gradients, run_by_hand
from varuna import CutPoint
from varuna.partition import ModelMap, PartitionError, build_stage, trace

H, E = 4, 3


class Experts(nn.Module):
    """Each token goes to the expert of its largest score; an expert without tokens does not run."""

    def __init__(self, act: nn.Module | None = None) -> None:
        super().__init__()
        self.router = nn.Linear(H, E)
        self.experts = nn.ModuleDict({f"expert_{number}": nn.Linear(H, H) for number in range(E)})
        self.unused = nn.Linear(H, H)
        self.act = act or nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).softmax(-1)
        chosen = nn.functional.one_hot(scores.argmax(-1), E)
        made = torch.zeros_like(x)
        for number in chosen.sum(0).nonzero():
            (rows,) = torch.where(chosen[:, number[0]])
            expert = self.experts[f"expert_{number[0]}"]
            made.index_add_(0, rows, self.act(expert(x[rows])) * scores[rows, number[0], None])
        return x + made


class Model(nn.Module):
    def __init__(self, blocks: list[nn.Module], act: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(H, H), nn.Linear(H, H)
        self.blocks = nn.ModuleList(blocks)
        self.act = act or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.first(x))
        for block in self.blocks:
            x = block(x)
        return self.last(x).square().mean()


class Odd(nn.Module):
    """Applies a function with one linear layer."""

    def __init__(self, body: Callable[[nn.Linear, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(H, H)
        self.cut_point = CutPoint()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.linear, x)


def example(rows: int = 8) -> dict[str, Tensor]:
    return {"x": torch.randn(rows, H)}


def places(model_map: ModelMap) -> list[str]:
    return [place.path for place in model_map.cut_places]


def chosen_experts(model: Model, x: Tensor) -> list[set[str]]:
    """By block, the experts that run."""
    found: list[set[str]] = [set() for _ in model.blocks]
    handles = [
        expert.register_forward_hook(lambda *_, at=at, name=name: found[at].add(name))
        for at, block in enumerate(model.blocks)
        for name, expert in block.experts.items()
    ]
    model(x)
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.long
def test_experts_run_in_stages_as_they_do_whole_whichever_are_chosen() -> None:
    torch.manual_seed(1)
    model = Model([Experts() for _ in range(3)])
    model_map = trace(model, example())
    assert places(model_map) == ["blocks.0", "blocks.1"]
    seen = set()
    for cut in (1, 2):
        stages = [build_stage(model, model_map, *run, device="cpu") for run in ((0, cut), (cut, 3))]
        for rows in (1, 1, 1, 8):
            batch = example(rows)
            seen.add(str(chosen_experts(model, batch["x"])))
            model.zero_grad()
            expected = model(**batch)
            expected.backward()
            for stage in stages:
                for parameter in stage.parameters.values():
                    parameter.grad = None
            loss, _ = run_by_hand(stages, batch)
            assert torch.equal(loss, expected.detach())
            found = gradients(stages)
            wanted = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            assert found.keys() == wanted.keys()
            assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert len(seen) > 3, "the batches choose differently"


@pytest.mark.long
def test_all_that_a_choosing_module_holds_belongs_to_its_section() -> None:
    model_map = trace(Model([Experts() for _ in range(3)]), example())
    for section in range(3):
        held = model_map.sections[section].parameters
        assert f"blocks.{section}.unused.weight" in held
        assert all(f"blocks.{section}.experts.expert_{number}.weight" in held for number in range(E))


def test_no_cut_is_placed_between_experts() -> None:
    with pytest.raises(PartitionError, match="cut behind 2 of its repeated blocks"):
        trace(Model([Experts(), Experts()]), example(), cut_points=3)


def test_what_a_mask_picks_may_not_leave_the_module() -> None:
    rows = Odd(lambda linear, x: x[linear(x).sum(-1) > 0])
    with pytest.raises(PartitionError, match=r"over the whole forward .*test_choices.py:\d+ in <lambda>"):
        trace(Model([rows, nn.Linear(H, H)]), example())


def test_a_module_around_it_that_returns_a_fixed_size_holds_the_choice() -> None:
    model_map = trace(Model([Sums(), Sums()]), example())
    assert places(model_map) == ["blocks.0", "blocks.1"]


class Sums(nn.Module):
    """The sum of the rows that a module inside picks."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = Odd(lambda linear, x: x[linear(x).sum(-1) > 0])

    def forward(self, x: Tensor) -> Tensor:
        return x + self.rows(x).sum(0)


def test_an_explicit_cut_point_inside_a_choosing_module_is_refused() -> None:
    class Cut(Experts):
        def __init__(self) -> None:
            super().__init__()
            self.cut_point = CutPoint()

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.cut_point(x))

    with pytest.raises(PartitionError, match=r"blocks.0 chooses rows by computed values .* cannot be cut inside"):
        trace(Model([Cut()]), example())


def test_a_module_that_choosing_modules_and_others_call_is_refused() -> None:
    shared = nn.Tanh()
    with pytest.raises(
        PartitionError, match=r"module blocks.0.act is called by a module that chooses rows .* make one of it"
    ):
        trace(Model([Experts(shared), Experts(shared)], shared), example())


def test_a_branch_on_a_computed_value_is_refused() -> None:
    branch = Odd(lambda linear, x: linear(x) if linear(x).sum() > 0 else x)
    with pytest.raises(PartitionError, match="looks at the value of a tensor"):
        trace(Model([branch, nn.Linear(H, H)]), example())


def test_grouped_products_of_fp32_are_followed() -> None:
    class Grouped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(2, H, H))

        def forward(self, x: Tensor) -> Tensor:
            ends = torch.tensor([x.shape[0] // 2, x.shape[0]], dtype=torch.int32)
            return torch.nn.functional.grouped_mm(x, self.weight, offs=ends)

    model = Model([Grouped(), Grouped()])
    model_map = trace(model, example())
    assert [boundary.shape for boundary in model_map.find_boundary(1)] == [(-1, H)]
    stages = [build_stage(model, model_map, *run, device="cpu") for run in ((0, 1), (1, 3))]
    batch = example()
    assert run_by_hand(stages, batch)[0].equal(model(**batch).detach())


def test_a_ctc_loss_is_followed() -> None:
    class Speech(Model):
        def forward(self, x: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
            x = self.first(x)
            for block in self.blocks:
                x = block(x)
            lengths = torch.full((x.shape[0],), x.shape[1])
            targets = (labels > 0).sum(-1)
            return nn.functional.ctc_loss(self.last(x).log_softmax(-1).transpose(0, 1), labels, lengths, targets)

    model = Speech([nn.Linear(H, H), nn.Linear(H, H)])
    batch = {"x": torch.randn(3, 7, H), "labels": torch.randint(1, H, (3, 2))}
    model_map = trace(model, batch)
    stages = [build_stage(model, model_map, *run, device="cpu") for run in ((0, 1), (1, 3))]
    assert run_by_hand(stages, batch)[0].equal(model(**batch).detach())


def test_a_conversion_in_forward_is_refused_and_none_is_not() -> None:
    same = [Odd(lambda linear, x: linear.to(x.dtype)(x)) for _ in range(2)]
    assert places(trace(Model(same), example())) == ["blocks.0", "blocks.1"]
    other = Odd(lambda linear, x: linear.to(torch.float64)(x.double()).float())
    with pytest.raises(PartitionError, match=r"forward converts blocks.0.linear.weight \(torch.float32 on cpu\)"):
        trace(Model([other, nn.Linear(H, H)]), example())
