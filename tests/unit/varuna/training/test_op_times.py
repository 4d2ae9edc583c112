"""Of which micro-batches a rank reports the times: only of whole ones, which the profile and its peers know."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from small_gpt import Task, example_batch, make_model
from varuna import Varuna
from varuna.pipeline.engine import Engine
from varuna.roles.progress import TrainingStep
from varuna.roles.training import TrainingRole

US = 1000
MICRO_BATCH = 4


@pytest.mark.parametrize(
    ("examples", "forward_us", "backward_us"),
    [(8, 4, 8), (6, 4, 8), (10, 4, 8), (3, 0, 0)],
    ids=["whole ones", "a short one at the end", "two and a short one", "the short one alone"],
)
def test_a_short_micro_batch_does_not_count(
    examples: int, forward_us: int, backward_us: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each op takes 1 µs for an example, each backward 2: so a rank with less to do would look faster than it is."""
    now_ns, times = 0, list[tuple[int, int]]()

    def take_time(op: str, us: int) -> None:
        run = getattr(Engine, op)

        def run_slowly(engine: Engine, passed: Any, *args: Any) -> None:
            nonlocal now_ns
            number = passed.forwards if op == "_run_forward" else passed.backwards
            now_ns += us * US * passed.micro_batches[number].examples
            run(engine, passed, *args)

        monkeypatch.setattr(Engine, op, run_slowly)

    def report(role: TrainingRole, step: TrainingStep, *_: object) -> None:
        assert step.passed is not None
        times.append((step.passed.forward_us, step.passed.backward_us))

    take_time("_run_forward", 1)
    take_time("_run_backward", 2)
    monkeypatch.setattr("varuna.pipeline.pass_timer.time", SimpleNamespace(perf_counter_ns=lambda: now_ns))
    monkeypatch.setattr(TrainingRole, "_report_step", report)
    model = Varuna(
        make_model(Task()), get_batch_fn=example_batch, batch_size=examples, chunk_size=MICRO_BATCH, device="cpu"
    )
    model.set_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    model.step(example_batch(examples))
    assert times == [(forward_us, backward_us)]
