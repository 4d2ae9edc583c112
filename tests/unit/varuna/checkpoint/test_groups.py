"""The options of parameter groups, and what LR schedulers keep for each, belong to parameters in every shape."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from varuna.checkpoint import (
    CheckpointError,
    CheckpointWriter,
    LoadedCheckpoint,
    ShapePosition,
    TrainingState,
    load_checkpoint,
    read_manifest,
)
from waiting import DEADLINE_S

NAMES = ("a", "b", "c", "d")
RATES = dict(zip(NAMES, (0.1, 0.2, 0.4, 0.8), strict=True))

MakeOptimizers = Callable[[Mapping[str, nn.Parameter]], list[Optimizer]]
MakeScheduler = Callable[[Optimizer], LRScheduler]


def by_layer(parameters: Mapping[str, nn.Parameter]) -> list[Optimizer]:
    return [SGD([{"params": [p], "lr": RATES[name]} for name, p in parameters.items()], momentum=0.9)]


class Rank:
    """One stage of a model of four sections with one parameter each."""

    def __init__(
        self, stage: int, p: int, make: MakeOptimizers = by_layer, make_scheduler: MakeScheduler | None = None
    ) -> None:
        self.sections = range(stage * 4 // p, (stage + 1) * 4 // p)
        self.parameters = {NAMES[section]: nn.Parameter(torch.ones(2, 2)) for section in self.sections}
        self.optimizers = make(self.parameters)
        self.schedulers = {} if make_scheduler is None else {"rate": make_scheduler(self.optimizers[0])}

    @property
    def state(self) -> TrainingState:
        return TrainingState(
            sections=self.sections,
            section_count=4,
            parameters=self.parameters,
            section_of={name: section for section, name in enumerate(NAMES)},
            optimizers=self.optimizers,
            schedulers=self.schedulers,
            user={name: scheduler.state_dict() for name, scheduler in self.schedulers.items()},
        )

    @property
    def rates(self) -> dict[str, float]:
        """By parameter."""
        names = self.state.names_by_id
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        return {names[id(p)]: float(group["lr"]) for group in groups for p in group["params"]}

    def train(self) -> None:
        for optimizer in self.optimizers:
            for parameter in self.parameters.values():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        for scheduler in self.schedulers.values():
            scheduler.step()

    def load(self, url: Path, step: int) -> LoadedCheckpoint:
        loaded = load_checkpoint(str(url), step, self.state)
        for name, scheduler in self.schedulers.items():
            scheduler.load_state_dict(loaded.scheduler_state(name, scheduler, loaded.user[name]))
        return loaded


def save(url: Path, step: int, ranks: list[Rank]) -> None:
    def write(rank: int) -> str:
        checkpointer = CheckpointWriter(str(url), generation=1, position=ShapePosition(rank=rank, p=len(ranks), d=1))
        assert checkpointer.start_save(step, ranks[rank].state)
        outcome = checkpointer.wait(DEADLINE_S)
        assert outcome is not None
        return outcome.error

    with ThreadPoolExecutor(len(ranks)) as pool:
        assert list(pool.map(write, range(len(ranks)))) == [""] * len(ranks)


def make_ranks(p: int, *what: Any) -> list[Rank]:
    return [Rank(stage, p, *what) for stage in range(p)]


@pytest.mark.parametrize(("p", "p2"), [(2, 1), (1, 4), (4, 2), (2, 2)])
def test_each_parameter_has_its_own_options_again(tmp_path: Path, p: int, p2: int) -> None:
    ranks = make_ranks(p)
    for rank in ranks:
        for group in rank.optimizers[0].param_groups:
            group["lr"] *= 0.5
    save(tmp_path, 1, ranks)
    for rank in make_ranks(p2):
        rank.load(tmp_path, 1)
        assert rank.rates == {name: RATES[name] / 2 for name in rank.parameters}


def test_rates_that_are_tensors_come_back_into_their_own_memory(tmp_path: Path) -> None:
    def make(parameters: Mapping[str, nn.Parameter]) -> list[Optimizer]:
        groups = [{"params": [p], "lr": torch.tensor(RATES[name])} for name, p in parameters.items()]
        return [AdamW(groups, capturable=False, foreach=False)]

    ranks = make_ranks(2, make)
    for rank in ranks:
        for group in rank.optimizers[0].param_groups:
            group["lr"].mul_(0.5)
    save(tmp_path, 1, ranks)
    [fresh] = make_ranks(1, make)
    before = [group["lr"] for group in fresh.optimizers[0].param_groups]
    fresh.load(tmp_path, 1)
    assert fresh.rates == pytest.approx({name: rate / 2 for name, rate in RATES.items()})
    assert all(group["lr"] is kept for group, kept in zip(fresh.optimizers[0].param_groups, before, strict=True))


SCHEDULERS: dict[str, MakeScheduler] = {
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
    "lambda each": lambda optimizer: lr_scheduler.LambdaLR(
        optimizer, [lambda step: 0.9**step for _ in optimizer.param_groups]
    ),
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, 0.5),
    "milestones": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 4], 0.5),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 9),
    "restarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(
        optimizer, [4 * group["lr"] for group in optimizer.param_groups], 12
    ),
    "cyclic": lambda optimizer: lr_scheduler.CyclicLR(
        optimizer,
        [group["lr"] for group in optimizer.param_groups],
        [3 * group["lr"] for group in optimizer.param_groups],
        step_size_up=3,
    ),
    "sequential": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 2), lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)],
        [2],
    ),
    "chained": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer, 0.5, 3), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    ),
}


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_schedulers_go_on_in_any_shape(tmp_path: Path, kind: str) -> None:
    [expected] = make_ranks(1, by_layer, SCHEDULERS[kind])
    ranks = make_ranks(2, by_layer, SCHEDULERS[kind])
    for step, p in enumerate((1, 4, 2, 1), start=1):
        for rank in [expected, *ranks]:
            rank.train()
        save(tmp_path, step, ranks)
        ranks = make_ranks(p, by_layer, SCHEDULERS[kind])
        for rank in ranks:
            rank.load(tmp_path, step)
            assert rank.rates == pytest.approx({name: expected.rates[name] for name in rank.parameters})
    expected_lists = expected.schedulers["rate"].state_dict()
    assert ranks[0].schedulers["rate"].state_dict().keys() == expected_lists.keys()
    for key in ("base_lrs", "_last_lr", "max_lrs", "min_lrs", "_milestones"):
        if key in expected_lists:
            assert ranks[0].schedulers["rate"].state_dict()[key] == pytest.approx(expected_lists[key]), key


def test_a_list_of_ones_own_with_an_entry_for_each_group_follows_the_parameters(tmp_path: Path) -> None:
    class Counting(LRScheduler):
        def __init__(self, optimizer: Optimizer) -> None:
            self.counts = [0.0 for _ in optimizer.param_groups]
            self.phases = [1, 2]  # for all groups
            super().__init__(optimizer)

        def get_lr(self) -> list[float | torch.Tensor]:
            self.counts = [
                count + base for count, base in zip(self.counts, getattr(self, "base_lrs", self.counts), strict=True)
            ]
            return list(self.counts)

    ranks = make_ranks(2, by_layer, Counting)
    [expected] = make_ranks(1, by_layer, Counting)
    for rank in [expected, *ranks]:
        rank.train()
    save(tmp_path, 1, ranks)
    [fresh] = make_ranks(1, by_layer, Counting)
    fresh.load(tmp_path, 1)
    assert fresh.schedulers["rate"].state_dict() == expected.schedulers["rate"].state_dict()


def decayed_or_not(*decayed: str) -> MakeOptimizers:
    """Two groups on every rank; one of them may be empty."""

    def make(parameters: Mapping[str, nn.Parameter]) -> list[Optimizer]:
        groups: list[dict[str, Any]] = [
            {"params": [p for name, p in parameters.items() if name in decayed], "weight_decay": 0.1},
            {"params": [p for name, p in parameters.items() if name not in decayed], "weight_decay": 0.0},
        ]
        return [AdamW(groups, lr=0.5)]

    return make


def test_an_empty_group_has_the_options_that_its_place_has_elsewhere(tmp_path: Path) -> None:
    make = decayed_or_not("a", "b")
    ranks = make_ranks(2, make, SCHEDULERS["lambda"])  # each rank has one empty group
    for rank in ranks:
        rank.train()
    save(tmp_path, 1, ranks)
    assert [group.parameters for group in read_manifest(str(tmp_path), 1).groups] == [("a", "b"), ("c", "d")]
    for rank in make_ranks(4, make, SCHEDULERS["lambda"]):
        rank.load(tmp_path, 1)
        assert [group["lr"] for group in rank.optimizers[0].param_groups] == pytest.approx([0.45, 0.45])
        assert rank.schedulers["rate"].get_last_lr() == pytest.approx([0.45, 0.45])


def test_a_group_whose_parameters_were_not_saved_stays_as_the_script_made_it(tmp_path: Path) -> None:
    def grouped(*groups: tuple[str, float]) -> MakeOptimizers:
        return lambda parameters: [SGD([{"params": [parameters[name]], "lr": lr} for name, lr in groups])]

    save(tmp_path, 1, make_ranks(1, grouped(("a", 0.3))))
    [fresh] = make_ranks(1, grouped(("b", 0.7), ("a", 0.7)))
    fresh.load(tmp_path, 1)
    assert fresh.rates == {"b": 0.7, "a": 0.3}


def test_parameters_of_one_group_that_had_different_options_are_named(tmp_path: Path) -> None:
    save(tmp_path, 1, make_ranks(2))
    [fresh] = make_ranks(1, lambda parameters: [SGD(parameters.values(), lr=0.1, momentum=0.9)])
    with pytest.raises(CheckpointError, match=r"a and b are in one parameter group .* another lr \(0\.1 and 0\.2\)"):
        fresh.load(tmp_path, 1)
    assert fresh.rates == dict.fromkeys(NAMES, 0.1)


def pair(first: type[Optimizer], second: type[Optimizer]) -> MakeOptimizers:
    def make(parameters: Mapping[str, nn.Parameter]) -> list[Optimizer]:
        found = [
            (kind, [p for name, p in parameters.items() if name in names])
            for kind, names in ((first, ("a", "b", "c")), (second, ("d",)))
        ]
        return [kind(held, lr=0.1) for kind, held in found if held]  # type: ignore[call-arg]

    return make


def test_several_optimizers_need_not_be_on_every_rank(tmp_path: Path) -> None:
    ranks = make_ranks(2, pair(SGD, AdamW))
    assert [len(rank.optimizers) for rank in ranks] == [1, 2]
    for rank in ranks:
        rank.train()
        rank.optimizers[-1].param_groups[0]["lr"] = 0.3
    save(tmp_path, 1, ranks)
    assert read_manifest(str(tmp_path), 1).optimizer == "torch.optim.adamw.AdamW and torch.optim.sgd.SGD"
    for rank in make_ranks(4, pair(SGD, AdamW)):
        rank.load(tmp_path, 1)
        assert rank.rates == {name: 0.3 if name in "abd" else 0.1 for name in rank.parameters}
        state = rank.optimizers[0].state.get(next(iter(rank.parameters.values())), {})
        assert ("exp_avg" in state) == ("d" in rank.parameters)


def test_a_parameter_whose_group_is_added_after_the_load_has_its_state_in_the_optimizer_that_had_it(
    tmp_path: Path,
) -> None:
    [whole] = make_ranks(1, pair(SGD, AdamW))
    whole.train()
    save(tmp_path, 1, [whole])
    [fresh] = make_ranks(1, pair(SGD, AdamW))
    added, [sgd, adam] = fresh.parameters["d"], fresh.optimizers
    adam.param_groups[0]["params"] = [nn.Parameter(torch.ones(1))]
    fresh.load(tmp_path, 1)
    assert added not in sgd.state
    assert torch.equal(adam.state[added]["exp_avg"], whole.optimizers[1].state[whole.parameters["d"]]["exp_avg"])


def test_a_parameter_that_went_to_another_optimizer_is_named(tmp_path: Path) -> None:
    save(tmp_path, 1, make_ranks(1, pair(SGD, AdamW)))
    [fresh] = make_ranks(1, pair(AdamW, SGD))
    with pytest.raises(CheckpointError, match=r"SGD for a, and the optimizer is torch\.optim\.adamw\.AdamW"):
        fresh.load(tmp_path, 1)


def rewrite_as_earlier_version(url: Path, saved: list[dict[str, Any]], optimizer: Optimizer) -> None:
    """A checkpoint of an earlier version, which kept only the options of rank 0."""
    manifest = url / "varuna_ckpt_1" / "manifest.json"
    document = json.loads(manifest.read_bytes())
    for field in ("checksum", "groups"):
        del document[field]
    kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    document |= {"schema": "varuna.checkpoint/2", "optimizer": kind}
    document["state"]["optimizer_groups"] = saved
    manifest.write_text(json.dumps(document, indent=1))


def test_a_checkpoint_of_an_earlier_version_gives_groups_their_options_by_place(tmp_path: Path) -> None:
    ranks = make_ranks(2, by_layer, SCHEDULERS["lambda"])
    save(tmp_path, 1, ranks)
    rewrite_as_earlier_version(tmp_path, [{"lr": 0.3}, {"lr": 0.6}], ranks[0].optimizers[0])
    with structlog.testing.capture_logs() as log:
        for rank in make_ranks(2, by_layer, SCHEDULERS["lambda"]):
            rank.load(tmp_path, 1)
            assert list(rank.rates.values()) == [0.3, 0.6]
            assert rank.schedulers["rate"].base_lrs == [0.1, 0.2]
    assert sum("rank 0's parameter groups only" in line["event"] for line in log) == 2
    for make, message in ((by_layer, "holds 2 parameter groups"), (decayed_or_not("a"), "the optimizer is .*AdamW")):
        with pytest.raises(CheckpointError, match=message):
            make_ranks(1, make)[0].load(tmp_path, 1)
