"""Changes that the script makes to the model between steps: modes of modules, and which parameters train.

A script may change them through the Varuna object or through its own model. A rank may see a change that other ranks do
not see, because it holds other parameters. What crosses between stages depends on the changes of all ranks. So a rank
that sees a change runs the pass as agreed before, and sets a flag in the agreement at the end of the step. If any rank
has set it, all ranks exchange their changes, trace the model again and repeat the pass. So a step without a change
costs no message. A change on any rank becomes a change on all ranks, and both handles show it.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import structlog
import torch
from torch import nn
from torch.optim import Optimizer

from varuna.distributed.groups import RankGroup
from varuna.partition import PartitionError
from varuna.partition.cutting.model_map import ModelMap
from varuna.partition.modules.modes import modes_of
from varuna.partition.tracing.retracer import ModelState, Retracer

__all__ = ["ScriptChanges"]

_log = structlog.get_logger("varuna")

_NAMED = 3
"""The most names in a message."""


class ScriptChanges:
    """Compares the modes and trained parameters with those that all ranks last agreed on."""

    def __init__(
        self,
        model: nn.Module,
        module: nn.Module,
        own: Mapping[str, nn.Parameter],
        *,
        given_out: Mapping[str, nn.Parameter],
        model_map: ModelMap,
        everyone: RankGroup,
    ) -> None:
        """
        Args:
            model: the user's; this object keeps only weak references to it.
            module: the stage's copy of it, whose modes become those of `model`.
            own: the stage's parameters, by first name.
            given_out: the parameters that the script has (copies, if the optimizer is on the host).
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
        self._seen = self._agreed
        self._changed: set[int] = set()
        """The numbers of the modules and parameters that the ranks have agreed to change since the model was wrapped,
        also of those that are as wrapped again."""
        self._exchanges = True
        """Whether the ranks exchange their changes before the next pass: scripts may make some before a first step."""
        self.has_exchanged = False
        """Whether this rank has the outcome of an exchange."""
        for part, training in zip(self._modules, self._agreed, strict=False):
            part.training = training

    def follow_ranks(self, everyone: RankGroup, *, exchanges: bool) -> None:
        """From now on these are the ranks that agree. They have agreed on the same so far.

        `exchanges`: before their first pass they exchange their changes, because some of them have not done so yet.
        """
        self._everyone, self._exchanges = everyone, exchanges

    def follow_stage(self, own: Mapping[str, nn.Parameter], given_out: Mapping[str, nn.Parameter]) -> None:
        """From now on the stage in the same modules has these parameters."""
        self._own, self._given_out = own, given_out

    @property
    def trains(self) -> dict[str, bool]:
        """By first name of the parameter: whether the ranks have agreed that it trains."""
        return dict(zip(self._names, self._agreed[len(self._paths) :], strict=True))

    @property
    def agreed(self) -> list[int]:
        """What the ranks have agreed on: the numbers, among all modules and parameters, of those that train."""
        return [number for number, trains in enumerate(self._agreed) if trains]

    def follow_agreement(self, agreed: Collection[int]) -> None:
        """Of a new rank: what the others have agreed on counts, whatever its script did before it joined them."""
        self._set_agreement([number in agreed for number in range(len(self._agreed))])
        self.has_exchanged = True

    # The parts of a step, in their order

    def begin_step(self, *, is_rest: bool = False) -> None:
        """Finds what the script has changed, and sets the stage as agreed for the next pass.

        In their first step the ranks exchange their changes before the pass: scripts may have made some before it.
        `is_rest`: not in this step, of which sums are kept that were made as agreed before; the same on all ranks.
        """
        exchanges = self._exchanges or len(self._everyone.ranks) == 1
        self._exchanges = False
        if exchanges and not is_rest:
            self.exchange_changes()
            return
        self._find_new_changes()
        if self.are_pending:
            self._set_state(self._agreed, self._modules, self._own)

    def _find_new_changes(self) -> None:
        self._seen = self._find_wanted()

    @property
    def are_pending(self) -> bool:
        """Whether this rank has seen a change that the ranks have not agreed on."""
        return self._seen != self._agreed

    def exchange_changes(self, *, may_evaluate: bool = False) -> None:
        """Makes a change seen by any rank a change on all ranks. Called by all ranks; a collective of a few kB.

        `may_evaluate`: the script may have called `eval()` of the model for an evaluation only. Then the ranks keep the
        modes that they have agreed on, and the script keeps those that it has set.
        """
        before = self._agreed
        self._find_new_changes()
        differs = torch.tensor([a != b for a, b in zip(self._seen, before, strict=True)], dtype=torch.float32)
        self._everyone.all_reduce([differs])
        agreed = [old != changed for old, changed in zip(before, (differs > 0).tolist(), strict=True)]
        self.has_exchanged = True
        if may_evaluate and before[0] and not agreed[0]:  # the first path is the model's own
            modes = len(self._paths)
            self._set_agreement(before[:modes] + agreed[modes:], with_modes=False)
        else:
            self._set_agreement(agreed)

    @property
    def needs_trace(self) -> bool:
        """Whether the ranks have agreed on something else than the stage was traced with."""
        return self._agreed != self._traced

    def trace_model(self, retracer: Retracer, before: ModelMap) -> ModelMap:
        """Traces the model as agreed; the stage follows this map from now on. `before`: the map of the first dry run.

        Raises:
            PartitionError: the present stages cannot run the changed model. Raised on all ranks.
        """
        count = len(self._paths)
        state = ModelState(
            modes=dict(zip(self._paths, self._agreed, strict=False)),
            trains=dict(zip(self._names, self._agreed[count:], strict=True)),
        )
        changes = self._describe_changes(self._traced)
        try:
            model_map = retracer.trace_state(state, before)
        except PartitionError as error:
            hint = "" if any(state.modes.values()) else " To train in training mode, call train()."
            raise PartitionError(f"the model cannot be trained after {changes}: {error}.{hint}") from error
        _log.info("the model was traced again", after=changes)
        if not model_map.loss_has_gradient:
            _log.warning("the loss depends on no parameter that trains, so steps change none", after=changes)
        self._traced = self._agreed
        return model_map

    def _describe_changes(self, before: Sequence[bool]) -> str:
        differs = [index for index, old in enumerate(before) if old != self._agreed[index]]
        modes = [index for index in differs if index < len(self._paths)]
        changes = []
        for mode, training in (("train", True), ("eval", False)):
            paths = [self._paths[index] or "the model" for index in modes if self._agreed[index] == training]
            changes += [f"{mode}() of {_join_some(paths)}"] if paths else []
        names = [self._names[index - len(self._paths)] for index in differs[len(modes) :]]
        changes += [f"requires_grad of {_join_some(names)}"] if names else []
        return " and ".join(changes)

    # The script's two handles

    def push_modes(self) -> None:
        """After `train` of the Varuna object: sets the same modes in the user's model."""
        for part, reference in zip(self._modules, self._users_modules, strict=True):
            if (original := reference()) is not None:
                original.training = part.training

    def pull_modes(self) -> None:
        """Before `train` of the Varuna object: takes over the modes that the script has set in its own model."""
        for index, (part, training) in enumerate(zip(self._modules, self._find_changes(), strict=False)):
            if training != self._agreed[index]:
                part.training = training

    def refuse_foreign_parameters(self, optimizer: Optimizer) -> None:
        """Raises ValueError when the optimizer holds a parameter of the user's own model, which nothing trains."""
        own = {id(parameter) for parameter in self._given_out.values()}
        held = {id(p) for group in optimizer.param_groups for p in group["params"]} - own
        for name, references in zip(self._names, self._users_parameters, strict=True):
            if any(id(parameter) in held for parameter in _alive(references)):
                raise ValueError(
                    f"the optimizer was given {name} of the model that was wrapped, but only the Varuna object trains: "
                    "give add_param_group its parameters, those of named_parameters() with this name"
                )

    def select_trained(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        """Those of `parameters`, by first name, that the script wants to train, also if the ranks have yet to agree."""
        wanted = dict(zip(self._names, self._find_wanted()[len(self._paths) :], strict=True))
        return {name: parameter for name, parameter in parameters.items() if wanted[name]}

    def _find_wanted(self) -> list[bool]:
        """The wanted modes and parameters, as seen before when a change is pending: the stage is set as agreed then, so
        that it no longer shows it."""
        return self._seen if self.are_pending else self._find_changes()

    def _find_changes(self) -> list[bool]:
        """The wanted modes and parameters: changed if any handle differs from the agreement."""
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

    def _set_state(self, state: Sequence[bool], modules: Iterable[nn.Module], own: Mapping[str, nn.Parameter]) -> None:
        for part, training in zip(modules, state, strict=False):
            part.training = training
        for name, trains in zip(self._names, state[len(self._paths) :], strict=True):
            if name in own and own[name].requires_grad != trains:
                own[name].requires_grad_(trains)

    def _set_agreement(self, agreed: list[bool], *, with_modes: bool = True) -> None:
        """Sets the stage and the script's own handles as agreed from now on; without `with_modes` no module."""
        self._changed.update(n for n, (old, now) in enumerate(zip(self._agreed, agreed, strict=True)) if now != old)
        self._agreed = self._seen = agreed
        self._set_handles(agreed, with_modes=with_modes)

    def _set_handles(self, state: Sequence[bool], *, with_modes: bool = True) -> None:
        self._set_state(state, self._modules if with_modes else (), self._own)
        self._set_state(state, (), self._given_out)
        if with_modes:
            self.push_modes()
        for references, now in zip(self._users_parameters, state[len(self._paths) :], strict=True):
            for parameter in _alive(references):
                if parameter.requires_grad != now:
                    parameter.requires_grad_(now)

    # In checkpoints: what the script has changed since the model was wrapped, because it may do so only once

    @property
    def _labels(self) -> list[tuple[str, str]]:
        return [("module", path) for path in self._paths] + [("parameter", name) for name in self._names]

    def state_dict(self) -> dict[str, Any]:
        """What the ranks have agreed on. What a script has set since, a new process's script sets again."""
        state: dict[str, Any] = {"module": {}, "parameter": {}}
        for number, (kind, label) in enumerate(self._labels):
            if number in self._changed:
                state[kind][label] = self._agreed[number]
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sets what has changed in the training before as it was last, whatever this process's script has set: a script
        may freeze layers whenever it starts, and unfreeze them once. The rest stays as the script has set it. Called by
        all ranks, with the same state."""
        loaded = {n: state[kind][label] for n, (kind, label) in enumerate(self._labels) if label in state[kind]}
        wanted = self._find_wanted()
        self._set_agreement([loaded.get(number, now) for number, now in enumerate(self._agreed)])
        self._changed.update(loaded)
        before = [wanted[number] if number in loaded else now for number, now in enumerate(self._agreed)]
        if before != self._agreed:
            _log.info("the model is set as in the checkpoint", changes=self._describe_changes(before))
        self._set_handles([loaded.get(number, now) for number, now in enumerate(wanted)])


def _alive(references: Iterable[weakref.ref[nn.Parameter]]) -> list[nn.Parameter]:
    return [parameter for reference in references if (parameter := reference()) is not None]


def _join_some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
