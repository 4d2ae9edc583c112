"""What the dry run learns of a model, and what it refuses, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from varuna.cut_point import CutPoint
from varuna.partition import Boundary, PartitionError, batch_size_of, build_stage, loss_of, take_examples, trace
from varuna.partition.model_io.structure import flatten_nested

H = 4


class Model(nn.Module):
    """Three layers and two cut-points; `body` says what forward does."""

    def __init__(self, body: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.body = body
        self.a, self.b, self.c = nn.Linear(H, H), nn.Linear(H, H), nn.Linear(H, H)
        self.scale = nn.Parameter(torch.ones(H))
        self.unused = nn.Linear(H, H)
        self.register_buffer("offset", torch.ones(H))
        self.cuts = [CutPoint(), CutPoint()]
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


def plain(m: Model, x: Tensor) -> Tensor:
    return m.c(m.cuts[1](m.b(m.cuts[0](m.a(x) * m.scale)) + m.offset)).square().mean()


def example(batch: int = 3) -> dict[str, Any]:
    return {"x": torch.randn(batch, H)}


def losses_agree(model: nn.Module, inputs: dict[str, Any]) -> None:
    """One stage per section, run by hand with gradients, against the whole model."""
    model_map = trace(model, inputs)
    stages = [build_stage(model, model_map, i, i + 1, device="cpu") for i in range(len(model_map.sections))]
    received: list[Tensor] = []
    kept = []
    for stage in stages[:-1]:
        sent = stage.forward(inputs, received)
        kept.append((received, sent))
        received = [x.detach().requires_grad_(b.requires_grad) for x, b in zip(sent, stage.sends, strict=True)]
    loss = stages[-1].forward(inputs, received)
    assert isinstance(loss, Tensor)
    loss.backward()
    for before, sent in reversed(kept):
        pairs = [(x, y.grad) for x, y in zip(sent, received, strict=True) if y.grad is not None]
        torch.autograd.backward([x for x, _ in pairs], [g for _, g in pairs])
        received = before
    whole = loss_of(model(**inputs))
    whole.backward()
    torch.testing.assert_close(loss, whole, rtol=1e-6, atol=0)
    for name, parameter in model.named_parameters():
        parts = [
            s.parameters[name].grad for s in stages if name in s.parameters and s.parameters[name].grad is not None
        ]
        assert (parameter.grad is None) == (not parts), name
        if parts:
            torch.testing.assert_close(torch.stack(parts).sum(0), parameter.grad, rtol=1e-5, atol=1e-7)
    model.zero_grad()


def test_sections_name_their_modules_parameters_and_buffers() -> None:
    model = Model(plain)
    model_map = trace(model, example())
    assert [s.modules for s in model_map.sections] == [("a",), ("b",), ("c",)]
    assert model_map.sections[0].parameters == ("scale", "a.weight", "a.bias")
    assert model_map.sections[1].parameters == ("b.weight", "b.bias")
    assert model_map.sections[1].buffers == ("offset",)
    # Nothing uses these. They belong to their neighbours' sections, so that checkpoints are complete.
    assert model_map.sections[2].parameters == ("c.weight", "c.bias", "unused.weight", "unused.bias")
    assert model_map.shared == {}
    assert model_map.parameter_bytes["a.weight"] == 4 * H * H
    assert model_map.sections_of("scale") == (0,)


def test_boundaries_tell_shape_type_and_bytes() -> None:
    (boundary,) = trace(Model(plain), example()).find_boundary(1)
    assert (boundary.shape, boundary.batch_dim, boundary.dtype, boundary.requires_grad) == (
        (-1, H),
        0,
        torch.float32,
        True,
    )
    assert boundary.shape_for(5) == (5, H)
    assert boundary.bytes_for(5) == 5 * H * 4
    assert boundary.name.startswith("cut-point 1 (test_trace.py:")
    assert Boundary("x", (7, -1), 1, torch.int64, False, rows_per_example=3).shape_for(2) == (7, 6)


def test_tracing_leaves_the_model_the_random_stream_and_memory_alone() -> None:
    def body(m: Model, x: Tensor) -> Tensor:
        m.kept.append(x)
        m.offset.add_(1)
        return F.dropout(m.cuts[0](m.a(x) + torch.rand(H)), 0.5).sum()

    model, inputs = Model(body), example()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    trace(model, inputs)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.kept == []
    assert "forward" not in model.a.__dict__
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_a_cut_point_outside_varuna_is_the_identity() -> None:
    x = torch.randn(2, H)
    assert CutPoint()(x) is x
    assert list(CutPoint().parameters()) == []
    model = Model(plain)
    assert model(**example()).requires_grad


def test_any_number_of_examples_will_do_for_the_dry_run() -> None:
    for batch in (1, 2, 17):
        assert trace(Model(plain), example(batch)).find_boundary(1)[0].shape == (-1, H)


def test_state_handed_over_in_a_list_reaches_the_later_stage() -> None:
    class Keeps(nn.Module):
        def __init__(self, store: list[Tensor]) -> None:
            super().__init__()
            self.inner, self.store = nn.Linear(H, H), store

        def forward(self, x: Tensor) -> Tensor:
            x = self.inner(x)
            self.store.append(x)
            return x.relu()

    class Handing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.store: list[Tensor] = []
            self.down = nn.ModuleList([Keeps(self.store) for _ in range(3)])
            self.up = nn.ModuleList([nn.Linear(H, H) for _ in range(3)])
            self.cuts = [CutPoint() for _ in range(6)]

        def forward(self, x: Tensor) -> Tensor:
            for layer, cut in zip(self.down, self.cuts[:3], strict=True):
                x = cut(layer(x))
            for layer, cut in zip(self.up, self.cuts[3:], strict=True):
                x = cut(layer(x) * self.store.pop())
            return x.square().mean()

    losses_agree(Handing(), example())


def test_a_view_of_a_modules_output_is_made_again_from_it() -> None:
    def body(m: Model, x: Tensor) -> Tensor:
        h = m.a(x)
        half = h.chunk(2, dim=1)[0] * 2
        y = m.cuts[1](m.b(m.cuts[0](h.relu())))
        return (m.c(y)[:, : H // 2] * half).mean()

    losses_agree(Model(body), example())


def test_the_argument_of_a_cut_point_may_be_used_behind_it() -> None:
    def body(m: Model, x: Tensor) -> Tensor:
        x = x + m.a(x)
        x = x + m.b(m.cuts[0](x))
        return (x + m.c(m.cuts[1](x))).square().mean()

    losses_agree(Model(body), example())


def test_a_view_of_a_parameter_belongs_where_it_is_used() -> None:
    def body(m: Model, x: Tensor) -> Tensor:
        weight = m.a.weight.t()
        y = m.cuts[0](x @ weight)
        return (m.b(m.cuts[1](y)) @ weight).square().mean()

    model = Model(body)
    assert trace(model, example()).shared == {"a.weight": (0, 2)}
    losses_agree(model, example())


def test_modules_may_change_their_argument_in_place_and_return_it() -> None:
    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.randn(H))

        def forward(self, x: Tensor) -> Tensor:
            return x.add_(self.bias)

    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.adds, self.cut = nn.Linear(H, H), nn.Linear(H, H), Adds(), CutPoint()

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            same = self.adds(h)
            y = self.cut(self.b(same))
            return (y * h + same).mean()

    losses_agree(Changing(), example())


def test_activation_checkpointing_works_inside_and_before_a_stage() -> None:
    def body(m: Model, x: Tensor) -> Tensor:
        h = checkpoint(m.a, x, use_reentrant=False)
        y = m.cuts[0](checkpoint(m.b, h, use_reentrant=False))
        return (m.cuts[1](checkpoint(m.c, y, use_reentrant=False)) + h).square().mean()

    losses_agree(Model(body), example())


def test_reentrant_checkpointing_of_what_later_stages_use_is_refused() -> None:
    def body(m: Model, x: Tensor) -> Tensor:
        h = checkpoint(m.a, x.requires_grad_(), use_reentrant=True)
        return (m.b(m.cuts[0](h.relu())) + h).sum()

    model, inputs = Model(body), example()
    stage = build_stage(model, trace(model, inputs), 1, 2, device="cpu")
    with pytest.raises(PartitionError, match="module a runs without gradients"):
        stage.forward(inputs, [torch.zeros(b.shape_for(3), requires_grad=True) for b in stage.receives])


def test_shared_weights_by_name_are_one_parameter() -> None:
    model_map = trace(Model(plain), example(), shared_weights=[("c.weight", "a.weight")])
    assert model_map.shared == {"a.weight": (0, 2)}
    assert model_map.first_name["c.weight"] == "a.weight"
    with pytest.raises(KeyError, match="'nothing'"):
        trace(Model(plain), example(), shared_weights=[("a.weight", "nothing")])


def test_a_placed_result_may_be_tuple_mapping_or_object() -> None:
    loss = torch.tensor(1.5)
    holder = type("Output", (), {"loss": loss})()
    for result in (loss, (loss, 3), [loss], {"loss": loss}, holder, loss.reshape(1)):
        assert loss_of(result).item() == 1.5
        assert loss_of(result).shape == ()
    for wrong in (None, (), {"logits": loss}, torch.zeros(3), "loss"):
        with pytest.raises(PartitionError, match="scalar mean loss"):
            loss_of(wrong)


def test_the_batch_is_the_first_dimension_of_the_inputs() -> None:
    inputs = {"flag": True, "x": torch.arange(6).view(3, 2), "table": torch.zeros(5, 2), "n": {"y": torch.arange(3)}}
    assert batch_size_of(inputs) == 3
    taken = take_examples(inputs, slice(1, 3))
    assert taken["x"].tolist() == [[2, 3], [4, 5]]
    assert taken["n"]["y"].tolist() == [1, 2]
    assert taken["table"].shape == (5, 2)
    with pytest.raises(PartitionError, match="no tensor whose first dimension is the batch"):
        batch_size_of({"flag": True})


# What is refused


def refused(body: Callable[[Any, Tensor], Any], match: str) -> None:
    with pytest.raises(PartitionError, match=match):
        trace(Model(body), example())


def test_a_cut_point_used_twice_is_refused() -> None:
    refused(
        lambda m, x: m.b(m.cuts[0](m.a(m.cuts[0](x)))).sum(),
        r"test_trace.py:\d+.*second time.*one CutPoint per",
    )


def test_a_cut_point_takes_one_tensor() -> None:
    refused(lambda m, x: m.cuts[0]((m.a(x), x))[0].sum(), "called on tuple; it takes one tensor")


def test_a_crossing_tensor_without_producer_is_named() -> None:
    def body(m: Model, x: Tensor) -> Tensor:
        mixed = m.a(x) + m.b(x)
        y = m.cuts[0](mixed.relu())
        return (m.c(y) * mixed).sum()

    model = Model(body)
    model_map = trace(model, example())
    with pytest.raises(
        PartitionError,
        match=r"shape \(2, 4\) made at test_trace.py:\d+ in body.*section 0 is used in section 1",
    ):
        build_stage(model, model_map, 0, 1, device="cpu")
    assert build_stage(model, model_map, 0, 2, device="cpu").is_last  # without a cut, it works


def test_a_random_draw_that_later_sections_use_is_named() -> None:
    def body(m: Model, x: Tensor) -> Tensor:
        mask = torch.bernoulli(torch.full_like(x, 0.5))
        return (m.b(m.cuts[0](m.a(x * mask))) * mask).sum()

    model = Model(body)
    with pytest.raises(PartitionError, match="used in section 1"):
        trace(model, example()).find_boundary(1)


def test_a_path_that_depends_on_activations_is_refused() -> None:
    refused(
        lambda m, x: m.b(m.cuts[0](m.a(x))).sum() if m.a(x).sum() > 0 else x.sum(), r"looks at the value.*trace.py:\d+"
    )


def test_a_path_may_depend_on_inputs_and_buffers() -> None:
    def body(m: Model, x: Tensor) -> Tensor:
        assert m.offset.sum().item() == H
        rows = (x > -100).nonzero().shape[0]
        y = m.cuts[0](m.a(x) if x.abs().sum() > 0 else x)
        return m.b(y)[x[:, 0] < 100].sum() / rows

    losses_agree(Model(body), example())


def takes_more_layers(m: Model, x: Tensor, condition: bool) -> Tensor:
    y = m.a(x)
    if condition:
        y = y + m.unused(x)
    return m.c(m.cuts[1](m.b(m.cuts[0](y)))).square().mean()


def takes_an_earlier_tensor(m: Model, x: Tensor, condition: bool) -> Tensor:
    early = m.a(x)
    y = m.b(m.cuts[0](early * m.scale))
    if condition:
        y = y + early
    return m.c(m.cuts[1](y)).square().mean()


def takes_an_earlier_parameter(m: Model, x: Tensor, condition: bool) -> Tensor:
    y = m.b(m.cuts[0](m.a(x) * m.scale))
    if condition:
        y = y * m.scale
    return m.c(m.cuts[1](y)).square().mean()


def takes_an_earlier_buffer(m: Model, x: Tensor, condition: bool) -> Tensor:
    y = m.b(m.cuts[0](m.a(x) + m.offset))
    if condition:
        y = y * m.offset
    return m.c(m.cuts[1](y)).square().mean()


OTHER_WAYS: dict[str, Callable[[Model, Tensor], bool]] = {
    "an input": lambda m, x: bool((x > 0).any()),
    "the mode": lambda m, x: not m.training,
    "an attribute": lambda m, x: bool(m.kept),
}


@pytest.mark.parametrize("condition", OTHER_WAYS)
@pytest.mark.parametrize(
    "body", [takes_more_layers, takes_an_earlier_tensor, takes_an_earlier_parameter, takes_an_earlier_buffer]
)
def test_a_way_that_the_dry_run_did_not_take_gives_no_plausible_loss(
    body: Callable[[Model, Tensor, bool], Tensor], condition: str
) -> None:
    model = Model(lambda m, x: body(m, x, OTHER_WAYS[condition](m, x)))
    model_map = trace(model, {"x": -torch.ones(2, H)})
    stages = [build_stage(model, model_map, i, i + 1, device="cpu") for i in range(3)]
    for module in (model, *(stage.module for stage in stages)):
        module.train(condition != "the mode")
        module.kept = [torch.ones(H)] if condition == "an attribute" else []  # type: ignore[assignment]
    received: Any = []
    with torch.no_grad():
        for stage in stages:
            received = stage.forward({"x": torch.ones(2, H)}, received)
        assert received.isnan() or received.equal(model(torch.ones(2, H)))


@pytest.mark.parametrize(
    "draw",
    [
        lambda y: torch.bernoulli(y.sigmoid()),
        lambda y: torch.normal(0.0, y.exp()),
        lambda y: torch.linalg.eigvalsh(y.t() @ y)[:1],
        lambda y: F.one_hot(y.sigmoid().round().long(), 2).float().sum(-1),
        lambda y: F.binary_cross_entropy(y.sigmoid(), torch.ones_like(y)),
    ],
)
def test_code_before_a_stage_that_takes_only_numbers_still_runs_there(draw: Callable[[Tensor], Tensor]) -> None:
    def body(m: Model, x: Tensor) -> Tensor:
        y = m.a(x)
        y = y * draw(y.detach())
        return m.c(m.cuts[1](m.b(m.cuts[0](y)))).square().mean()

    model = Model(body)
    model_map = trace(model, example())
    received: Any = []
    for index in range(3):
        received = build_stage(model, model_map, index, index + 1, device="cpu").forward(example(), received)
    assert received.isfinite()


def test_the_argument_of_a_cut_point_used_behind_it_sends_nothing_back_through_placeholders() -> None:
    def body(m: Model, x: Tensor) -> Tensor:
        early = m.a(x)
        y = m.b(m.cuts[0](early))
        gated = early * y
        return (m.c(m.cuts[1](gated)) * gated + early).square().mean()

    losses_agree(Model(body), example())


def test_a_path_that_depends_on_what_an_earlier_module_made_of_the_inputs() -> None:
    class Embeds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(H, H)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.inner(x), x > -100

    class Looking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embeds, self.b, self.c = Embeds(), nn.Linear(H, H), nn.Linear(H, H)
            self.cuts = [CutPoint(), CutPoint()]

        def forward(self, x: Tensor) -> Tensor:
            y, mask = self.embeds(x)
            y = self.cuts[0](y)
            if mask.all():  # a ghost's zeros would take the other way
                y = self.cuts[1](self.b(y))
            return self.c(y).square().mean()

    losses_agree(Looking(), example())


def test_a_cut_point_inside_a_module_that_later_stages_skip() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cut, self.layer = CutPoint(), nn.Linear(H, H)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.cut(x))

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.inner, self.last, self.cut = nn.Linear(H, H), Inner(), nn.Linear(H, H), CutPoint()

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.cut(self.inner(self.first(x) * 2))).square().mean()

    losses_agree(Outer(), example())


def test_what_a_skipped_cut_point_passed_cannot_stand_for_its_argument() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cut, self.layer = CutPoint(), nn.Linear(H, H)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.cut(x))

    def body(m: Any, x: Tensor) -> Tensor:
        mixed = m.a(x) + m.b(x)
        return (m.cuts[0](m.inner(mixed)) * mixed).sum()

    model = Model(body)
    model.inner = Inner()
    model_map = trace(model, example())
    assert model_map.find_boundary(1)
    with pytest.raises(PartitionError, match="used in section 2 without passing cut-point 2"):
        model_map.find_boundary(2)


def test_nothing_goes_back_over_a_boundary_behind_frozen_layers() -> None:
    model, inputs = Model(plain), example()
    model.a.requires_grad_(False)
    model.scale.requires_grad_(False)
    assert [boundary.requires_grad for boundary in trace(model, inputs).find_boundary(1)] == [False]
    losses_agree(model, inputs)


def frozen_by_detach(m: Model, x: Tensor) -> Tensor:
    return m.c(m.b(m.cuts[0](m.a(x) * m.scale)).detach()).square().mean()


def frozen_by_no_grad(m: Model, x: Tensor) -> Tensor:
    y = m.cuts[0](m.a(x) * m.scale)
    with torch.no_grad():
        y = m.b(y)
    return m.c(y).square().mean()


@pytest.mark.parametrize("body", [frozen_by_detach, frozen_by_no_grad])
def test_nothing_goes_back_over_a_boundary_behind_which_the_way_back_is_cut(
    body: Callable[[Model, Tensor], Tensor],
) -> None:
    model, inputs = Model(body), example()
    model_map = trace(model, inputs)
    assert not model_map.find_boundary(1)[0].requires_grad
    losses_agree(model, inputs)
    first = build_stage(model, model_map, 0, 1, device="cpu")
    before = {name: parameter.detach().clone() for name, parameter in first.parameters.items()}
    torch.optim.AdamW(first.parameters.values(), weight_decay=0.1).step()
    assert all(parameter.equal(before[name]) for name, parameter in first.parameters.items())


def test_gradients_go_back_to_a_tensor_that_is_used_beside_what_its_cut_point_returned() -> None:
    def body(m: Model, x: Tensor) -> Tensor:
        early = m.a(x)
        passed = m.cuts[0](early)
        return (m.b(passed.detach()) + early).square().mean()

    model, inputs = Model(body), example()
    assert [boundary.requires_grad for boundary in trace(model, inputs).find_boundary(1)] == [True]
    losses_agree(model, inputs)


def test_gradients_go_back_to_a_tensor_that_is_changed_in_place_after_its_use() -> None:
    def body(m: Model, x: Tensor) -> Tensor:
        early = m.a(x)
        y = m.b(m.cuts[0](m.c(x))) + early
        early.add_(1)
        return y.square().mean()

    losses_agree(Model(body), example())


def test_parameters_out_of_the_module_tree_are_named() -> None:
    model = Model(plain)
    stray = torch.ones(H, requires_grad=True)
    model.body = lambda m, x: m.b(m.cuts[0](m.a(x) * stray)).sum()
    with pytest.raises(PartitionError, match="requires gradients but is no parameter"):
        trace(model, example())
    outer = model.scale
    model.body = lambda m, x: m.b(m.cuts[0](m.a(x) * outer)).sum()
    with pytest.raises(PartitionError, match=r"reads scale at .*closure"):
        trace(model, example())


def test_a_number_of_cut_points_that_follows_the_batch_is_refused() -> None:
    def body(m: Model, x: Tensor) -> Tensor:
        for _ in range(x.shape[0]):
            x = CutPoint()(m.a(x))
        return x.sum()

    refused(body, "2 cut-points with 2 examples, but 4 with 4")


def test_a_boundary_that_mixes_examples_is_refused() -> None:
    model = Model(lambda m, x: m.b(m.cuts[0](m.a(x) @ m.a(x).t()) @ x).sum())
    with pytest.raises(PartitionError, match="only one dimension may grow with the batch"):
        trace(model, example()).find_boundary(1)


def test_state_changed_in_two_stages_is_refused() -> None:
    def body(m: Model, x: Tensor) -> Tensor:
        m.offset.add_(1)
        y = m.cuts[0](m.a(x))
        m.offset.add_(1)
        return m.b(y).sum()

    model = Model(body)
    model_map = trace(model, example())
    with pytest.raises(PartitionError, match=r"offset is changed by forward .* in body.* \(sections \[0, 1\]\)"):
        build_stage(model, model_map, 0, 1, device="cpu")


def test_a_stage_is_run_through_its_forward_and_for_existing_sections() -> None:
    model, inputs = Model(plain), example()
    model_map = trace(model, inputs)
    stage = build_stage(model, model_map, 0, 1, device="cpu")
    with pytest.raises(PartitionError, match=r"call Stage.forward"):
        stage.module(**inputs)
    with pytest.raises(PartitionError, match="takes 0 tensors from the one before, not 1"):
        stage.forward(inputs, [torch.zeros(1)])
    with pytest.raises(ValueError, match="not a part of the model's 0 … 2"):
        build_stage(model, model_map, 2, 4, device="cpu")


def test_another_way_than_in_the_dry_run_is_refused_while_running() -> None:
    def body(m: Model, x: Tensor) -> Tensor:
        y = m.a(x)
        return m.b(m.cuts[0](y) if x[0, 0] < 100 else y).sum()

    model = Model(body)
    stage = build_stage(model, trace(model, example()), 0, 1, device="cpu")
    with pytest.raises(PartitionError, match="returned after 0 cut-points"):
        stage.forward({"x": torch.full((2, H), 200.0)}, [])


def test_meta_parameters_that_nothing_initialises_are_named() -> None:
    with torch.device("meta"):
        model = Model(plain)
    model_map = trace(model, example())
    assert build_stage(model, model_map, 2, 3, device="cpu").parameters["c.weight"].abs().sum() > 0
    with pytest.raises(PartitionError, match=r"scale: on the meta device.*reset_parameters"):
        build_stage(model, model_map, 0, 1, device="cpu")


trees = st.recursive(
    st.integers() | st.none() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        | st.builds(slice, st.none())
        | st.builds(Boundary, st.text(max_size=3), inner, inner, inner, inner)
    ),
    max_leaves=10,
)


@settings(deadline=None)
@given(trees)
def test_putting_together_is_the_inverse_of_taking_apart(tree: Any) -> None:
    leaves, structure = flatten_nested(tree)
    assert structure.leaf_count == len(leaves)
    assert structure.unflatten_leaves(leaves) == tree


class Masked(nn.Linear):
    def __init__(self) -> None:
        super().__init__(H, H)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x if mask is None else x * mask)


class ManyInputs(nn.Module):
    """Three sections; `body` says what forward does with its inputs, between layers a, b and c."""

    def __init__(self, body: Callable[[Any, Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.body = body
        self.a, self.b, self.c = nn.Linear(H, H), Masked(), nn.Linear(H, H)
        self.cuts = nn.ModuleList([CutPoint(), CutPoint()])

    def forward(self, x: Tensor, mask: Tensor, target: Tensor) -> Tensor:
        return self.body(self, x, mask, target)


def uses_all_in_turn(m: Any, x: Tensor, mask: Tensor, target: Tensor) -> Tensor:
    """A module of the second section reads `mask`; code of the first one, which runs everywhere, sees it, too."""
    mask = mask.view(-1, H)
    return F.mse_loss(m.c(m.cuts[1](m.b(m.cuts[0](m.a(x)), mask))), target)


def reads_between_modules(m: Any, x: Tensor, mask: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(m.c(m.cuts[1](m.b(m.cuts[0](m.a(x))) * mask)), target)


def computes_a_mask_first(m: Any, x: Tensor, mask: Tensor, target: Tensor) -> Tensor:
    kept = mask > 0
    return F.mse_loss(m.c(m.cuts[1](m.b(m.cuts[0](m.a(x))))), target * kept)


def looks_at_the_mask(m: Any, x: Tensor, mask: Tensor, target: Tensor) -> Tensor:
    middle = m.cuts[1](m.b(m.cuts[0](m.a(x))))
    return F.mse_loss(m.c(middle if bool(mask.all()) else middle * mask), target)


def changes_the_mask(m: Any, x: Tensor, mask: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(m.c(m.cuts[1](m.b(m.cuts[0](m.a(x))) * mask.mul_(2))), target)


EVERYTHING = {"x", "mask", "target"}


@pytest.mark.parametrize(
    ("body", "by_section"),
    [
        pytest.param(uses_all_in_turn, [{"x"}, {"mask"}, {"target"}], id="each where it is used"),
        pytest.param(reads_between_modules, [{"x"}, {"mask"}, {"mask", "target"}], id="code that no ghost replaces"),
        pytest.param(computes_a_mask_first, [{"x", "mask"}, {"mask"}, {"mask", "target"}], id="code that runs again"),
        pytest.param(looks_at_the_mask, [{"x"}, set(), None], id="another path is possible"),
        pytest.param(changes_the_mask, [{"x", "mask"}, {"mask"}, {"mask", "target"}], id="in place"),
    ],
)
def test_a_stage_reads_the_inputs_of_the_code_that_it_runs(
    body: Callable[[Any, Tensor, Tensor, Tensor], Tensor], by_section: list[set[str] | None]
) -> None:
    model_map = trace(ManyInputs(body), {name: torch.ones(3, H) for name in EVERYTHING})
    assert [model_map.inputs_read(range(i, i + 1)) for i in range(3)] == by_section
    assert model_map.inputs_read(range(3)) in (EVERYTHING, None)
