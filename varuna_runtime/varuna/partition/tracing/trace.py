"""Tracing a model: dry runs of the user's own forward on fake tensors, with two batch sizes.

A model without cut-points runs once more before that, to find where they can be placed (cutting/automatic_cuts.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from varuna.cut_point import observe_cut_points
from varuna.partition.cutting.automatic_cuts import choose_cuts, drop_light_sections, find_candidates
from varuna.partition.cutting.graph import Graph, ModuleCall, ObjectLeaf, TensorLeaf
from varuna.partition.cutting.model_map import ModelMap, Section, first_names, neighbours, storage_bytes
from varuna.partition.cutting.placed_cut_points import CutPlace, place_cut_points
from varuna.partition.cutting.shapes import LinearSize, TensorSpec, learn_shape, learn_size
from varuna.partition.errors import PartitionError
from varuna.partition.model_io.batch import resize_batch
from varuna.partition.model_io.loss import loss_of, weight_candidate
from varuna.partition.modules.model_copies import copy_model
from varuna.partition.modules.modes import modes_of, modes_to_train_in, set_modes
from varuna.partition.modules.special_parameters import refuse_special_parameters
from varuna.partition.tracing.choosing_modules import mark_choosing_calls
from varuna.partition.tracing.kernel_errors import explain_kernel
from varuna.partition.tracing.number_formatting import KnownValueFormatting
from varuna.partition.tracing.plain_numbers import mark_numbers
from varuna.partition.tracing.random_draws import learn_draws
from varuna.partition.tracing.recorder import Recorder
from varuna.partition.tracing.unsupported_modules import refuse_unsupported

__all__ = ["trace", "trace_again"]

_BATCHES = (2, 4)  # enough to see which sizes grow with the batch; larger ones only make real masks larger


def trace(
    model: nn.Module,
    example_inputs: Mapping[str, Any],
    *,
    shared_weights: Iterable[tuple[str, str]] = (),
    cut_points: int | None = None,
) -> ModelMap:
    """Learn the sections of `model` by running `model(**example_inputs)` on fake tensors.

    The runs use a copy without storage, so that the model stays as it is and may be on `meta`. It runs in its own
    mode (`modes_to_train_in`), and under the autocast that is active.

    Args:
        model: returns its scalar mean loss: a tensor, the first of a tuple, or `loss` of a mapping or object.
        example_inputs: any number of examples (at least one); the batch is the first dimension.
        shared_weights: pairs of names of parameters to keep equal. Parameters that share memory need not be given.
        cut_points: how many to find in a model that has none of its own; None: as many as its structure suggests.

    Raises:
        PartitionError: the model cannot be cut as it stands; the message says where and what to change.
        ValueError: `cut_points` is negative, or given for a model that has its own.
    """
    if cut_points is not None and cut_points < 0:
        raise ValueError(f"cut_points={cut_points}: give the number of cut-points to find, or leave it out")
    refuse_unsupported(model)
    names, kept = first_names(model.named_parameters(remove_duplicate=False), shared_weights)
    refuse_special_parameters(model, names)
    dry_runs = _DryRunner(model, example_inputs, names, kept, modes_to_train_in(model))
    plain = dry_runs.run_forward(_BATCHES[0], ())
    _require_gradient(plain, kept)
    if plain.cuts:
        if cut_points is not None:
            raise ValueError(
                f"cut_points={cut_points}, but the model passes {len(plain.cuts)} CutPoints of its own; leave it out, "
                "or take them out of the model"
            )
        return dry_runs.make_map((), plain)
    return _cut_automatically(dry_runs, plain, cut_points)


def _require_gradient(graph: Graph, parameters: Mapping[str, Tensor]) -> None:
    trained = [name for name, parameter in parameters.items() if parameter.requires_grad]
    if trained and not graph.values[graph.loss].requires_grad:
        raise PartitionError(
            f"the loss depends on no parameter that trains, so no step would change {trained[0]}: compute the loss "
            "from it, and neither under torch.no_grad() nor from detach(). To evaluate only, freeze all parameters: "
            "model.requires_grad_(False)"
        )


def trace_again(model: nn.Module, example_inputs: Mapping[str, Any], before: ModelMap) -> ModelMap:
    """The map of a model whose modes or `requires_grad` have changed since `before`; the cut-points stay.

    `model` runs in exactly the mode that it is in. Parameters are tied as in `before`: they may have lost their memory.

    Raises:
        PartitionError: the model cannot be cut there any longer.
    """
    kept = {name: x for name, x in model.named_parameters(remove_duplicate=False) if before.first_name[name] == name}
    return _DryRunner(model, example_inputs, before.first_name, kept, modes_of(model)).make_map(before.cut_places)


def _cut_automatically(dry_runs: _DryRunner, plain: Graph, wanted: int | None) -> ModelMap:
    """Cut at the ends of blocks: of all outermost ones, or of as many blocks as wanted."""
    candidates = find_candidates(dry_runs.model, plain, wanted) if wanted != 0 else ()
    refused: list[str] = []
    chosen = False
    while candidates:
        model_map = dry_runs.make_map(candidates)
        unusable = _unusable(model_map)
        refused += unusable.values()
        keep = [cut for cut in range(1, len(candidates) + 1) if cut not in unusable]
        if not unusable and not chosen and (wanted is None or wanted <= len(keep)):
            keep = _most_alike(model_map, wanted)
            chosen = True
        if len(keep) == len(candidates):
            break
        candidates = tuple(candidates[cut - 1] for cut in keep)
    if wanted is not None and len(candidates) < wanted:
        raise _too_few(len(candidates), wanted, refused)
    return replace(model_map if candidates else dry_runs.make_map((), plain), refused=tuple(refused))


def _unusable(model_map: ModelMap) -> dict[int, str]:
    """By cut-point at which a stage cannot end: the reason."""
    reasons = {}
    last = len(model_map.sections) - 1
    for cut, place in enumerate(model_map.cut_places, start=1):
        if not model_map.sections[cut - 1].parameters or (cut == last and not model_map.sections[cut].parameters):
            reasons[cut] = f"after {place.path}: a section beside it would have no parameters"
            continue
        try:
            model_map.find_boundary(cut)
        except PartitionError as error:
            reasons[cut] = f"after {place.path}: {error}"
    return reasons


def _most_alike(model_map: ModelMap, wanted: int | None) -> list[int]:
    """The cut-points to keep, so that all sections are about the same amount of work."""
    costs = model_map.section_costs()
    if wanted is None:
        return drop_light_sections(costs)
    sizes = [
        sum(b.bytes_for(model_map.graph.batch) for b in model_map.find_boundary(cut)) for cut in range(1, len(costs))
    ]
    return choose_cuts(costs, sizes, wanted)


def _too_few(found: int, wanted: int, refused: Sequence[str]) -> PartitionError:
    why = f" These cuts are not possible: {'; '.join(refused)}" if refused else ""
    return PartitionError(
        f"cut_points={wanted}, but the model can be cut behind {found} of its repeated blocks only (members of an "
        f"nn.ModuleList or nn.Sequential, each called once); ask for fewer, or place CutPoints yourself.{why}"
    )


@dataclass(frozen=True)
class _DryRunner:
    """Dry runs of one model."""

    model: nn.Module
    inputs: Mapping[str, Any]
    first_names: dict[str, str]
    kept: Mapping[str, Tensor]  # by first name
    modes: Mapping[str, bool]  # by module: whether it is in training mode

    def run_forward(self, batch: int, places: Sequence[CutPlace]) -> Graph:
        graph = self._dry_run(batch, places)
        if graph.choosing:
            fewer = self._dry_run(batch, places, pick_all=False)
            mark_choosing_calls(graph, fewer, self.first_names)
        return graph

    def make_map(self, places: tuple[CutPlace, ...], one: Graph | None = None) -> ModelMap:
        """The map with cut-points at `places`. `one`: the first of the two dry runs, if it has been made."""
        one = one or self.run_forward(_BATCHES[0], places)
        two = self.run_forward(_BATCHES[1], places)
        return replace(
            _model_map(self.model, one, two, parameters=self.first_names, kept=self.kept, places=places),
            modes=self.modes,
        )

    def _dry_run(self, batch: int, places: Sequence[CutPlace], *, pick_all: bool = True) -> Graph:
        recorder = Recorder(batch, pick_all)
        hollow = _hollow_copy(self.model, recorder, self.first_names)
        set_modes(hollow, self.modes)
        return _run_hollow(hollow, recorder, self.inputs, places)


def _model_map(
    model: nn.Module,
    one: Graph,
    two: Graph,
    *,
    parameters: dict[str, str],
    kept: Mapping[str, Tensor],
    places: tuple[CutPlace, ...],
) -> ModelMap:
    _check_same_path(one, two)
    mark_numbers(one, two)
    sections, shared = _sections(model, one, kept)
    return ModelMap(
        sections=sections,
        shared=shared,
        first_name=parameters,
        parameter_bytes={name: storage_bytes(parameter) for name, parameter in kept.items()},
        graph=one,
        leaf_specs=tuple(_leaf_specs(one, two, *calls) for calls in zip(one.calls, two.calls, strict=True)),
        cut_specs=tuple(_spec(one, two, a.value, b.value) for a, b in zip(one.cuts, two.cuts, strict=True)),
        cut_places=places,
        draws=learn_draws(one, two),
    )


def _run_hollow(hollow: nn.Module, recorder: Recorder, inputs: Mapping[str, Any], places: Sequence[CutPlace]) -> Graph:
    _refuse_conversions(hollow)
    recorder.watch_calls(hollow)
    place_cut_points(hollow, places)
    batch_of = resize_batch(inputs, recorder.graph.batch)
    given, given_again = ({name: _faked(recorder, name, x) for name, x in batch_of.items()} for _ in range(2))
    formats = KnownValueFormatting(recorder.knows_value)
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), recorder, observe_cut_points(recorder), formats:
        try:
            result = hollow(**given)
            loss, beside = loss_of(result), weight_candidate(result)
        except PartitionError:
            raise
        except Exception as error:
            where = getattr(error, "__notes__", ())  # from the recorder
            if where and isinstance(error, RuntimeError):
                raise PartitionError(f"{where[0]}: {error}") from error
            explained = explain_kernel(error, recorder.running_module)
            if explained is None:
                raise
            raise explained from error
        graph = recorder.finish_run(loss, beside)
        if recorder.has_left_state and not places:  # once is enough, because it does not depend on the cut-points
            recorder.check_second_forward(lambda: loss_of(hollow(**given_again)))
        return graph


def _faked(recorder: Recorder, name: str, value: Any) -> Any:
    return tree_map(lambda leaf: recorder.fake_input(name, leaf) if isinstance(leaf, Tensor) else leaf, value)


def _hollow_copy(model: nn.Module, recorder: Recorder, parameters: Mapping[str, str]) -> nn.Module:
    """A copy of the module tree, with its attributes, whose parameters and buffers are fake. Tied ones are one."""
    fakes: dict[str, nn.Parameter] = {}
    memo: dict[int, Any] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if isinstance(parameter, nn.UninitializedParameter):
            raise PartitionError(f"parameter {name} has no shape yet (a lazy module); run the model once before Varuna")
        first = parameters[name]
        if first not in fakes:
            fakes[first] = recorder.fake_parameter(first, parameter)
        memo[id(parameter)] = fakes[first]
        recorder.forbid_original(name, parameter)
    for name, buffer in model.named_buffers():
        memo[id(buffer)] = recorder.fake_buffer(name, buffer)
        recorder.forbid_original(name, buffer)
    return copy_model(model, memo)


def _refuse_conversions(hollow: nn.Module) -> None:
    """Refuse `self.layer.to(dtype)` in forward where it changes a parameter or buffer."""

    def refusing(path: str, module: nn.Module) -> Callable[..., nn.Module]:
        def apply(convert: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                if convert(tensor) is not tensor:
                    raise PartitionError(
                        f"forward converts {path}.{name} ({tensor.dtype} on {tensor.device.type}) to another type or "
                        "device; convert the model before it is given to Varuna"
                    )
            return module

        return apply

    for path, module in hollow.named_modules():
        module.__dict__["_apply"] = refusing(path, module)


def _check_same_path(one: Graph, two: Graph) -> None:
    if len(one.cuts) != len(two.cuts):
        raise PartitionError(
            f"forward passed {len(one.cuts)} cut-points with {one.batch} examples, but {len(two.cuts)} with "
            f"{two.batch}; the number of cut-points may not depend on the batch"
        )
    for first, second in zip(one.calls, two.calls, strict=False):
        same = (first.path, first.number, len(first.leaves)) == (second.path, second.number, len(second.leaves))
        if not same:
            raise PartitionError(
                f"forward took another path with {one.batch} examples ({first.path or 'model'}) than with {two.batch} "
                f"({second.path or 'model'}); which modules run may not depend on the batch"
            )
    if len(one.calls) != len(two.calls):
        raise PartitionError(
            f"forward called {len(one.calls)} modules with {one.batch} examples and {len(two.calls)} with {two.batch}; "
            "call modules on the whole batch, not once per example"
        )


def _leaf_specs(
    one: Graph, two: Graph, first: ModuleCall, second: ModuleCall
) -> tuple[TensorSpec | LinearSize | None, ...]:
    specs: list[TensorSpec | LinearSize | None] = []
    for leaf, other in zip(first.leaves, second.leaves, strict=True):
        if isinstance(leaf, TensorLeaf) and isinstance(other, TensorLeaf):
            specs.append(_spec(one, two, leaf.value, other.value))
        elif isinstance(leaf, ObjectLeaf) and isinstance(other, ObjectLeaf) and type(leaf.value) is int:
            specs.append(learn_size((one.batch, two.batch), (leaf.value, other.value)))
        else:
            specs.append(None)
    return tuple(specs)


def _spec(one: Graph, two: Graph, first: int, second: int) -> TensorSpec:
    value, other = one.values[first], two.values[second]
    if len(value.shape) != len(other.shape):
        raise PartitionError(
            f"the tensor made at {value.place} has shape {value.shape} with {one.batch} examples and {other.shape} "
            f"with {two.batch}; the number of dimensions may not depend on the batch"
        )
    sizes = learn_shape((one.batch, two.batch), value.shape, other.shape)
    return TensorSpec(sizes, value.dtype, value.gets_gradient)


def _sections(
    model: nn.Module, graph: Graph, kept: Mapping[str, Tensor]
) -> tuple[tuple[Section, ...], dict[str, tuple[int, ...]]]:
    used = {
        value.weight: tuple(sorted(value.used_in)) for value in graph.values[: len(kept)] if value.weight is not None
    }
    parameters = neighbours(kept, used)
    buffer_uses = {name: tuple(sorted(sections)) for name, sections in graph.buffers_used.items()}
    buffers = neighbours([name for name, _ in model.named_buffers()], buffer_uses)
    modules = [_outermost_modules(graph, section) for section in range(graph.sections)]
    sections = tuple(
        Section(
            index,
            " … ".join(dict.fromkeys((modules[index][0], modules[index][-1])))
            if modules[index]
            else f"section {index}",
            modules[index],
            tuple(name for name, where in parameters.items() if index in where),
            tuple(name for name, where in buffers.items() if index in where),
        )
        for index in range(graph.sections)
    )
    return sections, {name: where for name, where in parameters.items() if len(where) > 1}


def _outermost_modules(graph: Graph, section: int) -> tuple[str, ...]:
    def inside(call: ModuleCall) -> bool:
        return call.first_section == call.last_section == section

    calls = [c for c in graph.calls[1:] if inside(c) and (c.parent == 0 or not inside(graph.calls[c.parent]))]
    return tuple(dict.fromkeys(call.path for call in calls))
