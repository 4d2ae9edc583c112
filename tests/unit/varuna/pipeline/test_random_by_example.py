"""What a model draws belongs to its examples: the same for every size of the micro-batches.

Letters: B examples in the global batch, m in a micro-batch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from random_models import MODELS, C, Mixed, Sampling, T, batch
from training_roles import training_role
from varuna import Varuna
from varuna.calibration.optimizer_costs import OptimizerSetup
from varuna.calibration.profile import calibrate
from varuna.calibration.subject import CalibrationSubject
from varuna.optim.precision import TrainingPrecision
from varuna.partition import trace
from varuna.partition.cutting.shapes import DrawSpec, LinearSize
from varuna.pipeline.random_by_example import ExampleStreams
from varuna.pipeline.random_operations import install_hooks

B = 8


def train(make: Callable[[], nn.Module], m: int | None, steps: int = 3, **options: Any) -> list[float]:
    """The losses in one process."""
    torch.manual_seed(3)
    if m is not None:
        options |= {"batch_size": B, "chunk_size": m}
    model = Varuna(make(), get_batch_fn=batch, **options)
    model.set_optimizer(torch.optim.SGD(model.parameters(), lr=0.05))
    return [model.step(batch(B))[0] for _ in range(steps)]


@pytest.mark.long
@pytest.mark.parametrize(
    "name", ["gpt", *(pytest.param(one, marks=pytest.mark.slow) for one in MODELS if one != "gpt")]
)
def test_losses_do_not_depend_on_the_micro_batch(name: str) -> None:
    whole = train(MODELS[name], None)
    for m in (1, 2, 3, 8):
        assert train(MODELS[name], m) == pytest.approx(whole, rel=1e-5), f"m={m}"


@pytest.mark.long
def test_without_it_they_belong_to_micro_batches() -> None:
    whole = train(MODELS["gpt"], 8, random_by_example=False)
    assert train(MODELS["gpt"], None, random_by_example=False) == whole
    assert train(MODELS["gpt"], 3, random_by_example=False) != pytest.approx(whole, rel=1e-3)


def evaluate(model: Varuna, step: int) -> list[float]:
    """The losses of three evaluations of one batch, after `step`."""
    while training_role(model)._progress.step < step:
        model.step(batch(B))
    return [model.evaluate(batch(B)) for _ in range(3)]


def make_sampling(**options: Any) -> Varuna:
    torch.manual_seed(3)
    model = Varuna(Sampling(), get_batch_fn=batch, **options)
    model.set_optimizer(torch.optim.SGD(model.parameters(), lr=0.0))
    return model


def test_each_evaluation_draws_numbers_of_its_own() -> None:
    model = make_sampling()
    before = torch.get_rng_state()
    losses = [*evaluate(model, 0), *evaluate(model, 1), *evaluate(model, 2)]
    losses += [model.step(batch(B))[0] for _ in range(3)]
    assert len(set(losses)) == 12
    assert torch.equal(torch.get_rng_state(), before)


def test_evaluations_draw_the_same_numbers_for_each_micro_batch_size() -> None:
    whole = [*evaluate(make_sampling(), 0)]
    for m in (1, 3, 8):
        assert evaluate(make_sampling(batch_size=B, chunk_size=m), 0) == pytest.approx(whole, rel=1e-5), f"m={m}"


def test_an_evaluation_draws_the_same_numbers_after_a_restart(tmp_path: Path) -> None:
    model = make_sampling()
    evaluate(model, 1)
    assert model.checkpoint(str(tmp_path))
    expected = evaluate(model, 2)
    again = make_sampling()
    evaluate(again, 0)
    again.load_checkpoint(str(tmp_path), 1)
    assert evaluate(again, 2) == expected
    again.load_checkpoint(str(tmp_path), 1)
    assert evaluate(again, 2) == expected


def test_an_evaluation_that_fails_does_not_count() -> None:
    expected = evaluate(make_sampling(), 0)
    model = make_sampling()
    with pytest.raises(ValueError, match="hold 8 examples"):
        model.evaluate(batch(B), batch_size=B + 1)
    assert evaluate(model, 0) == expected


def spec(*shape: int, per_example: int = 0, dim: int = 0) -> DrawSpec:
    """A draw of this shape beside the examples' dimension `dim`, which has `per_example` rows for each; 0: none."""
    sizes = [LinearSize(size) for size in shape]
    if not per_example:
        return DrawSpec(0, "", tuple(sizes), None)
    sizes.insert(dim, LinearSize(0, per_example))
    return DrawSpec(0, "", tuple(sizes), dim)


def draw(make: Callable[[int], Tensor], specs: list[DrawSpec], sizes: list[int], dim: int = 0, ops: int = 1) -> Tensor:
    """What `make` draws for micro-batches of these sizes, joined along the examples, for `ops` draws in a row.

    (ops, …)
    """
    install_hooks()
    streams, first, parts = ExampleStreams(specs), 0, []
    for size in sizes:
        torch.default_generator.manual_seed(11)  # as each section does
        streams.set_examples(first, size)
        with streams:
            parts.append(torch.stack([make(size) for _ in range(ops)]))
        first += size
    return torch.cat(parts, dim + 1)


