"""Weighted losses, steps that are not finite, and loops that accumulate do in every shape what plain PyTorch does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from small_gpt import IGNORED, Examples, Task, Trained, make_model, make_optimizer, train_plainly
from training_matrix import SCRIPT, TOLERANCES
from training_world import Outcome, Ranks, Zygote, list_results
from varuna.data import Batches
from varuna.partition import loss_of

WEIGHTED = Task(global_batch=7, padded=True, clip=0.5, tied=True, learning_rate=1e-3)
IN_HALF = Task(global_batch=7, padded=True, precision="float16", optimizer="momentum", loss_scale=2.0**12)
SPOILT = Task(global_batch=7, tied=True, learning_rate=1e-3)
ACCUMULATED = replace(WEIGHTED, steps=5)
ROWS: list[tuple[Task, dict[str, Any]]] = [
    (WEIGHTED, {}),
    (IN_HALF, {}),
    (SPOILT, {"overflow": {"rank": 1, "step": 2}}),
    (ACCUMULATED, {"accumulate": 2}),
]


@pytest.fixture(
    params=[pytest.param((2, 1, 1), marks=pytest.mark.slow), (1, 2, 2), (2, 2, 1)], ids=["2x1", "1x2", "2x2"]
)
def outcomes(request: pytest.FixtureRequest, zygote: Zygote, tmp_path: Path) -> tuple[int, list[Outcome]]:
    """(the micro-batch, the result of each row). The same processes train all rows."""
    p, d, micro_batch = request.param
    rows = []
    for number, (task, wanted) in enumerate(ROWS, start=1):
        row = Ranks(zygote, tmp_path, task, p, d, micro_batch=micro_batch, generation=number)
        environ = [row.environment(rank).to_environ() for rank in range(p * d)]
        rows.append({"task": asdict(task), "environ": environ, "wanted": wanted})
    with Ranks(zygote, tmp_path, Task(), p, d, generation=0, script=SCRIPT, wanted={"rows": rows}) as world:
        codes = world.exit_codes()
        assert codes == [0] * (p * d), world.logs()
    return micro_batch, [Outcome.read(list_results(world.out / str(number), p * d)) for number in range(len(rows))]


def test_what_is_plain_pytorchs(outcomes: tuple[int, list[Outcome]]) -> None:
    micro_batch, (weighted, in_half, spoilt, accumulated) = outcomes
    assert_same(weighted, train_plainly(WEIGHTED), WEIGHTED)
    # In half precision sums depend on where they are cut; the number that they are divided by must not.
    assert_same(in_half, train_plainly(IN_HALF, micro_batch), IN_HALF)
    plain = train_plainly(SPOILT, skipped=2)
    assert spoilt.norms[1] == torch.inf
    assert_same(spoilt, replace(plain, norms=[plain.norms[0], torch.inf, *plain.norms[2:]]), SPOILT)
    assert_same(accumulated, accumulated_plainly(ACCUMULATED, every=2), ACCUMULATED)


def assert_same(ours: Outcome, plain: Trained, task: Task) -> None:
    within = TOLERANCES[task.precision]
    rtol, atol = within["rtol"], within["atol"]
    assert ours.losses == pytest.approx(plain.losses, rel=within["loss"])
    assert ours.norms == pytest.approx(plain.norms, rel=within["norm"])
    for rank in ours.ranks:
        assert rank["evaluated"] == pytest.approx(plain.evaluated, rel=within["loss"])
    for name, value in plain.parameters.items():
        held = ours.parameters[name]
        torch.testing.assert_close(held, value, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


def accumulated_plainly(task: Task, every: int) -> Trained:
    """An update for every so many batches, from the mean over all their targets; the last batch has none."""
    model = make_model(task)
    optimizer = make_optimizer(model.parameters(), task)
    losses, norms = [], []
    data = Batches(Examples(task.padded), global_batch=task.global_batch, last_step=task.steps, environ={})
    window: list[Mapping[str, Any]] = []
    for step, batch in data:
        losses.append(float(loss_of(model(**batch)).detach()))
        window.append(batch)
        counts = [int((each["targets"] != IGNORED).sum()) for each in window]
        optimizer.zero_grad()
        for each, count in zip(window, counts, strict=True):
            (loss_of(model(**each)) * count / sum(counts)).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), task.clip or torch.inf)))
        if step % every == 0:
            optimizer.step()
            window.clear()
    with torch.no_grad():
        evaluated = loss_of(model.eval()(**batch)).item()
    return Trained(losses, norms, evaluated, {n: p.detach() for n, p in model.named_parameters()}, {})
