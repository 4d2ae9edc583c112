"""Tracing a model again, for the existing stages, after the script has changed modes or `requires_grad`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from varuna.partition.cutting.model_map import ModelMap
from varuna.partition.errors import PartitionError
from varuna.partition.modules.model_copies import make_skeleton
from varuna.partition.modules.modes import set_modes
from varuna.partition.tracing.trace import trace_again

__all__ = ["ModelState", "Retracer"]


@dataclass(frozen=True)
class ModelState:
    """The part of a model that a script may change between steps."""

    modes: Mapping[str, bool]
    """By path of the module: whether it is in training mode."""
    trains: Mapping[str, bool]
    """By first name of the parameter: `requires_grad`."""


class Retracer:
    """Keeps what a dry run needs from the time when the model is wrapped, because the script may change it later."""

    def __init__(self, model: nn.Module, example_inputs: Mapping[str, Any], stages: Sequence[range]) -> None:
        self.skeleton = make_skeleton(model)
        """The module tree, with parameters on `meta`."""
        self._inputs = example_inputs
        self._stages = stages

    def follow_stages(self, stages: Sequence[range]) -> None:
        """From now on these are the stages."""
        self._stages = stages

    def trace_state(self, state: ModelState, before: ModelMap) -> ModelMap:
        """The map of the model in `state`, with the cut-points and stages of `before`.

        Raises:
            PartitionError: the model cannot be cut there in this state, or a stage would need what it does not hold.
        """
        set_modes(self.skeleton, state.modes)
        for name, parameter in self.skeleton.named_parameters(remove_duplicate=False):
            parameter.requires_grad_(state.trains[before.first_name[name]])
        after = trace_again(self.skeleton, self._inputs, before)
        if len(after.sections) != len(before.sections):
            raise PartitionError(
                f"forward passes {len(after.sections) - 1} cut-points, but passed "
                f"{len(before.sections) - 1} in the dry run"
            )
        for stage in self._stages:
            self._require_held(before, after, stage)
        # Parameters that this state does not use stay in their sections, so that checkpoints keep their form.
        return replace(
            after,
            sections=before.sections,
            shared=before.shared,
            random_by_example=before.random_by_example,
            crosses_as=before.crosses_as,
        )

    def _require_held(self, before: ModelMap, after: ModelMap, stage: range) -> None:
        """Raises PartitionError when the stage would need a parameter or buffer that it was not given."""
        buffers = after.graph.buffers_used
        held = before.parameters_held(stage) | before.buffers_read(buffers, stage)
        needed = after.parameters_used(stage) | after.buffers_read(buffers, stage)
        if missing := sorted(needed - held):
            raise PartitionError(
                f"forward now uses {missing[0]} in sections {stage.start} to {stage.stop - 1}, whose stage does not "
                "hold it, because forward did not use it there when the model was wrapped"
            )
