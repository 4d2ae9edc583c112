"""The types that autocast gives on accelerators, for a dry run on the CPU.

Autocast has a list of operators for each kind of device. Those of CUDA, ROCm and XPU are one list, and the CPU's is
another: `layer_norm` after `linear` is fp32 on CUDA and bf16 on the CPU. A dry run on fake CPU tensors must see the
types of the device that will train, since stages receive what the dry run says. So for its duration the CPU's autocast
gets the accelerators' rules. Which operators have a rule there comes from torch itself; only the two shorter kinds of
rules are named here, and a test compares all of them with what torch does on fake CUDA tensors.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

__all__ = ["accelerator_autocast", "list_rules"]

_LOWER = frozenset(
    [
        "_convolution",
        "_convolution.deprecated",
        "_scaled_dot_product_flash_attention",
        "_thnn_fused_gru_cell",
        "_thnn_fused_lstm_cell",
        "addbmm",
        "addmm",
        "addmv",
        "addr",
        "baddbmm",
        "bmm",
        "chain_matmul",
        "conv1d",
        "conv2d",
        "conv3d",
        "conv_tbc",
        "conv_transpose1d",
        "conv_transpose2d.input",
        "conv_transpose3d.input",
        "convolution",
        "cudnn_convolution",
        "cudnn_convolution_transpose",
        "einsum",
        "gru_cell",
        "linalg_multi_dot",
        "linalg_vecdot",
        "linear",
        "lstm_cell",
        "matmul",
        "mm",
        "mv",
        "prelu",
        "rnn_relu_cell",
        "rnn_tanh_cell",
        "scaled_dot_product_attention",
    ]
)
"""Operators that compute in half precision."""

_WIDEST = frozenset(
    [
        "addcdiv",
        "addcmul",
        "atan2",
        "bilinear",
        "cross",
        "dot",
        "grid_sampler",
        "index_put",
        "scatter_add",
        "tensordot",
        "vdot",
    ]
)
"""Operators that compute in the widest type among their arguments."""

_REFUSED = frozenset({"binary_cross_entropy"})
"""Operators that raise under autocast on an accelerator. The dry run lets them pass, and the first step raises."""

Arguments = tuple[Any, ...]
Options = dict[str, Any]
Rule = Callable[[Any, Arguments, Options, torch.dtype], Any]
"""Calls an operator with arguments and options, whose half precision is the given type."""


@contextmanager
def accelerator_autocast(kind: str, dtype: torch.dtype) -> Iterator[None]:
    """Autocast to `dtype` for tensors on the CPU, in the block, by the rules of accelerators.

    The rules of the CPU are replaced in the whole process, so no other thread may use autocast meanwhile.

    `kind`: of the accelerator, such as "cuda". Code in the block may name it to switch autocast off for a while, or it
    may name the kind of its tensors, "cpu".
    """
    with torch.library._scoped_library("aten", "IMPL") as library, _switched_on(kind, dtype):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that kernels are replaced, which is what is wanted
            for name, rule in list_rules().items():
                kernel = torch.library.fallthrough_kernel if rule is None else _make_kernel(kind, name, rule)
                library.impl(name, kernel, "AutocastCPU")
        with torch.autocast("cpu", dtype):
            yield


@contextmanager
def _switched_on(kind: str, dtype: torch.dtype) -> Iterator[None]:
    # Not by `torch.autocast`, which leaves a kind that this machine lacks switched off.
    before = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    torch.set_autocast_enabled(kind, True)
    torch.set_autocast_dtype(kind, dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled(kind, before[0])
        torch.set_autocast_dtype(kind, before[1])


def list_rules() -> dict[str, Rule | None]:
    """By operator: its rule on accelerators; None for an operator that has one on the CPU only."""
    here, there = (_registered(key) for key in ("AutocastCPU", "AutocastCUDA"))
    rules: dict[str, Rule | None] = dict.fromkeys(here - there)
    for name in there - _REFUSED:
        takes_type = any(each.name == "dtype" for each in _operator(name)._schema.arguments)
        in_float32 = _return_float32 if takes_type else _compute_in_float32
        rules[name] = _compute_lower if name in _LOWER else _compute_in_widest if name in _WIDEST else in_float32
    return rules


def _registered(key: str) -> set[str]:
    names = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return {name.removeprefix("aten::") for name in names if name.startswith("aten::")}


def _operator(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _make_kernel(kind: str, name: str, rule: Rule) -> Callable[..., Any]:
    operator = _operator(name)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        is_on, lower = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        with torch.autocast("cpu", enabled=False):
            return rule(operator, args, kwargs, lower) if is_on else operator(*args, **kwargs)

    return kernel


def _compute_lower(operator: Any, args: Arguments, kwargs: Options, lower: torch.dtype) -> Any:
    return operator(*_cast(args, lower), **_cast(kwargs, lower))


def _compute_in_float32(operator: Any, args: Arguments, kwargs: Options, lower: torch.dtype) -> Any:
    return operator(*_cast(args, torch.float32), **_cast(kwargs, torch.float32))


def _compute_in_widest(operator: Any, args: Arguments, kwargs: Options, lower: torch.dtype) -> Any:
    is_wide = any(leaf.dtype is torch.float32 for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor))
    to = torch.float32 if is_wide else lower
    return operator(*_cast(args, to), **_cast(kwargs, to))


def _return_float32(operator: Any, args: Arguments, kwargs: Options, lower: torch.dtype) -> Any:
    """The operator reads what it gets, and returns fp32 unless the caller names a type."""
    names = [each.name for each in operator._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if given.get("dtype") is None and _is_cast(args[0]):
        return operator(**{**given, "dtype": torch.float32})
    return operator(*args, **kwargs)


def _cast(value: Any, to: torch.dtype) -> Any:
    return tree_map(lambda leaf: leaf.to(to) if _is_cast(leaf) else leaf, value)


def _is_cast(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype is not torch.float64
