"""A script uses `Varuna` as a module: what it does with a model works, or is refused in one line."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from training_roles import training_role
from varuna import CutPoint, Varuna
from varuna.distributed.worker_environment import read_worker_environment
from varuna.model import state_dicts
from varuna.partition import PartitionError
from varuna_proto.environment import Mode


class Config:
    hidden = 4


class Model(nn.Module):
    """Has what users' models have: a config, methods, tied weights, buffers kept and not kept."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.config, self.temperature, self._gate = Config(), 1.0, 1.0
        self.first, self.norm, self.second = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)
        self.last.weight = self.first.weight
        self.cut_point = CutPoint()
        self.register_buffer("scale", torch.ones(4))
        self.register_buffer("unsaved", torch.ones(4), persistent=False)

    @property
    def broken(self) -> int:
        return self.config.no_such_thing  # type: ignore[attr-defined, no-any-return]

    def count(self) -> int:
        return sum(p.numel() for p in self.parameters()) * self.config.hidden

    def forward(self, x: Tensor) -> Tensor:
        x = self.cut_point(self.norm(self.first(x))).tanh()
        return self._gate * F.mse_loss(self.last(self.second(x) * self.scale * self.unsaved) / self.temperature, x)


def batch(size: int, device: str = "cpu") -> dict[str, Tensor]:
    return {"x": torch.randn(size, 4, generator=torch.Generator().manual_seed(size))}


def wrapped(model: nn.Module | None = None, **options: Any) -> Varuna:
    varuna = Varuna(model or Model(), get_batch_fn=batch, **options)
    varuna.set_optimizer(torch.optim.SGD(varuna.parameters(), lr=0.1, momentum=0.9))
    return varuna


OFFLOAD = pytest.mark.parametrize("offload", [False, True], ids=["", "offload"])


@OFFLOAD
def test_it_lists_what_the_users_model_lists(offload: bool) -> None:
    model, plain = wrapped(offload_optimizer=offload), Model()
    for what in ("named_parameters", "named_buffers"):
        for options in ({}, {"remove_duplicate": False}, {"recurse": False}, {"prefix": "model"}):
            ours, theirs = dict(getattr(model, what)(**options)), dict(getattr(plain, what)(**options))
            assert ours.keys() == theirs.keys(), (what, options)
            for name, tensor in ours.items():
                assert torch.equal(tensor, theirs[name])
    for what in ("named_modules", "named_children"):
        assert [(n, type(m)) for n, m in getattr(model, what)()] == [(n, type(m)) for n, m in getattr(plain, what)()]
    assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]
    assert len(list(model.children())) == len(list(plain.children()))
    assert len(list(model.buffers())) == len(list(plain.buffers()))
    assert model.get_submodule("norm") is model.norm
    assert model.get_parameter("last.weight") is dict(model.named_parameters())["first.weight"] is model.first.weight
    assert model.get_buffer("scale") is model.scale
    assert "BatchNorm1d" in repr(model)
    assert isinstance(model, Varuna)
    assert isinstance(model, nn.Module)


def test_attributes_are_those_of_the_users_model() -> None:
    model, plain = wrapped(), Model()
    assert model.config.hidden == 4
    assert model.count() == plain.count()
    model.temperature = plain.temperature = 2.0
    assert model.evaluate(batch(4)) == pytest.approx(plain.eval()(**batch(4)).item(), rel=1e-6)
    assert hasattr(model, "config")
    assert "temperature" in dir(model)
    assert not hasattr(model, "no_such_thing")
    with pytest.raises(AttributeError, match="neither Varuna nor the model in it, Model, has an attribute 'confg'"):
        _ = model.confg
    with pytest.raises(AttributeError, match="'Model' object has no attribute 'broken'"):  # as nn.Module says it
        _ = model.broken


