"""Whether an optimizer can be split over stages: whether it updates each parameter by that parameter alone.

A stage has a part of the parameters, so an optimizer that computes with several parameters at once (paper, section 5.2)
would compute with this part only. To find out, a copy of the optimizer steps small copies of some parameters, again and
again from the same start, with other values and gradients for some of them. The rest must then be updated to the same
bits, however the optimizer computes. A last run watches the operations to name the place.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import structlog
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from varuna.devices.generators import keep_global_generators
from varuna.diagnostics.error_text import first_line
from varuna.diagnostics.user_code import user_code
from varuna.optim.optimizers import find_hidden_state
from varuna.optim.reduction import stepping
from varuna.partition.tracing.in_place_writes import written_tensors
from varuna.partition.tracing.operation_calls import storage_of, tensors_in
from varuna_proto.environment import Mode, WorkerEnvironment

__all__ = ["Finding", "check_optimizer", "check_splittable", "needs_closure"]

_log = structlog.get_logger("varuna")

_MOST = 8
"""The most parameters that take part, of all groups."""
_LONGEST = 4
"""The most elements in each dimension of their copies."""
_STEPS = 2
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
"""They belong to the step. Bound methods are left out, because copying one copies the object it is bound to."""
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Finding:
    """One reason why an optimizer cannot be split over stages or copied over replicas."""

    what: str
    place: str
    """file:line, or empty if it is not known."""
    way_out: str
    matters: str
    """`stages`: with P > 1; `replicas`: with more than one rank; `unknown`: it could not be checked."""

    def __str__(self) -> str:
        return f"{self.what}{f' (at {self.place})' if self.place else ''}: {self.way_out}"


_CLOSURE = (
    "{name} evaluates the loss several times in one step, through a closure, which a pipeline cannot provide: use an "
    "optimizer whose step() needs only gradients"
)
_NORM = (
    "a stage would compute with its own parameters only. Take the norm of the whole model's gradient from "
    "varuna.optim.global_gradient_norm(parameters), clip with step(inputs, clip_grad_max_norm=…), or leave the model "
    "whole (cut_points=0)"
)
_RANDOM = (
    "the stages and replicas would draw other numbers than one process does, and tied parameters would drift apart. "
    "Draw from a torch.Generator that you seed for each parameter and step"
)


def check_optimizer(optimizer: Optimizer) -> list[Finding]:
    """Finds obstacles in some milliseconds. The optimizer and its parameters do not change."""
    name = type(optimizer).__name__
    if needs_closure(optimizer):
        return [Finding(f"{name}.step needs a closure", "", _CLOSURE.format(name=name), "replicas")]
    try:
        with keep_global_generators(_CPU), stepping(1.0):
            trial = _StepTrial(optimizer)
            mixed = trial.mixes_parameters()
            place_of_mixing, place_of_draw = trial.find_places() if mixed or trial.drew else ("", "")
    except Exception as error:  # an unknown optimizer may raise anything on copies
        return [
            Finding(
                f"{name} could not be checked ({type(error).__name__}: {first_line(error)})",
                "",
                "make sure that it updates each parameter by that parameter alone, or leave the model whole "
                "(cut_points=0)",
                "unknown",
            )
        ]
    findings = []
    if mixed:
        findings.append(
            Finding(f"{name} updates a parameter by the values of others", place_of_mixing, _NORM, "stages")
        )
    if trial.drew:
        findings.append(Finding(f"{name} draws from torch's generator", place_of_draw, _RANDOM, "replicas"))
    return findings


def check_splittable(optimizer: Optimizer, environment: WorkerEnvironment, sections: int) -> None:
    """Raises ValueError for an optimizer that would train something else in some shape that the job may get, or after a
    restart.

    `sections`: the model's number. In a lone process every optimizer is right.
    """
    if needs_closure(optimizer):
        raise ValueError(_CLOSURE.format(name=type(optimizer).__name__))
    may_restart = bool(environment.agent_socket or environment.checkpoint_url)
    if may_restart and (hidden := find_hidden_state(optimizer)):
        raise ValueError(hidden)
    open_shape = environment.mode is Mode.CALIBRATE or environment.shape_is_open
    matters = {
        "stages": environment.plan.p > 1 or (open_shape and sections > 1),
        "replicas": environment.world_size > 1 or open_shape,
        "unknown": False,
    }
    for finding in check_optimizer(optimizer) if matters["replicas"] else ():
        if matters[finding.matters]:
            raise ValueError(str(finding))
        if finding.matters == "unknown":
            _log.warning(str(finding))


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether `step()` requires a closure, as in LBFGS, which evaluates the loss several times a step."""
    parameter = inspect.signature(type(optimizer).step).parameters.get("closure")
    return parameter is not None and parameter.default is inspect.Parameter.empty


