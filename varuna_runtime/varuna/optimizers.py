"""The script's optimizers: one or several, each with parameters of its own.

A stage may hold none of what the script gives to an optimizer: frozen layers only, or no matrix for Muon. PyTorch
refuses an optimizer without parameters, on this rank only, perhaps not before a morph. So there an optimizer gets a
*placeholder* where it has nothing: a trainable parameter of one zero, whose gradient is zero, and which belongs to no
model, checkpoint or norm.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import wraps
from typing import Any

import structlog
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = [
    "Optimizers",
    "allow_empty_stages",
    "check_parameters",
    "left_out",
    "listed",
    "renew_placeholders",
    "report_left_out",
]

_log = structlog.get_logger("varuna")

Optimizers = Optimizer | Sequence[Optimizer]
"""What `set_optimizer` takes."""

_NAMED = 3
"""Parameters that a message names."""
_MARK = "_varuna_placeholder"
_PLAIN = "_varuna_plain_init"


def listed(optimizers: Optimizers) -> tuple[Optimizer, ...]:
    """Raises ValueError for an empty list, TypeError for what is no optimizer, and ValueError for one listed twice."""
    found = (optimizers,) if isinstance(optimizers, Optimizer) else tuple(optimizers)
    if not found:
        raise ValueError("set_optimizer([]): give one optimizer at least")
    for optimizer in found:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"set_optimizer got a {type(optimizer).__name__}: give a torch.optim.Optimizer, or a list of them"
            )
    if len(set(map(id, found))) < len(found):
        raise ValueError("set_optimizer got the same optimizer twice: list each once")
    return found


def check_parameters(optimizers: Sequence[Optimizer], parameters: Mapping[str, nn.Parameter]) -> None:
    """Raises ValueError when an optimizer holds what is none of `parameters`, or two optimizers hold the same one."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    holder: dict[int, Optimizer] = {}
    for optimizer, parameter in _held(optimizers):
        if id(parameter) not in names:
            raise ValueError(
                f"the optimizer holds a parameter of shape {list(parameter.shape)} that is not of this stage: "
                "make the optimizer after wrapping the model, from the Varuna object's parameters()"
            )
        first = holder.setdefault(id(parameter), optimizer)
        if first is not optimizer:
            raise ValueError(
                f"parameter {names[id(parameter)]} is in two optimizers ({type(first).__name__} and "
                f"{type(optimizer).__name__}), so each step would move it twice: give it to one of them"
            )


def left_out(optimizers: Sequence[Optimizer], parameters: Mapping[str, nn.Parameter]) -> list[str]:
    """The names of trainable parameters that no optimizer holds: training never changes them."""
    held = {id(parameter) for _, parameter in _held(optimizers)}
    return [name for name, parameter in parameters.items() if parameter.requires_grad and id(parameter) not in held]


def report_left_out(optimizers: Sequence[Optimizer], parameters: Mapping[str, nn.Parameter]) -> None:
    """One warning for all that is left out."""
    if names := left_out(optimizers, parameters):
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        _log.warning(
            f"no optimizer holds {', '.join(names[:_NAMED])}{more}, so training never changes them: give them to an "
            "optimizer (set_optimizer takes a list of several), or freeze them with requires_grad_(False) before the "
            "model is wrapped"
        )


def _held(optimizers: Sequence[Optimizer]) -> Iterator[tuple[Optimizer, Tensor]]:
    """Every optimizer with every parameter in it, without placeholders."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if not hasattr(parameter, _MARK):
                    yield optimizer, parameter


def allow_empty_stages(device: torch.device) -> None:
    """From now on every optimizer that is made gets a placeholder on `device` in each group that holds no parameter.

    `torch.optim.Optimizer.__init__` is the one place that all optimizers pass, whatever filter the script has made
    their groups with. Groups that hold a parameter stay as they are.
    """
    plain = getattr(Optimizer.__init__, _PLAIN, Optimizer.__init__)

    @wraps(plain)
    def init(self: Optimizer, params: Any, defaults: dict[str, Any]) -> None:
        plain(self, params if isinstance(params, Tensor) else _with_placeholders(list(params), device), defaults)

    setattr(init, _PLAIN, plain)
    Optimizer.__init__ = init  # type: ignore[method-assign]


def _with_placeholders(params: list[Any], device: torch.device) -> list[Any]:
    """What an optimizer is made from: parameters, pairs with their names, or groups of either."""
    groups = [group for group in params if isinstance(group, dict)]
    if not params:
        return [_placeholder(device)]
    for group in groups:
        if "params" in group and not isinstance(group["params"], Tensor | set):
            group["params"] = list(group["params"])
    # torch wants names in all groups or in none.
    named = any(isinstance(member, tuple) for group in groups for member in _members(group))
    for number, group in enumerate(groups):
        if "params" in group and len(_members(group)) == 0:
            placeholder = _placeholder(device)
            group["params"] = [(f"varuna.placeholder.{number}", placeholder)] if named else [placeholder]
    return params


def _members(group: Mapping[str, Any]) -> Sequence[Any]:
    members = group.get("params", ())
    return (members,) if isinstance(members, Tensor) else tuple(members)


def _placeholder(device: torch.device) -> nn.Parameter:
    """A matrix, for that is what Muon takes; and of one element, for not every optimizer can divide by none."""
    placeholder = nn.Parameter(torch.zeros(1, 1, device=device))
    setattr(placeholder, _MARK, True)
    return placeholder


def renew_placeholders(optimizers: Sequence[Optimizer]) -> None:
    """Before a step: gives every placeholder its gradient, which the script may have dropped."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if hasattr(parameter, _MARK):
                    parameter.grad = torch.zeros_like(parameter)
