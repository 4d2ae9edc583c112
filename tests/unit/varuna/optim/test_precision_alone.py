"""Mixed precision, checkpoints by default, and untouched random generators, in one plain process."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from varuna import CutPoint, Profiler, Varuna
from varuna.calibration.optimizer_costs import OptimizerSetup
from varuna.calibration.profile import calibrate
from varuna.calibration.subject import CalibrationSubject
from varuna.optim.host_parameters import HostParameters
from varuna.optim.precision import TrainingPrecision
from varuna.partition import PartitionError, build_stage, trace
from varuna_proto.environment import WorkerEnvironment


class Classifier(nn.Module):
    """Its cut-point passes the result of a matrix product, which autocast makes half precision."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.norm, self.second = nn.Linear(5, 16), nn.LayerNorm(16), nn.Linear(16, 4)
        self.cut_point = CutPoint()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.second(self.norm(self.cut_point(self.first(x)).tanh())), y)


def batch(size: int, device: str = "cpu") -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(size)
    return {
        "x": torch.randn(size, 5, generator=generator),
        "y": torch.randint(4, (size,), generator=generator),
    }


def wrapped(scales: dict[str, Any] | None = None, **options: Any) -> Varuna:
    model = Varuna(Classifier(), get_batch_fn=batch, **options)
    model.set_optimizer(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), **(scales or {}))
    return model


@pytest.mark.parametrize("options", [{"fp16": True}, {"dtype": torch.bfloat16}, {"dtype": torch.float16}])
@pytest.mark.parametrize("clip", [None, 0.25])
def test_a_step_is_what_plain_autocast_does(options: dict[str, Any], clip: float | None) -> None:
    plain, dtype = Classifier(), options.get("dtype", torch.float16)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2**10, enabled=dtype is torch.float16)
    model = wrapped({"init_loss_scale": 2**10}, **options)
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype):
            expected = plain(**batch(6))
        scaler.scale(expected).backward()
        scaler.unscale_(optimizer)
        norm = float(nn.utils.clip_grad_norm_(plain.parameters(), clip or torch.inf))
        scaler.step(optimizer)
        scaler.update()
        assert model.step(batch(6), clip_grad_max_norm=clip) == pytest.approx((expected.item(), False, norm), rel=1e-6)
    for (name, ours), (_, theirs) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert ours.dtype is torch.float32
        torch.testing.assert_close(ours, theirs, msg=name)
        torch.testing.assert_close(ours.grad, theirs.grad, msg=name)
    with torch.no_grad(), torch.autocast("cpu", dtype):
        assert model.evaluate(batch(4)) == pytest.approx(plain(**batch(4)).item(), rel=1e-6)


def test_a_scale_that_is_too_large_skips_steps_until_it_is_not(tmp_path: Path) -> None:
    model = wrapped({"init_loss_scale": 2.0**30}, fp16=True)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    overflows = 0
    while True:
        scale = model.loss_scale
        loss, overflow, norm = model.step(batch(6), clip_grad_max_norm=1.0)
        if not overflow:
            break
        overflows += 1
        assert np.isfinite(loss)
        assert not np.isfinite(norm)
        assert model.loss_scale == scale / 2
        assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert 5 < overflows < 25
    assert np.isfinite(norm)
    assert not torch.equal(before["second.weight"], dict(model.named_parameters())["second.weight"])

    model.checkpoint(str(tmp_path))
    again = wrapped(fp16=True)
    again.load_checkpoint(str(tmp_path), overflows + 1)
    assert again.loss_scale == model.loss_scale
    assert again.step(batch(6)) == model.step(batch(6))


def test_a_fixed_scale_and_its_end() -> None:
    model = wrapped({"loss_scale": 100.0}, fp16=True)
    assert not model.step(batch(6))[1]
    too_large = wrapped({"loss_scale": 2.0**40}, fp16=True)
    for _ in range(2):
        assert too_large.step(batch(6))[1]
    assert too_large.loss_scale == 2.0**40


@pytest.mark.parametrize("options", [{}, {"fp16": True}])
def test_an_optimizer_on_the_host_gives_the_same(tmp_path: Path, options: dict[str, Any]) -> None:
    usual, offloaded = (
        wrapped({"init_loss_scale": 2.0**30}, offload_optimizer=offload, **options) for offload in (False, True)
    )
    for _ in range(12):
        assert offloaded.step(batch(6), clip_grad_max_norm=0.5) == pytest.approx(usual.step(batch(6), 0.5), nan_ok=True)
        for ours, theirs in zip(offloaded.parameters(), usual.parameters(), strict=True):
            assert torch.equal(ours, theirs)
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=0, equal_nan=True)
    assert offloaded.checkpoint(tmp_path)
    again = wrapped(offload_optimizer=True, **options)
    again.load_checkpoint(tmp_path, 12)
    assert again.evaluate(batch(6)) == usual.evaluate(batch(6))
    assert again.step(batch(6)) == usual.step(batch(6))


def test_what_is_not_trained_stays_on_the_device_alone() -> None:
    model = Classifier()
    model.norm.weight.requires_grad_(False)
    model.second.bias.mark = "no weight decay"  # type: ignore[attr-defined]
    held = HostParameters(dict(model.named_parameters()))
    assert held.parameters["norm.weight"] is model.norm.weight
    assert held.parameters["first.weight"] is not model.first.weight
    assert held.parameters["second.bias"].mark == "no weight decay"  # type: ignore[attr-defined]
    model.first.weight.grad = torch.ones_like(model.first.weight)
    held.move_gradients_to_host()
    assert torch.equal(held.parameters["first.weight"].grad, torch.ones(16, 5))
    assert held.parameters["first.bias"].grad is None
    assert model.first.weight.grad is None
    held.move_gradients_to_host()
    assert held.parameters["first.weight"].grad is None


