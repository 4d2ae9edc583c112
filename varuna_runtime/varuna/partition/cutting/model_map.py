"""The map of a model: its sections, their parameters and buffers, and the tensors that cross each cut-point."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from varuna.partition.cutting.cut_plan import CutPlan, can_cut, plan_cut
from varuna.partition.cutting.graph import Graph, ValueKind
from varuna.partition.cutting.placed_cut_points import CutPlace
from varuna.partition.cutting.shapes import Boundary, DrawSpec, LinearSize, TensorSpec
from varuna.partition.errors import PartitionError

__all__ = ["ModelMap", "Section", "first_names", "neighbours", "storage_bytes"]


@dataclass(frozen=True, slots=True)
class Section:
    """The code between two neighbouring cut-points.

    Names are first names: those of `named_parameters()` without duplicates, where tied memory counts as a duplicate.
    """

    index: int
    name: str
    modules: tuple[str, ...]  # the outermost ones that run wholly inside it, in order of their calls
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]


@dataclass(frozen=True)
class ModelMap:
    """The result of tracing a model. It is the same on every rank that traces the same model."""

    sections: tuple[Section, ...]
    shared: dict[str, tuple[int, ...]]  # parameters that several sections use -> those sections
    first_name: dict[str, str]  # every name of a parameter -> its first name
    parameter_bytes: dict[str, int]  # by first name
    graph: Graph = field(repr=False)
    leaf_specs: tuple[tuple[TensorSpec | LinearSize | None, ...], ...] = field(repr=False)  # by call and output leaf
    cut_specs: tuple[TensorSpec, ...] = field(repr=False)  # of cut-point c: [c - 1]
    cut_places: tuple[
        CutPlace, ...
    ] = ()  # of cut-point c: [c - 1]; empty if the model has cut-points of its own, or none
    refused: tuple[str, ...] = ()  # the reasons why ends of blocks are no cut-points
    draws: tuple[DrawSpec, ...] = ()  # of random numbers, in the order of the forward
    random_by_example: bool = True  # whether they belong to examples; else to micro-batches
    modes: Mapping[str, bool] = field(
        default_factory=dict, repr=False
    )  # by path of the module: whether it ran in training mode
    crosses_as: torch.dtype | None = None  # of fp32 tensors of a batch between stages; None: fp32

    @cached_property
    def _plans(self) -> dict[int, CutPlan]:
        return {}

    @cached_property
    def _trusts_numbers(self) -> bool:
        """Whether ghosts return numbers that may vary, because some cut cannot be made otherwise.

        For all cuts alike: so each such number is compared by a stage that computes it.
        """
        if not any(call.may_vary for call in self.graph.calls):
            return False
        cuts = range(1, len(self.sections))
        return any(
            not can_cut(self.graph, cut, trusts_numbers=False) and can_cut(self.graph, cut, trusts_numbers=True)
            for cut in cuts
        )

    def cut_plan(self, cut: int) -> CutPlan:
        """How a stage that starts with section `cut` gets the values made before it.

        Raises:
            PartitionError: a tensor crosses this cut-point that a stage behind it cannot get.
        """
        if cut not in self._plans:
            self._plans[cut] = plan_cut(self.graph, cut, trusts_numbers=self._trusts_numbers)
        return self._plans[cut]

    def find_boundary(self, cut: int) -> tuple[Boundary, ...]:
        """The tensors that cross cut-point `cut` (between sections cut-1 and cut), in the order they are sent."""
        plan = self.cut_plan(cut)
        return tuple(self._boundary(value, plan) for value in plan.transported)

    @property
    def loss_has_gradient(self) -> bool:
        """Whether the loss depends on a parameter that trains."""
        return self.graph.values[self.graph.loss].requires_grad

    def has_gradients(self, cut: int) -> bool:
        """Whether gradients come back over cut-point `cut`."""
        return any(boundary.requires_grad for boundary in self.find_boundary(cut))

    def _boundary(self, value: int, plan: CutPlan) -> Boundary:
        place = plan.places[value][0]
        spec = self.cut_specs[place.cut - 1] if place.call < 0 else self.leaf_specs[place.call][place.leaf]
        assert isinstance(spec, TensorSpec)
        boundary = boundary_of(place.name, spec)
        # One that has no batch (a loss that is summed up on the way, say) is small, and stays exact.
        if self.crosses_as is None or boundary.dtype is not torch.float32 or boundary.batch_dim is None:
            return boundary
        return replace(boundary, dtype=self.crosses_as, made_as=boundary.dtype)

    @property
    def random_by_micro_batch(self) -> tuple[str, ...]:
        """The draws that the dry run shows to depend on the size of the micro-batches: places and reasons."""
        if not self.random_by_example:
            return ("random_by_example=False",) if self.draws else ()
        return tuple(dict.fromkeys(f"{draw.place} ({draw.problem})" for draw in self.draws if draw.problem))

    def section_costs(self) -> list[float]:
        """The work of each section, in floating-point operations of a forward of the dry run's batch."""
        costs = [0.0] * len(self.sections)
        for (_, section), cost in self.graph.costs.items():
            costs[section] += cost
        return costs

    def sections_of(self, parameter: str) -> tuple[int, ...]:
        """The sections that use a parameter (by any of its names)."""
        first = self.first_name[parameter]
        return tuple(section.index for section in self.sections if first in section.parameters)

    def parameters_held(self, sections: range) -> set[str]:
        """The first names of the parameters that the stage of these sections holds."""
        return {name for section in sections for name in self.sections[section].parameters}

    def parameters_used(self, sections: range) -> set[str]:
        """The first names of the parameters that code of these sections uses."""
        return {
            value.weight
            for value in self.graph.values
            if value.kind is ValueKind.PARAMETER and value.weight is not None and not value.used_in.isdisjoint(sections)
        }

    def first_uses(self) -> dict[str, int]:
        """By first name of each parameter that the dry run uses: the first section that does."""
        return {
            value.weight: min(value.used_in)
            for value in self.graph.values
            if value.kind is ValueKind.PARAMETER and value.weight is not None and value.used_in
        }

    def buffers_read(self, names: Iterable[str], sections: range) -> set[str]:
        """Those of the buffers `names` that the forward reads in the stage of these sections."""
        used = self.graph.buffers_used
        before = self.cut_plan(sections.start).buffers if sections.start > 0 else frozenset()
        return {
            name for name in names if name in before or any(section in sections for section in used.get(name, sections))
        }

    @cached_property
    def shared_buffers(self) -> frozenset[str]:
        """The buffers that several stages may read: code of an earlier section may run again in a later one."""
        again: set[str] = set()
        for cut in range(1, len(self.sections)):
            with suppress(PartitionError):  # no stage starts there
                again |= self.cut_plan(cut).buffers
        names = {name for section in self.sections for name in section.buffers}
        return frozenset(name for name in names if name in again or len(self.graph.buffers_used.get(name, ())) != 1)

    def inputs_read(self, sections: range) -> frozenset[str] | None:
        """The model's inputs whose elements are read by the code that runs in the stage of these sections.

        None where that code looks at values, because it may read other inputs than in the dry run.
        """
        ghosts = self.cut_plan(sections.start).ghosts if sections.start > 0 else frozenset[int]()

        def runs(section: int, call: int) -> bool:
            return section < sections.stop and not self._is_hidden(call, ghosts)

        if any(runs(section, call) for _, section, call in self.graph.looked_at):
            return None
        return frozenset(
            value.input
            for value in self.graph.values
            if value.input is not None and (value.changed_in_place or any(runs(*place) for place in value.read_at))
        )

    @cached_property
    def needs_numbers(self) -> bool:
        """Whether code that some stage runs on placeholders fails where these are not numbers."""
        for cut in range(1, len(self.sections)):
            before = {call for section, call in self.graph.need_numbers if section < cut}
            with suppress(PartitionError):  # no stage starts there
                if before and not all(self._is_hidden(call, self.cut_plan(cut).ghosts) for call in before):
                    return True
        return False

    def _is_hidden(self, call: int, ghosts: frozenset[int]) -> bool:
        """Whether `call` is one of the ghosts, or inside one."""
        while call >= 0 and call not in ghosts:
            call = self.graph.calls[call].parent
        return call >= 0