class _StepTrial:
    """Runs steps of the optimizer on copies, always from the same start."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._kept = _select_parameters(optimizer)
        generator = torch.Generator().manual_seed(0)

        def draw(like: Tensor, scale: float) -> Tensor:
            shape = [min(size, _LONGEST) for size in like.shape]
            return (torch.randn(shape, generator=generator) * scale).to(like.dtype)

        # A pair each: the first value, and the changed value.
        self._values = [(draw(p, 1.0), draw(p, 30.0)) for p in self._kept]
        self._gradients = [[(draw(p, 1.0), draw(p, 1000.0)) for p in self._kept] for _ in range(_STEPS)]
        self.drew = False

    def mixes_parameters(self) -> bool:
        """Whether any parameter's update depends on another parameter."""
        count = len(self._kept)
        usual = self._run(set())
        for bit in range(max(1, (count - 1).bit_length())):  # the numbers of any two parameters differ in some bit
            for value in (0, 1):
                changed = {number for number in range(count) if (number >> bit) & 1 == value}
                now = self._run(changed)
                if not all(_same(usual[n], now[n]) for n in range(count) if n not in changed):
                    return True
        return False

    def find_places(self) -> tuple[str, str]:
        """The places where parameters are first mixed, and where random numbers are first drawn."""
        watch = _MixingMode()
        self._run(set(), watch)
        return watch.mixes_at, watch.draws_at

    def _run(self, changed: set[int], watch: _MixingMode | None = None) -> list[Tensor]:
        """The parameters after some steps."""
        parameters = [nn.Parameter(pair[n in changed].clone()) for n, pair in enumerate(self._values)]
        twin = _copy_optimizer(self._optimizer, dict(zip(map(id, self._kept), parameters, strict=True)))
        torch.default_generator.manual_seed(0)
        before = torch.default_generator.get_state()
        for gradients in self._gradients:
            for n, parameter in enumerate(parameters):
                parameter.grad = gradients[n][n in changed].clone()
            if watch is None:
                type(twin).step(twin)
            else:
                watch.add_parameters(parameters, twin.state)
                with watch:
                    type(twin).step(twin)
        self.drew |= not torch.equal(before, torch.default_generator.get_state())
        return [parameter.detach() for parameter in parameters]


