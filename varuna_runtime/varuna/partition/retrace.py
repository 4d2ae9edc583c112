"""Tracing a model again after the script has changed modes or `requires_grad`, for the stages that there are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from varuna.partition.build import buffers_read
from varuna.partition.errors import PartitionError
from varuna.partition.graph import Kind
from varuna.partition.model_map import ModelMap
from varuna.partition.modes import set_modes
from varuna.partition.skeleton import skeleton_of
from varuna.partition.trace import trace_again

__all__ = ["ModelState", "Retracer"]


@dataclass(frozen=True)
class ModelState:
    """What a script may change of a model between steps."""

    modes: Mapping[str, bool]
    """By module: whether it is in training mode."""
    trains: Mapping[str, bool]
    """By parameter, its first name: `requires_grad`."""


class Retracer:
    """Keeps what a dry run needs; made when the model is wrapped, since the script may change or drop it later."""

    def __init__(self, model: nn.Module, example_inputs: Mapping[str, Any], stages: Sequence[range]) -> None:
        self._skeleton = skeleton_of(model)
        self._inputs = example_inputs
        self._stages = stages

    def trace(self, state: ModelState, before: ModelMap) -> ModelMap:
        """The map of the model in `state`, with the cut-points and stages of `before`.

        Raises:
            PartitionError: the model cannot be cut there in this state, or a stage would need what it does not hold.
        """
        set_modes(self._skeleton, state.modes)
        for name, parameter in self._skeleton.named_parameters(remove_duplicate=False):
            parameter.requires_grad_(state.trains[before.first_name[name]])
        after = trace_again(self._skeleton, self._inputs, before)
        if len(after.sections) != len(before.sections):
            raise PartitionError(
                f"forward passes {len(after.sections) - 1} cut-points, and {len(before.sections) - 1} in the dry run"
            )
        for stage in self._stages:
            self._require_held(before, after, stage)
        # What is not used in this state stays where it is, and with it the checkpoints.
        return replace(
            after, sections=before.sections, shared=before.shared, random_by_example=before.random_by_example
        )

    def _require_held(self, before: ModelMap, after: ModelMap, stage: range) -> None:
        """Raises PartitionError when the stage would need a parameter or buffer that it was not given."""
        buffers = after.graph.buffers_used
        held = {name for section in stage for name in before.sections[section].parameters}
        held |= buffers_read(before, buffers, stage)
        needed = parameters_used(after, stage) | buffers_read(after, buffers, stage)
        if missing := sorted(needed - held):
            raise PartitionError(
                f"forward now uses {missing[0]} in sections {stage.start} to {stage.stop - 1}, whose stage does not "
                "hold it, because forward did not use it there when the model was wrapped"
            )


def parameters_used(model_map: ModelMap, sections: range) -> set[str]:
    """Those that code of these sections uses, by first name."""
    return {
        value.weight
        for value in model_map.graph.values
        if value.kind is Kind.PARAMETER and value.weight is not None and not value.used_in.isdisjoint(sections)
    }
