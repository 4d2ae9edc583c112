"""Initial values for tensors on `meta`, from the model's own modules: the same values in every split.

Modules initialise their tensors as if they were made on the CPU: children first, by `reset_parameters`, and in a model
of Hugging Face transformers by that model's `_init_weights` afterwards. All other tensors are on `meta` meanwhile,
where writing has no effect: other stages' parameters, those read from files, further places of tied ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from varuna.devices.accelerator import fork_generators
from varuna.partition.errors import PartitionError

__all__ = ["NameSeedingMode", "derived_seed", "initialise"]

_Slot = tuple[dict[str, Any], str]
"""A module's `_parameters` or `_buffers`, and a name in it."""


def initialise(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Give `tensors`, parameters and buffers in `module` by their first names, their initial values.

    The values depend on `torch.initial_seed()` and the names only. The global generators stay as they are.

    Raises:
        PartitionError: no module has initialised one of them completely.
    """
    if not tensors:
        return
    for tensor in tensors.values():
        _spoil(tensor)
    versions = {name: tensor._version for name, tensor in tensors.items()}
    devices = {tensor.device for tensor in tensors.values()}
    with fork_generators(devices), torch.no_grad(), _others_on_meta(module, tensors) as slots:
        seed = torch.initial_seed()
        with NameSeedingMode(tensors, seed):
            _initialise_modules(
                module, "", {id(entries) for entries, _ in slots.values()}, seed=seed, init_weights=None
            )
        for name, (entries, key) in slots.items():
            if entries[key] is not tensors[name] and isinstance(entries[key], Tensor):  # it was assigned, not filled
                tensors[name].copy_(entries[key])
    left = [name for name, tensor in tensors.items() if _is_spoilt(tensor, versions[name])]
    if left:
        raise PartitionError(
            f"{', '.join(sorted(left))}: on the meta device, and no module's reset_parameters() (or, in transformers' "
            "models, _init_weights) initialises it; give its module one, build that module on the CPU, or give Varuna "
            "weights= with the values"
        )


def _initialise_modules(
    module: nn.Module, path: str, wanted: set[int], *, seed: int, init_weights: Callable[[nn.Module], Any] | None
) -> bool:
    """Initialise `module` and the modules in it. Returns whether it holds anything to initialise."""
    if hasattr(module, "base_model_prefix"):  # a transformers PreTrainedModel, which may be inside another one
        init_weights = getattr(module, "_init_weights", init_weights)
    inside = [
        _initialise_modules(child, f"{path}.{name}" if path else name, wanted, seed=seed, init_weights=init_weights)
        for name, child in module.named_children()
    ]
    if not (any(inside) or id(module._parameters) in wanted or id(module._buffers) in wanted):
        return False
    torch.manual_seed(derived_seed(seed, path))
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if reset is not None:
        reset()
    if init_weights is not None:
        init_weights(module)
    return True


@contextmanager
def _others_on_meta(module: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[dict[str, _Slot]]:
    """Puts all parameters and buffers but `tensors` on meta in the block. Yields the places of `tensors`."""
    names = {id(tensor): name for name, tensor in tensors.items()}
    slots: dict[str, _Slot] = {}
    before: list[tuple[dict[str, Any], str, Tensor]] = []
    for part in module.modules():
        held: list[dict[str, Any]] = [part._parameters, part._buffers]
        for entries in held:
            for key, tensor in entries.items():
                if tensor is None:
                    continue
                before.append((entries, key, tensor))
                name = names.get(id(tensor))
                if name is not None and name not in slots:
                    slots[name] = (entries, key)
                else:
                    entries[key] = _on_meta(tensor)
    try:
        yield slots
    finally:
        for entries, key, tensor in before:
            entries[key] = tensor


def _on_meta(tensor: Tensor) -> Tensor:
    hollow = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return nn.Parameter(hollow, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else hollow


class NameSeedingMode(TorchFunctionMode):
    """Seeds the generators before each change in place of one of `tensors`, by its name.

    So a module that draws for tensors of several stages draws the same numbers for each of them in every split.
    """

    def __init__(self, tensors: Mapping[str, Tensor], seed: int) -> None:
        super().__init__()
        self._names = {tensor.untyped_storage().data_ptr(): name for name, tensor in tensors.items()}
        self._seed = seed

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        changed = args[0] if args else (kwargs or {}).get("tensor")
        name = getattr(func, "__name__", "")
        if name.endswith("_") and not name.endswith("__") and isinstance(changed, Tensor) and not changed.is_meta:
            known = self._names.get(changed.untyped_storage().data_ptr())
            if known is not None:
                torch.manual_seed(derived_seed(self._seed, known))
        return func(*args, **(kwargs or {}))


def derived_seed(seed: int, path: str) -> int:
    """The seed for the module or tensor named `path`."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{path}".encode()).digest()[:7], "little")


def _spoil(tensor: Tensor) -> None:
    """Fill with a value that no initialisation leaves."""
    with torch.no_grad():
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.fill_(float("nan"))
        elif tensor.dtype is not torch.bool:
            tensor.fill_(torch.iinfo(tensor.dtype).min)


def _is_spoilt(tensor: Tensor, version: int) -> bool:
    """Whether any element is still as `_spoil` left it."""
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().any())
    if tensor.dtype is torch.bool:  # every value may be an initial one
        return tensor._version == version
    return tensor.dtype is not torch.uint8 and bool((tensor == torch.iinfo(tensor.dtype).min).any())
