"""`Varuna` as a module: this stage's part of the user's model, by the user's names."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn, Self

import structlog
import torch
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys

from varuna.devices.generators import keep_global_generators
from varuna.diagnostics.user_code import user_code
from varuna.model.fixed_module import CUT_MODEL, FixedModule, ModelSurface
from varuna.model.state_dicts import read_stage_state, tensors_by_name
from varuna.optim.script_steps import refuse_clipping
from varuna.partition.stages.initial_values import NameSeedingMode, derived_seed

__all__ = ["ModuleView"]

_log = structlog.get_logger("varuna")


class ModuleView(FixedModule):
    """The `nn.Module` side of `Varuna`; an empty module until `_set_surface` is called."""

    _warned_of_part = False
    """Whether the log has said that `state_dict` is a part of the model's."""

    def _set_surface(self, surface: ModelSurface) -> None:
        self._here = {id(x): x for x in (*surface.parameters.values(), *surface.buffers.values())}
        self._modules_here = {id(module) for module in _list_modules_here(surface.module, self._here)}
        self._surface = surface

    # Looking at it

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """This stage's parameters, by their names in the user's model. `clip_grad_norm_` of them is refused."""
        refuse_clipping()
        for name, parameter in self._surface.module.named_parameters(prefix, recurse, remove_duplicate):
            if id(parameter) in self._here:
                yield name, parameter

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """The buffers that this stage reads, by their names in the user's model."""
        for name, buffer in self._surface.module.named_buffers(prefix, recurse, remove_duplicate):
            if id(buffer) in self._here:
                yield name, buffer

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """The user's model and its modules, without modules that only other stages hold."""
        for name, module in self._surface.module.named_modules(memo, prefix, remove_duplicate):
            if id(module) in self._modules_here:
                yield name, module

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """The children of the user's model, without modules that only other stages hold."""
        for name, module in self._surface.module.named_children():
            if id(module) in self._modules_here:
                yield name, module

    def get_submodule(self, target: str) -> nn.Module:
        return self._surface.module.get_submodule(target)

    def get_parameter(self, target: str) -> nn.Parameter:
        """The parameter of the user's model; on `meta` when another stage holds it."""
        return self._surface.module.get_parameter(target)

    def get_buffer(self, target: str) -> Tensor:
        """The buffer of the user's model; on `meta` when other stages hold it."""
        return self._surface.module.get_buffer(target)

    def __getattr__(self, name: str) -> Any:
        """Attributes that `Varuna` does not have come from the user's model."""
        surface = self.__dict__.get("_surface")
        if surface is None or name.startswith("__"):
            return super().__getattr__(name)
        try:
            return getattr(surface.module, name)
        except AttributeError as error:
            if hasattr(type(surface.module), name) or error.obj is not surface.module or error.name != name:
                raise  # from inside one of the user's properties
            raise AttributeError(
                f"neither Varuna nor the model in it, {type(surface.module).__name__}, has an attribute {name!r}",
                name=name,
                obj=self,
            ) from None

    def __setattr__(self, name: str, value: Any) -> None:
        """Attributes of the user's model are set there, where its forward reads them."""
        surface = self.__dict__.get("_surface")
        own = surface is None or name.startswith("__") or name in self.__dict__ or hasattr(type(self), name)
        if own or (name.startswith("_") and not hasattr(surface.module, name)):  # type: ignore[union-attr]
            super().__setattr__(name, value)
        elif isinstance(value, nn.Module | nn.Parameter):
            raise self._refusal(f"{name} = {type(value).__name__}(…)", CUT_MODEL)
        else:
            setattr(surface.module, name, value)  # type: ignore[union-attr]

    def __delattr__(self, name: str) -> None:
        if name not in self.__dict__:
            raise self._refusal(f"del {name}", CUT_MODEL)
        super().__delattr__(name)

    def __dir__(self) -> Iterable[str]:
        surface = self.__dict__.get("_surface")
        own = super().__dir__()  # type: ignore[no-untyped-call]
        return sorted({*own, *(dir(surface.module) if surface is not None else ())})

    def __repr__(self) -> str:
        surface = self.__dict__.get("_surface")
        return f"{type(self).__name__}({'' if surface is None else repr(surface.module)})"

    def __copy__(self) -> Self:
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise TypeError(self._no_copy("copied"))

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(self._no_copy("pickled"))

    def _no_copy(self, done: str) -> str:
        return (
            f"a {type(self).__name__} cannot be {done} (at {user_code()}): it is one worker's part of a job. Save it "
            "with checkpoint(), or copy its tensors: {name: x.clone() for name, x in model.state_dict().items()}"
        )

    # Changing it

    def apply(self, fn: Callable[[nn.Module], object]) -> Self:
        """Calls `fn` for each module of this stage, children first, and for the user's model. Called by all ranks.

        Its random draws depend on the run's seed, the step and the names only, so all replicas and shapes get the same
        values. The global generators keep their state.
        """
        surface = self._surface
        seed = surface.seed()
        own = {**surface.parameters, **surface.buffers}
        done: set[int] = set()
        with keep_global_generators(surface.device), NameSeedingMode(own, seed):
            for path, module in _children_first(surface.module):
                if id(module) in self._modules_here and id(module) not in done:
                    done.add(id(module))
                    torch.manual_seed(derived_seed(seed, path))
                    fn(module)
        return self

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """This stage's part of the state of the user's model: parameters and persistent buffers, by name.

        `full_state_dict` gives the whole model, and `checkpoint` saves it. A log line warns of the first part that is
        not the whole.
        """
        if args:  # PyTorch still accepts positional arguments
            given = (*args, *(destination, prefix, keep_vars)[len(args) :])
            destination, prefix, keep_vars = given[0], given[1], given[2]
        state, left_out = read_stage_state(self._surface, destination=destination, prefix=prefix, keep_vars=keep_vars)
        if left_out and not self._warned_of_part:
            self._warned_of_part = True
            _log.warning(
                f"state_dict() at {user_code()} has this worker's stage only: {len(left_out)} tensors are in other "
                f"stages, {left_out[0]} among them. full_state_dict(), called by all ranks, gives rank 0 the whole "
                "model; checkpoint() and varuna export save it"
            )
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads this stage's tensors from a `state_dict` of this stage, or of the whole plain model.

        Called by all ranks with equal values. Names of other stages may be present or missing.

        Raises:
            RuntimeError: shapes differ; or, with `strict`, a name is unknown or one of this stage is missing.
        """
        if assign:
            raise self._refusal("load_state_dict(assign=True)", "the stage trains its own tensors: leave it out")
        module = self._surface.module
        tensors = tensors_by_name(module)
        elsewhere = {name for name, tensor in tensors.items() if id(tensor) not in self._here}
        first: dict[int, str] = {}
        second = {name for name, tensor in tensors.items() if first.setdefault(id(tensor), name) != name}
        given = {
            name: value
            for name, value in state_dict.items()
            if not (name in elsewhere and tensors[name].is_meta)
            and not (name in second and first[id(tensors[name])] in state_dict)
        }
        metadata = getattr(state_dict, "_metadata", None)
        if metadata is not None:  # module versions, which tell modules how to read older states
            given = _WithMetadata(given)
            given._metadata = metadata
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*to a meta parameter in the current module.*")
                found = module.load_state_dict(given, strict=False)
        except RuntimeError as error:
            raise RuntimeError(" ".join(str(error).split())) from error
        missing = [name for name in found.missing_keys if name not in elsewhere and name not in state_dict]
        unexpected = list(found.unexpected_keys)
        if strict and (missing or unexpected):
            faults = [f"lacks {_join_some(missing)}"] * bool(missing) + [
                f"has unknown {_join_some(unexpected)}"
            ] * bool(unexpected)
            raise RuntimeError(
                f"the state_dict {' and '.join(faults)}: give that of the same {type(module).__name__}, or strict=False"
            )
        return _IncompatibleKeys(missing, unexpected)


def _delegate_to_model(name: str) -> Callable[..., Any]:
    def delegated(self: ModuleView, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._surface.module, name)(*args, **kwargs)

    delegated.__name__ = name
    delegated.__doc__ = f"`{name}` of the user's model, as this stage has it."
    return delegated


for _name in (
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_full_backward_hook",
    "register_full_backward_pre_hook",
    "register_backward_hook",
    "register_state_dict_pre_hook",
    "register_state_dict_post_hook",
    "register_load_state_dict_pre_hook",
    "register_load_state_dict_post_hook",
):
    setattr(ModuleView, _name, _delegate_to_model(_name))


class _WithMetadata(dict[str, Any]):
    _metadata: Any


def _list_modules_here(module: nn.Module, here: Mapping[int, Tensor]) -> Iterator[nn.Module]:
    """`module` and the modules in it, without modules all of whose tensors are elsewhere."""
    yield module
    for child in module.children():
        tensors = [*child.parameters(), *child.buffers()]
        if not tensors or any(id(tensor) in here for tensor in tensors):
            yield from _list_modules_here(child, here)


def _children_first(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        yield from _children_first(child, f"{path}.{name}" if path else name)
    yield path, module


def _join_some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
