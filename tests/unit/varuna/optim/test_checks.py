"""Optimizers and loops that would do something else in stages and replicas are found, named by place, and refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from small_regression import BATCH, Regression
from varuna import Varuna
from varuna.distributed.worker_environment import read_worker_environment
from varuna.optim.reduction import global_gradient_norm, stepping
from varuna.optim.split_check import check_optimizer, check_splittable
from varuna_proto.environment import Mode

LONE = read_worker_environment({})
STAGES = replace(LONE, plan=replace(LONE.plan, p=2), world_size=2)
REPLICAS = replace(LONE, plan=replace(LONE.plan, d=2), world_size=2)
CALIBRATION = replace(LONE, mode=Mode.CALIBRATE)


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(6, 5) if n % 2 else torch.ones(6)) for n in range(6)]


class Lamb(Optimizer):
    """With trust ratios tensor by tensor, and a norm over all gradients in the way that `norm_of` says."""

    def __init__(self, params: Any, norm_of: Callable[[Sequence[Tensor]], Any], **groups: Any) -> None:
        super().__init__(params, {"lr": 0.1, **groups})
        self.norm_of = norm_of

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        trained = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = self.norm_of(trained)
        for p in trained:
            update = p.grad / norm
            average = self.state[p].setdefault("average", torch.zeros_like(p)).mul_(0.9).add_(update)
            p.sub_(average * (p.norm() / average.norm().clamp(min=1e-6)), alpha=0.1)


def of_numbers(trained: Sequence[Tensor]) -> float:
    return math.sqrt(sum(p.grad.norm().item() ** 2 for p in trained))


def of_tensors(trained: Sequence[Tensor]) -> Tensor:
    return torch.stack([p.grad.norm() for p in trained]).norm()


def of_lists(trained: Sequence[Tensor]) -> Tensor:
    return torch.stack(torch._foreach_norm([p.grad for p in trained])).norm()


def clipping(trained: Sequence[Tensor]) -> float:
    torch.nn.utils.clip_grad_norm_(trained, 1.0)
    return 1.0


def largest_weight(trained: Sequence[Tensor]) -> Tensor:
    return torch.cat([p.flatten() for p in trained]).max().clamp(min=0.1)


@pytest.mark.parametrize("norm_of", [of_numbers, of_tensors, of_lists, clipping, largest_weight])
def test_what_an_optimizer_computes_of_all_parameters_is_found_and_named(norm_of: Callable[..., Any]) -> None:
    before = parameters()
    optimizer = Lamb(before, norm_of)
    (finding,) = check_optimizer(optimizer)
    assert finding.matters == "stages"
    assert finding.place.startswith("test_checks.py:")
    assert norm_of.__name__ in finding.place or "genexpr" in finding.place
    assert all(torch.equal(p, q) for p, q in zip(before, parameters(), strict=True))
    assert not optimizer.state
    check_splittable(optimizer, REPLICAS, 3)  # each replica has all parameters
    check_splittable(optimizer, LONE, 3)
    for environment in (STAGES, CALIBRATION):
        with pytest.raises(ValueError, match=r"Lamb updates a parameter by the values of others \(at .*global_gradi"):
            check_splittable(optimizer, environment, 3)
    check_splittable(optimizer, CALIBRATION, 1)  # it will have one stage


def test_the_public_norm_is_the_way_out() -> None:
    optimizer = Lamb(parameters(), global_gradient_norm)
    assert check_optimizer(optimizer) == []
    three, four = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    three.grad, four.grad = torch.tensor([3.0]), torch.tensor([4.0])
    assert global_gradient_norm([three, four, nn.Parameter(torch.zeros(1))]) == pytest.approx(5.0)
    with stepping(13.0):
        assert global_gradient_norm([three]) == 13.0  # the whole model's


def torchs_optimizers() -> list[tuple[type[Optimizer], dict[str, Any]]]:
    plain = [
        "Adadelta",
        "Adafactor",
        "Adagrad",
        "Adam",
        "AdamW",
        "Adamax",
        "ASGD",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
    ]
    return [
        *((getattr(torch.optim, name), {}) for name in plain),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.AdamW, {"foreach": True, "amsgrad": True}),
    ]


def test_torchs_optimizers_may_be_split_new_and_in_use() -> None:
    for kind, options in torchs_optimizers():
        held = parameters()
        optimizer = kind([{"params": held[:3]}, {"params": held[3:]}], **options)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)  # wraps its step
        for p in held:
            p.grad = torch.ones_like(p)
        assert check_optimizer(optimizer) == [], kind
        optimizer.step()
        assert check_optimizer(optimizer) == [], kind
        scheduler.step()


def test_only_the_state_of_parameters_that_take_part_is_copied() -> None:
    """The state of all is most of the memory of a model in training."""

    class Large:
        def __deepcopy__(self, memo: dict[int, Any]) -> Large:
            raise MemoryError

    held = [nn.Parameter(torch.ones(6)) for _ in range(20)]
    optimizer = torch.optim.AdamW(held)
    for p in held:
        p.grad = torch.ones_like(p)
    optimizer.step()
    for p in held[10:]:
        optimizer.state[p]["large"] = Large()
    assert check_optimizer(optimizer) == []


def test_random_draws_closures_and_hooks() -> None:
    def noise(trained: Sequence[Tensor]) -> float:
        for p in trained:
            p.add_(torch.randn_like(p))
        return 1.0

    with pytest.raises(ValueError, match=r"Lamb draws from torch's generator \(at test_.* in noise\)"):
        check_splittable(Lamb(parameters(), noise), REPLICAS, 1)
    with pytest.raises(ValueError, match=r"LBFGS evaluates the loss several times in one step, through a closure"):
        check_splittable(torch.optim.LBFGS(parameters()), LONE, 1)

    def clip_before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)

    optimizer = torch.optim.SGD(parameters(), lr=0.1)
    optimizer.register_step_pre_hook(clip_before)
    (finding,) = check_optimizer(optimizer)
    assert "in clip_before" in finding.place


def test_an_optimizer_in_another_one_is_refused_where_the_job_may_restart() -> None:
    class Outer(torch.optim.SGD):
        def __init__(self, params: Any) -> None:
            super().__init__(params, lr=0.1)
            self.inner = [torch.optim.Adam(params)]

    optimizer = Outer(parameters())
    check_splittable(optimizer, LONE, 1)
    for environment in (replace(LONE, checkpoint_url="/ckpt"), replace(LONE, agent_socket="/agent")):
        with pytest.raises(ValueError, match=r"^Outer keeps state in inner, where no checkpoint finds it"):
            check_splittable(optimizer, environment, 1)
    optimizer.inner[0].state = optimizer.state
    check_splittable(optimizer, replace(LONE, checkpoint_url="/ckpt"), 1)


def test_an_optimizer_that_copies_cannot_step_is_told_of(capsys: pytest.CaptureFixture[str]) -> None:
    def wants(trained: Sequence[Tensor]) -> float:
        assert trained[0].shape == (6,), "of my own size only"
        return 1.0

    (finding,) = check_optimizer(Lamb(parameters(), wants))
    assert (finding.matters, finding.what) == (
        "unknown",
        "Lamb could not be checked (AssertionError: of my own size only)",
    )
    check_splittable(Lamb(parameters(), wants), STAGES, 2)
    assert "Lamb could not be checked" in capsys.readouterr().out


# The script's own loop


def trained() -> tuple[Varuna, Optimizer]:
    model = Varuna(Regression(), get_batch_fn=BATCH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.set_optimizer(optimizer)
    model.step(BATCH)
    return model, optimizer


def test_the_public_norm_is_that_of_the_clipped_gradient() -> None:
    """In one process; over stages, with tied weights, it is `test_bert_lamb.py` that compares."""
    plain, model = Regression(), Varuna(Regression(), get_batch_fn=BATCH)
    whole = Lamb(plain.parameters(), global_gradient_norm)
    model.set_optimizer(Lamb(model.parameters(), global_gradient_norm))
    for clip in (1e-3, 1e3):
        whole.zero_grad()
        plain(**BATCH).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), clip)
        whole.step()
        model.step(BATCH, clip_grad_max_norm=clip)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_clipping_what_a_stage_has_is_refused_where_it_stands() -> None:
    model, _ = trained()
    for clip in (torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad_value_):
        with pytest.raises(RuntimeError, match=rf"{clip.__name__} at test_.*clip with step\(inputs, clip_grad_"):
            clip(model.parameters(), 1.0)


def test_a_grad_scaler_of_the_script_finds_nothing_to_scale() -> None:
    model, optimizer = trained()
    scaler = torch.amp.GradScaler("cpu")
    loss, _, _ = model.step(BATCH)
    with pytest.raises(ValueError, match="must be a Tensor"):
        scaler.scale(loss)  # type: ignore[call-overload]
    with pytest.raises(AssertionError, match="did not use scaler"):
        scaler.step(optimizer)


def clipped(model: Varuna, optimizer: Optimizer) -> None:
    torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1e-3)


def replaced(model: Varuna, optimizer: Optimizer) -> None:
    for p in model.parameters():
        assert p.grad is not None
        p.grad = p.grad * 0.5


@pytest.mark.parametrize("change", [clipped, replaced])
def test_gradients_changed_after_the_step_that_used_them_are_told_of(change: Callable[..., None]) -> None:
    model, optimizer = trained()
    change(model, optimizer)
    with pytest.raises(
        RuntimeError, match=r"changed between step\(\) at .* in trained and step\(\) at .*clip with step"
    ):
        model.step(BATCH)


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_may_be_read_and_forgotten(to_none: bool) -> None:
    model, optimizer = trained()
    assert all(p.grad is not None for p in model.parameters())
    optimizer.zero_grad(set_to_none=to_none)
    model.step(BATCH)
