"""Stages run by hand, one after the other in one process, give the loss and the gradients of the whole model.

Letters: B examples, T tokens, H hidden, V vocabulary, C channels.
"""

from __future__ import annotations

import copy
import gc
import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stages_by_hand import gradients, run_by_hand
from varuna.cut_point import CutPoint
from varuna.partition import PartitionError, Stage, build_stage, trace

T, H, V = 6, 8, 11


class Mlp(nn.Module):
    """Cut-points in a plain list, as the API documentation has them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(H, H) for _ in range(4)])
        self.cutpoints = [CutPoint() for _ in range(3)]

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if i < len(self.cutpoints):
                x = self.cutpoints[i](x)
        return F.mse_loss(x, y)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(H), nn.LayerNorm(H)
        self.qkv, self.out = nn.Linear(H, 3 * H), nn.Linear(H, H)
        self.mlp = nn.Sequential(nn.Linear(H, 4 * H), nn.GELU(), nn.Linear(4 * H, H))

    def forward(self, x: Tensor, mask: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        B = x.shape[0]
        q, k, v = self.qkv(self.norm1(x)).view(B, T, 3, 2, H // 2).permute(2, 0, 3, 1, 4)
        q, k = q * rotary[0] + q.flip(-1) * rotary[1], k * rotary[0] + k.flip(-1) * rotary[1]
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(mixed.transpose(1, 2).reshape(B, T, H))
        return x + self.mlp(self.norm2(x))


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequency", torch.arange(1, H // 2 + 1) / H, persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angle = positions[:, None] * self.frequency
        return angle.cos(), angle.sin()


class Gpt(nn.Module):
    """Tied head, learned positions added directly, causal mask and rotations made from the inputs."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(V, H)
        self.positions = nn.Parameter(torch.randn(T, H))
        self.rotary = Rotary()
        self.register_buffer("causal", torch.ones(T, T, dtype=torch.bool).tril())
        self.blocks = nn.ModuleList([Block() for _ in range(blocks)])
        self.cuts = nn.ModuleList([CutPoint() for _ in range(blocks)])
        self.norm = nn.LayerNorm(H)
        self.head = nn.Linear(H, V, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor, attention: Tensor | None = None) -> dict[str, Tensor]:
        x = self.tokens(tokens) + self.positions[: tokens.shape[1]]
        mask = self.causal
        if attention is not None and not attention.all():
            mask = mask & attention[:, None, None, :]
        rotary = self.rotary(torch.arange(tokens.shape[1], device=tokens.device))
        for block, cut in zip(self.blocks, self.cuts, strict=True):
            x = block(cut(x), mask, rotary)
        logits = self.head(self.norm(x))
        return {"logits": logits, "loss": F.cross_entropy(logits.flatten(0, 1), targets.flatten())}


