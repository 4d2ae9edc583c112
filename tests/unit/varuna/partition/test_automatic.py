"""Where cut-points are put in a model that has none, what overrides that, and what is refused.

Letters: H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stages_by_hand import gradients, run_by_hand
from varuna import CutPoint, Varuna, describe_sections
from varuna.partition import ModelMap, PartitionError, build_stage, trace
from varuna.partition.cutting.automatic_cuts import choose_cuts, drop_light_sections

H = 4


class Model(nn.Module):
    """Runs `body` between two linear layers; without it, all members of `blocks`."""

    def __init__(self, blocks: nn.Module, body: Callable[[Model, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(H, H), nn.Linear(H, H)
        self.blocks = blocks
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.body is not None:
            x = self.body(self, x)
        else:
            for block in self.blocks.children():
                x = block(x)
        return self.last(x).square().mean()


def linears(count: int) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(H, H) for _ in range(count))


def example() -> dict[str, Tensor]:
    return {"x": torch.randn(3, H)}


def places(model_map: ModelMap) -> list[str]:
    return [place.path for place in model_map.cut_places]


def test_every_block_of_the_outermost_list_ends_a_section() -> None:
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(H, H), nn.Tanh(), nn.Linear(H, H)) for _ in range(3))
    model_map = trace(Model(blocks), example())
    assert places(model_map) == ["blocks.0", "blocks.1", "blocks.2"]
    assert [section.modules for section in model_map.sections] == [
        ("first", "blocks.0"),
        ("blocks.1",),
        ("blocks.2",),
        ("last",),
    ]
    assert model_map.find_boundary(1)[0].name == "cut-point 1 (after blocks.0)"


def test_a_list_is_cut_behind_what_follows_a_layer_without_parameters() -> None:
    layers = nn.Sequential(nn.Linear(H, H), nn.ReLU(), nn.Dropout(0.1), nn.Linear(H, H), nn.ReLU())
    assert places(trace(Model(layers), example())) == ["blocks.2", "blocks.4"]


def test_a_heavy_block_is_taken_apart_and_a_light_section_joined() -> None:
    def chain(count: int) -> nn.Sequential:
        return nn.Sequential(*linears(count))

    blocks = nn.ModuleList([chain(2), chain(2), chain(8), chain(2)])
    found = places(trace(Model(blocks), example()))
    assert found[:3] == ["blocks.0", "blocks.1", "blocks.2.0"]
    assert "blocks.2" in found
    assert "blocks.2.7" not in found  # that is the end of blocks.2

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.factor

    wide = nn.ModuleList(m for _ in range(2) for m in (nn.Sequential(nn.Linear(H, 64), nn.Linear(64, H)), Scale()))
    assert len(trace(Model(wide), example()).sections) == 2


@pytest.mark.long
def test_as_many_cut_points_as_are_asked_for() -> None:
    model = Model(linears(7))
    for count in range(8):
        assert len(trace(model, example(), cut_points=count).sections) == count + 1
    costs = trace(model, example(), cut_points=2).section_costs()
    assert max(costs) < 1.5 * min(costs)
    inside = Model(nn.ModuleList(nn.Sequential(nn.Linear(H, H), nn.Linear(H, H)) for _ in range(2)))
    assert places(trace(inside, example(), cut_points=3))[0].startswith("blocks.0")
    assert len(trace(inside, example(), cut_points=3).sections) == 4  # blocks are taken apart where too few are found


def test_cut_points_of_the_model_override() -> None:
    own = CutPoint()
    model = Model(linears(4), lambda m, x: m.blocks[1](own(m.blocks[0](x))))
    assert (len(trace(model, example()).sections), places(trace(model, example()))) == (2, [])
    with pytest.raises(ValueError, match="cut_points=3, but the model passes 1 CutPoints of its own"):
        trace(model, example(), cut_points=3)


def test_what_cannot_be_cut_is_refused_by_name() -> None:
    with pytest.raises(PartitionError, match="cut_points=9, but the model can be cut behind 4 of its repeated blocks"):
        Varuna(Model(linears(4)), get_batch_fn=example(), cut_points=9)
    with pytest.raises(ValueError, match="cut_points=-1"):
        trace(Model(linears(4)), example(), cut_points=-1)

    with pytest.raises(PartitionError, match=r"dry run on tensors without values: aten.mm.* at test_automatic"):
        trace(Model(linears(2), lambda m, x: x @ torch.ones(H + 1, H)), example())

    def twice(m: Model, x: Tensor) -> Tensor:
        one, two = m.blocks.children()
        return two(one(one(x)))

    assert places(trace(Model(linears(2), twice), example())) == ["blocks.1"]  # the other is called twice

    def past_the_cut(m: Model, x: Tensor) -> Tensor:
        kept = m.first.weight * torch.rand(())  # made here, by no module, and used behind both blocks
        return m.blocks[1](m.blocks[0](x)) @ kept

    refused = trace(Model(linears(2), past_the_cut), example())
    assert len(refused.sections) == 1
    assert refused.refused[0].startswith("after blocks.0: the tensor of shape (4, 4) made at test_automatic")
    with pytest.raises(
        PartitionError, match=r"behind 0 of.*These cuts are not possible: after blocks\.0: the tensor of shape"
    ):
        trace(Model(linears(2), past_the_cut), example(), cut_points=1)
    assert "not cut after blocks.0: the tensor of shape" in describe_sections(
        Model(linears(2), past_the_cut), example()
    )


@pytest.mark.parametrize("with_checkpoint", [False, True])
def test_stages_train_as_the_whole_does_with_tuples_and_activation_checkpointing(with_checkpoint: bool) -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(H, H)

        def forward(self, x: Tensor) -> tuple[None, dict[str, Tensor]]:
            return None, {"x": self.layer(x).tanh(), "seen": x.detach()}

    def body(m: Model, x: Tensor) -> Tensor:
        for block in m.blocks.children():
            out = checkpoint(block, x, use_reentrant=False) if with_checkpoint else block(x)
            x = out[1]["x"] + 0.1 * out[1]["seen"]
        return x

    torch.manual_seed(5)
    model, inputs = Model(nn.ModuleList(Pair() for _ in range(4)), body), example()
    model_map = trace(model, inputs)
    assert len(model_map.sections) == 5
    stages = [build_stage(model, model_map, section, section + 1, device="cpu") for section in range(5)]
    loss, _ = run_by_hand(stages, inputs)
    expected = model(**inputs)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    summed = gradients(stages)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(summed[name], parameter.grad, msg=name)


def test_the_user_s_model_is_left_as_it_was() -> None:
    model = Model(linears(3))
    build_stage(model, trace(model, example()), 0, 2, device="cpu")
    assert all("forward" not in module.__dict__ for module in model.modules())
    assert not any(isinstance(module, CutPoint) for module in model.modules())


def test_the_table_says_what_each_section_has_and_sends() -> None:
    with torch.device("meta"):
        model = Model(linears(3))
        model.last.weight = model.first.weight
    lines = describe_sections(model, example(), cut_points=2).splitlines()
    assert lines[0].split()[:4] == ["section", "work", "parameters", "modules"]
    assert [line.split()[0] for line in lines[1:4]] == ["0", "1", "2"]
    assert "first … blocks.0" in lines[1]
    assert lines[1].endswith("cut-point 1 (after blocks.0) 16 B")
    assert lines[4] == "shared by sections 0, 2: first.weight"


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_the_chosen_cuts_are_the_best_of_all(data: st.DataObject) -> None:
    costs = data.draw(st.lists(st.integers(1, 50).map(float), min_size=2, max_size=7))
    crossing = data.draw(st.lists(st.integers(0, 3), min_size=len(costs) - 1, max_size=len(costs) - 1))
    n = data.draw(st.integers(0, len(costs) - 1))

    def weight(cuts: tuple[int, ...]) -> float:
        bounds = (0, *cuts, len(costs))
        sent = sum(1000.0 * crossing[cut - 1] for cut in cuts)
        return sum(sum(costs[a:b]) ** 2 for a, b in pairwise(bounds)) + 2 * sum(costs) / (n + 1) * sent

    chosen = tuple(choose_cuts(costs, crossing, n))
    assert len(chosen) == n
    assert weight(chosen) == pytest.approx(min(weight(cuts) for cuts in combinations(range(1, len(costs)), n)))


@given(st.lists(st.integers(0, 100).map(float), min_size=1, max_size=12))
def test_light_sections_are_joined_until_none_is_left(costs: list[float]) -> None:
    cuts = drop_light_sections(costs)
    assert cuts == sorted(set(cuts))
    assert all(0 < cut < len(costs) for cut in cuts)
    bounds = [0, *cuts, len(costs)]
    sums = [sum(costs[a:b]) for a, b in pairwise(bounds)]
    assert len(sums) == 1 or min(sums) >= 0.25 * sum(sums) / len(sums)


def test_no_section_is_without_parameters() -> None:
    layers = nn.Sequential(nn.Dropout(0.1), nn.Linear(H, H), nn.ReLU(), nn.Dropout(0.1), nn.Linear(H, H), nn.ReLU())

    class Bare(Model):
        def forward(self, x: Tensor) -> Tensor:
            return self.blocks(x).square().mean()

    model_map = trace(Bare(layers), example())
    assert places(model_map) == ["blocks.3"]
    assert all(section.parameters for section in model_map.sections)
    reason = r"after blocks.0: a section beside it would have no parameters; after blocks.5"
    with pytest.raises(PartitionError, match=reason):
        trace(Bare(layers), example(), cut_points=3)
