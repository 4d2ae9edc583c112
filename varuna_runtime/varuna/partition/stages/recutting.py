"""Cutting another stage from the modules of one, in a process that goes on with other cuts.

The modules stay the objects that they are, with what the script has done to them. All parameters are other objects, so
that whoever keeps one from before is found: those that both stages hold have the same memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from varuna.partition.cutting.model_map import ModelMap, first_names
from varuna.partition.errors import PartitionError
from varuna.partition.modules.special_parameters import parameter_like
from varuna.partition.stages.ghost import ZeroTensors
from varuna.partition.stages.stage import Stage

__all__ = ["recut_stage"]


def recut_stage(
    stage: Stage, skeleton: nn.Module, model_map: ModelMap, sections: range, *, trains: Mapping[str, bool]
) -> Stage:
    """The stage that runs `sections`, in the modules of `stage`, which must hold the tensors of passes.

    Its new parameters and buffers have no values, except buffers that no checkpoint has: they have the model's own.

    Args:
        skeleton: the whole model, with parameters on `meta` (`Retracer.skeleton`).
        trains: by first name of the parameter: `requires_grad`.

    Raises:
        PartitionError: the model was on `meta` and has a buffer whose value is in no checkpoint.
    """
    stage.release_module()
    zeros = ZeroTensors(stage.device)
    parameters = _replace_parameters(stage, skeleton, model_map, sections, zeros=zeros, trains=trains)
    buffers = _replace_buffers(stage, skeleton, model_map, sections, zeros=zeros)
    return Stage(stage.module, model_map, sections=sections, device=stage.device, parameters=parameters, read=buffers)


def _replace_parameters(
    stage: Stage,
    skeleton: nn.Module,
    model_map: ModelMap,
    sections: range,
    *,
    zeros: ZeroTensors,
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
                hollow = zeros.make_expanded(pattern.shape, pattern.dtype)
                made[first] = parameter_like(pattern, hollow, requires_grad=False)
        entries[key] = made[first]
    return {name: parameter for name, parameter in made.items() if name in own}


def _replace_buffers(
    stage: Stage, skeleton: nn.Module, model_map: ModelMap, sections: range, *, zeros: ZeroTensors
) -> dict[str, Tensor]:
    """Puts the buffers that the sections read into the modules. Returns them by first name."""
    originals = dict(skeleton.named_buffers(remove_duplicate=False))
    persistent = set(skeleton.state_dict(keep_vars=True))
    first_name, _ = first_names(skeleton.named_buffers(remove_duplicate=False))
    read = model_map.buffers_read(first_name.values(), sections)
    changed = model_map.graph.buffers_changed
    made: dict[str, Tensor] = {}
    for name, entries, key in _list_places(stage.module, "_buffers"):
        first = first_name[name]
        if first not in made:
            was_real, is_real = first in stage.read or first in changed, first in read or first in changed
            if was_real == is_real:
                made[first] = entries[key]
            elif is_real:
                filled = first in persistent or first in changed
                made[first] = _make_buffer(first, originals[first], stage.device, is_filled=filled)
            else:
                made[first] = zeros.make_expanded(entries[key].shape, entries[key].dtype)
        entries[key] = made[first]
    return {name: buffer for name, buffer in made.items() if name in read}


def _make_buffer(name: str, original: Tensor, device: torch.device, *, is_filled: bool) -> Tensor:
    """`is_filled`: its value comes from a checkpoint, or from another process."""
    if not original.is_meta:
        return original.to(device, copy=True)
    if not is_filled:
        raise PartitionError(f"the model was on meta, and the value of its buffer {name} is in no checkpoint")
    return torch.empty_like(original, device=device)


def _list_places(module: nn.Module, of: str) -> list[tuple[str, dict[str, Any], str]]:
    """Every place of a parameter or buffer: its name, and where it is."""
    return [
        (f"{path}.{key}" if path else key, getattr(part, of), key)
        for path, part in module.named_modules(remove_duplicate=False)
        for key, tensor in getattr(part, of).items()
        if tensor is not None
    ]
