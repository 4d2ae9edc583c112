"""Cut-points that Varuna places at the ends of modules, as if the user had written `cut_point(block(x))`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from varuna.cut_point import CutPoint
from varuna.partition.model_io.structure import flatten_nested

__all__ = ["CutPlace", "PlacedCutPoint", "place_cut_points"]


@dataclass(frozen=True, slots=True)
class CutPlace:
    """The end of a module that is called once in a forward."""

    path: str
    leaf: int
    """The leaf of its output that passes the cut-point."""


class PlacedCutPoint(CutPoint):
    """A cut-point at a `CutPlace`."""

    def __init__(self, place: CutPlace) -> None:
        super().__init__()
        self.place = place


def place_cut_points(model: nn.Module, places: Iterable[CutPlace]) -> None:
    """Put a cut-point at each place, behind the module there.

    `model` must be a copy of the user's, because this changes it. Other replacements of its forwards come before.
    """
    modules = dict(model.named_modules())
    for place in places:
        module = modules[place.path]
        module.__dict__["forward"] = _cut_behind(module.forward, PlacedCutPoint(place))


def _cut_behind(forward: Callable[..., Any], cut_point: PlacedCutPoint) -> Callable[..., Any]:
    def cut_behind(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        if cut_point.is_identity:
            return output
        if isinstance(output, Tensor):
            return cut_point(output)
        leaves, structure = flatten_nested(output)
        leaves[cut_point.place.leaf] = cut_point(leaves[cut_point.place.leaf])
        return structure.unflatten_leaves(leaves)

    return cut_behind
