"""The options of parameter groups, saved by the names of the parameters.

A rank has groups of its own stage's parameters, so a group's index means nothing in another shape. A group owns what
its optimizer keeps for it (learning rate, weight decay) and what LR schedulers keep for it: its entry in each list that
has one entry per group, such as `base_lrs`.

A group without parameters takes the options of the saved groups at its position if they are all equal. Otherwise it
stays as the script made it; so does a group without saved parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import structlog
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from varuna.checkpoint.errors import MismatchError
from varuna.checkpoint.format.encoding import decode_state, encode_state
from varuna.checkpoint.format.manifest import Manifest, SavedGroup

__all__ = ["OptionsByName", "encode_groups", "optimizer_name", "options_by_place", "set_options"]

_log = structlog.get_logger(__name__)

_NOT_OPTIONS = frozenset({"params", "param_names"})
"""Keys of a parameter group that are not options."""

_FOR_EACH_GROUP = frozenset(
    {"base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums"}
)
"""Lists of torch's schedulers with one entry per group."""
_FOR_ALL_GROUPS = frozenset({"_milestones", "milestones", "_schedulers"})
"""Lists of torch's schedulers that apply to all groups, whatever their length."""


def optimizer_name(optimizer: Optimizer) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def set_options(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    """Gives a live group loaded options; a tensor keeps its place in memory."""
    for key, value in options.items():
        if isinstance(group.get(key), Tensor) and isinstance(value, Tensor):
            group[key].copy_(value)
        else:
            group[key] = value.clone() if isinstance(value, Tensor) else value


def encode_groups(
    optimizers: Sequence[Optimizer], names: Mapping[int, str], schedulers: Mapping[str, LRScheduler], where: str
) -> tuple[tuple[SavedGroup, ...], dict[str, Tensor]]:
    """All groups of this rank, and the tensors among their options, whose names begin with `where`.

    `names`: the parameters' names by id. Raises CheckpointError for options that a checkpoint cannot hold.
    """
    groups: list[SavedGroup] = []
    tensors: dict[str, Tensor] = {}
    for first, optimizer in enumerate(optimizers):
        entries = {
            name: dict(_find_lists(scheduler.state_dict(), len(optimizer.param_groups)))
            for name, scheduler in schedulers.items()
            if scheduler.optimizer is optimizer
        }
        for second, group in enumerate(optimizer.param_groups):
            kept = {
                "options": {key: value for key, value in group.items() if key not in _NOT_OPTIONS},
                "schedulers": {
                    name: {path: found[second] for path, found in lists.items()} for name, lists in entries.items()
                },
            }
            encoded, found = encode_state(kept, f"{where}/{first}/{second}")
            tensors |= found
            groups.append(
                SavedGroup(
                    optimizer=optimizer_name(optimizer),
                    position=(first, second),
                    parameters=_names(group, names),
                    **encoded,
                )
            )
    return tuple(groups), tensors


def _names(group: Mapping[str, Any], names: Mapping[int, str]) -> tuple[str, ...]:
    return tuple(names[id(parameter)] for parameter in group["params"] if id(parameter) in names)


def _find_lists(state: Mapping[str, Any], count: int, path: str = "") -> Iterator[tuple[str, list[Any]]]:
    """Lists of `count` entries in a scheduler's state, by path: each may have one entry per group."""
    for key, value in state.items():
        if key == "_schedulers" and isinstance(value, list):  # of a SequentialLR or ChainedScheduler
            for number, inner in enumerate(value):
                if isinstance(inner, Mapping):
                    yield from _find_lists(inner, count, f"{path}{key}/{number}/")
        elif isinstance(value, list) and len(value) == count and key not in _FOR_ALL_GROUPS:
            yield f"{path}{key}", value


@dataclass(frozen=True)
class _LoadedGroup:
    """The options of a saved group."""

    saved: SavedGroup
    options: Mapping[str, Any]
    schedulers: Mapping[str, Mapping[str, Any]]


class OptionsByName:
    """A checkpoint's parameter groups, for the groups of any shape.

    Errors name `where`; `names`: the names of this rank's parameters by id. Raises CheckpointError if malformed.
    """

    def __init__(
        self, groups: Sequence[SavedGroup], tensors: Mapping[str, Tensor], names: Mapping[int, str], where: str
    ) -> None:
        self._where = where
        self._names = names
        self._kept = [
            _LoadedGroup(group, decode_state(group.options, tensors), decode_state(group.schedulers, tensors))
            for group in groups
        ]
        self._of = {name: kept for kept in self._kept for name in kept.saved.parameters}

    def find_optimizer(self, name: str, optimizers: Sequence[Optimizer]) -> Optimizer | None:
        """The one at the place and of the class of the optimizer that had the parameter in a group; None: none is."""
        if name not in self._of:
            return None
        saved = self._of[name].saved
        place = saved.position[0]
        is_there = place < len(optimizers) and optimizer_name(optimizers[place]) == saved.optimizer
        return optimizers[place] if is_there else None

    def list_lost(self, names: Iterable[str]) -> list[str]:
        """Of parameters that no optimizer holds now: those that were in a group."""
        return [name for name in names if name in self._of]

    def list_options(self, optimizers: Sequence[Optimizer]) -> list[list[Mapping[str, Any]]]:
        """The options for each optimizer and group, empty for a group that stays as the script made it.

        Raises MismatchError when parameters of one group were saved with different options, or a parameter with
        another optimizer.
        """
        return [
            [{} if kept is None else kept.options for kept in self._kept_for(optimizer, first)]
            for first, optimizer in enumerate(optimizers)
        ]

    def find_members(self, optimizers: Sequence[Optimizer]) -> list[list[frozenset[str]]]:
        """For each optimizer and group: the names of the parameters that the group at its place had on any rank.

        Raises MismatchError where the ranks had other groups than these, or other options in the groups at one place.
        """
        places = {
            (first, second): optimizer_name(optimizer)
            for first, optimizer in enumerate(optimizers)
            for second in range(len(optimizer.param_groups))
        }
        members: dict[tuple[int, int], set[str]] = {place: set() for place in places}
        first_at: dict[tuple[int, int], _LoadedGroup] = {}
        for kept in self._kept:
            place = kept.saved.position
            if places.get(place) != kept.saved.optimizer:
                raise MismatchError(f"only some ranks have parameter group {place[1]} of optimizer {place[0]}")
            found = first_at.setdefault(place, kept)
            if (difference := _describe_difference(found, kept)) is not None:
                raise MismatchError(f"parameter group {place[1]} is another on each rank: it differs in {difference}")
            members[place] |= set(kept.saved.parameters)
        return [
            [frozenset(members[first, second]) for second in range(len(optimizer.param_groups))]
            for first, optimizer in enumerate(optimizers)
        ]

    def scheduler_state(
        self, name: str, scheduler: LRScheduler, state: Mapping[str, Any], optimizers: Sequence[Optimizer]
    ) -> dict[str, Any]:
        """`state`, saved under `name` on any rank, with the lists that this rank's scheduler needs.

        Raises MismatchError as `list_options` does.
        """
        fitted = copy.deepcopy(dict(state))
        first = next((n for n, optimizer in enumerate(optimizers) if optimizer is scheduler.optimizer), None)
        if first is None or not self._kept:
            return fitted
        kept_for = self._kept_for(scheduler.optimizer, first)
        for path, live in _find_lists(scheduler.state_dict(), len(kept_for)):
            holder, key = _find_parent(fitted, path)
            # An unknown list that equals what the script has made here may be one for all groups.
            if key not in holder or (key not in _FOR_EACH_GROUP and holder[key] == live):
                continue
            holder[key] = [
                own if kept is None else copy.deepcopy(kept.schedulers.get(name, {}).get(path, own))
                for own, kept in zip(live, kept_for, strict=True)
            ]
        return fitted

    def _kept_for(self, optimizer: Optimizer, first: int) -> list[_LoadedGroup | None]:
        own = optimizer_name(optimizer)
        return [
            self._find_saved_group(own, _names(group, self._names), (first, second))
            for second, group in enumerate(optimizer.param_groups)
        ]

    def _find_saved_group(self, optimizer: str, names: Sequence[str], position: tuple[int, int]) -> _LoadedGroup | None:
        """The saved group of these parameters."""
        if not names:
            alike = [k for k in self._kept if k.saved.position == position and k.saved.optimizer == optimizer]
            return alike[0] if alike and all(_describe_difference(alike[0], other) is None for other in alike) else None
        saved = [name for name in names if name in self._of]
        if not saved:
            return None
        found = self._of[saved[0]]
        for name in saved:
            other = self._of[name]
            if other.saved.optimizer != optimizer:
                raise MismatchError(
                    f"{self._where} holds the state of {other.saved.optimizer} for {name}, and the optimizer is "
                    f"{optimizer}"
                )
            if other is not found and (difference := _describe_difference(found, other)) is not None:
                raise MismatchError(
                    f"{self._where}: {saved[0]} and {name} are in one parameter group now, and were saved with "
                    f"another {difference}: put them into groups of their own, as when they were saved"
                )
        return found


def options_by_place(
    manifest: Manifest, saved: list[dict[str, Any]], optimizers: Sequence[Optimizer], where: str
) -> list[dict[str, Any]]:
    """The options of the one optimizer's groups from `saved`: rank 0's groups, which is all an earlier version saved.

    Raises MismatchError when the optimizer is another, or has another number of groups.
    """
    names = " and ".join(sorted({optimizer_name(optimizer) for optimizer in optimizers}))
    if manifest.optimizer != names or len(optimizers) > 1:
        raise MismatchError(f"{where} holds the state of {manifest.optimizer}, and the optimizer is {names}")
    count = len(optimizers[0].param_groups)
    if len(saved) != count:
        raise MismatchError(
            f"{where} holds {len(saved)} parameter groups, by their places, for an earlier version wrote it, and the "
            f"optimizer has {count}: load it with as many groups on every rank (empty ones too)"
        )
    if manifest.p > 1 and count > 1:
        _log.warning(
            "this checkpoint has the options of rank 0's parameter groups only: an earlier version wrote it",
            step=manifest.step,
        )
    return saved


def _find_parent(state: dict[str, Any], path: str) -> tuple[dict[str, Any], str]:
    """The mapping that holds the last key of `path`, and that key; an empty mapping if the path does not exist."""
    *way, key = path.split("/")
    holder: Any = state
    for part in way:
        if isinstance(holder, list):
            holder = holder[int(part)] if int(part) < len(holder) else {}
        else:
            holder = holder.get(part, {})
    return (holder if isinstance(holder, dict) else {}), key


def _describe_difference(one: _LoadedGroup, other: _LoadedGroup) -> str | None:
    """The first option in which two groups differ, with both values; None: they are equal."""
    for key in dict.fromkeys([*one.options, *other.options]):
        a, b = one.options.get(key), other.options.get(key)
        if not _same(a, b):
            return f"{key} ({a} and {b})"
    for name in dict.fromkeys([*one.schedulers, *other.schedulers]):
        mine, theirs = one.schedulers.get(name, {}), other.schedulers.get(name, {})
        for path in mine.keys() & theirs.keys():
            if not _same(mine[path], theirs[path]):
                return f"{path} of the scheduler {name} ({mine[path]} and {theirs[path]})"
    return None


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        both = isinstance(one, Tensor) and isinstance(other, Tensor)
        return both and one.shape == other.shape and bool((one == other).all())
    return bool(one == other) or (one != one and other != other)
