"""Weighted losses, batches that are not finite, and gradients that the script accumulates, in one plain process."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor, nn
from torch.nn import functional as F

from varuna import CutPoint, Varuna
from varuna.checkpoint import CheckpointError
from varuna.optim.non_finite_steps import NonFiniteSteps
from varuna_proto.environment import OnNonFinite, WorkerEnvironment

IGNORED = -100


class Tagger(nn.Module):
    """B examples of T = 4 numbers, each with a class or IGNORED; batch norm keeps statistics."""

    def __init__(self, returns: str = "mean") -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(1, 8), nn.Linear(8, 3)
        self.norm = nn.BatchNorm1d(8) if returns == "norm" else nn.Identity()
        self.cut_point = CutPoint()
        self.returns = returns

    def forward(self, x: Tensor, y: Tensor) -> Any:
        hidden = self.norm(self.first(x.unsqueeze(2)).transpose(1, 2))
        scores = self.second(self.cut_point(hidden).tanh().transpose(1, 2)).transpose(1, 2)
        counted = y != IGNORED
        right = ((scores.argmax(1) == y) & counted).sum()
        if self.returns == "by hand":  # NaN with NaN gradients where nothing counts
            losses = F.cross_entropy(scores, y.clamp(min=0), reduction="none") * counted
            return losses.sum() / counted.sum(), counted.sum()
        loss = F.cross_entropy(scores, y)
        beside = {"tokens": counted.sum(), "right": right, "elements": y.numel(), "parts": loss * 0.5}
        return (loss, beside[self.returns]) if self.returns in beside else loss


def batch(size: int, device: str = "cpu") -> dict[str, Tensor]:
    """Example i has i % 5 targets."""
    generator = torch.Generator().manual_seed(size)
    y = torch.randint(3, (size, 4), generator=generator)
    for index in range(size):
        y[index, index % 5 :] = IGNORED
    return {"x": torch.randn(size, 4, generator=generator), "y": y}


def wrapped(returns: str = "mean", scales: dict[str, Any] | None = None, **options: Any) -> Any:
    model = Varuna(Tagger(returns), get_batch_fn=batch, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model.set_optimizer(optimizer, **(scales or {}))
    return model, optimizer


def plainly() -> tuple[Tagger, torch.optim.Optimizer]:
    plain = Tagger()
    return plain, torch.optim.AdamW(plain.parameters(), lr=0.1)


def assert_same_parameters(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, one), (_, other) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        torch.testing.assert_close(one, other, msg=lambda text, n=name: f"{n}: {text}")


# ---------------------------------------------------------------- weights


@pytest.mark.parametrize("returns", ["tokens", "by hand"])
@pytest.mark.parametrize("chunk_size", [1, 3, 8])
def test_the_mean_is_over_the_weights_of_the_whole_batch(returns: str, chunk_size: int) -> None:
    plain, optimizer = plainly()
    model, _ = wrapped(returns, batch_size=8, chunk_size=chunk_size)
    for size in (8, 8, 7):
        optimizer.zero_grad()
        expected = plain(**batch(size))
        expected.backward()
        optimizer.step()
        loss, overflow, norm = model.step(batch(size))
        assert (loss, overflow) == (pytest.approx(expected.item(), rel=1e-6), False)
        assert norm == pytest.approx(float(nn.utils.get_total_norm([p.grad for p in plain.parameters()])), rel=1e-5)
    assert_same_parameters(model, plain)
    assert model.evaluate(batch(6)) == pytest.approx(plain(**batch(6)).item(), rel=1e-6)


@pytest.mark.parametrize("returns", ["right", "parts", "elements"])
def test_what_depends_on_parameters_is_no_weight(returns: str) -> None:
    full = {"x": batch(8)["x"], "y": batch(8)["y"].clamp(min=0)}
    plain, _ = plainly()
    model, _ = wrapped(returns, batch_size=8, chunk_size=3)
    assert model.step(full)[0] == pytest.approx(plain(**full).item(), rel=1e-6)


def test_a_fixed_loss_scale_is_no_larger_for_a_weighted_loss() -> None:
    """The first step does not know how much a batch weighs, and must not overflow by it."""

    class Heavy(Tagger):
        def forward(self, x: Tensor, y: Tensor) -> Any:
            loss, weight = super().forward(x, y)
            return loss, weight * 2.0**40

    model = Varuna(Heavy("tokens"), get_batch_fn=batch, batch_size=8, chunk_size=3, fp16=True)
    model.set_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), loss_scale=2.0**10)
    assert [model.step(batch(8))[1] for _ in range(3)] == [False] * 3


def test_a_weight_that_none_can_have_is_refused() -> None:
    class Negative(Tagger):
        def forward(self, x: Tensor, y: Tensor) -> Any:
            return super().forward(x, y)[0], (y != IGNORED).sum() - 1000

    model = Varuna(Negative("tokens"), get_batch_fn=batch)
    model.set_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match=r"weight -\d+.0 with its loss"):
        model.step(batch(8))


# ---------------------------------------------------------------- batches that are not finite


def spoilt(size: int) -> dict[str, Tensor]:
    inputs = batch(size)
    inputs["x"][0, 0] = torch.inf
    return inputs


def uncounted(size: int) -> dict[str, Tensor]:
    """Their loss is not finite, but all that batch norm sees is."""
    return {**batch(size), "y": torch.full((size, 4), IGNORED)}


def copy_statistics(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items() if name.startswith("norm.")}


def assert_same_statistics(ours: nn.Module, theirs: dict[str, Tensor]) -> None:
    for name, tensor in copy_statistics(ours).items():
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=0, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("bad", [spoilt, uncounted])
@pytest.mark.parametrize("options", [{}, {"dtype": torch.bfloat16}, {"offload_optimizer": True}])
def test_a_step_that_is_not_finite_is_skipped_and_leaves_no_trace(
    options: dict[str, Any], bad: Callable[[int], dict[str, Tensor]], tmp_path: Path
) -> None:
    model, _ = wrapped("norm", **options)
    undisturbed, _ = wrapped("norm", **options)
    for step in range(4):
        expected = undisturbed.step(batch(8))
        assert model.step(batch(8)) == expected
        if step == 1:
            loss, overflow, norm = model.step(bad(8))
            assert overflow
            assert not torch.tensor([loss, norm]).isfinite().all()
            assert model.checkpoint(str(tmp_path))
    assert_same_parameters(model, undisturbed)
    assert_same_statistics(model, copy_statistics(undisturbed))
    assert model.evaluate(batch(6)) == undisturbed.evaluate(batch(6))  # by the statistics of batch norm


def test_an_overflow_with_fp16_changes_no_statistics() -> None:
    model, _ = wrapped("norm", scales={"init_loss_scale": 2.0**60}, fp16=True)
    before = copy_statistics(model)
    assert before["norm.num_batches_tracked"].item() == 0
    assert [model.step(batch(8))[1] for _ in range(2)] == [True, True]
    assert_same_statistics(model, before)


def test_steps_that_are_not_finite_end_the_run_when_they_are_too_many_in_a_row() -> None:
    model, _ = wrapped(max_non_finite_steps=2)
    for _ in range(2):
        assert [model.step(spoilt(4))[1] for _ in range(2)] == [True, True]
        assert not model.step(batch(4))[1]
    before = [p.detach().clone() for p in model.parameters()]
    assert [model.step(spoilt(4))[1] for _ in range(2)] == [True, True]
    with pytest.raises(FloatingPointError, match=r"3 steps in a row .*step 9.*max_non_finite_steps=2"):
        model.step(spoilt(4))
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))

    model, _ = wrapped(max_non_finite_steps=0)
    with pytest.raises(FloatingPointError, match="step 1"):
        model.step(spoilt(4))
    with pytest.raises(ValueError, match="max_non_finite_steps=-1"):
        wrapped(max_non_finite_steps=-1)


@pytest.mark.parametrize(("in_stages", "looks"), [(True, True), (True, False), (False, True)])
def test_the_log_names_another_way_than_in_the_dry_run_as_a_cause(in_stages: bool, looks: bool) -> None:
    steps = NonFiniteSteps(None, OnNonFinite.SKIP, logs=True, in_stages=in_stages, looks_at_values=looks)
    with capture_logs() as log:
        assert steps.decide_skip(1, math.nan, math.nan, None)
        assert steps.decide_skip(2, math.nan, math.nan, None)
    assert sum("takes another way than in the dry run" in line["event"] for line in log) == (in_stages and looks)
    with capture_logs() as log:
        steps.explain_evaluation(1.0)
        assert not log
        steps.explain_evaluation(math.nan)
    assert ["takes another way than in training" in line["event"] for line in log] == [True] * in_stages


def set_job_option(monkeypatch: pytest.MonkeyPatch, on_non_finite: OnNonFinite) -> None:
    """This process is the one worker of a job whose file says `on_nonfinite`."""
    alone = replace(WorkerEnvironment.alone("job", micro_batch=4, global_batch=4), on_non_finite=on_non_finite)
    for name, value in alone.to_environ().items():
        monkeypatch.setenv(name, value)


def test_a_job_that_is_to_stop_ends_at_its_first_step_that_is_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    set_job_option(monkeypatch, OnNonFinite.STOP)
    model, _ = wrapped()
    assert not model.step(batch(4))[1]
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(FloatingPointError, match=r"^step 2 has .* not finite \(.*norm nan; on_nonfinite: stop\)"):
        model.step(spoilt(4))
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def test_a_job_that_is_to_go_on_makes_the_updates_of_plain_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    set_job_option(monkeypatch, OnNonFinite.GO_ON)
    model, _ = wrapped("norm")
    plain = Tagger("norm")
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)
    for inputs in (batch(4), spoilt(4), *[batch(4)] * 12):
        optimizer.zero_grad()
        plain(**inputs).backward()
        optimizer.step()
        _, overflow, _ = model.step(inputs)
        assert not overflow
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)
    assert not all(p.isfinite().all() for p in model.parameters())
    assert not model.state_dict()["norm.running_mean"].isfinite().all()


def test_a_job_that_is_to_go_on_leaves_overflows_to_the_loss_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    set_job_option(monkeypatch, OnNonFinite.GO_ON)
    model, _ = wrapped(scales={"loss_scale": 2.0**40}, fp16=True)
    before = [p.detach().clone() for p in model.parameters()]
    assert [model.step(batch(4))[1] for _ in range(12)] == [True] * 12
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("policy", OnNonFinite)
def test_the_job_files_option_comes_before_the_scripts_bound_and_says_so(
    policy: OnNonFinite, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    set_job_option(monkeypatch, policy)
    model, _ = wrapped(max_non_finite_steps=1)
    said = f"on_nonfinite={policy.value}" in capfd.readouterr().out
    assert said == (policy is not OnNonFinite.SKIP)
    outcomes = []
    for _ in range(3):
        try:
            outcomes.append(model.step(spoilt(4))[1])
        except FloatingPointError:
            outcomes.append("ended")
            break
    expected = {OnNonFinite.SKIP: [True, "ended"], OnNonFinite.STOP: ["ended"], OnNonFinite.GO_ON: [False] * 3}
    assert outcomes == expected[policy]


def test_fp16_counts_overflows_only_where_no_smaller_scale_is_left() -> None:
    model, _ = wrapped(scales={"init_loss_scale": 2.0**40}, fp16=True, max_non_finite_steps=1)
    assert sum(model.step(batch(4))[1] for _ in range(40)) > 1
    model, _ = wrapped(scales={"loss_scale": 2.0**40}, fp16=True, max_non_finite_steps=1)
    assert model.step(batch(4))[1]
    with pytest.raises(FloatingPointError, match="2 steps in a row"):
        model.step(batch(4))


def test_no_checkpoint_is_made_of_parameters_that_are_not_finite(tmp_path: Path) -> None:
    model, optimizer = wrapped()
    model.step(batch(4))
    assert model.checkpoint(str(tmp_path))
    optimizer.param_groups[0]["lr"] = torch.inf
    model.step(batch(4))
    with pytest.raises(CheckpointError, match=r"first\.weight.* not finite"):
        model.checkpoint(str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["varuna_ckpt_1"]


# ---------------------------------------------------------------- chunk_size alone, accumulation


def test_a_chunk_size_alone_cuts_the_batch() -> None:
    sizes = []

    class Watched(Tagger):
        def forward(self, x: Tensor, y: Tensor) -> Any:
            sizes.append(len(x))
            return super().forward(x, y)

    plain, _ = plainly()
    model = Varuna(Watched("tokens"), get_batch_fn=batch, chunk_size=3)
    model.set_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    del sizes[:]
    assert model.step(batch(8))[0] == pytest.approx(plain(**batch(8)).item(), rel=1e-6)
    assert sizes == [3, 3, 2]


SIZES = (8, 8, 7, 6, 8, 8, 8)


def accumulated_plainly(clip: float | None, every: int = 3) -> tuple[nn.Module, list[float]]:
    """Updates by the mean over all targets since the last update. The last steps, which are too few, are lost."""
    plain, optimizer = plainly()
    norms = []
    for number, size in enumerate(SIZES, start=1):
        counted = [int((batch(s)["y"] != IGNORED).sum()) for s in SIZES[(number - 1) // every * every :][:every]]
        loss = plain(**batch(size)) * int((batch(size)["y"] != IGNORED).sum()) / sum(counted)
        loss.backward()
        if number % every == 0:
            norms.append(float(nn.utils.clip_grad_norm_(plain.parameters(), clip or torch.inf)))
            optimizer.step()
            optimizer.zero_grad()
    return plain, norms


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize(
    "options", [{}, {"offload_optimizer": True}, {"batch_size": 8, "chunk_size": 3}], ids=["plain", "offload", "chunks"]
)
def test_a_loop_that_accumulates_updates_as_often_as_it_says(clip: float | None, options: dict[str, Any]) -> None:
    plain, expected = accumulated_plainly(clip)
    model, optimizer = wrapped("tokens", **options)
    norms = []
    every = 3
    for number, size in enumerate(SIZES):
        norm = model.step(batch(size), clip_grad_max_norm=clip)[2]
        if (number + 1) % every == 0:
            norms.append(norm)
            optimizer.step()
            optimizer.zero_grad()
    assert norms == pytest.approx(expected, rel=1e-5)
    assert_same_parameters(model, plain)


def test_a_batch_that_is_not_finite_is_left_out_of_what_is_accumulated() -> None:
    plain, _ = accumulated_plainly(None)
    model, optimizer = wrapped("tokens")
    for number, size in enumerate(SIZES):
        if number in (0, 2, 4):
            assert model.step(spoilt(size))[1]
        model.step(batch(size))
        if (number + 1) % 3 == 0:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(model, plain)


def in_another_function(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()


def test_accumulation_that_is_not_seen_in_time_is_refused_and_can_be_asked_for() -> None:
    plain, _ = accumulated_plainly(None)
    model, optimizer = wrapped("tokens", accumulate=True)
    for number, size in enumerate(SIZES):
        model.step(batch(size))
        if (number + 1) % 3 == 0:
            in_another_function(optimizer)
    assert_same_parameters(model, plain)

    model, optimizer = wrapped("tokens")
    for _ in range(3):
        model.step(batch(8))
        in_another_function(optimizer)  # after each: left out
    model.step(batch(8))
    model.step(batch(8))
    with pytest.raises(RuntimeError, match=r"test_numerics_alone.py:\d+ in in_another_function.*accumulate=True"):
        in_another_function(optimizer)


def test_a_loop_that_steps_each_time_is_no_accumulation() -> None:
    plain, plain_optimizer = plainly()
    model, optimizer = wrapped("tokens")
    for number in range(4):
        plain_optimizer.zero_grad()
        plain(**batch(8)).backward()
        plain_optimizer.step()
        model.step(batch(8))
        optimizer.step()
        if number % 2 == 0:
            optimizer.zero_grad()
    assert_same_parameters(model, plain)


@pytest.mark.parametrize("offload", [False, True], ids=["device", "host"])
def test_gradients_that_the_script_drops_are_not_in_the_update(offload: bool) -> None:
    plain, _ = accumulated_plainly(None)
    model, optimizer = wrapped("tokens", accumulate=True, offload_optimizer=offload)
    model.step(batch(8))
    optimizer.zero_grad()
    model.step(batch(8))
    optimizer.zero_grad(set_to_none=False)
    for number, size in enumerate(SIZES):
        model.step(batch(size))
        if (number + 1) % 3 == 0:
            optimizer.step()
    assert_same_parameters(model, plain)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