class UNet(nn.Module):
    """Long skip connections; changes in place; batch norm."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [(3, 4), (4, 8), (8, 8)]
        self.down = nn.ModuleList([self.level(i, o) for i, o in sizes])
        self.up = nn.ModuleList([self.level(16, 4), self.level(8, 4)])
        self.relu = nn.ReLU(inplace=True)
        self.head = nn.Conv2d(4, 1, 1)
        self.cuts = [CutPoint() for _ in range(4)]

    @staticmethod
    def level(i: int, o: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU(inplace=True))

    def forward(self, image: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        one = self.cuts[0](self.down[0](image))
        two = self.down[1](F.max_pool2d(one, 2))
        three = self.relu(self.down[2](self.cuts[1](F.max_pool2d(two, 2))) - 0.1)
        x = F.interpolate(three, scale_factor=2.0)
        x = self.cuts[2](self.up[0](torch.cat([x, two], 1)))
        x = self.up[1](torch.cat([F.interpolate(x, scale_factor=2.0), one], 1))
        x = self.cuts[3](x - 0.1).relu_()
        return F.mse_loss(self.head(x), target), x


@dataclass
class Encoded:
    memory: Tensor
    padding: Tensor
    note: str = "encoded"


class Encoder(nn.Module):
    def __init__(self, cuts: nn.ModuleList) -> None:
        super().__init__()
        self.embed = nn.Embedding(V, H)
        self.cuts = cuts
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(H, 2, 16, dropout=0.0, batch_first=True) for _ in cuts])

    def forward(self, tokens: Tensor) -> Encoded:
        padding = tokens == 0
        x = self.embed(tokens)
        for layer, cut in zip(self.layers, self.cuts, strict=True):
            x = cut(layer(x, src_key_padding_mask=padding))
        return Encoded(x, padding)


class EncoderDecoder(nn.Module):
    """The encoder's output, and a view of it, used by every decoder layer; cut-points inside a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder(nn.ModuleList([CutPoint() for _ in range(2)]))
        self.embed = nn.Embedding(V, H)
        self.layers = nn.ModuleList([nn.TransformerDecoderLayer(H, 2, 16, dropout=0.0) for _ in range(3)])
        self.cuts = nn.ModuleList([CutPoint() for _ in range(3)])
        self.cross = nn.MultiheadAttention(H, 2, batch_first=True)
        self.head = nn.Linear(H, V)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        encoded = self.encoder(source)
        memory = encoded.memory.transpose(0, 1)
        x = self.embed(target).transpose(0, 1)
        for layer, cut in zip(self.layers, self.cuts, strict=True):
            x = cut(layer(x, memory, memory_key_padding_mask=encoded.padding))
        x, _ = self.cross(x.transpose(0, 1), encoded.memory, encoded.memory, need_weights=False)
        return F.cross_entropy(self.head(x).transpose(1, 2), target)


class Flattened(nn.Module):
    """A boundary of shape (B·T, H); rows gathered by a mask of the inputs; an activation kept from before the cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(V, H)
        self.mixer = nn.Linear(H, H)
        self.layers = nn.ModuleList([nn.Linear(H, H) for _ in range(3)])
        self.cuts = [CutPoint() for _ in range(3)]
        self.head = nn.Linear(H, V)

    def forward(self, tokens: Tensor) -> Tensor:
        kept = self.mixer(self.embed(tokens).flatten(0, 1))
        x = kept
        for layer, cut in zip(self.layers, self.cuts, strict=True):
            x = F.gelu(layer(cut(x)) + x)
        x = x + kept
        chosen = tokens.flatten() > 1
        return F.cross_entropy(self.head(x)[chosen], tokens.flatten()[chosen], reduction="sum") / tokens.shape[0]


class TwoNames(nn.Module):
    """One weight under two `nn.Parameter`s, the seeds' way of tying; a module called in two sections."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(V, H)
        self.twice = nn.Linear(H, H)
        self.head_weight = nn.Parameter(self.tokens.weight.data)
        self.cuts = [CutPoint() for _ in range(2)]

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.cuts[0](self.twice(self.tokens(tokens)).relu())
        x = self.cuts[1](self.twice(x).relu())
        return F.cross_entropy(F.linear(x, self.head_weight).flatten(0, 1), tokens.flatten())


def tokens(B: int) -> Tensor:
    drawn = torch.randint(1, V, (B, T))
    drawn[0, T - 2 :] = 0
    return drawn


def gpt_inputs(B: int) -> dict[str, Any]:
    attention = torch.ones(B, T, dtype=torch.bool)
    attention[:, T - 1] = False
    return {"tokens": tokens(B), "targets": tokens(B), "attention": attention}


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], dict[str, Any]]]] = {
    "mlp": (Mlp, lambda B: {"x": torch.randn(B, H), "y": torch.randn(B, H)}),
    "gpt": (Gpt, gpt_inputs),
    "unet": (UNet, lambda B: {"image": torch.randn(B, 3, 8, 8), "target": torch.randn(B, 1, 8, 8)}),
    "encoder-decoder": (EncoderDecoder, lambda B: {"source": tokens(B), "target": tokens(B)}),
    "flattened": (Flattened, lambda B: {"tokens": tokens(B)}),
    "two-names": (TwoNames, lambda B: {"tokens": tokens(B)}),
}


