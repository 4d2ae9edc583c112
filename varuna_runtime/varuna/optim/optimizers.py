"""The script's optimizers: one or several, each with its own parameters.

A stage may hold no parameter for an optimizer: it has frozen layers only, or no matrix for Muon. PyTorch refuses an
optimizer without parameters, on this rank only and perhaps only after a morph. So a *placeholder* takes the place of
missing parameters: a trainable parameter of one zero, whose gradient is zero, in no model, checkpoint or norm.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import wraps
from typing import Any

import structlog
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

__all__ = [
    "Optimizers",
    "allow_empty_stages",
    "check_parameters",
    "find_foreign_state",
    "find_hidden_state",
    "find_learning_rate",
    "left_out",
    "list_optimizers",
    "list_tensor_attributes",
    "log_left_out",
    "renew_placeholders",
    "replace_parameters",
]

_log = structlog.get_logger("varuna")

Optimizers = Optimizer | Sequence[Optimizer]
"""The argument of `set_optimizer`."""

_NAMED = 3
"""The most parameters that a message names."""
_MARK = "_varuna_placeholder"
_PLAIN = "_varuna_plain_init"


def find_learning_rate(optimizers: Sequence[Optimizer]) -> float | None:
    """Of the first group of parameters of the first optimizer that has one.

    None: there is none, or it is a tensor on an accelerator, which a read would wait for.
    """
    for group in (group for optimizer in optimizers for group in optimizer.param_groups[:1]):
        rate = group.get("lr")
        if isinstance(rate, Tensor):
            return float(rate) if rate.device.type == "cpu" else None
        if rate is not None:
            return float(rate)
    return None


def list_optimizers(optimizers: Optimizers) -> tuple[Optimizer, ...]:
    """Raises ValueError for an empty list or a duplicate, and TypeError for an object that is no optimizer."""
    found = (optimizers,) if isinstance(optimizers, Optimizer) else tuple(optimizers)
    if not found:
        raise ValueError("set_optimizer([]): give at least one optimizer")
    for optimizer in found:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"set_optimizer got a {type(optimizer).__name__}: give a torch.optim.Optimizer, or a list of them"
            )
    if len(set(map(id, found))) < len(found):
        raise ValueError("set_optimizer got the same optimizer twice: list each once")
    return found


def check_parameters(optimizers: Sequence[Optimizer], parameters: Mapping[str, nn.Parameter]) -> None:
    """Raises ValueError when an optimizer holds a tensor not in `parameters`, or two hold the same one."""
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
                f"{type(optimizer).__name__}), so each step would update it twice: give it to one of them"
            )


def left_out(optimizers: Sequence[Optimizer], parameters: Mapping[str, nn.Parameter]) -> list[str]:
    """The names of trainable parameters that no optimizer holds: training never changes them."""
    held = {id(parameter) for _, parameter in _held(optimizers)}
    return [name for name, parameter in parameters.items() if parameter.requires_grad and id(parameter) not in held]


def log_left_out(optimizers: Sequence[Optimizer], parameters: Mapping[str, nn.Parameter]) -> None:
    """Logs one warning that names the parameters that no optimizer holds."""
    if names := left_out(optimizers, parameters):
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        _log.warning(
            f"no optimizer holds {', '.join(names[:_NAMED])}{more}, so training never changes them: give them to an "
            "optimizer (set_optimizer takes a list of several), or freeze them with requires_grad_(False) before you "
            "wrap the model"
        )


def _held(optimizers: Sequence[Optimizer]) -> Iterator[tuple[Optimizer, Tensor]]:
    """Every optimizer with every parameter in it, without placeholders."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if not hasattr(parameter, _MARK):
                    yield optimizer, parameter


def allow_empty_stages(device: torch.device) -> None:
    """From now on every new optimizer gets a placeholder on `device` in each group without a parameter.

    Every optimizer passes `torch.optim.Optimizer.__init__`, whatever filter the script has made its groups with. Groups
    with a parameter stay as they are.
    """
    plain = getattr(Optimizer.__init__, _PLAIN, Optimizer.__init__)

    @wraps(plain)
    def init(self: Optimizer, params: Any, defaults: dict[str, Any]) -> None:
        plain(self, params if isinstance(params, Tensor) else _with_placeholders(list(params), device), defaults)

    setattr(init, _PLAIN, plain)
    Optimizer.__init__ = init  # type: ignore[method-assign]


