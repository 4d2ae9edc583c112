"""Cutting another stage from the modules of one, in a process that goes on with other cuts.

The modules stay the objects that they are, with what the script has done to them. All parameters are other objects, so
that whoever keeps one from before is found: those that both stages hold have the same memory.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from varuna.partition.cutting.model_map import ModelMap, first_names
from varuna.partition.errors import PartitionError
from varuna.partition.modules.special_parameters import parameter_like
from varuna.partition.stages.ghost import HollowTensors
from varuna.partition.stages.stage import Stage

__all__ = ["list_lost_writes", "recut_stage"]


def list_lost_writes(module: nn.Module) -> set[str]:
    """The buffers of other stages that the script has written to, which had no effect here.

    `module`: a stage's, with what the script sees between passes.
    """
    buffers = module.named_buffers(remove_duplicate=False)
    return {name for name, buffer in buffers if buffer.is_meta and buffer._version}


def recut_stage(
    stage: Stage,
    skeleton: nn.Module,
    model_map: ModelMap,
    sections: range,
    *,
    wrapped_map: ModelMap,
    trains: Mapping[str, bool],
    lost_writes: Collection[str] = (),
) -> Stage:
    """The stage that runs `sections`, in the modules of `stage`, which must hold the tensors of passes.

    Its new parameters and buffers have no values, except buffers that no checkpoint has: they have the model's own.
    That includes buffers that it only reads, because code of earlier sections runs here, too. The caller fills all
    these (`held_state`).

    Args:
        skeleton: the whole model, with parameters on `meta` (`Retracer.skeleton`).
        model_map: by which the stage runs.
        wrapped_map: of the model as the script has wrapped it. The stage holds what it reads by that, as one that
            `build_stage` makes: the script may return to modes in which it reads more than by `model_map`.
        trains: by first name of the parameter: `requires_grad`.
        lost_writes: `list_lost_writes`, from before the modules held the tensors of passes.

    Raises:
        PartitionError: a buffer whose value is in no checkpoint was on `meta`, or the script has changed it.
    """
    stage.release_module()
    hollow = HollowTensors(stage.device, needs_numbers=wrapped_map.needs_numbers)
    parameters = _replace_parameters(stage, skeleton, wrapped_map, sections, hollow=hollow, trains=trains)
    changed = {*wrapped_map.graph.buffers_changed, *model_map.graph.buffers_changed}
    buffers = _replace_buffers(
        stage, skeleton, wrapped_map, sections, hollow=hollow, changed=changed, lost_writes=lost_writes
    )
    recut = Stage(
        stage.module, wrapped_map, sections=sections, device=stage.device, parameters=parameters, read=buffers
    )
    if model_map is not wrapped_map:
        recut.apply_map(model_map)
    return recut


def _replace_parameters(
    stage: Stage,
    skeleton: nn.Module,
    model_map: ModelMap,
    sections: range,
    *,
    hollow: HollowTensors,
    trains: Mapping[str, bool],
) -> dict[str, nn.Parameter]:
    """Puts the parameters of the sections into the modules. Returns them by first name."""
    own = model_map.parameters_held(sections)
    patterns: dict[str, nn.Parameter] = {}
    for name, pattern in skeleton.named_parameters(remove_duplicate=False):
        patterns.setdefault(model_map.first_name[name], pattern)
    made: dict[str, nn.Parameter] = {}
    for name, entries, key in _list_places(stage.module, "_parameters"):
        first = model_map.first_name[name]
        if first not in made:
            pattern, present = patterns[first], entries[key]
            if first in own and first in stage.parameters:
                made[first] = parameter_like(present, present.detach(), requires_grad=present.requires_grad)
            elif first in own:
                memory = torch.empty_like(pattern.detach(), device=stage.device)
                made[first] = parameter_like(pattern, memory, requires_grad=trains[first])
            elif first not in stage.parameters:
                made[first] = present
            else:
                placeholder = hollow.make_expanded(pattern.shape, pattern.dtype)
                made[first] = parameter_like(pattern, placeholder, requires_grad=False)
        entries[key] = made[first]
    return {name: parameter for name, parameter in made.items() if name in own}


def _replace_buffers(
    stage: Stage,
    skeleton: nn.Module,
    model_map: ModelMap,
    sections: range,
    *,
    hollow: HollowTensors,
    changed: Collection[str],
    lost_writes: Collection[str],
) -> dict[str, Tensor]:
    """Puts the buffers that the sections read into the modules. Returns them by first name.

    `changed`: those that forward changes.
    """
    originals = dict(skeleton.named_buffers(remove_duplicate=False))
    first_name, _ = first_names(skeleton.named_buffers(remove_duplicate=False))
    read = model_map.buffers_read(first_name.values(), sections)
    filled = {*skeleton.state_dict(keep_vars=True), *changed}
    written = {first_name[name] for name in lost_writes}
    made: dict[str, Tensor] = {}
    for name, entries, key in _list_places(stage.module, "_buffers"):
        first = first_name[name]
        if first not in made:
            was_real, is_real = first in stage.read or first in changed, first in read or first in changed
            if was_real != is_real and first not in filled:
                _require_original(
                    first, originals[first], entries[key] if was_real else None, is_written=first in written
                )
            if was_real == is_real:
                made[first] = entries[key]
            elif not is_real:
                made[first] = hollow.make_expanded(entries[key].shape, entries[key].dtype)
            elif first in filled:
                made[first] = torch.empty_like(originals[first], device=stage.device)
            else:
                made[first] = originals[first].to(stage.device, copy=True)
        entries[key] = made[first]
    return {name: buffer for name, buffer in made.items() if name in read}


def _require_original(name: str, original: Tensor, left: Tensor | None, *, is_written: bool) -> None:
    """Raises PartitionError unless a buffer of no checkpoint has the value that the model had when it was wrapped.

    `left`: its tensor here, where the stage loses it, so that it has the model's value if the stage gets it again; None
    where the stage gets it. `is_written`: the script has written to it, which had no effect here.
    """
    if left is None and original.is_meta:
        raise PartitionError(f"the model was on meta, and the value of its buffer {name} is in no checkpoint")
    if left is not None and not original.is_meta:
        is_written = not torch.equal(left.cpu(), original.cpu())
    if is_written:
        raise PartitionError(f"the script has changed the buffer {name}, whose value is in no checkpoint")


def _list_places(module: nn.Module, of: str) -> list[tuple[str, dict[str, Any], str]]:
    """Every place of a parameter or buffer: its name, and where it is."""
    return [
        (f"{path}.{key}" if path else key, getattr(part, of), key)
        for path, part in module.named_modules(remove_duplicate=False)
        for key, tensor in getattr(part, of).items()
        if tensor is not None
    ]