def test_numbers_have_their_distribution_and_are_independent() -> None:
    ops, examples, numbers = 8, 100, 600
    specs = [spec(numbers, per_example=1)]
    normal = draw(lambda n: torch.randn(n, numbers), specs, [7] * 14 + [2], ops=ops)
    uniform = draw(lambda n: torch.rand(n, numbers), specs, [7] * 14 + [2], ops=ops)
    kept = draw(lambda n: torch.empty(n, numbers).bernoulli_(0.9), specs, [7] * 14 + [2], ops=ops)

    count = ops * examples * numbers  # the bounds are five standard errors
    assert normal.mean().item() == pytest.approx(0, abs=5 / count**0.5)
    assert normal.var().item() == pytest.approx(1, abs=5 * (2 / count) ** 0.5)
    assert uniform.mean().item() == pytest.approx(0.5, abs=5 * (1 / 12 / count) ** 0.5)
    assert kept.mean().item() == pytest.approx(0.9, abs=5 * (0.09 / count) ** 0.5)
    assert set(kept.unique().tolist()) == {0.0, 1.0}
    histogram = uniform.histc(100, 0, 1)
    assert ((histogram - count / 100) ** 2 / (count / 100)).sum().item() < 99 + 5 * (2 * 99) ** 0.5
    # Each draw of each example beside every other one: correlations of independent rows are about N(0, 1/numbers).
    for drawn in (normal, kept):
        rows = drawn.reshape(ops * examples, numbers)
        correlations = torch.corrcoef(rows).triu(1)
        pairs = correlations[correlations != 0]
        assert pairs.abs().max().item() < 6.5 / numbers**0.5
        assert pairs.mean().item() == pytest.approx(0, abs=5 / (len(pairs) * numbers) ** 0.5)
        assert (pairs.var() * numbers).item() == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("numbers", [1, 3, 100, 700])
def test_small_and_large_parts_of_examples(numbers: int) -> None:
    specs = [spec(numbers, per_example=1)]
    whole = draw(lambda n: torch.rand(n, numbers), specs, [70])
    assert len(whole.unique()) > 0.99 * whole.numel()
    for m in (1, 2, 3, 64):
        sizes = [min(m, 70 - start) for start in range(0, 70, m)]
        assert torch.equal(draw(lambda n: torch.rand(n, numbers), specs, sizes), whole), f"m={m}"


def test_the_dimension_of_the_examples_may_be_any() -> None:
    second, merged = [spec(4, 5, per_example=1, dim=1)], [spec(5, per_example=3)]
    one = draw(lambda n: torch.rand(4, n, 5), second, [6], dim=1)
    assert torch.equal(draw(lambda n: torch.rand(4, n, 5), second, [4, 2], dim=1), one)
    three = draw(lambda n: torch.rand(n * 3, 5), merged, [6])
    assert torch.equal(draw(lambda n: torch.rand(n * 3, 5), merged, [1, 5]), three)


def test_a_draw_without_examples_belongs_to_the_step() -> None:
    parts = draw(lambda n: torch.rand(4), [spec(4)], [2, 3])
    assert torch.equal(parts[:, :4], parts[:, 4:])


@pytest.mark.parametrize(
    "make",
    [
        lambda n: torch.normal(0.0, torch.ones(n, 4)),
        lambda n: torch.normal(torch.zeros(n, 4), 2.0),
        lambda n: torch.normal(torch.zeros(n, 1), torch.ones(4)),
        lambda n: torch.normal(0.0, torch.ones(n, 4), out=torch.empty(n, 4)),
        lambda n: torch.normal(torch.zeros(n, 4), 2.0, out=torch.empty(n, 4)),
        lambda n: torch.normal(torch.zeros(n, 1), torch.ones(4), out=torch.empty(n, 4)),
        lambda n: torch.bernoulli(torch.linspace(0.3, 0.7, 4).expand(n, 4), out=torch.empty(n, 4)),
        lambda n: torch.multinomial(torch.ones(n, 999), 4, True, out=torch.empty(n, 4, dtype=torch.int64)),
    ],
)
def test_distributions_of_numbers_and_tensors_belong_to_examples(make: Callable[[int], Tensor]) -> None:
    specs = [spec(4, per_example=1)]
    whole = draw(make, specs, [6])
    assert len(whole[0].unique(dim=0)) > 1
    assert torch.equal(draw(make, specs, [4, 2]), whole)


def test_without_a_pass_torch_draws_as_usual() -> None:
    install_hooks()
    assert torch.normal(0.0, torch.ones(3)).shape == (3,)
    assert torch.normal(0.0, torch.ones(3), out=torch.empty(3)).shape == (3,)


