"""The state of the user's model by the names of its `state_dict()`: this stage's part, and the whole from all stages.

Letters: P stages, N tensors of the whole state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from varuna.distributed.groups import RankGroup
from varuna.distributed.topology import Topology
from varuna.model.fixed_module import ModelSurface

__all__ = ["gather_state", "read_stage_state", "tensors_by_name"]

_CHUNK_BYTES = 64 << 20
"""Of the state that all ranks exchange at once, so that none but rank 0 needs memory for the whole."""
_WORD = 8
"""Bytes of the integers that are summed."""


def tensors_by_name(module: nn.Module) -> dict[str, Tensor]:
    """Every name of a parameter or buffer."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def read_stage_state(
    surface: ModelSurface, *, destination: Any = None, prefix: str = "", keep_vars: bool = False
) -> tuple[Any, list[str]]:
    """`state_dict` of the user's model with this stage's tensors only, and the names that it leaves out."""
    here = {id(tensor) for tensor in (*surface.parameters.values(), *surface.buffers.values())}
    state = surface.module.state_dict(destination=destination, prefix=prefix, keep_vars=True)
    elsewhere = {id(tensor) for tensor in tensors_by_name(surface.module).values()} - here
    left_out = [name for name, value in state.items() if id(value) in elsewhere]
    for name in left_out:
        del state[name]
    if not keep_vars:
        for name, value in list(state.items()):
            state[name] = value.detach() if isinstance(value, Tensor) else value
    return state, left_out


def gather_state(
    surface: ModelSurface, stored_names: Mapping[str, str], everyone: RankGroup, topology: Topology
) -> dict[str, Any]:
    """The whole state in host memory on rank 0; an empty dict on the others. Called by all ranks.

    Args:
        stored_names: the first name of each tensor, by its names in the plain model's state; the same on all ranks.
    """
    shapes = surface.module.state_dict(keep_vars=True)
    own, _ = read_stage_state(surface)
    names = {stored: name for name, stored in reversed(list(stored_names.items())) if name in shapes}
    stage_of = _find_stages(list(names.values()), own, everyone, topology)
    gathered: dict[str, Tensor] = {}
    keeps, gives = topology.rank == 0, topology.replica == 0
    held = [name for name in names.values() if name in stage_of]
    for chunk in _cut_into_chunks(held, shapes):
        sizes = [shapes[name].numel() * shapes[name].element_size() for name in chunk]
        words = torch.zeros(sum(_count_words(size) for size in sizes), dtype=torch.int64)
        places = [place[:size] for place, size in zip(_split_words(words, sizes), sizes, strict=True)]
        for name, place in zip(chunk, places, strict=True):
            if gives and stage_of[name] == topology.stage:
                place.copy_(_bytes_of(own[name]))
        everyone.all_reduce([words])  # one rank gives each tensor, and the others add zeros
        if keeps:
            for name, place in zip(chunk, places, strict=True):
                gathered[name] = place.clone().view(shapes[name].dtype).view(shapes[name].shape)
    if not keeps:
        return {}
    assert not (lost := set(names.values()) - stage_of.keys()), f"no stage holds {lost}"
    others = {name: value for name, value in own.items() if not isinstance(value, Tensor)}  # extra states of modules
    return {name: gathered[names[stored]] for name, stored in stored_names.items() if stored in names} | others


def _find_stages(
    names: Sequence[str], own: Mapping[str, Any], everyone: RankGroup, topology: Topology
) -> dict[str, int]:
    """For each name that a stage holds: the first stage that does."""
    holds = torch.zeros(topology.p, len(names), dtype=torch.int32)
    if topology.replica == 0:
        holds[topology.stage] = torch.tensor([name in own for name in names], dtype=torch.int32)
    everyone.all_reduce([holds])
    return {name: stages.index(1) for name, stages in zip(names, holds.T.tolist(), strict=True) if 1 in stages}


def _cut_into_chunks(names: Sequence[str], tensors: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """Runs of names, each of about `_CHUNK_BYTES` at most, or of one larger tensor."""
    chunk: list[str] = []
    size = 0
    for name in names:
        size += tensors[name].numel() * tensors[name].element_size()
        if chunk and size > _CHUNK_BYTES:
            yield chunk
            chunk, size = [], tensors[name].numel() * tensors[name].element_size()
        chunk.append(name)
    if chunk:
        yield chunk


def _count_words(size: int) -> int:
    return -(-size // _WORD)


def _split_words(words: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """The bytes of each part of `words`."""
    return [part.view(torch.uint8) for part in torch.split(words, [_count_words(size) for size in sizes])]


def _bytes_of(tensor: Tensor) -> Tensor:
    """In host memory, row by row."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