def make(name: str, B: int = 3) -> tuple[nn.Module, dict[str, Any], Callable[[int], dict[str, Any]]]:
    torch.manual_seed(7)
    build, inputs = CASES[name]
    return build(), inputs(B), inputs


def split(model: nn.Module, example: dict[str, Any], starts: tuple[int, ...]) -> list[Stage]:
    model_map = trace(model, example)
    ends = (*starts[1:], len(model_map.sections))
    return [build_stage(model, model_map, a, b, device="cpu") for a, b in zip(starts, ends, strict=True)]


def all_splits(sections: int) -> list[tuple[int, ...]]:
    """Into one, two and three stages in every way, and into as many as there are sections."""
    counts = sorted({0, 1, 2, sections - 1})
    return [(0, *chosen) for count in counts for chosen in itertools.combinations(range(1, sections), count)]


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_every_split_gives_the_loss_and_gradients_of_the_whole_model(name: str) -> None:
    model, example, inputs = make(name)
    model_map = trace(model, example)
    for starts in all_splits(len(model_map.sections)):
        ends = (*starts[1:], len(model_map.sections))
        stages = [build_stage(model, model_map, a, b, device="cpu") for a, b in zip(starts, ends, strict=True)]
        for B in (5, 1 if name != "unet" else 2):
            batch = inputs(B)
            whole = copy.deepcopy(model)
            if isinstance(whole, TwoNames):
                whole.head_weight = whole.tokens.weight  # type: ignore[assignment] # deepcopy unties
            result = whole(**batch)
            expected = (
                result["loss"] if isinstance(result, dict) else result[0] if isinstance(result, tuple) else result
            )
            expected.backward()
            for stage in stages:
                stage.module.zero_grad()
            loss, _ = run_by_hand(stages, batch)
            torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=0)
            summed = gradients(stages)
            for parameter_name, parameter in whole.named_parameters():
                torch.testing.assert_close(
                    summed[parameter_name], parameter.grad, rtol=1e-5, atol=1e-7, msg=parameter_name
                )


@pytest.mark.parametrize("name", CASES)
def test_stages_hold_every_parameter_once_and_only_their_own_bytes(name: str) -> None:
    model, example, _ = make(name)
    model_map = trace(model, example)
    stages = [build_stage(model, model_map, i, i + 1, device="cpu") for i in range(len(model_map.sections))]
    owners: dict[str, list[int]] = {}
    for index, stage in enumerate(stages):
        for parameter in stage.parameters:
            owners.setdefault(parameter, []).append(index)
        materialised = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in stage.module.parameters()}
        own = sum(p.numel() * p.element_size() for p in stage.parameters.values())
        assert sum(materialised.values()) - own <= 4  # the one zero that all placeholders share
    assert set(owners) == set(model_map.first_name.values())
    assert {name: tuple(where) for name, where in owners.items() if len(where) > 1} == model_map.shared
    assert all(stage.shared == model_map.shared for stage in stages)


def test_recompute_without_gradients_then_with_them_gives_the_same() -> None:
    model, example, _ = make("unet")
    stages = split(model, example, (0, 1, 2, 3, 4))
    received: list[Tensor] = []
    for stage in stages:
        leaves = [
            x.detach().clone().requires_grad_(b.requires_grad) for x, b in zip(received, stage.receives, strict=True)
        ]
        before = [x.detach().clone() for x in leaves]
        with torch.no_grad():
            first = stage.forward(example, leaves)
        assert all(torch.equal(x, y) for x, y in zip(leaves, before, strict=True)), "a stash was changed in place"
        again = stage.forward(example, leaves)
        if isinstance(first, Tensor):
            torch.testing.assert_close(first, again, rtol=0, atol=0)
            return
        assert isinstance(again, list)
        for x, y in zip(first, again, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=0)
        received = first
    raise AssertionError("the last stage gives the loss")