def boundary_of(name: str, spec: TensorSpec) -> Boundary:
    """The boundary of a tensor with this spec.

    Raises:
        PartitionError: its size is not a multiple of the batch size in one dimension.
    """
    moving = [dim for dim, size in enumerate(spec.sizes) if size.per_example]
    if len(moving) > 1 or any(spec.sizes[dim].fixed or spec.sizes[dim].per_example < 0 for dim in moving):
        sizes = ", ".join(f"{s.fixed} + {s.per_example}·b" if s.per_example else str(s.fixed) for s in spec.sizes)
        raise PartitionError(
            f"{name} crosses a cut-point with shape ({sizes}) for a batch of b examples; only one dimension may grow "
            "with the batch, in proportion to it. Move the cut-point, or cut before the examples are mixed"
        )
    shape = tuple(-1 if size.per_example else size.fixed for size in spec.sizes)
    batch_dim = moving[0] if moving else None
    rows = spec.sizes[moving[0]].per_example if moving else 1
    return Boundary(name, shape, batch_dim, spec.dtype, spec.requires_grad, rows)


def first_names(
    named: Iterable[tuple[str, Tensor]], tied: Iterable[tuple[str, str]] = ()
) -> tuple[dict[str, str], dict[str, Tensor]]:
    """(every name -> first name, first name -> tensor), where tied tensors have one first name.

    Tied are names of the same object, tensors of the same memory, layout and type (two `nn.Parameter`s made from one
    tensor), and the pairs of names in `tied`.
    """
    named = list(named)
    first: dict[str, str] = {}
    by_memory: dict[tuple[object, ...], str] = {}
    for name, tensor in named:
        first[name] = by_memory.setdefault(_memory(tensor), name)
    for one, other in tied:
        for name in (one, other):
            if name not in first:
                raise KeyError(f"shared_weights names {name!r}, which is no parameter of the model")
        order = list(first)
        keep, drop = sorted((first[one], first[other]), key=order.index)
        first = {name: keep if known == drop else known for name, known in first.items()}
    kept = {name: tensor for name, tensor in named if first[name] == name}
    return first, kept


def _memory(tensor: Tensor) -> tuple[object, ...]:
    if isinstance(tensor, nn.UninitializedParameter) or tensor.numel() == 0:
        return (id(tensor),)
    layout = (tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)
    return (tensor.untyped_storage()._cdata, *layout)


def neighbours(names: Iterable[str], placed: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The sections of every name. An unused name goes with the name before it (or after it, at the start)."""
    result: dict[str, tuple[int, ...]] = {}
    last: tuple[int, ...] | None = None
    order = list(names)
    following = next((placed[name] for name in order if placed.get(name)), (0,))
    for name in order:
        sections = placed.get(name) or ((last or following)[-1:] if last else following[:1])
        result[name] = last = sections
    return result


def storage_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor's elements, whether or not it shares its memory."""
    return tensor.numel() * tensor.element_size() if tensor.layout == torch.strided else 0
