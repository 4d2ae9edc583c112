"""What a pass with marks asks of `RankShares`, and when."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from small_gpt import Task, example_batch, make_model
from training_roles import training_role
from varuna import Varuna
from varuna.pipeline.engine import Engine
from varuna.roles.share_pass import SharePass


def log_ops(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for op, method in [("F", "_run_forward"), ("B", "_run_backward")]:
        run = getattr(Engine, method)

        def run_and_log(*args: Any, op: str = op, run: Any = run) -> None:
            log.append(op)
            run(*args)

        monkeypatch.setattr(Engine, method, run_and_log)


def make_shares(log: list[str]) -> Any:
    return SimpleNamespace(
        begin_pass=lambda *_, **__: log.append("begin"),
        order_changes=lambda: log.append("order"),
        follow_backward=lambda done, _: log.append(f"done {done}"),
        end_pass=lambda: log.append("end"),
        find_obstacle=lambda: "",
    )


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Varuna:
    """Trains alone, three micro-batches in a step, as if other ranks kept copies."""
    monkeypatch.setattr(SharePass, "_may_keep", lambda _: True)
    model = Varuna(make_model(Task()), get_batch_fn=example_batch, batch_size=3, chunk_size=1, device="cpu")
    model.set_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    return model


def test_each_backward_comes_after_the_copies_of_a_mark(model: Varuna, monkeypatch: pytest.MonkeyPatch) -> None:
    log = list[str]()
    training_role(model)._parts.shares = make_shares(log)
    log_ops(log, monkeypatch)
    model.step(example_batch(3))
    assert log.count("F") == 3
    assert all(log[number + 1] == "B" for number, one in enumerate(log) if one == "order"), log
    others = [one for one in log if one != "F"]
    assert others == ["begin", "order", "B", "done 1", "order", "B", "done 2", "order", "B", "end"]


@pytest.mark.parametrize("call", ["begin_pass", "follow_backward"])
def test_a_pass_that_is_left_ends(call: str, model: Varuna) -> None:
    """A copy may be under way, and the sums may change after the pass."""
    log = list[str]()
    training_role(model)._parts.shares = shares = make_shares(log)
    setattr(shares, call, lambda *_, **__: pytest.fail("the pass is left"))
    with pytest.raises(pytest.fail.Exception, match="the pass is left"):
        model.step(example_batch(3))
    assert log[-1] == "end"