def test_underscored_attributes_that_the_users_model_has_are_set_there() -> None:
    model = wrapped()
    model._gate = 0.0
    assert (model._gate, model.evaluate(batch(4))) == (0.0, 0.0)
    assert training_role(model).surface.module._gate == 0.0
    model._note = "the script's own"
    assert model._note == "the script's own"
    assert not hasattr(training_role(model).surface.module, "_note")


@pytest.mark.parametrize("value", [nn.Linear(4, 4), nn.Parameter(torch.ones(4))], ids=["module", "parameter"])
def test_no_underscored_attribute_of_the_users_model_becomes_a_module_or_parameter(value: Any) -> None:
    with pytest.raises(RuntimeError, match=r"_gate = \w+\(…\)"):
        wrapped()._gate = value


def test_copies_are_refused_and_shallow_ones_are_the_same_model() -> None:
    model = wrapped()
    for take in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"a Varuna cannot be (copied|pickled).*state_dict\(\)"):
            take(model)
    assert copy.copy(model).first is model.first
    assert not hasattr(model, "__array__")


@OFFLOAD
def test_a_state_dict_comes_back(offload: bool) -> None:
    model, plain = wrapped(offload_optimizer=offload), Model()
    model.step(batch(4))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    assert list(state) == list(plain.state_dict())
    plain.load_state_dict(model.state_dict())
    expected = model.evaluate(batch(4))
    assert plain.eval()(**batch(4)).item() == pytest.approx(expected, rel=1e-6)

    again = wrapped(offload_optimizer=offload)
    again.step(batch(5))
    assert again.evaluate(batch(4)) != expected
    assert str(again.load_state_dict(state)) == "<All keys matched successfully>"
    assert again.evaluate(batch(4)) == expected
    again.load_state_dict(Model().state_dict())
    assert again.evaluate(batch(4)) == wrapped().evaluate(batch(4))

    assert model.state_dict(prefix="m.").keys() == plain.state_dict(prefix="m.").keys()
    assert model.state_dict(keep_vars=True)["first.weight"] is model.first.weight


@pytest.mark.parametrize("chunk_bytes", [1, 20, 1 << 20])
def test_the_full_state_dict_is_the_plain_models_in_its_own_memory(
    chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_dicts, "_CHUNK_BYTES", chunk_bytes)
    plain = Model()
    plain.register_buffer("flags", torch.tensor([True, False, True]))
    plain.register_buffer("empty", torch.zeros(0, 4))
    plain.register_buffer("phase", torch.tensor(1 - 0.5j))
    plain.scale[0] = -0.0
    model = wrapped(plain)
    full, expected = model.full_state_dict(), plain.state_dict()
    assert list(full) == list(expected)
    for name, value in expected.items():
        assert torch.equal(full[name], value)
        assert (full[name].dtype, full[name].shape) == (value.dtype, value.shape), name
    assert torch.signbit(full["scale"])[0]
    assert full["last.weight"] is full["first.weight"], "tied tensors stay one"
    before = full["second.weight"].clone()
    model.step(batch(4))
    assert torch.equal(full["second.weight"], before), "it does not follow training"
    Model().load_state_dict(model.full_state_dict(), strict=False)


def test_a_state_dict_that_does_not_fit_is_refused_as_pytorch_does() -> None:
    model, state = wrapped(), Model().state_dict()
    with pytest.raises(RuntimeError, match=r"lacks second\.bias and has unknown third\.bias: give that of"):
        model.load_state_dict({**{k: v for k, v in state.items() if k != "second.bias"}, "third.bias": torch.ones(4)})
    part = model.load_state_dict({"third.bias": torch.ones(4)}, strict=False)
    assert part.unexpected_keys == ["third.bias"]
    assert "second.bias" in part.missing_keys
    with pytest.raises(RuntimeError, match=r"size mismatch for second\.bias"):
        model.load_state_dict({**state, "second.bias": torch.ones(5)})
    with pytest.raises(RuntimeError, match=r"assign=True.*leave it out"):
        model.load_state_dict(state, assign=True)