def _with_placeholders(params: list[Any], device: torch.device) -> list[Any]:
    """Adds placeholders to an optimizer's argument: parameters, pairs with names, or groups of either."""
    groups = [group for group in params if isinstance(group, dict)]
    if not params:
        return [_placeholder(device)]
    for group in groups:
        if "params" in group and not isinstance(group["params"], Tensor | set):
            group["params"] = list(group["params"])
    # torch requires names in all groups or in none.
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
    """A matrix, because Muon takes only matrices; of one element, because some optimizers divide by their number."""
    placeholder = nn.Parameter(torch.zeros(1, 1, device=device))
    setattr(placeholder, _MARK, True)
    return placeholder


def replace_parameters(
    optimizers: Sequence[Optimizer],
    members: Sequence[Sequence[Collection[str]]],
    before: Mapping[str, nn.Parameter],
    parameters: Mapping[str, nn.Parameter],
    device: torch.device,
) -> None:
    """Makes the optimizers step `parameters`, by name, in place of those that they had `before`.

    `members`: the names in each optimizer's groups. What an optimizer keeps for a name stays, that of names which leave
    goes with them, and new ones have nothing. What it keeps under other keys stays. `device`: of placeholders.
    """
    for optimizer, groups in zip(optimizers, members, strict=True):
        for number, (group, names) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
            here = {name: parameter for name, parameter in parameters.items() if name in names}
            if not here:
                placeholder = next((p for p in group["params"] if hasattr(p, _MARK)), None)
                here = {f"varuna.placeholder.{number}": _placeholder(device) if placeholder is None else placeholder}
            group["params"] = [*here.values()]
            if "param_names" in group:
                group["param_names"] = [*here]
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        state = {key: kept for key, kept in optimizer.state.items() if id(key) in held or not isinstance(key, Tensor)}
        for name, parameter in parameters.items():
            if name in before and before[name] in optimizer.state:
                state[parameter] = optimizer.state[before[name]]
        optimizer.state.clear()
        optimizer.state.update(state)


def find_foreign_state(optimizer: Optimizer) -> str:
    """What of its state the optimizer keeps elsewhere than in `state`, or there by tensors that are none of its
    parameters; empty: nothing.

    Numbers do not count: they are the same on all ranks.
    """
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if any(isinstance(key, Tensor) and id(key) not in held for key in optimizer.state):
        return "state of other things than its parameters"
    names = list_tensor_attributes(optimizer)
    return f"tensors in {names[0]}" if names else ""


def list_tensor_attributes(optimizer: Optimizer) -> list[str]:
    """The attributes in which an optimizer keeps tensors that are no numbers: flat buffers, or constants."""
    found = _list_attributes(optimizer)
    return list(dict.fromkeys(name for name, leaf in found if isinstance(leaf, Tensor) and leaf.numel() > 1))


def find_hidden_state(optimizer: Optimizer) -> str:
    """Why checkpoints would lack state of the optimizer: it has another optimizer inside, whose `state` is not its own.
    Empty: nothing is known against it."""
    for name, leaf in _list_attributes(optimizer):
        if isinstance(leaf, Optimizer) and leaf.state is not optimizer.state:
            return (
                f"{type(optimizer).__name__} keeps state in {name}, where no checkpoint finds it, so a restart would "
                "lose it: give set_optimizer what is in there, in a list if it is several, or let both have one `state`"
            )
    return ""


def _list_attributes(optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
    """The optimizer's attributes but its groups and state, and what is in them, by the attribute's name."""
    for name, value in vars(optimizer).items():
        if name not in ("param_groups", "state"):
            yield from ((name, leaf) for leaf in tree_leaves(value))


def renew_placeholders(optimizers: Sequence[Optimizer]) -> None:
    """Before a step: sets the gradient of every placeholder, because the script may have dropped it."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if hasattr(parameter, _MARK):
                    parameter.grad = torch.zeros_like(parameter)