def test_a_draw_that_was_not_foreseen_belongs_to_the_micro_batch() -> None:
    install_hooks()
    streams = ExampleStreams([spec(4, per_example=1)])
    with streams:
        torch.rand(2, 3, 4, 5)
    assert len(streams.micro_batch_draws) == 1
    [place] = streams.micro_batch_draws
    assert "test_random_by_example.py" in place


def test_a_generator_of_the_models_own_is_left_alone() -> None:
    install_hooks()
    expected = torch.rand(3, 4, generator=torch.Generator().manual_seed(5))
    with ExampleStreams([spec(4, per_example=1)]):
        assert torch.equal(torch.rand(3, 4, generator=torch.Generator().manual_seed(5)), expected)
        assert torch.equal(torch.randperm(9, generator=torch.Generator().manual_seed(5)).sort()[0], torch.arange(9))


def test_another_thread_moves_nothing() -> None:
    """A data loader has such a thread."""

    def with_stranger() -> Tensor:
        parts = [torch.rand(2, 4)]
        thread = threading.Thread(target=lambda: (torch.rand(5), torch.randperm(5), F.dropout(torch.ones(9))))
        thread.start()
        thread.join()
        return torch.stack([*parts, torch.rand(2, 4)])

    specs = [spec(4, per_example=1)]
    alone = draw(lambda n: torch.rand(n, 4), specs, [2], ops=2)
    assert torch.equal(draw(lambda n: with_stranger(), specs, [2])[0], alone)


class Drawing(nn.Module):
    """Calls `draws` on a tensor of shape (B, T, C)."""

    def __init__(self, draws: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.draws = nn.Linear(C, C), draws

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y.square().mean() + self.draws(y).mean()


@pytest.mark.parametrize(
    ("draws", "problem"),
    [
        (lambda y: F.dropout(y), ""),
        (lambda y: F.dropout(y.flatten(0, 1)), ""),
        (lambda y: F.dropout(y.transpose(0, 1)), ""),
        (lambda y: F.dropout(y.transpose(0, 1).flatten(0, 1)), "in an order that its shape does not show"),
        (lambda y: torch.rand(len(y) * T), "in an order that its shape does not show"),
        (lambda y: torch.rand(T, T), ""),
        (lambda y: y[torch.randperm(len(y))], "shuffles the examples"),
        (lambda y: torch.rand(len(y), len(y)), "several of its dimensions"),
        (lambda y: torch.rand(len(y) + 1), "not in proportion"),
        (lambda y: torch.rand(len(y), 5).sum() + torch.rand(5, len(y)).sum(), "the same shape for some micro-batch"),
        (lambda y: torch.rand(3, generator=torch.Generator().manual_seed(1)), None),
        (lambda y: F.dropout(y, training=False), None),
    ],
)
def test_the_dry_run_finds_what_cannot_belong_to_examples(
    draws: Callable[[Tensor], Tensor], problem: str | None
) -> None:
    found = trace(Drawing(draws), batch(2)).draws
    if problem is None:
        assert found == ()
    else:
        assert found
        for each in found:
            assert "test_random_by_example.py" in each.place
            assert problem in each.problem if problem else not each.problem


def test_a_draw_into_a_tensor_has_the_shape_of_that_tensor() -> None:
    def draws(y: Tensor) -> Tensor:
        return torch.normal(torch.zeros(1), torch.ones(len(y), T), out=torch.empty(len(y), T))

    [found] = trace(Drawing(draws), batch(2)).draws
    assert found.sizes == (LinearSize(0, 1), LinearSize(T))


@pytest.mark.long
def test_the_dry_run_finds_every_draw_of_a_model() -> None:
    found = trace(Mixed(), batch(2)).draws
    assert len(found) == 2 + 4 * 5  # of a block: attention's, one behind it, one within the layers, two of whole paths
    assert not any(each.problem for each in found)
    assert [each.section for each in found] == sorted(each.section for each in found)


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "by_example", "reason"),
    [
        (MODELS["gpt"], True, ""),
        (lambda: Drawing(lambda y: y[torch.randperm(len(y))]), True, "shuffles the examples"),
        (MODELS["gpt"], False, "random_by_example=False"),
        (lambda: Drawing(lambda y: y), False, ""),
    ],
)
def test_the_profile_says_why_the_micro_batch_has_to_stay(
    model: Callable[[], nn.Module], by_example: bool, reason: str
) -> None:
    made = model()
    model_map = replace(trace(made, batch(2)), random_by_example=by_example)
    profile = calibrate(
        CalibrationSubject(made, model_map, batch, torch.device("cpu"), TrainingPrecision(torch.float32, "cpu")),
        OptimizerSetup(torch.optim.SGD(made.parameters())),
        global_batch=2,
        micro_batches=[2],
        budget_s=0.01,
    )
    assert profile is not None
    assert reason in profile.micro_batch_kept_for if reason else not profile.micro_batch_kept_for
