"""Parameters that are special in more than their values: by class, or by memory shared in another layout.

A stage has a copy of each parameter. Parameters whose copies would not behave like the original are refused by name.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy

from varuna.diagnostics.user_code import definition_place
from varuna.partition.errors import PartitionError

__all__ = ["fake_class_of", "parameter_like", "refuse_late_hooks", "refuse_special_parameters"]

_OF_EVERY_CLASS = frozenset(
    {*vars(type("Plain", (), {})), "__annotations__", "__firstlineno__", "__init__", "__new__", "__parameters__"}
    | {"__orig_bases__", "__qualname__", "__repr__", "__slots__", "__static_attributes__", "__deepcopy__"}
    | {"__reduce__", "__reduce_ex__", "__init_subclass__", "__class_getitem__", "__abstractmethods__", "_abc_impl"}
)
"""Names that a class may define without changing how a parameter computes or moves."""


def parameter_like(original: nn.Parameter, values: Tensor, *, requires_grad: bool) -> nn.Parameter:
    """A parameter over `values` with the class and the attributes of `original`."""
    made: nn.Parameter
    if type(original) is nn.Parameter:
        made = nn.Parameter(values, requires_grad=requires_grad)
    else:
        made = torch.Tensor._make_subclass(type(original), values, requires_grad)
    made.__dict__.update(original.__dict__)
    return made


def fake_class_of(original: nn.Parameter) -> type[FakeTensor]:
    """The class of the fake tensor for `original` in the dry run, which has the same methods."""
    own = type(original)
    return FakeTensor if own is nn.Parameter else type(f"Fake{own.__name__}", (FakeTensor, own), {})


def refuse_special_parameters(model: nn.Module, first_names: Mapping[str, str]) -> None:
    """Raises PartitionError, by name, for parameters and buffers whose copies would silently behave differently.

    `first_names`: the first name of every parameter; tied parameters have one in common.
    """
    for name, parameter in model.named_parameters():
        if not is_lazy(parameter):  # lazy parameters have a message of their own
            _refuse_class(f"parameter {name}", parameter, nn.Parameter)
            refuse_late_hooks(name, parameter)
    for name, buffer in model.named_buffers():
        if not is_lazy(buffer):
            _refuse_class(f"buffer {name}", buffer, Tensor)
    _refuse_other_layouts(model, first_names)


def _refuse_class(what: str, tensor: Tensor, plain: type[Tensor]) -> None:
    kind = type(tensor)
    own_ways = [
        name
        for base in kind.__mro__[: _position(kind, plain)]
        for name in vars(base)
        if hasattr(plain, name) and name not in _OF_EVERY_CLASS
    ]
    if isinstance(tensor, plain) and plain in kind.__mro__ and not own_ways:
        return
    ways = f" that has its own {', '.join(dict.fromkeys(own_ways))}" if own_ways else ""
    raise PartitionError(
        f"{what} is a {kind.__module__}.{kind.__name__}{ways}: a stage would have a plain tensor in its place. Keep "
        "what it is made of (quantised values and their scales, say) as plain parameters and buffers, and compute the "
        "weight from them in forward"
    )


def _position(kind: type, plain: type) -> int:
    """How many classes come before the plain one; torch.Tensor ends the search for tensors that are no parameters."""
    order = kind.__mro__
    return order.index(plain) if plain in order else order.index(Tensor)


def refuse_late_hooks(name: str, parameter: nn.Parameter) -> None:
    """Raises PartitionError when the parameter has a post-accumulate-grad hook of the user's."""
    hooks = parameter._post_accumulate_grad_hooks or {}
    for hook in hooks.values():
        if str(getattr(getattr(hook, "func", hook), "__module__", "")).startswith("varuna."):
            continue  # Varuna's own
        raise PartitionError(
            f"{name} has a post-accumulate-grad hook ({definition_place(hook)}), which would see the gradient of one "
            "micro-batch, before the sum over replicas and clipping: change gradients with "
            "register_hook, update parameters in the optimizer, or read the averaged .grad after step()"
        )


def _refuse_other_layouts(model: nn.Module, first_names: Mapping[str, str]) -> None:
    """Refuse tensors that share memory in different layouts: one weight in plain PyTorch, but two in stages."""
    by_memory: dict[int, dict[str, tuple[str, Tensor]]] = defaultdict(dict)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not is_lazy(parameter) and first_names[name] == name:
            by_memory[parameter.untyped_storage()._cdata][name] = f"parameter {name}", parameter
    for name, buffer in model.named_buffers():
        if not is_lazy(buffer) and buffer.layout is torch.strided and buffer.untyped_storage()._cdata in by_memory:
            by_memory[buffer.untyped_storage()._cdata][name] = f"buffer {name}", buffer
    for tensors in by_memory.values():
        named = list(tensors.items())
        for number, (name, (_, one)) in enumerate(named):
            for _, (what, other) in named[number + 1 :]:
                if isinstance(one, nn.Parameter) and _overlap(one, other):
                    raise PartitionError(
                        f"{name} and {what} share memory, but not as one tensor: they would be trained separately. "
                        f"Keep one of them and compute the other from it in forward: {name}.t(), a slice of it, ..."
                    )


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors in one storage have a byte in common."""
    (start, end), (other_start, other_end) = _range(one), _range(other)
    first, last = max(start, other_start), min(end, other_end)
    if first >= last:
        return False
    touched = torch.zeros(max(end, other_end) - min(start, other_start), dtype=torch.bool)
    offset = min(start, other_start)
    _bytes_of(one, touched, offset).fill_(True)
    return bool(_bytes_of(other, touched, offset).any())


def _range(tensor: Tensor) -> tuple[int, int]:
    """First byte and the one after the last, in the storage."""
    if tensor.numel() == 0:
        return 0, 0
    length = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset() * tensor.element_size())
    return start, start + int(length) * tensor.element_size()


def _bytes_of(tensor: Tensor, touched: Tensor, offset: int) -> Tensor:
    """The bytes of `tensor` as a view of `touched`, which begins with byte `offset` of the storage."""
    size = tensor.element_size()
    strides = [step * size for step in tensor.stride()]
    return touched.as_strided((*tensor.shape, size), (*strides, 1), tensor.storage_offset() * size - offset)
