"""The equality matrix: everything that may be combined in training, and few rows that combine it all.

A *configuration* is one value of each factor. The full product is for `make soak-matrix`; `covering_rows` gives less
than a hundredth of it, which still has every pair of a value with the shape and every triple of the other values.

Letters: P stages, D replicas, K blocks of the model (its sections).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from small_gpt import Task, Trained, train_plainly
from training_world import Outcome, Ranks, Zygote, list_results
from varuna_planner.schedule.policies import Policy

SHAPES = [(p, d) for p in range(1, 7) for d in range(1, 7) if p * d <= 6]
MICRO_BATCH = 2
SCRIPT = Path(__file__).with_name("training_matrix_script.py")

FACTORS: dict[str, Sequence[Any]] = {
    "shape": SHAPES,
    "policy": [policy.value for policy in Policy if policy.executable],
    "optimizer": ["adamw", "momentum", "lamb"],
    "precision": ["float32", "bfloat16"],
    "uneven": [False, True],
    "tied": ["none", "ends", "one stage", "two stages"],
    "skip": [False, True],
    "recompute": [False, True],
}

TOLERANCES: dict[str, dict[str, float]] = {
    # Sums in another order, which Adam's division by a small root can make larger.
    "float32": {"loss": 1e-5, "norm": 1e-4, "rtol": 1e-4, "atol": 2e-5},
    # Much wider than usual (1e-6): a value between two half-precision numbers may be rounded either way.
    "bfloat16": {"loss": 1e-4, "norm": 1e-3, "rtol": 1e-3, "atol": 1e-4},
    "float16": {"loss": 1e-4, "norm": 1e-3, "rtol": 1e-3, "atol": 1e-4},
}


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """One cell of the matrix."""

    shape: tuple[int, int]
    policy: str
    optimizer: str
    precision: str
    uneven: bool
    """D does not divide the batch (D > 1), and the last micro-batch is smaller."""
    tied: str
    """"ends": embedding and head; "one stage", "two stages": two blocks that are in one, or in two."""
    skip: bool
    recompute: bool
    """On all stages but the last; on the only one."""
    pair: int = 0
    """Which two stages, among all pairs of them."""

    def __str__(self) -> str:
        p, d = self.shape
        marks = [mark for mark in ("uneven", "skip", "recompute") if getattr(self, mark)]
        tied = f"tied-{self.tied.replace(' ', '-')}" + (f"-{self.pair}" if self.tied == "two stages" else "")
        return "-".join([f"{p}x{d}", self.policy, self.optimizer, self.precision, tied, *marks])

    @property
    def task(self) -> Task:
        p, d = self.shape
        return Task(
            # At least two micro-batches on each replica, and four in all.
            global_batch=MICRO_BATCH * max(4, 2 * d) + self.uneven,
            steps=3,
            blocks=p + 1,  # one in each stage, and two in the last
            tied=self.tied == "ends",
            tied_blocks=self._tied_blocks(),
            clip=0.5,
            # Adam's steps do not shrink with the gradient: where that is all but 0, rounding decides the step, and at
            # 1e-2 one weight that falls to another bf16 value would move others by 5e-4.
            learning_rate=1e-3 if self.optimizer == "adamw" else 1e-2,
            optimizer=self.optimizer,
            precision=self.precision,
            skip=self.skip,
        )

    def _tied_blocks(self) -> tuple[int, int] | None:
        p = self.shape[0]
        if self.tied == "one stage" or (self.tied == "two stages" and p == 1):
            return p - 1, p
        pairs = stage_pairs(p)
        return pairs[self.pair % len(pairs)] if self.tied == "two stages" else None

    @property
    def environ(self) -> dict[str, Any]:
        """The arguments of `Ranks` for this cell, as the launcher would choose them."""
        p, _ = self.shape
        recompute = (True,) if p == 1 else (True,) * (p - 1) + (False,)
        return {"policy": self.policy, "recompute": recompute if self.recompute else (), "micro_batch": MICRO_BATCH}


def stage_pairs(p: int) -> list[tuple[int, int]]:
    return list(combinations(range(p), 2))


def full_product() -> Iterator[Configuration]:
    """The full product, with tied weights over every two stages."""
    for values in product(*FACTORS.values()):
        row = dict(zip(FACTORS, values, strict=True))
        two = row["tied"] == "two stages"
        for pair in range(max(1, len(stage_pairs(row["shape"][0]))) if two else 1):
            yield Configuration(**row, pair=pair)


# ---------------------------------------------------------------- few rows that cover

Values = tuple[tuple[str, Any], ...]
"""Some factors with a value each, in the order of the factors."""


def wanted_meetings() -> list[tuple[str, ...]]:
    """The sets of factors whose values are all combined: the shape with each other factor, and the others by three."""
    others = [name for name in FACTORS if name != "shape"]
    return [("shape", name) for name in others] + list(combinations(others, 3))


def meetings(factors: Mapping[str, Sequence[Any]], wanted: Collection[tuple[str, ...]]) -> list[Values]:
    return [
        tuple(zip(names, values, strict=True))
        for names in wanted
        for values in product(*(factors[name] for name in names))
    ]


def covering_rows(factors: Mapping[str, Sequence[Any]], wanted: Collection[tuple[str, ...]]) -> list[dict[str, Any]]:
    """Rows in which all values of the factors in each of `wanted` meet; always the same ones.

    Greedy, as AETG (Cohen et al., 1997): each row begins with a combination that no row has yet, and gets the
    other values that add the most such combinations.
    """
    missing = dict.fromkeys(meetings(factors, wanted))  # a set that keeps its order
    used = {name: dict.fromkeys(range(len(values)), 0) for name, values in factors.items()}
    rows: list[dict[str, Any]] = []
    while missing:
        row = dict(next(iter(missing)))
        for name, values in factors.items():
            if name not in row:
                rows_with = [{**row, name: value} for value in values]
                gains = [sum(_meets(each, wants) for wants in missing) for each in rows_with]
                best = max(range(len(values)), key=lambda i, g=gains, n=name: (g[i], -used[n][i]))
                row[name] = values[best]
            used[name][list(values).index(row[name])] += 1
        missing = {each: None for each in missing if not _meets(row, each)}
        rows.append(row)
    return rows


def _meets(row: Mapping[str, Any], values: Values) -> bool:
    return all(name in row and row[name] == value for name, value in values)


# ---------------------------------------------------------------- running and comparing


def run(
    zygote: Zygote,
    folder: Path,
    configurations: Sequence[Configuration],
    device: Callable[[int], str] = lambda rank: "cpu",
) -> Iterator[Outcome]:
    """Trains all of them, which have one shape, one after the other in the same processes, ranks on their `device`."""
    p, d = configurations[0].shape
    rows = []
    for number, configuration in enumerate(configurations, start=1):
        assert configuration.shape == (p, d)
        # As generations of one job: so their groups never meet.
        world = Ranks(
            zygote, folder, configuration.task, p, d, generation=number, device=device, **configuration.environ
        )
        environ = [world.environment(rank).to_environ() for rank in range(p * d)]
        rows.append({"task": asdict(configuration.task), "environ": environ})
    with Ranks(
        zygote, folder, Task(), p, d, generation=0, script=SCRIPT, device=device, wanted={"rows": rows}
    ) as world:
        codes = world.exit_codes()
        assert codes == [0] * (p * d), f"exit codes {codes}\n{world.logs()}"
    for number in range(len(rows)):
        yield Outcome.read(list_results(world.out / str(number), p * d))


def plainly(configuration: Configuration, device: torch.device | None = None) -> Trained:
    """The same training by plain PyTorch.

    In bf16 by plain autocast over the same micro-batches: a product's gradient is rounded once per micro-batch, so
    with others the two would differ by that. For the same reason a weight of two stages is cast for each of its uses,
    as each stage does it, and a weight of one stage once.
    """
    task = configuration.task
    if task.precision == "float32":
        return train_plainly(task, device=device)
    over_stages = configuration.tied == "two stages" and configuration.shape[0] > 1
    return train_plainly(task, MICRO_BATCH, cast_once=not over_stages, device=device)


def assert_equal(outcome: Outcome, expected: Trained, precision: str) -> None:
    """Losses, norms, parameters and the optimizer's state, within `TOLERANCES`."""
    within = TOLERANCES[precision]
    assert outcome.losses == pytest.approx(expected.losses, rel=within["loss"])
    assert outcome.norms == pytest.approx(expected.norms, rel=within["norm"])
    assert outcome.parameters.keys() == expected.parameters.keys() == outcome.states.keys()
    for name, value in expected.parameters.items():
        _assert_close(outcome.parameters[name], value, name, within)
        assert outcome.states[name].keys() == expected.states[name].keys()
        for key, kept in expected.states[name].items():
            _assert_close(outcome.states[name][key], kept, f"{key} of {name}", within)


def _assert_close(ours: Tensor, theirs: Tensor, what: str, within: Mapping[str, float]) -> None:
    torch.testing.assert_close(
        ours, theirs, rtol=within["rtol"], atol=within["atol"], msg=lambda text: f"{what}: {text}"
    )