def test_a_relayed_tensor_used_on_the_way_sums_its_gradients() -> None:
    model, example, _ = make("encoder-decoder")
    stages = split(model, example, (0, 3, 4))
    assert {b.name for b in stages[1].receives} & {b.name for b in stages[1].sends} == {
        "encoder output 1",  # the memory
        "encoder output 2",  # its padding mask
    }
    _, sent = run_by_hand(stages, example)
    batch, names = stages[1].receives[1].shape_for(3), [b.name for b in stages[1].receives]
    assert names[1] == "encoder output 1"
    assert batch == tuple(sent[0][1].shape) == (3, T, H)


def test_a_stage_has_no_memory_for_buffers_that_only_later_ones_read() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(H, H)
            self.register_buffer("mask", torch.ones(H))

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) * self.get_buffer("mask")

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.cuts = nn.ModuleList(Masked() for _ in range(3)), [CutPoint(), CutPoint()]

        def forward(self, x: Tensor) -> Tensor:
            for block, cut in zip(self.blocks, [*self.cuts, nn.Identity()], strict=True):
                x = cut(block(x))
            return x.square().mean()

    model = Chain()
    model_map = trace(model, {"x": torch.randn(2, H)})
    for section in range(3):
        stage = build_stage(model, model_map, section, section + 1, device="cpu")
        assert stage.read.keys() == {f"blocks.{section}.mask"}


def test_buffers_that_forward_changes_belong_to_their_stage() -> None:
    model, example, _ = make("unet")
    stages = split(model, example, (0, 2))
    run_by_hand(stages, example)
    whole = copy.deepcopy(model)
    whole(**example)
    expected = dict(whole.named_buffers())
    seen = {name: buffer for stage in stages for name, buffer in stage.buffers.items()}
    assert set(seen) == set(expected)
    for name, buffer in seen.items():
        torch.testing.assert_close(buffer, expected[name])
    assert not set(stages[0].buffers) & set(stages[1].buffers)
    assert trace(model, example).graph.buffers_changed.keys() == set(expected)


@pytest.mark.long
def test_sections_are_announced_in_order_and_only_the_own_ones() -> None:
    model, example, _ = make("gpt")
    stages = split(model, example, (0, 2, 3))
    announced: list[list[int]] = [[] for _ in stages]
    for stage, seen in zip(stages, announced, strict=True):
        stage.on_section = seen.append
    run_by_hand(stages, example)
    assert announced == [[0, 1], [2], [3, 4]]


@pytest.mark.long
def test_dropout_seeded_by_section_does_not_depend_on_the_split() -> None:
    torch.manual_seed(3)
    model = nn.TransformerEncoderLayer(H, 2, 16, dropout=0.3, batch_first=True)

    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([copy.deepcopy(model) for _ in range(3)])
            self.cuts = [CutPoint() for _ in range(3)]

        def forward(self, x: Tensor) -> Tensor:
            x = F.dropout(x, 0.5)
            for layer, cut in zip(self.layers, self.cuts, strict=True):
                x = cut(F.dropout(layer(x), 0.1))
            return x.square().mean()

    whole, example = Dropping(), {"x": torch.randn(4, T, H)}
    losses = []
    for starts in all_splits(4):
        stages = split(whole, example, starts)
        for stage in stages:
            stage.on_section = torch.manual_seed  # type: ignore[assignment] # its result is not used
        losses.append(run_by_hand(stages, example)[0].item())
    assert len(set(losses)) == 1