def clamp(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data.clamp_(-0.1, 0.1)


def average(model: Any) -> None:
    with torch.no_grad():
        model.second.weight.copy_((model.second.weight + model.first.weight) / 2)
        model.scale.mul_(0.5)


def begin_a_layer_again(model: Any) -> None:
    model.second.apply(lambda m: nn.init.constant_(m.weight, 0.25))
    model.second.bias.data = torch.full((4,), 0.5)


def apply_to_all(model: Any) -> None:
    def halve(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.mul_(0.5)
        if isinstance(module, Model):
            module.scale.mul_(2)

    model.apply(halve)


@OFFLOAD
@pytest.mark.parametrize("change", [clamp, average, begin_a_layer_again, apply_to_all])
def test_what_the_script_does_to_parameters_between_steps_counts(change: Callable[[Any], None], offload: bool) -> None:
    model, plain = wrapped(offload_optimizer=offload), Model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        optimizer.zero_grad()
        expected = plain(**batch(6))
        expected.backward()
        optimizer.step()
        assert model.step(batch(6))[0] == pytest.approx(expected.item(), rel=1e-5), step
        change(model)
        change(plain)
    assert model.evaluate(batch(4)) == pytest.approx(plain.eval()(**batch(4)).item(), rel=1e-5)
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], tensor, msg=name)


@OFFLOAD
def test_gradient_hooks_run_wherever_the_parameters_are(offload: bool) -> None:
    """Hooks work before wrapping and after, also where the norm clips the gradients that they have changed."""

    def hooked(model: Any) -> None:
        mask = torch.tensor([1.0, 0.0, 1.0, 0.0])
        model.get_parameter("second.weight").register_hook(lambda gradient: gradient * mask)

    before, after, plain = Model(), wrapped(offload_optimizer=offload), Model()
    hooked(before)
    hooked(plain)
    hooked(after)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    models = [wrapped(before, offload_optimizer=offload), after]
    for _ in range(2):
        optimizer.zero_grad()
        plain(**batch(6)).backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
        optimizer.step()
        for model in models:
            assert model.step(batch(6), clip_grad_max_norm=0.05)[2] == pytest.approx(norm.item(), rel=1e-5)
    for model in models:
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(dict(model.named_parameters())[name], parameter, msg=name)

    after.second.bias.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(PartitionError, match=r"second\.bias has a post-accumulate-grad hook"):
        after.step(batch(4))


def test_apply_draws_the_same_in_every_process_and_leaves_generators_alone() -> None:
    def begin_again(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight)
            nn.init.normal_(module.bias)

    one, other = wrapped(), wrapped()
    torch.manual_seed(5)
    before = torch.get_rng_state()
    assert one.apply(begin_again) is one
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(6)
    other.apply(begin_again)
    for ours, theirs in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert not torch.equal(one.second.weight, Model().second.weight)
    assert one.second.weight.std() > 0.3


def test_what_a_stage_cannot_be_is_refused_with_what_to_do_instead() -> None:
    model = wrapped()
    refused: dict[str, tuple[Callable[[], object], str]] = {
        "half": (model.half, "fp16=True"),
        "bfloat16": (model.bfloat16, r"dtype=torch\.bfloat16"),
        "double": (model.double, "fp16=True"),
        "to a type": (lambda: model.to(torch.float16), "fp16=True"),
        "type": (lambda: model.type("torch.HalfTensor"), "fp16=True"),
        "to a device": (lambda: model.to("meta"), "device="),
        "cuda": (model.cuda, "device="),
        "xpu": (model.xpu, "device="),
        "to_empty": (lambda: model.to_empty(device="cpu"), "meta"),
        "share_memory": (model.share_memory, "state_dict"),
        "compile": (model.compile, "leave it out"),
        "add_module": (lambda: model.add_module("x", nn.Linear(1, 1)), "before Varuna"),
        "register_module": (lambda: model.register_module("x", nn.Linear(1, 1)), "before Varuna"),
        "register_buffer": (lambda: model.register_buffer("x", torch.ones(1)), "before Varuna"),
        "register_parameter": (lambda: model.register_parameter("x", None), "before Varuna"),
        "set_submodule": (lambda: model.set_submodule("first", nn.Linear(1, 1)), "before Varuna"),
        "assigned": (lambda: setattr(model, "first", nn.Linear(4, 4)), "before Varuna"),
        "deleted": (lambda: delattr(model, "first"), "before Varuna"),
        "called": (lambda: model(**batch(4)), r"step\(inputs\)"),
    }
    for name, (call, way_out) in refused.items():
        with pytest.raises(RuntimeError, match=way_out) as raised:
            call()
        assert "\n" not in str(raised.value), name
    assert model.to("cpu") is model.to(torch.float32) is model.to("cpu", torch.float32) is model.float() is model.cpu()
    model.step(batch(4))


