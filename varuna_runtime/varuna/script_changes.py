"""What the script changes of the model between steps: modes of modules, and which parameters train.

A script may change them through the Varuna object or through its own model, and a rank may see a change that others do
not, since it holds other parameters. What crosses between stages depends on the changes of all of them. So a rank that
sees one runs the pass as it was agreed before, adds a flag to the agreement that each step ends with, and when any rank
has, all exchange what they have seen, trace the model again and run the pass once more. A step without a change so
costs no message. A change of any rank is a change of all, and either handle shows it afterwards.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import structlog
import torch
from torch import nn
from torch.optim import Optimizer

from varuna.launch import Group
from varuna.partition import PartitionError
from varuna.partition.model_map import ModelMap
from varuna.partition.modes import modes_of
from varuna.partition.retrace import ModelState, Retracer

__all__ = ["ScriptChanges"]

_log = structlog.get_logger("varuna")

_NAMED = 3
"""So many of the changed things are named in messages."""


class ScriptChanges:
    """Compares what the script may change with what all ranks last agreed on."""

    def __init__(
        self,
        model: nn.Module,
        module: nn.Module,
        own: Mapping[str, nn.Parameter],
        given_out: Mapping[str, nn.Parameter],
        model_map: ModelMap,
        everyone: Group,
    ) -> None:
        """
        Args:
            model: the user's, of which only weak references are kept.
            module: the stage's copy of it, whose modes become those of `model`.
            own: the stage's parameters, by first name.
            given_out: what the script has in their place (others, where the optimizer is on the host).
        """
        self._own, self._given_out = own, given_out
        self._everyone = everyone
        modes = modes_of(model)
        copies = dict(module.named_modules())
        self._paths = [path for path in modes if path in copies]
        self._modules = [copies[path] for path in self._paths]
        originals = dict(model.named_modules())
        self._users_modules = [weakref.ref(originals[path]) for path in self._paths]
        self._names = list(dict.fromkeys(model_map.first_name.values()))
        self._users_parameters: list[list[weakref.ref[nn.Parameter]]] = [[] for _ in self._names]
        number = {name: index for index, name in enumerate(self._names)}
        trains: dict[str, bool] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            first = model_map.first_name[name]
            self._users_parameters[number[first]].append(weakref.ref(parameter))
            trains.setdefault(first, parameter.requires_grad)
        self._traced = [model_map.modes[path] for path in self._paths] + [trains[name] for name in self._names]
        self._agreed = [modes[path] for path in self._paths] + self._traced[len(self._paths) :]
        self._wrapped = list(self._agreed)
        self._seen = self._agreed
        self._began = False
        for part, training in zip(self._modules, self._agreed, strict=False):
            part.training = training

    # The parts of a step, in their order

    def begin_step(self) -> None:
        """Notices what the script has changed, and has the stage as it was agreed for the pass to come."""
        if not self._began or len(self._everyone.ranks) == 1:
            self._began = True
            self.exchange()
            return
        self._seen = self._look()
        if self._seen != self._agreed:
            self._put(self._agreed, self._modules, self._own)

    @property
    def are_pending(self) -> bool:
        """Whether this rank has seen a change that is not agreed on."""
        return self._seen != self._agreed

    def exchange(self) -> None:
        """Makes a change that any rank has seen one of all. Called by all ranks; a collective of a few kB."""
        before = self._agreed
        if not self.are_pending:  # else the stage has been put back for the pass
            self._seen = self._look()
        differs = torch.tensor([a != b for a, b in zip(self._seen, before, strict=True)], dtype=torch.float32)
        self._everyone.all_reduce([differs])
        self._agreed = [old != changed for old, changed in zip(before, (differs > 0).tolist(), strict=True)]
        self._seen = self._agreed
        self._put(self._agreed, self._modules, self._own)
        self._show()

    @property
    def need_trace(self) -> bool:
        """Whether what is agreed is not what the stage was traced with."""
        return self._agreed != self._traced

    def trace(self, retracer: Retracer, before: ModelMap) -> ModelMap:
        """The map of the model as agreed; `before` is of the dry run at wrapping. The stage follows it from now on.

        Raises:
            PartitionError: the stages that there are cannot run the model so. It is raised on all ranks.
        """
        count = len(self._paths)
        state = ModelState(
            modes=dict(zip(self._paths, self._agreed, strict=False)),
            trains=dict(zip(self._names, self._agreed[count:], strict=True)),
        )
        told = self._describe()
        try:
            model_map = retracer.trace(state, before)
        except PartitionError as error:
            hint = "" if any(state.modes.values()) else " If it is to train in training mode, call train()."
            raise PartitionError(f"the model cannot be trained after {told}: {error}.{hint}") from error
        _log.info("the model was traced again", after=told)
        self._traced = self._agreed
        return model_map

    def _describe(self) -> str:
        differs = [index for index, old in enumerate(self._traced) if old != self._agreed[index]]
        modes = [index for index in differs if index < len(self._paths)]
        told = []
        for mode, training in (("train", True), ("eval", False)):
            paths = [self._paths[index] or "the model" for index in modes if self._agreed[index] == training]
            told += [f"{mode}() of {_some(paths)}"] if paths else []
        names = [self._names[index - len(self._paths)] for index in differs[len(modes) :]]
        told += [f"requires_grad of {_some(names)}"] if names else []
        return " and ".join(told)

    # The script's two handles

    def push_modes(self) -> None:
        """After the Varuna object's `train`: the user's model is in the same modes."""
        for part, reference in zip(self._modules, self._users_modules, strict=True):
            if (original := reference()) is not None:
                original.training = part.training

    def pull_modes(self) -> None:
        """Before it: what the script has done to its own model comes first."""
        for index, (part, training) in enumerate(zip(self._modules, self._look(), strict=False)):
            if training != self._agreed[index]:
                part.training = training

    def refuse_foreign(self, optimizer: Optimizer) -> None:
        """Raises ValueError when the optimizer holds a parameter of the user's own model, which nothing trains."""
        own = {id(parameter) for parameter in self._given_out.values()}
        held = {id(p) for group in optimizer.param_groups for p in group["params"]} - own
        for name, references in zip(self._names, self._users_parameters, strict=True):
            if any(id(parameter) in held for parameter in _alive(references)):
                raise ValueError(
                    f"the optimizer was given {name} of the model that was wrapped, which is not what trains: give "
                    "add_param_group the parameters of the Varuna object, those of named_parameters() with this name"
                )

    def _look(self) -> list[bool]:
        """How modes and parameters are to be: changed where any handle differs from what was agreed."""
        found = list(self._agreed)
        users = [reference() for reference in self._users_modules]
        for index, (part, original) in enumerate(zip(self._modules, users, strict=True)):
            old = found[index]
            if part.training != old or (original is not None and original.training != old):
                found[index] = not old
        for index, name in enumerate(self._names, start=len(self._paths)):
            old = found[index]
            handles = _alive(self._users_parameters[index - len(self._paths)])
            if name in self._given_out:
                handles.append(self._given_out[name])
            if any(parameter.requires_grad != old for parameter in handles):
                found[index] = not old
        return found

    def _put(self, state: Sequence[bool], modules: Iterable[nn.Module], own: Mapping[str, nn.Parameter]) -> None:
        for part, training in zip(modules, state, strict=False):
            part.training = training
        for name, trains in zip(self._names, state[len(self._paths) :], strict=True):
            if name in own and own[name].requires_grad != trains:
                own[name].requires_grad_(trains)

    def _show(self) -> None:
        """Has what the script holds show what is agreed."""
        self._put(self._agreed, (), self._given_out)
        self.push_modes()
        trains = self._agreed[len(self._paths) :]
        for references, now in zip(self._users_parameters, trains, strict=True):
            for parameter in _alive(references):
                if parameter.requires_grad != now:
                    parameter.requires_grad_(now)

    # In checkpoints: what the script has changed since the model was wrapped, for it may do so only once

    def state_dict(self) -> dict[str, Any]:
        changed = [index for index, now in enumerate(self._agreed) if now != self._wrapped[index]]
        labels = [("module", path) for path in self._paths] + [("parameter", name) for name in self._names]
        return {
            kind: {label: self._agreed[index] for index in changed for of, label in (labels[index],) if of == kind}
            for kind in ("module", "parameter")
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Does again what the script had changed when the checkpoint was made."""
        modules = dict(zip(self._paths, self._modules, strict=True))
        for path, training in state["module"].items():
            if path in modules:
                modules[path].training = training
        self.push_modes()
        for name, trains in state["parameter"].items():
            if name in self._given_out:
                self._given_out[name].requires_grad_(trains)
            if name in self._names:
                for parameter in _alive(self._users_parameters[self._names.index(name)]):
                    parameter.requires_grad_(trains)
        if state["parameter"]:
            _log.info("requires_grad is as in the checkpoint", parameters=_some(list(state["parameter"])))


def _alive(references: Iterable[weakref.ref[nn.Parameter]]) -> list[nn.Parameter]:
    return [parameter for reference in references if (parameter := reference()) is not None]


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
