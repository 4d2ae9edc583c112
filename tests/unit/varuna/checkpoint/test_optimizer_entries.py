"""What optimizers keep in `state` beside that of their parameters, and what they keep where no checkpoint finds it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from small_regression import BATCH, Regression
from training_roles import training_role
from varuna import Varuna
from varuna.checkpoint import (
    CheckpointError,
    CheckpointWriter,
    MismatchError,
    ShapePosition,
    TrainingState,
    load_checkpoint,
    read_manifest,
)
from varuna.holdings.inventory import make_inventory
from varuna.holdings.merging import merge_inventories
from waiting import DEADLINE_S


class Decaying(Optimizer):
    """As MADGRAD does, it counts its steps beside what it has of each parameter."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.state["k"] = torch.tensor([0])  # type: ignore[index]
        self.state["names", 1] = {"of all": [1.5, "text"]}  # type: ignore[index]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        count = self.state["k"]  # type: ignore[index]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                total = state["sum"] = state.get("sum", torch.zeros_like(parameter)) + parameter.grad
                parameter.sub_(total, alpha=group["lr"] / (count.item() + 1) ** 0.5)
        count.add_(1)


class Lookahead(Optimizer):
    """As in timm: it shows the groups of another optimizer, which has a state of its own."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, {})
        self.param_groups = inner.param_groups
        self.state = defaultdict(dict)

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        self.inner.step()


def begin(make: Callable[[Any], Optimizer] = Decaying) -> Varuna:
    model = Varuna(Regression(), get_batch_fn=BATCH)
    model.set_optimizer(make(model.parameters()))
    return model


def test_a_count_of_all_steps_goes_on(tmp_path: Path) -> None:
    whole, first, second = begin(), begin(), begin()
    for _ in range(6):
        whole.step(BATCH)
    for _ in range(3):
        first.step(BATCH)
    first.checkpoint(str(tmp_path))
    second.load_checkpoint(str(tmp_path), 3)
    for _ in range(3):
        second.step(BATCH)
    assert all(map(torch.equal, second.parameters(), whole.parameters()))


SECTIONS = 4


class Rank:
    """One stage of a model of four sections with one parameter each."""

    def __init__(self, stage: int, p: int, *, count: int = 0) -> None:
        self.position = ShapePosition(rank=stage, p=p, d=1)
        sections = range(stage * SECTIONS // p, (stage + 1) * SECTIONS // p)
        self.parameters = {f"weight{section}": nn.Parameter(torch.ones(2)) for section in sections}
        self.optimizer = Decaying(self.parameters.values())
        self.optimizer.state["k"].fill_(count)  # type: ignore[index]
        self.state = TrainingState(
            sections=sections,
            section_count=SECTIONS,
            parameters=self.parameters,
            section_of={f"weight{section}": section for section in range(SECTIONS)},
            optimizers=[self.optimizer],
            position=self.position,
        )

    @property
    def count(self) -> int:
        count: Tensor = self.optimizer.state["k"]  # type: ignore[index]
        return int(count)


def save(store: Path, ranks: list[Rank]) -> None:
    def write(rank: Rank) -> str:
        writer = CheckpointWriter(str(store), generation=1, position=rank.position)
        assert writer.start_save(1, rank.state)
        outcome = writer.wait(DEADLINE_S)
        assert outcome is not None
        return outcome.error

    with ThreadPoolExecutor(len(ranks)) as pool:
        assert list(pool.map(write, ranks)) == [""] * len(ranks)


@pytest.mark.parametrize("p", [1, 2, 4])
def test_equal_entries_come_back_in_every_shape(tmp_path: Path, p: int) -> None:
    save(tmp_path, [Rank(stage, 2, count=7) for stage in range(2)])
    assert not read_manifest(str(tmp_path), 1).rank_states
    for stage in range(p):
        rank = Rank(stage, p)
        rank.optimizer.state["of this process"] = 1  # type: ignore[index]
        loaded = load_checkpoint(str(tmp_path), 1, rank.state)
        assert not loaded.user, "the script has registered nothing"
        assert rank.count == 7
        assert rank.optimizer.state["names", 1] == {"of all": [1.5, "text"]}  # type: ignore[index]
        assert "of this process" not in rank.optimizer.state


def test_entries_that_differ_between_ranks_come_back_in_the_same_shape_and_are_refused_in_another(
    tmp_path: Path,
) -> None:
    save(tmp_path, [Rank(stage, 2, count=stage) for stage in range(2)])
    for stage in range(2):
        rank = Rank(stage, 2, count=9)
        load_checkpoint(str(tmp_path), 1, rank.state)
        assert rank.count == stage
    lone = Rank(0, 1, count=9)
    with pytest.raises(MismatchError, match=r"of a 2x1 shape .*Decaying.* keep it by parameter"):
        load_checkpoint(str(tmp_path), 1, lone.state)
    assert lone.count == 9


def test_a_checkpoint_without_entries_leaves_those_of_the_script_and_says_so(tmp_path: Path) -> None:
    """As one of an earlier version is."""
    ranks = [Rank(0, 1, count=3)]
    kept = {key: value for key, value in ranks[0].optimizer.state.items() if not isinstance(key, Tensor)}
    ranks[0].optimizer.state.clear()
    save(tmp_path, ranks)
    ranks[0].optimizer.state.update(kept)
    with structlog.testing.capture_logs() as log:
        load_checkpoint(str(tmp_path), 1, ranks[0].state)
    assert ranks[0].count == 3
    assert [line["entries"] for line in log if "stay as the script has made them" in line["event"]] == [
        ["k", "('names', 1)"]
    ]


def test_holders_give_entries_too() -> None:
    ranks = [Rank(stage, 2, count=7) for stage in range(2)]
    inventories = [make_inventory(rank.state, 1, generation=1, rank=rank.position.rank).inventory for rank in ranks]
    merged = merge_inventories(inventories)
    assert not merged.manifest.rank_states
    assert "varuna.optimizer.state" in merged.manifest.state["user"]


def test_an_optimizer_in_another_one_is_not_saved_without_its_state(tmp_path: Path) -> None:
    model = begin(lambda params: Lookahead(SGD(params, lr=0.1, momentum=0.9)))
    model.step(BATCH)
    with pytest.raises(CheckpointError, match=r"Lookahead keeps state in inner, .* let both have one `state`"):
        model.checkpoint(str(tmp_path))


def test_optimizers_that_share_a_state_are_saved_with_it(tmp_path: Path) -> None:
    def make(params: Any) -> Optimizer:
        optimizer = Lookahead(SGD(params, lr=0.1, momentum=0.9))
        optimizer.state = optimizer.inner.state
        return optimizer

    whole, first, second = begin(make), begin(make), begin(make)
    for model in (whole, first):
        model.step(BATCH)
    first.checkpoint(str(tmp_path))
    second.load_checkpoint(str(tmp_path), 1)
    for model in (whole, second):
        model.step(BATCH)
    assert all(map(torch.equal, second.parameters(), whole.parameters()))


class Flat(SGD):
    """Keeps its moments in one tensor, which it makes in its first step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        held = self.param_groups[0]["params"]
        self.flat = torch.cat([parameter.grad.flatten() for parameter in held])
        return super().step(closure)


def test_tensors_where_no_checkpoint_finds_them_are_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = begin(lambda params: Flat(params, lr=0.1))
    worker = training_role(model)._worker
    monkeypatch.setattr(worker, "environment", replace(worker.environment, checkpoint_url="/ckpt"))
    with structlog.testing.capture_logs() as log:
        for _ in range(2):
            model.step(BATCH)
    [line] = [line["event"] for line in log if "where no checkpoint finds them" in line["event"]]
    assert line.startswith("Flat keeps tensors in flat,")
