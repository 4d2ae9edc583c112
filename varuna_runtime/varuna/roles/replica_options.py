"""Whether the replicas of a stage go on with equal options of their optimizers' parameter groups.

A new process takes the options from the others, for its first step. What its script then makes of them may be something
else than in theirs: it steps an LR scheduler that is not registered, or counts in a variable. The replicas would drift
apart, and no sum would show it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

__all__ = ["describe_options", "explain_different_options"]


def describe_options(optimizers: Sequence[Optimizer]) -> str:
    """The options of each parameter group as text, without those that are no values."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return json.dumps([{key: _as_text(value) for key, value in group.items() if _is_value(value)} for group in groups])


def explain_different_options(described: Sequence[str], p: int) -> str:
    """Which option differs between two replicas of a stage, with both values; empty: none does.

    `described`: by rank, what `describe_options` returns there. `p`: stages.
    """
    by_rank: list[list[Mapping[str, str]]] = [json.loads(text) for text in described]
    for rank, groups in enumerate(by_rank):
        first = by_rank[rank % p]
        if len(groups) != len(first):
            return f"ranks {rank % p} and {rank} have different numbers of parameter groups"
        for number, (one, other) in enumerate(zip(first, groups, strict=True)):
            for key in one.keys() & other.keys():
                if one[key] != other[key]:
                    return (
                        f"{key} of parameter group {number} is {one[key]} on rank {rank % p} and {other[key]} on rank "
                        f"{rank}: what the script sets it by has to follow from the step, or be registered with "
                        "register_state()"
                    )
    return ""


def _is_value(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(isinstance(item, bool | int | float | str) for item in value)
    is_number = isinstance(value, Tensor) and value.numel() == 1
    return is_number or value is None or isinstance(value, bool | int | float | str)


def _as_text(value: Any) -> str:
    return repr(value.item() if isinstance(value, Tensor) else value)