def _select_parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    """Some parameters of every group that has any, at most `_MOST`, and two of a group that has two."""
    groups = [[p for p in group["params"] if p.requires_grad] for group in optimizer.param_groups]
    groups = [group for group in groups if group]
    each = max(2, _MOST // max(1, len(groups)))
    return [parameter for group in groups for parameter in group[:each]][: max(_MOST, len(groups))]


def _copy_optimizer(optimizer: Optimizer, copies: Mapping[int, nn.Parameter]) -> Optimizer:
    """A copy that steps `copies` (by the id of the original) in place of the originals, and no other parameters.

    The state of a parameter is cut to the size of its copy, and on the host, as that is.
    """
    memo = _list_copies(optimizer, copies)
    # Not through deepcopy of the optimizer, which copies only its groups and state.
    twin: Optimizer = object.__new__(type(optimizer))
    memo[id(optimizer)] = twin
    for name, value in optimizer.__dict__.items():
        if name in _HOOKS:
            twin.__dict__[name] = type(value)((key, hook) for key, hook in value.items() if inspect.isfunction(hook))
        elif name not in ("step", "state"):  # schedulers wrap the step, for the original
            twin.__dict__[name] = copy.deepcopy(value, memo)
    for group in twin.param_groups:
        group["params"] = [p for p in group["params"] if p is not None]
        if "capturable" in group:  # of devices only; it changes how, and not what is computed
            group["capturable"] = False
    # Only of these parameters: that of all is most of the memory of a model in training.
    kept = {key: value for key, value in optimizer.state.items() if id(key) in copies or not isinstance(key, Tensor)}
    twin.state = type(optimizer.state)(getattr(optimizer.state, "default_factory", None), copy.deepcopy(kept, memo))
    return twin


def _list_copies(optimizer: Optimizer, copies: Mapping[int, nn.Parameter]) -> dict[int, Any]:
    """What takes the place of parameters, and of tensors in groups and states, in a copy, by the original's id; None:
    nothing does."""
    memo: dict[int, Any] = dict(copies)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            memo.setdefault(id(parameter), None)
        for option in group.values():
            if isinstance(option, Tensor):
                memo[id(option)] = option.detach().to(_CPU, copy=True)
    for parameter, state in optimizer.state.items():
        for value in tree_flatten(state)[0] if id(parameter) in copies else ():
            if isinstance(value, Tensor):
                memo[id(value)] = value.detach()[(slice(_LONGEST),) * value.dim()].to(_CPU, copy=True)
    return memo


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.nan_to_num(), other.nan_to_num())


class _MixingMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not type its modes
    """Records from which parameters each tensor was computed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.mixes_at = ""
        self.draws_at = ""
        self._reads_at = ""
        self._sources: dict[int, frozenset[int]] = {}  # by storage
        self._alive: list[Tensor] = []  # so that no storage address is used twice

    def add_parameters(self, parameters: Sequence[nn.Parameter], state: Mapping[Any, Any]) -> None:
        for number, parameter in enumerate(parameters):
            own = [x for x in tree_flatten(state.get(parameter, {}))[0] if isinstance(x, Tensor) and x.dim() > 0]
            for tensor in (parameter, parameter.grad, *own):
                if tensor is not None:
                    self._set(tensor, frozenset({number}))

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        output = func(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.draws_at = self.draws_at or user_code()
        if "_foreach_" in func.name() or "_fused_" in func.name():
            self._tensor_by_tensor(args, kwargs, output)
            return output
        mixed = self._mixed(tensors_in((args, kwargs)))
        if torch.Tag.data_dependent_output in func.tags and mixed:
            self._reads_at = self._reads_at or user_code()
        if len(mixed) > 1:
            self.mixes_at = self.mixes_at or user_code()
        for tensor in (*tensors_in(output), *written_tensors(func, args, kwargs)):
            self._set(tensor, mixed)
        return output

    def _tensor_by_tensor(self, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> None:
        given = [*args, *kwargs.values()]
        lists = [x for x in given if isinstance(x, list | tuple) and x and isinstance(x[0], Tensor)]
        of_all = self._mixed([x for x in given if isinstance(x, Tensor)])
        outputs = [output] if isinstance(output, list | tuple) else []
        for tensors in zip(*lists, *outputs, strict=False):
            mixed = self._mixed(tensors) | of_all
            if len(mixed) > 1:
                self.mixes_at = self.mixes_at or user_code()
            for tensor in tensors:
                self._set(tensor, mixed)

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)  # type: ignore[no-untyped-call]
        self.mixes_at = self.mixes_at or self._reads_at  # the parameters were mixed as Python numbers

    def _mixed(self, leaves: Sequence[Any]) -> frozenset[int]:
        of = [self._sources.get(storage_of(x), frozenset()) for x in leaves if isinstance(x, Tensor)]
        return frozenset().union(*of)

    def _set(self, tensor: Tensor, of: frozenset[int]) -> None:
        self._sources[storage_of(tensor)] = of
        self._alive.append(tensor)
