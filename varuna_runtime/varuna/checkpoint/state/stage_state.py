"""The state of a stage's model: parameters and buffers, by their names in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from varuna.checkpoint.state.rank_state import ShapePosition, TrainingState
from varuna.partition import Stage
from varuna.partition.cutting.model_map import ModelMap, first_names

__all__ = ["held_state", "state_dict_names"]


def state_dict_names(model: nn.Module, model_map: ModelMap) -> dict[str, str]:
    """For each name in `model.state_dict()`: the tensor's first name, under which it is stored."""
    buffer_names, _ = first_names(model.named_buffers(remove_duplicate=False))
    first_name = {**model_map.first_name, **buffer_names}
    state = model.state_dict(keep_vars=True)
    return {name: first_name.get(name, name) for name, value in state.items() if isinstance(value, Tensor)}


def held_state(
    model_map: ModelMap,
    stage: Stage,
    parameters: Mapping[str, nn.Parameter],
    *,
    state_dict: Mapping[str, str],
    place: ShapePosition = ShapePosition(),  # noqa: B008  # frozen
) -> TrainingState:
    """The parameters and buffers of this rank; the caller adds optimizer, user states and seed later.

    They include the buffers that the stage only reads. The stage of the section that `section_of` has writes them, and
    this one loads them, as with tied parameters.

    `parameters`: those that the optimizer updates. `state_dict`: the `state_dict_names` of the whole model.
    """
    kept = {*model_map.graph.buffers_changed, *state_dict.values()}
    section_of = {name: model_map.sections_of(name)[0] for name in parameters}
    for section in reversed(model_map.sections):
        section_of |= dict.fromkeys(section.buffers, section.index)
    return TrainingState(
        sections=stage.sections,
        section_count=len(model_map.sections),
        parameters=parameters,
        section_of=section_of,
        buffers={name: buffer for name, buffer in stage.read.items() if name in kept},
        tied={*model_map.shared, *model_map.shared_buffers},
        state_dict=state_dict,
        position=place,
    )
