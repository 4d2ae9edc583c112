"""Options of parameter groups that differ between the replicas of a stage are found and named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from varuna.roles.replica_options import describe_options, explain_different_options


def make(*rates: Any, **options: Any) -> str:
    groups = [{"params": [nn.Parameter(torch.ones(2))], "lr": rate} for rate in rates]
    optimizers: list[Optimizer] = [AdamW(groups, **options), SGD([nn.Parameter(torch.ones(1))], lr=1.0)]
    return describe_options(optimizers)


def test_replicas_with_equal_options_and_stages_with_others_are_alike() -> None:
    assert explain_different_options([make(0.1, 0.2), make(0.3)] * 2, p=2) == ""
    assert explain_different_options([make(torch.tensor(0.5)), make(torch.tensor(0.5))], p=1) == ""
    assert explain_different_options([make(float("nan"))] * 2, p=1) == ""


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (make(0.1, 0.3), r"lr of parameter group 1 is 0.2 on rank 1 and 0.3 on rank 3: "),
        (make(0.1, 0.2, weight_decay=0.5), "weight_decay of parameter group 0 is 0.01 on rank 1 and 0.5 on rank 3: "),
        (make(0.1, 0.2, betas=(0.5, 0.9)), "betas of parameter group 0 is (0.9, 0.999) on rank 1 and (0.5, 0.9) on"),
        (make(0.1), "ranks 1 and 3 have different numbers of parameter groups"),
    ],
)
def test_an_option_that_differs_is_named_with_both_values(other: str, reason: str) -> None:
    own = make(0.1, 0.2)
    assert explain_different_options([own, own, own, other], p=2).startswith(reason)


def test_what_is_no_value_is_not_compared() -> None:
    described = [make(0.1), make(0.1)]
    optimizer = SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    optimizer.param_groups[0]["hook"] = print
    assert "hook" not in describe_options([optimizer])
    assert "params" not in described[0]
