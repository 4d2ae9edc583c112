"""`Varuna` as a module: this stage's part of the user's model, by the user's names.

What a stage cannot do as a whole model would is refused in one line that says what to do instead.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys

from varuna.generators import global_generators_kept
from varuna.partition.initialise import SeededByName, derived_seed
from varuna.places import users_code
from varuna.stepping import refuse_clipping

__all__ = ["ModuleView", "Shown"]

_CUT = "the model is cut already: change it before Varuna(model, …)"
_PRECISION = (
    "parameters stay in the type that the model was built in: leave it in fp32 and give Varuna fp16=True or "
    "dtype=torch.bfloat16"
)
_DEVICE = "a stage stays on the device that it was built on: give Varuna device=…, or leave it to the launcher"


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What there is to see."""

    module: nn.Module
    """The user's model, or the stage's copy of its structure."""
    parameters: Mapping[str, nn.Parameter]
    """What this stage has, by first names."""
    buffers: Mapping[str, Tensor]
    device: torch.device
    seed: Callable[[], int]
    """For what `apply` draws: the same on all ranks."""


class ModuleView(nn.Module):
    """The `nn.Module` side of `Varuna`. Until `_show` is called it is an empty module."""

    _shown: Shown

    def _show(self, shown: Shown) -> None:
        self._here = {id(x): x for x in (*shown.parameters.values(), *shown.buffers.values())}
        self._modules_here = {id(module) for module in _kept(shown.module, self._here)}
        self._shown = shown

    # Looking at it

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """This stage's parameters, by their names in the user's model. Not for `clip_grad_norm_` (RuntimeError)."""
        refuse_clipping()
        for name, parameter in self._shown.module.named_parameters(prefix, recurse, remove_duplicate):
            if id(parameter) in self._here:
                yield name, parameter

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """The buffers that this stage reads, by their names in the user's model."""
        for name, buffer in self._shown.module.named_buffers(prefix, recurse, remove_duplicate):
            if id(buffer) in self._here:
                yield name, buffer

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """The user's model and its modules, without those whose parameters and buffers are all other stages'."""
        for name, module in self._shown.module.named_modules(memo, prefix, remove_duplicate):
            if id(module) in self._modules_here:
                yield name, module

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """The user's model's, without those whose parameters and buffers are all other stages'."""
        for name, module in self._shown.module.named_children():
            if id(module) in self._modules_here:
                yield name, module

    def get_submodule(self, target: str) -> nn.Module:
        return self._shown.module.get_submodule(target)

    def get_parameter(self, target: str) -> nn.Parameter:
        """That of the user's model; on `meta` when another stage has it."""
        return self._shown.module.get_parameter(target)

    def get_buffer(self, target: str) -> Tensor:
        """That of the user's model; on `meta` when other stages have it."""
        return self._shown.module.get_buffer(target)

    def __getattr__(self, name: str) -> Any:
        """What `Varuna` has no attribute for is the user's model's."""
        shown = self.__dict__.get("_shown")
        if shown is None or name.startswith("__"):
            return super().__getattr__(name)
        try:
            return getattr(shown.module, name)
        except AttributeError as error:
            if hasattr(type(shown.module), name) or error.obj is not shown.module or error.name != name:
                raise  # from inside a property of the user's
            raise AttributeError(
                f"neither Varuna nor the model in it, {type(shown.module).__name__}, has an attribute {name!r}",
                name=name,
                obj=self,
            ) from None

    def __setattr__(self, name: str, value: Any) -> None:
        """A new value for an attribute of the user's model is set there, where its forward reads it."""
        shown = self.__dict__.get("_shown")
        own = shown is None or name.startswith("_") or name in self.__dict__ or hasattr(type(self), name)
        if own:
            super().__setattr__(name, value)
        elif isinstance(value, nn.Module | nn.Parameter):
            raise self._refusal(f"{name} = {type(value).__name__}(…)", _CUT)
        else:
            setattr(shown.module, name, value)  # type: ignore[union-attr]

    def __delattr__(self, name: str) -> None:
        if name not in self.__dict__:
            raise self._refusal(f"del {name}", _CUT)
        super().__delattr__(name)

    def __dir__(self) -> Iterable[str]:
        shown = self.__dict__.get("_shown")
        own = super().__dir__()  # type: ignore[no-untyped-call]
        return sorted({*own, *(dir(shown.module) if shown is not None else ())})

    def __repr__(self) -> str:
        shown = self.__dict__.get("_shown")
        return f"{type(self).__name__}({'' if shown is None else repr(shown.module)})"

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
            f"a {type(self).__name__} cannot be {done} (at {users_code()}): it is one worker's part of a job. Save it "
            "with checkpoint(), or copy its tensors: {name: x.clone() for name, x in model.state_dict().items()}"
        )

    # Changing it

    def apply(self, fn: Callable[[nn.Module], object]) -> Self:
        """Calls `fn` for each module of this stage, children first, and for the user's model. Called by all ranks.

        Its random draws follow from the run's seed, the step and the names only, so that all replicas and shapes get
        the same values; the global generators stay as they are.
        """
        shown = self._shown
        seed = shown.seed()
        own = {**shown.parameters, **shown.buffers}
        done: set[int] = set()
        with global_generators_kept(shown.device), SeededByName(own, seed):
            for path, module in _children_first(shown.module):
                if id(module) in self._modules_here and id(module) not in done:
                    done.add(id(module))
                    torch.manual_seed(derived_seed(seed, path))
                    fn(module)
        return self

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """This stage's part of the user's model's: parameters and persistent buffers, by their names there.

        To save the whole, call `checkpoint`.
        """
        if args:  # as PyTorch still takes them
            given = (*args, *(destination, prefix, keep_vars)[len(args) :])
            destination, prefix, keep_vars = given[0], given[1], given[2]
        shown = self._shown
        state = shown.module.state_dict(destination=destination, prefix=prefix, keep_vars=True)
        elsewhere = {id(x) for x in _state_tensors(shown.module).values()} - self._here.keys()
        for name, value in list(state.items()):
            if id(value) in elsewhere:
                del state[name]
            elif isinstance(value, Tensor) and not keep_vars:
                state[name] = value.detach()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Takes this stage's tensors out of a `state_dict`: of this stage, or of the whole plain model.

        Called by all ranks with the same. Names of other stages may be there or not.

        Raises:
            RuntimeError: shapes differ; or, with `strict`, a name is unknown or one of this stage is missing.
        """
        if assign:
            raise self._refusal("load_state_dict(assign=True)", "the stage's own tensors are trained: leave it out")
        module = self._shown.module
        tensors = _state_tensors(module)
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
        if metadata is not None:  # versions of modules, by which they understand older states
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
            said = [f"lacks {_some(missing)}"] * bool(missing) + [f"has unknown {_some(unexpected)}"] * bool(unexpected)
            raise RuntimeError(
                f"the state_dict {' and '.join(said)}: give that of the same {type(module).__name__}, or strict=False"
            )
        return _IncompatibleKeys(missing, unexpected)

    # What a stage cannot do

    def _refusal(self, what: str, instead: str) -> RuntimeError:
        return RuntimeError(f"{what} at {users_code()}: {instead}")

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Does nothing when device and type are what they are; else raises RuntimeError."""
        device, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)
        if device is not None and not _same_device(torch.device(device), self._shown.device):
            raise self._refusal(f"to({device})", _DEVICE)
        if dtype is not None and any(x.dtype != dtype for x in self._floating()):
            raise self._refusal(f"to({dtype})", _PRECISION)
        return self

    def _floating(self) -> Iterator[Tensor]:
        return (x for x in self._here.values() if x.is_floating_point())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> NoReturn:
        raise self._refusal("a conversion of the model", f"{_DEVICE}; {_PRECISION}")

    def half(self) -> Self:
        return self.to(torch.float16)

    def bfloat16(self) -> Self:
        return self.to(torch.bfloat16)

    def float(self) -> Self:
        return self.to(torch.float32)

    def double(self) -> Self:
        return self.to(torch.float64)

    def type(self, dst_type: Any) -> Self:
        if not isinstance(dst_type, torch.dtype):
            raise self._refusal(f"type({dst_type})", f"{_DEVICE}; {_PRECISION}")
        return self.to(dst_type)

    def cuda(self, device: int | torch.device | None = None) -> Self:
        if isinstance(device, int):
            device = torch.device("cuda", device)
        return self.to("cuda" if device is None else device)

    def cpu(self) -> Self:
        return self.to("cpu")

    def to_empty(self, *, device: Any, recurse: bool = True) -> NoReturn:
        raise self._refusal("to_empty()", f"{_DEVICE}; a model on meta is initialised by Varuna itself")

    def share_memory(self) -> NoReturn:
        raise self._refusal("share_memory()", "each rank trains its own stage: exchange tensors with state_dict()")

    def compile(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise self._refusal("compile()", "Varuna calls the model's parts itself: leave it out")

    def add_module(self, name: str, module: nn.Module | None) -> NoReturn:
        raise self._refusal(f"add_module({name!r})", _CUT)

    def register_module(self, name: str, module: nn.Module | None) -> NoReturn:
        raise self._refusal(f"register_module({name!r})", _CUT)

    def set_submodule(self, target: str, *args: Any, **kwargs: Any) -> NoReturn:
        raise self._refusal(f"set_submodule({target!r})", _CUT)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> NoReturn:
        raise self._refusal(f"register_parameter({name!r})", _CUT)

    def register_buffer(self, name: str, *args: Any, **kwargs: Any) -> NoReturn:
        raise self._refusal(f"register_buffer({name!r})", _CUT)


def _to_the_model(name: str) -> Callable[..., Any]:
    def delegated(self: ModuleView, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._shown.module, name)(*args, **kwargs)

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
    setattr(ModuleView, _name, _to_the_model(_name))


class _WithMetadata(dict[str, Any]):
    _metadata: Any


def _kept(module: nn.Module, here: Mapping[int, Tensor]) -> Iterator[nn.Module]:
    """`module` and what is in it, without those that have tensors, and none of `here`."""
    yield module
    for child in module.children():
        tensors = [*child.parameters(), *child.buffers()]
        if not tensors or any(id(tensor) in here for tensor in tensors):
            yield from _kept(child, here)


def _children_first(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        yield from _children_first(child, f"{path}.{name}" if path else name)
    yield path, module


def _state_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Every name of a parameter or buffer."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def _same_device(one: torch.device, own: torch.device) -> bool:
    return one.type == own.type and (one.index is None or own.index is None or one.index == own.index)


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