def test_without_fp16_nothing_is_scaled() -> None:
    model = wrapped({"loss_scale": 8.0}, dtype=torch.bfloat16)
    assert model.loss_scale == 1.0
    next(iter(model.parameters())).register_hook(lambda gradient: gradient + torch.inf)
    _, overflow, norm = model.step(batch(6))
    assert overflow
    assert norm == torch.inf
    assert model.loss_scale == 1.0


def test_what_crosses_has_the_type_that_autocast_gives() -> None:
    with TrainingPrecision(torch.bfloat16, "cpu").dry_run_context():
        half = trace(Classifier(), batch(2))
    full = trace(Classifier(), batch(2))
    assert [b.dtype for b in half.find_boundary(1)] == [torch.bfloat16]
    assert [b.dtype for b in full.find_boundary(1)] == [torch.float32]
    with pytest.raises(PartitionError, match=r"is torch\.float32 on cpu, but was torch\.bfloat16 in the dry run"):
        build_stage(Classifier(), half, 0, 1, device="cpu").forward(batch(2), [])


def test_the_profiler_measures_under_the_same_precision(tmp_path: Path) -> None:
    measured = {}
    for name, options in {"full": {}, "half": {"dtype": torch.bfloat16}, "fp16": {"fp16": True}}.items():
        model = Classifier()
        profiler = Profiler(model, batch, out_folder=tmp_path / name, **options)
        profiler.set_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        profile = profiler.profile_all([8])
        assert profile is not None
        measured[name] = [section.measurements[0] for section in profile.sections]
    for half in (measured["half"], measured["fp16"]):
        labels_bytes = 8 * 8
        assert half[0].output_bytes == half[1].input_bytes - labels_bytes == measured["full"][0].output_bytes // 2
    # The input's cast is an activation. The weights' casts are not, because all micro-batches share them.
    assert measured["half"][0].activation_bytes == 8 * 5 * 2 + measured["half"][0].output_bytes


def test_a_calibration_knows_precision_and_where_the_optimizer_is() -> None:
    model, precision = Classifier(), TrainingPrecision(torch.bfloat16, "cpu")
    with precision.dry_run_context():
        model_map = trace(model, batch(2))
    profiles = [
        calibrate(
            CalibrationSubject(model, model_map, lambda size: batch(size), torch.device("cpu"), precision),
            OptimizerSetup(torch.optim.Adam(model.parameters()), on_device=on_device),
            global_batch=4,
            micro_batches=[2],
        )
        for on_device in (True, False)
    ]
    assert [profile.environment["precision"] for profile in profiles if profile] == ["bfloat16", "bfloat16"]
    assert [profile.sections[0].optimizer_bytes > 0 for profile in profiles if profile] == [True, False]
    # Five inputs and sixteen outputs: the weight in fp32 and in bf16, and the bias.
    sizes = [(one.parameter_bytes, one.value_bytes) for profile in profiles if profile for one in profile.sections[:1]]
    assert sizes == [(5 * 16 * (4 + 2) + 16 * 4, (5 * 16 + 16) * 4)] * 2


def draw(size: int, device: str = "cpu") -> dict[str, Tensor]:
    """Example inputs of a user who draws from every random generator and even seeds it."""
    torch.manual_seed(random.randrange(100) + np.random.randint(100))
    return {"x": torch.randn(size, 5), "y": torch.randint(4, (size,))}


def test_building_leaves_the_random_generators_alone() -> None:
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    torch.rand(5)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    model = Classifier()  # which seeds
    torch.set_rng_state(before[0])

    Varuna(model, get_batch_fn=draw)

    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.initial_seed() == 3
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]
    if torch.cuda.is_available():
        assert all(torch.equal(a, b) for a, b in zip(torch.cuda.get_rng_state_all(), on_gpus, strict=True))


def test_a_model_on_meta_leaves_them_alone_too() -> None:
    torch.manual_seed(3)
    with torch.device("meta"):
        model = Classifier()
    before = torch.get_rng_state()
    Varuna(model, get_batch_fn=batch)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_checkpoint_goes_to_the_jobs_store_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = wrapped()
    model.step(batch(4))
    assert model.checkpoint_url is None
    with pytest.raises(ValueError, match="no checkpoint store of its own"):
        model.checkpoint()
    assert model.checkpoint(tmp_path / "given", tempdir=str(tmp_path / "unused"))
    assert model.checkpoint(tmp_path / "given", step=5)  # after the one in the background
    assert (tmp_path / "given" / "varuna_ckpt_1" / "manifest.json").exists()
    assert (tmp_path / "given" / "varuna_ckpt_5" / "manifest.json").exists()

    alone = WorkerEnvironment.alone("test", micro_batch=2, global_batch=4)
    job = replace(alone, checkpoint_url=str(tmp_path / "own"))
    for name, value in job.to_environ().items():
        monkeypatch.setenv(name, value)
    model = wrapped()
    assert model.checkpoint_url == str(tmp_path / "own")
    expected = [model.step(batch(4)) for _ in range(2)]
    assert model.checkpoint()
    again = wrapped()
    assert again.resume() == 2
    assert again.step(batch(4)) == model.step(batch(4)) < expected[-1]