def test_a_model_on_meta_is_built_stage_by_stage() -> None:
    with torch.device("meta"):
        hollow = nn.Sequential(nn.Linear(H, H), CutPoint(), nn.LayerNorm(H), CutPoint(), nn.Linear(H, H))

        class WithLoss(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.body = hollow
                self.first = nn.Embedding(V, H)
                self.last = nn.Linear(H, V)
                self.last.weight = self.first.weight

            def forward(self, x: Tensor) -> Tensor:
                return F.cross_entropy(self.last(self.body(self.first(x))).flatten(0, 1), x.flatten())

        model = WithLoss()
    example = {"x": tokens(2)}
    one = split(model, example, (0,))
    three = split(model, example, (0, 1, 2))
    assert all(p.is_meta for p in model.parameters())
    torch.testing.assert_close(run_by_hand(one, example)[0], run_by_hand(three, example)[0])
    grads, expected = gradients(three), gradients(one)
    assert set(grads) == set(expected)
    for name in grads:
        torch.testing.assert_close(grads[name], expected[name], rtol=1e-5, atol=1e-7)


def test_parameters_that_follow_are_not_initialised() -> None:
    """But those beside buffers are, because these may be computed from them."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(H))
            self.register_buffer("scale", torch.empty(()), persistent=False)

        def reset_parameters(self) -> None:
            nn.init.ones_(self.weight)
            self.get_buffer("scale").copy_(self.weight.sum())

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight * self.scale

    class Refusing(nn.Linear):
        def reset_parameters(self) -> None:
            assert self.weight.is_meta, "it is initialised for nothing"

    class WithMean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(Refusing(H, H), Scaled(), nn.Linear(H, H))

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x).mean()

    class Source(dict[str, float]):
        def read_into(self, name: str, tensor: Tensor) -> None:
            raise AssertionError(f"{name} is read for nothing")

    with torch.device("meta"):
        model = WithMean()
    model_map = trace(model, {"x": torch.ones(2, H)})
    values = Source({"body.2.weight": 1.0, "body.2.bias": 1.0})
    stage = build_stage(model, model_map, 0, 1, device="cpu", values=values, parameters_follow=True)
    assert not any(tensor.is_meta for tensor in (*stage.parameters.values(), *stage.buffers.values()))
    assert stage.buffers["body.1.scale"] == H


def test_leaving_in_the_middle_of_forward_keeps_no_activation_alive() -> None:
    model, example, _ = make("gpt")
    alive: list[weakref.ref[Tensor]] = []
    stage = split(model, example, (0, 3))[0]
    for block in stage.module.blocks:  # type: ignore[union-attr]
        block.register_forward_hook(lambda module, args, output: alive.append(weakref.ref(output)))
    gc.collect()
    gc.disable()  # no cycles: the memory must be free at once
    try:
        with torch.no_grad():
            sent = stage.forward(example, [])
        assert len(alive) == 2
        assert alive[0]() is None
        del sent
        assert alive[1]() is None
    finally:
        gc.enable()


def test_a_model_without_cut_points_is_one_section() -> None:
    model = nn.Linear(H, H)

    class NoCuts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = model

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).square().mean()

    whole, example = NoCuts(), {"x": torch.randn(3, H)}
    model_map = trace(whole, example)
    assert len(model_map.sections) == 1
    stage = build_stage(whole, model_map, 0, 1, device="cpu")
    assert stage.is_first
    assert stage.is_last
    assert stage.receives == stage.sends == ()
    torch.testing.assert_close(stage.forward(example, []), whole(**example))


def test_evaluation_runs_in_the_same_stages() -> None:
    model, example, _ = make("encoder-decoder")
    stages = split(model, example, (0, 2, 4))
    for stage in stages:
        stage.module.eval()
    model.eval()
    with torch.no_grad():
        received: Any = []
        for stage in stages:
            received = stage.forward(example, received)
        torch.testing.assert_close(received, model(**example), rtol=1e-5, atol=1e-6)


def test_another_sequence_length_than_in_the_dry_run_is_refused() -> None:
    model, example, _ = make("flattened")
    stages = split(model, example, (0, 1))
    with pytest.raises(PartitionError, match=r"cut-point 1.*has shape \(9, 8\).*\(18, 8\).*sequence length"):
        stages[0].forward({"tokens": tokens(3)[:, :3]}, [])