def replace_a_module(model: Any) -> None:
    model.first.extra = nn.Linear(1, 1)


def replace_a_parameter(model: Any) -> None:
    model.second.weight = nn.Parameter(torch.ones(4, 4))


def add_a_parameter(model: Any) -> None:
    model.second.register_parameter("extra", nn.Parameter(torch.ones(1)))


def grow_a_buffer(model: Any) -> None:
    model.norm.running_mean = torch.ones(5)


@OFFLOAD
@pytest.mark.parametrize(
    ("change", "match"),
    [
        (replace_a_module, r"module first\.extra was replaced, added"),
        (replace_a_parameter, r"parameter second\.weight was replaced.*get_parameter\('second.weight'\)\.copy_"),
        (add_a_parameter, "module second got or lost a parameter"),
        (grow_a_buffer, r"buffer norm\.running_mean was replaced by \[5\]"),
    ],
)
def test_what_nothing_would_train_is_refused_at_the_next_step(
    change: Callable[[Any], None], match: str, offload: bool
) -> None:
    model = wrapped(offload_optimizer=offload)
    change(model)
    with pytest.raises(RuntimeError, match=match):
        model.step(batch(4))


def test_a_buffer_replaced_by_one_of_its_shape_is_the_buffer() -> None:
    model, plain = wrapped(), Model()
    model.scale = torch.full((4,), 3.0)
    plain.scale = torch.full((4,), 3.0)
    assert model.evaluate(batch(4)) == pytest.approx(plain.eval()(**batch(4)).item(), rel=1e-6)
    assert torch.equal(model.state_dict()["scale"], plain.scale)


def test_zero_grad_modes_and_forward_hooks() -> None:
    model = wrapped()
    seen: list[str] = []
    handles = [
        model.second.register_forward_hook(lambda module, args, output: seen.append("second")),
        model.register_forward_pre_hook(lambda module, args, kwargs: seen.append("model"), with_kwargs=True),
    ]
    model.step(batch(4))
    assert seen == ["model", "second"]
    for handle in handles:
        handle.remove()
    model.step(batch(4))
    assert len(seen) == 2
    assert all(p.grad is not None for p in model.parameters())
    model.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    assert not model.eval().norm.training
    assert model.train().norm.training


def test_a_script_that_is_inspected_sees_its_whole_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    alone = read_worker_environment()
    environment = replace(
        alone, mode=Mode.INSPECT, report_path=str(tmp_path / "report"), plan=replace(alone.plan, micro_batch=2)
    )
    for name, value in environment.to_environ().items():
        monkeypatch.setenv(name, value)
    model, plain = Varuna(Model(), get_batch_fn=batch), Model()
    assert dict(model.named_parameters()).keys() == dict(plain.named_parameters()).keys()
    assert [name for name, _ in model.named_modules()] == [name for name, _ in plain.named_modules()]
    assert model.config.hidden == 4
    model.load_state_dict(model.state_dict())
    assert model.apply(lambda module: None).eval() is model
    with pytest.raises(RuntimeError, match="fp16=True"):
        model.half()
    with pytest.raises(SystemExit):
        model.set_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
