"""Building a stage: the model's structure with memory for the stage's own parameters only."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from varuna.partition.errors import PartitionError
from varuna.partition.ghost import Zeros
from varuna.partition.model_map import ModelMap, first_names
from varuna.partition.stage import Stage
from varuna.partition.trace import copy_with

__all__ = ["build_stage"]


def build_stage(
    model: nn.Module, model_map: ModelMap, first_section: int, end_section: int, device: torch.device | str
) -> Stage:
    """The stage that runs sections `first_section` … `end_section`-1 on `device`.

    `model` stays as it is; the stage has a copy of its structure, with copies of its own parameters. Parameters that
    are on `meta` are made on the device and initialised by `reset_parameters()` of their module, under a seed that
    follows from `torch.initial_seed()` and the module's name, so that every split gives the same model.

    Raises:
        PartitionError: the model cannot be cut here, or something on `meta` cannot be initialised.
        ValueError: no such sections.
    """
    count = len(model_map.sections)
    if not 0 <= first_section < end_section <= count:
        raise ValueError(f"sections {first_section} … {end_section - 1} are not a part of the model's 0 … {count - 1}")
    device = torch.device(device)
    sections = range(first_section, end_section)
    zeros = Zeros(device)
    memo: dict[int, object] = {}
    parameters = _parameters(model, model_map, sections, device, zeros, memo)
    buffers = _buffers(model, model_map, sections, device, zeros, memo)
    copied = copy_with(model, memo)
    on_meta = {name for name, parameter in model.named_parameters() if parameter.is_meta and name in parameters}
    on_meta |= {name for name, buffer in model.named_buffers() if buffer.is_meta and name in buffers}
    _initialise(copied, on_meta, {**parameters, **buffers})
    own_buffers = {name for section in sections for name in model_map.sections[section].buffers}
    own = {name: buffer for name, buffer in buffers.items() if name in own_buffers}
    return Stage(copied, model_map, sections, device, parameters, own)


def _parameters(
    model: nn.Module,
    model_map: ModelMap,
    sections: range,
    device: torch.device,
    zeros: Zeros,
    memo: dict[int, object],
) -> dict[str, nn.Parameter]:
    """Fill `memo` with what stands for each parameter; returns the stage's own ones, by first name."""
    own = {name for section in sections for name in model_map.sections[section].parameters}
    made: dict[str, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = model_map.first_name[name]
        if first not in made:
            if first in own:
                new = nn.Parameter(_on_device(parameter.detach(), device), requires_grad=parameter.requires_grad)
            else:
                new = nn.Parameter(zeros.expanded(parameter.shape, parameter.dtype), requires_grad=False)
            new.__dict__.update(parameter.__dict__)
            made[first] = new
        memo[id(parameter)] = made[first]
    return {name: parameter for name, parameter in made.items() if name in own}


def _buffers(
    model: nn.Module,
    model_map: ModelMap,
    sections: range,
    device: torch.device,
    zeros: Zeros,
    memo: dict[int, object],
) -> dict[str, Tensor]:
    """Fill `memo` with what stands for each buffer; returns those that this stage's run of the forward reads."""
    first_name, _ = first_names(model.named_buffers(remove_duplicate=False))
    graph = model_map.graph
    before = model_map.plan(sections.start).buffers if sections.start > 0 else frozenset()
    made: dict[str, Tensor] = {}
    held: set[str] = set()
    for name, buffer in model.named_buffers(remove_duplicate=False):
        first = first_name[name]
        if first not in made:
            used_in = graph.buffers_used.get(first)
            _check_owner(first, used_in or set(), first in graph.buffers_changed, sections)
            read = used_in is None or first in before or any(section in sections for section in used_in)
            made[first] = _on_device(buffer, device) if read else zeros.expanded(buffer.shape, buffer.dtype)
            if read:
                held.add(first)
        memo[id(buffer)] = made[first]
    return {name: buffer for name, buffer in made.items() if name in held}


def _check_owner(name: str, used_in: set[int], changed: bool, sections: range) -> None:
    if changed and any(section in sections for section in used_in) and not used_in.issubset(sections):
        raise PartitionError(
            f"buffer {name} is changed by forward and used in sections {sorted(used_in)}, which would be in different "
            "stages and each keep its own; use a module per section, or keep these sections in one stage"
        )


def _on_device(tensor: Tensor, device: torch.device) -> Tensor:
    if tensor.is_meta:
        return torch.empty_like(tensor, device=device)
    return tensor.to(device, copy=True)


def _initialise(module: nn.Module, names: set[str], tensors: Mapping[str, Tensor]) -> None:
    """Initialise the tensors `names`, which came from `meta`, with the `reset_parameters` of their modules."""
    if not names:
        return
    remaining = {id(tensors[name]): name for name in names}
    every = frozenset(remaining)
    devices = {tensor.device for tensor in tensors.values() if tensor.device.type == "cuda"}
    for path, part in module.named_modules():
        held = [x for x in (*part._parameters.values(), *part._buffers.values()) if x is not None]
        reset = getattr(part, "reset_parameters", None) or getattr(part, "_reset_parameters", None)
        if reset is None or not any(id(x) in remaining for x in held):
            continue
        # What is tied keeps what its first module made of it, in every stage that has it.
        kept = [(x, x.clone()) for x in held if id(x) in every and id(x) not in remaining]
        seed = hashlib.sha256(f"{torch.initial_seed()}/{path}".encode()).digest()
        with torch.random.fork_rng(devices=devices), torch.no_grad():
            torch.manual_seed(int.from_bytes(seed[:7], "little"))
            reset()
            for tensor, value in kept:
                tensor.copy_(value)
        for tensor in held:
            remaining.pop(id(tensor), None)
    if remaining:
        raise PartitionError(
            f"{', '.join(sorted(remaining.values()))}: on the meta device, and the module that holds it has no "
            "reset_parameters() to initialise it; give it one, or build the model on the CPU"
        )
